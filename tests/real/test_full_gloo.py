"""Real ranks with real collectives of gloo on the CPU: who is named when one of them does not come."""

import pytest

import ranked
from hangguard import Limits

pytestmark = [pytest.mark.full, pytest.mark.timeout(400, func_only=True)]

RANKS = 3
GENEROUS = Limits(ready_within=300, stop_grace=2)
FOUND_WITHIN = 15.0
"""Seconds from the last movement to the verdict."""


@pytest.fixture
def tell(vllm_env, tmp_path):
    """Run one fault with the torch that vLLM has brought."""

    def run(name, **options):
        python = vllm_env / "bin" / "python"
        return ranked.tell(
            name, folder=tmp_path, python=python, limits=GENEROUS, device="cpu", hold_gib=0.05, **options
        )

    return run


def test_a_healthy_start_of_several_ranks_is_ready_and_answers_with_all_of_them(tell):
    ranked.must_be_healthy(tell("healthy", ranks=RANKS), ranks=RANKS)


@pytest.mark.parametrize("name", ["deadlock", "late", "killed", "absent", "stopped"])
@pytest.mark.parametrize(("ranks", "rank"), [(RANKS, 1), (2, 1), (2, 0)])
def test_the_rank_that_does_not_come_is_named(tell, name, ranks, rank):
    story = tell(name, ranks=ranks, rank=rank)
    ranked.must_be_said(story, rank=rank, on_gpu=False)
    assert story.attempt.settled_at - story.attempt.last_movement_at < FOUND_WITHIN
