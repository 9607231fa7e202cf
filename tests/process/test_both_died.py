# ruff: noqa: F811  fixtures are imported by their names
"""Supervisor and guardian are killed in the same instant: what is left is listed, told, and cleaned."""

import json
import os
import sys

import commands
import pytest
from faces import is_gone
from left import killed
from runs_said import hangguard, listed  # noqa: F401 - fixtures
from seen import PROGRAMS

from hangguard.observe.ports import free_port
from hangguard.run_state import read_run


def files_server(folder):
    return [sys.executable, str(PROGRAMS / "files_server.py"), str(folder), "shared", "semaphore", "listens"]


def made_by(folder):
    return set(json.loads((folder / "made").read_text()).values())


@pytest.mark.parametrize("when", ["starting", "serving", "stopping"])
def test_after_both_have_died_it_is_listed_told_and_cleaned_and_nobody_else_is_touched(
    tmp_path,
    when,
    hangguard,
    listed,
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
