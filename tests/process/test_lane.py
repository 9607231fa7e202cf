"""A lane: one daemon thread, one question in flight, and nobody waits longer than it said."""

import os
import subprocess
import sys
import threading
import time

import anyio
import pytest
from seen import until

from hangguard.facts import Unseen
from hangguard.observe.lane import Lane

pytestmark = pytest.mark.anyio


@pytest.fixture
def lane():
    made = Lane("test")
    yield made
    made.close()


async def test_an_answer_comes_back(lane):
    assert await lane.ask(lambda: 42, within=5) == 42
    assert await lane.ask(threading.get_ident, within=5) != threading.get_ident()


async def test_what_the_question_raises_arrives_at_the_asker(lane):
    with pytest.raises(ZeroDivisionError):
        await lane.ask(lambda: 1 / 0, within=5)
    assert await lane.ask(lambda: "still there", within=5) == "still there"


async def test_a_question_that_hangs_is_unseen_and_the_next_says_for_how_long(lane):
    gate = threading.Event()
    began = time.monotonic()
    assert await lane.ask(gate.wait, within=0.1) == Unseen("no answer within 0.1 s")
    assert time.monotonic() - began < 1
    assert await lane.ask(lambda: 1, within=5) == Unseen("still busy with an earlier look for 0 s")
    gate.set()
    assert await until(lambda: _answer(lane)) == "free again"


async def _answer(lane):
    answer = await lane.ask(lambda: "free again", within=5)
    return None if isinstance(answer, Unseen) else answer


async def test_the_event_loop_goes_on_meanwhile(lane):
    turns = 0
    async with anyio.create_task_group() as group:

        async def count():
            nonlocal turns
            while True:
                await anyio.sleep(0.01)
                turns += 1

        group.start_soon(count)
        await lane.ask(lambda: time.sleep(0.3), within=5)
        group.cancel_scope.cancel()
    assert turns > 5


async def test_a_cancelled_asker_leaves_and_the_late_answer_is_nobodys(lane):
    gate = threading.Event()
    with anyio.move_on_after(0.05):
        await lane.ask(lambda: gate.wait() and "late", within=5)
        pytest.fail("was not cancelled")
    gate.set()
    assert await until(lambda: _answer(lane)) == "free again"


async def test_two_askers_at_once_never_share_the_thread(lane):
    gate = threading.Event()
    answers = []

    async def ask(question):
        answers.append(await lane.ask(question, within=5))

    async with anyio.create_task_group() as group:
        group.start_soon(ask, gate.wait)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(ask, lambda: "second")
        await until(lambda: answers)
        assert isinstance(answers[0], Unseen)
        gate.set()
    assert answers[1] is True


async def test_closing_never_waits_for_a_hanging_question():
    gate = threading.Event()
    lane = Lane("closed while busy")
    await lane.ask(gate.wait, within=0.05)
    began = time.monotonic()
    lane.close()
    lane.close()
    assert time.monotonic() - began < 0.5
    gate.set()
    await until(lambda: not any("closed while busy" in thread.name for thread in threading.enumerate()))
    assert isinstance(await lane.ask(lambda: 1, within=1), Unseen)


async def test_closing_gives_back_thread_and_descriptor():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        lane = Lane("short-lived")
        assert await lane.ask(lambda: 1, within=5) == 1
        lane.close()
    await until(lambda: not any("short-lived" in thread.name for thread in threading.enumerate()))
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_a_program_ends_although_a_question_hangs(anyio_backend):
    program = (
        "import anyio, threading\n"
        "from hangguard.observe.lane import Lane\n"
        "async def main():\n"
        "    print(await Lane('x').ask(threading.Event().wait, within=0.1))\n"
        f"anyio.run(main, backend={anyio_backend!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=True)
    assert "no answer" in done.stdout
    assert done.stderr == ""
