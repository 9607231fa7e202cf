"""What members had in /dev/shm, and the names of their sockets, goes with their end; nobody else's ever does.

Every removal has somebody beside it who keeps what is his.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import psutil
import pytest
from faces import User, little
from seen import PROGRAMS, target, until, until_sync
from states import freezer, thawing
from test_guardian import keep, serve  # noqa: F401 - fixtures
from test_locks import member

import hangguard
from hangguard import Limits, supervise
from hangguard.act import _ending, _lease
from hangguard.act.files import clear_files
from hangguard.facts import NOT_ASKED, Ask, HeldFiles, Tree, Unseen
from hangguard.held import process_folder
from hangguard.observe import Shared, held_files
from hangguard.observe.held_files import HeldFilesProbe, _named_sockets
from hangguard.run_state import list_runs

pytestmark = pytest.mark.anyio

SHM = Path("/dev/shm")
ALL = ("mapped", "semaphore", "socket", "worker")
PROGRAM = str(PROGRAMS / "files_server.py")
OURS = ("shared", "semaphore", "listens", "relative", "datagram")
OTHERS = ("log", "readonly", "private", "nested")
"""What a server may have in /dev/shm that is no shared memory: its log, weights, libraries, a cache."""


@pytest.fixture
def litter(tmp_path):
    """Paths that the test removes at its end, whatever happens."""
    paths = []
    yield paths
    for path in map(Path, paths):
        path.unlink(missing_ok=True)
        if path.parent.parent == SHM:
            path.parent.rmdir()


def said(folder):
    until_sync((folder / "made").exists)
    return {kind: Path(path) for kind, path in json.loads((folder / "made").read_text()).items()}


def program(folder, *words):
    return [sys.executable, PROGRAM, str(folder), *words]


def left_by(log):
    """What the little server says that it has."""
    lines = Path(log).read_text(errors="replace").splitlines()
    return {Path(line.rpartition("left: ")[2]) for line in lines if "left: " in line}


def file_id(path):
    found = os.lstat(path)
    return (found.st_dev, found.st_ino)


def answers(files):
    return {Path(file.path): file.answer for file in files}


def item(release):
    return next(item for item in release.items if item.resource == "files")


@contextmanager
def holding(path, code="fd = os.open(path, os.O_RDWR); kept = mmap.mmap(fd, 0); os.closerange(3, 64)"):
    """A stranger that has the file."""
    words = f"import mmap, os, sys\npath = sys.argv[1]\n{code}\nprint('has', flush=True)\nsys.stdin.readline()\n"
    words += "print(kept[:3], flush=True)\n"
    command = [sys.executable, "-c", words, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "has\n"
            yield process
        finally:
            process.kill()


def goes_on(process):
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline() == "b'xxx'\n" and process.wait(10) == 0


def killed_guardian(server):
    psutil.Process(server.guardian_pid).kill()
    return until(lambda: not server.guardian_alive)


# ----------------------------------------------------------------------------------- all of ours goes


async def test_all_that_a_server_has_goes_with_it_and_is_told(tmp_path, litter):
    async with supervise(little(leave=ALL, tp=2, leave_shm=True), run_dir=tmp_path) as server:
        ours = left_by(server.attempt.log_path)
        litter += ours
        assert len(ours) == 5
        assert all(path.exists() for path in ours)
    release = server.attempt.release
    assert [path for path in ours if path.exists()] == []
    assert answers(release.files).items() >= dict.fromkeys(ours, "removed").items()
    assert all(file.used_bytes >= 1 << 20 for file in release.files if ".mmap" in file.path or "torch_" in file.path)
    assert item(release).answer == "released"
    assert "removed" in item(release).detail
    assert ours.isdisjoint(map(Path, release.unattributed_files))


def noted_in(run_dir):
    """What the run has noted by now that members have."""
    (run,) = list_runs(run_dir)
    return {Path(file.path) for file in run.state.files}


async def test_what_a_killed_worker_left_goes_too(tmp_path, litter):
    command = little(leave=("worker",), tp=2, ignore_crash=True)
    async with supervise(command, run_dir=tmp_path) as server:
        ours = left_by(server.attempt.log_path)
        litter += ours
        assert len(ours) == 2
        await until(lambda: noted_in(tmp_path) >= set(ours))
        for path in ours:
            psutil.Process(int(path.name.split("_")[1])).kill()
        await until(lambda: not any(psutil.pid_exists(int(path.name.split("_")[1])) for path in ours))
        assert all(path.exists() for path in ours)
        await server.stop()
    assert answers(server.attempt.release.files) == dict.fromkeys(ours, "removed")
    assert not any(path.exists() for path in ours)


@pytest.mark.parametrize("guardian", ["lives", "is dead"])
async def test_what_nobody_has_looked_at_yet_is_looked_at_before_the_first_signal(
    serve,  # noqa: F811
    tmp_path,
    litter,
    guardian,
):
    async with serve(argv=program(tmp_path, *OURS)) as server:
        ours = said(tmp_path)
        litter += ours.values()
        if guardian == "is dead":
            await killed_guardian(server)
        stopped = await server.stop(grace=1.0)
    assert stopped.by == ("guardian" if guardian == "lives" else "supervisor")
    assert stopped.files_unseen == ()
    assert answers(stopped.files) == dict.fromkeys(ours.values(), "removed")
    assert not any(path.exists() for path in ours.values())


async def test_what_a_server_makes_while_it_is_being_stopped_goes_too_and_a_strangers_new_file_stays(
    serve,  # noqa: F811
    tmp_path,
    litter,
):
    theirs = SHM / f"psm_{os.urandom(6).hex()}"
    litter.append(theirs)
    async with serve(argv=program(tmp_path, "shared", "last")) as server:
        assert "last" not in said(tmp_path)
        stopped = await server.stop(grace=1.0, on_progress=lambda _: theirs.write_bytes(b"somebody's"))
    ours = said(tmp_path)
    litter += ours.values()
    assert ours.keys() == {"shared", "last"}
    assert answers(stopped.files) == dict.fromkeys(ours.values(), "removed")
    assert not any(path.exists() for path in ours.values())
    assert theirs.read_bytes() == b"somebody's"


@pytest.mark.parametrize("guardian", ["lives", "is dead"])
async def test_what_was_seen_goes_also_when_all_had_ended_before_the_stop(serve, tmp_path, litter, guardian):  # noqa: F811
    async with serve(argv=program(tmp_path, *OURS)) as server:
        ours = said(tmp_path)
        litter += ours.values()
        seen = await look(server.pid)
        server.remember_files(seen.files)
        if guardian == "is dead":
            await killed_guardian(server)
        os.kill(server.pid, signal.SIGKILL)
        await server.wait_exit()
        assert all(path.exists() for path in ours.values())
        stopped = await server.stop(grace=1.0)
    assert answers(stopped.files) == dict.fromkeys(ours.values(), "removed")
    assert not any(path.exists() for path in ours.values())


def test_all_goes_when_the_supervising_program_is_killed(tmp_path, litter):
    user = User(tmp_path, server={"leave": ALL, "tp": 2})
    try:
        user.said("serving")
        user.tree()
        ours = left_by(next(tmp_path.glob("runs/*/attempt-1.log")))
        litter += ours
        assert len(ours) == 5
        os.kill(user.process.pid, signal.SIGKILL)
        until_sync(lambda: not any(path.exists() for path in ours), within=5.0)
    finally:
        user.close()


async def test_memory_that_was_renamed_is_found_by_what_it_is(serve, tmp_path, litter):  # noqa: F811
    async with serve(argv=program(tmp_path, "shared")) as server:
        path = said(tmp_path)["shared"]
        server.remember_files((await look(server.pid)).files)
        renamed = path.rename(path.with_name(f"renamed-{path.name}"))
        litter += [path, renamed]
        os.kill(server.pid, signal.SIGKILL)
        await server.wait_exit()
        stopped = await server.stop(grace=1.0)
    assert answers(stopped.files) == {renamed: "removed"}
    assert not renamed.exists()


# --------------------------------------------------------------------------------- nobody else's does


STRANGER = """
import pathlib, secrets, sys
kinds = [
    "psm_{}", "sem.mp-{}", "torch_{}_1_0", "nccl-{}", "cuda.shm.0.{}.1", "vllm_dist_{}-cpushm_0",
    "sgl_shm_{}", "sglang_loads_{}.shm",
]
for number in range(200):
    path = pathlib.Path("/dev/shm", kinds[number % 8].format(secrets.token_hex(6)))
    path.write_bytes(b"somebody's")
    print(path)
