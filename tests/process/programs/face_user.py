"""A user's program. Argument: JSON with face (sync, asyncio, trio, or task: asyncio beside the main task), folder,
mode, server (options of the little one) and limits. It writes its events to FOLDER/events, what it is at to files
of that name, and its end to FOLDER/end.

Modes: serve (until something ends it), fork (a forked child touches the handle, and leaves the block), sleeper (a
child that is forked when the server has been started sleeps on).
"""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import anyio
import trio

from hangguard import Limits, WrongProcess, supervise
from hangguard.testing import little_server_command

ASKED = json.loads(sys.argv[1])
FOLDER, MODE = Path(ASKED["folder"]), ASKED["mode"]
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it


def note(name, text=""):
    part = FOLDER / f".{name}"
    part.write_text(str(text))
    part.rename(FOLDER / name)


def write(event):
    with (FOLDER / "events").open("a") as out:
        out.write(json.dumps(event.as_json()) + "\n")
    if event.event == "launched" and MODE == "sleeper" and os.fork() == 0:  # it inherits every descriptor
        note("sleeper", os.getpid())
        time.sleep(60)
        os._exit(0)


def begin():
    return supervise(
        little_server_command(**{"phase_seconds": 0.02, "hold_mb": 2, "tp": 1, **ASKED.get("server", {})}),
        limits=Limits(**ASKED.get("limits", {})),
        run_dir=FOLDER / "runs",
        hooks=[write],
    )


def in_the_child(server, supervision):
    """Try everything; tell what came of it."""
    calls = ("poll", "wait", "stop", "terminate", "kill", "sample", "events", "restart")
    outcome = {}
    for name in calls:
        try:
            getattr(server, name)()
            outcome[name] = "came back"
        except WrongProcess as wrong:
            outcome[name] = "WrongProcess" if wrong.owner == os.getppid() else str(wrong)
    supervision.close()
    note("child", json.dumps(outcome))


def use(supervision):
    with supervision as server:
        forked = os.fork() if MODE == "fork" else None
        if forked == 0:
            in_the_child(server, supervision)
            sys.exit(0)  # through the end of the block
        note("serving", json.dumps({"pid": server.pid, "url": server.url}))
        if forked:
            note("reaped", os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]))
            note("pid_after", server.pid if server.poll() is None else "ended")
            return
        time.sleep(60)


async def use_async(supervision):
    async with supervision as server:
        note("serving", json.dumps({"pid": server.pid, "url": server.url}))
        await anyio.sleep(60)


async def use_beside(supervision):
    task = asyncio.create_task(use_async(supervision))
    await asyncio.sleep(60)
    await task


def main():
    supervision = begin()
    note("begun")
    raised = None
    try:
        if ASKED["face"] == "sync":
            use(supervision)
        elif ASKED["face"] == "asyncio":
            asyncio.run(use_async(supervision))
        elif ASKED["face"] == "task":
            asyncio.run(use_beside(supervision))
        else:
            trio.run(use_async, supervision)
    except BaseException as error:
        raised = type(error).__name__
        if isinstance(error, SystemExit):
            raise
    history = supervision.history
    release = history[-1].release if history else None
    note("end", json.dumps({"raised": raised, "released": release.answer if release else None}))


main()
