"""A user's program under Python's own audit: prints what it did to the world, as JSON.

Arguments: a folder for the run, then the server's command. The hook is there before anything of hangguard is loaded,
and hears every thread of this program: https://docs.python.org/3/library/audit_events.html
"""

import json
import os
import signal
import sys

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
did = {name: [] for name in ("connects", "binds", "asks for", "starts", "removes", "renames", "kills", "writes")}


def note(event, arguments):
    if event == "socket.connect":
        did["connects"].append(plain(arguments[1]))
    elif event == "socket.bind":
        did["binds"].append(plain(arguments[1]))
    elif event == "socket.getaddrinfo":
        did["asks for"].append(plain(arguments[0]))
    elif event == "subprocess.Popen":
        did["starts"].append([os.fsdecode(word) for word in arguments[1]])
    elif event in {"os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn"}:
        did["starts"].append([event])
    elif event in {"os.remove", "os.rmdir", "os.truncate", "shutil.rmtree", "shutil.move"}:
        did["removes"].append(plain(arguments[0]))
    elif event == "os.rename":
        did["renames"].append([plain(arguments[0]), plain(arguments[1])])
    elif event in {"os.kill", "os.killpg", "signal.pthread_kill"} and arguments[1] != 0:
        did["kills"].append("its own child" if is_our_child(arguments[0]) else list(arguments))
    elif event == "open" and arguments[2] & WRITES and not isinstance(arguments[0], int):
        did["writes"].append(plain(arguments[0]))


def is_our_child(pid):
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
        return int(stat.read().rpartition(")")[2].split()[1]) == os.getpid()


def plain(value):
    if isinstance(value, tuple):
        return [plain(part) for part in value]
    return os.fsdecode(value) if isinstance(value, (bytes, os.PathLike)) else value


def handlers():
    return [repr(signal.getsignal(number)) for number in sorted(signal.valid_signals())]


handlers_before = handlers()
sys.addaudithook(note)

from hangguard import supervise  # noqa: E402 - it must be heard from its import on

at_import = {name: list(what) for name, what in did.items() if what}
if handlers() != handlers_before:
    at_import["handlers"] = handlers()
with supervise(sys.argv[2:], run_dir=sys.argv[1], fallbacks="auto") as server:
    pass
attempts = [{"port": one.launch.port, "release": one.release.answer} for one in server.history]
print(json.dumps({"did": did, "at import": at_import, "attempts": attempts}))
