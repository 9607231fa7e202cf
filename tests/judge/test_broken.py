"""Broken: somebody died and others hang on, a board is at fault, or the driver keeps a member."""

from dataclasses import replace

import pytest
from asked import API, IDLE, LOCKED, PREFILL, WORKER, Asked
from making import BUSY, SERVER, TRACKER, Member, Story, first, frames, gpu, rules, seen, watch

from hangguard.facts import GpuFault, GpuHolder, Unseen
from hangguard.judge import assess
from hangguard.judge.trouble import BROKEN_XIDS, DRIVER_CHANNEL, WORN_XIDS

OTHER = Member(103, "ENGINE::Worker_1", 100, 40, frames("all_reduce distributed_c10d.py", "load_model runner.py"))
TWO = (*SERVER, OTHER)


def loaded(**story) -> Story:
    return Story(**story).goes(22, **BUSY)


# -------------------------------------------------------------------------------------------- survivors


@pytest.mark.parametrize("code", [-9, -11, 1, -15, Unseen("the kernel is older than 6.15")])
def test_a_dead_worker_and_others_that_hang_on_are_broken(code):
    told = loaded(members=TWO).loses(103, code)
    t = told.t
    broken = first(watch(told.goes(40).samples), "broken")
    assert 9.0 <= broken.now - t <= 13.0
    verdict = broken.verdict
    assert verdict.kind == "survivors"
    assert [s.pid for s in verdict.suspects] == [103, 100, 102]
    assert verdict.suspects[0].note.startswith("died first")
    assert verdict.confidence == ("high" if isinstance(code, int) else "medium")


def test_the_phase_is_that_of_the_death_and_not_the_one_into_which_the_others_went_on():
    told = Story(members=TWO).goes(22, **BUSY, lines=("Starting to load model",)).loses(103, -9)
    told.goes(4, **BUSY, lines=("Loading weights took 3 s",)).goes(40)
    broken = first(watch(told.samples), "broken")
    assert broken.place.phase == "kv-cache"
    assert broken.verdict.phase == "weights-load"


@pytest.mark.parametrize(
    ("codes", "first_pid"), [((1, -9), 103), ((-9, 1), 102), ((1, 1), 102), ((-6, -9), 103), ((-6, 1), 102)]
)
def test_of_those_that_ended_within_one_look_the_killed_one_is_the_first(codes, first_pid):
    third = replace(OTHER, pid=104, title="ENGINE::Worker_2")
    told = loaded(members=(*TWO, third)).loses(102, codes[0]).loses(103, codes[1])
    assert first(watch(told.goes(40).samples), "broken").verdict.suspects[0].pid == first_pid


def test_a_death_some_seconds_before_is_the_first_whatever_ended_it():
    third = replace(OTHER, pid=104, title="ENGINE::Worker_2")
    told = loaded(members=(*TWO, third)).loses(102, 1).goes(3).loses(103, -9)
    assert first(watch(told.goes(40).samples), "broken").verdict.suspects[0].pid == 102


def test_a_worker_that_was_seen_only_once_counts_and_a_child_with_its_parents_title_does_not():
    worker = Member(104, "ENGINE::Worker_2", 100, 40, OTHER.at)
    child = replace(worker, pid=105, title=OTHER.title, parent=OTHER.pid)
    for member, verdict in ((worker, "broken"), (child, "stuck")):
        told = loaded(members=TWO).gains(member).goes(1).loses(member.pid, -9).goes(40)
        assert {"broken", "stuck"} & seen(watch(told.samples)) == {verdict}


def test_a_worker_that_ended_with_0_is_not():
    assert "broken" not in seen(watch(loaded(members=TWO).loses(103, 0).goes(60).samples))


def test_a_compiler_or_a_tracker_that_failed_is_not():
    compiler = Member(104, "/usr/bin/cc1plus -quiet x.cpp", 102, 1, python=False)
    told = loaded(members=(*SERVER, compiler)).loses(104, -11).loses(TRACKER.pid, -9)
    assert "broken" not in seen(watch(told.goes(60).samples))


def test_as_long_as_anything_is_produced_nobody_hangs_on():
    told = loaded(members=TWO).loses(103, -9).goes(60, **BUSY)
    assert seen(watch(told.samples)) == {"moving"}


def test_one_that_was_replaced_is_not_missed():
    told = loaded(members=TWO).loses(103, -9).goes(2).gains(replace(OTHER, pid=203)).goes(60)
    assert "broken" not in seen(watch(told.samples))


def test_while_others_still_go_it_is_a_farewell():
    told = loaded(members=(*TWO, replace(OTHER, pid=104), replace(OTHER, pid=105))).loses(103, -9)
    told.goes(8).loses(104, 1).goes(8).loses(105, 1).goes(8)
    assert "broken" not in seen(watch(told.samples))
    assert first(watch(told.goes(6).samples), "broken").verdict.suspects[0].pid == 103


