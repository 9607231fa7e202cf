"""Hot and busy hangs: CPU or GPU is burnt and nothing is produced. Each rule fires, and has one that must not."""

from dataclasses import replace

import pytest
from making import BUSY, CORE, MIB, NEVER, Member, Story, first, gpu, rules, seen, watch

from hangguard.facts import GpuHolder, IdlePlace, Limits, Unseen

LOADED_AT = 1022.0
API, TRACKER = Story().members[:2]
NCCL = ("_new_process_group_helper torch/distributed/distributed_c10d.py", "init_dist")
BARRIER = ("barrier torch/distributed/distributed_c10d.py", "wrapper torch/distributed/c10d_logger.py", "capture_model")
SYNC = ("synchronize torch/cuda/__init__.py", "capture_model")
UNKNOWN = ("step engine.py", "init_dist")
HOLDERS = (GpuHolder(pid=CORE.pid, used_bytes=None),)


def rank(n, *at, cpu=None, channel="", pid=None, **more):
    made = Member(pid or 110 + n, f"ENGINE::Worker_TP{n}", 100, 40, channel=channel, cpu=cpu, **more)
    return replace(made, at=Story().moves_to(CORE.pid, *at).members[2].at)


def loaded(*members, at=(), cpu_channel="", **story) -> Story:
    told = Story(members=members or Story().members, **story)
    told.goes(22, **BUSY, lines=("world_size=2 rank=0",))
    return told.moves_to(CORE.pid, *at, channel=cpu_channel) if at else told


def found(told: Story, by=None):
    return first(watch(told.samples, by), "stuck")


# ------------------------------------------------------------------------------ the pair: 21 s, same picture


def pair(*at) -> Story:
    """Twenty-one seconds in which only CPU moves, as both were recorded."""
    return loaded(at=at).goes(21, cpu=1.0, states="RS", gpu_memory=0)


def test_a_healthy_compile_of_21_s_and_a_wait_in_nccl_are_one_picture_with_opposite_verdicts():
    healthy = watch(pair("compile_shader triton/compiler/compiler.py", "capture_model").goes(5, **BUSY).samples)
    hung = watch(pair(*NCCL).samples)
    assert seen(healthy) == {"moving"}
    stuck = first(hung, "stuck")
    assert (stuck.verdict.kind, stuck.verdict.phase, stuck.verdict.confidence) == ("hot", "dist-init", "high")
    assert 12.0 <= stuck.now - LOADED_AT <= 16.0
    for one, other in zip(healthy[:40], hung[:40], strict=True):
        assert (one.unproductive_for, one.idle_for, one.activity_by) == (
            other.unproductive_for, other.idle_for, other.activity_by,
        )  # fmt: skip


# ----------------------------------------------------------------------------------------------- known places


@pytest.mark.parametrize("at", [NCCL, BARRIER, SYNC], ids=["communicator init", "barrier", "a sync with an idle GPU"])
def test_a_hot_wait_in_a_known_place_is_found_in_seconds_and_named(at):
    stuck = found(loaded(at=at).goes(30, cpu=1.0, states="RS"))
    assert stuck.verdict.kind == "hot"
    assert stuck.now - LOADED_AT <= 18.0
    assert "spins in" in stuck.verdict.why
    assert stuck.verdict.suspects[0].pid == CORE.pid
    assert {m.name for m in stuck.verdict.numbers} >= {"nothing produced for", "CPU of all members"}


@pytest.mark.parametrize("share", [0.1, 0.45])
def test_a_spinner_that_gets_little_of_a_core_because_others_want_it_is_hot_all_the_same(share):
    stuck = found(loaded(at=NCCL).goes(40, cpu=share, states="RS"))
    assert (stuck.verdict.kind, stuck.verdict.confidence) == ("hot", "high")
    assert stuck.now - LOADED_AT <= 18.0


