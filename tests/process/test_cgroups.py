"""The launched process's own control group: real groups, a real freeze, a real kill for memory, a real quota."""

import errno
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from seen import until

from hangguard.facts import Ask, Unseen
from hangguard.observe.cgroups import Cgroups
from hangguard.observe.host import HostProbe
from hangguard.observe.procfs import read_started

pytestmark = pytest.mark.anyio

BURN = "while True: sum(range(1000))"
SLEEP = "import time; time.sleep(1000)"
FILL = "import time\ntime.sleep(0.1)\nblock = b'x' * (256 << 20)\ntime.sleep(1000)"


def hierarchy(controller):
    """Where a hierarchy is mounted, and the group that this process has in it; as cat and findmnt would show it."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if controller in controllers.split(",") or (controller == "" and number == "0"):
            kind, option = ("cgroup2", "") if controller == "" else ("cgroup", controller)
            for mount in Path("/proc/self/mounts").read_text().splitlines():
                _, point, what, options, *_ = mount.split()
                if what == kind and (not option or option in options.split(",")):
                    return Path(point) / path.lstrip("/")
    return None


@contextmanager
def group(controller, **settings):
    """A control group of our own below ours, with nothing in it at the end."""
    folder = hierarchy(controller) / f"hangguard-test-{os.getpid()}"
    folder.mkdir()
    try:
        for name, value in settings.items():
            (folder / name.replace("__", ".")).write_text(str(value))
        yield folder
    finally:
        remove(folder)


def remove(folder):
    for _ in range(500):
        try:
            folder.rmdir()
        except OSError as problem:
            if problem.errno != errno.EBUSY:
                raise
            time.sleep(0.01)
        else:
            return
    raise AssertionError(f"{folder} is still in use")


@contextmanager
def inside(folder, program):
    """A process that has moved itself into the group before it does anything else."""
    code = f"import os\nopen({str(folder / 'cgroup.procs')!r}, 'w').write('0')\nprint('in', flush=True)\n{program}"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "in\n"
            yield process
        finally:
            process.kill()


def groups_of(process):
    found = Cgroups((process.pid, read_started(process.pid)))
    found.look()
    return found


async def look(process):
    probe = HostProbe(within=5, root=(process.pid, read_started(process.pid)))
    try:
        return await probe.look(Ask())
    finally:
        await probe.aclose()


@pytest.mark.parametrize(
    ("controller", "freeze", "thaw"),
    [
        ("freezer", ("freezer.state", "FROZEN"), ("freezer.state", "THAWED")),
        ("", ("cgroup.freeze", "1"), ("cgroup.freeze", "0")),
    ],
    ids=["version 1", "version 2"],
)
async def test_a_frozen_group_is_seen_to_be_frozen_until_it_is_thawed(controller, freeze, thaw):
    with group(controller) as folder, inside(folder, SLEEP) as process:
        assert (await look(process)).is_frozen is False
        try:
            (folder / freeze[0]).write_text(freeze[1])
            await until(lambda: groups_of(process).is_frozen() is True)
            assert (await look(process)).is_frozen is True
        finally:
            (folder / thaw[0]).write_text(thaw[1])
        await until(lambda: groups_of(process).is_frozen() is False)


async def test_a_kill_for_memory_is_counted_for_the_group_and_stays_known_after_the_end():
    with group("memory", memory__limit_in_bytes=64 << 20) as folder:
        with inside(folder, FILL) as process:
            found = groups_of(process)
            assert found.oom_kills() == 0
            assert process.wait(30) == -signal.SIGKILL
            found.look()
            assert found.oom_kills() == 1
            told = dict(line.split() for line in (folder / "memory.oom_control").read_text().splitlines())
            assert told["oom_kill"] == "1"
        found.look()
        assert found.oom_kills() == 1


async def test_a_process_that_kills_itself_is_no_kill_for_memory():
    with group("memory", memory__limit_in_bytes=64 << 20) as folder:
        with inside(folder, "import signal\nos.kill(os.getpid(), signal.SIGKILL)") as process:
            found = groups_of(process)
            assert process.wait(30) == -signal.SIGKILL
            found.look()
            assert found.oom_kills() == 0


async def test_time_lost_to_a_quota_is_counted_also_for_a_quota_above():
    with group("cpu", cpu__cfs_period_us=100_000, cpu__cfs_quota_us=10_000) as outer:
        inner = outer / "inner"
        inner.mkdir()
        try:
            with inside(inner, BURN) as process:
                found = groups_of(process)
                await until(lambda: found.throttled_seconds() > 0.2)
                told = dict(line.split() for line in (outer / "cpu.stat").read_text().splitlines())
                assert found.throttled_seconds() == pytest.approx(int(told["throttled_time"]) / 1e9, abs=0.5)
        finally:
            remove(inner)


async def test_without_a_quota_no_time_is_lost():
    with group("cpu") as folder, inside(folder, BURN) as process:
        assert (await look(process)).throttled_seconds == 0


async def test_a_process_that_is_moved_brings_no_kills_of_others_with_it():
    with group("memory", memory__limit_in_bytes=64 << 20) as folder:
        with inside(folder, FILL) as victim:
            assert victim.wait(30) == -signal.SIGKILL
        with subprocess.Popen([sys.executable, "-c", SLEEP]) as process:
            try:
                found = groups_of(process)
                before = found.oom_kills()
                (folder / "cgroup.procs").write_text(str(process.pid))
                found.look()
                assert found.oom_kills() == before
            finally:
                process.kill()


async def test_cgroup_missing_says_why(tmp_path):
    nobody = Cgroups(None)
    nobody.look()
    assert nobody.oom_kills() == Unseen("the launched process is not known")
    gone = Cgroups((1 << 22, 1))
    gone.look()
    assert gone.is_frozen() == Unseen(f"/proc/{1 << 22}/cgroup: No such file or directory")
    successor = Cgroups((os.getpid(), 1))
    successor.look()
    assert successor.throttled_seconds() == Unseen(f"/proc/{os.getpid()}/cgroup: it has ended")


def made_proc(tmp_path, membership, mounts):
    """A /proc with one process of our own start time."""
    (tmp_path / "self").mkdir()
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text("7 (x) S 1 " + " ".join(["0"] * 17) + " 5 0 0")
    (tmp_path / "7" / "cgroup").write_text(membership)
    (tmp_path / "self" / "mountinfo").write_text(mounts)
    found = Cgroups((7, 5), str(tmp_path))
    found.look()
    return found


async def test_in_a_container_of_version_2_the_root_that_is_mounted_is_its_own_group(tmp_path):
    point = tmp_path / "cgroup"
    point.mkdir()
    (point / "memory.events").write_text("low 0\nhigh 0\nmax 5\noom 2\noom_kill 2\noom_group_kill 0\n")
    (point / "cpu.stat").write_text("usage_usec 5\nnr_throttled 4\nthrottled_usec 1500000\n")
    (point / "cgroup.events").write_text("populated 1\nfrozen 1\n")
    found = made_proc(tmp_path, "0::/\n", f"31 23 0:28 / {point} rw shared:1 - cgroup2 cgroup2 rw,nsdelegate\n")
    assert found.oom_kills() == 2
    assert found.throttled_seconds() == 1.5
    assert found.is_frozen() is True


async def test_in_a_container_of_version_1_the_path_of_the_host_is_cut_off(tmp_path):
    point = tmp_path / "memory"
    point.mkdir()
    (point / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    mounts = f"40 31 0:30 /docker/abc {point} ro - cgroup cgroup rw,memory\n"
    found = made_proc(tmp_path, "4:memory:/docker/abc\n1:name=systemd:/docker/abc\n", mounts)
    assert found.oom_kills() == 3
    assert found.throttled_seconds() == Unseen("no hierarchy here has the cpu controller")
    assert found.is_frozen() == Unseen("no hierarchy here can freeze a group")


async def test_a_group_outside_of_what_is_mounted_is_unseen(tmp_path):
    mounts = f"40 31 0:30 /docker/abc {tmp_path} ro - cgroup cgroup rw,memory\n"
    found = made_proc(tmp_path, "4:memory:/docker/def\n", mounts)
    assert found.oom_kills() == Unseen("no control groups are mounted here")


async def test_an_old_kernel_or_a_controller_that_is_off_says_why(tmp_path):
    point = tmp_path / "cgroup"
    point.mkdir()
    (point / "cpu.stat").write_text("usage_usec 5\n")
    found = made_proc(tmp_path, "0::/\n", f"31 23 0:28 / {point} rw - cgroup2 cgroup2 rw\n")
    assert found.oom_kills() == Unseen(
        f"{point}/memory.events: no such file (the root of the groups, or its controller is not switched on)"
    )
    assert found.throttled_seconds() == Unseen(f"{point}/cpu.stat has no line throttled_usec")
    assert found.is_frozen() is False, "only a root has no such file, and it cannot be frozen"
