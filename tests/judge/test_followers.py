"""Nodes that serve no requests of their own: ready, where that can be seen; never ended, where nobody could see it."""

from dataclasses import replace

import pytest
from making import BUSY, NEVER, SERVER, Member, Story, first, frames, limits, rules, seen, watch

from hangguard.engines.sglang import SGLANG
from hangguard.engines.vllm import VLLM
from hangguard.facts import GpuHolder, IdlePlace, Listener, Marker, Port, Reply, Unseen

READY_WITHIN, LONG = 400, 600
SPINS = {"cpu": 1.0, "states": "RS"}
"""The rates of schedulers of SGLang that wait for work."""
BUDGETS = limits(waiting=300.0, unclear=100.0)
IDLE = ("recv zmq.py", "recv_requests scheduler.py", "event_loop scheduler.py")
LOCKED = ("acquire lock.py", "capture_model runner.py", "load_model runner.py")
PLACES = (IdlePlace(loop="event_loop", inside=r"recv|recv_requests|poll\d"),)

# As SGLang 0.5.16 prints on every rank; max_total_num_tokens= and what follows come from the first node only.
OF_SGLANG = (
    "[2026-01-01 00:00:00 TP8] Init torch distributed ends. elapsed=5.96 s, mem usage=0.81 GB",
    "[2026-01-01 00:00:00 TP8] Load weight begin. avail mem=138.38 GB",
    "[2026-01-01 00:00:00 TP8] Load weight end. elapsed=1.74 s, type=Qwen2ForCausalLM, avail mem=134.43 GB",
    "[2026-01-01 00:00:00 TP8] KV Cache is allocated. #tokens: 8978, K size: 0.13 GB, V size: 0.13 GB",
    "[2026-01-01 00:00:00 TP8] Memory pool end. avail mem=134.01 GB",
)
CAPTURES = "[2026-01-01 00:00:00 TP8] Capture target decode CUDA graph begin. backend=full, num_tokens_per_bs=1"
CAPTURED = "[2026-01-01 00:00:00 TP8] Capture target decode CUDA graph end. elapsed=2.1 s"
# As vLLM's headless multiproc executor does: the engine core, and all that it prints, is on the first node.
OF_VLLM = (
    "(Worker_TP8 pid=9) INFO 01-01 00:00:00 [parallel_state.py:1] rank 8 in world size 16 is assigned as DP rank 0",
    "(Worker_TP8 pid=9) INFO 01-01 00:00:00 [gpu_model_runner.py:1] Starting to load model M...",
    "(Worker_TP8 pid=9) INFO 01-01 00:00:00 [gpu_model_runner.py:1] Model loading took 12.1 GiB memory and 9.1 seconds",
    "(Worker_TP8 pid=9) INFO 01-01 00:00:00 [gpu_worker.py:1] Available KV cache memory: 100.0 GiB",
)


def follower(*, engine=None, **changes):
    """The rules of one, with the real markers of an engine, or those of the tests."""
    known = {"markers": engine.markers, "idle_spins": engine.idle_spins} if engine else {}
    return rules(
        **{"nodes": 2, "node_rank": 1, "answers": False, "idle_places": PLACES, "limits": BUDGETS, **known, **changes}
    )


def started(*lines, at=IDLE, seconds=30):
    """A start whose log ends with these lines."""
    told = Story()
    for line in lines:
        told.goes(5, **BUSY, lines=(line,))
    return told.goes(seconds, **BUSY, every_second=("step {n}",)).moves_to(102, *at)


def ended(memories):
    """Whether a verdict fell after which the node is ended."""
    return seen(memories) & {"stuck", "expired", "broken", "exited"}


# ------------------------------------------------------------------------------- nobody can see it


