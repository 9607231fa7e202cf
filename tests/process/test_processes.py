"""Who belongs to a launch, what its members have used, and how they ended."""

import os
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from seen import PROGRAMS, target, tree, until

from hangguard.facts import Ask, Exit, Tree, Unseen
from hangguard.observe import exits, procfs
from hangguard.observe.processes import ProcessProbe

pytestmark = pytest.mark.anyio

SLEEP = [sys.executable, "-c", "import time; time.sleep(1000)"]


@asynccontextmanager
async def probing(family, **more):
    probe = ProcessProbe(target(family.guardian, family.root, **more))
    try:
        yield probe
    finally:
        await probe.aclose()


async def look(probe, **ask):
    seen = await probe.look(Ask(**ask))
    assert isinstance(seen, Tree), seen
    return seen


def member(seen, pid):
    return next((one for one in seen.members if one.pid == pid), None)


def gone(seen, pid):
    return next((one for one in seen.departed if one.pid == pid), None)


async def test_members_are_as_ps_shows_them():
    with tree("child") as family:
        child = int(family.line(1))
        async with probing(family) as probe:
            seen = await look(probe)
            root = member(seen, family.root_pid)
            assert {one.pid for one in seen.members} == {family.root_pid, child}
            assert seen.births == 2
            assert seen.deaths == 0
            for one in seen.members:
                told = psutil.Process(one.pid)
                assert one.parent == told.ppid()
                assert one.name == told.name()
                assert one.title == " ".join(told.cmdline())
                assert one.threads == told.num_threads()
                assert one.cpu_seconds == pytest.approx(sum(told.cpu_times()[:2]), abs=0.2)
                assert len(one.thread_states) == one.threads
                assert one.read_chars > 0
                assert one.started == pytest.approx((told.create_time() - psutil.boot_time()) * 100, abs=200)
            assert root.parent == family.guardian
            assert family.guardian not in {one.pid for one in seen.members}
            for pid in (family.root_pid, child):
                await until(lambda pid=pid: _as_big_as_told(probe, pid))  # it grows while it starts


async def test_a_double_forked_child_in_a_session_of_its_own_with_an_empty_environment_is_a_member():
    with tree("escape") as family:
        escaped = int(family.line(1))
        await until(lambda: psutil.Process(escaped).ppid() == family.guardian)
        async with probing(family) as probe:
            await until(lambda: _titled(probe, escaped))
            assert psutil.Process(escaped).environ() == {}
            assert os.getsid(escaped) != os.getsid(family.root_pid)


async def _as_big_as_told(probe, pid):
    one = member(await look(probe), pid)
    return one.rss_bytes == pytest.approx(psutil.Process(pid).memory_info().rss, rel=0.3)


async def _titled(probe, pid):
    one = member(await look(probe), pid)
    return one is not None and one.title == " ".join(SLEEP)


async def test_a_bystander_with_the_same_command_line_is_no_member():
    with tree("child") as family, subprocess.Popen(SLEEP) as bystander:
        try:
            child = int(family.line(1))
            async with probing(family) as probe:
                await until(lambda: _titled(probe, child))
                await until(lambda: psutil.Process(bystander.pid).cmdline() == SLEEP)
                seen = await look(probe)
                assert member(seen, bystander.pid) is None
                assert member(seen, os.getpid()) is None
            assert bystander.poll() is None
        finally:
            bystander.kill()


async def test_the_exit_code_of_a_killed_grandchild_is_the_one_that_its_real_parent_was_told():
    with tree("kill-child") as family:
        child = int(family.line(1))
        async with probing(family) as probe:
            assert member(await look(probe), child) is not None
            os.kill(child, signal.SIGKILL)
            told = int(family.line(2))
            departed = await until(lambda: _departed(probe, child))
            assert told == -signal.SIGKILL
            assert departed.exit_code == told, "this kernel has PIDFD_INFO_EXIT (6.15)"
            seen = await look(probe)
            assert (seen.births, seen.deaths) == (2, 1)
            assert member(seen, family.root_pid) is not None


async def _departed(probe, pid):
    return gone(await look(probe), pid)


