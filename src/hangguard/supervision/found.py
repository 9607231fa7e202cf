"""Which servers run on this machine, and what each of them is: read from ``/proc``, nothing is touched.

A server is the topmost process whose words an engine recognises; or a process that carries an engine's title and has
no such process above it (the engine core that outlived its front end). Files that it names are opened with its own
user's rights, only where they are regular files, and never executed.
"""

from __future__ import annotations

import errno
import os
import pwd
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from hangguard.engines import ENGINES
from hangguard.engines.base import Engine
from hangguard.engines.generic import GENERIC
from hangguard.errors import BadLaunch, NoSuchServer
from hangguard.facts import Launch, Unseen
from hangguard.installed import versions_beside
from hangguard.launching import read_command
from hangguard.observe import procfs
from hangguard.observe.lane import in_time
from hangguard.observe.ports import who_listens
from hangguard.observe.procfs import Stat
from hangguard.observe.rights import Rights, rights_of
from hangguard.supervision.machine import MOST_SERVERS, READ_WITHIN, SCAN_WITHIN, Scan, scan_machine
from hangguard.supervision.places import here, is_here, on_loopback, place_of

Identity = tuple[int, int]

PACKAGES = (
    "torch", "triton", "transformers", "flashinfer-python", "flash-attn", "sgl-kernel", "sglang-kernel", "xgrammar",
    "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "numpy", "ray", "pyzmq",
)  # fmt: skip
"""Distributions whose versions an issue tracker asks for."""
_ENVIRONMENT = 1 << 20
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.()%-]*", re.ASCII)
_NO_PLACE = "http://127.0.0.1:1"
_OTHERS_FILES = "it runs in a container: its version and configuration files were not read"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundServer:
    """A server, as its processes show it."""

    pid: int
    """The topmost process of it; 0: it runs on another machine, or nobody may see its processes."""
    started: int
    """Its start time in clock ticks since boot: with the pid, its identity."""
    user: str = ""
    title: str = ""
    """Its command line, secrets out."""
    processes: int = 0
    age_seconds: float = 0.0
    launch: Launch
    """What it was started with, as far as that can be read. A ``port`` of 0: it is not known where it answers."""
    versions: tuple[tuple[str, str], ...] = ()
    """Packages beside the engine and their versions, read from files."""
    notes: tuple[str, ...] = ()
    """What could not be read of it, in sentences for people."""
    engine: Engine = field(default=GENERIC, repr=False)
    rights: Rights | None = field(default=None, repr=False)

    @property
    def identity(self) -> Identity:
        """Return (pid, start time)."""
        return (self.pid, self.started)


# ---------------------------------------------------------------------------------------- one server


async def read_server(
    scan: Scan, pid: int, *, engine: str | Engine | None = None, url: str | None = None
) -> FoundServer:
    """Return what a process and those below it are. Raises :class:`NoSuchServer` when it ends meanwhile."""
    stat = scan.stats[pid]
    try:
        rights = rights_of(pid)
        read = await in_time(
            "server", lambda: _read(scan, stat, engine or scan.engine(pid), url), within=READ_WITHIN, rights=rights
        )
    except OSError as problem:
        raise NoSuchServer(f"Process {pid} has ended, or cannot be seen ({problem.strerror})") from problem
    if isinstance(read, Unseen):
        launch = _bare(scan.argv(pid), engine or scan.engine(pid), url)
        read = (launch, _engine(engine or scan.engine(pid)), "", (), (f"its files cannot be read: {read.reason}",))
    launch, known, user, versions, notes = read
    local = await in_time("address", lambda: here(launch), within=1.0)
    return FoundServer(
        pid=pid,
        started=stat.started,
        user=user,
        title=scan.title(pid),
        processes=len(scan.below(pid)),
        age_seconds=max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - stat.started * procfs.TICK),
        launch=on_loopback(launch) if isinstance(local, Unseen) else local,
        versions=versions,
        notes=(*notes, *launch.notes),
        engine=known,
        rights=rights,
    )


