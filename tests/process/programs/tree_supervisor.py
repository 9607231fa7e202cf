"""A user's program: supervises tree_server.py until it is killed. Arguments: backend, folder, mode, kinds …

Modes: plain, keep, fork (a child of the user's that inherits every descriptor), stopping (in the middle of a
stop with a long grace), abandon (its event loop is thrown away, and it lives on).
"""

import asyncio
import gc
import json
import os
import sys
import time
from pathlib import Path

import anyio

from hangguard.act.spawn import guarded

BACKEND, FOLDER, MODE, *KINDS = sys.argv[1:]
SERVER = str(Path(__file__).with_name("tree_server.py"))


def guard():
    return guarded(
        argv=[sys.executable, SERVER, FOLDER, *KINDS],
        env=dict(os.environ),
        cwd=FOLDER,
        log_path=FOLDER + "/server.log",
        lock_path=FOLDER + "/lock",
        death_grace=1.5,
        on_death="keep" if MODE == "keep" else "stop",
        pristine=False,
    )


def tell(server, **more):
    text = json.dumps({"guardian": server.guardian_pid, "pid": server.pid, **more})
    Path(FOLDER, ".told").write_text(text)
    Path(FOLDER, ".told").rename(FOLDER + "/told")


def all_stand():
    return all(Path(FOLDER, kind).exists() for kind in ["root", *KINDS] if kind != "stubborn")


async def main():
    async with guard() as server:
        forked = None
        if MODE == "fork":
            forked = os.fork()
            if forked == 0:
                time.sleep(60)
                os._exit(0)
        tell(server, forked=forked)
        if MODE == "stopping":
            while not all_stand():
                await anyio.sleep(0.01)
            await server.stop(grace=100.0, on_progress=lambda progress: Path(FOLDER, progress.step).touch())
        await anyio.sleep(100)


def abandon():
    loop = asyncio.new_event_loop()
    manager = guard()
    tell(loop.run_until_complete(manager.__aenter__()))
    while not all_stand() or not Path(FOLDER, "go").exists():
        time.sleep(0.01)
    loop.close()
    del manager, loop
    gc.collect()
    time.sleep(60)


if MODE == "abandon":
    abandon()
else:
    anyio.run(main, backend=BACKEND)
