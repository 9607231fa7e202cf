"""One sample from all probes: each with its own deadline, none of them able to end the others."""

import json
import logging
import os
import signal
import subprocess
import sys
import time

import anyio
import httpx
import pytest
from seen import PROGRAMS, family, launch, target, until

from hangguard.facts import NOT_ASKED, Ask, Exit, Host, Listener, Log, Port, Request, Sample, Stack, Tree, Unseen
from hangguard.observe import PROBES, Observer

pytestmark = pytest.mark.anyio


class Scripted:
    """A probe that does what its function does."""

    def __init__(self, field, answer, after=()):
        self.field = field
        self.after = after
        self.answer = answer
        self.closed = 0

    def __call__(self, _target, shared):
        self.shared = shared
        return self

    async def look(self, ask):
        answer = self.answer(ask)
        return await answer if hasattr(answer, "__await__") else answer

    async def aclose(self):
        self.closed += 1


async def forever(_ask):
    await anyio.sleep_forever()


def fail(_ask):
    raise RuntimeError("a bug")


async def test_a_sample_has_what_the_probes_saw_and_the_time_of_its_start():
    times = iter([5.0, 6.0, 7.0])
    end = Exit(code=3, at=4.0)
    log = Scripted("log", lambda _ask: Log(total_bytes=1))
    gpus = Scripted("gpus", lambda _ask: ())
    async with Observer(target(clock=lambda: next(times), exit_of=lambda: end), (log, gpus)) as observer:
        seen = await observer.take_sample()
    assert seen == Sample(t=5.0, log=Log(total_bytes=1), gpus=(), exit=end)
    assert (log.closed, gpus.closed) == (1, 1)


async def test_a_probe_that_hangs_is_unseen_and_the_others_are_not():
    probes = (Scripted("tree", forever), Scripted("gpus", lambda _ask: ()), Scripted("host", forever))
    async with Observer(target(probe_within=0.2), probes) as observer:
        began = time.monotonic()
        seen = await observer.take_sample()
        assert time.monotonic() - began < 1
    assert seen.tree == Unseen("no answer within 0.2 s")
    assert seen.host == Unseen("no answer within 0.2 s")
    assert seen.gpus == ()


async def test_a_probe_with_a_bug_is_unseen_and_logged_once(caplog):
    probes = (Scripted("tree", fail), Scripted("gpus", lambda _ask: ()))
    with caplog.at_level(logging.DEBUG, logger="hangguard"):
        async with Observer(target(), probes) as observer:
            for _ in range(3):
                seen = await observer.take_sample()
                assert seen.tree == Unseen("probe failed: RuntimeError: a bug")
                assert seen.gpus == ()
    assert [record.name for record in caplog.records] == ["hangguard"]
    assert "a bug" in caplog.text


async def test_cancellation_passes():
    async with Observer(target(), (Scripted("tree", forever),)) as observer:
        began = time.monotonic()
        with anyio.move_on_after(0.1) as scope:
            await observer.take_sample()
        assert scope.cancelled_caught
        assert time.monotonic() - began < 1


async def test_a_probe_gets_the_facts_of_the_same_sample_that_it_builds_on():
    seen_by_port = []
    count = iter(range(1, 10))
    tree = Scripted("tree", lambda _ask: Tree(members=(), births=next(count)))
    port = Scripted("port", lambda _ask: seen_by_port.append(port.shared.tree.births), after=("tree",))
    async with Observer(target(), (port, tree)) as observer:
        await observer.take_sample()
        await observer.take_sample()
    assert seen_by_port == [1, 2]


async def test_two_samples_at_once_are_taken_one_after_the_other():
    inside = []

    async def alone(_ask):
        inside.append(1)
        await anyio.sleep(0.01)
        assert len(inside) == 1
        inside.clear()
        return ()

    seen = []
    async with Observer(target(), (Scripted("gpus", alone),)) as observer, anyio.create_task_group() as group:

        async def take():
            seen.append(await observer.take_sample())

        group.start_soon(take)
        group.start_soon(take)
    assert [one.gpus for one in seen] == [(), ()]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
async def test_the_bodys_error_arrives_as_it_is(error):
    probe = Scripted("tree", lambda _ask: Tree(members=()))

    async def body():
        async with Observer(target(), (probe,)) as observer:
            probe.shared.tasks.start_soon(anyio.sleep_forever)
            await observer.take_sample()
            raise error("the body's own")

    caught = None
    try:
        await body()
    except BaseException as problem:
        caught = problem
    assert type(caught) is error
    assert probe.closed == 1


async def test_leaving_under_cancellation_closes_everything_and_ends_soon():
    probe = Scripted("tree", lambda _ask: Tree(members=()))
    began = time.monotonic()
    with anyio.move_on_after(0.1) as scope:
        async with Observer(target(), (probe,)):
            probe.shared.tasks.start_soon(anyio.sleep_forever)
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert probe.closed == 1
    assert time.monotonic() - began < 1


