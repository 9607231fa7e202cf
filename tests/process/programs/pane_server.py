"""A server with a tmux below it, in which somebody has a shell with jobs; it becomes tree_server.py.

Arguments: folder, kinds of members … The tmux is a copy of sh of that name, apart from the launch. The shell in it has
three jobs: "job" has nothing of the launch, "writer" writes to its log, "taker" opens shared memory at SIGUSR1 and
writes FOLDER/taken. The shell ends when something is written into the fifo FOLDER/go. Each writes its pid into FOLDER.
"""

import os
import shutil
import sys
from pathlib import Path

FOLDER, KINDS = Path(sys.argv[1]), sys.argv[2:]

TAKER = """
import os, signal, sys

def take(*_):
    path = f"/dev/shm/psm_hangguard_test_{os.getpid()}"
    memory = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.unlink(path)
    open("taken", "w").close()

signal.signal(signal.SIGUSR1, take)
os.rename(".taker", "taker")
while True:
    signal.pause()
"""
SHELL = """
/bin/sleep 119.3 3>&- &
echo $! > .job && mv .job job
/bin/sleep 119.2 >&3 3>&- &
echo $! > .writer && mv .writer writer
sh -c 'echo $$ > .taker && exec "$0" -c "$1" 3>&-' "$PYTHON" "$TAKER" &
echo $$ > .shell && mv .shell shell
read line < go
"""
TMUX = """
setsid sh -c "$SHELL_OF_PANE" &
exec 3>&-
echo $$ > .tmux && mv .tmux tmux
read line < stay
"""


def tmux():
    log = os.dup(1)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.dup2(log, 3)
    os.set_inheritable(3, True)  # for the writer alone
    os.chdir(FOLDER)
    words = {"SHELL_OF_PANE": SHELL, "PYTHON": sys.executable, "TAKER": TAKER}
    os.execve(FOLDER / "bin" / "tmux", ["tmux", "-c", TMUX], {**os.environ, **words})


for name in ("go", "stay"):
    os.mkfifo(FOLDER / name)
(FOLDER / "bin").mkdir()
shutil.copy("/bin/sh", FOLDER / "bin" / "tmux")
leader = os.fork()
if leader == 0:
    os.setsid()
    if os.fork() == 0:
        tmux()
    os._exit(0)
os.waitpid(leader, 0)
os.execv(sys.executable, [sys.executable, str(Path(__file__).with_name("tree_server.py")), str(FOLDER), *KINDS])
