"""What a soak came to: one line, and the page docs/soak.md."""

from __future__ import annotations

import os
import platform
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

from soaking.plan import BLIND_FOR, BOTH_EVERY, DEATH_EVERY

ABOUT = """\
# Soak

Little servers, started and ended hundreds of times, with random kills, among strangers that could be taken for theirs.
This page is written by one command and by nothing else:

```console
$ {command}
```
"""

PROVES = """\
## What happens

In each cycle a program starts the little server with {py:func}`~hangguard.supervise`: blocking, on asyncio or on trio,
in the process of the soak or in one of its own. Some of the server's members start a session of their own, fork twice,
change their title, empty their environment or ignore SIGTERM; some leave shared memory, semaphores and sockets behind.
Somewhere in the start or while it serves one of them may be killed, or the guardian. Then it is stopped, terminated,
killed, restarted, left, cancelled, interrupted by Ctrl-C; in one cycle of {death} the supervising program itself is
killed, half of these with a forked child of its own, which inherits every descriptor and must live on.

After every cycle it is looked for what is left, with eyes that share no code with hangguard: the whole tree, seen forty
times a second; what members wrote down of themselves; the mark of the cycle in every environment and command line of
the machine; every file and socket that was made; descriptors, threads and children of the soak itself. Five seconds
after the end, that of a supervising program that was killed included, nothing may be there.

Untouched must be: another little server with the same titles, its memory, semaphore and socket; a process with the same
command line, one whose run id begins with ours, a `tail -f` on our log, a listener on the next port, tmux and a daemon;
files in `/dev/shm` that are named like ours, at rest and mapped, made before and after the launch.

Two things are counted and are no failure. *By design*: supervisor and guardian were killed in the same instant (one
cycle of {both}); what is left must be found by its log. *Unattributed*: a file was made in the moment between the last
look at the members and their end; or its maker was killed by the soak within {blind:g} s after it had made the file,
before anybody can have looked whose it is. Such a file is listed, if there is still somebody to list it, and never
deleted. A guardian that is killed in the middle of a stop is no such case: what it had seen it has told before it
signalled anybody, and the supervising program has looked for itself. `--guardians` kills it there in most cycles.
"""


def troubles_of(result: dict[str, Any]) -> list[str]:
    """Return one line for everything that is not as it must be."""
    words = {"left": "left", "files": "file left", "touched": "touched", "wrong": "wrong"}
    return [f"{word}: {line}" for key, word in words.items() for line in result.get(key, ())]


class Summary:
    """All cycles together."""

    def __init__(self, results: list[dict[str, Any]], *, minutes: float, load: tuple[float, float]) -> None:
        self._results = results
        self.cycles = sum(result["number"] >= 0 for result in results)
        self.minutes = minutes
        self.load = load
        self.kills = Counter(kind for result in results for kind in result.get("killed", ()))
        self.endings = Counter(result["plan"]["ending"] for result in results if "plan" in result)
        self.left = self._count("left")
        self.files = self._count("files")
        self.touched = self._count("touched")
        self.wrong = self._count("wrong")
        self.by_design = sum(result.get("by_design", 0) for result in results)
        self.unattributed = self._count("unattributed")
        gone = [r["gone_after"] for r in results if {"supervisor"} & set(r.get("killed", ()))]
        self.gone = (median(gone), max(gone)) if gone else (0.0, 0.0)

    def _count(self, key: str) -> int:
        return sum(len(result.get(key, ())) for result in self._results)

    @property
    def is_good(self) -> bool:
        return not (self.left or self.files or self.touched or self.wrong)

    def line(self) -> str:
        kills = ", ".join(f"{kind} {number}" for kind, number in sorted(self.kills.items())) or "none"
        return (
            f"{self.cycles} cycles in {self.minutes:.1f} minutes; kills: {kills}; "
            f"processes left {self.left}, files left {self.files}, touched {self.touched}, wrong {self.wrong}; "
            f"by design {self.by_design}, unattributed {self.unattributed}; "
            f"gone {self.gone[0]:.1f} s after a kill of the supervisor (slowest {self.gone[1]:.1f} s)"
        )


def write(into: Path, summary: Summary, *, command: str, seed: int) -> None:
    """Write the page anew."""
    rows = [
        ("date", datetime.now(timezone.utc).strftime("%Y-%m-%d")),
        (
            "machine",
            f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()} {platform.release().split('-')[0]}",
        ),
        ("Python", platform.python_version()),
        ("load of 5 minutes", f"{summary.load[0]:.1f} before, {summary.load[1]:.1f} at the end"),
        ("seed", str(seed)),
        ("cycles", f"{summary.cycles}, in {summary.minutes:.0f} minutes"),
        ("killed", _of(summary.kills)),
        ("ended by", _of(summary.endings)),
        ("processes left", f"**{summary.left}**"),
        ("files and sockets left", f"**{summary.files}**"),
        ("strangers touched", f"**{summary.touched}**"),
        ("anything else wrong", f"**{summary.wrong}**"),
        ("processes left by design", f"{summary.by_design}, all found by their log"),
        ("files unattributed", str(summary.unattributed)),
        ("gone after a kill of the supervisor", f"median {summary.gone[0]:.1f} s, slowest {summary.gone[1]:.1f} s"),
    ]
    table = "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)])
    proves = (
        PROVES.replace("{both}", str(BOTH_EVERY))
        .replace("{death}", str(DEATH_EVERY))
        .replace("{blind:g}", f"{BLIND_FOR:g}")
    )
    into.write_text("\n".join([ABOUT.replace("{command}", command), table, "", proves]))


def _of(counted: Counter[str]) -> str:
    return ", ".join(f"{kind} {number}" for kind, number in sorted(counted.items())) or "none"
