"""The stories: what a timeline says. Every rule that can say "stuck" has a neighbour in which it must not."""

from dataclasses import replace
from itertools import pairwise

import pytest
from making import API, BUSY, CORE, MIB, NEVER, Member, Story, first, frames, gpu, rules, seen, watch

from hangguard.facts import NOT_ASKED, IdlePlace, Limits, Listener, Port, Reply, ThreadStack, Unseen
from hangguard.judge import assess, diagnose_memory, next_ask

LOADED_AT = 1022.0


def seed(**story) -> Story:
    """Load for 22 s, the last words being those of the capture."""
    told = Story(**story)
    told.goes(2, **BUSY, lines=("world_size=1 rank=0",)).goes(20, **BUSY, lines=("Starting to load model M",))
    return told


# ------------------------------------------------------------------------------------- the seed story


def test_it_loads_for_22_s_then_nothing_moves():
    memories = watch(seed().goes(60).samples)
    stuck = first(memories, "stuck")
    assert stuck is not None
    assert stuck.now - LOADED_AT <= 15.0
    verdict = stuck.verdict
    assert (verdict.phase, verdict.kind, verdict.unseen) == ("graph-capture", "idle", ())
    assert 10.0 <= verdict.still_for <= stuck.now - LOADED_AT
    assert len(verdict.suspects) == 1
    assert str(verdict.suspects[0]).startswith("ENGINE::Worker_0 (pid 102) < acquire (lock.py:7) < capture_model")
    assert LOADED_AT <= stuck.last_movement_at <= LOADED_AT + 1.0
    assert seen(memories) == {"moving", "stuck"}
    assert memories[-1].verdict.since == stuck.now, "a verdict that goes on keeps its beginning"


def test_with_a_gpu_that_holds_memory_and_does_nothing():
    told = Story().goes(22, **BUSY, gpu_memory=3 * 1024 * MIB).goes(20)
    assert first(watch(told.samples), "stuck").now - LOADED_AT <= 15.0


def test_on_a_machine_without_gpus():
    assert first(watch(seed(gpus=False).goes(20).samples), "stuck").now - LOADED_AT <= 15.0


@pytest.mark.parametrize(
    ("hidden", "named"),
    [
        pytest.param({"gpus": Unseen("NVML did not answer")}, "GPUs: NVML did not answer", id="GPUs unreadable"),
        pytest.param({"stacks": Unseen("py-spy is not installed")}, "stacks: py-spy is not installed", id="no stacks"),
    ],
)
def test_what_is_unseen_is_named_and_costs_the_long_patience(hidden, named):
    memories = watch(seed().goes(140, **hidden).samples)
    stuck = first(memories, "stuck")
    assert 120.0 <= stuck.now - LOADED_AT <= 125.0
    assert named in stuck.verdict.unseen
    assert named.partition(": ")[2] in stuck.verdict.why
    before = memories[-20].verdict if memories[-20].now < stuck.now else first(memories, "unclear").verdict
    assert before.verdict == "unclear"


@pytest.mark.parametrize("percent", [pytest.param(Unseen("MIG"), id="MIG has no utilisation")])
def test_a_gpu_without_utilisation_costs_the_long_patience(percent):
    told = seed().goes(130, gpus=(gpu(percent=percent),))
    assert first(watch(told.samples), "stuck").now - LOADED_AT >= 120.0


# -------------------------------------------------------------------------- what must be seen, or never


@pytest.mark.parametrize(
    ("hide", "named"),
    [
        ("thread_states", "states of the threads"),
        ("log", "the log cannot be seen"),
        ("bytes", "bytes that the processes read"),
        ("tree", "the processes cannot be seen"),
    ],
)
def test_without_these_nothing_is_ever_stuck(hide, named):
    memories = watch(seed().goes(700, hide=(hide,)).samples)
    assert "stuck" not in seen(memories)
    assert named in first(memories, "unclear").verdict.why
    expired = first(memories, "expired")
    assert expired.verdict.kind == "unclear"
    assert named in expired.verdict.why
    assert expired.now - LOADED_AT <= 600.0 + 15.0


def test_a_second_without_the_processes_begins_the_stretch_anew():
    told = seed().goes(9).goes(1, hide=("tree",)).goes(9)
    assert "stuck" not in seen(watch(told.samples))


