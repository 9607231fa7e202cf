"""The real vLLM server on the CPU: a healthy start, a real deadlock and its cure, real deaths."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
from real_engines import vllm_command, vllm_environment

from hangguard import Limits, ServerLost, supervise


@pytest.fixture
def told():
    return []


@pytest.fixture
def hooks(told):
    return [lambda event: told.append(event.as_json())]


def verdicts(told):
    return [event["verdict"] for event in told if event["event"] == "verdict"]


def complete(server):
    reply = httpx.post(
        f"{server.url}/v1/completions",
        json={"model": "tiny", "prompt": "hello", "max_tokens": 4},
        timeout=60,
        trust_env=False,
    )
    assert reply.status_code == 200
    return reply.json()["choices"]


def longest_silence(log_path, until):
    """Seconds between two writes into a log, as a watcher of the file sees them (10 Hz), until ``until()``."""
    last, longest, size = time.monotonic(), 0.0, -1
    while not until():
        now = os.stat(log_path).st_size if os.path.exists(log_path) else 0
        if now != size:
            size, last = now, time.monotonic()
        longest = max(longest, time.monotonic() - last)
        time.sleep(0.1)
    return longest


def test_a_healthy_cold_compile_is_silent_for_long_and_never_called_stuck(vllm_env, tiny_llama, tmp_path, told):
    """torch.compile with fresh caches: over 15 s without a byte of log, and still moving all the way."""
    import threading

    ready = threading.Event()
    silences = []

    def watch(event):
        told.append(event.as_json())
        if event.event == "launched":
            log = next(tmp_path.glob("run/*/attempt-1.log"))
            threading.Thread(target=lambda: silences.append(longest_silence(log, ready.is_set)), daemon=True).start()

    env = vllm_environment(cache_dir=tmp_path / "cache")
    with supervise(
        vllm_command(vllm_env, tiny_llama, "{port}"), env=env, run_dir=tmp_path / "run", hooks=[watch]
    ) as server:
        ready.set()
        assert complete(server)
        assert server.changes == ()
    while not silences:
        time.sleep(0.05)
    assert silences[0] > 15, "the test is worth nothing without a long silence"
    assert set(verdicts(told)) <= {"moving", "ready", "unclear"}
    assert [event for event in told if event["event"] in {"fallback", "gave_up"}] == []


def test_a_deadlock_in_the_compile_step_is_found_and_cured_by_the_ladder(vllm_env, tiny_llama, tmp_path, told, hooks):
    """V1: two locks in the warm-up. Stuck in jit-compile within 15 s; evidence kept; eager cures it; it answers."""
    env = vllm_environment(cache_dir=tmp_path / "cache", fault="warmup-lock")
    with supervise(
        vllm_command(vllm_env, tiny_llama, "{port}"),
        env=env,
        fallbacks="auto",
        limits=Limits(stop_grace=5),
        run_dir=tmp_path / "run",
        hooks=hooks,
    ) as server:
        assert complete(server)
        assert [(c.name, c.change, c.alters) for c in server.changes] == [("eager", "+ --enforce-eager", "speed")]
        (stuck,) = server.history
    verdict = stuck.verdict
    assert (verdict.verdict, verdict.kind, verdict.phase) == ("stuck", "idle", "jit-compile")
    assert stuck.settled_at - stuck.last_movement_at < 15
    assert any("warming_up_model" in str(suspect) or "_lock_twice" in str(suspect) for suspect in verdict.suspects)
    assert stuck.release.answer == "released"
    evidence = json.loads(Path(stuck.evidence_path).read_text())
    assert "warming_up_model" in json.dumps(evidence["samples"][-1]["stacks"])
    assert verdicts(told).count("stuck") == 1


def test_a_killed_engine_core_is_told_as_what_it_is_although_vllm_exits_0(vllm_env, tiny_llama, tmp_path):
    """SIGKILL of the engine core while serving: exited, crash, naming EngineCore and signal 9."""
    env = vllm_environment(cache_dir=tmp_path / "cache")
    command = vllm_command(vllm_env, tiny_llama, "{port}", "--enforce-eager")
    with pytest.raises(ServerLost) as lost, supervise(command, env=env, run_dir=tmp_path / "run") as server:
        assert complete(server)
        members = server.sample().tree.members
        core = next(p for p in members if p.title.startswith("VLLM::EngineCore"))
        assert psutil.Process(core.pid).ppid() == server.pid
        os.kill(core.pid, signal.SIGKILL)
        assert server.wait(timeout=60) == 0
    verdict = lost.value.attempt.verdict
    assert (verdict.verdict, verdict.kind) == ("exited", "crash")
    assert "EngineCore" in verdict.why
    assert "signal 9" in verdict.why
    assert lost.value.attempt.release.answer == "released"


SCRIPT = """
import json, sys
from hangguard import supervise
with supervise(json.loads(sys.argv[1]), run_dir=sys.argv[2]) as server:
    print(json.dumps([[p.pid, p.started] for p in server.sample().tree.members]), flush=True)
    sys.stdin.read()
"""


def test_nothing_is_left_of_the_tree_after_a_sigkill_of_the_supervising_script(vllm_env, tiny_llama, tmp_path):
    """The guardian ends what the script started, within 5 s; a bystander in the same folder lives."""
    env = vllm_environment(cache_dir=tmp_path / "cache")
    command = vllm_command(vllm_env, tiny_llama, "{port}")
    script = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, json.dumps([*command, "--enforce-eager"]), str(tmp_path / "run")],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    with subprocess.Popen(["sleep", "600"], cwd=tmp_path, env=env) as bystander:
        try:
            members = [psutil.Process(pid) for pid, _ in json.loads(script.stdout.readline())]
            assert any("EngineCore" in " ".join(p.cmdline()) for p in members)
            script.kill()
            began = time.monotonic()
            alive = members
            while alive and time.monotonic() - began < 5:
                alive = [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
                time.sleep(0.05)
            assert alive == []
            assert bystander.poll() is None
        finally:
            script.kill()
            script.wait()
            script.stdin.close()
            script.stdout.close()
            bystander.kill()
