"""Everything around a launch, looked at once: every source by itself, each with its deadline. Nothing is changed."""

from __future__ import annotations

import logging
import os
import pwd
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import anyio

from hangguard.act.leftovers import still_there
from hangguard.act.trial import try_guardian
from hangguard.engines.base import Engine
from hangguard.errors import Refused
from hangguard.facts import (
    Ask,
    Driver,
    EarlierRun,
    Gpu,
    Host,
    Launch,
    LockFile,
    MemoryLimit,
    ModelFiles,
    Room,
    Surroundings,
    Tree,
    Unseen,
)
from hangguard.installed import versions_beside
from hangguard.judge.checks.boards import RUNTIMES
from hangguard.launching.programs import check_exists, folder_of
from hangguard.launching.reading import model_path, positional_model
from hangguard.observe.cgroups import Cgroups
from hangguard.observe.earlier_runs import read_earlier_runs
from hangguard.observe.folders import TEMP, cache_folders, download_folders
from hangguard.observe.gpus import GpuProbe
from hangguard.observe.host import HostProbe
from hangguard.observe.lane import in_time
from hangguard.observe.limits import read_limits
from hangguard.observe.locks import LocksProbe
from hangguard.observe.model_files import find_model
from hangguard.observe.pci import gpu_translations
from hangguard.observe.permissions import read_permissions
from hangguard.observe.procfs import read_started, read_title
from hangguard.observe.rooms import room_at
from hangguard.observe.target import Shared, Target, why_unseen
from hangguard.run_state import read_run, this_place, why_elsewhere
from hangguard.store import places_of_runs
from hangguard.supervision.run import look_who_listens

T = TypeVar("T")

log = logging.getLogger("hangguard")

SHM = "/dev/shm"  # noqa: S108 - looked at, never written to
FAULTS_WITHIN = 1.5
"""Seconds until the reader of the driver has looked for faults the first time; other boards tell of none."""
MOST_TITLES = 32

Source = Callable[[], Awaitable[Any]]


