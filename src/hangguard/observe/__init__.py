"""I/O in: everything that is seen of one attempt. Facts, or the reason there are none.

::

    async with Observer(target) as observer:
        sample = await observer.take_sample()

Each probe is one class in a module of its own, and one line in :data:`PROBES`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType
from typing import Any, ClassVar, TypeAlias

import anyio
from anyio.abc import TaskGroup

from hangguard.facts import NOT_ASKED, Ask, Port, Sample, Serving, Stack, Tree, Unseen
from hangguard.observe.answers import HealthProbe, ReadinessProbe
from hangguard.observe.canary import CanaryProbe
from hangguard.observe.gpus import GpuProbe
from hangguard.observe.growth import GrowthProbe
from hangguard.observe.held_files import HeldFilesProbe
from hangguard.observe.host import HostProbe
from hangguard.observe.locks import LocksProbe
from hangguard.observe.logs import LogProbe
from hangguard.observe.memory_stacks import read_directly
from hangguard.observe.nccl_ras import CommunicatorsProbe
from hangguard.observe.processes import ProcessProbe
from hangguard.observe.serving import ServingProbe
from hangguard.observe.stacks import take_stacks
from hangguard.observe.target import Probe, Shared, Target
from hangguard.observe.unix_sockets import port_probe

__all__ = ["PROBES", "Observer", "Probe", "ProbeFactory", "Shared", "Target"]

ProbeFactory: TypeAlias = Callable[[Target, Shared], Probe]

_log = logging.getLogger("hangguard")

_CLOSED_WITHIN = 2.0


class StacksProbe:
    """Takes the stacks of all members, when asked: dear, but it stops nobody."""

    field: ClassVar[str] = "stacks"
    after: ClassVar[tuple[str, ...]] = ("tree",)

    def __init__(self, target: Target, shared: Shared) -> None:
        self._within = target.probe_within
        self._shared = shared
        self._reader = target.guardian_stacks or read_directly

    async def look(self, ask: Ask) -> tuple[Stack, ...] | Unseen:
        """Return a stack a member; one that gave none carries its reason."""
        if not ask.stacks:
            return NOT_ASKED
        tree = self._shared.tree
        if isinstance(tree, Unseen):
            return Unseen(f"the members are unseen: {tree.reason}")
        # A little less than the deadline of the whole look, so that what came in time is not lost with it.
        return await take_stacks(tree.members, within=0.9 * self._within, reader=self._reader)

    async def aclose(self) -> None:
        """Nothing stays between two looks."""


PROBES: tuple[ProbeFactory, ...] = (
    lambda target, _shared: ProcessProbe(target),
    lambda target, _shared: LogProbe(target.log_path, within=target.probe_within, telling=target.telling),
    port_probe,
    HealthProbe,
    ReadinessProbe,
    lambda target, _shared: GpuProbe(target.launch, within=target.probe_within),
    lambda target, _shared: HostProbe(within=target.probe_within, root=target.root),
    StacksProbe,
    ServingProbe,
    CanaryProbe,
    lambda target, _shared: GrowthProbe(target),
    LocksProbe,
    CommunicatorsProbe,
    HeldFilesProbe,
)
"""Every source, cheap ones first. All are asked at once; ``after`` says who needs whom."""


class Observer:
    """Everything that looks at one attempt, open for as long as the attempt lives."""

    def __init__(self, target: Target, probes: tuple[ProbeFactory, ...] = PROBES) -> None:
        self._target = target
        self._factories = probes
        self._probes: tuple[Probe, ...] = ()
        self._one_at_a_time = anyio.Lock()
        self._complained: set[str] = set()

    async def __aenter__(self) -> Observer:  # noqa: PYI034 - Self is of 3.11
        self._tasks: TaskGroup = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._shared = Shared(tasks=self._tasks)
        self._probes = tuple(factory(self._target, self._shared) for factory in self._factories)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End every probe and every open request, in bounded time. The body's error passes as it is.

        The task group is not told of that error: it would wrap it into a group.
        """
        self._tasks.cancel_scope.cancel()
        with anyio.move_on_after(_CLOSED_WITHIN, shield=True):
            async with anyio.create_task_group() as closing:
                for probe in self._probes:
                    closing.start_soon(self._close, probe)
        self._tasks.cancel_scope.shield = True
        await self._tasks.__aexit__(None, None, None)

    async def take_sample(self, ask: Ask = Ask()) -> Sample:  # noqa: B008 - frozen
        """Ask every probe and return what they saw. A probe that fails or hangs makes its own field unseen.

        ``exit`` is read first: once it is there, the log of the same sample is complete.
        """
        async with self._one_at_a_time:
            t, ended = self._target.clock(), self._target.exit_of()
            facts: dict[str, Any] = {}
            seen = {probe.field: anyio.Event() for probe in self._probes}
            async with anyio.create_task_group() as looks:
                for probe in self._probes:
                    looks.start_soon(self._look, probe, ask, facts, seen)
            return Sample(t=t, exit=ended, **facts)

    async def _look(self, probe: Probe, ask: Ask, facts: dict[str, Any], seen: dict[str, anyio.Event]) -> None:
        for field in getattr(probe, "after", ()):
            if field in seen:
                await seen[field].wait()
        facts[probe.field] = fact = await self._fact(probe, ask)
        self._share(probe.field, fact)
        seen[probe.field].set()

    async def _fact(self, probe: Probe, ask: Ask) -> object:
        within = self._target.probe_within
        try:
            with anyio.move_on_after(within):
                return await probe.look(ask)
        except Exception as problem:  # noqa: BLE001 - the named edge: no probe ends the supervision
            self._complain(probe, problem)
            return Unseen(f"probe failed: {type(problem).__name__}: {problem}".removesuffix(": "))
        return Unseen(f"no answer within {within:.3g} s")

    def _share(self, field: str, fact: object) -> None:
        if field == "tree" and isinstance(fact, (Tree, Unseen)):
            self._shared.tree = fact
        elif field == "port" and isinstance(fact, (Port, Unseen)):
            self._shared.port = fact
        elif field == "serving" and isinstance(fact, (Serving, Unseen)):
            self._shared.serving = fact

    async def _close(self, probe: Probe) -> None:
        try:
            await probe.aclose()
        except Exception as problem:  # noqa: BLE001 - the named edge: no probe ends the supervision
            self._complain(probe, problem)

    def _complain(self, probe: Probe, problem: Exception) -> None:
        """Log a defect of a probe once: in every sample it would fill the disk."""
        if probe.field not in self._complained:
            self._complained.add(probe.field)
            _log.error("the probe of %s failed", probe.field, exc_info=problem)