def _read(
    scan: Scan, stat: Stat, engine: str | Engine | None, url: str | None
) -> tuple[Launch, Engine, str, tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Read what the process names. Blocks; runs with the rights of its user."""
    notes: list[str] = []
    pid, argv = stat.pid, scan.argv(stat.pid)
    env: dict[str, str] = {}
    folder = "/"
    try:
        env = _variables(procfs.read_bytes(f"/proc/{pid}/environ", _ENVIRONMENT))
        folder = os.readlink(f"/proc/{pid}/cwd")  # noqa: PTH115 - it is only compared and joined
    except OSError as problem:
        notes.append(f"its environment and working directory cannot be read ({problem.strerror})")
    is_elsewhere = _is_elsewhere(pid)
    launch, known, note = _launch(argv, env, folder, engine, url, reads_files=not is_elsewhere)
    notes += [note] if note else []
    versions: tuple[tuple[str, str], ...] = ()
    if is_elsewhere:
        notes.append(_OTHERS_FILES)
    elif known.distributions:
        versions = versions_beside(known, argv, env, folder, PACKAGES)
    if procfs.read_started(pid) != stat.started:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    return launch, known, _user_of(pid), versions, tuple(notes)


def _launch(
    argv: tuple[str, ...],
    env: dict[str, str],
    folder: str,
    engine: str | Engine | None,
    url: str | None,
    *,
    reads_files: bool,
) -> tuple[Launch, Engine, str]:
    read = partial(read_command, argv, engine=engine, env=env, cwd=folder, must_exist=False, reads_files=reads_files)
    try:
        return (*read(url=url), "")
    except (BadLaunch, OSError) as problem:
        note = f"where it answers is not known: {problem.problem if isinstance(problem, BadLaunch) else problem}"
    try:
        launch, known = read(url=_NO_PLACE)
    except (BadLaunch, OSError):
        return _bare(argv, engine, url), _engine(engine), note
    return replace(launch, url="", host="", port=0), known, note


def _bare(argv: tuple[str, ...], engine: str | Engine | None, url: str | None) -> Launch:
    """Return a launch of which only the words are known."""
    place = place_of(url) if url else ("", "", 0)
    return Launch(argv=argv, env=(), cwd="/", engine=_engine(engine).name, url=place[0], host=place[1], port=place[2])


def _engine(engine: str | Engine | None) -> Engine:
    if isinstance(engine, Engine):
        return engine
    return next((known for known in ENGINES if known.name == engine), GENERIC)


def _variables(text: bytes) -> dict[str, str]:
    """Return the variables; what a title has overwritten (setproctitle uses that memory) is left out."""
    pairs = (entry.partition("=") for entry in text.decode(errors="replace").split("\0"))
    return {name: value for name, equals, value in pairs if equals and _VARIABLE.fullmatch(name)}


def _is_elsewhere(pid: int) -> bool:
    """Tell whether its paths are those of another root or mount namespace: a container's."""
    try:
        return not os.path.samestat(os.stat(f"/proc/{pid}/root"), os.stat("/")) or (  # noqa: PTH116
            os.readlink(f"/proc/{pid}/ns/mnt") != os.readlink("/proc/self/ns/mnt")  # noqa: PTH115
        )
    except OSError:
        return False


def _user_of(pid: int) -> str:
    uid = os.stat(f"/proc/{pid}").st_uid  # noqa: PTH116
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


# -------------------------------------------------------------------------------------------- choosing


async def find_servers() -> tuple[FoundServer, ...]:
    """Return every server of this machine that can be recognised, oldest first."""
    scan = await scan_machine()
    return await _read_all(scan, scan.roots())


async def _read_all(scan: Scan, pids: list[int]) -> tuple[FoundServer, ...]:
    found = []
    for pid in pids:
        with suppress(NoSuchServer):  # it has ended since
            found.append(await read_server(scan, pid))
    return tuple(found)


async def choose(
    *,
    pid: int | None = None,
    url: str | None = None,
    match: str | None = None,
    started: int | None = None,
    engine: str | Engine | None = None,
) -> FoundServer:
    """Return the one server that is meant. Raises :class:`NoSuchServer` where it is none, or not exactly one."""
    if pid is not None:
        return await _of_pid(pid, url=url, started=started, engine=engine)
    if match is not None:
        return await _of_match(match, url=url, engine=engine)
    if url is not None:
        return await _of_url(url, engine=engine)
    scan = await scan_machine()
    roots = scan.roots()
    if len(roots) == 1:
        return await read_server(scan, roots[0], engine=engine)
    candidates = tuple((root, scan.title(root)) for root in roots)
    if not roots:
        advice = "Give its pid or its URL: a server behind a script, in a container or of another machine looks alike"
        raise NoSuchServer("No server was found on this machine", advice=advice)
    raise NoSuchServer(f"There are {len(roots)} servers on this machine", candidates, advice="Which one? Give its pid")


async def _of_pid(pid: int, *, url: str | None, started: int | None, engine: str | Engine | None) -> FoundServer:
    scan = await scan_machine()
    if pid not in scan.stats or scan.stats[pid].state in "ZXx":
        what = "has ended" if pid in scan.stats else "does not exist"
        raise NoSuchServer(f"Process {pid} {what}", tuple((root, scan.title(root)) for root in scan.roots()))
    if started is not None and scan.stats[pid].started != started:
        now = scan.stats[pid].started
        raise NoSuchServer(f"Process {pid} is another one now: it started at tick {now}, not {started}")
    root = pid if started is not None else scan.root_of(pid) or pid
    server = await read_server(scan, root, engine=engine, url=url)
    if root != pid:
        note = f"process {pid} ({scan.title(pid)[:80]}) belongs to it: the whole server is looked at"
        return replace(server, notes=(note, *server.notes))
    return server


async def _of_match(match: str, *, url: str | None, engine: str | Engine | None) -> FoundServer:
    scan = await scan_machine()
    found = scan.containing(match)
    if len(found) != 1:
        candidates = tuple((pid, scan.title(pid)) for pid in found[:MOST_SERVERS])
        what = f"{len(found)} process trees have {match!r} in a command line"
        raise NoSuchServer(what, candidates, advice="It must be exactly one: give its pid")
    return await read_server(scan, found[0], engine=engine, url=url)


async def _of_url(url: str, *, engine: str | Engine | None) -> FoundServer:
    base, host, port = place_of(url)
    local = await in_time("address", lambda: is_here(host), within=SCAN_WITHIN)
    if local is not True:
        note = "it runs on another machine: only its answers can be seen. Run this there for the rest"
        return _only_answers(base, host, port, engine, note)
    scan = await scan_machine()
    listener = await in_time("port", lambda: who_listens(port, host=host), within=SCAN_WITHIN)
    if not isinstance(listener, Unseen) and listener is not None and listener.pid in scan.stats:
        root = scan.root_of(listener.pid) or listener.pid
        return await read_server(scan, root, engine=engine, url=base)
    servers = await _read_all(scan, scan.roots())
    meant = [server for server in servers if server.launch.port == port]
    if len(meant) == 1:  # it does not listen yet, or its descriptors may not be read
        return await read_server(scan, meant[0].pid, engine=engine, url=base)
    if listener is None:
        candidates = tuple((server.pid, server.title) for server in servers)
        raise NoSuchServer(f"Nobody listens on port {port} of this machine", candidates)
    note = "whose process listens there may not be seen by this user: only its answers can. Try sudo"
    return _only_answers(base, host, port, engine, note)


def _only_answers(base: str, host: str, port: int, engine: str | Engine | None, note: str) -> FoundServer:
    launch = Launch(argv=(), env=(), cwd="/", engine=_engine(engine).name, url=base, host=host, port=port)
    return FoundServer(pid=0, started=0, launch=launch, notes=(note,), engine=_engine(engine))
