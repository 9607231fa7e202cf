"""Start the tree, stop it in one of the usual ways, and print how long that took and what was claimed, as JSON.

Arguments: the way, JSON with command, url, folder, said (who stands), members (how many there are).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import daemons
import psutil

WAITS = 90.0

Told = tuple[bool | None, str]
"""Whether success was claimed (``None``: it claims nothing), and in which words."""


def kill_proc_tree(pid, sig=signal.SIGTERM, include_parent=True, timeout=None, on_terminate=None):  # noqa: ANN001, ANN201
    """Do what the recipe of psutil's documentation does, under the same name and with the same defaults."""
    parent = psutil.Process(pid)
    family = parent.children(recursive=True)
    if include_parent:
        family.append(parent)
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(sig)
    return psutil.wait_procs(family, timeout=timeout, callback=on_terminate)


def until_it_stands(asked: dict[str, Any]) -> None:
    ends = time.monotonic() + WAITS
    while time.monotonic() < ends:
        try:
            said = Path(asked["said"]).read_text().splitlines()
            if sum(not line.startswith("file ") for line in said) >= asked["members"]:
                with urllib.request.urlopen(asked["url"], timeout=5):
                    return
        except OSError:
            pass
        time.sleep(0.05)
    raise TimeoutError


def timed(stop: Callable[[], Told]) -> None:
    began = time.monotonic()
    claims, words = stop()
    print(json.dumps({"seconds": time.monotonic() - began, "claims": claims, "words": words}), flush=True)


@contextmanager
def bare(asked: dict[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(asked["command"], start_new_session=True)
    until_it_stands(asked)
    yield process


def terminate(asked: dict[str, Any]) -> None:
    with bare(asked) as process:

        def stop() -> Told:
            process.terminate()
            return None, f"wait() returned {process.wait()}"

        timed(stop)


def killpg(asked: dict[str, Any], number: int = signal.SIGTERM) -> None:
    with bare(asked) as process:

        def stop() -> Told:
            os.killpg(process.pid, number)
            return None, f"wait() returned {process.wait()}"

        timed(stop)


def recipe(asked: dict[str, Any], **how: Any) -> None:
    with bare(asked) as process:

        def stop() -> Told:
            gone, alive = kill_proc_tree(process.pid, **how)
            return not alive, f"gone {len(gone)}, alive {len(alive)}"

        timed(stop)


def mirakuru(asked: dict[str, Any]) -> None:
    from mirakuru import HTTPExecutor  # noqa: PLC0415

    executor = HTTPExecutor(asked["command"], url=asked["url"], method="GET")
    executor.start()
    until_it_stands(asked)

    def stop() -> Told:
        executor.stop()
        return True, "stop() returned"

    timed(stop)


def hangguard(asked: dict[str, Any]) -> None:
    from hangguard import supervise  # noqa: PLC0415

    with supervise(asked["command"], url=asked["url"], run_dir=f"{asked['folder']}/runs") as server:
        until_it_stands(asked)

        def stop() -> Told:
            release = server.stop()
            assert release is not None
            return release.answer == "released", f"release.answer: {release.answer}"

        timed(stop)


def supervisord(asked: dict[str, Any]) -> None:
    folder = Path(asked["folder"])
    daemon = daemons.supervisord(folder, asked["command"], is_controlled=True)
    _by_daemon(asked, daemon, daemons.supervisorctl(folder, "stop", "server"), "server: stopped")


def circus(asked: dict[str, Any]) -> None:
    folder = Path(asked["folder"])
    _by_daemon(asked, daemons.circusd(folder, asked["command"]), daemons.circusctl(folder, "stop", "server"), "ok")


def _by_daemon(asked: dict[str, Any], daemon: list[str], control: list[str], success: str) -> None:
    with (Path(asked["folder"]) / "daemon.log").open("w") as log:
        process = subprocess.Popen(daemon, stdout=log, stderr=log)
    until_it_stands(asked)

    def stop() -> Told:
        done = subprocess.run(control, capture_output=True, text=True, check=False)
        words = (done.stdout + done.stderr).strip()
        return success in words, f"`{words.splitlines()[-1] if words else ''}`"

    timed(stop)
    sys.stdin.readline()  # it may still be at work: whoever measures says when it is over
    process.terminate()
    try:
        process.wait(45.0)
    except subprocess.TimeoutExpired:
        process.kill()


WAYS: dict[str, Callable[[dict[str, Any]], None]] = {
    "hangguard": hangguard,
    "mirakuru": mirakuru,
    "supervisord": supervisord,
    "circus": circus,
    "psutil": recipe,
    "psutil-kill": lambda asked: recipe(asked, sig=signal.SIGKILL),
    "terminate": terminate,
    "killpg": killpg,
    "killpg-kill": lambda asked: killpg(asked, signal.SIGKILL),
}

if __name__ == "__main__":
    WAYS[sys.argv[1]](json.loads(sys.argv[2]))
