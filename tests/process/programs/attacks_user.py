"""A supervising program for places that a test cannot be in itself: prints one JSON object.

Arguments: what happens to it, one of those below, and a folder.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import anyio

from hangguard import supervise
from hangguard.act.spawn import guarded
from hangguard.learned import default_path
from hangguard.store import open_run_folder

FOLDER = Path(sys.argv[2])
THEIRS = Path("/dev/shm/psm_theirs")
SERVER = """
import http.server, mmap, os, sys
file = os.open(sys.argv[1], os.O_RDWR)
kept = mmap.mmap(file, 0)
os.close(file)
http.server.test(http.server.SimpleHTTPRequestHandler, port=int(sys.argv[2]), bind="127.0.0.1")
"""


def listing():
    try:
        return os.listdir("/dev/shm")
    except OSError as problem:
        return problem.strerror


async def shared_memory_that_cannot_be_listed():
    """It may be entered: what lay there before the launch is not known."""
    THEIRS.write_bytes(b"somebody's")
    argv = [sys.executable, "-c", SERVER, str(THEIRS), "{port}"]
    async with supervise(argv, url="http://127.0.0.1:{port}", run_dir=FOLDER) as server:
        pass
    release = server.attempt.release
    item = next(item for item in release.items if item.resource == "files")
    return {
        "listing": listing(),
        "theirs": THEIRS.read_text() if THEIRS.exists() else None,
        "files": [(file.path, file.answer) for file in release.files],
        "item": [item.answer, item.detail],
        "unattributed": release.unattributed_files,
    }


async def the_pid_of_the_guardian_given_away():
    """By a program that waits for all of its children, to another child of its own."""
    async with guarded(
        argv=["/bin/sleep", "60"], env={}, cwd="/", log_path=str(FOLDER / "log"), lock_path=None, death_grace=0.2,
        on_death="stop", pristine=False,
    ) as server:  # fmt: skip
        root, guardian = os.pidfd_open(server.pid), server.guardian_pid
        os.kill(guardian, signal.SIGKILL)
        os.waitpid(guardian, 0)
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(guardian - 1))
        heir = subprocess.Popen(["/bin/sleep", "60"])
        began = time.monotonic()
        await server.stop(grace=0.2)
        seconds = time.monotonic() - began
    time.sleep(0.1)  # not waiting for anything: a signal would have come by now
    try:
        signal.pidfd_send_signal(root, 0)
    except ProcessLookupError:
        lives = False
    else:
        lives = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    told = {"same_pid": heir.pid == guardian, "heir": heir.poll(), "root_lives": lives, "in_time": seconds < 12}
    os.kill(heir.pid, signal.SIGKILL)
    return told


def places():
    """Where a run and what is learned would be kept."""
    folder = open_run_folder()
    return {"path": folder.path, "home": folder.home, "lost": folder.lost, "learned": default_path()}


KINDS = {
    "unlisted": lambda: anyio.run(shared_memory_that_cannot_be_listed),
    "reused-guardian": lambda: anyio.run(the_pid_of_the_guardian_given_away),
    "places": places,
}

print(json.dumps(KINDS[sys.argv[1]]()))
