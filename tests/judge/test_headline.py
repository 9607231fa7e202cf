"""One line for a healthy start: what is going on, as a person would say it."""

import pytest
from making import BUSY, CORE, MIB, Member, Story, watch

from hangguard.judge.headline import rate


def line(told: Story) -> str:
    verdict = watch(told.samples)[-1].verdict
    assert verdict.verdict == "moving"
    return verdict.why


def loading(**story) -> Story:
    return Story(**story).goes(5, **BUSY, lines=("Starting to load model M",))


def test_a_load_says_how_fast_it_reads():
    assert line(loading().goes(20, **{**BUSY, "reads": 1.2e9})) == "loading: 1.2 GB/s read"
    assert line(loading().goes(20, disk=51e6)) == "loading: 51 MB/s read"


def test_a_compile_counts_its_compilers():
    told = loading()
    for n in range(4):
        told.gains(Member(200 + n, "ptxas x", CORE.pid, 1, python=False, name="ptxas", cpu=0.9))
    assert line(told.goes(10)) == "compiling: 4 compiler processes"


def test_a_capture_says_how_far_its_bar_is():
    told = loading().goes(1, **BUSY, lines=("Capturing graphs",))
    for n in range(1, 7):
        told.goes(2, cpu=1.0, lines=(f"Capturing batches: {n * 10}%|###   | {n}/10",))
    assert line(told) == "capturing graphs: 60 %"


def test_a_bar_that_stands_says_for_how_long():
    told = loading().goes(1, **BUSY, lines=("Capturing graphs",))
    told.goes(2, cpu=1.0, lines=("Capturing batches: 60%|###   | 6/10",)).goes(8, cpu=1.0)
    assert line(told).startswith("capturing graphs: 60 %, nothing produced for")


def test_new_lines_are_told():
    assert line(loading().goes(8, **{**BUSY, "reads": 0}).goes(1, lines=("Autotuning kernels",))) == (
        "weights-load: log moved: Autotuning kernels"
    )


def test_a_busy_start_says_for_how_long_nothing_was_produced():
    assert line(loading().goes(20, cpu=1.0, hide=("stacks",))).startswith(
        "weights-load: busy (CPU), nothing produced for"
    )


def test_a_still_start_says_so_before_any_verdict():
    assert line(loading().goes(8)).startswith("weights-load: nothing has moved for")


@pytest.mark.parametrize(
    ("bytes_per_second", "text"), [(1.23e9, "1.2 GB/s"), (42e9, "42 GB/s"), (80 * MIB, "84 MB/s"), (3e5, "300 kB/s")]
)
def test_rates_read_as_people_write_them(bytes_per_second, text):
    assert rate(bytes_per_second) == text
