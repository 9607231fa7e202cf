"""Waits for something outside, each with its budget and its end; and members that a signal keeps from running."""

from dataclasses import replace

import pytest
from making import BUSY, CORE, MIB, NEVER, SERVER, Member, Story, first, frames, rules, seen, watch

from hangguard.changes import with_flag
from hangguard.facts import (
    PHASES,
    Attempt,
    Fallback,
    IdlePlace,
    Launch,
    Limits,
    LockFile,
    Release,
    RemovedFile,
    Sample,
)
from hangguard.judge import Budget, GiveUp, Move, Relaunch, diagnose_memory, next_move

LOADED_AT = 1022.0
LOCK = ("acquire x/filelock/_api.py", "load_model")
BATON = ("wait torch/utils/file_baton.py", "load x/cpp_extension.py", "capture_model")


def loaded(*at, channel="futex_do_wait", **story) -> Story:
    told = Story(**story).goes(22, **BUSY, lines=("Starting to load model M",))
    return told.moves_to(CORE.pid, *at, channel=channel) if at else told


def lock(**changes) -> LockFile:
    made = LockFile(path="/cache/m.lock", kind="flock", waiters=(CORE.pid,), owner=4711, owner_title="vllm serve N")
    return replace(made, **changes)


POLLS = {"channel": "hrtimer_nanosleep"}


def presence(**changes) -> LockFile:
    return lock(path="/cache/torch_extensions/x/lock", kind="presence", owner=None, owner_title="", **changes)


# ------------------------------------------------------------------------------------------------------ locks


def test_a_lock_with_a_living_owner_is_waited_for_and_the_owner_named():
    told = loaded(*LOCK, channel="hrtimer_nanosleep", locks=(lock(),)).goes(300)
    memories = watch(told.samples)
    assert seen(memories) == {"moving", "waiting"}
    assert memories[-1].verdict.kind == "lock"
    assert "vllm serve N (pid 4711), which is no member" in memories[-1].verdict.why
    assert "/cache/m.lock" in memories[-1].verdict.why


def test_a_lock_that_a_hung_member_holds_is_nothing_outside():
    told = loaded(*LOCK, channel="hrtimer_nanosleep", locks=(lock(owner=103, owner_is_member=True),))
    told.gains(Member(103, "ENGINE::Worker_TP1", 100, 40, frames("acquire lock.py", "load_model")))
    stuck = first(watch(told.goes(60).samples), "stuck")
    assert stuck.verdict.kind == "idle"
    assert stuck.now - LOADED_AT <= 16.0


def test_a_stale_lock_waits_a_while_with_the_cure_and_is_then_a_hang():
    told = loaded(*BATON, channel="hrtimer_nanosleep", locks=(presence(age_seconds=4000.0),)).goes(120)
    memories = watch(told.samples)
    waiting, stuck = first(memories, "waiting"), first(memories, "stuck")
    assert waiting.verdict.kind == "stale-lock"
    assert "rm /cache/torch_extensions/x/lock" in waiting.verdict.why
    assert 60.0 <= stuck.now - waiting.now <= 65.0
    assert (stuck.verdict.kind, stuck.verdict.suspects[0].pid) == ("idle", CORE.pid)


STALE = presence(waiters=(), age_seconds=4000.0)
NO_FLAG = Fallback(
    name="no-graph", change=lambda launch: with_flag(launch, "--disable-cuda-graph"), answers=tuple(PHASES),
    alters="speed", cost="slower",
)  # fmt: skip


def moved_on(verdict, *files) -> Move:
    launch = Launch(argv=("serve", "M"), env=(), cwd="/", url="http://127.0.0.1:8000", host="127.0.0.1", port=8000)
    attempt = Attempt(
        number=1, launch=launch, verdict=verdict, started_at=0.0, last_movement_at=1.0, settled_at=2.0,
        release=Release(items=(), files=files),
    )  # fmt: skip
    return next_move((attempt,), (NO_FLAG,), Budget(another=True), retry_hangs=True)


