"""After ready: a hang is called only where somebody waits, nothing comes out and nothing works."""

from dataclasses import replace

import pytest
from asked import API, FLOOR, IDLE, KERNEL, LOCKED, PREFILL, SITES, WORKER, Asked, served
from making import MIB, Member, Story, frames, gpu

from hangguard.facts import Departed, Exit, GpuHolder, Unseen, WaitSite
from hangguard.judge import next_ask
from hangguard.judge.at_work import look_of, what_works

OFF = Unseen("the route of the metrics answers 404")
OURS = (GpuHolder(pid=102, used_bytes=70 << 30),)
STRANGER = (*OURS, GpuHolder(pid=9999, used_bytes=1 << 30))


def flows(server: Asked, seconds: int = 20) -> Asked:
    """Eight requests at work, 480 tokens a second, and watts to match."""
    return server.goes(seconds, running=8, tokens=480, at=PREFILL, percent=90, watts=300.0, cpu=0.5)


def found_after(server: Asked, since: float) -> float | None:
    stuck = server.first("stuck")
    return None if stuck is None else stuck.now - since


# ---------------------------------------------------------------------------------------------- healthy


def test_a_server_whom_nobody_asks_is_ready_for_ever():
    server = Asked().goes(900)
    assert server.seen() == {"ready"}
    assert server.verdict.why == "idle: nobody asks"
    assert not any(next_ask(m).stacks for m in server.memories)


def test_a_server_at_work_says_how_much():
    server = flows(Asked())
    assert server.seen() == {"ready"}
    assert server.verdict.why == "serving: 8 requests, GPU 0 at 300 W, 480 tokens/s"


def test_without_watts_the_tokens_tell():
    server = Asked().goes(20, running=12, tokens=480, cpu=0.5)
    assert server.verdict.why == "serving: 12 requests, 480 tokens/s"


def test_a_long_prefill_at_working_power_is_no_hang():
    server = flows(Asked()).goes(240, running=1, at=KERNEL, percent=98, watts=280.0, cpu=1.0)
    assert server.seen() == {"ready"}
    assert server.verdict.why.startswith("prefill: 1 request, GPU 0 at 280 W")


def test_overload_is_no_hang_while_tokens_move():
    server = Asked().goes(300, running=16, waiting=400, tokens=3, at=LOCKED, percent=3)
    assert server.seen() == {"ready"}


def test_a_prefill_on_a_cpu_engine_is_no_hang():
    server = Asked(story=Story(members=(API, WORKER), gpus=False)).goes(1, running=1, at=PREFILL, cpu=1.0)
    for n in range(100):
        server.goes(3, running=1, at=(f"layer_{n % 7} model.py", *PREFILL), cpu=1.0)
    assert server.seen() == {"ready"}


def test_a_first_request_that_compiles_in_children_is_no_hang():
    server = Asked()
    server.story.gains(Member(300, "/usr/local/cuda/bin/cicc x.cu", 102, 1, python=False, cpu=0.9, name="cicc"))
    server.goes(110, running=1, at=("wait subprocess.py", *PREFILL))
    assert server.seen() == {"ready"}


@pytest.mark.parametrize(
    ("grown", "said"),
    [
        ({"read_chars": 50 * MIB}, "bytes read by ENGINE::Worker_ (102)"),
        ({"minor_faults": 5000}, "page faults of ENGINE::Worker_ (102)"),
    ],
)
def test_a_worker_that_reads_or_touches_memory_works(grown, said):
    tree = Story(members=(API, WORKER)).goes(1).samples[-1].tree
    earlier, worker = look_of(tree, 0.0), tree.members[1]
    assert what_works(worker, earlier, 5.0, served(), (), frozenset()) == ""
    assert what_works(replace(worker, **grown), earlier, 5.0, served(), (), frozenset()) == said
    front = replace(tree.members[0], **grown)
    assert what_works(front, earlier, 5.0, served(), (), frozenset()) == "", "a front end reads what clients send"