class LookAround:
    """One look around a launch."""

    def __init__(self, launch: Launch, engine: Engine, run_dir: str | os.PathLike[str] | None, within: float) -> None:
        self._launch = launch
        self._engine = engine
        self._run_dir = run_dir
        self._within = within
        self._ends_at = time.monotonic() + within

    async def take(self) -> Surroundings:
        """Ask every source at once; one that fails, or does not answer, makes its own facts unseen."""
        sources: dict[str, Source] = {
            "obstacle": lambda: self._asked("command", self._obstacle),
            "listener": lambda: look_who_listens(self._launch),
            "run_folders": lambda: self._asked("run folder", self._run_folders),
            "caches": lambda: self._asked("caches", self._caches),
            "model": lambda: self._asked("model", self._model),
            "earlier": lambda: self._asked("earlier runs", self._earlier),
            "host": self._host,
            "memory_limit": lambda: self._asked("control group", _memory_limit),
            "shm": lambda: self._asked("shared memory", lambda: room_at(SHM)),
            "limits": lambda: self._asked("limits", read_limits),
            "permissions": lambda: self._asked("permissions", read_permissions),
            "guardian": lambda: try_guardian(within=0.7 * self._within),
            "packages": lambda: self._asked("packages", self._packages),
            "iommu": lambda: self._asked("iommu", gpu_translations),
            "locks": self._locks,
        }
        facts: dict[str, Any] = {}
        boards: dict[str, Any] = {}
        async with anyio.create_task_group() as group:
            self._tasks = group
            for name, source in sources.items():
                group.start_soon(self._into, facts, name, source)
            group.start_soon(self._into, boards, "GPUs", self._boards)
        return replace(_with_boards(boards["GPUs"]), **facts)

    async def _into(self, facts: dict[str, Any], name: str, source: Source) -> None:
        """Put what a source says into the facts, or why it says nothing."""
        facts[name] = Unseen(f"no answer within {self._within:.3g} s")
        try:
            with anyio.move_on_after(max(0.0, self._ends_at - time.monotonic())):
                facts[name] = await source()
        except OSError as problem:
            facts[name] = why_unseen(problem)
        except Exception as problem:  # a named edge: no source ends the look
            log.exception("the look at %s failed", name)
            facts[name] = Unseen(f"the look failed: {type(problem).__name__}: {problem}".removesuffix(": "))

    async def _asked(self, name: str, question: Callable[[], T]) -> T | Unseen:
        return await in_time(name, question, within=self._within)

    # ------------------------------------------------------------------------------- the launch and its files

    def _obstacle(self) -> Exception | None:
        """Return what ``supervise`` raises of this command at once."""
        launch = self._launch
        try:
            folder_of(launch.cwd)
            check_exists(launch.argv, launch.environment(), launch.cwd)
        except Refused as refused:
            return refused
        return None

    def _run_folders(self) -> tuple[Room, ...]:
        return tuple(room_at(place) for place in places_of_runs(self._run_dir))

    def _earlier(self) -> tuple[EarlierRun, ...]:
        places = _own_places(self._run_dir)
        return tuple(run for place in places for run in read_earlier_runs(place, recorded=_recorded_files))

    def _caches(self) -> tuple[Room, ...]:
        folders = cache_folders(self._launch, home=_home(), user=_user(), temp=TEMP)
        return tuple(room_at(folder.path) for folder in folders)

    def _model(self) -> ModelFiles | None:
        launch, engine = self._launch, self._engine
        start = engine.recognise(launch.argv)
        if start is None or launch.delegates_to is not None:
            return None  # nobody knows which word it is, or on which machine it would be looked for
        own = launch.argv[start:]
        name = model_path(engine, (*launch.file_args, *own), positional_model(engine, own))
        hubs = [folder.path for folder in download_folders(launch, home=_home())]
        return find_model(name, launch.cwd, hubs) if name else None

    def _packages(self) -> tuple[tuple[str, str], ...]:
        launch = self._launch
        return versions_beside(self._engine, launch.argv, launch.environment(), launch.cwd, ("torch", *RUNTIMES))

    # ----------------------------------------------------------------------------------------- probes that exist

    async def _locks(self) -> tuple[LockFile, ...] | Unseen:
        target = Target(guardian_pid=0, root=(0, 0), log_path=None, launch=self._launch, probe_within=self._within)
        probe = LocksProbe(target, Shared(tasks=self._tasks, tree=Tree(members=())))
        try:
            return await probe.look(Ask(locks=True))
        finally:
            await probe.aclose()

    async def _host(self) -> Host | Unseen:
        probe = HostProbe(within=self._within)
        try:
            return await probe.look(Ask())
        finally:
            await probe.aclose()

    async def _boards(self) -> tuple[tuple[Gpu, ...] | Unseen, Driver | Unseen, tuple[tuple[int, str], ...]]:
        """Return the GPUs of the launch, their driver, and who has memory on them."""
        probe = GpuProbe(self._launch, within=0.7 * self._within)
        try:
            boards = await probe.look(Ask())
            enough_at = time.monotonic() + FAULTS_WITHIN
            while _is_blind_for_faults(boards) and time.monotonic() < enough_at:
                await anyio.sleep(0.05)  # the reader looks for them in a thread of its own
                boards = await probe.look(Ask())
            titles = await self._asked("titles", lambda: _titles(boards))
            return boards, probe.driver, () if isinstance(titles, Unseen) else titles
        finally:
            await probe.aclose()


def _with_boards(found: Any) -> Surroundings:
    if isinstance(found, Unseen):
        return Surroundings(gpus=found)
    boards, driver, titles = found
    return Surroundings(gpus=boards, driver=driver, titles=titles)


def _is_blind_for_faults(boards: tuple[Gpu, ...] | Unseen) -> bool:
    return not isinstance(boards, Unseen) and any(isinstance(gpu.faults, Unseen) for gpu in boards)


def _titles(boards: tuple[Gpu, ...] | Unseen) -> tuple[tuple[int, str], ...]:
    """Return who the holders are; the number of one in another PID namespace is nobody's here."""
    seen = () if isinstance(boards, Unseen) else boards
    pids = {
        holder.pid
        for gpu in seen
        for holder in (() if isinstance(gpu.holders, Unseen) else gpu.holders)
        if holder.known is not False
    }
    named = ((pid, read_title(pid)) for pid in sorted(pids)[:MOST_TITLES])
    return tuple((pid, title) for pid, title in named if title)


def _memory_limit() -> MemoryLimit | Unseen:
    groups = Cgroups((os.getpid(), read_started(os.getpid())))
    groups.look()
    return groups.memory_limit()


def _own_places(run_dir: str | os.PathLike[str] | None) -> Iterable[str]:
    """Where runs lie that have a folder of their own kind; in a temporary folder there may be anybody's."""
    places = places_of_runs(run_dir)
    return places[:1] if Path(places[0]).name == "runs" or run_dir is not None else ()


def _recorded_files(folder: str) -> tuple[str, ...]:
    """Return what is still there, by device and inode, of what the members of a run were seen to have."""
    state, here = read_run(folder).state, this_place()
    if isinstance(state, Unseen) or why_elsewhere(state, here):
        return ()
    return tuple(file.path for file in still_there(state, here))


def _home() -> str:
    return os.path.expanduser("~")  # noqa: PTH111 - without a home it stays "~"


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return ""