def test_a_stale_lock_is_the_first_cause_and_no_option_is_blamed():
    memory = first(watch(loaded(*BATON, **POLLS, locks=(STALE,)).goes(120).samples), "stuck")
    assert memory.verdict.left_locks == (STALE.path,)
    diagnosis = diagnose_memory(memory)
    assert diagnosis.findings[0].hypothesis == "a lock file that somebody else holds, or left"
    assert diagnosis.findings[0].standing == "confirmed"
    assert f"rm -- {STALE.path}" in diagnosis.findings[0].evidence[0]
    assert "a build of that extension that was killed" in diagnosis.advice[0]
    assert not any("graph" in advice or "backend" in advice for advice in diagnosis.advice)
    move = moved_on(memory.verdict)
    assert isinstance(move, GiveUp)
    assert STALE.path in move.why
    assert f"rm {STALE.path}" in move.why


def test_the_same_hang_without_a_stale_lock_is_answered_by_an_option():
    told = loaded("acquire lock.py", "capture_model", locks=(STALE,)).goes(60)
    memory = first(watch(told.samples), "stuck")
    assert memory.verdict.left_locks == ()
    assert moved_on(memory.verdict).fallback.name == "no-graph"
    lock_finding = next(f for f in diagnose_memory(memory).findings if f.hypothesis.startswith("a lock file"))
    assert lock_finding.standing == "ruled out"


@pytest.mark.parametrize(
    ("channel", "found", "blamed"),
    [
        ("hrtimer_nanosleep", STALE, "the lock"),
        ("futex_do_wait", STALE, "an option"),
        ("hrtimer_nanosleep", replace(STALE, age_seconds=5.0), "an option"),
        ("hrtimer_nanosleep", replace(STALE, owner=4711, owner_title="ninja"), "an option"),
    ],
    ids=["sleeps", "waits for a thread", "young", "held"],
)
def test_where_no_stack_can_be_read_a_worker_that_sleeps_beside_a_stale_lock_blames_the_lock(channel, found, blamed):
    told = loaded(*BATON, channel=channel, locks=(found,)).goes(140)
    ended = first(watch(map(without_frames, told.samples)), "stuck").verdict
    assert ended.kind == "idle"
    assert ended.left_locks == ((STALE.path,) if blamed == "the lock" else ())
    assert isinstance(moved_on(ended), GiveUp if blamed == "the lock" else Relaunch)


def without_frames(sample: Sample) -> Sample:
    """As where nobody may trace: the kernel tells only in what each one sleeps."""
    return replace(sample, stacks=tuple(replace(stack, threads=NEVER) for stack in sample.stacks))


def test_a_builder_that_was_killed_leaves_its_lock_to_those_who_wait_and_no_option_is_blamed():
    """Its death is the verdict; that the others hang on is the lock's doing."""
    young = replace(STALE, age_seconds=20.0)
    builder = Member(104, "ENGINE::Worker_1", 100, 1, frames("sleep x.py"), works=False)
    told = loaded(*BATON, **POLLS, locks=(young,), members=(*SERVER, builder)).goes(12)
    broken = first(watch(told.loses(104, -9).goes(40).samples), "broken").verdict
    assert (broken.kind, broken.left_locks) == ("survivors", (STALE.path,))
    assert isinstance(moved_on(broken), GiveUp)
    assert isinstance(moved_on(broken, removed(STALE.path)), Relaunch)
    elsewhere = loaded(locks=(young,), members=(*SERVER, builder)).goes(12).loses(104, -9).goes(40)
    assert first(watch(elsewhere.samples), "broken").verdict.left_locks == ()


def removed(path, answer="removed", kind="lock") -> RemovedFile:
    return RemovedFile(path=path, kind=kind, answer=answer, device=1, inode=2, pid=3, started=4)


