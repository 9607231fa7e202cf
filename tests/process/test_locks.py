"""Lock files: who holds them, who waits, and whether somebody is still there behind a lock that is only a file."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from seen import PROGRAMS, member, target, until_sync

from hangguard.facts import NOT_ASKED, Ask, Launch, LockFile, Tree, Unseen
from hangguard.observe import Shared
from hangguard.observe._kernel_locks import FileId, Held, is_lock_name, read_locks, waits_for_a_lock
from hangguard.observe._presence_locks import find_presence_locks
from hangguard.observe.locks import LocksProbe
from hangguard.observe.procfs import read_title

pytestmark = pytest.mark.anyio
USER = PROGRAMS / "lock_user.py"


class LockUser:
    def __init__(self, how, path, *more, executable=None):
        argv = [executable or sys.executable, str(USER), how, str(path), *more]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self.process.pid
        assert self.process.stdout.readline() == "began\n"

    def has_it(self):
        """Wait until it has its lock."""
        assert self.process.stdout.readline() == "held\n"
        return self

    def end(self, how=signal.SIGKILL):
        self.process.send_signal(how)
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def use():
    with contextlib.ExitStack() as ending:

        def start(how, path, *more, **options):
            user = LockUser(how, path, *more, **options)
            ending.callback(user.end)
            return user

        yield start


@pytest.fixture
def home(tmp_path):
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


async def look(home, *members, ask=Ask(locks=True), tree=None, env=()):  # noqa: B008 - frozen
    launch = Launch(
        argv=("x",), env=(("HOME", str(home)), ("TMPDIR", str(home / "tmp")), *env), cwd=str(home),
        url="http://127.0.0.1:1", host="127.0.0.1", port=1,
    )  # fmt: skip
    shared = Shared(tasks=None)
    shared.tree = tree or Tree(members=tuple(member(user.pid) for user in members))
    probe = LocksProbe(target(given=launch), shared)
    try:
        return await probe.look(ask)
    finally:
        await probe.aclose()


def without_age(lock):
    return LockFile(**{name: getattr(lock, name) for name in LockFile.__dataclass_fields__ if name != "age_seconds"})


@pytest.mark.parametrize("how", ["flock", "lockf"])
async def test_a_lock_of_the_kernel_is_told_with_its_owner_and_who_waits(use, home, tmp_path, how):
    """The owner is a stranger; a third, who waits as well, is no member and of no interest."""
    path = tmp_path / "weights.lock"
    owner = use(how, path).has_it()
    waiter, stranger = use(how, path), use(how, path)
    until_sync(lambda: all(waits_for_a_lock("/proc", user.pid) for user in (waiter, stranger)))
    (lock,) = await look(home, waiter)
    assert without_age(lock) == LockFile(
        path=str(path), kind="flock", waiters=(waiter.pid,), owner=owner.pid, owner_title=read_title(owner.pid)
    )
    assert 0 <= lock.age_seconds < 120
    (lock,) = await look(home, owner, waiter)
    assert (lock.owner, lock.owner_is_member, lock.waiters) == (owner.pid, True, (waiter.pid,))


async def test_the_lock_goes_with_the_holder(use, home, tmp_path):
    path = tmp_path / "a.lock"
    owner, waiter = use("flock", path).has_it(), use("flock", path)
    until_sync(lambda: waits_for_a_lock("/proc", waiter.pid))
    owner.end()
    waiter.has_it()
    (lock,) = await look(home, waiter)
    assert (lock.owner, lock.waiters) == (waiter.pid, ())


async def test_the_child_that_inherited_a_lock_is_its_owner(use, home, tmp_path):
    """The kernel still prints the pid that took it, which is nobody any more: the next launch would wait for ever."""
    path = tmp_path / "a.lock"
    parent = use("flock", path, "--then-fork")
    child = int(parent.process.stdout.readline())
    parent.process.wait()
    waiter = use("flock", path)
    until_sync(lambda: waits_for_a_lock("/proc", waiter.pid))
    (lock,) = await look(home, waiter)
    assert (lock.owner, lock.waiters, lock.owner_is_member) == (child, (waiter.pid,), False)
    assert lock.owner_title == read_title(child)


async def test_a_waiter_that_polls_is_blocked_by_what_a_stranger_holds_in_our_caches(use, home):
    """Python's filelock opens the file for moments only; the lock is told whether or not it is caught in one."""
    locks = home / ".cache" / "huggingface" / "hub" / ".locks" / "models--a--b"
    locks.mkdir(parents=True)
    owner = use("flock", locks / "0123.lock").has_it()
    waiter = use("poll", locks / "0123.lock")
    (lock,) = await look(home, waiter)
    assert (lock.path, lock.owner, lock.owner_is_member) == (str(locks / "0123.lock"), owner.pid, False)
    assert lock.waiters in {(), (waiter.pid,)}


