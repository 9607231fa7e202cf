"""Look at the GPUs, print the reader's pid, and stay. "fork": a child lives on that inherits everything."""

import os
import sys
import time

import anyio

from hangguard.facts import Ask, Launch
from hangguard.observe.gpus import GpuProbe


async def main():
    launch = Launch(argv=("x",), env=(), cwd="/", url="http://127.0.0.1:1", host="127.0.0.1", port=1)
    probe = GpuProbe(launch, within=float(sys.argv[1]))
    await probe.look(Ask())
    forked = 0
    if "fork" in sys.argv:
        forked = os.fork()
        if not forked:
            time.sleep(60)
            os._exit(0)
    print(forked, flush=True)
    time.sleep(60)


anyio.run(main)
