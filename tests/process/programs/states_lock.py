"""Waits for a lock, then gets on. usage: states_lock.py flock|filelock PATH"""

import fcntl
import os
import sys
import time

from filelock import FileLock

how, path = sys.argv[1:]


def load_model():
    if how == "filelock":
        return FileLock(path).acquire()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    return fcntl.flock(descriptor, fcntl.LOCK_EX)


print("looks for its weights", flush=True)
held = load_model()
for part in ("first", "second", "third", "fourth", "fifth", "sixth"):
    print(f"has the lock, loads the {part} shard", flush=True)
    time.sleep(1.0)
time.sleep(1000)
