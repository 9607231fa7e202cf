# ruff: noqa: F811  fixtures are imported by their names
"""Whoever cleans one run ends nobody of another, also where that was started within it and carries its mark."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import commands
import pytest
from left import SLEEP, Made, below, cleaned, identity, keep, killed, made, of  # noqa: F401 - fixtures
from seen import until_sync

from hangguard import Limits, Retry, clean_up
from hangguard.act import _membership, leftovers
from hangguard.engines import GENERIC
from hangguard.facts import Launch
from hangguard.run_state import STATE, read_run
from hangguard.store import MARKER, RunFolder
from hangguard.supervision.announcer import Announcer
from hangguard.supervision.run import Run

WAITS = ["sh", "-c", "sleep 100 & wait; :"]
HOLDS = "import sys, time; f = open(sys.argv[1]); print(file=sys.stderr); time.sleep(100)"


class Another(Made):
    """A run that goes on: its supervisor was started from a terminal of ``within``, and has its mark."""

    def __init__(self, within, base=None):
        mark = {"HANGGUARD_RUN_ID": within.run_id}
        super().__init__(base or within.path.parent, within.keep, env=mark)
        self.supervisor, self.guardian = self.start(WAITS, env=mark), self.start(WAITS, env=mark)
        until_sync(lambda: len(below(self.supervisor)) == len(below(self.guardian)) == 1)
        self.note(supervisor=identity(self.supervisor), guardian=identity(self.guardian))

    @property
    def all(self):
        found = {process.pid for process in (self.server, self.supervisor, self.guardian)}
        return found | below(self.supervisor) | below(self.guardian)


@pytest.fixture
def ended():
    """End what a test has started that is nobody's child any more."""
    found = []
    yield found.extend
    for pid, started in found:
        with contextlib.suppress(ProcessLookupError):
            if _membership.is_alive((pid, started)):
                os.kill(pid, signal.SIGKILL)


def living(pids):
    return {pid for pid in pids if (entry := _membership.read_entry(pid)) is not None and not entry.dead}


def identities(pids):
    return {_membership.read_entry(pid).identity for pid in pids}


@pytest.mark.parametrize("known", ["beside it", "by what it has open"])
def test_a_living_run_that_carries_the_mark_of_a_dead_one_lives_on(made, tmp_path, ended, known):
    another = Another(made, None if known == "beside it" else tmp_path / "elsewhere")
    wanted = another.all
    if known != "beside it":  # only these two could be found by that
        (another.path / "lock").touch()
        for name, file in (("supervisor", MARKER), ("guardian", "lock")):
            words = [sys.executable, "-c", HOLDS, str(another.path / file)]
            process = another.start(words, env={"HANGGUARD_RUN_ID": made.run_id})
            until_sync(lambda file=file, pid=process.pid: has_open(pid, another.path / file))
            another.note(**{name: identity(process)})
            wanted.add(process.pid)
        wanted = {another.server.pid, another.state.supervisor[0], another.state.guardian[0]}
    ended(identities(wanted))
    made.note(members=(*made.state.members, *identities(wanted)))  # as a guardian would that saw them below its server
    report = cleaned(made)
    assert living(wanted) == wanted
    assert made.server.wait(5) == -signal.SIGTERM
    spared = {item.pid: item for item in of(report, "process") if item.whose == "somebody else's"}
    supervisor = spared[another.state.supervisor[0]]
    assert (supervisor.answer, supervisor.proof) == ("left", f"it is the supervisor of run {another.run_id}")
    assert report.left_behind == ()


def has_open(pid, path):
    with contextlib.suppress(OSError):
        return any(os.path.realpath(f"/proc/{pid}/fd/{name}") == str(path) for name in os.listdir(f"/proc/{pid}/fd"))


def test_who_only_has_the_numbers_of_another_run_is_no_part_of_it(made, ended):
    """Pid and start time must agree: what its state file says of a pid that was given again protects nobody."""
    member = made.start(env={"HANGGUARD_RUN_ID": made.run_id})
    another = Another(made)
    pid, started = identity(member)
    another.note(root=(pid, started + 1), members=((pid, started + 1),))
    ended(identities(another.all - {another.server.pid}))
    cleaned(made)
    assert member.wait(5) == -signal.SIGTERM
    assert another.supervisor.poll() is another.guardian.poll() is None


def test_a_program_whose_other_run_is_over_is_a_part_of_this_one(made):
    program = made.start(env={"HANGGUARD_RUN_ID": made.run_id})
    another = Made(made.path.parent, made.keep)
    another.server.kill()
    another.server.wait()
    another.note(supervisor=identity(program), stage="over")
    cleaned(made)
    assert program.wait(5) == -signal.SIGTERM


def test_who_writes_to_the_log_of_another_run_is_its_own_whoever_lives_of_it(made):
    another = Made(made.path.parent, made.keep)
    worker = another.start(stdout=another.log, env={"HANGGUARD_RUN_ID": made.run_id})
    another.note(root=None, members=())
    (another.path / STATE).write_text("{")  # nor does it matter what its state file says
    made.note(members=(*made.state.members, identity(worker)))
    report = cleaned(made)
    assert worker.poll() is another.server.poll() is None
    assert made.server.wait(5) == -signal.SIGTERM
    (item,) = [item for item in of(report, "process") if item.pid == worker.pid]
    assert item.proof == f"it writes to the log of run {another.run_id}"