def test_a_lock_of_our_own_that_was_removed_is_answered_by_the_same_launch_once():
    verdict = first(watch(loaded(*BATON, **POLLS, locks=(STALE,)).goes(120).samples), "stuck").verdict
    move = moved_on(verdict, removed(STALE.path))
    assert isinstance(move, Relaunch)
    assert (move.fallback, move.changes, move.launch.argv) == (None, (), ("serve", "M"))
    assert isinstance(moved_on(verdict, removed(STALE.path, answer="busy")), GiveUp)
    assert isinstance(moved_on(verdict, removed("/elsewhere/lock")), GiveUp)
    assert isinstance(moved_on(verdict, removed(STALE.path, kind="file")), GiveUp)


@pytest.mark.parametrize(
    "found",
    [presence(age_seconds=10.0), replace(presence(age_seconds=4000.0), owner=4711, owner_title="ninja")],
    ids=["young", "held"],
)
def test_a_lock_that_may_still_be_somebodys_is_not_stale(found):
    memories = watch(loaded(*BATON, channel="hrtimer_nanosleep", locks=(found,)).goes(50).samples)
    assert seen(memories) == {"moving", "waiting"}
    assert memories[-1].verdict.kind == "lock"


def test_a_lock_without_an_age_is_stale_once_it_was_watched_for_long():
    told = loaded(*BATON, channel="hrtimer_nanosleep", locks=(presence(),)).goes(200)
    memories = watch(told.samples)
    kinds = [m.verdict.kind for m in memories if m.verdict.verdict == "waiting"]
    assert list(dict.fromkeys(kinds)) == ["lock", "stale-lock"]
    assert first(memories, "stuck").now - LOADED_AT >= 120.0


def test_a_build_lock_is_not_stale_while_its_compilers_run():
    told = loaded(*BATON, channel="hrtimer_nanosleep", locks=(presence(age_seconds=4000.0),))
    told.gains(Member(200, "cicc x.cu", CORE.pid, 1, python=False, name="cicc", cpu=0.9))
    assert seen(watch(told.goes(300).samples)) == {"moving"}


def test_who_polls_a_lock_is_seen_by_its_stack_and_the_stranger_who_holds_one_is_named():
    """Python's filelock has the file open for moments only: no member is seen to wait for it."""
    bystander = presence(waiters=(), age_seconds=4000.0)
    found = lock(waiters=(), path="/cache/hub/0.lock")
    memories = watch(loaded(*LOCK, **POLLS, locks=(bystander, found)).goes(100).samples)
    assert (seen(memories), memories[-1].verdict.kind) == ({"moving", "waiting"}, "lock")
    assert "perhaps for /cache/hub/0.lock, which is held by vllm serve N (pid 4711)" in memories[-1].verdict.why


def test_a_stale_lock_by_presence_has_no_waiter_that_the_kernel_knows():
    told = loaded(*BATON, **POLLS, locks=(lock(waiters=()), presence(waiters=(), age_seconds=4000.0))).goes(120)
    memories = watch(told.samples)
    waiting = first(memories, "waiting").verdict
    assert (waiting.kind, waiting.why.endswith("rm /cache/torch_extensions/x/lock")) == ("stale-lock", True)
    assert first(memories, "stuck").verdict.kind == "idle"


def test_of_several_stale_locks_none_is_said_to_be_removed():
    one = presence(waiters=(), age_seconds=4000.0)
    told = loaded(*BATON, **POLLS, locks=(one, replace(one, path="/cache/torch_extensions/y/lock"))).goes(30)
    verdict = watch(told.samples)[-1].verdict
    assert verdict.kind == "stale-lock"
    assert "rm " not in verdict.why
    assert "/cache/torch_extensions/x/lock, /cache/torch_extensions/y/lock" in verdict.why


@pytest.mark.parametrize(
    "other", [{"age_seconds": 5.0}, {"owner": 4711, "owner_title": "ninja"}], ids=["young", "held"]
)
def test_a_stale_lock_beside_one_that_is_in_use_may_not_be_the_one(other):
    one = presence(waiters=(), age_seconds=4000.0)
    told = loaded(*BATON, **POLLS, locks=(one, replace(one, path="/cache/torch_extensions/y/lock", **other))).goes(50)
    verdict = watch(told.samples)[-1].verdict
    assert (verdict.verdict, verdict.kind) == ("waiting", "lock")