def test_idle_connections_of_a_pool_are_no_requests():
    server = Asked().goes(700, clients=20)
    assert server.seen() == {"ready"}
    assert "20 clients are connected" in server.verdict.why


@pytest.mark.parametrize("counters", [None, OFF])
def test_a_canary_behind_a_long_queue_is_no_hang(counters):
    server = Asked().goes(15, clients=3, counters=counters)
    server.goes(200, clients=3, counters=counters, canary="waiting", at=PREFILL, percent=95, watts=300.0, cpu=0.9)
    assert server.seen() == {"ready"}


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_a_refused_canary_is_a_living_server(status):
    server = Asked().goes(60, clients=2, counters=OFF, canary="bad", status=status)
    assert server.canaries == 1
    assert server.memory.serving.produced_by == "an answer"


def test_a_canary_answered_with_503_proves_nothing_either_way():
    server = Asked().goes(120, clients=2, counters=OFF, canary="bad", status=503)
    assert server.seen() == {"ready"}
    assert server.memory.serving.produced_by != "an answer"


# ------------------------------------------------------------------------------------------------ hung


def test_requests_without_tokens_and_a_worker_in_a_lock_are_stuck_within_30_s():
    server = flows(Asked())
    t = server.memory.now
    server.goes(60, running=8, at=LOCKED)
    assert found_after(server, t) <= 25.0
    verdict = server.first("stuck").verdict
    assert (verdict.kind, verdict.phase, verdict.confidence) == ("serving", "serving", "high")
    assert "8 requests are running" in verdict.why
    assert "Worker_0 (102) stands in acquire" in verdict.why
    assert verdict.suspects[0].note == "outside its idle loop"
    numbers = {m.name: m.value for m in verdict.numbers}
    assert (numbers["requests running"], numbers["tokens generated"]) == (8.0, 480.0 * 20)


def test_one_request_is_said_to_be_one():
    server = flows(Asked()).goes(60, running=1, at=LOCKED)
    assert "1 request is running and 0 waiting" in server.memory.verdict.why


def test_a_kernel_that_never_ends_is_busy_at_floor_power():
    server = flows(Asked())
    t = server.memory.now
    server.goes(60, running=8, at=KERNEL, percent=100, watts=FLOOR + 2)
    assert found_after(server, t) <= 30.0
    assert "GPU 0 is busy at 122 W, its floor" in server.first("stuck").verdict.why


def test_busy_at_floor_power_is_found_without_stacks_too_but_later():
    server = flows(Asked())
    t = server.memory.now
    server.goes(120, running=8, percent=100, watts=FLOOR + 2, stacks=Unseen("no py-spy"))
    assert 58.0 <= found_after(server, t) <= 75.0
    assert server.first("stuck").verdict.confidence == "medium"


def test_without_stacks_the_long_patience_decides():
    server = flows(Asked())
    t = server.memory.now
    server.goes(180, running=8, stacks=Unseen("no py-spy"))
    assert 118.0 <= found_after(server, t) <= 130.0
    assert server.first("unclear").verdict.why.endswith("no py-spy")


def test_two_looks_are_needed():
    server = flows(Asked())
    t = server.memory.now
    server.goes(11, running=8, at=LOCKED).goes(60, running=8, stacks=Unseen("py-spy died"))
    assert "stuck" not in server.seen()
    assert server.memory.now - t > 60.0


@pytest.mark.parametrize(
    ("holders", "watts"), [(STRANGER, FLOOR), (OURS, Unseen("no power on this board"))], ids=["neighbour", "no watts"]
)
def test_where_it_cannot_be_told_whether_a_gpu_works_there_is_no_quick_verdict(holders, watts):
    server = Asked()
    server.goes(200, running=8, at=KERNEL, gpus=(gpu(percent=100, used=70 << 30, watts=watts, holders=holders),))
    assert "stuck" not in server.seen()