@pytest.mark.parametrize(
    ("engine", "lines", "rates", "reason"),
    [
        (VLLM, OF_VLLM, {}, NEVER),
        (SGLANG, OF_SGLANG, SPINS, None),
        (SGLANG, (*OF_SGLANG, CAPTURES, CAPTURED), SPINS, NEVER),
        (SGLANG, (*OF_SGLANG, CAPTURES, CAPTURED), {}, NEVER),
    ],
    ids=["vLLM", "SGLang without graphs, of a Python that nobody reads", "SGLang", "SGLang that sleeps on idle"],
)
def test_a_healthy_node_whose_stacks_cannot_be_read_is_never_ended(engine, lines, rates, reason):
    told = started(*lines)
    if reason is None:
        told.members = tuple(replace(m, at=(), channel=Unseen("no rights")) for m in told.members)
    told.goes(LONG, **rates, **({"stacks": reason} if reason else {}))
    if reason is None:
        told.samples = [
            replace(s, stacks=tuple(replace(k, threads=Unseen("no layout of Python 3.99")) for k in s.stacks))
            for s in told.samples
        ]
    memories = watch(told.samples, follower(engine=engine, deadline=told.samples[0].t + READY_WITHIN))
    assert not ended(memories)
    verdict = memories[-1].verdict
    assert (verdict.verdict, verdict.confidence) == ("ready", "low")
    assert "as far as can be told" in verdict.why
    assert memories[-1].ready_at < told.samples[0].t + 400


@pytest.mark.parametrize("rates", [{}, SPINS], ids=["idle", "spinning"])
def test_one_that_hangs_before_its_weights_are_there_ends_with_ready_within(rates):
    told = started(*OF_SGLANG[:2], at=LOCKED).goes(LONG, **rates, stacks=NEVER)
    by = follower(engine=SGLANG, deadline=told.samples[0].t + READY_WITHIN)
    memories = watch(told.samples, by)
    expired = first(memories, "expired")
    assert expired.verdict.kind == "ready_within"
    assert expired.now == by.deadline


def test_in_the_middle_of_a_capture_nothing_is_guessed_before_ready_within_is_over():
    told = started(*OF_SGLANG, CAPTURES).goes(LONG, **SPINS, stacks=NEVER)
    by = follower(engine=SGLANG, deadline=told.samples[0].t + READY_WITHIN)
    memories = watch(told.samples, by)
    assert not ended(memories)
    assert memories[-1].ready_at == by.deadline