async def test_without_help_of_the_kernel_the_code_is_unseen_with_its_reason(monkeypatch):
    monkeypatch.setattr(procfs, "_PIDFD_GET_INFO", 0xC040FF63)  # no such request
    with tree("kill-child") as family:
        child = int(family.line(1))
        async with probing(family) as probe:
            await look(probe)
            os.kill(child, signal.SIGKILL)
            family.line(2)
            departed = await until(lambda: _departed(probe, child))
            assert isinstance(departed.exit_code, Unseen)
            assert "kernel" in departed.exit_code.reason


async def test_an_unreaped_member_has_departed_once_and_its_code_is_known():
    with tree("end", "5", REAP="0") as family:
        await until(lambda: psutil.Process(family.root_pid).status() == psutil.STATUS_ZOMBIE)
        async with probing(family) as probe:
            for _ in range(3):
                seen = await look(probe)
                assert seen.members == ()
                assert (seen.births, seen.deaths) == (1, 1)
                assert [(one.pid, one.exit_code) for one in seen.departed] == [(family.root_pid, 5)]


async def test_the_launched_process_that_ended_before_the_first_look_has_its_parents_word():
    with tree("end", "3") as family:
        assert family.line(1) == f"3 {family.root_pid}"
        async with probing(family, exit_of=lambda: Exit(code=3, at=1.0)) as probe:
            seen = await look(probe)
            assert seen.members == ()
            assert (seen.births, seen.deaths) == (1, 1)
            assert gone(seen, family.root_pid).exit_code == 3


async def test_a_process_whose_first_thread_ended_is_alive():
    with tree("leader-exits") as family:
        family.line(1)
        await until(lambda: psutil.Process(family.root_pid).status() == psutil.STATUS_ZOMBIE)
        async with probing(family) as probe:
            seen = await look(probe)
            root = member(seen, family.root_pid)
            assert root.state == "Z"
            assert root.threads == 2
            assert seen.departed == ()
            assert seen.deaths == 0


async def test_a_parent_in_vfork_shows_as_d_and_is_a_living_member():
    with tree("vfork") as family:
        family.line(1)
        async with probing(family) as probe:
            root = await until(lambda: _in_state(probe, family.root_pid, "D"))
            assert root.thread_states == "D"


async def _in_state(probe, pid, state):
    one = member(await look(probe), pid)
    return one if one is not None and one.state == state else None


async def test_members_stay_members_when_the_guardian_is_dead():
    with tree("child") as family:
        child = int(family.line(1))
        async with probing(family) as probe:
            await look(probe)
            family.process.kill()
            family.process.wait()
            try:
                seen = await look(probe)
                assert {one.pid for one in seen.members} == {family.root_pid, child}
            finally:
                for pid in (child, family.root_pid):
                    os.kill(pid, signal.SIGKILL)
            await until(lambda: _all_gone(probe))


async def _all_gone(probe):
    seen = await look(probe)
    return not seen.members and seen.deaths == 2


@pytest.mark.long
async def test_totals_never_fall_and_reaped_children_count(tmp_path):
    await _burn("burn-child", tmp_path, lost=False)


@pytest.mark.long
async def test_totals_never_fall_and_grow_again_at_once_where_a_parent_ignores_its_children(tmp_path):
    await _burn("ignore-chld", tmp_path, lost=True)


async def _burn(how, folder, *, lost):
    gate = folder / "gate"
    os.mkfifo(gate)
    with tree(how, "0.6", str(gate)) as family:
        child = int(family.line(1))
        async with probing(family) as probe:
            await until(lambda: _used(probe, child, 0.55))
            before = await look(probe)
            with gate.open("w"):
                pass
            assert family.line(2) == "gone"
            after = await look(probe)
            assert after.cpu_seconds >= before.cpu_seconds >= 0.55
            assert after.minor_faults >= before.minor_faults > 0
            assert after.read_chars >= before.read_chars > 0
            reaped = member(after, family.root_pid).reaped_cpu_seconds
            assert (reaped < 0.3) if lost else (reaped >= 0.55)
            assert family.line(3) == "burnt"
            assert (await look(probe)).cpu_seconds >= before.cpu_seconds + 0.25
            if not lost:
                assert (await look(probe)).cpu_seconds < 2.0, "nothing is counted twice"


