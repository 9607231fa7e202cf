"""Every shape that is known of hangs and of what only looks like one, each with its verdict.

The rows of three tables: one window of each state as a watcher outside the process sees it (measured on one H200),
what a stack waits for, and the states of a server that has answered. Healthy rows are never called stuck or broken at
any second. Real engines by their own tables: titles, log lines, stacks.
"""

from dataclasses import dataclass, replace

import pytest
from making import BUSY, MIB, Member, first, seen, watch
from shaped import (
    BATON,
    DEVICE,
    FILELOCK,
    FIRST,
    GATHER,
    GROUP,
    HUB,
    IDLE,
    LOCK,
    SPINS_IDLE,
    STEP,
    STORE,
    STREAM,
    Served,
    Start,
    boards,
    by,
)

from hangguard.facts import GpuFault, GpuHolder, LockFile, Unseen

ALARMS = {"stuck", "broken"}
CAPTURE = "capture_model vllm/v1/worker/gpu_model_runner.py"
LOAD = "load_model vllm/v1/worker/gpu_model_runner.py"
WARM = "compile_or_warm_up_model vllm/v1/worker/gpu_worker.py"
INIT = "init_worker_distributed_environment vllm/v1/worker/gpu_worker.py"
NVCC = Member(300, "/usr/local/cuda/bin/nvcc x.cu", FIRST, 1, python=False, cpu=0.9, name="nvcc")


@dataclass(frozen=True)
class Says:
    """A verdict that must fall."""

    verdict: str
    kind: str
    phase: str
    confidence: str = "high"
    within: float = 15.0
    """Seconds after the last movement."""
    suspect: int | None = FIRST
    """The pid of the first suspect."""


def check(memories, began, says) -> None:
    found = first(memories, says.verdict)
    assert found is not None, seen(memories)
    verdict = found.verdict
    assert (verdict.verdict, verdict.kind, verdict.phase, verdict.confidence) == (
        says.verdict, says.kind, says.phase, says.confidence,
    )  # fmt: skip
    assert found.now - began <= says.within
    assert not ALARMS & seen([m for m in memories if m.now <= began])
    if says.suspect is not None and hasattr(verdict, "suspects"):
        assert verdict.suspects[0].pid == says.suspect
    assert memories[-1].verdict.verdict in {says.verdict, "expired"}, "a verdict that was right stays"


# --------------------------------------------------------------- one window of each state: those that hang

