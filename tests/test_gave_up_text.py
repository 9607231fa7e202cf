"""The text of a failure: what to try comes first, and nothing is told twice."""

from hangguard import GaveUp
from hangguard.facts import Attempt, Diagnosis, Exited, Finding, Launch, Stuck

LINE = "RuntimeError: boom"


def text(verdict):
    launch = Launch(argv=("serve",), env=(), cwd="/", url="http://h:1", host="h", port=1)
    attempt = Attempt(number=1, launch=launch, verdict=verdict, started_at=0.0, last_movement_at=1.0, settled_at=2.0)
    diagnosis = Diagnosis(
        findings=(
            Finding(hypothesis="the port", standing="ruled out", evidence=("a member listens",)),
            Finding(
                hypothesis="a crash", standing="confirmed", evidence=(f"worker said {LINE}", LINE, "it ended with 1")
            ),
            Finding(hypothesis="a lock", standing="open", evidence=("not looked at",)),
            Finding(hypothesis="the drafter", standing="ruled out", evidence=("no option asks for it",)),
        ),
        advice=("look at the worker",),
    )
    return GaveUp("it failed", history=(attempt,), diagnosis=diagnosis).text().splitlines()


def test_of_a_server_that_ended_only_the_names_are_told_of_what_is_ruled_out():
    assert [line.strip() for line in text(Exited(phase="import", kind="crash", why=LINE))] == [
        "it failed",
        f"attempt 1: exited (crash) in import: {LINE}",
        "try: look at the worker",
        f"confirmed: a crash (worker said {LINE}; it ended with 1)",
        "ruled out: the port, the drafter (why: in the evidence)",
    ]


def test_of_one_that_hangs_the_reasons_are_told_too():
    lines = [line.strip() for line in text(Stuck(phase="graph-capture", kind="idle", why="all idle"))]
    assert lines[2] == "try: look at the worker"
    assert lines[-2:] == ["ruled out: the port (a member listens)", "ruled out: the drafter (no option asks for it)"]
