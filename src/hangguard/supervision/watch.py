"""Eyes on a server that somebody else started: what :class:`~hangguard.observe.Observer` needs, without a guardian."""

from __future__ import annotations

import os
import select
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from typing import TypeAlias

from hangguard.engines.common import telling_of
from hangguard.engines.counters import canary_for, load_routes_for, metrics_for
from hangguard.facts import Ask, Exit, Limits, Sample, Unseen
from hangguard.judge import Rules, rules_for
from hangguard.observe import PROBES, Observer, Probe, Shared, Target, procfs
from hangguard.supervision.found import FoundServer
from hangguard.supervision.logfile import OpenLog, open_log
from hangguard.supervision.run import Watcher

Factory: TypeAlias = Callable[[Target, Shared], Probe]

ELSEWHERE = Unseen("it is not on this machine, or may not be seen by this user")
NO_PLACE = Unseen("it is not known where it answers: give --url")
NOT_OUR_SOCKET = Unseen("it answers on a unix socket, and root does not write into whatever another user names")


@dataclass(slots=True, kw_only=True)
class Watch:
    """What is open while one server is looked at."""

    server: FoundServer
    observer: Watcher
    rules: Rules
    log: OpenLog | Unseen
    root: Root
    clock: Callable[[], float] = time.monotonic


class Root:
    """The topmost process of a server, of which we are no parent: whether it has ended, and with which code."""

    def __init__(self, server: FoundServer, clock: Callable[[], float] = time.monotonic) -> None:
        self._identity = server.identity
        self._clock = clock
        self._pidfd: int | None = None
        self._exit: Exit | None = None
        try:
            self._pidfd = os.pidfd_open(server.pid) if server.pid else None
        except (AttributeError, OSError):  # an old Python or kernel, a process that has just gone: its entry tells
            return
        if not self._lives():  # what we hold is another process with its pid
            self.close()

    def exit(self) -> Exit | None:
        """Return its end; ``None``: it lives, or is not of this machine. Never blocks."""
        if self._exit is None and self._identity[0] and self._has_ended():
            code: int | Unseen | None = None
            if self._pidfd is not None:
                code = procfs.exit_code_of_pidfd(self._pidfd)
            unknown = Unseen("it was not our child, and the kernel does not tell")
            self._exit = Exit(code=unknown if code is None else code, at=self._clock())
        return self._exit

    def close(self) -> None:
        """Let the descriptor go."""
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def _has_ended(self) -> bool:
        if self._pidfd is None:
            return not self._lives()
        poll = select.poll()  # not select(): its descriptors end at 1024
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def _lives(self) -> bool:
        try:
            stat = procfs.read_stat(f"/proc/{self._identity[0]}/stat")
        except OSError:
            return False
        return stat.identity == self._identity and not (stat.state in "ZXx" and stat.number(20) <= 1)


@asynccontextmanager
async def watching(server: FoundServer, *, log: str | None, limits: Limits) -> AsyncIterator[Watch]:
    """Open everything that is needed to look at this server; nothing of it is changed, and leaving leaves it alone."""
    engine = server.engine
    root = Root(server)
    opened: OpenLog | Unseen = Unseen("not opened")
    try:
        opened = await open_log(server, log)
        target = Target(
            guardian_pid=0,
            root=server.identity,
            log_path=opened.path if isinstance(opened, OpenLog) else None,
            launch=server.launch,
            telling=telling_of(engine),
            health_path=engine.health_path,
            metrics_path=engine.metrics_path,
            metrics=metrics_for(engine, server.launch.version),
            metrics_hint=engine.metrics_hint,
            load_routes=load_routes_for(engine, server.launch.version),
            quiet_routes=engine.quiet_routes,
            canary=canary_for(engine, server.launch),
            ras_address=_ras_address(server),
            rights=server.rights,
            exit_of=root.exit,
            probe_within=limits.probe_within,
        )
        rules = rules_for(engine, server.launch, limits, attached=True)
        async with Observer(target, _probes(server, opened)) as observer:
            yield Watch(server=server, observer=observer, rules=rules, log=opened, root=root)
    finally:
        root.close()
        if isinstance(opened, OpenLog):
            opened.close()


def _ras_address(server: FoundServer) -> tuple[str, int] | None:
    """Return where its NCCL answers, if its environment says so: on this machine only, whatever it names."""
    host, _, port = server.launch.environment().get("NCCL_RAS_ADDR", "").rpartition(":")
    is_ours = host == "localhost" or host.startswith("127.") or host in {"[::1]", "::1"}
    return (host.strip("[]"), int(port)) if is_ours and port.isascii() and port.isdigit() else None


def _probes(server: FoundServer, log: OpenLog | Unseen) -> tuple[Factory, ...]:
    """Return the probes, those that cannot see anything of this server replaced by their reason."""
    hidden: dict[str, Unseen] = {"log": log} if isinstance(log, Unseen) else {}
    launch = server.launch
    if not launch.port and (launch.socket_path is None or server.rights is not None):
        reason = NO_PLACE if launch.socket_path is None else NOT_OUR_SOCKET
        hidden |= dict.fromkeys(("port", "health", "answer", "serving", "canary"), reason)
    if not server.pid:
        asked = {"health", "answer", "serving", "canary", *hidden}
        names = (field.name for field in fields(Sample))
        hidden |= {name: ELSEWHERE for name in names if name not in {"t", "exit", "quiet_until", *asked}}

    def made(factory: Factory) -> Factory:
        def make(target: Target, shared: Shared) -> Probe:
            probe = factory(target, shared)
            reason = hidden.get(probe.field)
            return probe if reason is None else _Hidden(probe, reason)

        return make

    return tuple(made(factory) for factory in PROBES)


class _Hidden:
    """In the place of a probe that could see nothing: says why."""

    def __init__(self, probe: Probe, reason: Unseen) -> None:
        self._probe = probe
        self._reason = reason

    @property
    def field(self) -> str:
        """The field that the probe would have filled."""
        return self._probe.field

    async def look(self, _ask: Ask) -> Unseen:
        """Return the reason."""
        return self._reason

    async def aclose(self) -> None:
        """Close the probe, which was never asked."""
        await self._probe.aclose()
