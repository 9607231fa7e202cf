"""A server that starts daemons, and becomes tree_server.py.

Arguments: folder, port, daemons …, "--", kinds of members … A daemon is NAME, perhaps with +TRAITs: a copy of sleep of
that name in FOLDER/bin is executed, in a session of its own, orphaned, with its output elsewhere, unless a trait says
otherwise. Each writes its pid into FOLDER/NAME+TRAITs.
"""

import os
import shutil
import socket
import sys
from pathlib import Path

FOLDER, PORT = Path(sys.argv[1]), int(sys.argv[2])
DAEMONS = sys.argv[3 : sys.argv.index("--")]
KINDS = sys.argv[sys.argv.index("--") + 1 :]
SHM = Path("/dev/shm") / f"psm_hangguard_test_{os.getpid()}"


def stand(name):
    (FOLDER / f".{name}").write_text(str(os.getpid()))
    (FOLDER / f".{name}").rename(FOLDER / name)


def program(name):
    copy = FOLDER / "bin" / name
    copy.parent.mkdir(exist_ok=True)
    if not copy.exists():
        shutil.copy("/bin/sleep", copy)
    return str(copy)


def elsewhere(*keeping):
    null = os.open("/dev/null", os.O_RDWR)
    for fd in {0, 1, 2} - set(keeping):
        os.dup2(null, fd)


def child(work):
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    return pid


def retitled(name):
    import setproctitle

    setproctitle.setproctitle("tmux: server (/tmp/tmux-0/default)")
    stand(name)
    os.execv("/bin/sleep", ["tmux", "119.4"])


def a_daemon(spec, listener, shm):
    name, *traits = spec.split("+")
    executable = program(name)

    def lone():
        elsewhere(*((1, 2) if "log" in traits else ()))
        for trait, fd in (("port", listener.fileno()), ("shm", shm)):
            os.set_inheritable(fd, trait in traits)
        if "below" in traits:  # a program of the daemon's, as in a pane of tmux
            child(lambda: (os.setsid(), stand(f"{spec}.child"), os.execv("/bin/sleep", ["sleep", "119.3"])))
        if "writer" in traits:
            child(lambda: (log_again(), stand(f"{spec}.child"), os.execv("/bin/sleep", ["sleep", "119.3"])))
        if (
            "helper" in traits
        ):  # dashboard, monitor: Python programs in the session of the daemon, and no children of it
            child(lambda: child(lambda: (stand(f"{spec}.helper"), os.execv("/bin/sleep", ["sleep", "119.2"]))))
        if "title" in traits:
            retitled(spec)
        stand(spec)
        os.execve(executable, [name, "119.4"], {})

    def leader():
        if "session" not in traits:
            os.setsid()
        if os.fork() == 0:
            lone()

    os.waitpid(child(leader), 0)


def log_again():
    os.dup2(LOG, 1)


LOG = os.dup(1)
with socket.socket() as listener:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", PORT))
    listener.listen()
    memory = os.open(SHM, os.O_RDWR | os.O_CREAT, 0o600)
    SHM.unlink()
    for spec in DAEMONS:
        a_daemon(spec, listener, memory)
os.execv(sys.executable, [sys.executable, str(Path(__file__).with_name("tree_server.py")), str(FOLDER), *KINDS])