def test_a_log_that_tells_no_phase_is_no_proof_of_a_hang():
    told = started().goes(LONG, stacks=NEVER)
    by = follower(engine=VLLM, deadline=told.samples[0].t + READY_WITHIN)
    memories = watch(told.samples, by)
    assert not ended(memories)
    assert memories[-1].ready_at == by.deadline
    assert memories[READY_WITHIN // 2].verdict.kind == "peers"


def test_at_work_for_the_node_that_leads_it_is_not_ended_either():
    told = started(*OF_VLLM)
    told.holders, told.gpu_memory = (GpuHolder(pid=102, used_bytes=70 << 30),), 70 << 30
    told.goes(LONG, **BUSY, gpu_percent=95.0, watts=600.0)
    by = follower(engine=VLLM, deadline=told.samples[0].t + READY_WITHIN)
    memories = watch(told.samples, by)
    assert not ended(memories)
    assert memories[-1].ready_at == by.deadline


def test_one_whose_workers_die_has_ended_however_little_is_seen():
    told = started(*OF_VLLM).goes(300, stacks=NEVER)
    memories = watch(told.loses(102, -9).goes(120, stacks=NEVER).samples, follower(engine=VLLM))
    assert ended(memories)


def test_one_that_is_stopped_is_stuck_however_little_is_seen():
    told = started(*OF_VLLM).goes(300, stacks=NEVER)
    memories = watch(told.stops(102).goes(60, stacks=NEVER).samples, follower(engine=VLLM))
    assert first(memories, "stuck").verdict.kind == "stopped"


def test_a_container_of_such_a_node_is_no_less_healthy():
    told = Story(members=(Member(100, "docker run vllm", python=False, works=False),)).goes(LONG)
    by = follower(engine=VLLM, delegates_to="docker", deadline=told.samples[0].t + READY_WITHIN)
    assert not ended(watch(told.samples, by))


# ------------------------------------------------------------------------------------- where it is seen


def test_a_deadlock_whose_stacks_are_seen_still_runs_into_its_budget():
    told = started("world_size=2", "Starting to load model", "Capturing graphs", at=LOCKED).goes(LONG)
    expired = first(watch(told.samples, follower()), "expired")
    assert expired.verdict.kind == "waiting"


def test_a_front_end_that_cannot_be_read_hides_no_deadlock_of_a_worker():
    told = started("world_size=2", "Starting to load model", "Capturing graphs", at=LOCKED).goes(LONG)
    told.samples = [
        replace(s, stacks=tuple(replace(k, threads=NEVER) if k.pid == 100 else k for k in s.stacks))
        for s in told.samples
    ]
    memories = watch(told.samples, follower())
    assert memories[-1].stacks_unseen
    assert first(memories, "expired").verdict.kind == "waiting"


def test_workers_that_go_round_their_idle_loop_are_ready_though_no_two_looks_are_equal():
    told = started(*OF_SGLANG)
    for n in range(100):
        told.moves_to(102, f"poll{n % 7} scheduler.py", "event_loop scheduler.py").goes(1, **SPINS)
    memories = watch(told.samples, follower(engine=SGLANG))
    assert memories[-1].verdict.confidence == "high"
    assert memories[-1].ready_at < told.samples[0].t + 120


def test_one_look_at_idle_workers_is_not_enough_and_one_worker_elsewhere_is_too_much():
    told = started(*OF_SGLANG)
    told.gains(Member(103, "ENGINE::Worker_1", 100, 40, frames(*LOCKED)))
    assert watch(told.goes(300, **SPINS).samples, follower(engine=SGLANG))[-1].ready_at is None
    told = started(*OF_SGLANG).goes(4)
    assert watch(told.samples, follower(engine=SGLANG))[-1].ready_at is None


def answering(*, ours, state="good"):
    port = Port(port=30000, listener=Listener(pid=100, title="server", ours=ours))
    return {"port": port, "health": Reply(state=state, since=1.0, status=200)}


@pytest.mark.parametrize(
    ("ours", "state", "ready"), [(True, "good", True), (False, "good", False), (True, "bad", False)]
)
def test_the_health_route_that_sglang_opens_last_there_proves_its_start(ours, state, ready):
    told = started(*OF_SGLANG, at=LOCKED).goes(20, **SPINS, stacks=NEVER)
    samples = [replace(s, **answering(ours=ours, state=state)) for s in told.samples[-20:]]
    memories = watch([*told.samples[:-20], *samples], follower(engine=SGLANG))
    assert (memories[-1].ready_at is not None) == ready
    if ready:
        assert memories[-1].verdict.confidence == "high"


def test_a_node_that_answers_itself_is_never_guessed_ready():
    told = started(*OF_VLLM, at=LOCKED).goes(LONG, stacks=NEVER)
    by = rules(markers=VLLM.markers, deadline=told.samples[0].t + READY_WITHIN)
    memories = watch(told.samples, by)
    assert memories[-1].ready_at is None
    assert "stuck" in seen(memories)


def test_the_real_markers_tell_where_the_log_of_a_follower_ends():
    assert {m.phase for m in SGLANG.markers if isinstance(m, Marker)} >= {"graph-capture", "kv-cache"}
    memories = watch(started(*OF_SGLANG, CAPTURES, CAPTURED, seconds=1).samples, follower(engine=SGLANG))
    assert (memories[-1].place.phase, memories[-1].place.said) == ("graph-capture", "end")
    memories = watch(started(*OF_VLLM, seconds=1).samples, follower(engine=VLLM))
    assert (memories[-1].place.phase, memories[-1].place.said) == ("kv-cache", "begin")
    assert SERVER[2].pid == 102
