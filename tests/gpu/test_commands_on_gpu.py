"""The command line on a real NVIDIA GPU: preflight, a run in the background, its memory, and cleaning after its end.

Run with ``-m gpu``.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

PROGRAMS = Path(__file__).parent / "programs"
SERVER = [sys.executable, str(PROGRAMS / "cuda_server.py"), "--port", "{port}", "--hold-gib", "8"]
ANSWERS = ["--url", "http://127.0.0.1:{port}", "--ready-path", "/"]
HELD_MIB = 8 * 1024.0
KEPT_MIB = 300.0
"""What the driver may keep of a board's memory after its last context is gone."""


def used_mib():
    words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    out = subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout
    return float(out.splitlines()[0])


def hangguard(*words):
    """Run one command; return its exit code, and what it printed. It is kept where ``HANGGUARD_RECORD`` says."""
    command = [sys.executable, "-m", "hangguard", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    if folder := os.environ.get("HANGGUARD_RECORD"):
        with open(os.path.join(folder, "gpu-commands.txt"), "a") as out:
            out.write(f"$ hangguard {' '.join(map(str, words))}\n{done.stdout}{done.stderr}({done.returncode})\n\n")
    return done.returncode, done.stdout


def row_of(runs):
    (row,) = json.loads(hangguard("ps", "--json", "--run-dir", runs)[1])["runs"]
    return row


@pytest.fixture
def neighbour():
    """Somebody else's program with memory on the first board; it must work on to the end."""
    process = subprocess.Popen(
        [sys.executable, str(PROGRAMS / "bystander.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "up\n"
        yield process
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "worked\n"
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_preflight_sees_the_driver_and_its_boards(neighbour):
    code, out = hangguard("preflight", "--json", *ANSWERS[:2], "--", *SERVER)
    document = json.loads(out)
    assert (code, document["refused"]) == (0, False)
    about = {check["what"]: check for check in document["checks"]}
    assert str(neighbour.pid) in json.dumps(document), "who else has memory on the board is told"
    assert not [what for what, check in about.items() if check["error"]]


def test_a_run_that_lost_supervisor_and_guardian_is_listed_with_its_boards_and_cleaned(neighbour, tmp_path):
    runs, before = tmp_path / "runs", used_mib()
    assert hangguard("run", "--detach", "--run-dir", runs, *ANSWERS, "--", *SERVER)[0] == 0
    row = row_of(runs)
    members = [psutil.Process(pid) for pid in row["members"]]
    try:
        assert row["standing"] == "ready"
        assert used_mib() - before > HELD_MIB - KEPT_MIB
        assert row["gpu_bytes"] / 2**20 > HELD_MIB
        hangguard("ps", "--run-dir", runs)
        for pid in (row["supervisor"], row["guardian"]):
            os.kill(pid, signal.SIGSTOP)  # so that neither does anything about the other's end
        for pid in (row["supervisor"], row["guardian"]):
            os.kill(pid, signal.SIGKILL)
        left = row_of(runs)
        assert left["standing"] == "left behind"
        assert left["gpu_bytes"] / 2**20 > HELD_MIB
        hangguard("ps", "--run-dir", runs)
        assert used_mib() - before > HELD_MIB - KEPT_MIB, "the server lives on"
        code, _ = hangguard("clean", "--run-dir", runs)
        assert code == 0
        assert used_mib() - before > HELD_MIB - KEPT_MIB, "nothing is done without --yes"
        code, out = hangguard("clean", "--yes", "--json", "--run-dir", runs)
        report = json.loads(out)
        assert (code, report["answer"], report["left_behind"]) == (0, "released", [])
        deadline = time.monotonic() + 10
        while used_mib() - before > KEPT_MIB and time.monotonic() < deadline:
            time.sleep(0.2)
        assert used_mib() - before < KEPT_MIB
        assert neighbour.poll() is None
    finally:
        for member in members:  # none, unless something above has failed
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()


def test_a_run_in_the_background_is_stopped_with_proof_that_the_boards_are_free(neighbour, tmp_path):
    runs, before = tmp_path / "runs", used_mib()
    assert hangguard("run", "--detach", "--run-dir", runs, *ANSWERS, "--", *SERVER)[0] == 0
    row = row_of(runs)
    code, out = hangguard("stop", "--json", "--run-dir", runs, row["run_id"])
    assert code == 0
    assert (json.loads(out)["released"], json.loads(out)["left_behind"]) == ("released", [])
    assert used_mib() - before < KEPT_MIB
    assert neighbour.poll() is None