def test_unseen_processes_whose_log_goes_on_do_not_expire():
    told = seed()
    for n in range(14):
        told.goes(60, hide=("tree",), lines=(f"step {'abcdefghijklmnop'[n]} done",))
    assert "expired" not in seen(watch(told.samples))


def test_a_worker_without_a_stack_costs_the_long_patience():
    told = seed().goes(60)
    samples = [s if s.t <= LOADED_AT else _without_worker(s) for s in told.samples]
    memories = watch(samples)
    assert "stuck" not in seen(memories)
    assert "there is no stack of ENGINE::Worker_0" in memories[-1].verdict.why


def _without_worker(sample):
    return replace(sample, stacks=tuple(s for s in sample.stacks if s.pid != CORE.pid))


# ------------------------------------------------------------------------------- what may end by itself


@pytest.mark.parametrize(
    "channel",
    [
        "hrtimer_nanosleep",
        "do_nanosleep",
        "poll_schedule_timeout.constprop.0",
        "ep_poll",
        "wait_woken",
        "request_wait_answer",
        "rpc_wait_bit_killable",
        "",
        NEVER,
    ],
)
def test_a_member_that_may_wake_by_itself_is_not_stuck_before_the_long_patience(channel):
    told = seed().moves_to(102, channel=channel).goes(130)
    stuck = first(watch(told.samples), "stuck")
    assert stuck.now - LOADED_AT >= 120.0


@pytest.mark.parametrize("channel", ["futex_wait_queue", "futex_do_wait", "do_wait", "anon_pipe_read"])
def test_a_member_that_only_another_can_wake_is(channel):
    told = seed().moves_to(102, channel=channel).goes(20)
    assert first(watch(told.samples), "stuck").now - LOADED_AT <= 15.0


def test_the_sleep_of_a_front_end_carries_no_weight():
    told = seed().moves_to(100, "poll poll.py", channel="poll_schedule_timeout").goes(20)
    assert first(watch(told.samples), "stuck") is not None


def test_a_core_that_waits_for_its_worker_carries_no_weight():
    core = Member(150, "ENGINE::Worker_parent", 100, at=frames("dequeue mq.py"), channel="poll_schedule_timeout")
    worker = Member(151, "ENGINE::Worker_0", 150, at=frames("acquire", "load_model"))
    told = Story(members=(*Story().members[:2], core, worker)).goes(22, **BUSY).goes(20)
    stuck = first(watch(told.samples), "stuck")
    assert [s.pid for s in stuck.verdict.suspects] == [151]


@pytest.mark.parametrize(
    ("channel", "long"), [("futex_wait_queue", False), ("hrtimer_nanosleep", True), ("ep_poll", True)]
)
def test_a_worker_without_python_is_judged_by_its_wait_channel(channel, long):
    native = Member(103, "ENGINE::Worker_1", 100, python=False, channel=channel)
    told = Story(members=(*Story().members[:2], native)).goes(22, **BUSY).goes(30)
    assert ("stuck" in seen(watch(told.samples))) is not long


@pytest.mark.parametrize(
    "at",
    [
        pytest.param(("recv lib/ssl.py", "read http/client.py", "load_model"), id="a download"),
        pytest.param(("read x/urllib3/response.py", "load_model"), id="urllib3"),
        pytest.param(("wait threading.py", "snapshot_download huggingface_hub/_snapshot.py"), id="the hub's threads"),
        pytest.param(("acquire x/filelock/_api.py", "load_model"), id="a lock file"),
        pytest.param(("wait torch/utils/file_baton.py", "capture_model"), id="a build lock"),
    ],
)
def test_a_wait_for_something_outside_is_never_stuck(at):
    memories = watch(seed().moves_to(102, *at).goes(700).samples)
    assert seen(memories) == {"moving", "waiting"}
    assert "something outside may still end the wait" in memories[-1].verdict.why
    assert memories[-1].verdict.kind == ("lock" if "lock" in at[0] or "baton" in at[0] else "download")


