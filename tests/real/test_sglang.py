"""The real SGLang server on the CPU, deadlocked where CUDA graphs are captured, and its cure."""

import time

import httpx
from real_engines import sglang_command, sglang_environment

from hangguard import Limits, supervise
from hangguard.facts import Serving


def test_a_deadlock_at_graph_capture_is_found_and_cured_by_the_ladder(sglang_env, tiny_gpt2, tmp_path):
    """S5: the scheduler deadlocks in init_cuda_graphs, after ``Memory pool end``. Stuck in graph-capture; cured."""
    env = sglang_environment(cache_dir=tmp_path / "cache", fault="graph-lock")
    with supervise(
        sglang_command(sglang_env, tiny_gpt2, "{port}"),
        env=env,
        fallbacks="auto",
        limits=Limits(stop_grace=5),
        run_dir=tmp_path / "run",
    ) as server:
        reply = httpx.post(
            f"{server.url}/v1/completions",
            json={"model": "tiny", "prompt": "hello", "max_tokens": 4},
            timeout=60,
            trust_env=False,
        )
        assert reply.status_code == 200
        assert [change.name for change in server.changes] == ["no-cuda-graph"]
        (stuck,) = server.history
    assert (stuck.verdict.verdict, stuck.verdict.kind, stuck.verdict.phase) == ("stuck", "idle", "graph-capture")
    assert stuck.settled_at - stuck.last_movement_at < 15
    assert any("init_cuda_graphs" in str(s) or "act" in str(s) for s in stuck.verdict.suspects)
    assert stuck.release.answer == "released"


def until_counted(server, tokens):
    """What the server counts once it has so many tokens and no request any more."""
    end = time.monotonic() + 60
    while True:
        seen = server.sample()
        serving = seen.serving if seen is not None else None
        if isinstance(serving, Serving) and not serving.running and (serving.generated_tokens or 0) >= tokens:
            return serving
        assert time.monotonic() < end, serving
        time.sleep(0.2)


def test_a_healthy_start_is_never_called_stuck(sglang_env, tiny_gpt2, tmp_path):
    """A plain start: moving until ready; then a busy scheduler that polls is still just ready."""
    told = []
    env = sglang_environment(cache_dir=tmp_path / "cache")
    with supervise(
        sglang_command(sglang_env, tiny_gpt2, "{port}"),
        env=env,
        run_dir=tmp_path / "run",
        hooks=[lambda event: told.append(event.as_json())],
    ) as server:
        assert server.changes == ()
        before = until_counted(server, 0)
        httpx.post(
            f"{server.url}/v1/completions",
            json={"model": "tiny", "prompt": "hello", "max_tokens": 8, "ignore_eos": True},
            timeout=60,
            trust_env=False,
        )
        after = until_counted(server, (before.generated_tokens or 0) + 7)  # the first comes out of the prefill
        assert (after.running, after.waiting) == (0, 0)
        assert after.prompt_tokens > (before.prompt_tokens or 0)  # no line before the first prefill
    assert {event["verdict"] for event in told if event["event"] == "verdict"} <= {"moving", "ready"}
