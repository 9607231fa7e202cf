"""What to do next: one change per relaunch, kept if the launch came further, taken back otherwise."""

from dataclasses import replace

import pytest
from tenacity import stop_after_attempt, stop_after_delay

from hangguard.changes import with_flag
from hangguard.engines.generic import GENERIC
from hangguard.engines.sglang import SGLANG
from hangguard.facts import (
    Attempt,
    Broken,
    Exited,
    Expired,
    Fallback,
    Launch,
    Ready,
    Release,
    ReleaseItem,
    Stuck,
    Suspect,
    Verdict,
)
from hangguard.judge import Budget, GiveUp, Keep, Relaunch, next_move, permitted, why_none
from hangguard.supervision.retry import Retry, budget

LAUNCH = Launch(
    argv=("serve", "--model", "M"), env=(), cwd="/", url="http://127.0.0.1:8000", host="127.0.0.1", port=8000
)
GO = Budget(another=True, after=2.5)


def fallback(name, *answers, alters="speed", flag=None) -> Fallback:
    return Fallback(
        name=name,
        change=lambda launch: with_flag(launch, flag or f"--{name}"),
        answers=answers,
        alters=alters,
        cost=f"{name} costs something",
    )


NO_GRAPH = fallback("no-graph", "graph-capture")
NO_CUSTOM = fallback("no-custom", "dist-init", "graph-capture", "warm-up")
SMALLER = fallback("smaller", "gpu-oom", alters="results")
ALL = (NO_GRAPH, NO_CUSTOM, SMALLER)


def stuck(phase="graph-capture") -> Stuck:
    return Stuck(phase=phase, kind="idle")


def exited(kind, *, permanent=False) -> Exited:
    return Exited(phase="import", kind=kind, why=f"why {kind}", permanent=permanent)


def attempt(verdict: Verdict, **changes) -> Attempt:
    base = Attempt(number=1, launch=LAUNCH, verdict=verdict, started_at=0.0, last_movement_at=1.0, settled_at=2.0)
    return replace(base, **changes)


def relaunched(before: tuple[Attempt, ...], verdict: Verdict, fallbacks=ALL, **kw) -> tuple[Attempt, ...]:
    """The history after the next move was made and ended in ``verdict``."""
    move = next_move(before, fallbacks, GO, **kw)
    assert isinstance(move, Relaunch)
    names = tuple(c.name for c in move.changes)
    done = attempt(verdict, number=len(before) + 1, launch=move.launch, changes=move.changes, fallbacks=names)
    return (*before, done)


def flags(launch: Launch) -> set[str]:
    return {word for word in launch.argv if word.startswith("--")} - {"--model"}


def test_a_ready_server_is_kept():
    assert next_move((attempt(Ready(phase="serving")),), ALL, Budget(another=False)) == Keep()


def test_a_hang_is_answered_by_the_first_fallback_of_its_phase():
    move = next_move((attempt(stuck()),), ALL, GO)
    assert flags(move.launch) == {"--no-graph"}
    assert (move.fallback.name, move.fallback.alters, move.after) == ("no-graph", "speed", 2.5)
    assert move.changes == (move.fallback,)
    assert "--no-graph" in move.fallback.change
    assert move.why == "no-graph costs something"


def test_a_change_that_brought_it_further_is_kept_and_one_more_is_added():
    history = relaunched((attempt(stuck()),), stuck("warm-up"))
    move = next_move(history, ALL, GO)
    assert flags(move.launch) == {"--no-graph", "--no-custom"}
    assert [c.name for c in move.changes] == ["no-graph", "no-custom"]


@pytest.mark.parametrize("phase", ["graph-capture", "weights-load"])
def test_a_change_that_did_not_is_taken_back(phase):
    history = relaunched((attempt(stuck()),), stuck(phase))
    other = fallback("other", phase)
    move = next_move(history, (NO_GRAPH, other), GO)
    assert flags(move.launch) == {"--other"}
    assert [c.name for c in move.changes] == ["other"]