def test_no_lock_is_looked_for_while_it_moves():
    memories = watch(loaded(locks=(presence(age_seconds=4000.0),)).goes(100, **BUSY).samples)
    assert seen(memories) == {"moving"}


# -------------------------------------------------------------------------------------------------- downloads


def test_a_download_is_moving_by_the_bytes_of_its_folder_and_says_how_fast():
    told = loaded("recv lib/ssl.py", "load_model", channel="wait_woken").goes(600, download=80.0 * MIB)
    memories = watch(told.samples)
    assert seen(memories) == {"moving"}
    assert memories[-1].verdict.why == "downloading 84 MB/s"


def test_a_download_is_moving_by_the_bytes_of_its_sockets():
    told = loaded("recv lib/ssl.py", "load_model", channel="wait_woken").goes(600, sockets=1.0 * MIB)
    assert seen(watch(told.samples)) == {"moving"}


def test_a_download_that_stands_waits_for_its_budget():
    told = loaded("recv lib/ssl.py", "load_model", channel="wait_woken").goes(200, download=0.0, sockets=0.0)
    memories = watch(told.samples, rules(limits=Limits(waiting=100.0)))
    assert seen(memories) == {"moving", "waiting", "expired"}
    assert first(memories, "waiting").verdict.kind == "download"


def test_the_cache_of_compiled_kernels_is_progress():
    assert seen(watch(loaded().goes(300, cache=1000.0).samples)) == {"moving"}


# ------------------------------------------------------------------------------------------------------ peers


@pytest.mark.parametrize("channel", ["hrtimer_nanosleep", "timed futex_do_wait", "poll_schedule_timeout"])
@pytest.mark.parametrize(
    "at",
    [
        ("_create_c10d_store torch/distributed/rendezvous.py", "init_dist"),
        ("barrier torch/distributed/distributed_c10d.py", "init_dist"),
        ("_new_process_group_helper torch/distributed/distributed_c10d.py", "init_dist"),
    ],
    ids=["the store", "a collective", "a communicator"],
)
def test_a_wait_for_a_peer_of_one_machine_is_stuck_in_dist_init_though_it_has_a_clock(at, channel):
    stuck = first(watch(loaded(*at, channel=channel).goes(30).samples), "stuck")
    assert (stuck.verdict.phase, stuck.verdict.kind) == ("dist-init", "idle")
    assert stuck.now - LOADED_AT <= 15.0


def test_a_peer_that_sleeps_in_its_own_work_costs_the_long_patience():
    told = loaded("barrier torch/distributed/distributed_c10d.py", "init_dist", channel="timed futex_do_wait")
    told.gains(Member(103, "ENGINE::Worker_TP1", 100, 40, frames("load loader.py"), "hrtimer_nanosleep"))
    assert "stuck" not in seen(watch(told.goes(100).samples))


def test_with_several_machines_a_wait_for_a_peer_waits_in_any_phase():
    told = loaded("barrier torch/distributed/distributed_c10d.py", "capture_model").goes(300)
    memories = watch(told.samples, rules(nodes=2))
    assert seen(memories) == {"moving", "waiting"}
    assert memories[-1].verdict.kind == "peers"


def test_a_node_that_never_answers_waits_for_the_one_that_does():
    memories = watch(loaded().goes(300).samples, rules(nodes=2, node_rank=1, answers=False))
    assert seen(memories) == {"moving", "waiting"}


def test_a_node_that_never_answers_is_ready_when_its_log_says_that_it_serves():
    by = rules(nodes=2, node_rank=1, answers=False)
    by = replace(by, markers=(*by.markers, replace(by.markers[0], pattern="fired up", phase="serving")))
    memories = watch(loaded().goes(3, **BUSY, lines=("fired up",)).goes(300).samples, by)
    assert memories[-1].ready_at is not None


# ------------------------------------------------------------------------------------------------ the machine


