"""``hangguard run`` that is asked to stop: requests finish first, and all of it fits into the time that it is given."""

import re
import signal
import subprocess
import sys
import time

import pytest
from commands import hangguard, poll, run, small
from streams import ENDLESS, streaming

SLOW = {"token_seconds": 0.05}


def drained(running):
    return running.named("stopping")[-1]["drained"]


# ---------------------------------------------------------------------------------------------- a drain


def test_with_drain_a_stream_in_flight_is_finished_before_the_server_is_stopped(tmp_path):
    with run(tmp_path, "--drain", 60, command=small(**SLOW)) as running:
        client = streaming(running.event("ready")["url"], 40)
        running.ask(signal.SIGTERM)
        assert running.wait() == 0
        assert (len(client.tokens), client.is_done, client.error) == (40, True, None)
        assert running.named("draining")[-1]["left"] == 0
        assert (drained(running)["left"], drained(running)["ending"]) == (0, "done")
        assert "letting requests finish: " in running.err
        assert "nobody is in flight after" in running.err
        assert "Not drained" not in running.last_line


def test_a_second_signal_ends_the_drain_and_the_grace_and_the_last_line_says_who_was_cut_off(tmp_path):
    with run(tmp_path, "--drain", 1000, command=small(**SLOW, ignore_term=True)) as running:
        streaming(running.event("ready")["url"], ENDLESS)
        running.ask()
        poll(lambda: [event for event in running.named("draining") if event["left"] == 1])
        time.sleep(0.3)  # not waiting for anything: a second request is later than the echo of the first
        began = time.monotonic()
        running.ask()
        assert running.wait() == 0
        assert time.monotonic() - began < 10
        assert (drained(running)["left"], drained(running)["ending"]) == (1, "cut")
        assert "Not drained: 1 request in flight after" in running.last_line
        assert "nothing is left behind" in running.last_line


def test_a_signal_before_it_is_ready_stops_it_without_a_drain(tmp_path):
    with run(tmp_path, "--drain", 1000, command=small(phase_seconds=5.0)) as running:
        running.event("launched")
        running.ask(signal.SIGTERM)
        assert running.wait() == 0
        assert running.named("draining") == []
        assert drained(running) is None


def test_sigquit_asks_for_the_stop_as_well(tmp_path):
    with run(tmp_path) as running:
        running.event("ready")
        running.ask(signal.SIGQUIT)
        assert running.wait() == 0
        assert "nothing is left behind" in running.last_line


# --------------------------------------------------------------------------------------------- a budget


def stops_within(running, seconds, number=signal.SIGTERM):
    began = time.monotonic()
    running.ask(number)
    code = running.wait()
    assert time.monotonic() - began < seconds
    return code


def test_a_server_that_ignores_sigterm_is_gone_within_the_time_and_the_shorter_grace_is_said(tmp_path):
    with run(tmp_path, "--stop-within", 10, command=small(ignore_term=True)) as running:
        running.event("ready")
        assert stops_within(running, 10) == 0
        (notice,) = [event["text"] for event in running.named("notice") if "grace" in event["text"]]
        assert re.fullmatch(r"grace: [45]\.\d s instead of 15 s, for all has to be over within 10 s", notice)
        assert running.named("released")[-1]["released"] == "released"
        assert "nothing is left behind" in running.last_line


def test_where_there_is_time_for_the_whole_grace_nothing_is_shortened(tmp_path):
    with run(tmp_path, "--stop-within", 60) as running:
        running.event("ready")
        running.ask()
        assert running.wait() == 0
        assert not [event for event in running.named("notice") if "instead of" in event["text"]]


def test_a_drain_leaves_time_for_the_grace_the_kill_and_the_proof(tmp_path):
    words = ("--drain", 100, "--stop-within", 10)
    with run(tmp_path, *words, command=small(**SLOW, ignore_term=True)) as running:
        streaming(running.event("ready")["url"], ENDLESS)
        assert stops_within(running, 10) == 0
        assert (drained(running)["left"], drained(running)["ending"]) == (1, "time")
        said = [event["text"].partition(":")[0] for event in running.named("notice") if "instead" in event["text"]]
        assert said == ["drain", "grace"]
        assert running.named("released")[-1]["released"] == "released"


def test_a_stop_that_had_begun_before_is_hurried_so_that_its_proof_is_in_time(tmp_path):
    command = small(deadlock_at_capture=True, ignore_term=True)
    with run(tmp_path, "--stop-within", 10, "--patience", 4, "--attempts", 1, command=command) as running:
        running.event("stopping")
        assert stops_within(running, 10) == 0
        assert running.named("released")[-1]["released"] == "released"


GIVES_UP = """
import sys, time
from hangguard.cli.deadline import Deadline
deadline = Deadline(float(sys.argv[1]))
deadline.begin()
deadline.begin()
if sys.argv[2] == "settled":
    deadline.settle(7)
if sys.argv[2] == "cancelled":
    deadline.cancel()
    sys.exit(3)
time.sleep(60)
"""


@pytest.mark.parametrize(("how", "code"), [("late", 12), ("settled", 7), ("cancelled", 3)])
def test_whatever_holds_it_up_it_ends_when_the_time_is_over_and_says_so(how, code):
    words = [sys.executable, "-c", GIVES_UP, "0.2", how]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == code
    assert ("the 0.2 s of --stop-within are over" in done.stderr) == (how == "late")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--drain", "-1"), "drain"),
        (("--drain", "soon"), "drain"),
        (("--drain", "nan"), "--drain is nan"),
        (("--drain", "inf"), "--drain is inf"),
        (("--stop-within", "0"), "--stop-within is 0.0"),
        (("--stop-within", "inf"), "--stop-within is inf"),
        (("--stop-within", "nan"), "--stop-within is nan"),
    ],
)
def test_seconds_that_cannot_be_meant_are_a_usage_error(tmp_path, words, says):
    with hangguard(tmp_path, "run", *words, "--", *small()) as running:
        assert running.wait() == 2
        assert says in running.err
        assert "Traceback" not in running.err


def test_on_a_terminal_the_live_line_says_who_is_in_flight(tmp_path):
    from terminals import live_lines, on_a_terminal

    with on_a_terminal(tmp_path, 100, "run", "--drain", 1000, "--", *small(**SLOW)) as (running, read, screen):
        url = poll(lambda: read() and re.search(r"READY at (http://\S+),", screen.text))[1]
        streaming(url, ENDLESS)
        running.ask()
        shown = r"letting requests finish: 1 request in flight, \d+ min \d\d s left · Ctrl-C ends that"
        poll(lambda: any(re.search(shown, line) for line in live_lines(read())))
        running.ask()
        poll(lambda: read() and running.process.poll() is not None)
        read()
        assert running.process.returncode == 0
        assert "Not drained: 1 request in flight" in " ".join(screen.text.split())
