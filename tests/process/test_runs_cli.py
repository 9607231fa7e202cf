"""``hangguard ps`` and ``hangguard clean`` after supervisor and guardian have died in the same instant."""

import json
import os
import re
import subprocess
import sys

import commands
import pytest
from faces import is_gone
from left import Made, identity, killed
from seen import PROGRAMS
from test_guardian import keep  # noqa: F401 - fixture

from hangguard.cli.app import invoke
from hangguard.observe.ports import free_port
from hangguard.run_state import STATE, read_run


@pytest.fixture
def hangguard(capsys):
    """Return a function that runs it here and returns (exit code, what it printed, what it said)."""

    def run(*words):
        capsys.readouterr()
        code = invoke([str(word) for word in words])
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        return code, printed.out, printed.err

    return run


@pytest.fixture
def listed(hangguard):
    def rows(base, *words):
        code, out, _ = hangguard("ps", "--json", "--run-dir", base, *words)
        assert code == 0
        return {row["run_id"]: row for row in json.loads(out)["runs"]}

    return rows


def files_server(folder):
    return [sys.executable, str(PROGRAMS / "files_server.py"), str(folder), "shared", "semaphore", "listens"]


def made_by(folder):
    return set(json.loads((folder / "made").read_text()).values())


@pytest.mark.parametrize("when", ["starting", "serving", "stopping"])
def test_after_both_have_died_it_is_listed_told_and_cleaned_and_nobody_else_is_touched(
    tmp_path, when, hangguard, listed
):
    base, until = tmp_path / "died" / "runs", lambda run: run.named("ready")
    command, words = commands.small(tp=2, ignore_term=when == "stopping"), []
    if when == "starting":
        folder = tmp_path / "died"
        command, words = files_server(folder), ["--url", f"http://127.0.0.1:{free_port()}"]
        until = lambda _: (folder / "made").exists()  # noqa: E731
    if when == "stopping":

        def until(run):
            if run.named("ready") and not run.named("stopping"):
                run.ask()
            return run.named("stopping")

    with (
        commands.run(tmp_path, "--run-dir", base, command=commands.small()) as beside,
        killed(tmp_path / "died", command, *words, until=until) as (found, family),
    ):
        beside.event("ready")
        assert family
        files = made_by(tmp_path / "died") if when == "starting" else set()
        rows = listed(base)
        assert {row["standing"] for row in rows.values()} == {"ready", "left behind"}
        assert set(rows[found.run_id]["members"]) == {process.pid for process in family}
        before = read_run(found.path).state

        code, out, _ = hangguard("clean", found.path)
        assert code == 0
        assert out.startswith("Would end and remove:")
        assert all(f"pid {process.pid} " in out for process in family)
        assert all(path in out for path in files)
        assert f"hangguard clean {found.path} --yes" in out
        assert not any(is_gone(process) for process in family)
        assert all(os.path.lexists(path) for path in files)
        assert read_run(found.path).state == before

        code, out, _ = hangguard("clean", "--yes", "--json", "--run-dir", base)
        report = json.loads(out)
        assert (code, report["answer"], report["left_behind"]) == (0, "released", [])
        ended = {item["pid"] for item in report["items"] if item["what"] == "process" and item["whose"] == "ours"}
        assert ended == {process.pid for process in family}
        assert all(is_gone(process) for process in family)
        assert not any(os.path.lexists(path) for path in files)

        assert set(listed(base)) == set(rows) - {found.run_id}
        assert listed(base, "--all")[found.run_id]["standing"] == "over"
        assert hangguard("clean", found.path)[0] == 0
        assert beside.process.poll() is None
        beside.ask()
        assert beside.wait() == 0  # and its own proof says that nothing of it was missing


def test_after_a_boot_nothing_of_it_is_signalled(tmp_path, keep, hangguard, listed):  # noqa: F811
    made = Made(tmp_path / "runs", keep)
    path = made.path / STATE
    path.write_text(path.read_text().replace(made.state.place.boot_id, "another-boot"))
    assert listed(tmp_path / "runs") == {}
    assert listed(tmp_path / "runs", "--all")[made.run_id]["standing"] == "over"
    code, out, _ = hangguard("clean", made.path, "--yes")
    assert code == 0
    assert "started again" in out
    assert made.server.poll() is None


def test_a_run_that_goes_on_is_refused_and_told_how_to_end_it(tmp_path, keep, hangguard):  # noqa: F811
    made = Made(tmp_path / "runs", keep)
    made.note(supervisor=identity(made.start()))
    code, out, _ = hangguard("clean", made.path, "--yes")
    assert code == 13
    assert f"hangguard stop {made.path}" in out
    assert made.server.poll() is None
    assert hangguard("clean", "--yes", "--run-dir", tmp_path / "runs")[0] == 0  # nobody asked for that one


def test_exit_codes_of_what_is_not_there_and_of_what_is_not_known(tmp_path, keep, hangguard):  # noqa: F811
    assert hangguard("clean", "20260101", "--run-dir", tmp_path)[0] == 22
    assert hangguard("clean", "--wrong")[0] == 2
    assert hangguard("ps", "too", "many")[0] == 2
    code, _, said = hangguard("ps", "--run-dir", tmp_path / "none")
    assert (code, said) == (0, "no run of hangguard goes on, and none has left anything\n")
    made = Made(tmp_path / "runs", keep)
    (made.path / STATE).write_text("{")
    code, out, _ = hangguard("clean", made.path, "--yes")
    assert code == 21
    assert f"pid {made.server.pid} writes to its log" in out
    assert made.server.poll() is None
    code, out, said = hangguard("ps", "--run-dir", tmp_path / "runs")
    assert "unreadable" in out
    assert "damaged" in said


def test_what_cannot_be_ended_is_said_and_is_12(tmp_path, keep):  # noqa: F811
    """Ended by nobody here: the signal is refused, as the kernel does where it is another user's."""
    made = Made(tmp_path / "runs", keep)
    program = (
        "import sys; from hangguard.act import _tree; _tree.send = lambda *_: False; _tree.SETTLE = 0.2\n"
        "from hangguard.act import cleanup; cleanup.GRACE = 0.2\n"
        "from hangguard.cli.app import invoke; sys.exit(invoke(sys.argv[1:]))"
    )
    file = made.file()
    try:
        words = [sys.executable, "-c", program, "clean", str(made.path), "--yes"]
        done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=100)
        assert done.returncode == 12
        assert done.stdout.startswith("LEFT BEHIND: ")
        assert f"pid {made.server.pid} (/bin/sleep 100)" in done.stdout
        assert "kept while a member lives" in done.stdout
        assert file.exists()
        assert read_run(str(made.path)).state.stage == "ready"
    finally:
        file.unlink()


def test_the_table_fits_a_terminal_of_80_columns(tmp_path, keep):  # noqa: F811
    from terminals import on_a_terminal

    made = Made(tmp_path / "runs", keep)
    made.note(engine="vllm", command=("vllm", "serve", "a/very-long-name-of-a-model" * 3), verdict="stuck", kind="idle")
    with on_a_terminal(tmp_path, 80, "ps", "--run-dir", tmp_path / "runs") as (running, read, screen):
        commands.poll(lambda: read() and running.process.poll() is not None)
        read()
    rows = [row for row in screen.rows if made.run_id in row and "left behind" in row and "to see what" not in row]
    assert len(rows) == 1
    assert re.search(rf"{made.run_id} +left behind .* {made.server.pid} +stuck \(idle\) +vllm a/", rows[0])
    assert len(rows[0]) <= 80
