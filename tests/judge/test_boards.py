"""Power against utilisation: the floor and the working level of each board, and when its counters say nothing."""

import pytest
from making import gpu

from hangguard.facts import GpuHolder, Process, Tree, Unseen
from hangguard.judge.boards import Boards, is_busy_for_nothing, note_boards, note_product, works

GIB = 1024**3
OURS, STRANGER = GpuHolder(pid=102, used_bytes=GIB), GpuHolder(pid=4711, used_bytes=GIB)


def tree() -> Tree:
    worker = Process(
        pid=102, started=1, parent=1, title="w", name="w", state="S", threads=1, cpu_seconds=0.0,
        reaped_cpu_seconds=0.0, minor_faults=0, major_faults=0, rss_bytes=0,
    )  # fmt: skip
    return Tree(members=(worker,))


class Watch:
    """Boards, looked at once a second."""

    def __init__(self, *, holders=(OURS,)):
        self.boards, self.t, self.holders = Boards(), 0.0, holders

    def sees(self, seconds, percent, watts, *, produced=False, holders=None, used=10 * GIB):
        for n in range(seconds):
            self.t += 1.0
            drawn = watts[n % len(watts)] if isinstance(watts, (tuple, list)) else watts
            one = gpu(percent=percent, watts=drawn, used=used, holders=self.holders if holders is None else holders)
            self.boards = note_boards(self.boards, (one,), tree(), self.t)
            if produced:
                self.boards = note_product(self.boards)
        return self

    @property
    def floor(self):
        return self.boards.boards[0].floor

    @property
    def for_nothing(self):
        return is_busy_for_nothing(self.boards)

    @property
    def works(self):
        return works(self.boards)


def h200(**more) -> Watch:
    """Imports at 80 W without a context, then a context at 122 W."""
    return Watch(**more).sees(5, 0.0, 80.0, holders=(), used=0).sees(1, 0.0, 104.0).sees(4, 0.0, 122.0)


def test_the_floor_is_that_of_a_context_and_not_of_an_empty_board_or_of_a_reading_that_lags():
    assert h200().floor == 122.0


def test_the_floor_is_learned_where_nvml_names_nobody_but_the_memory_grew():
    told = Watch(holders=()).sees(5, 0.0, 80.0, used=GIB).sees(5, 0.0, 122.0, used=11 * GIB)
    assert told.floor == 122.0


@pytest.mark.parametrize("watts", [124.0, (138.8, 140.0)], ids=["on one multiprocessor", "on all of them"])
def test_a_spinning_kernel_is_busy_for_nothing(watts):
    told = h200().sees(7, 100.0, watts)
    assert (told.for_nothing, told.works) == (True, False)


@pytest.mark.parametrize(
    ("percent", "watts"),
    [(100.0, (298.0, 480.0)), (99.0, (630.0, 610.0)), (100.0, (220.0, 463.0))],
    ids=["load", "prefill", "a first request"],
)
def test_work_is_work(percent, watts):
    told = h200().sees(7, percent, watts)
    assert (told.for_nothing, told.works) == (False, True)


def test_bursts_are_neither():
    told = h200()
    for percent, watts in ((23.0, 168.0), (0.0, 123.0), (57.0, 173.0), (4.0, 146.0)) * 3:
        told.sees(1, percent, watts)
        assert told.for_nothing is False


@pytest.mark.parametrize(
    ("floor", "hung", "working"), [(18.0, 20.0, 58.0), (14.0, 16.0, 45.0), (118.0, 135.0, 400.0)],
    ids=["A2-like", "GB10-like", "RTX PRO 6000-like"],
)  # fmt: skip
def test_levels_are_ratios_and_no_constants(floor, hung, working):
    told = Watch().sees(4, 0.0, floor).sees(6, 99.0, (working, 0.8 * working), produced=True)
    assert told.works
    assert told.sees(3, 0.0, floor).sees(8, 99.0, hung).for_nothing


def test_steady_watts_count_as_work_once_the_working_level_is_known():
    fresh, learned = h200().sees(8, 99.0, 300.0), h200().sees(4, 99.0, (298.0, 480.0), produced=True)
    assert (fresh.works, fresh.for_nothing) == (None, False), "a spin at a higher clock draws steady watts too"
    assert learned.sees(8, 99.0, 300.0).works


