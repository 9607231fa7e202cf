"""``hangguard ps`` and ``hangguard clean``: what they print, and with which code they end."""

import json
import os
import re
import subprocess
import sys
import time

import commands
from left import Made, identity
from runs_said import hangguard, listed  # noqa: F401 - fixtures
from test_guardian import keep  # noqa: F401 - fixture

from hangguard.run_state import STATE, read_run


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
        "import sys; from hangguard.act import _ending, _signals\n"
        "_signals.send = lambda *_: False; _ending.SETTLE = 0.2\n"
        "from hangguard.act import cleaners; cleaners.GRACE = 0.2\n"
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


def test_only_what_runs_is_up_and_the_newest_comes_first(tmp_path, keep, hangguard):  # noqa: F811
    base = tmp_path / "runs"
    over, up = Made(base, keep), Made(base, keep)
    over.server.kill()
    over.server.wait()
    os.close(over.log)  # which the sleeper alone had beside us
    over.note(began=time.time() - 7200, members=(), outcome="it ended")
    up.note(began=time.time() - 3600)
    unreadable = base / "20200102-030405-abcdef"
    unreadable.mkdir(mode=0o700)
    code, out, _ = hangguard("ps", "--all", "--run-dir", base)
    heading, *rows = out.splitlines()
    assert code == 0
    assert [row.split()[0] for row in rows] == [up.run_id, over.run_id, unreadable.name]
    at = heading.index("up for")
    assert [row[at : at + 6].strip() for row in rows] == ["60 min", "", ""]
    assert [row["run_id"] for row in json.loads(hangguard("ps", "--all", "--json", "--run-dir", base)[1])["runs"]] == [
        up.run_id, over.run_id, unreadable.name,
    ]  # fmt: skip