"""


async def test_200_files_at_rest_of_a_stranger_that_look_like_ours_survive_and_are_listed(tmp_path, litter):
    async with supervise(little(leave=ALL), run_dir=tmp_path) as server:
        made = subprocess.run([sys.executable, "-c", STRANGER], capture_output=True, text=True, check=True).stdout
        strangers = {Path(line) for line in made.splitlines()}
        ours = left_by(server.attempt.log_path)
        litter += [*strangers, *ours]
    release = server.attempt.release
    assert len(strangers) == 200
    assert all(path.read_bytes() == b"somebody's" for path in strangers)
    assert not any(path.exists() for path in ours)
    assert strangers <= set(map(Path, release.unattributed_files))
    assert answers(release.files) == dict.fromkeys(ours, "removed")
    assert release.left_behind == ()


async def test_a_file_of_ours_that_a_bystander_has_mapped_survives_and_he_is_named(tmp_path, litter):
    argv = [sys.executable, "-c", SERVES.format(program=program(tmp_path, "shared", "semaphore")), "{port}"]
    async with supervise(argv, url="http://127.0.0.1:{port}", run_dir=tmp_path / "runs") as server:
        ours = said(tmp_path)
        litter += ours.values()
        await until(lambda: noted_in(tmp_path / "runs") >= set(ours.values()))  # else it is known to be his as well
        stack = holding(ours["shared"])
        bystander = stack.__enter__()
    release = server.attempt.release
    assert answers(release.files) == {ours["shared"]: "busy", ours["semaphore"]: "removed"}
    assert f"by pid {bystander.pid} (" in item(release).detail
    assert (item(release).answer, item(release).ours) == ("held", False)
    assert release.left_behind == ()
    assert str(ours["shared"]) not in release.unattributed_files
    assert ours["shared"].read_bytes() == b"x" * 100_000
    assert goes_on(bystander)
    stack.__exit__(None, None, None)


SERVES = """
import http.server, subprocess, sys
subprocess.Popen({program})
http.server.test(http.server.SimpleHTTPRequestHandler, port=int(sys.argv[1]), bind="127.0.0.1")
"""


@pytest.mark.parametrize("guardian", ["lives", "is dead"])
async def test_a_file_that_took_the_name_of_ours_survives(serve, tmp_path, litter, guardian):  # noqa: F811
    async with serve(argv=program(tmp_path, "shared", "listens")) as server:
        ours = said(tmp_path)
        litter += ours.values()
        server.remember_files((await look(server.pid)).files)
        new = ours["shared"].with_name(f"new-{ours['shared'].name}")
        new.write_bytes(b"somebody's")
        new.replace(ours["shared"])
        ours["listens"].unlink()
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(ours["listens"]))
        if guardian == "is dead":
            await killed_guardian(server)
        stopped = await server.stop(grace=1.0)
    assert answers(stopped.files) == dict.fromkeys(ours.values(), "gone")
    assert ours["shared"].read_bytes() == b"somebody's"
    assert ours["listens"].is_socket()


@pytest.mark.parametrize("guardian", ["lives", "is dead"])
async def test_logs_weights_libraries_and_caches_in_shared_memory_survive(serve, tmp_path, litter, guardian):  # noqa: F811
    async with serve(argv=program(tmp_path, *OTHERS, "shared")) as server:
        made = said(tmp_path)
        litter += made.values()
        server.remember_files((await look(server.pid)).files)
        if guardian == "is dead":
            await killed_guardian(server)
        stopped = await server.stop(grace=1.0)
    assert answers(stopped.files) == {made["shared"]: "removed"}
    assert {kind for kind in OTHERS if not made[kind].exists()} == set()


@pytest.mark.parametrize("guardian", ["lives", "is dead"])
async def test_what_was_there_before_the_launch_survives_even_written_and_at_rest(serve, tmp_path, litter, guardian):  # noqa: F811
    before = SHM / f"psm_before-{os.getpid()}"
    before.write_bytes(b"x" * 5000)
    litter.append(before)
    async with serve(argv=program(tmp_path, f"shared={before}")) as server:
        assert said(tmp_path)["shared"] == before
        seen = await look(server.pid)
        assert [file.path for file in seen.files] == [str(before)]
        server.remember_files(seen.files)
        if guardian == "is dead":
            await killed_guardian(server)
        stopped = await server.stop(grace=1.0)
    assert stopped.files == ()
    assert before.read_bytes() == b"x" * 5000


async def test_a_socket_that_a_child_of_a_stranger_has_now_survives(serve, tmp_path, litter):  # noqa: F811
    path = Path(tempfile.mkdtemp(), "s")
    litter.append(path)
    async with serve(argv=program(tmp_path, f"listens={path}")) as server:
        said(tmp_path)
        server.remember_files((await look(server.pid)).files)
        # Bound by the member; the same socket is then had by a stranger, as one has it that was sent over another.
        heir = os.pidfd_open(server.pid)
        number = next(n for n in os.listdir(f"/proc/{server.pid}/fd") if sockets_of(server.pid).get(n))
        taken = pidfd_getfd(heir, int(number))
        os.close(heir)
        stopped = await server.stop(grace=1.0)
        assert answers(stopped.files) == {path: "busy"}
        assert path.is_socket()
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(path))
        os.close(taken)


def sockets_of(pid):
    links = {n: os.readlink(f"/proc/{pid}/fd/{n}") for n in os.listdir(f"/proc/{pid}/fd")}
    return {n: link for n, link in links.items() if link.startswith("socket:")}


def pidfd_getfd(pidfd, number):
    import ctypes

    taken = ctypes.CDLL(None).syscall(438, pidfd, number, 0)  # pidfd_getfd(2)
    assert taken >= 0
    return taken


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_nothing_goes_while_a_member_lives_and_all_of_it_afterwards(serve, tmp_path, litter):  # noqa: F811
    with freezer("freezer") as frozen:
        async with serve(argv=program(tmp_path, "shared", "listens")) as server:
            with thawing(frozen):
                ours = said(tmp_path)
                litter += ours.values()
                frozen.freeze(server.pid)
                stopped = await server.stop(grace=0.2)
                assert [survivor.pid for survivor in stopped.survivors] == [server.pid]
                assert answers(stopped.files) == dict.fromkeys(ours.values(), "unknown")
                assert {file.why for file in stopped.files} == {"a member lives"}
                assert all(path.exists() for path in ours.values())
            stopped = await server.stop(grace=0.2)
            assert stopped.survivors == ()
            assert answers(stopped.files) == dict.fromkeys(ours.values(), "removed")


@pytest.mark.long
async def test_nothing_goes_either_where_the_supervisor_could_not_end_all(serve, tmp_path, litter, monkeypatch):  # noqa: F811
    async with serve(argv=program(tmp_path, "shared")) as server:
        ours = said(tmp_path)
        litter += ours.values()
        await killed_guardian(server)
        with monkeypatch.context() as patch:
            survivor = {"pid": server.pid, "started": server.started, "title": "", "state": "D", "wait_channel": ""}
            ended = _ending.Ended(frozenset({(server.pid, server.started)}), [survivor], [], [])
            patch.setattr(_ending.Ending, "run", lambda self: ended)
            stopped = await server.stop(grace=0.2)
        assert answers(stopped.files) == {ours["shared"]: "unknown"}
        assert ours["shared"].exists()
        stopped = await server.stop(grace=0.2)
        assert answers(stopped.files) == {ours["shared"]: "removed"}


async def test_a_guardian_that_is_told_to_end_by_a_stranger_removes_and_tells_it_once(serve, tmp_path, litter):  # noqa: F811
    async with serve(argv=program(tmp_path, "shared")) as server:
        ours = said(tmp_path)
        litter += ours.values()
        os.kill(server.guardian_pid, signal.SIGTERM)
        await server.wait_exit()
        await until(lambda: not ours["shared"].exists())
        stopped = await server.stop(grace=1.0)
        assert answers(stopped.files) == {ours["shared"]: "removed"}


# ----------------------------------------------------------------------------------------- a dry run


async def test_a_dry_run_tells_what_would_go_and_removes_nothing(tmp_path, litter):
    files = [SHM / f"hangguard-test-{os.getpid()}-{n}" for n in range(3)]
    litter += files
    for path in files:
        path.write_bytes(b"xxx" * 2000)
    asked = [plain(path) for path in files]
    asked[2]["inode"] = 1 << 60  # the next number would be that of the next file of anybody on this machine
    with holding(files[1]) as bystander:
        dry = await clear_files(asked, really=False)
        assert [file.answer for file in dry] == ["free", "busy", "gone"]
        assert dry[0].used_bytes >= 6000
        assert all(path.exists() for path in files)
        assert [file.answer for file in await clear_files(asked)] == ["removed", "busy", "gone"]
        assert [path.exists() for path in files] == [False, True, True]
        assert goes_on(bystander)


def plain(path, kind="file", **more):
    device, inode = file_id(path)
    file = {"path": str(path), "device": device, "inode": inode, "kind": kind, "held": "shared", "pid": 1, "started": 1}
    return {**file, "made_ns": 0, **more}


async def test_names_that_are_no_text_are_carried_as_they_are(litter):
    path = os.fsdecode(f"{SHM}/hangguard-test-{os.getpid()}-".encode() + b"\xff\n'")
    litter.append(path)
    Path(path).write_bytes(b"x")
    assert answers(await clear_files([plain(path)])) == {Path(path): "removed"}


async def test_where_no_process_can_be_started_nothing_goes_and_that_is_said(litter, monkeypatch):
    path = SHM / f"hangguard-test-{os.getpid()}"
    path.write_bytes(b"x")
    litter.append(path)
    monkeypatch.setattr(sys, "executable", "/nowhere")
    (file,) = await clear_files([plain(path)])
    assert file.answer == "unknown"
    assert "FileNotFoundError" in file.why
    assert path.exists()


async def test_a_file_that_somebody_reads_in_passing_is_removed_when_he_is_done(litter):
    path = SHM / f"hangguard-test-{os.getpid()}"
    path.write_bytes(b"x")
    litter.append(path)
    reads, done = path.open("rb"), []
    remove = _lease.remove_file

    def closes_after_the_first(*args, **how):
        removal = remove(*args, **how)
        reads.close()
        done.append(removal.answer)
        return removal

    clearing = _lease.Clearing([plain(path)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_lease, "remove_file", closes_after_the_first)
        assert [answer["answer"] for answer in clearing.run()] == ["removed"]
    assert done == ["busy", "removed"]


# -------------------------------------------------------------------------------------- the provenance


async def look(*pids, ask=Ask(files=True), probe=None):  # noqa: B008 - frozen
    made = probe or HeldFilesProbe(target(), Shared(tasks=None))
    made._shared.tree = Tree(members=tuple(member(pid) for pid in pids))
    try:
        return await made.look(ask)
    finally:
        if probe is None:
            await made.aclose()


@pytest.fixture
def start(tmp_path, litter):
    """Start programs with files; return the process and what it says that it made."""
    running = []

    def begin(*words):
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        running.append(subprocess.Popen(program(folder, *words)))
        made = said(folder)
        litter.extend(made.values())
        return running[-1], made

    yield begin
    for process in running:
        process.kill()
        process.wait()


def as_seen_by_hand(pid):
    """The files in /dev/shm that a process has, by what a person would look at."""
    maps = [line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    mapped = {int(line[4]) for line in maps if len(line) == 6 and line[5].startswith("/dev/shm/")}
    opened = {os.stat(f"/proc/{pid}/fd/{n}").st_ino for n in os.listdir(f"/proc/{pid}/fd") if is_in_shm(pid, n)}
    found = subprocess.run(
        ["find", str(SHM), "-type", "f", "-printf", "%i %p\\n"], capture_output=True, text=True, check=False
    )
    names = dict(line.split(" ", 1) for line in found.stdout.splitlines())
    return {Path(names[str(inode)]) for inode in mapped | opened if str(inode) in names}


def is_in_shm(pid, number):
    return os.readlink(f"/proc/{pid}/fd/{number}").startswith("/dev/shm/")


async def test_it_tells_what_the_program_knows_and_a_person_would_see(start):
    process, made = start(*OURS, *OTHERS, "unlinked")
    seen = await look(process.pid)
    assert seen.left_out == ()
    files = {Path(file.path): file for file in seen.files}
    expected = {made[kind] for kind in (*OURS, *OTHERS)}
    assert set(files) == expected  # and not what has no name any more
    assert {path for path, file in files.items() if file.kind == "file"} == as_seen_by_hand(process.pid)
    assert {kind: files[made[kind]].held for kind in (*OURS, *OTHERS)} == {
        "shared": "shared", "semaphore": "shared", "nested": "shared", "readonly": "mapped", "private": "mapped",
        "log": "open", "listens": "bound", "relative": "bound", "datagram": "bound",
    }  # fmt: skip
    for path, file in files.items():
        assert (file.device, file.inode) == file_id(path)
        assert (file.pid, file.started) == (process.pid, member(process.pid).started)
    assert str(made["semaphore"]) not in Path(f"/proc/{process.pid}/maps").read_text()


async def test_what_a_member_had_stays_known_as_long_as_it_is_there(start):
    one, made = start("shared", "listens")
    probe = HeldFilesProbe(target(), Shared(tasks=None))
    try:
        assert {file.path for file in (await look(one.pid, probe=probe)).files} == {*map(str, made.values())}
        one.kill()
        one.wait()
        assert {file.path for file in (await look(probe=probe)).files} == {*map(str, made.values())}
        made["listens"].unlink()
        assert {file.path for file in (await look(probe=probe)).files} == {str(made["shared"])}
        made["shared"].unlink()
        assert (await look(probe=probe)).files == ()
    finally:
        await probe.aclose()


def said_below(folder):
    return [json.loads(path.read_text()) for path in folder.glob("*/made")]


async def test_something_new_in_shared_memory_is_looked_at_unasked_and_nothing_new_is_not(start, litter, tmp_path):
    process, _ = start("shared", "later")
    probe = HeldFilesProbe(target(), Shared(tasks=None))
    try:
        assert await look(process.pid, probe=probe, ask=Ask()) == NOT_ASKED
        await look(process.pid, probe=probe)
        process.send_signal(signal.SIGUSR1)
        later = await until(lambda: next((told for told in said_below(tmp_path) if "later" in told), {}).get("later"))
        litter.append(later)

        async def is_seen():
            seen = await look(process.pid, probe=probe, ask=Ask())
            return seen != NOT_ASKED and later in {file.path for file in seen.files}

        await until(is_seen)
    finally:
        await probe.aclose()


async def test_a_new_named_socket_is_looked_at_unasked(start, litter, tmp_path):
    """A front end that is killed while it starts has bound its sockets, and nothing else of it has changed."""
    process, _ = start("listens", "later_listens")
    probe = HeldFilesProbe(target(), Shared(tasks=None), folder=str(tmp_path))  # nothing appears there
    try:
        await look(process.pid, probe=probe)
        process.send_signal(signal.SIGUSR1)
        told = await until(lambda: next((t for t in said_below(tmp_path) if "later_listens" in t), None))
        litter.append(told["later_listens"])

        async def is_seen():
            seen = await look(process.pid, probe=probe, ask=Ask())
            return seen != NOT_ASKED and told["later_listens"] in {file.path for file in seen.files}

        await until(is_seen)
    finally:
        await probe.aclose()


def test_whoever_connects_to_a_named_socket_is_no_new_one(tmp_path):
    """An accepted connection has its listener's name: on most machines there is one every few seconds."""
    path = str(tmp_path / "s")

    def numbers():
        rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
        return {int(row[6]) for row in rows if row[-1] == path}

    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(path)
        listener.listen()
        listening = numbers()
        client.connect(path)
        with listener.accept()[0]:
            assert numbers() > listening
            assert numbers() & set(_named_sockets()) == listening


