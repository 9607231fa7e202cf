"""Needs an extension, and has it built by a child, as torch does: behind a lock by the presence of its file.

usage: states_builds.py FOLDER PORT. The first child ever (there is no FOLDER/tried) is killed in the middle of the
build, as for want of memory; the next one comes to its end. The parent waits for as long as the lock is there.
"""

import http.server
import os
import signal
import sys
import time
from pathlib import Path

from file_baton import wait

FOLDER = Path(sys.argv[1])
LOCK, TRIED = FOLDER / "lock", FOLDER / "tried"


def build():
    held = os.open(LOCK, os.O_CREAT | os.O_EXCL)
    (FOLDER / "began").touch()
    if not TRIED.exists():
        TRIED.touch()
        time.sleep(8)
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(held)
    LOCK.unlink()


print("builds an extension", flush=True)
(FOLDER / "began").unlink(missing_ok=True)
if os.fork() == 0:
    build()
    os._exit(0)
while not (FOLDER / "began").exists():
    time.sleep(0.01)
wait(str(LOCK))
os.wait()
print("has found it built", flush=True)
http.server.test(http.server.SimpleHTTPRequestHandler, port=int(sys.argv[2]), bind="127.0.0.1")
