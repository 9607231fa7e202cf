# ruff: noqa: F401, F811 - fixtures
"""A job in a tmux below the launch outlives its shell, and is then a child of the guardian: it is no member."""

import os
import signal
import subprocess
import sys

import psutil
import pytest
from seen import until_sync
from test_guardian import PROGRAMS, is_gone, keep, members, serve, soon
from test_membership import as_daemon, holder

from hangguard.act import _daemons, _membership

pytestmark = pytest.mark.anyio

JOBS = ("job", "writer", "taker")


def identity(process):
    return _membership.read_entry(process.pid).identity


def remember_all(server):
    """As a sample does: whoever is below the guardian."""
    below = psutil.Process(server.guardian_pid).children(recursive=True)
    server.remember(entry.identity for one in below if (entry := _membership.read_entry(one.pid)))


async def leave_the_shell(folder, shell, jobs, reaper):
    """Let the shell of the pane end, and see its jobs become children of the guardian."""
    with (folder / "go").open("w") as fifo:
        fifo.write("\n")
    await soon(lambda: is_gone(shell))
    await soon(lambda: {job.ppid() for job in jobs} == {reaper})


@pytest.mark.parametrize("guardian", ["lives", "is dead"])
async def test_a_job_that_has_left_a_tmux_lives_on_and_one_that_holds_something_of_ours_ends(
    serve, members, tmp_path, guardian
):
    argv = [sys.executable, str(PROGRAMS / "pane_server.py"), str(tmp_path), "double"]
    async with serve(argv=argv) as server:
        ours, apart = members("root", "double"), members("tmux", "shell", *JOBS)
        remember_all(server)
        known = server._belongings.daemons.left
        await soon(lambda: {identity(apart[name]) for name in ("tmux", "job", "taker")} <= known.keys())
        assert identity(apart["writer"]) not in known
        jobs = {name: apart[name] for name in JOBS}
        await leave_the_shell(tmp_path, apart["shell"], jobs.values(), server.guardian_pid)
        jobs["taker"].send_signal(signal.SIGUSR1)
        await soon((tmp_path / "taken").exists)
        remember_all(server)  # members by what a sample has seen
        if guardian == "is dead":
            psutil.Process(server.guardian_pid).kill()
            await soon(lambda: not server.guardian_alive)
        stopped = await server.stop(grace=0.3)
        assert stopped.survivors == ()
        assert {daemon.pid for daemon in stopped.daemons} == {apart["tmux"].pid, jobs["job"].pid}
        (why,) = (daemon.why for daemon in stopped.daemons if daemon.pid == jobs["job"].pid)
        assert why.startswith(f"belongs to pid {apart['tmux'].pid}, a tmux server")
        assert {name for name, process in {**ours, **jobs}.items() if not is_gone(process)} == {"job"}
        assert not is_gone(apart["tmux"])
    assert not is_gone(jobs["job"])


async def test_the_guardian_alone_tells_an_orphan_of_a_daemon_from_one_of_ours(serve, members, tmp_path, keep):
    argv = [sys.executable, str(PROGRAMS / "pane_server.py"), str(tmp_path), "double"]
    async with serve(argv=argv) as server:
        guardian = psutil.Process(server.guardian_pid)
        keep(guardian)
        ours, apart = members("root", "double"), members("tmux", "shell", *JOBS)
        remember_all(server)
        await soon(lambda: identity(apart["job"]) in server._belongings.daemons.left)
        await leave_the_shell(tmp_path, apart["shell"], [apart["job"]], guardian.pid)
        server._link.hang_up()  # as our death would
        await soon(lambda: all(map(is_gone, ours.values())))
        await soon(lambda: is_gone(guardian))
        assert not is_gone(apart["job"])
        assert is_gone(apart["writer"])


