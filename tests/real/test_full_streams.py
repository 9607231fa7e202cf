"""Real engines that are ended while clients hold long streams: by a SIGTERM, by a stop, by too short a drain."""

import time

import anyio
import httpx
import psutil
import pytest
from real_engines import make_model, sglang_command, sglang_environment, vllm_command, vllm_environment
from real_watch import watched

from hangguard import Limits

pytestmark = [pytest.mark.full, pytest.mark.anyio, pytest.mark.timeout(1500, func_only=True)]

POSITIONS = 16_384
LONG = 16_000
"""Tokens: a minute and more of one stream, where nobody ends it."""
FINITE = 400
"""Tokens: SGLang takes a SIGTERM for a wish, and lets every stream come to its end, however long that takes."""
STREAMS = 4
LIMITS = Limits(stop_grace=10)
SHORT = 3.0
"""Seconds of a drain that no stream of this length fits into."""


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture(params=["vllm", "sglang"])
def serving(request, tmp_path):
    """Start that engine, ready for long streams; the number of its rows, and the watch of it."""
    env = request.getfixturevalue(f"{request.param}_env")
    cache, more = tmp_path / "cache", ("--positions", str(POSITIONS))
    if request.param == "vllm":
        model = make_model(env, tmp_path / "m", *more)
        command = vllm_command(env, model, "{port}", "--enforce-eager", "--max-model-len", str(POSITIONS))
        return "V17", watched(command, env=vllm_environment(cache_dir=cache), folder=tmp_path, limits=LIMITS)
    model = make_model(env, tmp_path / "m", "--arch", "gpt2", *more)
    command = sglang_command(env, model, "{port}", "--max-total-tokens", str(STREAMS * POSITIONS))
    return "S8", watched(command, env=sglang_environment(cache_dir=cache), folder=tmp_path, limits=LIMITS)


class Streams:
    """Clients with a stream each; the first one stops reading after a token, and holds on to it until it is let go."""

    def __init__(self, url, tokens):
        self.tokens = [0] * STREAMS
        self.ends = [""] * STREAMS
        self._url, self._most = url, tokens
        self._let_go = anyio.Event()

    async def begin(self, group):
        for n in range(STREAMS):
            group.start_soon(self._take, n)
        with anyio.fail_after(300):
            while not all(self.tokens):
                await anyio.sleep(0.01)
        assert not any(self.ends)

    async def must_have_ended(self):
        """Nobody waits for a server that is gone."""
        self._let_go.set()
        with anyio.fail_after(30):
            while not all(self.ends):
                await anyio.sleep(0.01)

    async def _take(self, n):
        body = {"model": "tiny", "prompt": "hello", "max_tokens": self._most, "ignore_eos": True, "stream": True}
        try:
            async with (
                httpx.AsyncClient(timeout=None, trust_env=False) as client,
                client.stream("POST", f"{self._url}/v1/completions", json=body) as answer,
            ):
                assert answer.status_code == 200, await answer.aread()
                async for line in answer.aiter_lines():
                    self.tokens[n] += line.startswith("data: {")  # the last one may be cut in the middle
                    if n == 0:
                        await self._let_go.wait()
            self.ends[n] = "over"
        except httpx.HTTPError as failure:
            self.ends[n] = type(failure).__name__


async def test_a_sigterm_from_outside_while_streams_are_held_leaves_nothing(serving, table):
    number, started = serving
    async with started as watch, anyio.create_task_group() as group:
        await watch.until_ready()
        streams = Streams(watch.launch.url, FINITE)
        await streams.begin(group)
        watch.note_memory()
        psutil.Process(watch.pid).terminate()
        watch.fault_at = time.monotonic()
        ended = await watch.until_over()
        await streams.must_have_ended()
    assert (ended.verdict, ended.kind) == ("exited", "signal")
    table.add(f"{number} SIGTERM", f"SIGTERM from outside, {STREAMS} clients hold streams", watch, ended)


@pytest.mark.parametrize("drain", [None, SHORT], ids=["at once", "drained too shortly"])
async def test_a_stop_while_streams_are_held_is_bounded_and_leaves_nothing(serving, table, drain):
    number, started = serving
    async with started as watch, anyio.create_task_group() as group:
        await watch.until_ready()
        await watch.until(lambda: watch.server is not None, "the handle")
        streams = Streams(watch.launch.url, LONG)
        await streams.begin(group)
        began = time.monotonic()
        release = await watch.server.stop(drain=drain)
        seconds = time.monotonic() - began
        await watch.until(lambda: watch.is_over, "the end")
        await streams.must_have_ended()
    assert watch.failure is None
    assert release.left_behind == ()
    assert seconds < (drain or 0.0) + LIMITS.stop_grace + LIMITS.release_within
    drained = watch.server.attempt.drained
    if drain is None:
        assert drained is None
    else:
        assert drained.ending == "time"
        assert drained.left != 0  # some, or unseen where a busy machine gave no answer so soon
    asked = "stop()" if drain is None else f"stop(drain={drain:g})"
    healthy = f"stopped after {seconds:.1f} s"
    table.add(f"{number} {asked}", f"`{asked}`, {STREAMS} clients hold streams", watch, None, healthy=healthy)
