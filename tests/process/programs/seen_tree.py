"""A tree on demand: reads nothing, does what its arguments say, then sleeps for ever.

``child``: starts one more that sleeps. ``escape``: a double fork into a session of its own, with an empty
environment. ``leader-exits``: the main thread ends, another lives. ``vfork``: waits in vfork. ``kill-child``:
starts a child, waits for it to be killed and prints how it ended. ``ignore-chld``: burns CPU in a child whose
end nobody waits for. ``burn-child``: burns CPU in a child that is waited for. ``threads N``: N sleeping threads.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

SLEEP = [sys.executable, "-c", "import time; time.sleep(1000)"]


def forever():
    while True:
        time.sleep(1000)


def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        sum(range(1000))


def say(*words):
    print(*words, flush=True)


what, *rest = sys.argv[1:]
if what == "child":
    say(subprocess.Popen(SLEEP).pid)
elif what == "kill-child":
    child = subprocess.Popen(SLEEP)
    say(child.pid)
    _, status = os.waitpid(child.pid, 0)
    say(os.waitstatus_to_exitcode(status))
elif what == "escape":
    if os.fork() == 0:
        os.setsid()
        pid = os.fork()
        if pid == 0:
            os.execve(sys.executable, SLEEP, {})
        say(pid)
        os._exit(0)
    os.wait()
elif what == "leader-exits":
    threading.Thread(target=forever).start()
    say("threads")
    ctypes.CDLL(None).syscall(60, 0)  # exit of this thread only
elif what == "vfork":
    # The child of vfork does nothing but sleep; until it ends, its parent waits in the kernel.
    libc = ctypes.CDLL(None)
    say("vfork")
    subprocess.Popen(["/bin/true"], preexec_fn=None).wait()
    pid = libc.syscall(56, 0x4000 | 0x100 | signal.SIGCHLD, 0, 0, 0, 0)  # clone(CLONE_VFORK | CLONE_VM)
    if pid == 0:
        libc.pause()
        libc._exit(0)
elif what in {"burn-child", "ignore-chld"}:
    if what == "ignore-chld":
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    pid = os.fork()
    if pid == 0:
        burn(float(rest[0]))
        os.read(os.open(rest[1], os.O_RDONLY), 1)  # stays until somebody opens the other end
        os._exit(7)
    say(pid)
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        pass
    say("gone")
    burn(float(rest[0]) / 2)
    say("burnt")
elif what == "threads":
    for _ in range(int(rest[0])):
        threading.Thread(target=forever, daemon=True).start()
    say("threads")
elif what == "many":
    for _ in range(int(rest[0])):
        if os.fork() == 0:
            forever()
    say("many")
elif what == "retitle":
    say("old")
    os.read(os.open(rest[0], os.O_RDONLY), 1)
    os.execv("/bin/sleep", ["a new title", "1000"])
elif what == "end":
    sys.exit(int(rest[0]))
forever()