@pytest.mark.parametrize("channel", ["locks_lock_inode_wait", "flock_lock_inode_wait", "do_lock_file_wait"])
def test_a_blocking_lock_of_the_kernel_is_never_stuck(channel):
    memories = watch(seed().moves_to(102, channel=channel).goes(300).samples)
    assert seen(memories) == {"moving", "waiting"}
    assert (memories[-1].verdict.kind, "file lock" in memories[-1].verdict.why) == ("lock", True)


def test_a_wait_has_a_budget_of_its_own():
    told = seed().moves_to(102, "acquire x/filelock/_api.py").goes(200)
    memories = watch(told.samples, rules(limits=Limits(waiting=100.0, unclear=5.0)))
    expired = first(memories, "expired")
    assert 110.0 <= expired.now - LOADED_AT <= 115.0
    assert (expired.verdict.kind, "filelock" in expired.verdict.why) == ("waiting", True)
    assert memories[-1].verdict.verdict == "expired"


def test_the_same_frames_in_a_background_thread_do_not_hide_a_hang():
    # A thread that reports usage statistics hangs in its connection for as long as there is no network.
    told = seed().goes(20)
    other = ThreadStack(name="usage", thread_id=9, active=False, frames=frames("connect x/urllib3/connection.py"))
    samples = [
        replace(s, stacks=tuple(replace(k, threads=(*k.threads, other)) for k in s.stacks)) for s in told.samples
    ]
    assert "stuck" in seen(watch(samples))


# ------------------------------------------------------------------------- what cannot be seen from here


@pytest.mark.parametrize("patience", [None, 5.0, 0.0])
def test_a_launch_that_is_delegated_is_never_stuck(patience):
    by = rules(delegates_to="docker", limits=Limits(patience=patience))
    memories = watch(Story().goes(300).samples, by)
    assert "stuck" not in seen(memories)
    assert "docker" in memories[-1].verdict.why
    assert "Run hangguard inside it" in memories[-1].verdict.why


@pytest.mark.parametrize("line", ["hello", "world_size=16 rank=0"])
def test_several_machines_are_never_stuck_before_they_have_met(line):
    told = Story(members=(Story().members[0], Member(102, "ENGINE::Worker_0", 100, at=frames("acquire", "wait_for"))))
    told.goes(22, **BUSY, lines=(line,)).goes(300)
    memories = watch(told.samples, rules(nodes=2))
    assert seen(memories) == {"moving", "waiting"}
    assert (memories[-1].verdict.kind, "other machines" in memories[-1].verdict.why) == ("peers", True)


def test_several_machines_may_be_stuck_later():
    assert first(watch(seed().goes(20).samples, rules(nodes=2)), "stuck").verdict.phase == "graph-capture"


# ---------------------------------------------------------------------------------- progress, activity


@pytest.mark.parametrize(
    "rates",
    [
        pytest.param({"faults": 91.0}, id="minor faults of a start short of memory"),
        pytest.param({"reads": 100_000.0}, id="bytes read"),
        pytest.param({"writes": 100_000.0}, id="bytes written"),
        pytest.param({"disk": 100_000.0}, id="bytes from the disk"),
        pytest.param({"rss": 2 * MIB}, id="memory grows"),
        pytest.param({"rss": -2 * MIB}, id="memory falls"),
        pytest.param({"gpu_memory": 8 * MIB}, id="GPU memory"),
        pytest.param({"every_second": ("Loading shards: {n}% done | {n}/400",)}, id="a progress bar that rises"),
    ],
)
def test_progress_by_one_source_alone_is_moving_for_ever(rates):
    memories = watch(seed().goes(300, **rates).samples)
    assert seen(memories) == {"moving"}


def test_new_kinds_of_lines_are_progress():
    told = seed()
    for letter in "abcdefghij":
        told.goes(9, lines=(f"step {letter}",))
    assert seen(watch(told.samples)) == {"moving"}


def test_children_that_come_and_go_are_progress():
    told = seed()
    for pid in range(200, 220):
        told.gains(Member(pid, "cc1plus", 102, works=False)).goes(5).loses(pid, 0).goes(4)
    assert seen(watch(told.samples)) == {"moving"}


def test_changed_stacks_are_progress():
    told = seed()
    for n in range(40):
        told.moves_to(102, f"step_{n}", "capture_model").goes(6)
    assert "stuck" not in seen(watch(told.samples))


