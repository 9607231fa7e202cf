"""How long a start may stand still: what was learned only lengthens it; and built-in timers that come before ours."""

import pytest
from making import BUSY, Story, first, rules, watch

from hangguard.engines.sglang import SGLANG
from hangguard.engines.vllm import VLLM
from hangguard.facts import Launch, Limits
from hangguard.judge import patience
from hangguard.judge.patience import timer_warnings

LOADED_AT = 1022.0


def launch(*words: str, env: tuple[tuple[str, str], ...] = (), **more) -> Launch:
    return Launch(argv=words or ("vllm", "serve", "M"), env=env, cwd="/", url="http://h:1", host="h", port=1, **more)


# -------------------------------------------------------------------------------------------------- patience


@pytest.mark.parametrize(
    ("learned", "short", "long"),
    [((), 10.0, 120.0), ((("weights-load", 1.0),), 10.0, 120.0), ((("weights-load", 30.0),), 150.0, 150.0),
     ((("weights-load", 4000.0),), 600.0, 600.0), ((("dist-init", 30.0),), 10.0, 120.0)],
    ids=["nothing", "less than ours", "more", "no end", "another phase"],
)  # fmt: skip
def test_what_was_learned_lengthens_and_never_shortens(learned, short, long):
    by = rules(learned=learned)
    assert (patience.short(by, "weights-load"), patience.long(by, "weights-load")) == (short, long)
    assert patience.hot(by, "weights-load") >= patience.hot(rules(), "weights-load")


def test_a_stretch_that_good_starts_have_is_not_called_stuck():
    told = Story().goes(22, **BUSY, lines=("Capturing graphs",)).goes(100)
    assert first(watch(told.samples, rules(learned=(("graph-capture", 12.0),))), "stuck").idle_for >= 60.0


@pytest.mark.parametrize("phase", ["import", "dist-init", "weights-load", "kv-cache", "jit-compile", "graph-capture"])
def test_the_callers_cap_is_a_cap_on_all(phase):
    by = rules(limits=Limits(patience=20.0), learned=((phase, 100.0),))
    asked = (patience.short, patience.long, patience.busy, patience.hot)
    assert [ask(by, phase) for ask in asked] == [20.0] * 4
    assert patience.hot(rules(), phase) >= patience.long(rules(), phase) >= patience.short(rules(), phase)


def test_the_longest_still_stretch_that_ended_well_is_remembered_by_phase():
    told = Story().goes(22, **BUSY, lines=("Starting to load model",))
    told.goes(6).goes(2, **BUSY).goes(9).goes(2, **BUSY, lines=("Capturing graphs",)).goes(4).goes(3, **BUSY)
    longest = dict(watch(told.samples)[-1].longest_still)
    assert 8.0 <= longest["weights-load"] <= 10.0
    assert 3.0 <= longest["graph-capture"] <= 5.0


@pytest.mark.parametrize("wanted", ["gap", "quiet", "never moved again"])
def test_a_stretch_that_did_not_end_in_movement_is_not(wanted):
    told = Story().goes(22, **BUSY)
    if wanted == "gap":
        told.goes(5)
        told.t += 30.0
        told.goes(1)
    elif wanted == "quiet":
        told.goes(50, quiet_until=told.t + 50.0)
    else:
        told.goes(9)
    assert watch(told.samples)[-1].longest_still == ()


# ---------------------------------------------------------------------------------------------------- timers


@pytest.mark.parametrize(
    ("engine", "words", "version"),
    [(VLLM, ("vllm", "serve", "M"), "0.32.0"), (SGLANG, ("sglang", "serve", "M"), "0.5.23"),
     (VLLM, ("vllm", "serve", "M"), None), (SGLANG, ("sglang", "serve", "M"), None)],
)  # fmt: skip
def test_at_the_defaults_no_timer_comes_before_ours(engine, words, version):
    assert timer_warnings(engine, launch(*words, version=version), Limits()) == ()


def test_a_timer_that_was_set_below_our_patience_is_told_with_how_to_change_it():
    env = (("VLLM_ENGINE_READY_TIMEOUT_S", "60"),)
    (warning,) = timer_warnings(VLLM, launch(env=env, version="0.32.0"), Limits())
    assert "ends the server after 60 s" in warning
    assert "VLLM_ENGINE_READY_TIMEOUT_S" in warning


@pytest.mark.parametrize("word", [("--watchdog-timeout", "20"), ("--watchdog-timeout=20",)])
def test_an_option_is_read_in_both_spellings(word):
    (warning,) = timer_warnings(SGLANG, launch("sglang", "serve", "M", *word, version="0.5.23"), Limits())
    assert "scheduler watchdog ends the server after 20 s" in warning


def test_a_limit_of_ours_that_was_raised_over_a_timer_is_told():
    warnings = timer_warnings(SGLANG, launch("sglang", "serve", "M", version="0.5.23"), Limits(unclear=3600.0))
    assert any("NCCL collectives" in text and "Limits.unclear (3600 s)" in text for text in warnings)


def test_waiting_for_peers_counts_with_several_machines_only():
    def told(nodes):
        return timer_warnings(SGLANG, launch("sglang", "serve", "M", nodes=nodes, version="0.5.23"), Limits())

    assert told(1) == ()
    assert any("Limits.waiting" in text for text in told(2))


def test_a_timer_of_another_version_or_one_that_only_logs_is_not_told():
    env = (("VLLM_ENGINE_READY_TIMEOUT_S", "60"),)
    assert timer_warnings(VLLM, launch(env=env, version="0.14.0"), Limits()) == ()
    soft = launch("sglang", "serve", "M", "--soft-watchdog-timeout", "5", version="0.5.23")
    assert timer_warnings(SGLANG, soft, Limits()) == ()


def test_a_value_that_is_no_number_is_the_default():
    env = (("VLLM_ENGINE_READY_TIMEOUT_S", "soon"),)
    assert timer_warnings(VLLM, launch(env=env, version="0.32.0"), Limits()) == ()
