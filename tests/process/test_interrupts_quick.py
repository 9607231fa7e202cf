"""Ctrl-C where nobody would look for it: while the event loop begins, and in a task of trio's that only looks."""

import builtins
import subprocess
import sys
import time

import anyio
import pytest

from hangguard.supervision.interrupts import bare
from hangguard.testing.scripted import Script, ScriptedWorld, plain_sample, scripted_supervision

BEGINS_SLOWLY = """
import os, signal, sys, threading, time
import anyio.from_thread as anyios
from hangguard import supervise
from hangguard.supervision.interrupts import blocking_portal

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are started without

run = anyios.run_eventloop
def slowly(*args, **options):
    time.sleep(0.3)  # the main thread waits for the loop now
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.3)
    return run(*args, **options)
anyios.run_eventloop = slowly
opened = {opened}
try:
    with opened:
        print("entered")
except KeyboardInterrupt:
    print("interrupted", sum(thread.name.startswith("asyncio-portal") for thread in threading.enumerate()))
"""
OPENED = {
    "the portal": "blocking_portal()",
    "a supervision": "supervise([sys.executable, '-m', 'http.server', '{port}'], url='http://127.0.0.1:{port}')",
}


@pytest.mark.parametrize("opened", OPENED)
def test_while_the_event_loop_begins_it_is_held_and_then_raised_and_no_loop_is_left(opened):
    code = BEGINS_SLOWLY.replace("{opened}", OPENED[opened])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "interrupted 0\n"), done.stderr


class Looking:
    """A watcher whose look is interrupted as trio does it: inside a task of its own."""

    def __init__(self, _target):
        pass

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    async def take_sample(self, *_):
        async with anyio.create_task_group() as group:
            group.start_soon(self._interrupted)

    async def _interrupted(self):
        raise KeyboardInterrupt


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_in_a_task_that_looks_it_arrives_as_it_is_and_the_server_is_stopped():
    class World(ScriptedWorld):
        def _observe(self, target):
            return Looking(target)

    world = World([Script(look=lambda _age: plain_sample())], time.monotonic)
    with pytest.raises(KeyboardInterrupt):
        async with scripted_supervision(world, clock=time.monotonic):
            pytest.fail("nothing was ready")
    assert world.guards[0].stops


def test_of_groups_only_what_asks_for_the_end_is_taken_out():
    asked = KeyboardInterrupt()
    assert (
        bare(builtins.BaseExceptionGroup("outer", [builtins.BaseExceptionGroup("inner", [GeneratorExit(), asked])]))
        is asked
    )
    assert bare(builtins.BaseExceptionGroup("a cancellation", [GeneratorExit()])) is None
    assert bare(GeneratorExit()) is None
    errors = builtins.ExceptionGroup("errors", [ValueError()])
    assert bare(errors) is errors
