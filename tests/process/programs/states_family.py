"""A front end with one worker. usage: states_family.py ticks|reaps|leaves|helper

ticks: the worker says something new every half second. reaps: the worker dies when it is killed, and the front end,
which notices, waits on. leaves: the same, and the front end never asks how it ended, so it stays a zombie. helper: a
helper ends with code 1 in a start that goes on.
"""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time

how = sys.argv[1]


def tick():
    for n in itertools.count():
        print("layer", "".join("abcdefghij"[int(digit)] for digit in str(n)), flush=True)
        time.sleep(0.5)


def wait_for_ever():
    gate = threading.Lock()
    gate.acquire()
    gate.acquire()


if how == "helper":
    assert subprocess.run([sys.executable, "-c", "raise SystemExit(1)"], check=False).returncode == 1
    print("the helper has failed, another way is taken", flush=True)
    tick()
read_end, write_end = os.pipe()
worker = os.fork()
if worker == 0:
    os.close(write_end)
    if how == "ticks":
        tick()
    os.read(read_end, 1)
    os._exit(0)
os.close(read_end)
if how == "reaps":
    signal.signal(signal.SIGCHLD, lambda *_: os.waitpid(worker, 0))
if how != "ticks":
    print("worker", worker, flush=True)
    wait_for_ever()
os.waitpid(worker, 0)
