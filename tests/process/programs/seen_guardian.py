"""Stands in for the guardian: a subreaper that starts one program, and reaps until its input ends.

Prints the pid of the program, then ``CODE PID`` for every process that it has waited for.
"""

import ctypes
import os
import select
import subprocess
import sys
import threading

ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
root = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
print(root.pid, flush=True)


def reap():
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            if select.select([0], [], [], 0.02)[0]:
                return
            continue
        print(os.waitstatus_to_exitcode(status), pid, flush=True)


if os.environ.get("REAP") != "0":
    threading.Thread(target=reap, daemon=True).start()
sys.stdin.read()
