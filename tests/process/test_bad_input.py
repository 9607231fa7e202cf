"""What people and servers get wrong, through ``supervise()``: a clear error, or a correct verdict."""

import json
import os
import re
import shutil
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest
from commands import poll, small

from hangguard import (
    BadLaunch,
    CommandNotExecutable,
    CommandNotFound,
    Exited,
    GaveUp,
    Limits,
    NotReadyInTime,
    PortInUse,
    supervise,
)
from hangguard.errors import Refused

URL = "http://127.0.0.1:9"
TRUE = "/bin/true"


@pytest.fixture
def run_dir(tmp_path):
    """Logs here can have a gigabyte: they go with the test."""
    folder = tmp_path / "runs"
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def started(run_dir, *, limits=None, **options):
    return supervise(small(**options), run_dir=run_dir, limits=limits or Limits(stop_grace=3.0))


def is_gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def only(folder, pattern):
    (found,) = folder.glob(f"*/{pattern}")
    return found


# ------------------------------------------------------------------------------------------ the command


def test_a_command_that_is_not_there(tmp_path):
    with pytest.raises(CommandNotFound, match="'no-such-program-here' was not found"):
        supervise(["no-such-program-here"], url=URL)
    with pytest.raises(CommandNotFound, match="was not found"):
        supervise([str(tmp_path / "missing")], url=URL)


def test_a_command_that_cannot_be_executed(tmp_path):
    plain = tmp_path / "plain"
    plain.write_text("#!/bin/sh\n")
    with pytest.raises(CommandNotExecutable, match="permission denied"):
        supervise([str(plain)], url=URL)
    with pytest.raises(CommandNotExecutable, match="is a directory"):
        supervise([str(tmp_path)], url=URL)


def test_a_file_that_the_kernel_cannot_execute_is_refused_when_it_is_started(tmp_path, run_dir):
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF this is no program")
    broken.chmod(0o755)
    with pytest.raises(Refused, match="broken"), supervise([str(broken)], url=URL, run_dir=run_dir):
        pass


def test_an_interpreter_that_is_not_there_is_named(tmp_path, run_dir):
    script = tmp_path / "script"
    script.write_text("#!/no/such/python\n")
    script.chmod(0o755)
    with pytest.raises(Refused, match="script"), supervise([str(script)], url=URL, run_dir=run_dir):
        pass


@pytest.mark.parametrize("command", ["", "   ", [], [""], ["", "--port", "1"]])
def test_an_empty_command(command):
    with pytest.raises(BadLaunch, match="empty"):
        supervise(command, url=URL)