def test_unreadable_gpus_are_no_idle_gpus():
    server = Asked().goes(200, running=8, at=KERNEL, gpus=Unseen("NVML does not answer"))
    assert "stuck" not in server.seen()


def test_a_hot_core_in_an_unknown_place_is_not_called_stuck_soon():
    server = flows(Asked())
    t = server.memory.now
    server.goes(100, running=8, at=LOCKED, cpu=1.0)
    assert found_after(server, t) >= 58.0


def test_a_hot_core_on_a_machine_without_gpus_never_is():
    server = Asked(story=Story(members=(API, WORKER), gpus=False))
    server.goes(400, running=8, at=LOCKED, cpu=1.0)
    assert "stuck" not in server.seen()


def test_gauges_that_never_left_the_engine_core_leave_it_to_a_canary():
    """vLLM that hangs in the first step after idling says 0 running, 0 waiting, and its health is 200."""
    server = Asked()
    server.goes(60, clients=1)
    t = server.memory.now
    server.goes(160, clients=1, at=LOCKED, canary="waiting")
    stuck = server.first("stuck")
    assert stuck is not None
    assert stuck.now - t <= 160
    assert server.canaries <= 3
    assert "a test request is open" in stuck.verdict.why


def test_a_canary_that_is_never_answered_is_enough_where_nothing_works():
    server = Asked(by=served(idle_places=())).goes(120, clients=1, counters=OFF, canary="waiting")
    stuck = server.first("stuck")
    assert stuck.verdict.confidence == "medium"
    assert "not answered for 20 s" in stuck.verdict.why


def test_a_canary_alone_proves_nothing_while_a_worker_uses_its_cpu():
    server = Asked(by=served(idle_places=())).goes(300, clients=1, counters=OFF, canary="waiting", cpu=0.9)
    assert "stuck" not in server.seen()


def test_old_numbers_do_not_count():
    """Eight requests ran when the metrics were read last; they may be done."""
    server = flows(Asked())
    server.goes(200, counters=OFF, at=LOCKED)
    assert "stuck" not in server.seen()


def test_a_worker_that_waits_for_a_lock_file_is_waiting():
    server = flows(Asked())
    server.goes(60, running=1, at=("acquire filelock/_api.py", *PREFILL))
    assert server.verdict.verdict == "waiting"
    assert server.verdict.kind == "lock"
    assert "stuck" not in server.seen()


def test_noise_in_the_log_does_not_hide_it_and_news_does():
    hung = {"running": 8, "at": LOCKED}
    noisy = flows(Asked()).goes(60, **hung, every_second=("1.1.1.1 throughput: 0.0 tokens/s",))
    assert "stuck" in noisy.seen()
    telling = flows(Asked())
    for n in range(60):
        telling.goes(1, **hung, lines=(f"step {'abcdefghij'[n % 10]}{'xyz'[n % 3]}{'q' * n} done",))
    assert "stuck" not in telling.seen()


def test_after_tokens_the_count_begins_anew():
    server = flows(Asked())
    for _ in range(6):
        server.goes(17, running=8, at=LOCKED).goes(2, running=8, tokens=10, at=PREFILL)
    assert "stuck" not in server.seen()


def test_a_request_after_a_long_idle_time_is_not_old():
    server = Asked().goes(600, clients=5).goes(15, clients=5, running=1, at=LOCKED)
    assert server.seen() == {"ready"}


# ---------------------------------------------------------------------------------------------- stopped


def test_a_stopped_worker_is_found_also_while_nobody_asks():
    server = Asked()
    t = server.memory.now
    server.story.stops(102)
    server.goes(18)
    assert 10.0 <= found_after(server, t) <= 13.0
    verdict = server.first("stuck").verdict
    assert (verdict.kind, verdict.phase) == ("stopped", "serving")
    assert "SIGCONT" in verdict.why
    assert verdict.suspects[0].pid == 102


