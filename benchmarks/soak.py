"""Start and stop little servers by the hundred, kill at random, and look what is left and who was touched.

    python benchmarks/soak.py [--cycles N] [--at-once N] [--seed N] [--only N] [--guardians] [--record]

Every cycle is thrown from the seed and its number: ``--seed S --only N`` does one again. ``--record`` writes the result
to docs/soak.md. The exit code is 1 when anything was left, changed, touched, or not as it should be.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from soaking import eyes, page
from soaking.strangers import Residents

HERE = Path(__file__).parent
LANE = HERE / "soaking" / "lane.py"
PR_SET_CHILD_SUBREAPER = 36
SLOWEST_CYCLE = 300.0
"""Seconds; a cycle that takes longer hangs, whatever else the machine has to do."""


def main() -> int:
    asked = arguments()
    print(f"seed {asked.seed}", flush=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs, and their children, ignore it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    numbers = [asked.only] if asked.only is not None else list(range(asked.cycles))
    began, load = time.monotonic(), os.getloadavg()[1]
    results = Soak(asked.seed, numbers, asked.at_once, guardians=asked.guardians).run()
    summary = page.Summary(results, minutes=(time.monotonic() - began) / 60, load=(load, os.getloadavg()[1]))
    print(summary.line(), flush=True)
    if asked.record:
        more = " --guardians" if asked.guardians else ""
        command = f"nox -s soak -- --cycles {asked.cycles} --at-once {asked.at_once} --seed {asked.seed}{more} --record"
        page.write(HERE.parent / "docs" / "soak.md", summary, command=command, seed=asked.seed)
    return 0 if summary.is_good else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--only", type=int, metavar="N", help="only the cycle of this number")
    parser.add_argument("--guardians", action="store_true", help="kill the guardian in the middle of most stops")
    parser.add_argument("--record", action="store_true", help="write docs/soak.md")
    return parser.parse_args()


class Soak:
    """The residents, some lanes beside each other, and what came of every cycle."""

    def __init__(self, seed: int, numbers: list[int], at_once: int, *, guardians: bool = False) -> None:
        self._seed = seed
        self._guardians = guardians
        self._at_once = min(at_once, len(numbers))
        self._todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in numbers:
            self._todo.put(number)
        self._total = len(numbers)
        self._results: list[dict[str, Any]] = []
        self._noting = threading.Lock()

    def run(self) -> list[dict[str, Any]]:
        become_subreaper()
        with tempfile.TemporaryDirectory(prefix="hangguard-soak-") as name, ExitOf() as lanes:
            folder = Path(name)
            os.environ.update(TMPDIR=str(folder / "t"), XDG_STATE_HOME=str(folder / "state"))
            (folder / "t").mkdir()
            ports = free_pairs(self._at_once)
            self._residents = Residents(folder, [port + 1 for port in ports])
            try:
                self._temporary = {entry.name for entry in (folder / "t").iterdir()}
                works = [threading.Thread(target=self._go, args=(lanes, folder, port)) for port in ports]
                for work in works:
                    work.start()
                try:
                    for work in works:
                        work.join()
                finally:  # Ctrl-C and SIGTERM: the cycles that have begun are ended as all others
                    self._begin_no_more()
                    for work in works:
                        work.join()
                self._look_at_the_end(folder)
            finally:
                self._residents.end()
                reap(set())
            self._keep_what_is_wrong(folder)
        return sorted(self._results, key=lambda result: result["number"])

    def _go(self, lanes: ExitOf, folder: Path, port: int) -> None:
        command = [
            sys.executable,
            str(LANE),
            str(folder),
            str(port),
            str(self._seed),
            *(["guardians"] if self._guardians else []),
        ]
        lane = lanes.add(command)
        with contextlib.suppress(queue.Empty):
            while True:
                number = self._todo.get_nowait()
                result = lane.ask(number)
                self._note(number, result)
                if result is None:
                    lane.close()
                    lane = lanes.add(command)
        lane.close()

    def _begin_no_more(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._todo.get_nowait()

    def _note(self, number: int, result: dict[str, Any] | None) -> None:
        with self._noting:
            if result is None:
                result = {
                    "number": number,
                    "wrong": [f"its process failed, or had no answer within {SLOWEST_CYCLE:g} s"],
                }
            touched = self._residents.troubles()
            result["touched"] = [*result.get("touched", ()), *touched]
            self._results.append(result)
            trouble = page.troubles_of(result)
            for line in trouble:
                print(f"cycle {number}: {line}", flush=True)
            if trouble:
                print(f"cycle {number}: {json.dumps(result.get('plan'))}", flush=True)
            if len(self._results) % 20 == 0:
                print(f"[{time.strftime('%H:%M:%S')}] {len(self._results)} of {self._total}", flush=True)

    def _look_at_the_end(self, folder: Path) -> None:
        """Whoever lost his parents became a child of this process; and only residents have sockets in their folder."""
        residents = {who[0] for who in self._residents.processes}
        left = [who for pid in eyes.children_of(os.getpid()) if pid not in residents and (who := eyes.identity_of(pid))]
        wrong = [f"left at the end: {eyes.describe(who)}" for who in left if eyes.lives(who)]
        wrong += [
            f"left at the end: {folder}/t/{name}"
            for name in {entry.name for entry in (folder / "t").iterdir()} - self._temporary
        ]
        for who in left:
            eyes.signal_exactly(who)
        if wrong:
            self._results.append({"number": -1, "wrong": wrong})
            print("\n".join(wrong), flush=True)

    def _keep_what_is_wrong(self, folder: Path) -> None:
        for cycle in folder.glob("cycle-*"):
            kept = Path(tempfile.mkdtemp(prefix="hangguard-soak-kept-", dir="/tmp")) / cycle.name
            cycle.rename(kept)
            print(f"kept: {kept}", flush=True)


class Lane:
    """A process that goes through cycles."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def ask(self, number: int) -> dict[str, Any] | None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(f"{number}\n")
            self._process.stdin.flush()
        with contextlib.suppress(queue.Empty):
            answer = self._answers.get(timeout=SLOWEST_CYCLE)
            return dict(json.loads(answer)) if answer else None
        return None

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(20.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class ExitOf(contextlib.ExitStack):
    """Lanes, each ended with the block."""

    def add(self, command: list[str]) -> Lane:
        lane = Lane(command)
        self.callback(lane.close)
        return lane


def become_subreaper() -> None:
    """Become the parent of whoever loses his own, so that nobody gets out of sight."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap(without: set[int]) -> None:
    for pid in eyes.children_of(os.getpid()):
        if pid not in without:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def free_pairs(number: int) -> list[int]:
    """Return ports that are free together with the next one, below those that the kernel gives away by itself."""
    return [port for port, _ in zip(_free_pairs(), range(number), strict=False)]


def _free_pairs() -> Iterator[int]:
    for port in random.SystemRandom().sample(range(20_000, 32_000, 2), 2_000):
        with contextlib.suppress(OSError), socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            yield port


if __name__ == "__main__":
    sys.exit(main())