async def test_a_member_whose_memory_map_is_locked_is_named_and_hides_nobody_else(start, monkeypatch):
    stuck, stuck_made = start("shared")
    other, made = start("shared")
    over, read = threading.Event(), process_folder.read

    started = member(stuck.pid).started

    def blocks(folder, name, *rest):
        if name == "maps" and process_folder.started_of(folder) == started and folder_is(folder, stuck.pid):
            over.wait()
        return read(folder, name, *rest)

    monkeypatch.setattr("hangguard.held.look.read", blocks)
    probe = HeldFilesProbe(target(probe_within=8.0), Shared(tasks=None))
    try:
        began = time.monotonic()
        seen = await look(stuck.pid, other.pid, probe=probe)
        assert time.monotonic() - began < 8
        assert str(made["shared"]) in {file.path for file in seen.files}
        assert [reason.partition(":")[0] for reason in seen.left_out] == [f"pid {stuck.pid}"]
        again = await look(stuck.pid, other.pid, probe=probe)
        assert "locked" in again.left_out[0]
        # Locked for one busy moment and not for ever: then what it has is seen, without anybody asking.
        over.set()
        await until(lambda: not any(reader.is_busy for reader in probe._left_behind.values()))
        monkeypatch.setattr(held_files, "_AGAIN_AFTER", 0.0)
        seen = await look(stuck.pid, other.pid, ask=Ask(), probe=probe)
        assert str(stuck_made["shared"]) in {file.path for file in seen.files}
        assert seen.left_out == ()
        assert await look(stuck.pid, other.pid, ask=Ask(), probe=probe) == NOT_ASKED
    finally:
        over.set()
        await probe.aclose()


