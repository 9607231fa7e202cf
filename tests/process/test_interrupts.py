"""Ctrl-C in real programs: once stops with proof, a second time ends the grace and not the proof."""

import os
import time

import pytest
from faces import User, takes_at_most

from hangguard.act.spawn import guarded

FACES = ("sync", "asyncio", "trio")


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
    users = [start(face, server={"ignore_term": True}, limits={"stop_grace": 30.0}) for face in FACES]
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
