"""A file is deleted only if it is the one that is meant and nobody has it: not open, not mapped, not being opened."""

import fcntl
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from seen import until_sync

from hangguard.act import _lease

SHM = Path("/dev/shm")  # where engines leave theirs
# Python's mmap keeps a descriptor of its own.
MAPS = "fd = os.open(path, os.O_RDONLY); kept = mmap.mmap(fd, 4096, prot=mmap.PROT_READ); os.closerange(3, 64)"


@pytest.fixture
def folder():
    """A folder of its own on the file system of shared memory."""
    with tempfile.TemporaryDirectory(dir=SHM, prefix="hangguard-test-") as name:
        yield Path(name)


@pytest.fixture
def left(folder):
    """What a launch left behind."""
    path = folder / "psm_left"
    path.write_bytes(b"x" * 100_000)
    return path


def file_id(path):
    found = os.lstat(path)
    return (found.st_dev, found.st_ino)


def remove(path, **how):
    return _lease.remove_file(str(path), how.pop("meant", None) or file_id(path), **how)


@contextmanager
def holding(code, path):
    """A stranger that has the file, in the way the code says."""
    program = f"import fcntl, mmap, os, sys\npath = sys.argv[1]\n{code}\nprint('has', flush=True)\nsys.stdin.read()\n"
    words = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"has\n"
            yield process
        finally:
            process.kill()


# ---------------------------------------------------------------------------------------- nobody has it


def test_a_file_that_nobody_has_is_removed_and_its_size_is_told(left):
    removal = remove(left)
    assert (removal.answer, removal.why) == ("removed", "")
    assert removal.used_bytes >= 100_000
    assert list(left.parent.iterdir()) == []


def test_a_dry_run_does_all_but_the_last_step(left):
    removal = remove(left, really=False)
    assert (removal.answer, removal.used_bytes >= 100_000) == ("free", True)
    assert left.read_bytes() == b"x" * 100_000
    assert remove(left).answer == "removed"


def test_what_is_gone_already_is_gone(folder):
    assert remove(folder / "nothing", meant=(1, 2)).answer == "gone"
    assert remove(folder / "no folder" / "nothing", meant=(1, 2)).answer == "gone"


def test_a_file_that_its_owner_may_not_even_read_is_removed(left):
    left.chmod(0o400)
    assert remove(left).answer == "removed"


# --------------------------------------------------------------------------------------- somebody has it


@pytest.mark.parametrize(
    "code",
    [
        "kept = open(path, 'rb')",
        "kept = os.open(path, os.O_WRONLY | os.O_APPEND)",
        MAPS,
        f"{MAPS}; os.rename(path, path + '.2'); os.rename(path + '.2', path)",
        "kept = os.open(path, os.O_RDONLY)\nif os.fork(): os._exit(0)",
    ],
    ids=["reads", "writes", "mapped, its descriptor closed", "renamed after mapping", "by a forked child alone"],
)
def test_a_file_that_a_stranger_has_survives_whatever_it_is_to_him(left, code):
    with holding(code, left):
        removal = remove(left)
        assert removal.answer == "busy"
        assert "open or mapped" in removal.why
        assert left.read_bytes() == b"x" * 100_000


def test_a_semaphore_that_a_stranger_has_survives_and_one_at_rest_does_not():
    """The C library gives it its name after it has mapped it, so no ``maps`` shows where it lies."""
    name = f"hangguard-test-{os.getpid()}"
    path = SHM / f"sem.{name}"
    opens = f"import ctypes; kept = ctypes.CDLL(None).sem_open(b'/{name}', os.O_CREAT, 0o600, 1)"
    try:
        with holding(opens, path) as process:
            assert str(path) not in Path(f"/proc/{process.pid}/maps").read_text()
            assert remove(path).answer == "busy"
            assert path.exists()
        assert remove(path).answer == "removed"
        assert not path.exists()
    finally:
        path.unlink(missing_ok=True)


def test_whoever_has_a_lease_on_it_is_not_disturbed(left):
    code = "kept = os.open(path, os.O_RDONLY); fcntl.fcntl(kept, fcntl.F_SETLEASE, fcntl.F_WRLCK)"
    with holding(code, left) as process:
        removal = remove(left)
        assert (removal.answer, removal.why) == ("busy", "somebody has a lease on it")
        # An open alone, also one that fails, would have the kernel break it, and SIGIO end its holder.
        assert [line.split()[1:3] for line in leases_on(left)] == [["LEASE", "ACTIVE"]]
        assert process.poll() is None


def leases_on(path):
    return [line for line in Path("/proc/locks").read_text().splitlines() if f":{path.stat().st_ino} " in line]


def test_where_leases_cannot_be_listed_the_file_is_not_even_opened(left, monkeypatch):
    def unreadable(path, *_, **__):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(_lease, "open", unreadable, raising=False)
    removal = remove(left)
    assert (removal.answer, removal.why) == ("unknown", "Permission denied")
    assert left.exists()


@contextmanager
def between_question_and_deletion(monkeypatch, what):
    """Have ``what`` happen at the last moment before the file is renamed."""
    rename = os.rename

    def late(*args, **kwargs):
        monkeypatch.setattr(os, "rename", rename)
        what()
        return rename(*args, **kwargs)

    monkeypatch.setattr(os, "rename", late)
    yield