def test_every_fallback_is_tried_once():
    history = relaunched(relaunched((attempt(stuck()),), stuck()), stuck())
    assert [a.fallbacks for a in history] == [(), ("no-graph",), ("no-custom",)]
    move = next_move(history, ALL, GO)
    assert isinstance(move, GiveUp)
    assert move.kind == "exhausted"
    assert "no-graph, no-custom, smaller" in move.why


def test_the_reason_of_an_exit_is_answered_too():
    assert flags(next_move((attempt(exited("gpu-oom")),), ALL, GO).launch) == {"--smaller"}


@pytest.mark.parametrize("verdict", [Broken(phase="graph-capture", kind="survivors"),
                                     Expired(phase="graph-capture", kind="unclear")])  # fmt: skip
def test_what_stopped_in_a_phase_is_answered_by_its_phase(verdict):
    assert flags(next_move((attempt(verdict),), ALL, GO).launch) == {"--no-graph"}


def test_a_wait_for_something_outside_is_answered_by_no_flag():
    """A lock, a peer or a disk that never came: no change of the server's options brings it."""
    move = next_move((attempt(Expired(phase="graph-capture", kind="waiting")),), ALL, GO)
    assert isinstance(move, GiveUp)


def test_one_that_failed_and_does_not_end_is_answered_by_its_reason_as_if_it_had_ended():
    failed = Broken(phase="kv-cache", kind="failed", reason="gpu-oom")
    move = next_move((attempt(failed),), ALL, GO)
    assert isinstance(move, Relaunch)
    assert move.fallback.name == "smaller"
    forever = Broken(phase="import", kind="failed", reason="bad-flag", permanent=True)
    move = next_move((attempt(forever),), ALL, GO)
    assert isinstance(move, GiveUp)
    assert move.kind == "permanent"


def test_an_exit_is_not_answered_by_its_phase():
    verdict = Exited(phase="graph-capture", kind="crash", why="boom")
    assert isinstance(next_move((attempt(verdict),), ALL, GO), GiveUp)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda launch: None, id="does not apply"),
        pytest.param(lambda launch: launch, id="is there already"),
    ],
)
def test_a_fallback_without_effect_is_passed_over(change):
    first = replace(NO_GRAPH, name="first", change=change)
    move = next_move((attempt(stuck()),), (first, NO_CUSTOM), GO)
    assert flags(move.launch) == {"--no-custom"}


@pytest.mark.parametrize(
    ("verdict", "kind"),
    [
        (exited("bad-flag", permanent=True), "permanent"),
        (exited("missing-model", permanent=True), "permanent"),
        (Broken(phase="serving", kind="hardware"), "permanent"),
        (Broken(phase="serving", kind="wedged"), "permanent"),
        (Expired(phase="graph-capture", kind="ready_within", why="late"), "expired"),
    ],
)
def test_these_are_never_relaunched(verdict, kind):
    move = next_move((attempt(verdict),), ALL, GO, retry_hangs=True)
    assert (type(move), move.kind) == (GiveUp, kind)


@pytest.mark.parametrize("why", ["", "no attempts left (4 of 4)"])
def test_a_used_up_budget_ends_it_and_the_verdict_is_said_first(why):
    move = next_move((attempt(stuck()),), ALL, Budget(another=False, why=why))
    assert move == GiveUp(f"stuck (idle) in graph-capture; {why or 'no attempts left'}", "exhausted")


def test_the_one_line_of_a_hang_says_what_where_for_how_long_why_and_who():
    who = Suspect(pid=7, title="worker_TP1", at=("take (faults.py:54)", "commit (faults.py:28)"))
    verdict = replace(stuck(), still_for=10.4, why="all idle", suspects=(who,))
    move = next_move((attempt(verdict),), ALL, Budget(another=False, why="no attempts left (1 of 1)"))
    assert move.why == (
        "stuck (idle) in graph-capture: nothing moved for 10 s; all idle; look at worker_TP1 (pid 7) at take "
        "(faults.py:54); no attempts left (1 of 1)"
    )


