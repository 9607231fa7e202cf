"""Ends in one way. usage: states_end.py descriptors|shm|cut-short|finishes|port|waits|grows|kills-itself …

descriptors: has none left. shm: maps more of /dev/shm than there is. cut-short: reads a mapped file that has become
shorter. port PORT: one that is taken. waits: until it is sent away. grows TASKS GO, kills-itself TASKS GO: moves into a
control group, waits for the file GO, then takes memory for ever, or ends as if it were killed for that.
"""

import mmap
import os
import resource
import signal
import socket
import sys
import time

how, *given = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
print("begins", flush=True)
if how == "descriptors":
    resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
    held = [open("/dev/null") for _ in range(100)]
elif how == "shm":
    with open("/dev/shm/hangguard-test-states", "w+b") as block:
        block.truncate(64 << 20)
        with mmap.mmap(block.fileno(), 64 << 20) as mapped:
            for page in range(0, 64 << 20, mmap.PAGESIZE):
                mapped[page] = 1
elif how == "cut-short":
    with open("/dev/shm/hangguard-test-states", "w+b") as block:
        block.truncate(1 << 20)
        with mmap.mmap(block.fileno(), 1 << 20) as mapped:
            block.truncate(0)
            mapped[0] = 1
elif how == "port":
    socket.create_server(("127.0.0.1", int(given[0])))
elif how == "waits":
    time.sleep(1000)
elif how in {"grows", "kills-itself"}:
    tasks, go = given
    with open(tasks, "w") as group:
        group.write("0")
    print("is in its group", flush=True)
    while not os.path.exists(go):
        time.sleep(0.05)
    if how == "kills-itself":
        os.kill(os.getpid(), signal.SIGKILL)
    taken = []
    while True:
        taken.append(b"x" * (8 << 20))
