"""A server that was paused or put to sleep on purpose, and one that only looks like it."""

from dataclasses import replace

import pytest
from asked import IDLE, LOCKED, PREFILL, Asked, served
from making import NEVER

from hangguard.engines.common import telling_of
from hangguard.engines.sglang import SGLANG
from hangguard.facts import Unseen

OFF = Unseen("the route of the metrics answers 404")
PAUSES = '[2026-01-01 00:00:00] INFO:     127.0.0.1:60608 - "POST /pause_generation HTTP/1.1" 200 OK'
GOES_ON = '[2026-01-01 00:00:00] INFO:     127.0.0.1:60608 - "POST /continue_generation HTTP/1.1" 200 OK'
RELEASES = 'INFO:     127.0.0.1:60608 - "GET /sglang/release_memory_occupation?x=1 HTTP/1.1" 200 OK'
RESUMES = 'INFO:      - "POST /resume_memory_occupation HTTP/1.1" 200 OK'


def sglang(**more) -> Asked:
    """One that has idled for a while, with a trainer's open connection."""
    by = served(quiet_lines=SGLANG.quiet_lines, noise=SGLANG.noise, idle_spins=True, **more)
    return Asked(by=by).goes(5, clients=1, counters=OFF, cpu=1.0)


def stands(server, seconds, **more):
    """Let it stand for so long as a paused one does: every scheduler spins in its idle loop, and answers nobody."""
    return server.goes(
        seconds, **{"clients": 1, "counters": OFF, "canary": "waiting", "at": IDLE, "cpu": 1.0, "states": "RS", **more}
    )


@pytest.mark.parametrize(("begins", "ends"), [(PAUSES, GOES_ON), (RELEASES, RESUMES)])
@pytest.mark.parametrize("clients", [0, 1])
def test_a_sglang_that_was_paused_is_quiet_and_gets_no_test_request(begins, ends, clients):
    server = sglang()
    stands(server, 1, lines=(begins,), clients=clients)
    stands(server, 900, clients=clients)
    assert server.seen() == {"ready", "waiting"}
    assert (server.verdict.kind, server.canaries) == ("quiet", 0)
    stands(server, 1, lines=(ends,), clients=clients)
    stands(server, 300, clients=clients)
    assert server.verdict.verdict == "ready"
    assert server.canaries == 0  # weights may be there, and the cache not yet


def test_a_hang_after_a_pause_is_still_found():
    server = sglang()
    stands(server, 60, lines=(PAUSES,))
    stands(server, 1, lines=(GOES_ON,))
    t = server.memory.now
    stands(server, 700, at=LOCKED, cpu=0.0, states="S")
    assert server.first("stuck").now - t <= 660
    server = sglang()
    stands(server, 60, lines=(PAUSES,))
    stands(server, 1, lines=(GOES_ON,))
    t = server.memory.now
    stands(server, 60, at=LOCKED, counters=None, running=2, cpu=0.0, states="S")
    assert server.first("stuck").now - t <= 40


def test_two_reasons_to_rest_end_one_by_one():
    server = sglang()
    stands(server, 1, lines=(PAUSES, RELEASES))
    stands(server, 60, lines=(RESUMES,))
    assert server.verdict.kind == "quiet"
    stands(server, 1, lines=(GOES_ON,))
    assert server.verdict.verdict == "ready"


def test_after_tokens_a_test_request_may_go_out_again():
    server = sglang()
    stands(server, 20, lines=(PAUSES,))
    stands(server, 2, lines=(GOES_ON,))
    server.goes(20, running=1, tokens=30, at=PREFILL, watts=300.0, percent=95)
    stands(server, 120)
    assert server.canaries > 0


def test_tokens_prove_that_it_is_awake_though_the_line_of_it_was_missed():
    server = sglang()
    server.goes(20, lines=(PAUSES,), running=0, clients=1)
    assert server.verdict.kind == "quiet"
    server.goes(20, running=2, tokens=30, at=PREFILL)
    assert server.verdict.verdict == "ready"
    server.goes(60, running=2, at=LOCKED)
    assert server.verdict.verdict == "stuck"


@pytest.mark.parametrize(
    "line",
    [
        PAUSES.replace("200 OK", "500 Internal Server Error"),
        PAUSES.replace("200 OK", "401 Unauthorized"),
        PAUSES.replace("/pause_generation", "/pause_generation_of_mine"),
        PAUSES.replace("/pause_generation", "/v1/completions?x=/pause_generation"),
        f"[2026-01-01 00:00:00] Receive: obj=GenerateReqInput(text='{PAUSES}')",
        "pause_generation",
    ],
)
def test_a_line_that_only_speaks_of_a_pause_pauses_nothing(line):
    server = sglang()
    stands(server, 5, lines=(line,))
    assert server.verdict.verdict == "ready"
    assert not server.memory.serving.asleep


def test_these_lines_come_through_a_flood():
    assert {q.begins for q in SGLANG.quiet_lines} | {q.ends for q in SGLANG.quiet_lines} <= set(telling_of(SGLANG))


# ------------------------------------------------------------------- no line tells it, no request is counted


def test_an_unanswered_test_request_beside_idle_workers_is_unclear():
    server = stands(Asked(), 500)
    assert server.seen() == {"ready", "unclear"}
    assert "it was paused" in server.verdict.why
    stands(server, 400)
    assert server.verdict.verdict == "expired"  # a client is connected, and waits perhaps


def test_where_nobody_is_connected_it_stays_unclear():
    server = stands(Asked(), 1400, clients=0)
    assert server.seen() == {"ready", "unclear"}
    assert (server.verdict.kind, server.verdict.confidence) == ("unasked", "low")


@pytest.mark.parametrize("running", [0, 1])
def test_a_test_request_that_the_server_counts_is_nobody_elses(running):
    server = Asked()
    for _ in range(200):
        open_now = server.canary.state == "waiting"
        stands(server, 1, counters=None, running=running if open_now else 0)
    assert server.seen() == {"ready", "unclear"}


def test_with_a_request_of_somebody_else_it_is_stuck():
    server = Asked()
    stands(server, 60, counters=None)
    stands(server, 60, counters=None, waiting=2, running=0)
    assert server.first("stuck").verdict.kind == "serving"
    server = Asked()
    stands(server, 60, counters=None, running=1)  # counted before ours went out
    assert server.first("stuck").verdict.kind == "serving"


@pytest.mark.parametrize(
    "how", [{"at": LOCKED, "cpu": 0.0, "states": "S"}, {"stacks": NEVER, "cpu": 0.0, "states": "S"}]
)
def test_where_a_worker_stands_elsewhere_or_cannot_be_seen_it_is_stuck(how):
    assert stands(Asked(), 200, **how).first("stuck").verdict.kind == "serving"


def test_one_worker_of_two_that_was_not_seen_is_enough_for_a_hang():
    server = Asked()
    server.story.gains(replace(server.story.members[1], pid=103, title="ENGINE::Worker_1", at=(), python=False))
    assert stands(server, 200, cpu=0.0, states="S").first("stuck") is not None
