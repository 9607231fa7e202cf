"""The library in impatient hands: cancelled anywhere, shared between tasks and threads, left in odd ways."""

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time

import anyio
import pytest
from faces import complete, little, living_of_runs, plain
from seen import until, until_sync

from hangguard import Limits, supervise
from hangguard.act import spawn
from hangguard.supervision.announcer import Subscription
from hangguard.supervision.events import Notice
from hangguard.testing.scripted import Script, ScriptedWorld, plain_sample, scripted_supervision

QUICK = Limits(stop_grace=1.0)
SLEEPER = ["sleep", "100"]


def served(folder, **options):
    return plain(folder, ready="/", limits=QUICK, **options)


async def turns(count):
    for _ in range(count):
        await anyio.lowlevel.checkpoint()


def held():
    """What this process holds: descriptors and threads."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


# ------------------------------------------------------------------------------------ cancelled anywhere


@pytest.mark.anyio
async def test_cancelled_any_number_of_turns_after_the_launch_it_leaves_at_once_and_leaves_nothing(
    tmp_path, monkeypatch
):
    """On asyncio one turn of these once waited for ever for a task that only its own end would have ended."""
    launch = spawn.Guarded._launch
    for count in range(12):
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:

                async def cancel(scope, count=count):
                    await turns(count)
                    scope.cancel()

                async def launch_and_cancel(self, message, tasks=tasks, cancel=cancel):
                    await launch(self, message)
                    tasks.start_soon(cancel, scope)

                monkeypatch.setattr(spawn.Guarded, "_launch", launch_and_cancel)
                with anyio.CancelScope() as scope:
                    async with served(tmp_path, command=SLEEPER):
                        pytest.fail("it never answers")
                assert scope.cancelled_caught
        assert not living_of_runs(tmp_path)


@pytest.mark.anyio
@pytest.mark.parametrize("ready_after", [0.0, float("inf")], ids=["serving", "starting"])
async def test_cancelled_at_every_checkpoint_of_a_story_the_story_is_over(ready_after):
    for count in range(80):
        world = ScriptedWorld(
            [Script(look=lambda age: plain_sample(answer="good" if age >= ready_after else "failed"))],
            time.monotonic,
        )
        supervision = scripted_supervision(world, clock=time.monotonic)
        with anyio.fail_after(5):
            async with anyio.create_task_group() as tasks:
                with anyio.CancelScope() as scope:

                    async def cancel(scope=scope, count=count):
                        await turns(count)
                        scope.cancel()

                    tasks.start_soon(cancel)
                    async with supervision as server:
                        async for _ in server.events():
                            pass
                assert scope.cancelled_caught
        assert supervision.now is None
        assert all(attempt.release is not None for attempt in supervision.history)


@pytest.mark.anyio
async def test_twenty_that_were_given_up_cost_no_descriptor_and_no_thread(tmp_path):
    async def give_up(after):
        with anyio.move_on_after(after):
            async with served(tmp_path, command=SLEEPER):
                pytest.fail("it never answers")

    for _ in range(3):
        await give_up(0.3)
    before = held()
    for n in range(20):
        await give_up(0.01 * n)
    gc.collect()
    await until(lambda: held()[0] <= before[0] and held()[1] <= before[1])
    assert not living_of_runs(tmp_path)


# ------------------------------------------------------------------------------------ several at once


def test_of_several_gathered_the_error_of_one_arrives_and_all_are_stopped(tmp_path):
    async def one(n):
        async with served(tmp_path) as server:
            if n == 1:
                await anyio.sleep(0.1)
                raise ValueError(server.url)
            await anyio.sleep_forever()

    async def main():
        await asyncio.gather(*(one(n) for n in range(3)))

    with pytest.raises(ValueError, match=r"127\.0\.0\.1"):
        asyncio.run(main())
    assert not living_of_runs(tmp_path)


@pytest.mark.anyio
async def test_two_who_share_one_stream_of_events_both_come_to_its_end():
    stream, taken = Subscription(), []

    async def take():
        taken.extend([event.text async for event in stream])

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(take)
            tasks.start_soon(take)
            await anyio.wait_all_tasks_blocked()
            for text in ("a", "b", "c"):
                stream.put(Notice(t=0.0, attempt=1, text=text))
                await anyio.wait_all_tasks_blocked()
            stream.end()
    assert sorted(taken) == ["a", "b", "c"]


# ------------------------------------------------------------------------------------ left in odd ways


def test_left_in_another_task_it_is_stopped_and_the_error_says_what_to_do(tmp_path):
    """What an asynchronous fixture does where setup and teardown are two tasks (asyncio; trio forbids it itself)."""

    async def fixture():
        async with served(tmp_path) as server:
            yield server

    async def main():
        made = fixture()
        server = await asyncio.create_task(anext(made))
        with pytest.raises(RuntimeError, match=r"entered in one task and left in another .* Use the blocking face"):
            await asyncio.create_task(anext(made))
        assert server.poll() is not None
        assert not living_of_runs(tmp_path)

    asyncio.run(main())


@pytest.mark.anyio
async def test_after_the_block_the_asynchronous_handle_tells_what_was_and_does_nothing(tmp_path):
    async with served(tmp_path) as server:
        pass
    assert server.poll() is not None
    assert await server.wait() == server.returncode
    assert (await server.stop()).answer == "released"
    assert [event async for event in server.events()] == []
    server.terminate()
    for method in (server.restart, server.sample):
        with pytest.raises(RuntimeError, match="was stopped"):
            await method()


def test_another_thread_that_is_in_the_handle_while_the_block_is_left_hears_it_clearly(tmp_path):
    told, errors, waited = [], [], []

    def use(work):
        try:
            work()
        except RuntimeError as error:
            errors.append(str(error))

    def look_for_ever():
        while True:
            server.sample()

    with served(tmp_path) as server:
        stream = server.events()
        works = (look_for_ever, lambda: told.extend(e.event for e in stream), lambda: waited.append(server.wait()))
        threads = [threading.Thread(target=use, args=(work,), daemon=True) for work in works]
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert told == ["stopping", "released", "ended"]
    assert waited == [server.returncode]
    assert [e for e in errors if "was stopped" in e or "block was left" in e] == errors != []


def test_restarting_while_clients_hold_requests_answers_or_fails_them_and_the_new_one_serves(tmp_path):
    ends = []

    def ask():
        try:
            ends.append(complete(server.url))
        except OSError as error:  # cut off, or refused in between
            ends.append(error)

    with supervise(little(), run_dir=tmp_path / "runs", limits=QUICK) as server:
        first = server.pid
        clients = [threading.Thread(target=ask, daemon=True) for _ in range(8)]
        for client in clients:
            client.start()
        server.restart()
        assert server.pid != first
        assert complete(server.url)
    for client in clients:
        client.join(10)
    assert len(ends) == 8
    assert not living_of_runs(tmp_path)


UNCLOSED = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from faces import fetch, plain
server = plain(Path(sys.argv[1]), ready="/").start()
print(fetch(server.url), flush=True)
"""


@pytest.mark.parametrize("ends", ["sys.exit(0)", "del server; import gc; gc.collect()"])
def test_a_program_that_never_closes_ends_at_once_and_its_server_with_it(tmp_path, ends):
    here = os.path.dirname(__file__)
    command = [sys.executable, "-c", UNCLOSED + ends, str(tmp_path), here]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "200\n", "")
    until_sync(lambda: not living_of_runs(tmp_path))


def test_a_hook_may_ask_the_handle_and_even_stop_the_server(tmp_path):
    entered, answers = threading.Event(), []

    def hook(event):
        if event.event == "ready":
            assert entered.wait(10)
            answers.append((server.poll(), server.sample().answer.state, server.stop().answer))

    with served(tmp_path, hooks=[hook]) as server:
        entered.set()
        server.wait(15)
    assert answers == [(None, "good", "released")]
