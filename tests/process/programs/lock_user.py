"""Take a lock, say so, and keep it until stdin ends.

usage: lock_user.py flock|lockf|poll|baton|open|cwd PATH [--then-fork]
flock, lockf: the kernel's, waiting for it; poll: as Python's filelock does; baton: as torch's FileBaton (the file's
presence is the lock); open: only have the file open; cwd: work in that folder. --then-fork: a child inherits the
descriptor and this program ends; the child's pid is printed.
"""

import fcntl
import os
import sys
import time

how, path = sys.argv[1:3]
print("began", flush=True)
if how == "cwd":
    os.chdir(path)
elif how == "baton":
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL)
elif how == "poll":
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            os.close(descriptor)
            time.sleep(0.05)
else:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    if how == "flock":
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    elif how == "lockf":
        fcntl.lockf(descriptor, fcntl.LOCK_EX)
if "--then-fork" in sys.argv:
    child = os.fork()
    if child:
        print(child, flush=True)
        os._exit(0)
else:
    print("held", flush=True)
sys.stdin.read()
