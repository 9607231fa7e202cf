"""A run whose state folder outlives it, in a container with its own /dev/shm: ``leave`` or ``clean``, and the folder.

``leave``: a run that died there and left a file; with ``at-once`` it is cleaned there. ``clean``: a file of somebody
else, of that number if the kernel gives it again, and a cleaning of that run. Prints what the kernel says of the file,
and what became of it.
"""

import json
import os
import sys
import time
from pathlib import Path

from hangguard import clean_up
from hangguard.facts import HeldFile, RunState
from hangguard.run_state import read_run, this_place, write_state
from hangguard.store import open_run_folder

what, base, *more = sys.argv[1:]


def numbers(path):
    found = path.stat()
    return {"device": found.st_dev, "inode": found.st_ino}


def made(name):
    path = Path("/dev/shm") / name
    path.write_bytes(b"x" * 4096)
    return path


said = {"namespace": os.readlink("/proc/self/ns/pid")}
if what == "leave":
    path = made("psm_of_the_run")
    gone = (4_000_000, 7)
    file = HeldFile(path=str(path), kind="file", held="shared", pid=gone[0], started=gone[1], **numbers(path))
    folder = open_run_folder(base)
    write_state(
        folder,
        RunState(
            run_id=folder.run_id, place=this_place(), began=time.time(), stage="ready", supervisor=gone, guardian=gone,
            root=gone, members=(gone,), shm_before=(), files=(file,),
        ),
    )  # fmt: skip
else:
    path = made("psm_of_a_stranger")
said |= numbers(path)
(run,) = Path(base).iterdir()
if what != "leave" or "at-once" in more:
    report = clean_up(str(run), really=True)
    said |= {"items": [[item.what, item.name, item.whose, item.answer, item.proof] for item in report.items]}
said |= {"exists": path.exists(), "place": str(read_run(str(run)).state.place)}
print(json.dumps(said))