def test_sglang_says_how_long_it_gathers_what_a_crash_left():
    told = loaded(members=TWO).loses(103, -9)
    told.goes(
        2, lines=("[2026-11-29 15:14:05] Sleeping 5 seconds before crash diagnostics to let GPU activity settle.",)
    )
    told.goes(70, lines=("[2026-11-29 15:14:10] Waiting 60.0 seconds for CUDA coredumps before exiting.",))
    assert "broken" not in seen(watch(told.samples))
    assert "broken" in seen(watch(told.goes(30).samples))


def test_the_end_of_the_launched_process_is_an_exit():
    verdict = assess(loaded().loses(100, -9).goes(15).samples, rules())
    assert (verdict.verdict, verdict.kind) == ("exited", "signal")


def test_a_program_of_which_nothing_is_known_may_lose_a_helper_once_it_has_answered():
    helper = Member(104, "python helper.py", 102, 1)
    unknown = rules(workers=(), front_end=())
    told = loaded(members=(*SERVER, helper)).loses(104, -9)
    assert "broken" in seen(watch(told.goes(30).samples, unknown))
    server = Asked(by=unknown, story=Story(members=(API, WORKER, helper)))
    server.story.loses(104, -9)
    assert server.goes(60).seen() == {"ready"}


def test_a_ready_server_that_lost_a_worker_is_broken_also_while_nobody_asks():
    server = Asked(story=Story(members=(API, WORKER, OTHER)))
    server.story.loses(103, -9)
    server.goes(30)
    assert server.first("broken").verdict.kind == "survivors"


def test_but_not_while_tokens_come():
    server = Asked(story=Story(members=(API, WORKER, OTHER)))
    server.story.loses(103, -9)
    assert server.goes(60, running=4, tokens=30, cpu=0.4).seen() == {"ready"}


# --------------------------------------------------------------------------------------------- hardware


HELD = (GpuHolder(pid=102, used_bytes=1),)


def with_fault(fault: GpuFault, *, moving=False):
    told = Story(holders=HELD).goes(5, **BUSY)
    board = replace(gpu(holders=HELD), faults=(fault,))
    return watch(told.goes(30, **(BUSY if moving else {}), gpus=(board,)).samples)


@pytest.mark.parametrize("fault", [
    GpuFault(kind="xid", code=79, at=1003.0), GpuFault(kind="lost", at=1003.0),
    GpuFault(kind="xid", code=48, at=1003.0),
    GpuFault(kind="xid", code=119, at=1003.0),
])  # fmt: skip
def test_a_board_that_is_gone_is_broken_at_once(fault):
    memories = with_fault(fault, moving=True)
    broken = first(memories, "broken")
    assert broken.now == 1006.0
    assert (broken.verdict.kind, broken.verdict.confidence) == ("hardware", "high")
    assert "no flag helps" in broken.verdict.why


@pytest.mark.parametrize("fault", [
    GpuFault(kind="xid", code=63, at=1003.0), GpuFault(kind="xid", code=94, at=1003.0),
    GpuFault(kind="ecc", at=1003.0),
    GpuFault(kind="fabric", at=1003.0), GpuFault(kind="remapped-rows", at=1003.0),
])  # fmt: skip
def test_what_a_program_may_outlive_counts_only_when_nothing_moves(fault):
    assert "broken" not in seen(with_fault(fault, moving=True))
    assert "broken" in seen(with_fault(fault))


@pytest.mark.parametrize("code", [13, 31, 43, 45, 68, 69])
def test_faults_of_programs_are_not_the_boards(code):
    memories = with_fault(GpuFault(kind="xid", code=code, at=1003.0, by_program=True))
    assert "broken" not in seen(memories)
    assert not {code} & (BROKEN_XIDS | WORN_XIDS)


@pytest.mark.parametrize("at", [None, 900.0], ids=["there before", "of an attempt before"])
def test_faults_from_before_the_launch_do_not_count(at):
    assert "broken" not in seen(with_fault(GpuFault(kind="xid", code=79, at=at)))


def test_nor_do_those_of_a_board_that_no_member_uses():
    neighbour = (GpuHolder(pid=9999, used_bytes=1),)
    told = Story(holders=(GpuHolder(pid=102, used_bytes=1),)).goes(5, **BUSY)
    ours = gpu(holders=(GpuHolder(pid=102, used_bytes=1),))
    other = replace(gpu(holders=neighbour, index=1), faults=(GpuFault(kind="xid", code=79, at=1003.0),))
    assert "broken" not in seen(watch(told.goes(30, gpus=(ours, other)).samples))


def test_in_a_container_where_pids_cannot_be_told_it_takes_a_standstill_and_is_less_sure():
    strangers = (GpuHolder(pid=4_000_001, used_bytes=1),)
    lost = GpuFault(kind="lost", at=1003.0)
    told = Story(holders=strangers).goes(5, **BUSY)
    board = replace(gpu(holders=strangers), faults=(lost,))
    assert "broken" not in seen(watch(told.goes(20, **BUSY, gpus=(board,)).samples))
    assert first(watch(told.goes(20, gpus=(board,)).samples), "broken").verdict.confidence == "medium"


