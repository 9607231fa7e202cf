"""Where start-up is, from made markers and stacks."""

import pytest
from making import frames

from hangguard.facts import Marker, Stack, StackMarker, ThreadStack, Unseen
from hangguard.judge.phases import Place, advance, is_later, phase_of_stack

MARKERS = (
    Marker(pattern=r"Load weight begin", phase="weights-load"),
    Marker(pattern=r"Load weight end", phase="kv-cache", gap=True),
    Marker(pattern=r"KV Cache is allocated", phase="kv-cache"),
    Marker(pattern=r"Capture .* begin", phase="graph-capture"),
    Marker(pattern=r"begin", phase="warm-up"),
)
STACK_MARKERS = (
    StackMarker(function=r"capture", file="cuda_graph", phase="graph-capture"),
    StackMarker(function=r"(?:.*\.)?load_model", phase="weights-load"),
    StackMarker(function=r"init_dist", phase="dist-init"),
)


@pytest.mark.parametrize(
    ("lines", "phase", "gap"),
    [
        pytest.param([], "import", False, id="nothing said"),
        pytest.param(["hello", "Load weight begin"], "weights-load", False, id="a marker begins a phase"),
        pytest.param(["Load weight begin", "Load weight end"], "kv-cache", True, id="an end marker opens the gap"),
        pytest.param(["Load weight end", "KV Cache is allocated"], "kv-cache", False, id="the gap closes"),
        pytest.param(["KV Cache is allocated", "Load weight end"], "kv-cache", False, id="and does not open again"),
        pytest.param(["Capture decode begin", "Load weight begin"], "weights-load", False, id="the last marker wins"),
        pytest.param(["Capture decode begin"], "graph-capture", False, id="the first pattern of a line wins"),
    ],
)
def test_the_log_tells_the_phase(lines, phase, gap):
    place = advance(Place(since=1.0), lines, MARKERS, 5.0)
    assert (place.phase, place.gap) == (phase, gap)


def test_a_phase_keeps_its_beginning_while_its_markers_go_on():
    place = advance(Place(), ["Load weight begin"], MARKERS, 5.0)
    assert advance(place, ["Load weight begin"], MARKERS, 9.0).since == 5.0
    gap = advance(place, ["Load weight end"], MARKERS, 10.0)
    assert advance(gap, ["KV Cache is allocated"], MARKERS, 12.0).since == 10.0


def stack(*threads) -> Stack:
    made = tuple(
        ThreadStack(name="MainThread" if n == 0 else f"t{n}", thread_id=n, active=False, frames=f)
        for n, f in enumerate(threads)
    )
    return Stack(pid=1, started=1, title="worker", threads=made)


@pytest.mark.parametrize(
    ("made", "phase"),
    [
        pytest.param(stack(frames("acquire", "Runner.load_model", "init_dist")), "weights-load", id="innermost wins"),
        pytest.param(stack(frames("capture cuda_graph_runner.py", "load_model")), "graph-capture", id="file fits"),
        pytest.param(stack(frames("capture video.py")), None, id="file does not fit"),
        pytest.param(stack(frames("load_model_config")), None, id="the whole function name must fit"),
        pytest.param(
            stack(frames("capture cuda_graph.py"), frames("init_dist")), "dist-init", id="earliest of its threads"
        ),
        pytest.param(stack(), None, id="no threads"),
        pytest.param(Stack(pid=1, started=1, title="w", threads=Unseen("refused")), None, id="unseen"),
    ],
)
def test_a_stack_tells_the_phase(made, phase):
    assert phase_of_stack(made, STACK_MARKERS) == phase


def test_phases_have_an_order():
    assert is_later("graph-capture", than="weights-load")
    assert not is_later("weights-load", than="weights-load")
    assert not is_later("import", than="serving")