SHAPES = [
    pytest.param(
        {"phase": "graph-capture"}, (*LOCK, CAPTURE), "futex_do_wait", {"cpu": 0.0},
        Says("stuck", "idle", "graph-capture"), id="idle deadlock: two locks, inside graph capture",
    ),
    pytest.param(
        {"phase": "dist-init"}, (*STORE, INIT), "hrtimer_nanosleep", {"cpu": 0.012},
        Says("stuck", "idle", "dist-init"), id="idle deadlock: rank 1 never joins the store",
    ),
    pytest.param(
        {"phase": "dist-init"}, (*GROUP, INIT), "", {"cpu": 0.98, "states": "R"},
        Says("stuck", "hot", "dist-init", within=18.0), id="hot wait: NCCL communicator init",
    ),
    pytest.param(
        {"phase": "graph-capture"}, (*STREAM, CAPTURE), "",
        {"cpu": 1.0, "states": "R", "percent": 100.0, "watts": 124.0},
        Says("stuck", "busy", "graph-capture", within=18.0), id="a spinning kernel, host in a stream's synchronize",
    ),
    pytest.param(
        {"phase": "graph-capture"}, (*DEVICE, CAPTURE), "",
        {"cpu": 1.0, "states": "R", "percent": 100.0, "watts": 140.0},
        Says("stuck", "busy", "graph-capture", within=18.0), id="a spinning kernel on all multiprocessors",
    ),
    pytest.param(
        {"phase": "graph-capture"}, ("query torch/cuda/streams.py", CAPTURE), "hrtimer_nanosleep",
        {"cpu": 0.02, "percent": 100.0, "watts": 124.0},
        Says("stuck", "busy", "graph-capture", within=18.0), id="a spinning kernel, the host polls an event",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("made", "at", "channel", "rates", "says"), SHAPES)
def test_a_shape_that_hangs(made, at, channel, rates, says):
    told = Start(**made).all_at(*at, channel=channel).goes(60, **rates)
    check(watch(told.samples, by()), told.began, says)


@pytest.mark.parametrize(("made", "at", "channel", "rates", "says"), SHAPES)
def test_the_same_shape_for_less_than_its_patience_and_then_movement_is_healthy(made, at, channel, rates, says):
    told = Start(**made)
    for n in range(8):
        told.all_at(*at, channel=channel).goes(7, **rates).all_at(f"step_{n} model.py", LOAD, channel="").goes(
            3, **BUSY
        )
    assert seen(watch(told.samples, by())) == {"moving"}


# ------------------------------------------------------------ one window of each state: those that are healthy


def test_ready_and_idle_is_the_picture_of_an_idle_deadlock_and_never_stuck():
    server = Served().goes(600, at=IDLE["vllm"], channel="futex_do_wait")
    assert server.seen() == {"ready"}
    start = Start(phase="graph-capture").all_at(*IDLE["vllm"], channel="futex_do_wait").goes(60)
    assert "stuck" in seen(watch(start.samples, by())), "the same picture before it has answered is the verdict"


def test_serving_in_bursts_is_ready():
    server = Served()
    for percent, watts in ((23.0, 168.0), (0.0, 146.0), (10.0, 173.0), (4.0, 150.0)) * 40:
        server.goes(1, running=1, tokens=30, cpu=0.05, percent=percent, watts=watts, at=STEP["vllm"])
        server.goes(2, cpu=0.03, at=IDLE["vllm"])
    assert server.seen() == {"ready"}


def test_a_slow_load_from_a_disk_is_moving():
    told = Start().all_at("read safetensors/torch.py", LOAD, channel="folio_wait_bit_common")
    told.goes(600, cpu=0.009, reads=51 * MIB, states="DS", gpus=boards((0.0, 80.0)))
    memories = watch(told.samples, by())
    assert seen(memories) == {"moving"}
    assert memories[-1].verdict.why == "loading: 53 MB/s read"


def test_a_compile_in_child_processes_is_moving():
    told = Start(phase="jit-compile").all_at("communicate subprocess.py", *BATON[1:], WARM, channel="do_wait")
    for n in range(4):
        told.gains(Member(300 + n, "/usr/bin/cicc x", FIRST, 1, python=False, cpu=0.5 + n, name="cicc"))
    memories = watch(told.goes(400, watts=121.0).samples, by())
    assert seen(memories) == {"moving"}
    assert memories[-1].verdict.why == "compiling: 4 compiler processes"


def test_a_board_without_a_context_teaches_no_floor():
    told = Start(phase="import")
    (board,) = boards((0.0, 80.0))
    told.goes(30, **BUSY, gpus=(replace(board, holders=()),))
    (board,) = watch(told.samples, by())[-1].boards.boards
    assert board.floor == 122.0, "80 W is a board without any context; 122 W was learned with one"


# ------------------------------------------------------------------------------------------ what follows


@pytest.mark.parametrize(
    ("floor", "hung", "working"),
    [(18.0, 20.0, 58.0), (20.0, 22.0, 45.0), (112.0, 135.0, 400.0), (105.0, 120.0, 300.0)],
    ids=["A2: 25 W", "GB10: 16 to 27 W, 45 at work", "RTX PRO 6000: 135 W, 250 to 550 at work", "a board at 120 W"],
)
def test_watts_are_held_against_the_boards_own_levels(floor, hung, working):
    told = Start(phase="graph-capture", floor=floor)
    for n in range(12):
        told.goes(1, **BUSY, percent=98.0, watts=working * (1.0 if n % 2 else 0.8))
    began = told.t
    told.all_at(*STREAM, CAPTURE, channel="").goes(40, cpu=1.0, percent=100.0, watts=hung)
    memories = watch(told.samples, by())
    assert seen([m for m in memories if m.now <= began]) == {"moving"}
    assert first(memories, "stuck").verdict.kind == "busy"


def test_gpu_memory_that_is_held_or_was_taken_at_once_says_nothing():
    slow = Start().goes(1, **BUSY, gpu_memory=35 << 30).goes(600, cpu=0.01, reads=100 * MIB)
    assert seen(watch(slow.samples, by())) == {"moving"}
    hung = Start().goes(1, **BUSY, gpu_memory=70 << 30).all_at(*LOCK, LOAD, channel="futex_do_wait").goes(30)
    assert "stuck" in seen(watch(hung.samples, by()))


def test_idle_workers_that_burn_a_core_in_sched_yield_are_ready():
    server = Served(ranks=2, count=2).goes(400, at=SPINS_IDLE, channel="", cpu=1.0, states="R")
    assert server.seen() == {"ready"}


def test_a_scheduler_that_spins_without_work_is_ready():
    assert Served(engine="sglang").goes(400, at=IDLE["sglang"], channel="", cpu=0.99, states="R").seen() == {"ready"}


@pytest.mark.parametrize(
    ("cpu", "threads"), [(0.0065, 40), (0.012, 71), (0.0173, 100)], ids=["vllm", "sglang", "vllm 100"]
)
def test_the_floor_of_polling_threads_does_not_hide_a_hang(cpu, threads):
    told = Start(phase="graph-capture").all_at(*LOCK, CAPTURE, channel="futex_do_wait")
    told.members = tuple(replace(m, threads=threads) if m.pid == FIRST else m for m in told.members)
    assert "stuck" in seen(watch(told.goes(30, cpu=cpu, faults=2.0).samples, by()))


@pytest.mark.parametrize("states", ["DS", "RS"], ids=["a starved disk", "a starved core"])
def test_threads_in_d_or_r_part_slow_from_stuck(states):
    slow = (
        Start()
        .all_at("read x.py", LOAD, channel="folio_wait_bit_common" if "D" in states else "")
        .goes(120, states=states)
    )
    assert not ALARMS & seen(watch(slow.samples, by()))
    hung = Start().all_at(*LOCK, LOAD, channel="futex_do_wait")
    for n in range(30):
        hung.goes(1, states="RS" if n % 2 == 0 else "S")
    assert "stuck" in seen(watch(hung.samples, by())), "half of the samples of hung trees had a thread in R"


def test_a_utilisation_that_a_killed_predecessor_left_at_100_is_not_ours():
    latched = boards((100.0, 120.0))
    told = Start(phase="import")
    told.samples.clear()
    told.goes(22, **BUSY, gpus=latched).goes(100, **BUSY, gpus=latched)
    memories = watch(told.samples, by())
    assert seen(memories) == {"moving"}


# ---------------------------------------------------------------------------- what a stack waits for

SITES = [
    pytest.param("dist-init", 1, (*STORE, INIT), "hrtimer_nanosleep", {}, Says("stuck", "idle", "dist-init"),
                 id="the store, one machine"),
    pytest.param("dist-init", 2, (*STORE, INIT), "hrtimer_nanosleep", {}, Says("waiting", "peers", "dist-init"),
                 id="the store, several machines"),
    pytest.param("dist-init", 1, (*GROUP, INIT), "", {"cpu": 1.0}, Says("stuck", "hot", "dist-init", within=18.0),
                 id="communicator init, one machine"),
    pytest.param("dist-init", 2, (*GROUP, INIT), "", {"cpu": 1.0}, Says("waiting", "peers", "dist-init", within=18.0),
                 id="communicator init, several machines"),
    pytest.param("dist-init", 1, ("ncclCommInitRank pynccl_wrapper.py", INIT), "", {"cpu": 1.0},
                 Says("stuck", "hot", "dist-init", within=18.0), id="pynccl's communicator init"),
    pytest.param("weights-load", 1, (*FILELOCK, LOAD), "hrtimer_nanosleep", {}, Says("waiting", "lock", "weights-load"),
                 id="a lock file"),
    pytest.param("jit-compile", 1, (*BATON, WARM), "hrtimer_nanosleep", {}, Says("waiting", "lock", "jit-compile"),
                 id="a build's lock"),
    pytest.param("graph-capture", 1, (*STREAM, CAPTURE), "", {"cpu": 1.0, "percent": 100.0, "watts": 124.0},
                 Says("stuck", "busy", "graph-capture", within=18.0), id="a kernel that never ends"),
    pytest.param("graph-capture", 1, ("cudaDeviceSynchronize cudart.py", CAPTURE), "",
                 {"cpu": 1.0, "percent": 100.0, "watts": 124.0}, Says("stuck", "busy", "graph-capture", within=18.0),
                 id="the runtime's own synchronize"),
    pytest.param("weights-load", 1, (*LOCK, LOAD), "futex_do_wait", {}, Says("stuck", "idle", "weights-load"),
                 id="a lock in start-up code"),
    pytest.param("weights-load", 1, ("wait threading.py", LOAD), "futex_do_wait", {},
                 Says("stuck", "idle", "weights-load"),
                 id="an event that is never set"),
    pytest.param("jit-compile", 1, ("get queue.py", WARM), "futex_do_wait", {}, Says("stuck", "idle", "jit-compile"),
                 id="a message that never comes"),
    pytest.param("weights-load", 1, (*HUB, LOAD), "wait_woken", {"download": 0.0, "sockets": 0.0},
                 Says("waiting", "download", "weights-load"), id="a download that stands"),
    pytest.param("weights-load", 1, (*LOCK, LOAD), "uvm_va_space_mm_shutdown", {"states": "D"},
                 Says("broken", "wedged", "weights-load", within=50.0), id="in the driver, uninterruptibly"),
]  # fmt: skip


@pytest.mark.parametrize(("phase", "nodes", "at", "channel", "rates", "says"), SITES)
def test_a_wait_site(phase, nodes, at, channel, rates, says):
    told = Start(phase=phase).all_at(*at, channel=channel).goes(60, **rates)
    check(watch(told.samples, by(nodes=nodes)), told.began, says)


def test_a_download_that_grows_is_moving():
    told = Start().all_at(*HUB, LOAD, channel="wait_woken").goes(600, download=10.0 * MIB)
    assert seen(watch(told.samples, by())) == {"moving"}


def test_a_wait_for_a_compiler_is_moving_while_that_burns_cpu_and_no_longer_when_it_stands():
    told = (
        Start(phase="jit-compile").all_at("communicate subprocess.py", *BATON[1:], WARM, channel="do_wait").gains(NVCC)
    )
    assert seen(watch(told.goes(400).samples, by())) == {"moving"}
    told.members = tuple(replace(m, cpu=0.0) if m.pid == NVCC.pid else m for m in told.members)
    assert first(watch(told.goes(60).samples, by()), "stuck").verdict.phase == "jit-compile"


def test_a_warm_up_request_seen_from_its_front_end_leaves_the_verdict_to_the_scheduler():
    told = Start(engine="sglang", phase="warm-up")
    told.moves_to(100, "_wait_and_warmup sglang/srt/entrypoints/http_server.py", channel="futex_do_wait")
    at = (*LOCK, *STEP["sglang"])
    stuck = first(watch(told.all_at(*at, channel="futex_do_wait").goes(30).samples, by("sglang")), "stuck")
    assert (stuck.verdict.kind, stuck.verdict.phase) == ("idle", "warm-up")
    assert stuck.verdict.suspects[0].title == "sglang::scheduler"


def test_a_warm_up_request_while_the_scheduler_compiles_for_it_is_moving():
    told = Start(engine="sglang", phase="warm-up")
    told.moves_to(100, "_wait_and_warmup sglang/srt/entrypoints/http_server.py", channel="futex_do_wait").gains(NVCC)
    told.all_at("communicate subprocess.py", "build flashinfer/jit/core.py", *STEP["sglang"], channel="do_wait")
    assert seen(watch(told.goes(300).samples, by("sglang"))) == {"moving"}


@pytest.mark.parametrize(
    ("lock", "kind"),
    [
        (LockFile(path="/c/m.lock", kind="flock", waiters=(FIRST,), owner=4711, owner_title="vllm serve N"), "lock"),
        (LockFile(path="/c/lock", kind="presence", waiters=(FIRST,), age_seconds=4000.0), "stale-lock"),
    ],
    ids=["its owner lives", "nobody holds it"],
)
def test_a_lock_is_told_by_its_owner(lock, kind):
    told = Start(phase="jit-compile", locks=(lock,)).all_at(*BATON, WARM, channel="hrtimer_nanosleep").goes(40)
    waiting = first(watch(told.samples, by()), "waiting")
    assert (waiting.verdict.kind, waiting.verdict.phase) == (kind, "jit-compile")
    assert lock.path in waiting.verdict.why


# ------------------------------------------------------------------------------- a server that has answered


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("rates", "within"),
    [
        ({"at": LOCK, "channel": "futex_do_wait"}, 30.0),
        ({"at": STREAM, "channel": "", "cpu": 1.0, "percent": 100.0, "watts": 124.0}, 30.0),
        ({"at": GATHER, "channel": "", "cpu": 1.0}, 30.0),
    ],
    ids=["a lock", "a kernel that never ends", "a collective"],
)
def test_requests_in_flight_without_tokens_are_a_stall_behind_a_health_route_that_says_200(engine, rates, within):
    server = Served(engine=engine, ranks=2, count=2).flows()
    began, at = server.memory.now, (*rates["at"], *STEP[engine])
    server.goes(60, running=8, **{**rates, "at": at})
    check(server.memories, began, Says("stuck", "serving", "serving", within=within))