@pytest.mark.parametrize(
    "states", [{"states": "SS"}, {"hide": ("thread_states",)}], ids=["it sleeps in between", "nobody looked"]
)
def test_as_little_of_a_core_without_a_thread_that_is_always_runnable_is_not(states):
    assert "stuck" not in seen(watch(loaded(at=NCCL).goes(60, cpu=0.45, **states).samples))


@pytest.mark.parametrize(
    "progress",
    [{"faults": 100.0}, {"reads": 100_000.0}, {"gpu_memory": 32 * MIB}, {"every_second": ("step {n}/99",)}],
    ids=["faults", "bytes", "GPU memory", "a bar that rises"],
)
def test_the_same_place_while_something_is_produced_is_moving(progress):
    assert seen(watch(loaded(at=NCCL).goes(90, cpu=1.0, **progress).samples)) == {"moving"}


def test_one_look_at_the_stacks_is_not_enough():
    told = loaded(at=NCCL).goes(7, cpu=1.0).goes(50, cpu=1.0, stacks=Unseen("py-spy died"))
    assert "stuck" not in seen(watch(told.samples))


def test_a_rank_that_waits_for_one_that_compiles_waits_for_progress():
    # One rank spins in the barrier because the other still works: the picture of a hang on the one, not on both.
    waits, works = rank(0, *BARRIER, cpu=1.0), rank(1, "lower compile.py", "capture_model", cpu=1.0)
    told = Story(members=(API, TRACKER, waits, works)).goes(22, **BUSY).goes(50, states="RS")
    assert "stuck" not in seen(watch(told.samples))


def test_a_rank_that_waits_for_one_that_sleeps_in_its_loader_needs_the_long_budget():
    waits, sleeps = rank(0, *BARRIER, cpu=1.0), rank(1, "load loader.py", channel="hrtimer_nanosleep", cpu=0.0)
    told = Story(members=(API, TRACKER, waits, sleeps)).goes(22, **BUSY).goes(60, states="RS")
    assert "stuck" not in seen(watch(told.samples))


def test_the_idle_rank_among_those_that_spin_is_the_first_suspect():
    spins = [rank(n, *BARRIER, cpu=1.0) for n in range(3)]
    odd = rank(3, "acquire lock.py", "load_model", channel="futex_do_wait", cpu=0.0)
    told = Story(members=(API, TRACKER, *spins, odd)).goes(22, **BUSY).goes(40, states="RS")
    verdict = found(told).verdict
    assert (verdict.kind, verdict.suspects[0].rank) == ("hot", "TP3")
    assert "TP0, TP1, TP2 wait for a peer in barrier" in verdict.suspects[0].note


def test_a_peer_on_another_machine_may_still_come():
    told = loaded(at=NCCL).goes(300, cpu=1.0)
    memories = watch(told.samples, rules(nodes=2))
    assert seen(memories) == {"moving", "waiting"}
    assert memories[-1].verdict.kind == "peers"


def test_with_gpus_unseen_a_known_place_needs_the_long_budget():
    stuck = found(loaded(at=NCCL).goes(170, cpu=1.0, gpus=NEVER))
    assert stuck.now - LOADED_AT >= 120.0
    assert stuck.verdict.confidence == "medium"


@pytest.mark.parametrize("hide", ["log", "bytes", "tree"])
def test_without_these_a_hot_hang_is_never_called(hide):
    assert "stuck" not in seen(watch(loaded(at=NCCL).goes(300, cpu=1.0, hide=(hide,)).samples))


# --------------------------------------------------------------------------------------------- unknown places


def test_a_hot_loop_in_a_place_that_nobody_knows_needs_the_long_budget_and_the_same_stacks_all_the_time():
    stuck = found(loaded(at=UNKNOWN).goes(200, cpu=1.0))
    assert 120.0 <= stuck.now - LOADED_AT <= 145.0
    assert (stuck.verdict.kind, stuck.verdict.confidence) == ("hot", "medium")


