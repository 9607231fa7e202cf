"""Write docs/stops.md: one tree of processes, stopped by hangguard and in the ways that people use today.

    python benchmarks/stops.py [--into FILE]

It takes three minutes. What the others leave is ended here, by pid and start time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from programs.stopped_tree import KINDS
from soaking import eyes

HERE = Path(__file__).parent
TREE, USER = HERE / "programs" / "stopped_tree.py", HERE / "users" / "stopping.py"
RETURNS_WITHIN = 60.0
SETTLES_WITHIN = 5.0
"""Seconds after a stop has returned until who still lives has survived; a resource tracker needs two."""
GRACE_OF_CIRCUS = 35.0
"""``circusctl stop`` answers at once and goes on: its ``graceful_timeout`` is 30 s."""

ABOUT = """\
# Stops

One tree of processes, as inference engines have them, stopped by hangguard and in the ways that people use today. This
page is written by one command and by nothing else:

```console
$ nox -s stops
```"""

TREE_TEXT = """\
## The tree

`benchmarks/programs/stopped_tree.py`: a root that leaves on SIGTERM, and below it a worker, a child in a session of its
own, one that forked twice into its own session, one with another title, one with both, one that ignores SIGTERM, and
Python's resource tracker, which minds shared memory and a semaphore of the root. Who still lives {settles:g} s after
the stop has returned has survived (circus: {circus:g} s, because its command does not wait). *Not within
{returns:g} s*: it had not returned by then, and was counted there."""

COMMANDS = """\
## How each was asked

