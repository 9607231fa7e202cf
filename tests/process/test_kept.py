"""``on_death="keep"``: a server outlives its supervisor, and its guardian stays: to reap, to be told, to end."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import hangguard, poll
from faces import PROGRAMS, fetch, living_of_runs, plain
from seen import until_sync
from test_detach import words_of

from hangguard import RunOver, clean_up, reattach
from hangguard.act import _membership
from hangguard.act.guardians import why_not_its_guardian
from hangguard.run_state import list_runs, read_run

pytestmark = pytest.mark.anyio


class Kept:
    """A program that keeps its server, and what it leaves."""

    def __init__(self, folder, how):
        self.folder = folder
        with (folder / "stderr").open("wb") as errors:
            command = [sys.executable, str(PROGRAMS / "keeping_user.py"), str(folder), how]
            self.process = subprocess.Popen(command, start_new_session=True, stderr=errors)
        until_sync(lambda: (folder / "ready").exists() or self.process.poll() is not None, within=60)
        (self.run,) = list_runs(folder / "runs")
        self.state = self.run.state
        self.url = self.state.url

    def kill(self):
        self.process.kill()
        self.process.wait()
        poll(lambda: not _membership.is_alive(self.state.supervisor))

    def close(self):
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(OSError):
            if _membership.is_alive(self.state.guardian):
                os.kill(self.state.guardian[0], signal.SIGTERM)
        until_sync(lambda: not living_of_runs(self.folder) and not _membership.is_alive(self.state.guardian), within=30)


@pytest.fixture
def keeping(tmp_path):
    made = []

    def make(how):
        made.append(Kept(tmp_path, how))
        return made[-1]

    yield make
    for kept in made:
        kept.close()


@pytest.mark.parametrize("how", ["raise", "leave", "interrupt"])
def test_leaving_the_block_stops_the_server_however_it_is_left(keeping, tmp_path, how):
    kept = keeping(how)
    kept.process.wait(60)
    assert living_of_runs(tmp_path) == []
    state = read_run(kept.run.path).state
    assert (state.stage, state.left_behind) == ("over", ())
    poll(lambda: not _membership.is_alive(state.guardian))
    assert not (Path(kept.run.path) / "control.sock").exists()


@pytest.mark.parametrize("how", ["sleep", "exit"])
async def test_a_server_whose_supervisor_has_died_is_asked_and_stopped_through_its_guardian(keeping, tmp_path, how):
    (tmp_path / "beside").mkdir()
    async with plain(tmp_path / "beside") as beside:
        kept = keeping(how)
        kept.kill()
        assert fetch(f"{kept.url}/health") == 200
        assert (Path(kept.run.path) / "control.sock").exists()  # nobody was left to remove it
        state = read_run(kept.run.path).state
        assert (state.stage, state.on_death) == ("ready", "keep")
        assert why_not_its_guardian(state.guardian, kept.run.path) == ""
        had = [file for file in state.files if file.path.startswith("/dev/shm/")]
        async with reattach(kept.run.path) as run:
            status = await run.status()
            assert (status.told_by, status.state.verdict) == ("guardian", "ready")
            assert "its supervisor is dead" in status.note
            assert (run.url, run.pid) == (kept.url, state.root[0])
            assert await run.wait("ready", timeout=20) == "ready"
            with pytest.raises(TimeoutError):
                await run.wait("exit", timeout=0.5)
            with pytest.raises(RuntimeError, match="nobody starts it again"):
                await run.restart()
            with pytest.raises(RuntimeError, match="without drain"):
                await run.stop(drain=5)
            assert fetch(f"{kept.url}/health") == 200
            stopped = await run.stop()
            assert (stopped.by, stopped.left_behind) == ("guardian", ())
        assert living_of_runs(tmp_path) == []
        assert not any(os.path.exists(file.path) for file in had)
        assert not _membership.is_alive(state.guardian)
        assert read_run(kept.run.path).state.stage == "over"
        assert fetch(beside.url) == 200
        with pytest.raises(RunOver, match="ended by its guardian"):
            async with reattach(kept.run.path):
                pass


def test_the_guardian_ends_when_the_server_ends_by_itself_and_whoever_waits_is_told(keeping):
    kept = keeping("sleep")
    kept.kill()
    with reattach(kept.run.path) as run:
        os.kill(run.pid, signal.SIGTERM)  # somebody else's doing
        assert run.wait("exit", timeout=30) == "exit"
    assert not _membership.is_alive(kept.state.guardian)
    with pytest.raises(RunOver, match="supervisor and its guardian are dead"), reattach(kept.run.path):
        pass


def test_with_both_dead_nothing_is_signalled_and_the_command_points_to_clean(keeping, tmp_path):
    kept = keeping("sleep")
    kept.kill()
    os.kill(kept.state.guardian[0], signal.SIGKILL)
    poll(lambda: not _membership.is_alive(kept.state.guardian))
    with hangguard(tmp_path, "stop", kept.run.path) as running:
        assert running.wait(60) == 12
        assert f"hangguard clean {kept.run.path}" in running.err
        assert f"process {kept.state.root[0]}" in running.err
    assert fetch(f"{kept.url}/health") == 200
    assert clean_up(str(kept.run.path), really=True).answer == "released"


def test_a_stopped_guardian_is_let_go_on_to_do_what_it_is_told(keeping, tmp_path):
    kept = keeping("sleep")
    kept.kill()
    os.kill(kept.state.guardian[0], signal.SIGSTOP)
    with hangguard(tmp_path, "stop", kept.run.path) as running:
        assert running.wait(60) == 0
        assert words_of(running.out)["stopped"] == kept.run.run_id
    assert living_of_runs(tmp_path) == []


def test_a_supervisor_that_dies_while_somebody_waits_leaves_the_wait_to_its_guardian(keeping, tmp_path):
    kept = keeping("sleep")
    with hangguard(tmp_path, "wait", kept.run.path, "--for", "exit", "--timeout", "90") as waits:
        poll(lambda: _is_waiting(kept, waits.process.pid), within=60)
        kept.kill()
        assert waits.process.poll() is None
        os.kill(kept.state.root[0], signal.SIGTERM)
        assert waits.wait(90) == 0
        assert waits.out == "exit\n"


def _is_waiting(kept, pid):
    """Whether it has a pidfd of the supervisor open: then it has asked, and waits."""
    for fd in Path(f"/proc/{pid}/fdinfo").iterdir():
        with contextlib.suppress(OSError):
            if f"Pid:\t{kept.state.supervisor[0]}\n" in fd.read_text():
                return True
    return False
