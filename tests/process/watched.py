"""Programs under a supervision that only reports, several at once: what it told of each, and what it says now."""

import contextlib
import os
import signal
import sys
from pathlib import Path

import anyio
import psutil
import tenacity
from seen import PROGRAMS, until

from hangguard import GaveUp, Limits, Retry, supervise

QUICK = Limits(patience=5.0, stop_grace=1.0)
"""The shortest patience there is: one window."""

USUAL = Limits(stop_grace=1.0)
"""The patience that a user gets, for what must never be called a hang."""


def program(name, *words):
    return [sys.executable, "-B", str(PROGRAMS / f"states_{name}.py"), *map(str, words)]


class Watched:
    """One launch, from its start to the end of the block."""

    def __init__(self, folder, command, **options):
        folder.mkdir(parents=True, exist_ok=True)
        options = {"url": "http://127.0.0.1:{port}", "on_hang": "report", "limits": QUICK, **options}
        if options.get("engine", "generic") != "generic":
            options.pop("url")
        self.folder = folder
        self.told = []
        self.server = None
        self.error = None
        self.supervision = supervise(
            command,
            cwd=folder,
            run_dir=folder / "runs",
            retry=Retry(stop=tenacity.stop_after_attempt(1)),
            hooks=[self._hear],
            **options,
        )
        self.over = anyio.Event()
        self.leaving = anyio.CancelScope()

    def _hear(self, event):
        if event.event == "verdict":
            self.told.append(event.verdict)

    async def run(self):
        with self.leaving:
            try:
                async with self.supervision as server:
                    self.server = server
                    await server.wait()
            except GaveUp as error:
                self.error = error
        self.over.set()

    @property
    def verdict(self):
        """The newest one; after the end, the last."""
        now = self.supervision.now
        if now is not None:
            return now.memory.verdict
        return self.supervision.history[-1].verdict if self.supervision.history else None

    @property
    def why(self):
        """What it says now, in words."""
        return self.verdict.why if self.verdict is not None else ""

    @property
    def kinds(self):
        """Every class and kind so far, once each. Events come a little later than verdicts."""
        return {(v.verdict, v.kind) for v in (*self.told, self.verdict) if v is not None}

    @property
    def classes(self):
        return {verdict for verdict, _ in self.kinds}

    def others(self, *wanted, since=0.0):
        """What was told besides these classes, or (class, kind), with the reasons: for an assertion to show."""
        told = [v for v in (*self.told, self.verdict) if v is not None and v.since >= since]
        strange = [v for v in told if v.verdict not in wanted and (v.verdict, v.kind) not in wanted]
        return {f"{v.verdict} {v.kind}: {v.why}" for v in strange}

    async def until(self, verdict, kind=None, *, within=180.0):
        """Wait for a verdict, and return it. That it may take long on a busy machine says nothing."""

        def look():
            seen = self.verdict
            is_it = seen is not None and seen.verdict == verdict and kind in {None, seen.kind}
            assert is_it or not self.over.is_set(), f"over: {seen}; {self.log}"
            return seen if is_it else None

        try:
            return await until(look, within=within)
        except AssertionError as late:
            raise AssertionError(f"{late}; told {sorted(self.kinds)}; now {self.verdict}; {self.log}") from None

    async def goes_on_for(self, seconds):
        """Let it be watched until it is so old."""
        await until(lambda: self.over.is_set() or self.age >= seconds, within=180.0)

    async def ended(self, within=180.0):
        """Wait for its end by itself; return the last verdict."""
        with anyio.fail_after(within):
            await self.over.wait()
        return self.supervision.history[-1].verdict

    @property
    def age(self):
        """Seconds from its first sample to the newest."""
        now = self.supervision.now
        return now.memory.now - now.memory.started_at if now is not None and now.memory.last is not None else 0.0

    @property
    def looks(self):
        """How many samples were taken of the last three minutes."""
        return len(self.supervision.now.samples)

    @property
    def root(self):
        return self.supervision.now.guarded.pid

    @property
    def log(self):
        logs = sorted(self.folder.glob("runs/*/attempt-*.log"))
        return logs[-1].read_text(errors="replace")[-2000:] if logs else "no log yet"

    async def says(self, text, within=60.0):
        """Wait for a text in its log."""
        await until(lambda: text in self.log, within=within)

    @property
    def members(self):
        """Pids of all below the guardian, as psutil sees them; the launched one is the first."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return [self.root, *(child.pid for child in psutil.Process(self.root).children(recursive=True))]
        return []

    async def workers(self, count=1, within=60.0):
        """Wait until so many processes below the launched one have been seen in a sample; return their pids."""

        def look():
            now = self.supervision.now
            if now is None or now.memory.tree is None:
                return None
            known = {process.pid for process in now.memory.tree.members}
            found = [pid for pid in self.members[1:] if pid in known]
            return found if len(found) >= count else None

        return await until(look, within=within)


@contextlib.asynccontextmanager
async def watching(folder, command, **options):
    """Watch one program; it is ended with the block, with proof."""
    watched = Watched(Path(folder), command, **options)
    async with anyio.create_task_group() as group:
        group.start_soon(watched.run)
        try:
            yield watched
        finally:
            watched.leaving.cancel()
            with anyio.CancelScope(shield=True), anyio.move_on_after(60.0):
                await watched.over.wait()


@contextlib.asynccontextmanager
async def watching_all(folder, *, limits=QUICK, **wanted):
    """Watch several at once: by name, each a command or (command, options)."""
    found = {}
    for name, what in wanted.items():
        command, options = what if isinstance(what, tuple) else (what, {})
        found[name] = Watched(folder / name, command, **{"limits": limits, **options})
    async with anyio.create_task_group() as group:
        for watched in found.values():
            group.start_soon(watched.run)
        try:
            yield found
        finally:
            for watched in found.values():
                watched.leaving.cancel()
            with anyio.CancelScope(shield=True), anyio.move_on_after(60.0):
                for watched in found.values():
                    await watched.over.wait()


def send(pid, number):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


__all__ = ["QUICK", "USUAL", "Watched", "program", "send", "signal", "watching", "watching_all"]