def test_a_line_number_that_changes_is_not_progress():
    told = seed().goes(20)
    samples = [
        replace(
            s,
            stacks=tuple(
                replace(
                    k,
                    threads=tuple(
                        replace(t, frames=tuple(replace(f, line=int(s.t)) for f in t.frames)) for t in k.threads
                    ),
                )
                for k in s.stacks
            ),
        )
        for s in told.samples
    ]
    assert "stuck" in seen(watch(samples))


def test_the_order_of_the_stacks_means_nothing():
    samples = [replace(s, stacks=s.stacks[:: 1 if int(s.t) % 2 else -1]) for s in seed().goes(20).samples]
    assert first(watch(samples), "stuck").now - LOADED_AT <= 15.0


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(('INFO: 127.0.0.1:{n} - "GET /health HTTP/1.1" 200 OK',), id="access lines of our own probes"),
        pytest.param(("Engine: Running {n} reqs, throughput: 0.0 tokens/s",), id="statistics without work"),
        pytest.param(("still waiting, 60 seconds",), id="a heartbeat that is known"),
        pytest.param(("[{n}] no answer from the worker in {n} seconds",), id="one whose numbers alone change"),
        pytest.param(("",), id="empty lines"),
    ],
)
def test_lines_that_are_not_news_keep_nothing_alive(lines):
    told = seed().goes(1, every_second=lines).goes(20, every_second=lines)
    assert first(watch(told.samples), "stuck").now - LOADED_AT <= 17.0


def test_a_progress_bar_that_stands_keeps_nothing_alive():
    told = seed().goes(20, every_second=("Capturing 40%|####      | 4/10 [00:{n}<00:09]",))
    assert "stuck" in seen(watch(told.samples))


@pytest.mark.parametrize(
    "rates",
    [
        pytest.param({"cpu": 1.0, "hide": ("stacks",)}, id="a busy loop without stacks"),
        pytest.param({"cpu": 0.06}, id="a little CPU"),
        pytest.param({"gpu_percent": 100.0, "hide": ("stacks",)}, id="a kernel that never ends, without stacks"),
        pytest.param({"gpu_percent": 40.0}, id="a GPU that is busy now and then"),
        pytest.param({"states": "RS"}, id="a starved core"),
    ],
)
def test_activity_that_proves_nothing_is_unclear_and_never_stuck(rates):
    memories = watch(seed().goes(800, **rates).samples)
    assert seen(memories) == {"moving", "unclear", "expired"}
    unclear = first(memories, "unclear")
    assert unclear.now - LOADED_AT >= 60.0
    assert "nothing was produced" in unclear.verdict.why
    assert first(memories, "expired").verdict.kind == "unclear"


def test_a_starved_disk_with_every_counter_at_0_is_waiting_and_never_stuck():
    memories = watch(seed().goes(2000, states="DS").samples)
    assert seen(memories) == {"moving", "waiting", "expired"}
    assert first(memories, "waiting").verdict.kind == "disk"
    assert first(memories, "expired").now - LOADED_AT >= 1800.0


@pytest.mark.parametrize("every", [0.5, 1.0, 1.7, 2.0, 2.9])
@pytest.mark.parametrize("state", ["DS", "RS"])
def test_a_starved_start_is_never_stuck_however_slow_the_watcher(state, every):
    memories = watch(Story(every=every).goes(22, **BUSY).goes(100, states=state).samples)
    assert "stuck" not in seen(memories)


@pytest.mark.parametrize("every", [0.5, 1.0, 1.7, 2.0, 2.9])
def test_a_hang_is_found_however_slow_the_watcher(every):
    stuck = first(watch(Story(every=every).goes(22, **BUSY).goes(40).samples), "stuck")
    assert stuck.idle_for <= 10.0 + 2 * every


def test_the_floor_of_polling_threads_is_not_activity():
    # 1.73 % with 100 threads: the highest hung process measured.
    told = seed(members=(*Story().members[:2], Member(102, CORE.title, 100, 100, CORE.at)))
    told.goes(20, cpu=0.0173, faults=2.0, reads=300.0)
    assert first(watch(told.samples), "stuck").now - LOADED_AT <= 15.0


def test_a_runnable_thread_now_and_then_is_no_activity():
    told = seed()
    for n in range(20):
        told.goes(1, states="RS" if n % 3 == 0 else "S")  # a third; at most half of a hang's samples had one
    assert "stuck" in seen(watch(told.samples))