Everybody at the defaults that its documentation gives."""

HOW = {
    "hangguard": ("hangguard", "`supervise(COMMAND, url=URL)`, `server.stop()`"),
    "mirakuru": ("mirakuru", '`HTTPExecutor(COMMAND, url=URL, method="GET").start()`, `.stop()`'),
    "supervisord": ("supervisord", "`supervisord -c FILE` with `[program:server]`, `supervisorctl stop server`"),
    "circus": ("circus", "`circusd FILE` with `[watcher:server]`, `circusctl stop server`"),
    "psutil": ("psutil's recipe", "`kill_proc_tree(pid)` of its documentation: SIGTERM, no timeout"),
    "psutil-kill": ("psutil's recipe, SIGKILL", "`kill_proc_tree(pid, sig=signal.SIGKILL)`"),
    "terminate": ("`Popen.terminate()`", "`process.terminate()`, `process.wait()`"),
    "killpg": (
        "`killpg`, SIGTERM",
        "`os.killpg(pid, signal.SIGTERM)`, `process.wait()`; started in a session of its own",
    ),
    "killpg-kill": ("`killpg`, SIGKILL", "`os.killpg(pid, signal.SIGKILL)`, `process.wait()`; the same"),
}


@dataclass(frozen=True)
class Stop:
    """What came of one way to stop."""

    way: str
    seconds: float | None
    """``None``: it did not return."""
    claims: bool | None
    words: str
    survivors: tuple[str, ...]
    files: tuple[str, ...]

    def row(self) -> tuple[str, ...]:
        survivors = ", ".join(self.survivors) or "**none**"
        took = f"not within {RETURNS_WITHIN:g} s" if self.seconds is None else f"{self.seconds:.1f}"
        claimed = {True: "yes", False: "no", None: "-"}[self.claims]
        still = f" (**{len(self.survivors)} live**)" if self.claims and self.survivors else ""
        words = f"; {self.words}" if self.words else ""
        return HOW[self.way][0], survivors, str(len(self.files)), took, f"{claimed}{still}{words}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=HERE.parent / "docs" / "stops.md")
    asked = parser.parse_args()
    stops = []
    for way in HOW:
        stops.append(stop_by(way))
        print(" | ".join(stops[-1].row()), flush=True)
    asked.into.write_text(page(stops))
    print(f"written: {asked.into}")
    return 0


def stop_by(way: str) -> Stop:
    """Start the tree and stop it in this way; then look, and end whoever is left."""
    with tempfile.TemporaryDirectory(prefix="hangguard-stops-") as name:
        folder, said = Path(name), Path(name) / "said"
        port = free_port()
        asked = {
            "command": [sys.executable, str(TREE), str(port), str(said)],
            "url": f"http://127.0.0.1:{port}/",
            "folder": name,
            "said": str(said),
            "members": len(KINDS),
        }
        with (folder / "errors").open("w+") as errors:
            user = subprocess.Popen(
                [sys.executable, str(USER), way, json.dumps(asked)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            tree = eyes.Tree(user.pid)
            try:
                told = _told_by(user)
                return _look(way, told, said) if told is not None or said.exists() else _failed(way, folder)
            finally:
                _end(user, tree, said)


def _told_by(user: subprocess.Popen[str]) -> dict[str, Any] | None:
    """Wait for its line; ``None``: it did not return in the time that it has, or failed."""
    lines: list[str] = []
    assert user.stdout is not None
    reader = threading.Thread(target=lambda: lines.append(user.stdout.readline()), daemon=True)  # type: ignore[union-attr]
    reader.start()
    reader.join(RETURNS_WITHIN)
    return json.loads(lines[0]) if lines and lines[0] else None


def _failed(way: str, folder: Path) -> Stop:
    raise RuntimeError(f"{way}: {(folder / 'errors').read_text()[-2000:]}")


def _look(way: str, told: dict[str, Any] | None, said: Path) -> Stop:
    members, files = _standing(said)
    settles = GRACE_OF_CIRCUS if way == "circus" else SETTLES_WITHIN
    ends = time.monotonic() + settles
    while time.monotonic() < ends and (any(map(eyes.lives, members)) or any(map(os.path.lexists, files))):
        time.sleep(0.1)
    return Stop(
        way=way,
        seconds=None if told is None else told["seconds"],
        claims=None if told is None else told["claims"],
        words="" if told is None else told["words"],
        survivors=tuple(sorted((kind for who, kind in members.items() if eyes.lives(who)), key=KINDS.index)),
        files=tuple(path for path in files if os.path.lexists(path)),
    )


def _standing(said: Path) -> tuple[dict[eyes.Identity, str], list[str]]:
    members, files = {}, []
    for line in said.read_text().splitlines():
        first, _, rest = line.partition(" ")
        if first == "file":
            files.append(rest)
        else:
            started, _, kind = rest.partition(" ")
            members[int(first), int(started)] = kind
    return members, files


def _end(user: subprocess.Popen[str], tree: eyes.Tree, said: Path) -> None:
    """End whoever is left, each by pid and start time, and remove the files that the tree made."""
    tree.look()
    members, files = _standing(said) if said.exists() else ({}, [])
    with contextlib.suppress(OSError):
        assert user.stdin is not None
        user.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        user.wait(5.0)
    tree.look()
    for who in {*members, *tree.seen}:
        eyes.signal_exactly(who)
    user.kill()
    user.wait()
    tree.close()
    for who in tree.living() | set(members):
        eyes.signal_exactly(who)
    for path in files:
        with contextlib.suppress(FileNotFoundError):
            Path(path).unlink()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def page(stops: list[Stop]) -> str:
    versions = ", ".join(
        f"{name} {version(name)}"
        for name in ("hangguard", "mirakuru", "supervisor", "circus", "psutil", "setproctitle")
    )
    facts = [
        ("date", datetime.now(timezone.utc).strftime("%Y-%m-%d")),
        ("machine", f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release().split('-')[0]}"),
        ("Python", platform.python_version()),
        ("load of 5 minutes", f"{os.getloadavg()[1]:.1f}"),
        ("versions", versions),
    ]
    head = ("stopped by", "survivors", "files left in /dev/shm", "seconds until it returned", "claimed success")
    parts = [
        ABOUT,
        table(("", ""), facts),
        table(head, [stop.row() for stop in stops]),
        TREE_TEXT.format(settles=SETTLES_WITHIN, circus=GRACE_OF_CIRCUS, returns=RETURNS_WITHIN),
        COMMANDS,
        table(("who", "how"), list(HOW.values())),
    ]
    return "\n\n".join(parts) + "\n"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
