"""Real vLLM and SGLang with two ranks, recorded by hangguard itself on H200, judged again sample by sample."""

import pytest

from tp_recordings import ROWS, judged_again, name_of

FOUND_WITHIN = 20.0
"""Seconds without product within which every hang is found."""


def of(*faults):
    rows = [row for row in ROWS if row["scenario"].partition("-")[2] in faults]
    return pytest.mark.parametrize("row", rows, ids=map(name_of, rows))


def rank(row):
    return f"TP{row['rank']}"


@of("healthy")
def test_no_second_of_a_healthy_start_and_of_its_first_requests_is_called_a_hang(row):
    said = [memory.verdict.verdict for memory in judged_again(row)]
    assert set(said) == {"moving", "ready"}
    assert said.count("ready") >= 2


@of("stopped")
def test_a_rank_that_is_stopped_in_a_step_is_named_first_and_nccl_misses_the_same(row):
    verdict = judged_again(row)[-1].verdict
    assert (verdict.verdict, verdict.kind, verdict.phase) == ("stuck", "stopped", "serving")
    assert verdict.suspects[0].rank == rank(row)
    assert verdict.still_for < FOUND_WITHIN
    assert row["nccl_names"] == {"missing_ranks": [row["rank"]]}


@of("deadlock")
def test_a_deadlock_of_all_ranks_where_graphs_are_captured_names_them_all_and_where_they_stand(row):
    verdict = judged_again(row)[-1].verdict
    assert (verdict.verdict, verdict.kind, verdict.confidence) == ("stuck", "idle", "high")
    # On one board vLLM's lock stood in a function by which no phase is known.
    assert verdict.phase == ("jit-compile" if name_of(row) == "vllm-deadlock-1" else "graph-capture")
    assert {suspect.rank for suspect in verdict.suspects[: row["ranks"]]} == {f"TP{n}" for n in range(row["ranks"])}
    assert all("wait_for_itself" in suspect.at[0] for suspect in verdict.suspects[: row["ranks"]])
    assert verdict.still_for < FOUND_WITHIN
    assert row["nccl_names"] == {}, "nobody is behind"


@of("killed")
def test_a_rank_that_is_killed_in_a_step_is_named_and_never_the_one_that_misses_it(row):
    memories = judged_again(row)
    verdict = memories[-1].verdict
    assert "stuck" not in {memory.verdict.verdict for memory in memories}
    if (row["engine"], row["boards"]) == ("sglang", 1):  # then it was ended after 47 s, in the midst of its farewell
        farewell = [memory.verdict for memory in memories if memory.verdict.kind == "farewell"]
        assert len(farewell) > 30
        verdict = farewell[-1]
    else:
        assert (verdict.verdict, verdict.kind, verdict.phase) == ("exited", "crash", "serving")
    assert f"_{rank(row)} (pid " in verdict.why
    assert "ended by signal 9 (SIGKILL)" in verdict.why
    assert "TP0]" not in verdict.why