def test_who_opens_it_at_the_last_moment_gets_the_file_with_its_name_and_this_process_lives(left, monkeypatch):
    assert signal.getsignal(signal.SIGIO) is signal.SIG_DFL  # which would end this process
    openers = []

    def opens():
        openers.append(subprocess.Popen(["cat", str(left)], stdout=subprocess.PIPE))
        until_sync(lambda: "lease" in Path(f"/proc/{openers[0].pid}/wchan").read_text())

    with between_question_and_deletion(monkeypatch, opens):
        removal = remove(left)
    assert (removal.answer, removal.why) == ("busy", "somebody opened it at this moment")
    assert openers[0].communicate()[0] == b"x" * 100_000
    assert [path.name for path in left.parent.iterdir()] == [left.name]
    assert os.stat(left).st_nlink == 1
    assert remove(left).answer == "removed"


def test_a_file_that_takes_the_name_at_the_last_moment_survives(left, monkeypatch):
    meant = file_id(left)

    def replaces():
        (left.parent / "new").write_bytes(b"somebody's")
        (left.parent / "new").replace(left)

    with between_question_and_deletion(monkeypatch, replaces):
        removal = remove(left, meant=meant)
    assert removal.answer == "refused"
    assert left.read_bytes() == b"somebody's"
    assert [path.name for path in left.parent.iterdir()] == [left.name]


def test_where_the_name_is_taken_again_before_it_is_put_back_nothing_is_lost(left, monkeypatch):
    monkeypatch.setattr(_lease, "_has_lease", lambda file: left.write_bytes(b"new") == 0)
    removal = remove(left)
    assert removal.answer == "busy"
    kept = removal.why.rpartition(" ")[2]
    assert (left.read_bytes(), (left.parent / kept).read_bytes()) == (b"new", b"x" * 100_000)


# ------------------------------------------------------------------------------------- not what is meant


def test_another_file_of_the_same_name_survives(left):
    assert remove(left, meant=(left.stat().st_dev, left.stat().st_ino + 1)).answer == "refused"
    assert left.exists()


def test_links_and_what_they_lead_to_survive(left):
    link, other = left.parent / "link", left.parent / "other"
    link.symlink_to(left)
    assert remove(link, meant=file_id(left)).answer == "refused"
    assert "another kind" in remove(link).why
    other.hardlink_to(left)
    assert "it has 2 names" in remove(left).why
    assert {path.name for path in left.parent.iterdir()} == {left.name, "link", "other"}


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_what_is_no_file_survives_and_is_not_even_opened(folder, make):
    make(folder / "other")
    removal = remove(folder / "other")
    assert (removal.answer, "another kind" in removal.why) == ("refused", True)
    assert (folder / "other").exists()


def test_another_users_file_survives_for_root_too(left):
    os.chown(left, 65534, 65534)
    assert remove(left).why == "it belongs to user 65534"
    assert left.exists()


def test_where_the_file_system_knows_no_leases_the_file_survives(left, monkeypatch):
    def refuse(file, command, *rest):
        if command == fcntl.F_SETLEASE:
            raise OSError(22, "Invalid argument")
        return 0

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    removal = remove(left)
    assert (removal.answer, "does not tell who has it" in removal.why) == ("unknown", True)
    assert left.exists()


# ------------------------------------------------------------------------------------------------ sockets


@pytest.fixture
def named(folder):
    """A Unix socket with a name."""
    path = folder / "s"
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))
        yield path, made


def remove_socket(path, **how):
    return _lease.remove_socket(str(path), how.pop("meant", None) or file_id(path), **how)


def test_the_name_of_a_dead_socket_is_removed_and_of_a_living_one_never(named):
    path, made = named
    assert remove_socket(path).why == "somebody is bound to it"  # and does not listen
    made.listen()
    assert remove_socket(path).answer == "busy"
    made.close()
    assert remove_socket(path, meant=(1, 2)).answer == "refused"
    assert remove_socket(path, really=False).answer == "free"
    assert path.exists()
    assert remove_socket(path).answer == "removed"
    assert not path.exists()


@pytest.mark.parametrize("kind", [socket.SOCK_DGRAM, socket.SOCK_SEQPACKET])
def test_a_living_socket_of_another_kind_survives(folder, kind):
    with socket.socket(socket.AF_UNIX, kind) as made:
        made.bind(str(folder / "s"))
        assert remove_socket(folder / "s").answer == "busy"
    assert (folder / "s").exists()


def test_a_socket_of_another_network_namespace_answers_and_survives(folder):
    code = "import socket; kept = socket.socket(socket.AF_UNIX); kept.bind(path); kept.listen()"
    words = f"import sys\npath = sys.argv[1]\n{code}\nprint('has', flush=True)\nsys.stdin.read()\n"
    inside = ["unshare", "--net", sys.executable, "-c", words, str(folder / "s")]
    with subprocess.Popen(inside, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"has\n"
        removal = remove_socket(folder / "s")
        assert (removal.answer, removal.why) == ("busy", "somebody answers on it")
        process.kill()
    assert remove_socket(folder / "s").answer == "removed"


def test_a_file_is_no_socket_and_a_socket_no_file(left, named):
    assert remove_socket(left).answer == "refused"
    assert remove(named[0]).answer == "refused"
    assert left.exists()
    assert named[0].exists()


def test_mapped_by_this_process_is_busy_too(left):
    with left.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        assert remove(left).answer == "busy"
    assert remove(left).answer == "removed"


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_whoever_listens_gets_no_connection_by_being_asked(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(_lease, "_is_bound", lambda path: False)  # as of one in another network namespace
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, kind) as bound:
        bound.bind(str(path))
        if kind == socket.SOCK_STREAM:
            bound.listen()
        bound.setblocking(False)
        found = os.lstat(path)
        removal = _lease.remove_socket(str(path), (found.st_dev, found.st_ino))
        assert removal.answer == "busy"
        with pytest.raises(BlockingIOError):
            bound.accept() if kind == socket.SOCK_STREAM else bound.recv(1)
    assert path.is_socket()