def test_what_nothing_was_produced_after_is_no_working_level():
    told = h200().sees(20, 100.0, 200.0)
    assert told.boards.boards[0].working is None
    assert told.works is None


@pytest.mark.parametrize(
    ("watts", "why"), [(Unseen("not supported"), "unreadable"), (124.0, "not learned")], ids=["unreadable", "unlearned"]
)
def test_without_power_or_a_floor_nothing_is_said(watts, why):
    told = Watch().sees(1, 0.0, watts).sees(8, 100.0, watts)
    assert told.for_nothing is None, why
    assert told.works is None
    assert told.boards.spinning


def test_a_full_window_is_needed():
    assert h200().sees(3, 100.0, 124.0).for_nothing is False


def test_a_stranger_on_the_board_makes_its_counters_unseen_and_is_named():
    told = h200().sees(8, 100.0, 124.0, holders=(OURS, STRANGER))
    assert (told.boards.is_busy, told.for_nothing, told.works) == (None, None, None)
    assert "4711" in told.boards.unseen[0]
    assert told.boards.boards[0].memory is None


def test_nobody_works_on_a_board_at_0_percent_whoever_holds_it():
    told = h200().sees(8, 0.0, 250.0, holders=(OURS, STRANGER))
    assert told.boards.is_busy is False
    assert told.floor == 122.0, "its power is the stranger's"


def test_a_strangers_work_is_not_ours():
    told = h200().sees(8, 99.0, (300.0, 600.0), holders=(STRANGER,))
    assert told.works is None
    assert told.boards.is_busy is None


def test_holders_that_cannot_be_seen_leave_only_rest():
    told = h200().sees(3, 99.0, 300.0, holders=Unseen("not permitted"))
    assert told.boards.is_busy is None
    assert told.sees(6, 0.0, 300.0, holders=Unseen("not permitted")).boards.is_busy is False


def test_utilisation_that_was_full_before_we_came_is_latched_and_says_nothing():
    told = Watch().sees(4, 100.0, 35.0, holders=(), used=0).sees(8, 100.0, 90.0)
    assert told.boards.is_busy is None
    assert "before this launch had it" in told.boards.unseen[0]
    assert told.sees(1, 0.0, 90.0).boards.is_busy is False, "it fell once, so it tells again"
    assert told.sees(8, 100.0, 90.0).boards.is_busy


def test_a_server_that_was_already_at_work_when_we_came_is_not_latched():
    assert Watch().sees(6, 100.0, 300.0).boards.is_busy


def test_without_utilisation_nothing_is_said():
    told = h200().sees(8, Unseen("MIG"), 124.0)
    assert (told.boards.is_busy, told.for_nothing) == (None, None)
    assert told.boards.unseen == ("GPU 0: MIG",)


def test_no_gpu_is_seen_and_an_unreadable_driver_is_not():
    none = note_boards(Boards(), (), tree(), 1.0)
    assert (none.is_busy, works(none), is_busy_for_nothing(none)) == (False, False, False)
    lost = note_boards(h200().boards, Unseen("NVML did not answer"), tree(), 99.0)
    assert (lost.is_busy, works(lost), is_busy_for_nothing(lost)) == (None, None, None)
    assert lost.boards[0].floor == 122.0, "what was learned stays"


def test_one_board_at_work_is_work_and_one_unseen_leaves_the_rest_open():
    def two(first, second):
        boards = Boards()
        for n in range(12):
            both = (gpu(percent=0.0, watts=122.0, used=GIB, holders=(OURS,)),) * 2 if n < 4 else (first, second)
            pair = tuple(gpu(index=i, percent=g.utilization_percent, watts=g.power_watts, used=GIB,
                             holders=g.holders) for i, g in enumerate(both))  # fmt: skip
            boards = note_boards(boards, pair, tree(), float(n))
        return is_busy_for_nothing(boards)

    spins = gpu(percent=100.0, watts=124.0, holders=(OURS,))
    rests = gpu(percent=0.0, watts=122.0, holders=(OURS,))
    taken = gpu(percent=90.0, watts=300.0, holders=(STRANGER,))
    loaded = gpu(percent=90.0, watts=300.0, holders=(OURS,))
    assert two(spins, rests) is True
    assert two(spins, taken) is None
    assert two(spins, loaded) is False