def test_a_stall_without_stacks_takes_the_long_grace_and_is_less_sure():
    server = Served().flows()
    began = server.memory.now
    server.goes(150, running=8, at=(*LOCK, *STEP["vllm"]), stacks=Unseen("operation not permitted"))
    check(server.memories, began, Says("stuck", "serving", "serving", "medium", within=130.0))


def test_a_health_route_that_says_503_because_it_is_busy_is_no_stall():
    server = Served(engine="sglang").flows()
    for n in range(200):
        server.goes(1, running=1, at=(f"layer_{n % 30} model.py", *STEP["sglang"]), percent=99.0,
                    watts=400.0 + n % 2 * 100, cpu=1.0, canary="bad", status=503)  # fmt: skip
    assert server.seen() == {"ready"}


def test_a_long_prefill_freezes_the_tokens_and_draws_power():
    server = Served().flows().goes(240, running=1, at=(*STREAM, *STEP["vllm"]), percent=99.0, watts=420.0, cpu=1.0)
    assert server.seen() == {"ready"}


def test_a_canary_that_is_never_answered_is_a_stall_where_the_engine_does_not_count():
    server = Served(engine="sglang").flows()
    began = server.memory.now
    off = Unseen("the route of the metrics answers 404")
    server.goes(120, counters=off, clients=3, canary="waiting", at=(*LOCK, *STEP["sglang"]))
    check(server.memories, began, Says("stuck", "serving", "serving", within=60.0))


