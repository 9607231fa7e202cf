"""A server that has failed, says so, and lives on: for how long it may, and what is said when it does not end."""

from dataclasses import replace

import pytest
from asked import API, LOCKED, WORKER, Asked, served
from making import BUSY, SERVER, Member, Story, first, frames, rules, seen, watch
from recorded import rules_of

from hangguard.judge import diagnose_memory
from hangguard.judge.advice import BY_REASON
from hangguard.judge.endings import told_by
from hangguard.judge.farewell import FAREWELL

OTHER = Member(103, "ENGINE::Worker_1", 100, 40, frames("all_reduce distributed_c10d.py", "load_model runner.py"))
TWO = (*SERVER, OTHER)
GATHERS = "[2026-11-30 08:20:32] Waiting 60.0 seconds for CUDA coredumps before exiting."


def test_a_serving_rank_that_died_while_requests_wait_is_a_farewell_and_then_broken_and_never_stuck():
    server = Asked(story=Story(members=(API, WORKER, OTHER)))
    server.goes(5, running=4, tokens=30)
    server.story.loses(103, -9)
    server.goes(1, running=4, lines=(GATHERS,))
    server.goes(70, running=4, at=LOCKED)
    assert "stuck" not in server.seen()
    farewell = server.first("waiting").verdict
    assert farewell.kind == "farewell"
    assert "(pid 103) ended by signal 9" in farewell.why
    server.goes(20, running=4, at=LOCKED)
    assert server.first("broken").verdict.suspects[0].pid == 103


def test_nobody_says_farewell_who_lives():
    server = Asked(story=Story(members=(API, WORKER, OTHER)))
    server.goes(5, running=4, tokens=30)
    server.goes(1, running=4, lines=(GATHERS,))
    server.goes(60, running=4, at=LOCKED)
    assert server.first("stuck") is not None
    assert "waiting" not in server.seen()


VLLM_ON_TWO_H200 = (
    "(Worker_TP1 pid=1185) ERROR 11-30 08:36:56 [multiproc_executor.py:1007] WorkerProc hit an exception.",
    "(Worker_TP1 pid=1185) ERROR 11-30 [multiproc_executor.py:1007] RuntimeError: CUBLAS_STATUS_INTERNAL_ERROR",
    "(EngineCore pid=1077) ERROR 11-30 08:36:56 [core.py:1330] EngineCore failed to start.",
    "(EngineCore pid=1077) ERROR 11-30 08:36:56 [core.py:1330] RuntimeError: Worker failed with error 'CUDA error'",
)
SYMPTOMS = rules_of("vllm").symptoms
READ = rules(symptoms=SYMPTOMS)


def failed() -> Story:
    return Story(members=TWO).goes(22, **BUSY).goes(1, lines=VLLM_ON_TWO_H200)


@pytest.mark.parametrize("then", [{}, {"cpu": 0.9, "states": "R"}], ids=["all stand still", "they burn a core"])
def test_a_start_that_says_that_it_has_failed_and_does_not_end_is_broken_for_that_reason(then):
    told = failed()
    t = told.t
    memories = watch(told.goes(90, **then).samples, READ)
    assert "stuck" not in seen(memories)
    broken = first(memories, "broken")
    assert FAREWELL <= broken.now - t <= FAREWELL + 3.0
    verdict = broken.verdict
    assert (verdict.kind, verdict.reason, verdict.permanent) == ("failed", "crash", False)
    assert "CUBLAS_STATUS_INTERNAL_ERROR" in verdict.why
    assert {suspect.pid for suspect in verdict.suspects} == {102, 103}


def test_what_to_do_is_told_by_the_reason_and_not_by_the_phase():
    oom = ("(Worker_TP1 pid=1) ERROR [multiproc_executor.py:1] torch.OutOfMemoryError: CUDA out of memory.",)
    told = (
        Story(members=TWO).goes(22, **BUSY).goes(1, lines=(*VLLM_ON_TWO_H200[:1], *oom, VLLM_ON_TWO_H200[2])).goes(90)
    )
    broken = first(watch(told.samples, READ), "broken")
    assert broken.verdict.reason == "gpu-oom"
    read, advice = diagnose_memory(broken).advice[:2]
    assert "first error in its log" in read
    assert advice == BY_REASON["gpu-oom"]


def test_it_gets_no_more_time_than_the_whole_start_has():
    told = failed()
    deadline = told.t + 30.0
    expired = first(watch(told.goes(90).samples, replace(READ, deadline=deadline)), "expired")
    assert deadline <= expired.now <= deadline + 2.0
    assert expired.verdict.kind == "ready_within"


def test_until_then_it_may_end_by_itself():
    told = failed().goes(40)
    assert first(watch(told.samples, READ), "waiting").verdict.kind == "farewell"
    told.loses(102, 1).loses(103, 1).loses(100, 1).goes(12)
    memories = watch(told.samples, READ)
    assert memories[-1].verdict.verdict == "exited"
    assert "broken" not in seen(memories)


def test_a_script_that_starts_another_one_by_itself_has_not_failed():
    told = failed().goes(8)
    for shard in range(10):
        told.goes(10, lines=(f"Loading safetensors checkpoint shards: {10 * shard} %",), **BUSY)
    assert {"broken", "waiting"}.isdisjoint(seen(watch(told.samples, READ)))
    assert first(watch(told.goes(30).samples, READ), "stuck") is not None, "and its own hang is still one"


def test_the_same_words_of_a_server_that_answers_are_no_end():
    server = Asked(by=served(symptoms=SYMPTOMS))
    server.goes(5).goes(1, lines=VLLM_ON_TWO_H200)
    assert server.goes(120).seen() == {"ready"}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_words_of_single_requests_and_of_what_is_tried_again_are_not_final(engine):
    harmless = (
        "(APIServer pid=1) ERROR [async_llm.py:1] AsyncLLM output_handler failed.",
        "(EngineCore pid=1) ERROR RPC call to execute_model timed out.",
        "Capture cuda graph failed: retrying",
        "[2026-11-30 08:20:27 TP0] DetokenizerManager hit an exception: Traceback",
    )
    assert not any(told.final for told in told_by(harmless, rules_of(engine)))