def test_a_tracker_in_disk_wait_does_not_count():
    samples = seed().goes(20).samples
    samples = [
        replace(
            s,
            tree=replace(
                s.tree,
                members=tuple(replace(p, thread_states="D") if "tracker" in p.title else p for p in s.tree.members),
            ),
        )
        for s in samples
    ]
    assert "stuck" in seen(watch(samples))


# ------------------------------------------------------------------------------------- time and limits


def test_a_gap_of_the_watcher_begins_the_stretch_anew():
    told = seed().goes(8)
    told.t += 20.0
    memories = watch(told.goes(9).samples)
    assert "stuck" not in seen(memories)
    assert first(watch(told.goes(6).samples), "stuck") is not None


@pytest.mark.parametrize(("patience", "at"), [(6.0, 6.0), (0.0, 5.0), (60.0, 10.0), (None, 10.0)])
def test_the_callers_patience_is_a_cap_and_never_less_than_a_window(patience, at):
    stuck = first(watch(seed().goes(20).samples, rules(limits=Limits(patience=patience))), "stuck")
    assert at <= stuck.idle_for <= at + 3.0


@pytest.mark.parametrize(("patience", "at"), [(30.0, 30.0), (600.0, 120.0)])
def test_the_cap_holds_for_the_long_patience_too(patience, at):
    told = seed().goes(130, stacks=Unseen("no py-spy"))
    stuck = first(watch(told.samples, rules(limits=Limits(patience=patience))), "stuck")
    assert at <= stuck.idle_for <= at + 1.0


def test_ready_within_ends_a_start_that_moves_all_the_time():
    memories = watch(seed().goes(100, **BUSY).samples, rules(deadline=1100.0, limits=Limits(ready_within=100.0)))
    expired = first(memories, "expired")
    assert (expired.now, expired.verdict.kind) == (1100.0, "ready_within")
    assert expired.verdict.why == "not ready within 100 s"


def test_a_start_that_is_over_names_the_hang_that_was_told_and_gives_its_advice_first():
    late = rules(deadline=1060.0, limits=Limits(ready_within=60.0))
    memories = watch(seed().goes(90).samples, late)
    stuck, expired = first(memories, "stuck"), first(memories, "expired")
    said = f"stuck ({stuck.verdict.kind}) in {stuck.verdict.phase} had been said {1060.0 - stuck.now:.0f} s before: "
    assert expired.verdict.why.startswith(f"not ready within 60 s; {said}nothing moved for ")
    assert stuck.verdict.why in expired.verdict.why
    assert diagnose_memory(expired).advice == (
        *diagnose_memory(stuck).advice, "raise ready_within if it was still moving",
    )  # fmt: skip


def test_one_that_moved_again_names_its_hang_too_and_is_not_said_to_stand():
    late = rules(deadline=1060.0, limits=Limits(ready_within=60.0))
    memories = watch(seed().goes(20).goes(40, **BUSY).samples, late)
    expired = first(memories, "expired")
    assert "had been said" in expired.verdict.why
    standing = {finding.hypothesis: finding.standing for finding in diagnose_memory(expired).findings}
    assert standing["CUDA graphs"] != "supported"
    assert standing["a slow load of the weights"] == "supported"


def test_unclear_that_is_over_does_not_count_towards_the_budget():
    told = seed()
    for _ in range(12):
        told.goes(90, cpu=1.0).goes(2, **BUSY)
    assert seen(watch(told.samples)) == {"moving", "unclear"}


def good(t: float) -> Reply:
    return Reply(state="good", since=t, status=200)


def test_an_answer_is_ready_and_stays_ready_while_idle():
    told = seed().goes(1, **BUSY, answer=good(1023.0)).goes(400, answer=good(1023.0))
    memories = watch(told.samples, rules(deadline=1100.0))
    assert first(memories, "ready").now == 1023.0
    assert seen(memories) == {"moving", "ready"}
    assert memories[-1].verdict.phase == "serving"
    ask = next_ask(memories[-1])
    dear = {ask.stacks, ask.thread_states, ask.growth, ask.locks}
    assert dear == {False}, "nothing dear is asked of a ready server"