def test_a_moment_in_a_debugger_is_no_stop():
    server = Asked()
    for _ in range(10):
        server.story.stops(102, "t")
        server.goes(4)
        server.story.stops(102, None)
        server.goes(2)
    assert server.seen() == {"ready"}


def test_a_stopped_front_end_is_not_a_stopped_worker():
    server = Asked()
    server.story.stops(100)
    server.goes(20)
    assert "stuck" not in server.seen()


# ------------------------------------------------------------------------------------------ quiet, sleep


def test_quiet_that_was_asked_for_is_waiting_and_its_end_begins_the_count_anew():
    server = flows(Asked())
    until = server.memory.now + 1900.0
    server.goes(1890, running=8, at=LOCKED, quiet_until=until)
    assert server.seen() == {"ready", "waiting"}
    assert (server.verdict.kind, server.canaries) == ("quiet", 0)
    t = server.memory.now
    server.goes(60, running=8, at=LOCKED, quiet_until=until)
    assert found_after(server, t) >= 20.0


def test_a_sleeping_engine_is_never_stuck_and_gets_no_canary():
    server = Asked().goes(1900, running=2, clients=2, asleep=True, at=LOCKED)
    assert server.verdict.verdict == "waiting"
    assert server.seen() == {"ready", "waiting"}
    assert server.canaries == 0
    assert next_ask(server.memory) == type(next_ask(server.memory))()


# ------------------------------------------------------------------------------------------ the canary


def test_canaries_to_an_idle_server_are_rare():
    server = Asked().goes(1500)
    assert server.canaries <= 2


def test_no_canary_while_the_counters_tell():
    server = Asked()
    for _ in range(30):
        flows(server, 10).goes(5, running=8, at=PREFILL, cpu=0.5)
    assert server.canaries == 0


def test_canaries_back_off_while_they_are_answered():
    server = Asked().goes(1500, clients=4)
    assert 3 <= server.canaries <= 6


def test_no_canary_in_the_first_seconds_of_silence():
    server = Asked().goes(16, clients=4)
    assert server.canaries == 0


# ---------------------------------------------------------------------------------------- what is unseen


def test_a_moment_without_the_processes_begins_the_count_anew():
    server = flows(Asked())
    server.goes(15, running=8, at=LOCKED).goes(1, running=8, hide=("tree",)).goes(15, running=8)
    assert "stuck" not in server.seen()


def test_unseen_processes_of_a_ready_server_are_said_and_no_verdict():
    server = Asked().goes(100, running=8, hide=("tree",))
    assert server.seen() == {"ready"}
    assert "its processes cannot be seen" in server.verdict.why


def test_a_launched_process_that_has_just_ended_is_no_hang():
    server = flows(Asked())
    server.story.exit = Exit(code=-9, at=server.story.t)
    server.goes(9, running=8, at=LOCKED)
    assert "stuck" not in server.seen()


def test_an_engine_that_polls_when_idle_and_does_not_is_asked():
    """SGLang's scheduler burns a core while it waits: at 0 % it is asked, and a canary decides."""
    server = Asked(by=served(idle_spins=True)).goes(12, cpu=1.0)
    server.goes(200, at=LOCKED, canary="waiting")
    assert server.first("stuck") is not None
    healthy = Asked(by=served(idle_spins=True)).goes(200, at=IDLE)
    assert healthy.seen() == {"ready"}


def test_two_workers_of_which_one_hangs_name_that_one_first():
    core = Member(101, "ENGINE::Worker_core", 100, 20, frames("dequeue mq.py", "step core.py", "run_busy_loop core.py"))
    server = Asked(story=Story(members=(API, core, Member(102, "ENGINE::Worker_0", 101, 40, frames(*IDLE)))))
    flows(server)
    server.goes(60, running=8, at=LOCKED)
    assert [s.pid for s in server.first("stuck").verdict.suspects] == [102, 101]