async def test_the_lock_of_vllm_in_the_temp_folder_is_told(use, home):
    (home / "tmp").mkdir()
    owner = use("flock", home / "tmp" / f"{'0a' * 32}Qwen-Qwen3-8B.lock").has_it()
    use("flock", home / "tmp" / "desktop.lock").has_it()
    (lock,) = await look(home)
    assert lock.owner == owner.pid


async def test_a_lock_of_the_same_name_elsewhere_is_not_ours(use, home, tmp_path):
    """A stranger's folder, a stranger's lock: it stands in nobody's way."""
    locks = home / ".cache" / "huggingface" / "hub"
    locks.mkdir(parents=True)
    (locks / "a.lock").touch()
    (tmp_path / "elsewhere").mkdir()
    use("flock", tmp_path / "elsewhere" / "a.lock").has_it()
    bystander = use("open", tmp_path / "log.txt").has_it()
    assert await look(home, bystander) == ()


async def test_a_file_that_is_open_and_not_locked_makes_nobody_wait(use, home, tmp_path):
    user = use("open", tmp_path / "a.lock").has_it()
    (lock,) = await look(home, user)
    assert (lock.owner, lock.waiters, lock.owner_title) == (None, (), "")


async def test_an_owner_in_another_pid_namespace_is_said_to_be_invisible(use, home, tmp_path):
    """The kernel does not show its lock at all; that a member sleeps in the wait for it is seen."""
    path = tmp_path / "a.lock"
    unshare = shutil.which("unshare")
    owner = subprocess.Popen(
        [unshare, "--pid", "--fork", "--kill-child", sys.executable, str(USER), "flock", str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert [owner.stdout.readline() for _ in range(2)] == ["began\n", "held\n"]
        waiter = use("flock", path)
        until_sync(lambda: waits_for_a_lock("/proc", waiter.pid))
        (lock,) = await look(home, waiter)
        assert lock.waiters == (waiter.pid,)
        # Seen from the outer namespace, the inner process has a number here too.
        assert lock.owner is not None or "not visible from here" in lock.owner_title
    finally:
        owner.kill()
        owner.wait()
        owner.stdin.close()
        owner.stdout.close()


async def test_a_lock_that_no_table_shows_has_waiters_and_no_owner(use, home, tmp_path, monkeypatch):
    """As from inside a container, while the owner is outside."""
    path = tmp_path / "a.lock"
    owner, waiter = use("flock", path).has_it(), use("flock", path)
    until_sync(lambda: waits_for_a_lock("/proc", waiter.pid))
    monkeypatch.setattr("hangguard.observe.locks.read_locks", lambda _proc: {})
    (lock,) = await look(home, waiter)
    assert (lock.owner, lock.waiters) == (None, (waiter.pid,))
    assert lock.owner_title == "not visible from here: in another PID namespace, or on another machine"
    assert owner.process.poll() is None


@pytest.fixture
def extension(home):
    folder = home / ".cache" / "torch_extensions" / "py311_cu130" / "my_kernels"
    folder.mkdir(parents=True)
    return folder


async def test_a_lock_by_presence_without_a_builder_has_no_owner(use, home, extension):
    """The builder was killed: the file stays, and everybody else waits for ever."""
    builder = use("baton", extension / "lock").has_it()
    bystander = use("open", home / "x").has_it()
    (lock,) = await look(home, bystander)
    assert (lock.path, lock.kind, lock.owner) == (str(extension / "lock"), "presence", builder.pid)
    assert not lock.owner_is_member
    builder.end()
    os.utime(extension / "lock", (1_700_000_000, 1_700_000_000))
    (lock,) = await look(home, bystander)
    assert (lock.kind, lock.owner, lock.owner_title, lock.waiters) == ("presence", None, "", ())
    assert lock.age_seconds > 10_000


async def test_a_member_that_builds_owns_its_lock(use, home, extension):
    builder = use("baton", extension / "lock").has_it()
    (lock,) = await look(home, builder)
    assert (lock.kind, lock.owner, lock.owner_is_member) == ("presence", builder.pid, True)


async def test_a_compiler_in_the_folder_or_an_open_file_beside_it_is_a_builder(use, home, extension, tmp_path):
    (extension / "lock").touch()
    ninja = tmp_path / "ninja"
    ninja.symlink_to(sys.executable)
    compiler = use("cwd", extension, executable=str(ninja)).has_it()
    (lock,) = await look(home)
    assert lock.owner == compiler.pid
    log = use("open", extension / "build.log").has_it()
    (lock,) = await look(home)
    assert lock.owner == log.pid


async def test_somebody_who_only_stands_in_the_folder_is_no_builder(use, home, extension):
    (extension / "lock").touch()
    use("cwd", extension).has_it()
    (lock,) = await look(home)
    assert lock.owner is None


async def test_the_folders_are_those_of_the_launch_not_ours(use, home, tmp_path, monkeypatch):
    """A stale lock in another user's cache is nobody's business here."""
    monkeypatch.setenv("HOME", str(tmp_path / "mine"))
    stale = tmp_path / "mine" / ".cache" / "torch_extensions" / "py311_cu130" / "a"
    stale.mkdir(parents=True)
    (stale / "lock").touch()
    assert await look(home) == ()
    given = tmp_path / "given" / "a"
    given.mkdir(parents=True)
    (given / "lock").touch()
    (lock,) = await look(home, env=(("TORCH_EXTENSIONS_DIR", str(tmp_path / "given")),))
    assert lock.path == str(given / "lock")


def test_the_walk_is_bounded_and_follows_no_link(tmp_path):
    (tmp_path / "far" / "b" / "c" / "d" / "e").mkdir(parents=True)
    (tmp_path / "far" / "b" / "c" / "d" / "e" / "lock").touch()
    (tmp_path / "near").mkdir()
    (tmp_path / "near" / "lock").touch()
    (tmp_path / "link").symlink_to(tmp_path / "near")
    (tmp_path / "many").mkdir()
    for index in range(5000):
        (tmp_path / "many" / str(index)).touch()
    assert find_presence_locks((str(tmp_path), "/no/such/folder")) == [str(tmp_path / "near" / "lock")]
    (tmp_path / "many" / "z").mkdir()
    (tmp_path / "many" / "z" / "lock").touch()
    assert find_presence_locks((str(tmp_path / "many"),)) in ([], [str(tmp_path / "many" / "z" / "lock")])


async def test_it_looks_only_when_asked_and_says_what_it_lacks(home):
    assert await look(home, ask=Ask(stacks=True)) == NOT_ASKED
    assert await look(home, tree=Unseen("no")) == Unseen("the members are unseen: no")


@pytest.mark.parametrize(
    ("path", "is_lock"),
    [
        ("/a/b.lock", True),
        ("/a/lock", True),
        ("/a/.lock", True),
        ("/a/b.lck (deleted)", True),
        ("/a/x.filelock", True),
        ("/a/lock_module_rope", True),
        ("/a/block.bin", False),
        ("/locks/clock", False),
        ("/a/flock.so", False),
        ("/dev/shm/sem.mp-x", False),
    ],
)
def test_lock_files_are_known_by_their_names(path, is_lock):
    assert is_lock_name(path) is is_lock


def test_the_table_of_the_kernel_is_read(tmp_path):
    (tmp_path / "locks").write_text(
        "1: POSIX  ADVISORY  READ  4215 fe:00:2172066 0 EOF\n"
        "1: POSIX  ADVISORY  WRITE 4214 fe:00:2172066 128 255\n"
        "1: -> POSIX  ADVISORY  WRITE 4216 fe:00:2172066 0 EOF\n"
        "2: FLOCK  ADVISORY  WRITE 77 00:1c:5 0 EOF\n"
        "3: OFDLCK ADVISORY  WRITE -1 00:1c:6 0 EOF\n"
        "4: LEASE  ACTIVE    READ  99 00:1c:7 0 EOF\n"
        "nonsense\n"
    )
    assert read_locks(str(tmp_path)) == {
        FileId("fe:00", 2172066): Held([4214, 4215], [4216]),
        FileId("00:1c", 5): Held([77], []),
        FileId("00:1c", 6): Held([-1], []),
    }


async def test_a_table_that_cannot_be_read_is_unseen(home, tmp_path):
    shared = Shared(tasks=None)
    shared.tree = Tree(members=())
    probe = LocksProbe(target(), shared, proc=str(tmp_path))
    assert await probe.look(Ask(locks=True)) == Unseen(f"{tmp_path}/locks: No such file or directory")
    await probe.aclose()


def test_tmpfs_and_disk_are_both_named_as_the_kernel_names_them(use, tmp_path):
    """The device of a mount is printed in hexadecimal, on a RAM disk too."""
    for folder in (tmp_path, Path("/dev/shm")):
        path = folder / f"hangguard-test-{os.getpid()}.lock"
        try:
            user = use("flock", path).has_it()
            held = {file: held for file, held in read_locks("/proc").items() if user.pid in held.owners}
            stat = path.stat()
            assert list(held) == [FileId(f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}", stat.st_ino)]
        finally:
            path.unlink(missing_ok=True)