@pytest.mark.parametrize("state", ["not-asked", "waiting", "failed"])
def test_a_request_without_an_answer_is_neither_ready_nor_progress(state):
    told = seed().goes(20, answer=Reply(state=state, since=1000.0))
    assert seen(watch(told.samples)) <= {"moving", "unclear", "stuck"}
    assert "stuck" in seen(watch(told.samples))


def test_a_bad_answer_is_unclear_and_expires():
    told = seed().goes(700, answer=Reply(state="bad", since=1022.0, status=404, detail="no such model"))
    memories = watch(told.samples)
    assert "status 404: no such model" in first(memories, "unclear").verdict.why
    assert "stuck" not in seen(memories)
    assert memories[-1].verdict.kind == "unclear"


def test_a_bad_answer_while_it_still_loads_does_not_expire():
    told = seed().goes(900, **BUSY, answer=Reply(state="bad", since=1022.0, status=503))
    assert "expired" not in seen(watch(told.samples))


# -------------------------------------------------------------------------------------------- endings


def test_an_exit_is_told_with_its_phase_and_reason():
    told = seed().loses(102, 1).loses(101, 0).loses(100, 1).goes(2)
    verdict = assess(told.samples, rules())
    assert (verdict.verdict, verdict.phase, verdict.exit_code) == ("exited", "weights-load", 1)
    assert (verdict.kind, verdict.permanent) == ("crash", False)


def test_fork_and_exit_is_no_end():
    told = seed().loses(100, 0).goes(60, **BUSY)
    assert seen(watch(told.samples)) == {"moving"}


def test_one_that_forked_and_then_answered_is_ready():
    told = seed().loses(100, 0).goes(20, **BUSY).goes(60, answer=good(1042.0))
    assert watch(told.samples)[-1].verdict.verdict == "ready"


def test_a_launcher_that_was_gone_before_the_first_look_is_not_taken_for_the_server_that_it_left():
    told = seed().loses(100, 0).goes(20, **BUSY).goes(60, answer=good(1042.0))
    memories = watch([sample for sample in told.samples if sample.exit is not None])
    assert memories[0].root == (100, 100)
    assert seen(memories) == {"moving", "ready"}


def test_the_end_of_what_was_left_is_the_end():
    told = seed().loses(100, 0).goes(20, **BUSY).loses(102, -9).loses(101, 0).goes(1)
    verdict = assess(told.samples, rules())
    assert (verdict.verdict, verdict.kind) == ("exited", "crash")
    assert "ENGINE::Worker_0 (pid 102) ended by signal 9" in verdict.why


def test_members_may_outlive_a_failed_launch_for_a_while_and_are_then_named():
    told = seed().loses(100, 1).goes(9, **BUSY)
    assert "exited" not in seen(watch(told.samples))
    verdict = assess(told.goes(3, **BUSY).samples, rules())
    assert verdict.verdict == "exited"
    assert "still there: ENGINE::Worker_0 (102)" in verdict.why


def test_the_phase_of_an_end_is_not_the_one_into_which_those_that_are_left_go_on():
    told = Story().goes(22, **BUSY, lines=("Starting to load model",)).loses(100, -9)
    told.goes(4, **BUSY, lines=("Loading weights took 3 s",)).goes(9, **BUSY)
    memory = watch(told.samples)[-1]
    assert memory.place.phase == "kv-cache"
    assert (memory.verdict.verdict, memory.verdict.kind, memory.verdict.phase) == ("exited", "signal", "weights-load")


def test_a_tracker_that_outlives_the_rest_is_nobody():
    told = seed().loses(102, 1).loses(100, 1).goes(1)
    assert assess(told.samples, rules()).verdict == "exited"


def test_a_ready_server_that_ends_has_exited():
    told = seed().goes(5, answer=good(1023.0)).loses(102, 0).loses(100, 0).goes(1)
    verdict = assess(told.samples, rules())
    assert (verdict.verdict, verdict.kind) == ("exited", "finished")
    assert "after it was ready" in verdict.why


def test_an_exit_counts_even_when_the_rest_cannot_be_seen():
    told = seed().loses(100, 3).goes(12, hide=("tree",))
    assert assess(told.samples, rules()).exit_code == 3