def test_a_directory_to_work_in_that_is_not_there(tmp_path):
    with pytest.raises(CommandNotFound, match=r"directory .* does not exist"):
        supervise([TRUE], url=URL, cwd=tmp_path / "missing")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"command": 123}, "command is 123. It must be text, or a sequence of words"),
        ({"command": b"vllm serve"}, "command is a bytes"),
        ({"command": ["vllm", 5]}, "holds 5, which is not text"),
        ({"command": None}, "command is a NoneType"),
        ({"engine": "nonsense"}, "Known are: sglang, vllm, generic"),
        ({"url": 8000}, "url is 8000"),
        ({"url": "nowhere"}, "is no base URL"),
        ({"ready": 5}, "ready is 5. It must be a path, a callable"),
        ({"fallbacks": "never"}, "fallbacks is 'never'. It must be None, 'auto', 'any'"),
        ({"fallbacks": ["no-cuda-graph"]}, "sequence of Fallback"),
        ({"fallbacks": 7}, "fallbacks is 7"),
        ({"env": ["A=1"]}, "env is a list. It must be a mapping"),
        ({"env": {"A": 1}}, "not text"),
        ({"limits": 60}, r"limits is 60. It must be Limits\(...\)"),
        ({"retry": 3}, r"retry is 3. It must be Retry\(...\)"),
        ({"on_hang": "x"}, "on_hang is 'x'. It must be 'act' or 'report'"),
        ({"on_death": "x"}, "on_death is 'x'. It must be 'stop' or 'keep'"),
        ({"log_bytes": 1000}, "log_bytes is 1000. It must be a whole number of bytes, 1048576"),
        ({"log_bytes": "1G"}, "log_bytes is '1G'"),
        ({"log_bytes": 1e9}, "log_bytes is 1000000000.0"),
        ({"log_bytes": True}, "log_bytes is True"),
        ({"hooks": print}, "hooks is a builtin_function_or_method. It must be a sequence of callables"),
        ({"hooks": [1]}, r"hooks\[0\] is an int, and cannot be called. It must be a sequence of callables"),
        ({"hooks": (print, "x")}, r"hooks\[1\] is a str, and cannot be called"),
        ({"hooks": "x"}, "hooks is 'x'"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_once(wrong, says):
    given = {"command": [TRUE], "url": URL, **wrong}
    with pytest.raises(BadLaunch, match=says):
        supervise(given.pop("command"), **given)


@pytest.mark.parametrize("limit", [-1, -0.001, float("nan"), "soon", "10", True, [1]])
@pytest.mark.parametrize("name", ["ready_within", "patience", "stop_grace"])
def test_limits_that_are_impossible(name, limit):
    with pytest.raises(ValueError, match=rf"Limits\.{name} must be a number of seconds, zero or more"):
        Limits(**{name: limit})


def test_a_port_in_use_is_refused_and_its_holder_is_named_and_lives_on(run_dir):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(PortInUse) as refused, started(run_dir, port=port):
            pass
        assert refused.value.listener.pid == os.getpid()
        assert f"Port {port} is in use by process {os.getpid()}" in str(refused.value)
        with socket.create_connection(("127.0.0.1", port), 5):  # still there
            pass


def test_a_run_without_a_folder_goes_on_and_says_what_is_lost(tmp_path):
    (tmp_path / "taken").write_text("a file")
    told = []
    with supervise(small(), run_dir=tmp_path / "taken", hooks=[told.append]) as server:
        assert server.attempt.was_ready
    notices = [event.text for event in told if event.event == "notice"]
    assert any(str(tmp_path / "taken") in text for text in notices)
    assert any("may not outlive the machine's next start" in text for text in notices)


# ------------------------------------------------------------------------------------------- the server


def test_a_log_of_binary_garbage(run_dir):
    with started(run_dir, garbage=True) as server:
        pass
    assert any("fired up" in line for line in server.attempt.log_tail)
    assert not [line for line in server.attempt.log_tail if re.search("[\x00-\x08\x0a-\x1f\x7f-\x9f]", line)]
    assert b"\x1b]0;owned" in only(run_dir, "attempt-1.log").read_bytes()


def test_one_line_of_a_gigabyte(run_dir):
    Path("/proc/self/clear_refs").write_text("5")  # the peak of our memory starts again from here
    with started(run_dir, long_line=1 << 30) as server:
        assert only(run_dir, "attempt-1.log").stat().st_size > 1 << 30
        assert server.attempt.verdict.verdict == "ready"
    (peak,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    assert int(peak.split()[1]) < 300 * 1024


def test_300_kb_before_it_listens(run_dir):
    with started(run_dir, banner_bytes=300_000):
        assert only(run_dir, "attempt-1.log").stat().st_size > 300_000


def test_a_server_that_floods_its_log(run_dir):
    with started(run_dir, flood=True) as server:
        log = only(run_dir, "attempt-1.log")
        size, cpu, began = log.stat().st_size, time.process_time(), time.monotonic()
        poll(lambda: log.stat().st_size > size + (50 << 20))
        assert (time.process_time() - cpu) / (time.monotonic() - began) < 0.5
        assert server.sample().log.total_bytes > size


def test_the_evidence_of_a_flood_of_long_lines_is_small(run_dir):
    line = "os.urandom(4000).hex().encode() + b'\\n'"
    flood = f"import os, time\nwhile True: os.write(1, b''.join({line} for _ in range(50))); time.sleep(.02)"
    told = supervise([sys.executable, "-c", flood], url=URL, run_dir=run_dir, limits=Limits(ready_within=4.0))
    with pytest.raises(NotReadyInTime), told:
        pass
    assert only(run_dir, "attempt-1.log").stat().st_size > 10 << 20
    evidence = only(run_dir, "attempt-1.evidence.json")
    assert evidence.stat().st_size < 1 << 20
    assert json.loads(evidence.read_text())["attempt"]["verdict"]["verdict"] == "expired"


def test_exit_with_0_during_the_start(run_dir):
    with pytest.raises(GaveUp) as told, started(run_dir, exit_early=0):
        pass
    (attempt,) = told.value.history
    assert isinstance(attempt.verdict, Exited)
    assert (attempt.verdict.kind, attempt.exit_code) == ("finished", 0)
    assert "before it was ever ready" in str(told.value)
    assert attempt.release.answer == "released"


def test_a_server_that_forks_and_exits_is_followed_and_ended_with_proof(run_dir):
    with started(run_dir, fork_and_exit=True) as server:
        first = server.pid
        members = [process.pid for process in server.sample().tree.members]
        assert first not in members
        assert members
        assert not any(is_gone(pid) for pid in members)
    assert all(is_gone(pid) for pid in members)
    assert server.attempt.release.answer == "released"


def test_a_server_that_ignores_sigterm_is_killed_after_the_grace(run_dir):
    with started(run_dir, limits=Limits(stop_grace=1.0), ignore_term=True) as server:
        members = [process.pid for process in server.sample().tree.members]
        began = time.monotonic()
    assert 0.9 < time.monotonic() - began < 6.0
    assert all(is_gone(pid) for pid in members)
    assert server.attempt.release.answer == "released"