def test_a_worker_that_is_gone_while_its_front_end_answers_is_broken():
    server = Served(ranks=2, count=2).flows(10)
    began = server.memory.now
    server.story.loses(103, -9)
    server.goes(40, running=3, at=(*GATHER, *STEP["vllm"]))
    check(server.memories, began, Says("broken", "survivors", "serving", suspect=103))


SHM = "WARNING [shm_broadcast.py:1] No available shared memory broadcast block found in 60 seconds."


def test_the_line_about_shared_memory_is_printed_in_healthy_loads_and_hides_no_hang():
    slow = Start(phase="jit-compile").goes(1, lines=(SHM,)).goes(240, cpu=1.0, faults=200.0)
    assert seen(watch(slow.samples, by())) == {"moving"}
    hung = Start(phase="jit-compile").all_at(*LOCK, WARM, channel="futex_do_wait").goes(5).goes(25, lines=(SHM,))
    assert first(watch(hung.samples, by()), "stuck").now - hung.began <= 15.0


def test_overload_is_no_hang():
    server = Served().goes(400, running=16, waiting=900, tokens=2, at=STEP["vllm"], percent=50.0, watts=300.0, cpu=0.9)
    assert server.seen() == {"ready"}


def test_sleep_and_pause_are_waited_for_and_the_count_begins_anew():
    server = Served().flows().goes(300, running=4, asleep=True, at=IDLE["vllm"])
    assert {m.verdict.kind for m in server.since(server.memory.now - 290)} == {"quiet"}
    assert server.goes(15, running=4, asleep=False, at=(*LOCK, *STEP["vllm"])).seen() == {"ready", "waiting"}


def test_a_stopped_worker_is_found_behind_a_front_end_that_answers():
    server = Served(ranks=2, count=2).flows(10)
    began = server.memory.now
    server.story.stops(103)
    server.goes(20, running=2, at=SPINS_IDLE)
    check(server.memories, began, Says("stuck", "stopped", "serving", suspect=103))


def test_a_board_that_is_lost_is_broken_at_once():
    server = Served().flows(10)
    began = server.memory.now
    (board,) = boards((0.0, 122.0))
    lost = replace(board, faults=(GpuFault(kind="lost", at=began),))
    server.goes(20, running=2, gpus=(lost,))
    check(server.memories, began, Says("broken", "hardware", "serving", within=2.0, suspect=None))


def test_a_neighbour_on_the_board_makes_it_unseen_and_neither_work_nor_spin():
    (board,) = boards((100.0, 124.0))
    stranger = GpuHolder(pid=4711, used_bytes=1 << 30)
    shared = replace(board, holders=(*board.holders, stranger))
    server = Served().flows(10).goes(100, running=2, gpus=(shared,), at=(*DEVICE, *STEP["vllm"]), cpu=1.0)
    assert not ALARMS & server.seen()