@pytest.mark.parametrize("states", ["S", "D"], ids=["version 2", "version 1, in which all is in state D"])
def test_a_frozen_control_group_is_waited_for(states):
    memories = watch(loaded().goes(300, frozen=True, states=states).samples)
    assert {m.verdict.kind for m in memories} == {"", "host"}
    assert seen(memories) == {"moving", "waiting"}
    assert memories[-1].verdict.kind == "host"
    assert "frozen" in memories[-1].verdict.why


def test_a_thawed_control_group_is_judged_as_any():
    assert "stuck" in seen(watch(loaded().goes(50, frozen=True).goes(20).samples))


@pytest.mark.parametrize(
    ("rates", "kind"),
    [
        ({"states": "RS", "stalls": {"throttled": 0.9}}, "host"),
        ({"states": "RS", "stalls": {"cpu": 0.9}}, "host"),
        ({"states": "DS", "stalls": {"io": 0.9}}, "disk"),
    ],
    ids=["throttled", "no free core", "a disk that stands"],
)
def test_a_starved_start_waits_for_the_machine(rates, kind):
    memories = watch(loaded().goes(400, **rates).samples)
    assert seen(memories) == {"moving", "waiting"}
    assert memories[-1].verdict.kind == kind


@pytest.mark.parametrize("states", ["D", "DS"])
def test_a_parent_in_vfork_is_in_state_d_and_waits_for_no_disk(states):
    memories = watch(loaded(*LOCK, channel="kernel_clone").goes(400, states=states).samples)
    assert seen(memories) == {"moving", "unclear"}
    assert memories[-1].verdict.why.startswith("a wait in vfork for a child, but nothing was produced")


def test_beside_a_parent_in_vfork_a_disk_may_stand_all_the_same():
    memories = watch(loaded(*LOCK, channel="kernel_clone").goes(400, states="DD").samples)
    assert memories[-1].verdict.kind == "disk"


def test_pressure_on_the_machine_does_not_hide_a_hang():
    stuck = first(watch(loaded().goes(30, stalls={"cpu": 0.95, "io": 0.9}).samples), "stuck")
    assert stuck.now - LOADED_AT <= 15.0


# ------------------------------------------------------------------------------------------------------ quiet


def test_quiet_that_was_asked_for_is_never_stuck_and_ends_with_its_time():
    told = loaded().goes(500, quiet_until=LOADED_AT + 500.0).goes(30)
    memories = watch(told.samples, rules(limits=Limits(waiting=60.0)))
    during = [m for m in memories if m.now < LOADED_AT + 499.0]
    assert seen(during) == {"moving", "waiting"}
    assert {m.verdict.kind for m in during} == {"", "quiet"}
    stuck = first(memories, "stuck")
    assert stuck.now >= LOADED_AT + 509.0, "the stretch begins anew when the quiet is over"


# ---------------------------------------------------------------------------------------------------- stopped


@pytest.mark.parametrize("state", ["T", "t"])
@pytest.mark.parametrize("pid", [CORE.pid, 100], ids=["a worker", "the front end"])
def test_a_stopped_member_is_found_named_first_and_its_cure_told(pid, state):
    told = loaded("acquire lock.py", "load_model").stops(pid, state).goes(30)
    stuck = first(watch(told.samples), "stuck")
    assert (stuck.verdict.kind, stuck.verdict.suspects[0].pid) == ("stopped", pid)
    assert stuck.now - LOADED_AT <= 15.0
    assert "SIGCONT" in stuck.verdict.why
    assert ("ptrace" in stuck.verdict.why) is (state == "t")


def test_a_stopped_member_while_another_progresses_is_moving():
    told = loaded().stops(100).goes(200, **BUSY)
    assert seen(watch(told.samples)) == {"moving"}


STREAM = ("synchronize torch/cuda/streams.py", "warm_up")


def beside(*, stopped: bool):
    """Two ranks: the one spins in a kernel that waits for the other, at the watts of an idle context."""
    peer = Member(104, "ENGINE::Worker_TP1", 100, 8, frames(*STREAM), channel="", cpu=0.0)
    told = Story().gains(peer).goes(22, **BUSY, gpu_memory=500 * MIB).moves_to(CORE.pid, *STREAM, channel="")
    told = told.stops(peer.pid) if stopped else told
    return peer, watch(told.goes(40, cpu=1.0, states="R", gpu_percent=100.0, watts=124.0).samples)


