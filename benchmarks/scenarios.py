"""The small programs of the scoreboard: what goes wrong with each, or only looks as if it did."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PROGRAM = Path(__file__).parent / "programs" / "troubled_server.py"
Thing = Literal["", "stale lock", "held lock", "slow store"]


@dataclass(frozen=True)
class Scenario:
    """One program. ``hangs`` says what a detector should do; the rest is what makes it happen."""

    name: str
    what: str
    hangs: bool
    work: str = "plain"
    flags: tuple[str, ...] = ()
    thing: Thing = ""
    asks: tuple[str, ...] = ()
    """Prompts that a client sends once the server answers, one a second."""
    phase: str = ""
    culprit: str = ""
    """A regular expression that the named suspect must match; empty: there is none to name."""
    watched: float = 180.0
    """Seconds from the launch until the watch ends."""
    quiet: bool = False
    """Whether the owner tells hangguard that stillness is wanted (nothing else can be told)."""
    cores: float = 0.2
    """What it burns while it is watched, so that the programs do not starve one another."""

    def command(self, port: int | str, marks: Path, thing: str) -> list[str]:
        """Return the command line."""
        words = [sys.executable, str(PROGRAM), self.work, str(marks), thing or "-"]
        words += ["--model-path", "tiny", "--host", "127.0.0.1", "--port", str(port)]
        return [
            *words,
            "--hold-mb=4",
            *(() if any(f.startswith("--tp") for f in self.flags) else ("--tp=2",)),
            *self.flags,
        ]


HANGS: tuple[Scenario, ...] = (
    Scenario(
        "deadlock",
        "two locks taken in opposite order at graph capture, in both workers",
        hangs=True,
        flags=("--deadlock-at-capture",),
        phase="graph-capture",
        culprit="scheduler_TP[01]",
    ),
    Scenario(
        "absent rank",
        "worker 1 deadlocks; worker 0 spins in the making of the communicator, one core busy",
        hangs=True,
        work="communicator",
        phase="dist-init",
        culprit="scheduler_TP1",
        cores=1.0,
    ),
    Scenario(
        "spin",
        "worker 0 spins in a place that no table knows, one core busy",
        hangs=True,
        flags=("--fault=dist-init:spin", "--fault-rank=0"),
        phase="dist-init",
        culprit="scheduler_TP0",
        cores=1.0,
    ),
    Scenario(
        "no peer",
        "the worker polls a TCP store for a peer that never joins",
        hangs=True,
        work="no-peer",
        flags=("--tp=1",),
        phase="dist-init",
        culprit="scheduler",
    ),
    Scenario(
        "stale lock",
        "the worker waits for a lock file (torch's FileBaton) whose owner is dead",
        hangs=True,
        work="stale-lock",
        flags=("--tp=1",),
        thing="stale lock",
        phase="jit-compile",
        culprit="scheduler",
    ),
    Scenario(
        "stopped worker",
        "worker 1 gets SIGSTOP while it loads",
        hangs=True,
        flags=("--fault=weights-load:stop-self", "--fault-rank=1"),
        phase="weights-load",
        culprit="scheduler_TP1",
    ),
    Scenario(
        "killed worker",
        "worker 1 gets SIGKILL while it loads; the front end does not notice",
        hangs=True,
        flags=("--fault=weights-load:kill-self", "--fault-rank=1", "--ignore-crash"),
        phase="weights-load",
        culprit="scheduler_TP1",
    ),
    Scenario(
        "killed front end",
        "the front end of a ready server gets SIGKILL; its workers live on",
        hangs=True,
        work="asked-for",
        flags=("--orphans",),
        asks=("one", "two", "die"),
        phase="serving",
    ),
    Scenario(
        "serving stall",
        "the engine deadlocks over a request; its health route says 200 for ever",
        hangs=True,
        work="asked-for",
        flags=("--shallow-health",),
        asks=("one", "two", "three", "stall", "four", "five"),
        phase="serving",
        culprit="scheduler_TP[01]",
    ),
)

HEALTHY: tuple[Scenario, ...] = (
    Scenario(
        "slow start",
        "every step takes its time: about a minute of steady work",
        hangs=False,
        flags=("--phase-seconds=9",),
        watched=95.0,
        cores=0.7,
    ),
    Scenario(
        "slow store",
        "weights come over TCP in bursts, with gaps of up to 14 s between them",
        hangs=False,
        work="slow-store",
        flags=("--tp=1",),
        thing="slow store",
        watched=75.0,
    ),
    Scenario(
        "silent compile",
        "a compiler child works for 30 s; nobody says a word",
        hangs=False,
        flags=("--tp=1", "--jit-seconds=30"),
        watched=60.0,
        cores=1.0,
    ),
    Scenario(
        "silent load",
        "75 s of pure computation: no log line, no byte, no new page",
        hangs=False,
        work="silent-load",
        flags=("--tp=1",),
        watched=100.0,
        cores=1.0,
    ),
    Scenario(
        "held lock",
        "another program holds the build lock for 45 s, and lives",
        hangs=False,
        work="living-lock",
        flags=("--tp=1",),
        thing="held lock",
        watched=75.0,
    ),
    Scenario("idle", "a ready server that nobody asks anything", hangs=False, watched=120.0),
    Scenario(
        "pause",
        "generation is paused on purpose for 45 s, with a request in flight",
        hangs=False,
        work="asked-for",
        asks=(*("one",) * 25, "pause", "two"),
        watched=120.0,
        quiet=True,
    ),
)

SCENARIOS = (*HANGS, *HEALTHY)