def test_a_conversion_of_weights_gets_longer():
    told = loaded(at=("repack quant.py", "load_model")).goes(400, cpu=1.0)
    assert "stuck" not in seen(watch(told.samples))


def test_stacks_that_change_are_progress_as_long_as_they_are_new():
    told = loaded()
    for n in range(60):
        told.moves_to(CORE.pid, f"pass_{n} llvm.py", "init_dist").goes(9, cpu=1.0)
    assert seen(watch(told.samples)) == {"moving"}


def test_a_loop_through_a_few_functions_is_unclear_and_neither_stuck_nor_for_ever():
    told = loaded()
    for n in range(400):
        told.moves_to(CORE.pid, f"step_{n % 3} loop.py", "init_dist").goes(3, cpu=1.0)
    memories = watch(told.samples)
    assert seen(memories) == {"moving", "unclear", "expired"}


def test_compilers_whose_cpu_grows_are_progress():
    told = loaded(at=("communicate subprocess.py", "load cpp_extension.py", "capture_model"), cpu_channel="do_wait")
    for n in range(4):
        told.gains(Member(200 + n, "/usr/bin/cc1plus -quiet", CORE.pid, 1, python=False, cpu=1.0, name="cc1plus"))
    memories = watch(told.goes(900).samples)
    assert seen(memories) == {"moving"}
    assert memories[-1].verdict.why == "compiling: 4 compiler processes"


def test_compilers_that_stand_still_are_no_progress():
    told = loaded()
    told.gains(Member(200, "cc1plus", CORE.pid, 1, python=False, name="cc1plus", cpu=0.0, works=False))
    assert found(told.goes(30)) is not None


def test_the_loop_of_an_engine_that_asks_for_requests_is_no_hot_wait():
    spins = rules(idle_spins=True, idle_places=(IdlePlace(loop="event_loop_normal", inside="recv_requests|poll"),))
    told = loaded(at=("recv_requests scheduler.py", "event_loop_normal")).goes(300, cpu=1.0)
    assert "stuck" not in seen(watch(told.samples, spins))
    assert "stuck" in seen(watch(told.samples)), "in any other engine the same loop is a hot hang"


# ------------------------------------------------------------------------------------------------------- busy


def with_gpu(*at, **story) -> Story:
    """A start whose board has shown its floor of 122 W."""
    told = loaded(holders=HOLDERS, **story).goes(5, **BUSY, watts=122.0, gpu_memory=512 * MIB)
    return told.moves_to(CORE.pid, *at, channel="") if at else told


WITH_GPU_AT = LOADED_AT + 5.0


@pytest.mark.parametrize(
    ("host", "at", "channel"),
    [
        ({"cpu": 1.0, "states": "RS"}, SYNC, ""),
        ({"cpu": 0.005}, ("sleep", "capture_model"), "hrtimer_nanosleep"),
        ({"cpu": 0.0}, BARRIER, "futex_do_wait"),
        ({"cpu": 1.0, "states": "RS"}, ("query torch/cuda/streams.py", "capture_model"), ""),
    ],
    ids=["spins in a sync", "polls an event", "blocked", "asks an event as fast as it can"],
)
@pytest.mark.parametrize("watts", [124.0, 140.0])
def test_a_kernel_that_never_ends_is_found_by_its_power(host, at, channel, watts):
    told = with_gpu().moves_to(CORE.pid, *at, channel=channel).goes(30, gpu_percent=100.0, watts=watts, **host)
    stuck = found(told)
    assert (stuck.verdict.kind, stuck.verdict.confidence) == ("busy", "high")
    assert stuck.now - WITH_GPU_AT <= 18.0
    assert "GPU 0 power" in {m.name for m in stuck.verdict.numbers}