def test_what_a_run_left_within_another_is_ended_and_that_one_lives_on(tmp_path, keep, ended):
    """The guardian of the outer run has adopted it, and noted it among its own members."""
    outer = Made(tmp_path / "runs", keep)
    outer.note(supervisor=identity(outer.start()), guardian=identity(outer.start()))
    # The clock of /proc counts in hundredths of a second.
    until_sync(lambda: identity(keep_one(keep))[1] > outer.state.guardian[1])
    inner = Made(tmp_path / "runs", keep)
    adopted = inner.start(env={"HANGGUARD_RUN_ID": inner.run_id})
    outer.note(members=(*outer.state.members, identity(inner.server), identity(adopted)))
    report = cleaned(inner)
    assert report.answer == "released"
    assert inner.server.wait(5) == adopted.wait(5) == -signal.SIGTERM
    assert all(_membership.is_alive(who) for who in (outer.state.supervisor, outer.state.guardian, outer.state.root))


def keep_one(keep):
    process = subprocess.Popen(SLEEP)
    keep(process)
    return process


def test_what_one_run_left_below_a_program_that_goes_on_with_another_is_ended(made):
    """Such a program is pid 1 of a container, and adopts what a dead guardian has left."""
    words = ["sh", "-c", f"HANGGUARD_RUN_ID={made.run_id} sleep 100 & wait; :"]
    program = made.start(words)
    until_sync(lambda: len(below(program)) == 1)
    (left,) = identities(below(program))
    until_sync(lambda: environment_of(left[0]).get("HANGGUARD_RUN_ID") == made.run_id)
    another = Made(made.path.parent, made.keep)
    another.note(supervisor=identity(program), guardian=identity(another.start()))
    made.note(supervisor=identity(program), stage="over")
    cleaned(made)
    assert not _membership.is_alive(left)
    assert another.server.poll() is None
    assert _membership.is_alive(another.state.guardian)


# ------------------------------------------------------------------------------------- the real thing


def test_a_real_run_within_another_has_its_own_mark_and_outlives_the_cleaning_of_that(tmp_path):
    with killed(tmp_path / "died", commands.small()) as (found, family):
        (tmp_path / "lives").mkdir()
        base = tmp_path / "lives" / "runs"
        mark = {"HANGGUARD_RUN_ID": found.run_id}
        with commands.run(tmp_path / "lives", "--run-dir", base, command=commands.small(), env=mark) as within:
            within.event("ready")
            (run_id,) = os.listdir(base)
            pid = within.event("launched")["pid"]
            assert environment_of(pid)["HANGGUARD_RUN_ID"] == run_id
            report = clean_up(found.path, really=True)
            assert not living(process.pid for process in family)
            assert report.left_behind == ()
            assert within.process.pid in {item.pid for item in report.items if item.whose == "somebody else's"}
            assert within.process.poll() is None
            within.ask()
            assert within.wait() == 0  # and its own proof says that nothing of it was missing


def environment_of(pid):
    words = os.fsdecode(Path(f"/proc/{pid}/environ").read_bytes()).split("\0")
    return dict(word.split("=", 1) for word in words if "=" in word)


# ------------------------------------------------------------------------------------------- the mark


def run_with(*, pristine, env):
    launch = Launch(argv=("x",), env=tuple(env.items()), cwd="/", url="", host="", port=0)
    folder = RunFolder(run_id="20260101-000000-aaaaaa", path=None)
    run = Run(
        launch=launch, engine=GENERIC, limits=Limits(), retry=Retry(), pristine=pristine, folder=folder,
        announcer=Announcer(()),
    )  # fmt: skip
    return run.environment(launch)


def test_the_mark_is_the_runs_own_whatever_was_inherited():
    env = run_with(pristine=False, env={"HANGGUARD_RUN_ID": "20260101-000000-bbbbbb", "SPT_NOENV": "", "A": "1"})
    assert env["HANGGUARD_RUN_ID"] == "20260101-000000-aaaaaa"
    assert (env["SPT_NOENV"], env["A"]) == ("", "1")  # what else the caller has set goes before


def test_a_pristine_server_has_no_mark_of_another_run_and_nothing_else_changes():
    env = {"A": "1", "MY_HANGGUARD_RUN_ID": "x"}
    assert run_with(pristine=True, env={"HANGGUARD_RUN_ID": "20260101-000000-bbbbbb", **env}) == env


# ----------------------------------------------------------------------------------- what is not seen


def test_without_threads_the_marks_are_unseen_and_the_look_goes_on(made, monkeypatch):
    """The kernel refuses a thread where a limit is reached (pthread_create(3), EAGAIN)."""
    marked = made.start(env={"HANGGUARD_RUN_ID": made.run_id})

    class NoReader(threading.Thread):
        def start(self):
            if self._target is leftovers._read_marks:
                raise RuntimeError("can't start new thread")
            super().start()

    monkeypatch.setattr(leftovers.threading, "Thread", NoReader)
    (now,) = leftovers.look_at_runs([read_run(str(made.path))])
    assert made.server.pid in {pid for pid, _ in now.members}
    report = cleaned(made)
    assert made.server.wait(5) == -signal.SIGTERM  # for that it needs no mark
    assert marked.poll() is None
    assert report.answer == "unknown"
    assert any("can't start new thread" in item.proof for item in report.items)
    monkeypatch.undo()
    assert cleaned(made).answer == "released"
    assert marked.wait(5) == -signal.SIGTERM
