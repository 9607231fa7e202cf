"""Wedges its own /proc: while it is so, nobody can read its command line. usage: states_wedged.py PATH

PATH is ``weights`` of a disk (states_disk.py) that answers nothing. A child reads it, and leaves a locked page behind.
Then it is mapped by somebody who goes past the page cache: the kernel empties that first, and waits for the page
while it holds the lock of the process's memory map (fs/fuse/file.c, fuse_file_mmap). Who reads /proc/PID/cmdline needs
that lock. Until the disk ends not even SIGKILL ends it.
"""

import mmap
import os
import sys
import time
from pathlib import Path


def state_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


path = sys.argv[1]
child = os.fork()
if child == 0:
    with open(path, "rb") as weights:
        weights.read(1)
    os._exit(0)
looks = 0
while looks < 50:  # in a row: it may be in state D for a moment on its way
    looks = looks + 1 if state_of(child) == "D" else 0
    time.sleep(0.01)
print("maps the weights", flush=True)
with open(path, "rb") as weights:
    mmap.mmap(weights.fileno(), 1 << 20, mmap.MAP_PRIVATE, mmap.PROT_READ)
print("has mapped them", flush=True)
