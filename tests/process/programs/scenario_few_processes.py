"""A user's program that may start so many tasks (processes and threads) more and no others: prints JSON.

Arguments: a folder, then what to try, one after the other: ``guarded:N``, ``supervise:N``, or ``refused`` (its
guardian may start nothing). Run it as a user of its own: root has no such limit.
"""

import json
import os
import resource
import sys
import time
from pathlib import Path

import anyio

from hangguard import Limits, Ready, supervise
from hangguard.act import spawn
from hangguard.act.spawn import guarded, start_guardian
from hangguard.errors import HangguardError

ENOUGH = 60
"""Of so many more it takes fewer to see everything."""
FOLDER = Path(sys.argv[1])
# Behind a shell: whether the user may execute a Python in root's folder is not asked.
WEB = [sys.executable, "-m", "http.server", "{port}", "--bind", "127.0.0.1"]
SERVER = ["/bin/sh", "-c", 'cd /; exec "$@"', "sh", *WEB]
URL = "http://127.0.0.1:{port}"


def tasks():
    found = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{pid}").st_uid == os.getuid():
                found += len(os.listdir(f"/proc/{pid}/task"))
        except OSError:
            continue
    return found


def allow(more):
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    resource.setrlimit(resource.RLIMIT_NPROC, (hard if more is None else tasks() + more, hard))


async def guard_one(more):
    allow(more)
    async with guarded(
        argv=["/bin/sleep", "60"], env={}, cwd="/", log_path=None, lock_path=None,
        death_grace=0.2, on_death="stop", pristine=False,
    ):  # fmt: skip
        return "runs"


def supervise_one(more):
    limits = Limits(ready_within=60 if more >= ENOUGH else 3, stop_grace=1, release_within=1)
    supervision = supervise(SERVER, url=URL, cwd="/", run_dir=FOLDER, limits=limits)
    allow(more)
    with supervision as server:
        return "runs" if isinstance(server.attempt.verdict, Ready) else str(server.attempt.verdict)


def children():
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def outcome(call):
    began = time.monotonic()
    try:
        said = call()
    except HangguardError as error:
        said = f"{type(error).__name__}: {error}"
    except BaseException as error:
        said = f"BARE {type(error).__name__}: {error}"
    allow(None)
    ends = time.monotonic() + 10
    while children() and time.monotonic() < ends:
        time.sleep(0.02)
    return {"said": said, "seconds": time.monotonic() - began, "children": children()}


async def start_a_guardian_without_children():
    link = await start_guardian()
    resource.prlimit(link.process.pid, resource.RLIMIT_NPROC, (1, resource.getrlimit(resource.RLIMIT_NPROC)[1]))
    return link


found = {}
for word in sys.argv[2:]:
    what, _, number = word.partition(":")
    more = int(number) if number else None
    if what == "refused":
        spawn.start_guardian = start_a_guardian_without_children
    call = supervise_one if what == "supervise" else lambda more: anyio.run(guard_one, more)
    found[word] = outcome(lambda call=call, more=more: call(more))
    spawn.start_guardian = start_guardian
print(json.dumps(found))
