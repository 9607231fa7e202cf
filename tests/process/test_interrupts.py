"""Ctrl-C in real programs: once stops with proof, a second time ends the grace and not the proof."""

import os
import signal
import time
from dataclasses import replace

import pytest
from faces import User, takes_at_most

from hangguard import Limits
from hangguard.act.spawn import guarded
from hangguard.supervision.interrupts import holding_interrupts
from hangguard.testing.scripted import RELEASED, Script, ScriptedWorld, plain_sample, scripted_supervision

FACES = ("sync", "asyncio", "trio")
BESIDE = "task"
"""A task beside the main one, which asyncio.run ends only after it has given Ctrl-C back to Python."""


@pytest.fixture
def start(tmp_path):
    users = []

    def begin(face, **options):
        users.append(User(tmp_path / str(len(users)), face, **options))
        return users[-1]

    yield begin
    for user in users:
        user.close()


def interrupted(user):
    user.tree()
    user.interrupt()
    end = user.ends(within=10.0)
    assert end == {"raised": "KeyboardInterrupt", "released": "released"}
    assert not user.left()
    assert user.events()[-1]["event"] == "ended"
    assert user.events()[-1]["left_behind"] == []


def test_once_while_starting(start):
    """The three faces side by side: each in the middle of a phase that would last for minutes."""
    users = [start(face, server={"faults": [["weights-load", "sleep:300"]]}) for face in FACES]
    for user in users:
        user.until_told("phase", phase="weights-load")
    for user in users:
        interrupted(user)
        assert not user.has("serving")


def test_once_while_serving(start):
    users = [start(face) for face in FACES]
    for user in users:
        user.said("serving")
    for user in users:
        interrupted(user)


def test_twice_ends_a_long_grace_and_not_the_proof(start):
    users = [start(face, server={"ignore_term": True}, limits={"stop_grace": 30.0}) for face in (*FACES, BESIDE)]
    for user in users:
        user.said("serving")
    for user in users:
        user.tree()
        user.interrupt()
        user.until_told("stopping")
        assert user.process.poll() is None
        again = time.monotonic()
        interrupted(user)
        assert time.monotonic() - again < 8.0
        assert user.has_told("released", released="released")
        assert [event["event"] for event in user.events()].count("stopping") == 1


def test_once_keeps_the_grace(start):
    """The counterpart: a server that ignores SIGTERM gets its whole grace after one Ctrl-C."""
    users = [start(face, server={"ignore_term": True}, limits={"stop_grace": 2.0}) for face in FACES]
    for user in users:
        user.said("serving")
    began = time.monotonic()
    for user in users:
        user.tree()
        user.interrupt()
    for user in users:
        assert user.ends(within=12.0)["raised"] == "KeyboardInterrupt"
        assert time.monotonic() - began >= 2.0
        assert not user.left()


class InterruptedWorld(ScriptedWorld):
    """Ctrl-C is raised in the task that stops, while it proves the release."""

    async def _prove_release(self, **facts):
        if len(self.guards[0].stops) == 1:
            raise KeyboardInterrupt
        return await super()._prove_release(**facts)


@pytest.mark.anyio
async def test_raised_inside_the_stop_itself_it_ends_the_grace_and_not_the_proof():
    world = InterruptedWorld([Script(look=lambda _age: plain_sample(answer="good"))], time.monotonic)
    supervision = scripted_supervision(world, clock=time.monotonic, limits=Limits(stop_grace=5.0))
    with pytest.raises(KeyboardInterrupt):
        async with supervision:
            pass
    assert supervision.history[-1].release == replace(RELEASED, segments=())
    assert world.guards[0].stops == [5.0, 0.0]


def own_handler(_number, _frame):
    """Of a caller who has one."""


@pytest.mark.parametrize("handler", [own_handler, signal.SIG_IGN, signal.SIG_DFL])
def test_a_handler_of_the_callers_stays(handler):
    before = signal.signal(signal.SIGINT, handler)
    try:
        with holding_interrupts(lambda: pytest.fail("held")):
            assert signal.getsignal(signal.SIGINT) is handler
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_held_interrupts_are_told_at_once_and_raised_at_the_end_and_the_handler_is_put_back():
    told = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), holding_interrupts(lambda: told.append("hurry")):
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)
            told.append("end of the block")
        assert told == ["hurry", "hurry", "end of the block"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.anyio
async def test_a_hurry_that_is_faster_than_the_request_to_stop_is_not_lost(tmp_path):
    """The second Ctrl-C may come between the word of the stop and the stop."""
    argv = ["/bin/sh", "-c", "trap '' TERM; while :; do sleep 0.05; done"]
    async with guarded(
        argv=argv,
        env=dict(os.environ),
        cwd=str(tmp_path),
        log_path=str(tmp_path / "log"),
        lock_path=None,
        death_grace=0.5,
        on_death="stop",
        pristine=False,
    ) as server:
        server.hurry()
        with takes_at_most(8.0):
            assert (await server.stop(grace=60.0)).survivors == ()