def test_a_stopped_rank_is_named_also_where_the_others_spin_for_it():
    peer, memories = beside(stopped=True)
    stuck = first(memories, "stuck")
    assert (stuck.verdict.kind, stuck.verdict.suspects[0].pid) == ("stopped", peer.pid)
    assert stuck.now - LOADED_AT <= 18.0
    _, memories = beside(stopped=False)
    assert first(memories, "stuck").verdict.kind == "busy"


def test_a_stop_that_ends_in_time_is_none():
    told = loaded().stops(100).goes(8).stops(100, None).goes(4)
    assert "stopped" not in {m.verdict.kind for m in watch(told.samples)}


def test_a_worker_that_goes_on_compiling_beside_its_stopped_parent_has_time():
    told = loaded("lower compile.py", "capture_model").stops(100).goes(25, cpu=1.0)
    assert "stuck" not in seen(watch(told.samples))
    assert "stuck" in seen(watch(told.goes(10, cpu=1.0).samples))


def test_a_stopped_tracker_is_nobody():
    told = loaded("acquire lock.py", "load_model", channel="hrtimer_nanosleep").stops(101).goes(60)
    assert "stuck" not in seen(watch(told.samples))


# ------------------------------------------------------------------------------ a log that cannot be read


def test_a_log_that_cannot_be_read_was_silent_if_nobody_wrote_anything():
    told = loaded(sees_writes=True).goes(30, log=NEVER)
    stuck = first(watch(told.samples, rules(attached=True)), "stuck")
    assert stuck.now - LOADED_AT <= 15.0


@pytest.mark.parametrize(
    ("hide", "at", "found"),
    [
        (("answer", "port"), ("acquire lock.py",), False),
        (("answer",), ("acquire lock.py",), True),
        (("answer", "port"), ("acquire lock.py", "load_model"), True),
        (("port",), ("acquire lock.py",), True),
    ],
    ids=["it may be ready", "nobody listens", "a worker still loads", "it does not answer"],
)
def test_an_unseen_answer_may_be_a_good_one(hide, at, found):
    # A ready server that nobody asks is the picture of an idle hang.
    memories = watch(loaded(*at).goes(130, hide=hide).samples)
    assert ("stuck" in seen(memories)) is found


def test_a_log_that_cannot_be_read_was_perhaps_not_silent_if_somebody_wrote():
    told = loaded(sees_writes=True).goes(300, log=NEVER, writes=50.0)
    assert "stuck" not in seen(watch(told.samples, rules(attached=True)))


# ------------------------------------------------------------------------------------------------- machines


UP = ("wait threading.py", "get queue.py", "run_busy_loop core.py")
PLACES = (IdlePlace(loop="run_busy_loop", inside="get|wait"),)


def up(**more):
    """The engine of this machine is up, and the front end waits for those of the others."""
    return Story().goes(22, **BUSY, lines=("Loading weights took 3 s",)).moves_to(CORE.pid, *UP).goes(300, **more)


def test_an_engine_that_is_up_waits_for_those_of_the_other_machines():
    memories = watch(up().samples, rules(nodes=2, idle_places=PLACES))
    assert seen(memories) == {"moving", "waiting"}
    assert memories[-1].verdict.kind == "peers"


def test_but_on_one_machine_there_is_nobody_to_wait_for():
    assert "stuck" in seen(watch(up().samples, rules(idle_places=PLACES)))


def test_nor_is_one_of_several_machines_that_stands_somewhere_else_up():
    told = Story().goes(22, **BUSY, lines=("Loading weights took 3 s",))
    told.moves_to(CORE.pid, "acquire lock.py", "capture_model runner.py").goes(60)
    assert "stuck" in seen(watch(told.samples, rules(nodes=2, idle_places=PLACES)))