def test_a_departed_helper_is_nobodys_business():
    server = Asked()
    server.story.departed = (Departed(pid=7, started=7, title="cc1plus", exit_code=1, noticed_at=server.story.t),)
    assert server.goes(60).seen() == {"ready"}


# ---------------------------------------------------------------------------------------------- ranks

REDUCE = ("all_reduce cpu_communicator.py", "forward model.py", "execute_model runner.py", "run_busy_loop core.py")
LOOP = ("spin runner.py", "execute_model runner.py", "run_busy_loop core.py")
COLLECTIVE = WaitSite(function="all_reduce", file="cpu_communicator", waits_for="collective")


def two_ranks(*, at, titles=("ENGINE::Worker_TP0", "ENGINE::Worker_TP1"), late=1, cpu=1.0, seconds=100) -> Asked:
    """Two ranks without GPUs: one stands at ``at`` with a core of its own use, the other burns one in a collective."""
    places = [frames(*REDUCE), frames(*REDUCE)]
    places[late] = frames(*at)
    ranks = [Member(102 + n, titles[n], 100, 40, places[n], cpu=(cpu if n == late else 1.0)) for n in (0, 1)]
    idle = [replace(member, at=frames(*IDLE), cpu=0.0) for member in ranks]
    server = Asked(by=served(wait_sites=(*SITES, COLLECTIVE)), story=Story(members=(API, *idle), gpus=False))
    server.goes(5, running=1, tokens=30)
    server.story.members = (API, *ranks)
    return server.goes(seconds, running=1)


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_locks_up_is_named_before_the_one_that_burns_a_core_in_the_collective(late):
    server = two_ranks(at=LOCKED, late=late, cpu=0.0)
    verdict = server.first("stuck").verdict
    assert (verdict.kind, verdict.confidence) == ("serving", "high")
    assert verdict.still_for < 30
    assert [s.rank for s in verdict.suspects] == [f"TP{late}", f"TP{1 - late}"]
    assert verdict.suspects[1].note == "waits for a peer in all_reduce (cpu_communicator.py)"


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_with_a_hot_core_in_one_place_for_which_all_others_wait_is_stuck_also_without_gpus(late):
    server = two_ranks(at=LOOP, late=late)
    verdict = server.first("stuck").verdict
    assert (verdict.kind, verdict.confidence) == ("serving", "medium")
    assert verdict.still_for >= 60
    assert "while all other ranks wait for it in a collective" in verdict.why
    assert [s.rank for s in verdict.suspects] == [f"TP{late}", f"TP{1 - late}"]


def test_a_rank_that_goes_round_through_its_functions_is_at_work_while_the_others_wait_for_it():
    server = two_ranks(at=LOOP, seconds=1)
    for n in range(100):
        server.story.moves_to(103, f"layer_{n % 7} model.py", *LOOP)
        server.goes(3, running=1)
    assert server.seen() == {"ready"}


@pytest.mark.parametrize(
    "titles",
    [
        ("ENGINE::Worker_PP0_TP0", "ENGINE::Worker_PP1_TP0"),
        ("ENGINE::Worker_DP0_TP0", "ENGINE::Worker_DP1_TP0"),
        ("ENGINE::Worker_TP0_EP0", "ENGINE::Worker_TP1_EP1"),
    ],
)
def test_ranks_that_do_unequal_shares_may_wait_for_long_without_gpus(titles):
    server = two_ranks(at=LOOP, titles=titles, seconds=400)
    assert "stuck" not in server.seen()


def test_ranks_that_all_compute_in_one_place_without_gpus_are_not_called_stuck():
    server = two_ranks(at=LOOP, seconds=1)
    server.story.moves_to(102, *LOOP)
    assert "stuck" not in server.goes(400, running=1).seen()
