"""Real vLLM and SGLang with tensor parallelism: the seed story and its cure, a rank that stops, a rank that dies.

Run with ``-m engines_on_gpus`` (see ``tensor_parallel.py`` for what it needs). ``HANGGUARD_RECORD`` names a folder for
what is seen.
"""

import time
from contextlib import asynccontextmanager

import pytest
from real_watch import must_hang, watched
from tenacity import stop_after_attempt
from tensor_parallel import ANYTHING, ENGINES_SERVED, boards, chapter, keep_all, works

import ranked
from hangguard import Limits, Retry

pytestmark = [pytest.mark.engines_on_gpus, pytest.mark.anyio, pytest.mark.timeout(590, func_only=True)]

LIMITS = Limits(ready_within=540, stop_grace=5)
CLIENTS, TOKENS = 4, 1900
KEPT_MIB = 300.0
"""What the driver may keep of a board's memory after its last context is gone."""
FOUND_WITHIN = 20.0
"""Seconds without product within which a hang is found."""


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="session")
def caches(tmp_path_factory):
    return tmp_path_factory.mktemp("caches")


@pytest.fixture(params=ENGINES_SERVED)
def served(request):
    return ENGINES_SERVED[request.param]


@pytest.fixture
def ranks():
    return max(2, len(boards()))


@pytest.fixture
def story(served, request):
    """Everything that is sampled, in one file for both tests of an engine."""
    return ranked.Story(f"{served.name}-{request.node.originalname}", series="engines")


async def test_a_healthy_server_is_never_called_hung_and_a_rank_that_is_stopped_in_a_step_is(
    served, ranks, story, caches, tmp_path
):
    before, last = boards(), f"{served.rank}{ranks - 1}"
    told = {"limits": LIMITS, "on_hang": "act", "left_in_temp": ANYTHING}
    env = served.environment(caches, ranks=ranks)
    async with recorded(story, served.command(ranks), env=env, folder=tmp_path, **told) as watch:
        await watch.until_ready()
        _, ready = watch.verdicts()[-1]
        watch.keep_asking(CLIENTS, TOKENS)
        await watch.until(lambda: works(story.samples), "requests are worked on", within=120)
        assert set(watch.names()) <= {"moving", "waiting", "ready"}
        worked_at = time.monotonic()
        watch.hold(watch.member(last))
        stuck = await watch.until_verdict("stuck")
        await watch.until(lambda: watch.is_over, "the end")
    (attempt,) = attempts = watch.made.history
    healthy = chapter(story, f"{served.name}-healthy", attempts, attempt, verdict=ready, at=worked_at)
    keep(healthy, served, ranks, watch, before)
    stopped = chapter(story, f"{served.name}-stopped", attempts, attempt, fault_at=watch.fault_at)
    row = keep(stopped, served, ranks, watch, before)
    must_hang(stuck, kind="stopped", phase="serving", suspect=last)
    assert row["seconds_unproductive"] < FOUND_WITHIN
    must_be_free(before)


async def test_a_deadlock_at_graph_capture_is_found_and_cured_and_a_rank_that_dies_is_named(
    served, ranks, story, caches, tmp_path
):
    before, last = boards(), f"{served.rank}{ranks - 1}"
    told = {
        "limits": LIMITS, "on_hang": "act", "left_in_temp": ANYTHING, "fallbacks": "auto",
        "retry": Retry(stop=stop_after_attempt(2)),
    }  # fmt: skip
    env = served.environment(caches, ranks=ranks, fault="capture-lock")
    async with recorded(story, served.command(ranks), env=env, folder=tmp_path, **told) as watch:
        await watch.until(lambda: watch.of("ready"), "ready")
        watch.keep_asking(CLIENTS, TOKENS)
        await watch.until(lambda: works(story.samples), "requests are worked on", within=120)
        watch.kill(watch.member(last))
        await watch.until(lambda: watch.is_over, "the end")
    hung, died = attempts = watch.made.history
    keep(chapter(story, f"{served.name}-deadlock", attempts, hung), served, ranks, watch, before)
    killed = chapter(story, f"{served.name}-killed", attempts, died, fault_at=watch.fault_at)
    keep(killed, served, ranks, watch, before)
    must_hang(hung.verdict, kind="idle", phase="graph-capture", suspect=served.rank)
    assert hung.release.answer == "released"
    assert [change.alters for change in died.changes] == ["speed"]
    assert died.was_ready
    assert died.verdict.verdict in {"exited", "broken"}
    assert last in f"{died.verdict}{died.diagnosis}"
    must_be_free(before)


@asynccontextmanager
async def recorded(story, command, **told):
    """Watch a server, and keep all that was sampled and told of it."""
    with ranked.recorded(story):
        async with watched(command, **told) as watch:
            try:
                yield watch
            finally:
                keep_all(story, watch)


def keep(story, served, ranks, watch, before):
    """Keep the row and the samples of one part of the story; return the row."""
    ranked.write_samples(story)
    return ranked.keep(
        story,
        engine=served.name,
        version=watch.launch.version,
        ranks=ranks,
        rank=ranks - 1,
        boards=len(before),
        changes=[change.name for change in story.attempt.changes],
        exit_code=story.attempt.exit_code,
        memory_mib={"before": [used for used, *_ in before], "after": [used for used, *_ in boards()]},
        in_temp=list(watch.left_in_temp),
    )


def must_be_free(before):
    """No board holds more than before."""
    after = boards()
    assert all(now[0] - was[0] < KEPT_MIB for now, was in zip(after, before, strict=True)), (before, after)
