"""Real engines that are stopped while they stream: what is in flight is finished first, then all of it is gone."""

import json

import anyio
import httpx
import psutil
import pytest
from real_engines import sglang_command, sglang_environment, vllm_command, vllm_environment

from hangguard import Limits, supervise

pytestmark = [pytest.mark.full, pytest.mark.anyio, pytest.mark.timeout(1500, func_only=True)]

TOKENS = 200
STREAMS = 4
DRAIN = 300.0


@pytest.fixture
def anyio_backend():
    return "asyncio"


async def stream(url, tokens):
    """Take a stream to its end; every piece goes into ``tokens``, and the end as ``None``."""
    body = {"model": "tiny", "prompt": "hello", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
        async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    tokens.append(None)
                elif line.startswith("data: "):
                    tokens.append(json.loads(line[6:]))


async def stop_while_it_streams(command, env, folder):
    """Stop with a drain while several streams are in flight; return how that went, after every check."""
    made = supervise(command, env=env, cwd=folder, run_dir=folder / "run", limits=Limits(stop_grace=15))
    async with made as server:
        events, all_tokens = server.events(), [[] for _ in range(STREAMS)]
        members = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        async with anyio.create_task_group() as group:
            for tokens in all_tokens:
                group.start_soon(stream, server.url, tokens)
            with anyio.fail_after(300):
                while not all(all_tokens):
                    await anyio.sleep(0.005)
            assert not any(tokens[-1] is None for tokens in all_tokens), "they were over before anybody stopped"
            release = await server.stop(drain=DRAIN)
        for tokens in all_tokens:
            assert tokens[-1] is None
            assert tokens[-2]["usage"]["completion_tokens"] == TOKENS
        assert release.answer == "released"
        assert [member for member in members if member.is_running() and member.status() != "zombie"] == []
        told = [event async for event in events if event.event in {"draining", "stopping"}]
        return server.attempt.drained, told


def must_be_drained(drained, told):
    assert (drained.left, drained.by, drained.ending) == (0, "counters", "done")
    assert drained.seconds < DRAIN
    assert [event.event for event in told][-1] == "stopping"
    assert told[0].event == "draining"


async def test_a_vllm_that_streams_is_drained_and_then_released(vllm_env, tiny_llama, tmp_path):
    command = vllm_command(vllm_env, tiny_llama, "{port}", "--enforce-eager")
    must_be_drained(*await stop_while_it_streams(command, vllm_environment(cache_dir=tmp_path / "cache"), tmp_path))


async def test_an_sglang_that_streams_is_drained_and_then_released(sglang_env, tiny_gpt2, tmp_path):
    command = sglang_command(sglang_env, tiny_gpt2, "{port}")
    must_be_drained(*await stop_while_it_streams(command, sglang_environment(cache_dir=tmp_path / "cache"), tmp_path))