def folder_is(folder, pid):
    return os.readlink(f"/proc/self/fd/{folder}") == f"/proc/{pid}"


async def test_members_unseen_means_unseen_and_a_member_that_ended_is_no_reason(start):
    process, _ = start()
    gone = member(process.pid)
    process.kill()
    process.wait()
    probe = HeldFilesProbe(target(), Shared(tasks=None))
    try:
        probe._shared.tree = Unseen("hidden")
        assert (await probe.look(Ask(files=True))).reason == "the members are unseen: hidden"
        probe._shared.tree = Tree(members=(gone,))
        assert replace(await probe.look(Ask(files=True)), others=()) == HeldFiles(files=())
    finally:
        await probe.aclose()


def test_a_member_that_may_not_be_looked_at_is_named(start):
    process, _ = start("shared")
    identity = (process.pid, member(process.pid).started)
    code = (
        "import sys; sys.modules['hangguard'] = type(sys)('hangguard')\n"  # without what the package imports
        f"sys.modules['hangguard'].__path__ = {hangguard.__path__!r}; from hangguard import held\n"
        f"look = held.Look([{identity}]); print(look.run(), look.left_out)"
    )
    # Its own copy of the interpreter's paths is all it needs, so nothing of this user's home has to be readable.
    weak = [
        "setpriv",
        "--reuid",
        "65534",
        "--regid",
        "65534",
        "--clear-groups",
        "--inh-caps=-all",
        "--bounding-set=-all",
    ]
    said_ = subprocess.run([*weak, sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert said_.stdout == f"[] ['pid {process.pid}: Permission denied']\n"


@pytest.mark.parametrize(
    ("break_", "reason"),
    [
        ({"file_system_of": lambda *_: "ext4"}, "no tmpfs"),
        ({"bound_sockets": lambda: (_ for _ in ()).throw(OSError(93, "Protocol not supported"))}, "Protocol not"),
    ],
    ids=["no tmpfs", "no socket diagnostics"],
)
async def test_what_this_system_cannot_tell_is_said_and_nothing_is_taken_for_ours(start, monkeypatch, break_, reason):
    process, made = start("shared", "listens")
    for name, stand_in in break_.items():
        monkeypatch.setattr(f"hangguard.held.look.{name}", stand_in)
    seen = await look(process.pid)
    assert reason in " ".join(seen.left_out)
    assert len(seen.files) == 1
    assert set(made.values()) >= {Path(file.path) for file in seen.files}


async def test_an_accepted_connection_is_not_the_listeners_name(start):
    _, made = start("listens")
    with socket.socket(socket.AF_UNIX) as listener:
        path = made["listens"].with_name("own")
        listener.bind(str(path))
        listener.listen()
        code = (
            "import socket, sys, time; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); print(flush=True)\n"
        )
        code += "time.sleep(60)"
        with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as caller:
            caller.stdout.readline()
            accepted, _ = listener.accept()
            seen = await look(caller.pid)
            caller.kill()
        accepted.close()
        path.unlink()
    assert seen.files == ()


@pytest.mark.long
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_an_attempt_that_hangs_and_is_reported_only_removes_nothing(tmp_path, litter):
    limits = Limits(patience=5.0, stop_grace=1.0)
    command = little(leave=ALL, faults=(("graph-capture", "deadlock"),))
    heard = []
    supervision = supervise(command, run_dir=tmp_path, on_hang="report", limits=limits, hooks=[heard.append])
    with anyio.move_on_after(60) as scope:
        async with anyio.create_task_group() as group:

            async def run():
                async with supervision:
                    pass

            group.start_soon(run)
            await until(lambda: any(e.event == "verdict" and e.verdict.verdict == "stuck" for e in heard), within=40)
            ours = left_by(next(tmp_path.glob("*/attempt-1.log")))
            litter += ours
            assert len(ours) == 4
            assert all(path.exists() for path in ours)
            assert not any(event.event == "released" for event in heard)
            group.cancel_scope.cancel()
    assert not scope.cancelled_caught
    assert not any(path.exists() for path in ours)