def test_an_exit_after_a_lost_board_is_the_hardwares_and_permanent():
    lost = replace(gpu(holders=(GpuHolder(pid=102, used_bytes=1),)), faults=(GpuFault(kind="lost", at=1003.0),))
    told = Story().goes(5, **BUSY).loses(102, -6).loses(101, 0).loses(100, 1).goes(1, gpus=(lost,))
    verdict = assess(told.samples, rules())
    assert (verdict.kind, verdict.permanent) == ("hardware", True)


# ----------------------------------------------------------------------------------------------- wedged


@pytest.mark.parametrize("channel", ["uvm_va_space_mm_shutdown", "nvidia_close", "os_acquire_mutex", "nv_wait_for"])
def test_a_member_that_the_driver_keeps_is_wedged(channel):
    told = loaded().moves_to(102, channel=channel)
    t = told.t
    broken = first(watch(told.goes(60, states="D").samples), "broken")
    assert 30.0 <= broken.now - t <= 45.0
    assert (broken.verdict.kind, broken.verdict.suspects[0].pid) == ("wedged", 102)
    assert channel in broken.verdict.why


@pytest.mark.parametrize(
    "channel", ["nvme_submit_io", "kernel_clone", "folio_wait_bit_common", "rpc_wait_bit_killable"]
)
def test_a_disk_and_a_vfork_are_not_the_driver(channel):
    assert not DRIVER_CHANNEL.search(channel)
    told = loaded().moves_to(102, channel=channel).goes(100, states="D")
    assert "broken" not in seen(watch(told.samples))


def test_a_driver_call_that_ends_in_between_is_not_wedged():
    told = loaded().moves_to(102, channel="nvidia_ioctl")
    for _ in range(5):
        told.goes(20, states="D").goes(2, states="R")
    assert "broken" not in seen(watch(told.samples))


def test_a_driver_call_while_something_moves_is_not_wedged():
    told = loaded().moves_to(102, channel="nvidia_ioctl").goes(60, **{**BUSY, "states": "D"})
    assert "broken" not in seen(watch(told.samples))


def test_a_hung_server_is_still_called_stuck_beside_a_healthy_board():
    server = Asked().goes(60, running=4, at=LOCKED)
    assert server.first("stuck") is not None


# ------------------------------------------------------------------------------------------ idle servers


WORN = [GpuFault(kind="xid", code=63, at=1030.0), GpuFault(kind="remapped-rows", at=1030.0),
        GpuFault(kind="xid", code=154, at=1030.0), GpuFault(kind="ecc", at=1030.0)]  # fmt: skip


def with_worn(fault):
    return replace(gpu(holders=HELD), faults=(fault,)), Asked()


@pytest.mark.parametrize("fault", WORN)
def test_a_fault_that_a_server_outlives_does_not_break_it_when_its_clients_go_home(fault):
    board, server = with_worn(fault)
    server.goes(30, running=4, tokens=200, gpus=(board,)).goes(400, gpus=(board,))
    assert server.seen() == {"ready"}


@pytest.mark.parametrize("fault", WORN)
def test_nor_when_it_is_silent_for_a_while_long_after_it(fault):
    board, server = with_worn(fault)
    server.goes(60, running=4, tokens=200, gpus=(board,))
    server.goes(12, running=4, gpus=(board,), at=PREFILL, cpu=1.0).goes(5, running=4, tokens=200, gpus=(board,))
    assert server.seen() == {"ready"}


@pytest.mark.parametrize("fault", WORN)
def test_but_one_after_which_no_answer_came_to_those_who_wait_does(fault):
    board, server = with_worn(fault)
    server.goes(16, running=4, tokens=200).goes(30, running=4, gpus=(board,), at=LOCKED)
    assert server.first("broken").verdict.kind == "hardware"


def test_a_board_that_is_lost_breaks_an_idle_server_too():
    board, server = with_worn(GpuFault(kind="lost", at=1030.0))
    server.goes(30).goes(5, gpus=(board,))
    assert server.first("broken").verdict.kind == "hardware"


def test_a_worker_once_seen_in_the_driver_is_not_wedged_while_it_serves_and_idles():
    """Thread states are asked for only while a server is silent: unseen, nobody is still there."""
    server = Asked()
    server.story.moves_to(102, *LOCKED, channel="nv_wait_for")
    server.goes(14, running=4, states="D")
    server.story.moves_to(102, *IDLE, channel="futex_do_wait")
    server.goes(20, running=4, tokens=200, hide=("thread_states",)).goes(200, hide=("thread_states",))
    assert server.seen() == {"ready"}


def test_a_worker_that_the_driver_keeps_while_somebody_waits_is():
    server = Asked()
    server.story.moves_to(102, *LOCKED, channel="nv_wait_for")
    server.goes(60, running=4, states="D")
    assert server.first("broken").verdict.kind == "wedged"