def test_the_one_line_of_an_end_says_why_and_names_nobody():
    move = next_move((attempt(replace(exited("crash"), still_for=9.0)),), ALL, Budget(another=False))
    assert move.why == "exited (crash) in import: why crash; no attempts left"


@pytest.mark.parametrize(
    ("stop", "says"),
    [
        (None, "no attempts left (4 of 4)"),
        (stop_after_attempt(4), "no attempts left (4 of 4)"),
        (stop_after_attempt(9) | stop_after_delay(1.0), "no attempts left (4 made)"),
    ],
)
def test_of_how_many_attempts_is_said_where_a_number_alone_decides(stop, says):
    history = tuple(attempt(stuck(), number=number) for number in range(1, 5))
    assert budget(Retry(stop=stop), history, 100.0) == Budget(another=False, why=says)


def release(answer, *, ours=True) -> Release:
    item = ReleaseItem(resource="gpu-memory", answer=answer, detail="73 GiB on GPU 0", ours=ours)
    return Release(items=(ReleaseItem(resource="processes", answer="released"), item))


def test_something_left_behind_blocks_a_relaunch():
    move = next_move((attempt(stuck(), release=release("held")),), ALL, GO)
    assert move.kind == "exhausted"
    assert "73 GiB on GPU 0" in move.why


@pytest.mark.parametrize(
    "left", [release("held", ours=False), release("unknown"), release("released"), None],
    ids=["a stranger's", "unknown", "released", "not looked"],
)  # fmt: skip
def test_what_is_not_ours_or_not_proved_held_does_not(left):
    assert isinstance(next_move((attempt(stuck(), release=left),), ALL, GO), Relaunch)


def test_a_transient_exit_gets_one_unchanged_retry():
    history = relaunched((attempt(exited("port")),), exited("port"), ())
    assert (history[1].launch, history[1].changes) == (LAUNCH, ())
    assert isinstance(next_move(history, (), GO), GiveUp)


@pytest.mark.parametrize("kind", ["crash", "signal", "oom-kill", "gpu-oom", "finished", "unknown"])
def test_other_exits_get_none(kind):
    move = next_move((attempt(exited(kind)),), (), GO, retry_hangs=True)
    assert move.kind == "exhausted"
    assert move.why == f"exited ({kind}) in import: why {kind}; fallbacks are off"


KNOWS_NONE = replace(GENERIC, name="mine")


@pytest.mark.parametrize(
    ("asked", "engine", "says"),
    [
        (None, GENERIC, "fallbacks are off"),
        ((), SGLANG, "fallbacks are off"),
        ("auto", GENERIC, "no fallbacks are known for the generic engine; name yours with engine="),
        ("any", KNOWS_NONE, "no fallbacks are known for the mine engine"),
        (
            "auto",
            replace(KNOWS_NONE, fallbacks=(SMALLER,)),
            "all fallbacks that are known for the mine engine may alter results, which was not allowed",
        ),
        ("auto", SGLANG, ""),
        ((NO_GRAPH,), GENERIC, ""),
    ],
)
def test_that_there_are_no_fallbacks_has_a_reason(asked, engine, says):
    assert why_none(asked, engine) == says
    move = next_move((attempt(exited("crash")),), (), GO, no_fallbacks=says)
    assert move.why.endswith(f"; {says or 'fallbacks are off'}")


def test_fallbacks_that_do_not_answer_are_told_from_those_that_were_tried():
    assert next_move((attempt(exited("crash")),), ALL, GO).why == (
        "exited (crash) in import: why crash; no fallback answers this (of no-graph, no-custom, smaller)"
    )
    history = relaunched(relaunched((attempt(stuck()),), stuck()), stuck())
    assert next_move(history, ALL, GO).why.endswith(
        "; no fallback that answers this is left (of no-graph, no-custom, smaller; tried: no-graph, no-custom)"
    )


