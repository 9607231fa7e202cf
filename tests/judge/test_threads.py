"""Who else could end the wait of the main thread: another thread, a parent, a clock. Each was a real program."""

import pytest
from making import BUSY, CORE, Member, Story, first, rules, seen, thread, watch

from hangguard.judge import Rules

LOADED_AT = 1022.0
FUTEX, SLEEP, RECEIVES, POLLS = "futex_do_wait", "hrtimer_nanosleep", "wait_woken", "poll_schedule_timeout"
UNKNOWN = Rules()
"""A program of which nothing is known."""

PROGRAM = Member(100, "python server.py", at=(), channel=FUTEX)
IN_A_POOL = ("read_shard loader.py", "run concurrent/futures/thread.py", "_worker concurrent/futures/thread.py")
IDLE_IN_A_POOL = ("_worker concurrent/futures/thread.py", "run threading.py")


def still(*members, by, seconds=130):
    """Load for 22 s, then stand; return what was judged."""
    return watch(Story(members=members).goes(22, **BUSY).goes(seconds).samples, by)


def found_after(memories):
    stuck = first(memories, "stuck")
    return None if stuck is None else stuck.now - LOADED_AT


def core(**more):
    return Member(102, "ENGINE::Worker_0", 100, 40, CORE.at, **more)


# --------------------------------------------------------------------------------- a program nobody knows


@pytest.mark.parametrize(
    "member",
    [
        pytest.param(Member(100, "python s.py", channel="timed futex_do_wait"), id="Event.wait(30)"),
        pytest.param(Member(100, "python s.py", channel="perhaps timed futex_do_wait"), id="arguments unseen"),
        pytest.param(Member(100, "python s.py", channel=FUTEX, beside=(thread(SLEEP, "work s.py"),)), id="sleeps"),
        pytest.param(Member(100, "python s.py", channel=FUTEX, beside=(thread(RECEIVES, "get s.py"),)), id="downloads"),
        pytest.param(Member(100, "python s.py", channel=FUTEX, beside=(thread("timed futex", "w s.py"),)), id="timed"),
        pytest.param(Member(100, "python s.py", channel=FUTEX, beside=(thread("", "w s.py"),)), id="runs just now"),
        pytest.param(
            Member(100, "python s.py", channel=FUTEX, beside=(thread(None, "work s.py"),), native=(FUTEX, SLEEP)),
            id="its number is not known (Python 3.10)",
        ),
        pytest.param(Member(100, "server", python=False, channel=FUTEX, native=(FUTEX, SLEEP)), id="no Python"),
    ],
)
def test_a_thread_that_may_wake_by_itself_costs_the_long_patience(member):
    memories = still(member, by=UNKNOWN)
    assert found_after(memories) >= 120.0
    assert "may end by itself" in first(memories, "unclear").verdict.why


@pytest.mark.parametrize(
    "member",
    [
        pytest.param(PROGRAM, id="alone"),
        pytest.param(Member(100, "python s.py", channel=FUTEX, beside=(thread(FUTEX, "work s.py"),)), id="two"),
        pytest.param(Member(100, "python s.py", channel="anon_pipe_write"), id="a pipe that nobody reads"),
        pytest.param(Member(100, "python s.py", channel=FUTEX, native=(POLLS,)), id="a driver's thread"),
        pytest.param(Member(100, "server", python=False, channel=FUTEX, native=(FUTEX,)), id="no Python"),
    ],
)
def test_threads_that_only_another_can_wake_are_a_hang(member):
    assert found_after(still(member, by=UNKNOWN)) <= 15.0


@pytest.mark.parametrize("channel", [SLEEP, RECEIVES, "timed futex_do_wait"])
def test_a_parent_that_works_beside_an_idle_helper_costs_the_long_patience(channel):
    parent = Member(100, "python server.py", channel=channel)
    helper = Member(101, "python helper.py", 100, channel="anon_pipe_read")
    assert found_after(still(parent, helper, by=UNKNOWN)) >= 120.0


def test_a_parent_that_only_waits_for_its_child_does_not():
    parent = Member(100, "bash start.sh", channel="do_wait", python=False)
    child = Member(101, "python server.py", 100, channel=FUTEX)
    assert found_after(still(parent, child, by=UNKNOWN)) <= 15.0


def test_a_parent_that_downloads_beside_an_idle_helper_waits():
    parent = Member(100, "python server.py", at=CORE.at, channel=RECEIVES)
    helper = Member(101, "python helper.py", 100, channel="anon_pipe_read")
    told = Story(members=(parent, helper)).goes(22, **BUSY).moves_to(100, "readinto ssl.py", "read http/client.py")
    assert seen(watch(told.goes(300).samples, UNKNOWN)) == {"moving", "waiting"}


# --------------------------------------------------------------------------------- an engine's own worker


@pytest.mark.parametrize("channel", [SLEEP, POLLS, "timed futex_do_wait", "do_epoll_wait"])
def test_the_watchdogs_of_an_engines_worker_do_not_hide_a_hang(channel):
    watchdog = thread(channel, "watchdog scheduler.py", "run threading.py")
    assert found_after(still(core(beside=(watchdog,), native=(POLLS,)), by=rules())) <= 15.0


@pytest.mark.parametrize("channel", [SLEEP, RECEIVES, POLLS, "request_wait_answer"])
def test_a_task_that_it_gave_to_a_pool_of_threads_may_still_end(channel):
    memories = still(core(beside=(thread(channel, *IN_A_POOL),)), by=rules())
    assert found_after(memories) >= 120.0


@pytest.mark.parametrize("pool", [IDLE_IN_A_POOL, ("get lib/queue.py", "worker multiprocessing/pool.py")])
def test_idle_threads_of_a_pool_do_not_hide_a_hang(pool):
    assert found_after(still(core(beside=(thread("timed futex_do_wait", *pool),)), by=rules())) <= 15.0


@pytest.mark.parametrize("channel", ["request_wait_answer", "folio_wait_bit_common", "rpc_wait_bit_killable"])
def test_a_thread_of_any_kind_that_waits_for_a_file_system_costs_the_long_patience(channel):
    assert found_after(still(core(native=(channel,)), by=rules())) >= 120.0


def test_a_thread_that_waits_for_a_file_lock_waits():
    assert seen(still(core(native=("flock_lock_inode_wait",)), by=rules())) == {"moving", "waiting"}


@pytest.mark.parametrize(
    ("at", "waits"), [("get huggingface_hub/file_download.py", True), ("serve httpx/_client.py", False)]
)
def test_a_front_end_that_downloads_from_the_hub_keeps_its_idle_workers_from_being_stuck(at, waits):
    front_end = Member(100, "python -m engine.server", works=False, channel=POLLS)
    told = Story(members=(front_end, core())).goes(22, **BUSY).moves_to(100, at).goes(100)
    assert ("stuck" in seen(watch(told.samples, rules()))) is not waits
