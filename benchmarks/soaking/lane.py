# ruff: noqa: PTH115, PTH208 - numbers in /proc
"""One process that goes through cycles, one after the other. Arguments: a folder, a port, the seed; and ``guardians``.

Every line of stdin is the number of a cycle, every line of stdout what came of it, as JSON. After each it looks at
itself: whoever supervises for weeks must not gain descriptors or threads.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "users")]

from soaking import eyes
from soaking.cycle import Cycle
from soaking.plan import plan_of

SETTLES_WITHIN = 5.0
READER, READERS_FILE = "hangguard py-spy", "/memfd:py-spy (deleted)"
WARM_AFTER = 4
"""Cycles in this process after which it has everything that it keeps."""


def own_use() -> tuple[int, int]:
    """Return how many descriptors and how many threads this process has, without those that stay for good.

    The reader of stacks is made when stacks are read for the first time, and there is one for all launches of a
    program: a thread, its bell, and the two files in memory of its last answer. The mark of a run goes with its
    objects.
    """
    gc.collect()
    reader = any(thread.name == READER for thread in threading.enumerate())
    links = [_link(fd) for fd in os.listdir("/proc/self/fd")]
    files = [link for link in links if link != READERS_FILE]
    return len(files) - reader, len(os.listdir("/proc/self/task")) - reader


class Lane:
    def __init__(self, folder: Path, port: int, seed: int, *, guardians: bool) -> None:
        self._folder = folder
        self._port = port
        self._seed = seed
        self._guardians = guardians
        self._cycles_here = 0
        self._most = (0, 0)

    def go_through(self, number: int) -> dict[str, object]:
        cycle = Cycle(plan_of(self._seed, number, guardians=self._guardians), self._folder, self._port)
        found = cycle.run()
        self._cycles_here += cycle.plan.where == "here"
        found.wrong += self._growth()
        return {**found.as_json(), "plan": cycle.plan.as_json(), "use": own_use()}

    def _growth(self) -> list[str]:
        if self._cycles_here <= WARM_AFTER:
            self._most = tuple(map(max, self._most, own_use()))
            return []
        ends = time.monotonic() + SETTLES_WITHIN
        while _is_above(now := own_use(), self._most):
            if time.monotonic() > ends:
                threads = sorted(thread.name for thread in threading.enumerate())
                links = sorted(_link(fd) for fd in os.listdir("/proc/self/fd"))
                grown = f"descriptors and threads grew from {self._most} to {now}: {threads}, {links}"
                self._most = tuple(map(max, self._most, now))
                return [grown]
            time.sleep(0.05)
        return [f"a child is left: {eyes.describe(who)}" for who in self._strange_children()]

    @staticmethod
    def _strange_children() -> list[eyes.Identity]:
        return [who for pid in eyes.children_of(os.getpid()) if (who := eyes.identity_of(pid)) is not None]


def _is_above(now: tuple[int, ...], most: tuple[int, ...]) -> bool:
    return any(has > had for has, had in zip(now, most, strict=True))


def _link(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return "?"


def main() -> None:
    lane = Lane(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), guardians="guardians" in sys.argv[4:])
    for line in sys.stdin:
        print(json.dumps(lane.go_through(int(line))), flush=True)


if __name__ == "__main__":
    main()