def test_an_end_with_code_0_and_nothing_seen_is_unclear():
    told = seed().loses(100, 0).goes(60, hide=("tree",))
    assert assess(told.samples, rules()).verdict == "unclear"


# ------------------------------------------------------------------------------------ what to look at


def test_the_dear_sources_are_asked_only_when_flat():
    memories = watch(seed().goes(20).samples)
    asked = [next_ask(m) for m in memories]
    assert not any(a.stacks or a.thread_states for a in asked[:22])
    assert all(a.thread_states for a in asked[24:])
    looks = [m.now for m, a in zip(memories, asked, strict=True) if a.stacks]
    assert all(later - look >= 2.5 for look, later in pairwise(looks))


def test_stacks_that_were_not_asked_for_are_not_missing():
    told = Story().goes(10, **BUSY, stacks=NOT_ASKED)
    assert assess(told.samples, rules()).unseen == ()


# ------------------------------------------------------------------------- two agreeing looks at stacks


def test_one_look_at_the_stacks_is_not_enough():
    told = seed().goes(5).goes(80, stacks=Unseen("py-spy died"))
    memories = watch(told.samples)
    assert memories[-1].agreement is not None
    assert "stuck" not in seen(memories)
    assert "py-spy died" in memories[-1].verdict.why


def test_stacks_from_before_a_movement_do_not_count_after_it():
    told = seed().goes(9).goes(1, **BUSY).goes(80, stacks=Unseen("py-spy died"))
    assert "stuck" not in seen(watch(told.samples))


@pytest.mark.parametrize("pid", [100, 102])
def test_a_member_whose_stack_is_refused_costs_the_long_patience(pid):
    told = seed().goes(80)
    refused = Unseen("operation not permitted")
    samples = [
        replace(s, stacks=tuple(replace(k, threads=refused) if k.pid == pid else k for k in s.stacks))
        for s in told.samples
    ]
    memories = watch(samples)
    assert "stuck" not in seen(memories)
    assert "operation not permitted" in memories[-1].verdict.why


def test_a_tracker_whose_stack_is_refused_does_not_matter():
    told = seed().goes(20)
    samples = [
        replace(s, stacks=tuple(replace(k, threads=NEVER) if k.pid == 101 else k for k in s.stacks))
        for s in told.samples
    ]
    assert "stuck" in seen(watch(samples))


def test_a_known_heartbeat_is_no_news_even_the_first_time():
    told = seed().goes(8).goes(1, lines=("worker: still waiting, 60 seconds",)).goes(3)
    assert "stuck" in seen(watch(told.samples))


def test_a_channel_that_the_kernel_does_not_tell_is_said_so():
    assert "the kernel does not tell" in watch(seed().moves_to(102, channel="").goes(20).samples)[-1].verdict.why


# ------------------------------------------------------------------------------------ a watcher that is late


UP_AND_UNASKED = ("wait threading.py", "get queue.py", "run_busy_loop core.py")


def up_and_unasked(*at, listener, seconds):
    """Every worker waits for work, and the request of the watcher does not come: a starved machine starves it too."""
    places = (IdlePlace(loop="run_busy_loop", inside="get|wait"),)
    told = Story().goes(22, **BUSY).moves_to(CORE.pid, *at).goes(seconds)
    port = Port(port=8000, listener=listener)
    return watch([replace(sample, port=port) for sample in told.samples], rules(idle_places=places))


def test_a_server_that_listens_and_waits_for_work_is_not_stuck_because_it_was_not_asked_yet():
    listener = Listener(pid=API.pid, title=API.title, ours=True)
    assert "stuck" not in seen(up_and_unasked(*UP_AND_UNASKED, listener=listener, seconds=100))
    assert (
        first(up_and_unasked(*UP_AND_UNASKED, listener=listener, seconds=140), "stuck").verdict.confidence == "medium"
    )


def test_but_it_is_where_nobody_listens_or_a_worker_waits_for_something_else():
    listener = Listener(pid=API.pid, title=API.title, ours=True)
    assert "stuck" in seen(up_and_unasked(*UP_AND_UNASKED, listener=None, seconds=20))
    assert "stuck" in seen(up_and_unasked("acquire lock.py", "run_busy_loop core.py", listener=listener, seconds=20))
