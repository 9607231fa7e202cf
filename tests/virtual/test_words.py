"""Last words are asked for before a kill for a hang, of members that nobody could read, and at no other time."""

from dataclasses import replace

import pytest
import trio
from tenacity import stop_after_attempt

from hangguard import Limits, Retry
from hangguard.errors import GaveUp
from hangguard.facts import Unseen
from hangguard.store import RunFolder
from hangguard.testing.scripted import WORKER, Script, ScriptedWorld, plain_sample, scripted_supervision

HIDDEN = Unseen("py-spy may not read this process")


def sample(age, threads, **options):
    """Moves for a minute, then stands for ever; its stacks are as given."""
    moved = min(age, 60.0)
    seen = plain_sample(cpu_seconds=moved, read_bytes=int(moved) << 20, **options)
    return seen if threads is None else replace(seen, stacks=tuple(replace(s, threads=threads) for s in seen.stacks))


def asked(folder, *, threads=HIDDEN, ready_at=None, on_hang="act", pristine=False, is_python=True):
    """Return who was asked for last words, and how it ended."""
    outcome = []

    def look(age):
        answer = "good" if ready_at is not None and age >= ready_at else "failed"
        found = sample(age, threads, answer=answer)
        return replace(found, stacks=tuple(replace(stack, is_python=is_python) for stack in found.stacks))

    async def main():
        world = ScriptedWorld([Script(look=look)], trio.current_time)
        supervision = scripted_supervision(
            world,
            clock=trio.current_time,
            on_hang=on_hang,
            limits=Limits(ready_within=1800.0),
            retry=Retry(stop=stop_after_attempt(1)),
        )
        supervision._run = replace(
            supervision._run, pristine=pristine, folder=RunFolder(run_id="scripted", path=str(folder))
        )
        try:
            async with supervision:
                outcome.append("ready")
        except GaveUp as gave_up:
            outcome.append(gave_up.history[-1].verdict.verdict)
        outcome.append(world.guards[-1].last_asked)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return tuple(outcome)


def test_a_member_that_nobody_could_read_is_asked_before_it_is_killed(tmp_path):
    verdict, who = asked(tmp_path)
    assert verdict in {"stuck", "expired"}
    assert who == (WORKER,)


@pytest.mark.parametrize(
    "options",
    [
        {"threads": None},
        {"on_hang": "report"},
        {"pristine": True},
        {"is_python": False},
        {"ready_at": 30.0},
    ],
    ids=["its stacks were seen", "only to be reported", "pristine", "no Python", "ready, then stopped as asked"],
)
def test_nobody_is_asked_otherwise(tmp_path, options):
    _, who = asked(tmp_path, **options)
    assert who == ()