def test_an_unanswered_hang_is_retried_unchanged_once_and_only_on_request():
    start = (attempt(stuck()),)
    assert isinstance(next_move(start, (), GO), GiveUp)
    again = relaunched(start, stuck(), (), retry_hangs=True)
    assert again[1].changes == ()
    assert isinstance(next_move(again, (), GO, retry_hangs=True), GiveUp)


def test_after_an_unchanged_retry_the_fallbacks_of_what_came_then_are_tried():
    history = relaunched((attempt(exited("port")),), stuck())
    assert flags(next_move(history, ALL, GO).launch) == {"--no-graph"}


@pytest.mark.parametrize(
    ("permission", "names"),
    [
        (None, []),
        ("auto", ["no-graph", "no-custom"]),
        ("any", ["no-graph", "no-custom", "smaller"]),
        ((SMALLER,), ["smaller"]),
        ([], []),
    ],
)
def test_the_callers_permission(permission, names):
    assert [f.name for f in permitted(permission, ALL)] == names


def test_instrumentation_is_within_auto():
    assert permitted("auto", (fallback("verbose", "import", alters="nothing"),))


@pytest.mark.parametrize("kind", ["download", "dist-timeout"])
def test_a_hub_or_a_peer_that_was_late_is_tried_once_more(kind):
    history = relaunched((attempt(exited(kind)),), exited(kind), ())
    assert history[1].changes == ()
    assert isinstance(next_move(history, (), GO), GiveUp)


@pytest.mark.parametrize("verdict", [Stuck(phase="serving", kind="serving"), Broken(phase="serving", kind="survivors")])
def test_a_server_that_hung_while_serving_is_restarted_at_once_unchanged_and_once(verdict):
    move = next_move((attempt(verdict),), ALL, GO, retry_hangs=True)
    assert (move.launch, move.fallback, move.after) == (LAUNCH, None, 0.0)
    assert isinstance(next_move((attempt(verdict), attempt(verdict)), ALL, GO, retry_hangs=True), GiveUp)
    assert isinstance(next_move((attempt(verdict),), ALL, GO), GiveUp)


def test_no_flag_wakes_what_somebody_stopped():
    move = next_move((attempt(Stuck(phase="graph-capture", kind="stopped")),), ALL, GO)
    assert isinstance(move, GiveUp)


def test_a_broken_board_ends_it_also_as_the_reason_of_an_exit():
    assert next_move((attempt(exited("hardware", permanent=True)),), ALL, GO, retry_hangs=True).kind == "permanent"


# ------------------------------------------------------------------------- changes that do not work


def broken(name, problem):
    def change(launch):
        raise problem

    return Fallback(name=name, change=change, answers=("graph-capture",), alters="speed", cost="")


def test_a_change_that_raises_is_told_and_the_next_one_is_tried():
    move = next_move((attempt(stuck()),), (broken("mine", KeyError("x")), NO_GRAPH), GO)
    assert isinstance(move, Relaunch)
    assert move.fallback.name == "no-graph"
    assert move.failed == ("fallback 'mine' failed: KeyError: 'x'",)


@pytest.mark.parametrize("returned", [["serve"], "serve --x", ("serve",), True])
def test_a_change_that_returns_no_launch_is_told_and_passed_over(returned):
    wrong = Fallback(name="mine", change=lambda launch: returned, answers=("graph-capture",), alters="speed", cost="")
    move = next_move((attempt(stuck()),), (wrong,), GO)
    assert isinstance(move, GiveUp)
    assert move.failed == (f"fallback 'mine' failed: it returned a {type(returned).__name__}, not a Launch",)


def test_ctrl_c_in_a_change_is_no_failure_of_it():
    with pytest.raises(KeyboardInterrupt):
        next_move((attempt(stuck()),), (broken("mine", KeyboardInterrupt()),), GO)


def test_a_change_that_does_not_apply_is_nothing_to_tell():
    fits_not = Fallback(name="mine", change=lambda launch: None, answers=("graph-capture",), alters="speed", cost="")
    assert next_move((attempt(stuck()),), (fits_not, NO_GRAPH), GO).failed == ()