async def test_a_probe_that_does_not_close_holds_nobody_for_long(monkeypatch):
    monkeypatch.setattr("hangguard.observe._CLOSED_WITHIN", 0.2)
    probe = Scripted("tree", lambda _ask: Tree(members=()))
    probe.aclose = anyio.sleep_forever
    other = Scripted("gpus", lambda _ask: ())
    began = time.monotonic()
    async with Observer(target(), (probe, other)):
        pass
    assert time.monotonic() - began < 1
    assert other.closed == 1


async def test_stacks_missing_says_why():
    (stacks,) = [made for made in PROBES if getattr(made, "field", "") == "stacks"]
    async with Observer(target(), (Scripted("tree", lambda _ask: Unseen("wedged")), stacks)) as observer:
        assert (await observer.take_sample()).stacks == NOT_ASKED
        seen = await observer.take_sample(Ask(stacks=True))
    assert seen.stacks == Unseen("the members are unseen: wedged")


async def test_a_real_server_from_its_start_to_its_end(tmp_path):
    """Everything together: members, log, port, answers, host, stacks, and the end."""
    path = tmp_path / "server.log"
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    program = str(PROGRAMS / "seen_server.py")
    with family(sys.executable, program, str(path), str(gate)) as made:
        port = int(made.line(1))
        request = Request(method="POST", path="/v1/completions", body='{"model": "{model}"}')
        asked = target(
            made.guardian,
            made.root,
            log_path=str(path),
            given=launch(port),
            health_path="/health",
            request=request,
        )
        async with Observer(asked) as observer:
            first = await observer.take_sample()
            assert [one.pid for one in first.tree.members] == [made.root_pid]
            assert first.log.lines == ("loading",)
            assert first.port == Port(port=port, listener=None)
            assert first.answer.state == "not-asked"
            assert first.health.state == "not-asked"
            assert isinstance(first.host, Host)
            assert first.stacks == NOT_ASKED
            assert not isinstance(first.gpus, Unseen) or first.gpus.reason

            stacks = (await observer.take_sample(Ask(stacks=True))).stacks
            assert isinstance(stacks, tuple), stacks
            assert [type(one) for one in stacks] == [Stack]
            functions = [frame.function for thread in stacks[0].threads for frame in thread.frames]
            assert "waits_at_the_gate" in functions

            with gate.open("w"):
                pass
            ready = await until(lambda: _sample(observer, lambda seen: seen.answer.state == "good"))
            assert ready.port.listener.pid == made.root_pid
            assert ready.port.listener.ours is True
            assert ready.health.state == "good"

            os.kill(made.root_pid, signal.SIGKILL)
            ended = await until(lambda: _sample(observer, lambda seen: seen.tree.members == ()))
            assert ended.tree.deaths == 1
            code = ended.tree.departed[0].exit_code
            assert code == -signal.SIGKILL or isinstance(code, Unseen)
            gone = await until(lambda: _sample(observer, lambda seen: seen.port.listener is None))
            assert gone.host.memory_total_bytes == first.host.memory_total_bytes
        said = path.read_text().splitlines()
        assert [json.loads(line) for line in said if line.startswith("{")] == [{"model": "the model"}]


async def _sample(observer, condition):
    seen = await observer.take_sample()
    return seen if condition(seen) else None


async def test_the_first_sample_with_a_listener_asks_at_once():
    async with Observer(
        target(ready=lambda _url: True, port=1),
        (
            Scripted("port", lambda _ask: Port(port=1, listener=Listener(pid=1, title="x", ours=True))),
            PROBES[4],
        ),
    ) as observer:
        assert (await observer.take_sample()).answer.state == "good"


def test_the_loop_of_samples_is_cheap_and_the_program_ends(anyio_backend):
    """With every probe; among them a log and a readiness function that never come back."""
    program = (
        "import anyio, os, tempfile, threading, sys\n"
        f"sys.path.insert(0, {str(PROGRAMS.parent)!r})\n"
        "from seen import target, launch\n"
        "from hangguard.observe import Observer\n"
        "fifo = tempfile.mkdtemp() + '/fifo'\n"
        "os.mkfifo(fifo)\n"
        "async def main():\n"
        "    given = launch(delegates_to='ssh')\n"
        "    block = lambda url: threading.Event().wait()\n"
        "    asked = target(log_path=fifo, ready=block, given=given, probe_within=0.3)\n"
        "    async with Observer(asked) as observer:\n"
        "        sample = await observer.take_sample()\n"
        "    print(sample.log, sample.answer.state)\n"
        f"anyio.run(main, backend={anyio_backend!r})\n"
        "os.unlink(fifo)\n"
        "os.rmdir(os.path.dirname(fifo))\n"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert done.stderr == ""
    assert "no answer within 0.3 s" in done.stdout
    assert "waiting" in done.stdout
    assert time.monotonic() - began < 15


def test_httpx_is_loaded_only_when_there_is_a_server_to_ask():
    program = "import sys, hangguard.observe; print('httpx' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert httpx.__name__ == "httpx"