@pytest.mark.parametrize("seconds", [20, 400])
def test_a_gpu_that_works_is_progress_for_as_long_as_it_works(seconds):
    told = with_gpu(*SYNC)
    for _ in range(seconds // 2):
        told.goes(1, gpu_percent=100.0, watts=298.0, cpu=1.0).goes(1, gpu_percent=100.0, watts=480.0, cpu=1.0)
    memories = watch(told.samples)
    assert seen(memories) == {"moving"}
    assert memories[-1].verdict.why == "GPU works at 480 W"


def test_power_between_the_floor_and_work_proves_nothing():
    told = with_gpu(*SYNC).goes(900, gpu_percent=100.0, watts=170.0, cpu=1.0)
    memories = watch(told.samples)
    assert seen(memories) == {"moving", "unclear", "expired"}
    assert "neither that of an idle context nor clearly that of work" in memories[-1].verdict.why


def test_unseen_power_leaves_only_the_long_budget_with_stacks():
    told = with_gpu(*SYNC).goes(280, gpu_percent=100.0, watts=NEVER, cpu=1.0)
    stuck = found(told)
    assert stuck.now - WITH_GPU_AT >= 240.0, "graph capture has a longer budget than most phases"
    assert stuck.verdict.confidence == "medium"
    without = with_gpu(*SYNC).goes(400, gpu_percent=100.0, watts=NEVER, cpu=1.0, stacks=NEVER)
    assert "stuck" not in seen(watch(without.samples))


def test_a_host_that_works_beside_the_spinning_kernel_costs_the_long_budget():
    told = with_gpu("lower compile.py", "capture_model").goes(100, gpu_percent=100.0, watts=124.0, cpu=1.0)
    assert "stuck" not in seen(watch(told.samples))


def test_kernels_that_wait_for_another_machine_wait():
    told = with_gpu(*SYNC).goes(100, gpu_percent=100.0, watts=124.0, cpu=1.0)
    memories = watch(told.samples, rules(nodes=2))
    assert "stuck" not in seen(memories)
    assert memories[-1].verdict.kind == "peers"


# ------------------------------------------------------------------------------------------------- neighbours


def test_a_neighbours_load_does_not_hide_a_hang_for_ever_and_does_not_make_one():
    others = (*HOLDERS, GpuHolder(pid=4711, used_bytes=None))
    told = loaded(holders=others).goes(140, gpu_percent=97.0, watts=500.0)
    stuck = found(told)
    assert (stuck.verdict.kind, stuck.verdict.confidence) == ("idle", "medium")
    assert 120.0 <= stuck.now - LOADED_AT <= 125.0
    assert any("4711" in text for text in stuck.verdict.unseen)


def test_an_idle_neighbour_does_not_matter():
    others = (*HOLDERS, GpuHolder(pid=4711, used_bytes=None))
    assert found(loaded(holders=others).goes(20)).now - LOADED_AT <= 15.0


def test_a_neighbours_spinning_kernel_is_not_our_hang():
    told = loaded(holders=HOLDERS).goes(5, **BUSY, watts=122.0)
    told.holders = (*HOLDERS, GpuHolder(pid=4711, used_bytes=None))
    memories = watch(told.goes(100, gpu_percent=100.0, watts=124.0, cpu=1.0).samples)
    assert "stuck" not in seen(memories)


def test_a_latched_utilisation_does_not_hide_a_hang():
    story = Story().goes(22, **BUSY, gpu_percent=100.0, watts=35.0).goes(140, gpu_percent=100.0, watts=35.0)
    stuck = found(story)
    assert stuck.verdict.kind == "idle"
    assert any("before this launch had it" in text for text in stuck.verdict.unseen)


def test_the_caps_of_the_caller_hold_for_busy_hangs_too():
    by = rules(limits=Limits(patience=30.0))
    assert found(loaded(at=UNKNOWN).goes(60, cpu=1.0), by).now - LOADED_AT <= 50.0


def test_a_gpu_that_cannot_be_read_is_no_gpu_at_rest():
    told = loaded(at=UNKNOWN).goes(300, cpu=1.0, gpus=(gpu(percent=NEVER),))
    assert "stuck" not in seen(watch(told.samples))