def test_a_daemon_that_is_ours_after_all_takes_its_orphans_no_longer_with_it_and_those_below_it_do(
    holder, as_daemon, tmp_path, keep
):
    (tmp_path / "nvidia0").touch()
    process = holder(
        f"import os, signal, subprocess; kept = []; os.chdir({str(tmp_path)!r})\n"
        "signal.signal(10, lambda *_: (kept.append(open('nvidia0')), open('taken', 'w').close()))\n"
        "kept += [subprocess.Popen(['/bin/sleep', '99'], stdout=subprocess.DEVNULL) for _ in range(2)]"
    )
    below, orphan = psutil.Process(process.pid).children()
    keep(below)
    keep(orphan)
    daemons = _daemons.Daemons(root_pid=os.getpid(), log_id=None, devices=f"{tmp_path}/nvidia\\d+")
    pids = {process.pid, below.pid, orphan.pid}
    assert daemons.spare(pids, _membership.read_entries()) == pids
    entries = _membership.read_entries()
    entries[orphan.pid].parent = os.getpid()
    assert daemons.spare(pids, entries) == pids
    process.send_signal(signal.SIGUSR1)
    until_sync((tmp_path / "taken").exists)
    assert daemons.spare(pids, entries) == {orphan.pid}
    entries[below.pid].parent = os.getpid()  # the daemon is ended, and it is not known for what it was
    assert daemons.spare(pids, entries) == {orphan.pid}
    assert set(daemons.left) == {identity(orphan)}


def test_who_was_told_of_them_spares_the_same_and_nobody_else(holder, as_daemon, keep):
    stranger = subprocess.Popen(["/bin/sleep", "99"])
    keep(stranger)
    process = holder(
        "import subprocess; child = subprocess.Popen(['/bin/sleep', '99'], stdout=subprocess.DEVNULL)",
    )
    (job,) = psutil.Process(process.pid).children()
    keep(job)
    entries = _membership.read_entries()
    saw, told = (_daemons.Daemons(root_pid=os.getpid(), log_id=None) for _ in range(2))
    saw.spare({process.pid}, entries)
    news = saw.news()
    assert {(pid, started) for pid, started, *_ in news} == {identity(process), identity(job)}
    assert saw.news() is None
    entries[job.pid].parent = os.getpid()
    assert told.spare({job.pid, stranger.pid}, entries) == set()
    told.hear(news)
    assert told.spare({job.pid, stranger.pid}, entries) == {job.pid}
    assert told.copy().spare({job.pid, stranger.pid}, entries) == {job.pid}
    entries[job.pid].started += 1  # its pid is somebody else's
    assert told.spare({job.pid, stranger.pid}, entries) == set()
    assert set(told.left) == {identity(process)}


def test_who_could_not_be_looked_at_once_is_spared_again_and_an_orphan_is_not_forgotten(
    holder, as_daemon, keep, monkeypatch
):
    process = holder("import subprocess; child = subprocess.Popen(['/bin/sleep', '99'], stdout=subprocess.DEVNULL)")
    (job,) = psutil.Process(process.pid).children()
    keep(job)
    pids = {process.pid, job.pid}
    daemons = _daemons.Daemons(root_pid=os.getpid(), log_id=None)
    entries = _membership.read_entries()
    assert daemons.spare(pids, entries) == pids
    entries[job.pid].parent = os.getpid()
    with monkeypatch.context() as nobody_sees:
        nobody_sees.setattr(daemons, "_mapped", lambda _pid: None)
        assert daemons.spare(pids, entries) == set()
    assert daemons.spare(pids, entries) == pids


def test_a_scan_is_worth_its_cost_only_while_a_known_daemon_or_what_it_has_left_lives(holder, as_daemon, keep):
    daemons = _daemons.Daemons(root_pid=os.getpid(), log_id=None)
    other = subprocess.Popen(["/bin/sleep", "99"])
    keep(other)
    assert not daemons.may_be_among([identity(other)])
    process = holder("")
    who = identity(process)
    assert daemons.may_be_among([who])
    assert daemons.may_be_among([])
    process.kill()
    process.wait()
    assert not daemons.may_be_among([])