async def _used(probe, pid, seconds):
    one = member(await look(probe), pid)
    return one is not None and one.cpu_seconds >= seconds


async def test_orphans_reaped_by_the_guardian_count(tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    script = (
        "import os, sys, time\n"
        "if os.fork() == 0:\n"
        "    if os.fork() == 0:\n"
        "        while time.process_time() < 0.4: pass\n"
        "        os.read(os.open(sys.argv[1], os.O_RDONLY), 1)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "print('ready', flush=True)\n"
        "time.sleep(1000)\n"
    )
    from seen import family as start

    with start(sys.executable, "-c", script, str(gate)) as family:
        async with probing(family) as probe:
            await until(lambda: _members(probe, 2))
            with gate.open("w"):
                pass
            await until(lambda: _members(probe, 1))
            seen = await look(probe)
            assert seen.orphan_cpu_seconds >= 0.35
            assert seen.cpu_seconds >= 0.35


async def _members(probe, count):
    return len((await look(probe)).members) == count


async def test_a_new_title_is_read_again(tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with tree("retitle", str(gate)) as family:
        family.line(1)
        async with probing(family) as probe:
            assert "seen_tree.py retitle" in member(await look(probe), family.root_pid).title
            with gate.open("w"):
                pass
            await until(lambda: _title_is(probe, family.root_pid, "a new title 1000"))


async def _title_is(probe, pid, title):
    return member(await look(probe), pid).title == title


async def test_thread_states_of_many_threads_are_read_only_when_asked():
    with tree("threads", "410") as family:
        family.line(1)
        async with probing(family) as probe:
            assert member(await look(probe), family.root_pid).thread_states is None
            states = member(await look(probe, thread_states=True), family.root_pid).thread_states
            assert len(states) == 411
            assert set(states) <= {"S", "R", "D"}


async def test_a_sample_of_a_hundred_processes_costs_little_more_than_the_reading_of_their_files():
    with tree("many", "100") as family:
        family.line(1)
        async with probing(family) as probe:
            await until(lambda: _members(probe, 101))
            await look(probe)
            looks, reads = [], []
            pids = [family.root_pid, *(child.pid for child in psutil.Process(family.root_pid).children())]
            for _ in range(10):
                began = time.process_time()
                await look(probe)
                looks.append(time.process_time() - began)
                began = time.process_time()
                for pid in pids:
                    for name in ("stat", "status", "io"):
                        Path(f"/proc/{pid}/{name}").read_bytes()
                reads.append(time.process_time() - began)
    ratio = min(looks) / min(reads)
    print(f"a look costs {ratio:.1f} times the reading of three files of each")
    assert ratio < 10


async def test_only_the_last_256_that_ended_are_kept_and_only_512_descriptors_are_spent(monkeypatch):
    monkeypatch.setattr(exits, "_WATCHED", 1)
    made = exits.Exits((1, 1), lambda: None)
    here = procfs.read_stat("/proc/self/stat")
    parent = procfs.read_stat(f"/proc/{os.getppid()}/stat")
    made.watch([here, parent])
    made.enter(parent.identity, "parent", None, 1.0)
    made.enter(here.identity, "here", None, 1.0)
    beyond, watched = made.departed()
    assert beyond.exit_code == Unseen("only 1 processes are watched for their exit code")
    assert watched.exit_code == Unseen("nobody has waited for it yet, and the kernel shows no code to us")
    for number in range(300):
        made.enter((10**8 + number, 1), "x", None, 2.0)
    kept = made.departed()
    assert len(kept) == 256
    assert kept[-1].pid == 10**8 + 299
    assert kept[-1].exit_code == Unseen("it ended before it was seen")
    made.close()


async def test_many_ends_without_a_fault_push_no_crash_out_and_fill_no_sample():
    """As the compilers of a cold start end."""
    made, started = exits.Exits((1, 1), lambda: None), []
    for number in range(100):
        script = "read line; exit 3" if number == 40 else "read line"
        started.append(subprocess.Popen(["/bin/sh", "-c", script], stdin=subprocess.PIPE))
        made.watch([procfs.read_stat(f"/proc/{started[-1].pid}/stat")])
    for number, child in enumerate(started):
        identity = procfs.read_stat(f"/proc/{child.pid}/stat").identity
        child.communicate(b"\n")
        made.enter(identity, str(number), None, 1.0)
        kept = made.departed()
    assert [gone.title for gone in kept] == [str(n) for n in (*range(32), 40, *range(68, 100))]
    assert {gone.title for gone in kept if gone.exit_code != 0} == {"40"}


async def test_a_pid_that_was_given_to_another_process_is_not_watched():
    made = exits.Exits((1, 1), lambda: None)
    here = procfs.read_stat("/proc/self/stat")
    before = len(os.listdir("/proc/self/fd"))
    fields = [*here.fields]
    fields[19] = b"12345"
    made.watch([here._replace(fields=tuple(fields))])
    assert len(os.listdir("/proc/self/fd")) == before
    made.enter((here.pid, 12345), "x", None, 1.0)
    assert "ended before it could be watched" in made.departed()[0].exit_code.reason


async def test_no_descriptor_stays_open():
    before = len(os.listdir("/proc/self/fd"))
    with tree("many", "20") as family:
        family.line(1)
        async with probing(family) as probe:
            await until(lambda: _members(probe, 21))
            assert len(os.listdir("/proc/self/fd")) > before + 20
    await until(lambda: len(os.listdir("/proc/self/fd")) <= before + 1)


async def test_processes_missing_says_why(tmp_path):
    probe = ProcessProbe(target(), proc=str(tmp_path / "nothing"))
    seen = await probe.look(Ask())
    await probe.aclose()
    assert isinstance(seen, Unseen)
    assert "nothing: No such file" in seen.reason


async def test_processes_hanging_is_unseen_within_its_deadline(tmp_path):
    (tmp_path / "12").mkdir()
    gate = tmp_path / "12" / "stat"
    os.mkfifo(gate)
    probe = ProcessProbe(target(probe_within=0.2), proc=str(tmp_path))
    began = time.monotonic()
    assert await probe.look(Ask()) == Unseen("no answer within 0.2 s")
    assert time.monotonic() - began < 2
    with gate.open("w"):
        await probe.aclose()


async def test_running_out_of_descriptors_is_no_death(monkeypatch):
    with tree("child") as family:
        family.line(1)
        async with probing(family) as probe:
            await look(probe)

            def refuse(path, limit=4096):
                raise OSError(24, "Too many open files", path)

            with monkeypatch.context() as patched:
                patched.setattr(procfs, "read_bytes", refuse)
                seen = await probe.look(Ask())
            assert isinstance(seen, Unseen)
            assert "Too many open files" in seen.reason
            assert (await look(probe)).deaths == 0


async def test_command_lines_hanging_leave_the_kernels_name(tmp_path):
    """A copy of ``/proc`` as one member has it, with a command line that never comes."""
    with tree("child") as family:
        child = int(family.line(1))
        for pid in (family.guardian, family.root_pid, child):
            folder = tmp_path / str(pid)
            folder.mkdir()
            stat = Path(f"/proc/{pid}/stat").read_text()
            (folder / "stat").write_text(stat)
        (tmp_path / "self").mkdir()
        (tmp_path / "self" / "mountinfo").write_bytes(Path("/proc/self/mountinfo").read_bytes())
        gate = tmp_path / str(family.root_pid) / "cmdline"
        os.mkfifo(gate)
        probe = ProcessProbe(target(family.guardian, family.root, probe_within=2), proc=str(tmp_path))
        began = time.monotonic()
        seen = await look(probe)
        assert time.monotonic() - began < 2
        assert {one.title for one in seen.members} == {one.name for one in seen.members}
        assert len(seen.members) == 2
        assert await look(probe)
        with gate.open("w"):
            await probe.aclose()


def test_the_programs_are_there():
    assert {"seen_guardian.py", "seen_tree.py"} <= {path.name for path in PROGRAMS.iterdir()}
