# ruff: noqa: F811  fixtures are imported by their names
"""What a dead run has left goes on proof, and nothing else does. Every signal and every unlink has a bystander."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from left import SLEEP, Made, below, bystander, cleaned, identity, in_shm, is_over, keep, made, of  # noqa: F401 - fixtures
from seen import until_sync
from test_sysv import remove  # noqa: F401 - fixture

import hangguard
from hangguard import NoSuchRun, clean_up
from hangguard.act import _membership, cleaners
from hangguard.act.cleaners import CLEANERS
from hangguard.facts import Unseen
from hangguard.observe import sysv
from hangguard.observe.sysv import parse_segments
from hangguard.run_state import STATE, read_run

# ---------------------------------------------------------------------------------------- processes


@pytest.mark.parametrize("rung", ["noted", "log", "mark", "descent"])
def test_each_proof_alone_is_enough(made, rung, bystander):
    member = {
        "noted": made.start,
        "log": lambda: made.start(["setsid", "-f", "env", "-i", *SLEEP], stdout=made.log),
        "mark": lambda: made.start(env={"HANGGUARD_RUN_ID": made.run_id}),
        "descent": lambda: made.start(["sh", "-c", "env -i sleep 100; :"], env={"HANGGUARD_RUN_ID": made.run_id}),
    }[rung]()
    made.server.kill()
    made.server.wait()
    if rung == "noted":
        made.note(members=(identity(member),))
    elif rung == "log":
        member.wait()  # its child is an orphan
    elif rung == "descent":
        until_sync(lambda: len(below(member)) == 1)
    wanted = {member.pid} | below(member) if rung != "log" else writers(made)
    assert wanted
    report = cleaned(made, really=False)
    assert {item.pid for item in of(report, "process")} == wanted
    proofs = {item.proof for item in of(report, "process")}
    assert (
        proofs
        & {
            "noted": {_membership.SEEN},
            "log": {_membership.WRITES},
            "mark": {"its environment has exactly this run's HANGGUARD_RUN_ID, and it is the same user's"},
            "descent": {_membership.DESCENDS},
        }[rung]
    )
    assert cleaned(made).answer == "released"
    assert not any(_membership.read_entry(pid) and not _membership.read_entry(pid).dead for pid in wanted)


def writers(made):
    return _membership.log_writers(made.state.log_id, _membership.read_entries(), inherited=True)


def test_a_reused_pid_is_somebody_else(made, keep):
    stranger = made.start()
    pid, started = identity(stranger)
    made.note(members=(*made.state.members, (pid, started - 1)), root=(pid, started - 1))
    report = cleaned(made)
    assert stranger.pid not in {item.pid for item in report.items}
    assert stranger.poll() is None
    assert made.server.wait(5) == -signal.SIGTERM  # it writes to the log


def test_neither_whoever_cleans_nor_who_started_it_is_ended_whatever_speaks_against_them(made, tmp_path):
    """The shell from which somebody cleans may have been started by the server."""
    program = f"import hangguard; print(hangguard.clean_up({str(made.path)!r}, really=True).answer)"
    words = ["sh", "-c", f'{sys.executable} -c "$0"; echo "I live"', program]
    env = {**os.environ, "HANGGUARD_RUN_ID": made.run_id}
    done = subprocess.run(words, check=False, stdout=subprocess.PIPE, stderr=made.log, env=env, text=True, timeout=60)
    assert done.stdout.split("\n")[:2] == ["released", "I live"]
    assert made.server.wait(5) == -signal.SIGTERM


def test_another_run_that_was_started_from_a_shell_of_it_is_not_touched(made, tmp_path, keep):
    """Its supervisor has the mark of the shell; guardian and server are its own to end, and it is alive."""
    guardian = made.start(["sh", "-c", "HANGGUARD_RUN_ID=20260101-000000-aaaaaa setsid sleep 100 & wait; :"])
    until_sync(lambda: len(below(guardian)) == 1)
    (server,) = below(guardian)
    who = _membership.read_entry(server).identity
    until_sync(lambda: b"aaaaaa" in Path(f"/proc/{server}/environ").read_bytes())
    made.note(members=(*made.state.members, identity(guardian), who))
    try:
        cleaned(made)
        assert guardian.poll() is None
        assert _membership.is_alive(who)
        assert made.server.wait(5) == -signal.SIGTERM
    finally:
        os.kill(server, signal.SIGKILL)


def test_a_daemon_of_somebody_else_is_left_with_what_was_started_from_it(made, tmp_path):
    tmux = tmp_path / "tmux"
    tmux.write_bytes(Path("/bin/bash").read_bytes())
    tmux.chmod(0o755)
    daemon = made.start([str(tmux), "-c", "setsid sleep 100; :"], env={"HANGGUARD_RUN_ID": made.run_id})
    until_sync(lambda: len(below(daemon)) == 1)
    report = cleaned(made)
    (item,) = [item for item in of(report, "daemon") if item.pid == daemon.pid]
    assert (item.whose, item.answer, item.done) == ("somebody else's", "left", "left running")
    assert "a tmux server" in item.proof
    assert report.answer == "released"
    assert daemon.poll() is None
    (shell,) = below(daemon)
    assert not _membership.read_entry(shell).dead
    os.kill(shell, signal.SIGKILL)


def test_the_mark_on_a_process_of_another_user_proves_nothing(made):
    words = ["setpriv", "--reuid", "65534", "--clear-groups", *SLEEP]
    stranger = made.start(words, env={"HANGGUARD_RUN_ID": made.run_id})
    until_sync(lambda: os.stat(f"/proc/{stranger.pid}").st_uid == 65534)
    cleaned(made)
    assert stranger.poll() is None


def test_who_ignores_sigterm_is_killed_and_one_that_is_stopped_too(made):
    stubborn = made.start(["sh", "-c", "trap '' TERM; kill -STOP $$; sleep 100"], env={"HANGGUARD_RUN_ID": made.run_id})
    until_sync(lambda: _membership.read_entry(stubborn.pid).state == "T")
    report = cleaned(made)
    assert report.answer == "released"
    assert stubborn.wait(5) == -signal.SIGKILL
    assert {item.done for item in of(report, "process")} >= {"ended by SIGKILL"}


# -------------------------------------------------------------------------------- runs not to clean


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ({"boot_id": "another"}, "started again"),
        ({"boot_id": "another", "host": "elsewhere"}, "it ran on elsewhere"),
        ({"pid_namespace": "pid:[1]"}, "another pid namespace"),
        ({"user": 4711}, "a run of user 4711"),
    ],
)
def test_where_its_numbers_mean_nothing_nothing_is_touched(made, place, says):
    file = made.file()
    document = json.loads((made.path / STATE).read_text())
    document["place"].update(place)
    (made.path / STATE).write_text(json.dumps(document))
    try:
        report = cleaned(made)
        (item,) = report.items
        assert says in item.proof
        assert item.answer == ("gone" if says == "started again" else "unknown")
        assert made.server.poll() is None
        assert file.exists()
    finally:
        file.unlink()


def test_without_a_state_that_can_be_believed_nothing_is_touched_and_who_writes_to_the_log_is_named(made):
    (made.path / STATE).write_text("{")
    report = cleaned(made)
    (item,) = report.items
    assert (item.answer, report.answer) == ("unknown", "unknown")
    assert "damaged" in item.proof
    assert f"pid {made.server.pid} writes to its log" in item.done
    assert made.server.poll() is None


def test_without_a_name_all_are_cleaned_that_left_something_and_those_that_go_on_are_not(tmp_path, keep):
    base = tmp_path / "runs"
    first, second, alive, over = (Made(base, keep) for _ in range(4))
    alive.note(supervisor=identity(alive.start()))
    over.server.kill()
    over.server.wait()
    over.note(stage="over")
    report = clean_up(really=True, run_dir=base)
    assert {item.run_id for item in report.items} == {first.run_id, second.run_id, alive.run_id}
    assert report.alive == (alive.run_id,)
    assert {first.server.wait(5), second.server.wait(5)} == {-signal.SIGTERM}
    assert alive.server.poll() is None


def test_a_name_that_no_run_or_several_have_is_said(made):
    with pytest.raises(NoSuchRun, match="There is no run"):
        clean_up("no-such-run", run_dir=made.path.parent)
    Made(made.path.parent, made.keep)
    with pytest.raises(NoSuchRun, match="2 runs begin") as several:
        clean_up(made.run_id[:2], run_dir=made.path.parent)
    assert made.run_id in several.value.candidates


@pytest.mark.anyio
async def test_the_awaited_face_does_the_same(made):
    assert (await hangguard.aclean_up(made.run_id, really=True, run_dir=made.path.parent)).answer == "released"
    assert made.server.wait(5) == -signal.SIGTERM


# -------------------------------------------------------------------------------------------- files


def test_a_file_of_the_same_name_that_somebody_made_since_lives_on(made, in_shm):
    path = made.file()
    kept = path.open("rb")  # so that its inode is not free
    path.unlink()
    path.write_bytes(b"somebody else's")
    in_shm(path)
    cleaned(made)
    kept.close()
    assert path.read_bytes() == b"somebody else's"


def test_a_file_goes_in_a_dry_run_only_in_words_also_while_a_member_has_it(made, in_shm):
    path = made.file(noted=False)
    in_shm(path)
    program = f"import mmap, time; f = open({str(path)!r}, 'r+b'); m = mmap.mmap(f.fileno(), 0); time.sleep(100)"
    member = made.start([sys.executable, "-c", program], env={"HANGGUARD_RUN_ID": made.run_id})
    until_sync(lambda: path.name in Path(f"/proc/{member.pid}/maps").read_text())
    report = cleaned(made, really=False)
    (item,) = of(report, "file")
    assert (item.whose, item.answer, item.done) == ("ours", "gone", "would be removed when they have ended")
    assert f"pid {member.pid}" in item.proof
    assert path.exists()
    assert cleaned(made).answer == "released"  # it was never noted: seen before the end of the member
    assert not path.exists()


def test_nothing_in_shared_memory_is_ours_where_nobody_noted_what_was_there_before(made, in_shm):
    path = made.file()
    in_shm(path)
    made.note(root=None)
    cleaned(made)
    assert path.exists()


def test_the_name_of_a_socket_goes_and_one_that_somebody_is_bound_to_stays(made):
    with tempfile.TemporaryDirectory() as folder:
        dead, bound = Path(folder, "dead"), Path(folder, "bound")
        with socket.socket(socket.AF_UNIX) as one, socket.socket(socket.AF_UNIX) as other:
            one.bind(str(dead))
            other.bind(str(bound))
            other.listen()
            held = tuple(made.held(path, kind="socket", how="bound") for path in (dead, bound))
            made.note(files=held)
            one.close()
            report = cleaned(made)
            assert not dead.exists()
            assert bound.exists()
        assert {Path(item.name).name: item.answer for item in of(report, "socket")} == {"dead": "gone", "bound": "left"}


# ---------------------------------------------------------------------------------------- the order


def test_while_nobody_knows_whether_a_member_lives_nothing_of_theirs_is_removed(made, in_shm, monkeypatch):
    path = made.file()
    in_shm(path)

    async def broken(cleaning):
        raise RuntimeError("the ending failed in the middle")

    with monkeypatch.context() as patch:
        patch.setattr(cleaners, "_end", broken)
        report = clean_up(str(made.path), really=True)
    assert report.items[0].answer == "unknown"
    assert next((item.name, item.answer) for item in report.items if item.what == "file") == (str(path), "left")
    assert path.exists()
    assert cleaned(made).answer == "released"
    assert not path.exists()


def test_a_cleaner_that_fails_keeps_no_other_from_its_turn_and_is_said(made, caplog):
    async def broken(cleaning):
        raise RuntimeError("no")

    report = clean_up(str(made.path), really=True, cleaners=(broken, *CLEANERS))
    assert report.answer == "unknown"
    assert report.items[0].proof == "RuntimeError: no"
    assert made.server.wait(5) == -signal.SIGTERM
    assert not is_over(made)
    assert "a cleaner failed" in caplog.text


def test_what_the_state_file_says_of_the_server_that_died_is_still_there_after_the_cleaning(made):
    made.note(verdict="stuck", kind="idle")
    cleaned(made)
    state = read_run(str(made.path)).state
    assert not isinstance(state, Unseen)
    assert (state.stage, state.outcome, state.verdict, state.kind) == ("over", "cleaned up", "stuck", "idle")
    assert made.server.wait(5) == -signal.SIGTERM


def test_a_segment_that_a_member_made_is_listed_with_its_command_and_a_strangers_is_not_and_both_stay(made, remove):
    code = "import ctypes; print(ctypes.CDLL(None).shmget(0, 4096, 0o1600), flush=True); input()"
    makers = [subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) for _ in "ab"]
    (ours, theirs) = ids = [int(maker.stdout.readline()) for maker in makers]
    for id_ in ids:
        remove(id_)
    made.note(members=(*made.state.members, identity(makers[0])))
    for maker in makers:
        maker.communicate("\n")
    listed = [item for item in cleaned(made).items if item.what == "segment"]
    assert {item.name: item.done for item in listed} == {
        f"System V segment {ours}": f"left; if nobody's: ipcrm -m {ours}"
    }
    there = {one.id for one in parse_segments(Path(sysv.PATH).read_text())}
    assert {ours, theirs} <= there
