"""Fallbacks: argv before and after, by version; twice changes nothing; never an option that the version lacks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hangguard.changes import has_flag
from hangguard.engines import ENGINES, SGLANG, VLLM
from hangguard.facts import Launch

DECODE = "--cuda-graph-backend-decode=disabled"
PREFILL = "--cuda-graph-backend-prefill=disabled"
BACKENDS = frozenset(("--cuda-graph-backend-decode", "--cuda-graph-backend-prefill"))
JSON_FULL = '{"decode": {"backend": "full", "max_bs": 8}, "prefill": {"backend": "disabled"}}'
JSON_OFF = '{"decode": {"backend": "disabled", "max_bs": 8}, "prefill": {"backend": "disabled"}}'


def launch_of(args, *, version=None, options=None, ranks=1, start=("python", "-m", "sglang.launch_server")):
    return Launch(
        argv=(*start, *args),
        env=(),
        cwd="/",
        version=version,
        options=None if options is None else frozenset(options),
        url="http://127.0.0.1:1",
        host="127.0.0.1",
        port=1,
        ranks=ranks,
    )


def fallback(engine, name):
    return next(f for f in engine.fallbacks if f.name == name)


SGLANG_CASES = [
    # version, options found in the installed source, arguments, what they become (None: does not apply)
    ("0.4.6.post5", None, [], ["--disable-cuda-graph"]),
    ("0.5.13.post1", None, [], ["--disable-cuda-graph"]),
    ("0.5.14", None, [], ["--disable-cuda-graph"]),
    ("0.5.23", None, [], ["--disable-cuda-graph"]),
    (None, None, [], ["--disable-cuda-graph"]),
    ("0.5.24", None, [], [DECODE, PREFILL]),
    ("0.6.0", None, [], [DECODE, PREFILL]),
    ("0.6.0", {"--disable-cuda-graph"}, [], ["--disable-cuda-graph"]),
    ("0.5.23", {"--cuda-graph-backend-decode", "--cuda-graph-backend-prefill"}, [], [DECODE, PREFILL]),
    ("0.7.0", {"--something-else"}, [], None),
    ("0.5.23", None, ["--disable-cuda-graph"], None),
    ("0.5.23", None, ["--disable-cuda-gr"], None),  # argparse takes the abbreviation
    ("0.5.23", None, ["--disable-cuda-graph-padding"], ["--disable-cuda-graph-padding", "--disable-cuda-graph"]),
    ("0.5.23", None, [DECODE, PREFILL], None),
    ("0.5.23", None, ["--cuda-graph-backend-decode", "disabled", PREFILL], None),
    ("0.5.23", None, ["--disable-decode-cuda-graph", "--disable-prefill-cuda-graph"], None),
    # A named backend wins over the old flag: it has to be edited.
    ("0.5.23", None, ["--cuda-graph-backend-decode", "full"], [DECODE, PREFILL]),
    (
        "0.5.23",
        None,
        ["--cuda-graph-backend-decode=full", "--disable-cuda-graph"],
        [DECODE, "--disable-cuda-graph"],
    ),
    ("0.5.23", None, [PREFILL], [PREFILL, DECODE]),
    ("0.5.23", None, ["--cuda-graph-config", JSON_FULL], [f"--cuda-graph-config={JSON_OFF}"]),
    ("0.5.23", None, [f"--cuda-graph-config={JSON_OFF}"], None),
    ("0.5.23", None, ["--cuda-graph-config", "not json"], None),
    ("0.5.23", None, ["--tp", "8", "--", "x"], ["--tp", "8", "--disable-cuda-graph", "--", "x"]),
]


@pytest.mark.parametrize(("version", "options", "before", "after"), SGLANG_CASES)
def test_sglang_without_graphs(version, options, before, after):
    launch = launch_of(before, version=version, options=options)
    changed = fallback(SGLANG, "no-cuda-graph").change(launch)
    assert (None if changed is None else list(changed.argv[3:])) == after
    if changed is not None:
        assert fallback(SGLANG, "no-cuda-graph").change(changed) is None


VLLM_CASES = [
    (None, None, [], ["--enforce-eager"]),
    ("0.8.5", None, [], ["--enforce-eager"]),
    ("0.33.0", None, [], ["--enforce-eager"]),
    ("0.33.0", {"--enforce-eager"}, [], ["--enforce-eager"]),
    ("0.40.0", {"--something-else"}, [], None),
    ("0.32.0", None, ["--enforce-eager"], None),
    ("0.32.0", None, ["--enforce_eager"], None),
    ("0.32.0", None, ["--enforce-e"], None),
    ("0.32.0", None, ["-O0"], None),
    ("0.32.0", None, ["-O=0"], None),
    ("0.32.0", None, ["-O", "0"], None),
    ("0.32.0", None, ["--optimization-level", "0"], None),
    ("0.32.0", None, ["--optimization_level=0"], None),
    ("0.32.0", None, ["-O2"], ["-O2", "--enforce-eager"]),
    ("0.32.0", None, ["--no-enforce-eager"], ["--enforce-eager"]),
    ("0.32.0", None, ["--enforce-eager", "--no-enforce-eager"], ["--enforce-eager"]),
    ("0.32.0", None, ["-cc", '{"cudagraph_mode":"NONE","mode":0}'], None),
    ("0.10.1", None, ["--compilation-config", '{"cudagraph_mode":"NONE","level":0}'], None),
    ("0.32.0", None, ["--compilation-config.cudagraph_mode=NONE", "--compilation-config.mode", "0"], None),
    # Graphs alone are off: it still compiles, so there is something to switch off.
    (
        "0.32.0",
        None,
        ["-cc", '{"cudagraph_mode":"NONE"}'],
        ["-cc", '{"cudagraph_mode":"NONE"}', "--enforce-eager"],
    ),
    ("0.32.0", None, ["-cc", "not json"], ["-cc", "not json", "--enforce-eager"]),
]


@pytest.mark.parametrize(("version", "options", "before", "after"), VLLM_CASES)
def test_vllm_eager(version, options, before, after):
    launch = launch_of(before, version=version, options=options, start=("vllm", "serve", "M"))
    changed = fallback(VLLM, "eager").change(launch)
    assert (None if changed is None else list(changed.argv[3:])) == after
    if changed is not None:
        assert fallback(VLLM, "eager").change(changed) is None


@pytest.mark.parametrize(("engine", "start"), [(SGLANG, ("sglang", "serve", "M")), (VLLM, ("vllm", "serve", "M"))])
def test_custom_all_reduce_goes_only_where_there_are_ranks(engine, start):
    change = fallback(engine, "no-custom-all-reduce").change
    assert change(launch_of([], start=start)) is None
    assert change(launch_of(["--disable-custom-all-reduce"], ranks=8, start=start)) is None
    assert change(launch_of([], ranks=8, options={"--x"}, start=start)) is None
    changed = change(launch_of(["--tp", "8"], ranks=8, start=start))
    assert changed.argv == (*start, "--tp", "8", "--disable-custom-all-reduce")
    assert change(changed) is None


@pytest.mark.parametrize("engine", [SGLANG, VLLM], ids=lambda engine: engine.name)
def test_a_command_that_hides_its_flags_is_not_changed(engine):
    for start in (("./serve.sh",), ("docker", "run", "image")):
        for each in engine.fallbacks:
            assert each.change(launch_of([], ranks=8, start=start)) is None


def test_what_a_fallback_says_of_itself():
    for engine in ENGINES:
        for each in engine.fallbacks:
            assert each.alters == "speed"
            assert each.cost.endswith(".")
            assert each.answers
    assert fallback(SGLANG, "no-cuda-graph").answers[0] == "graph-capture"
    assert SGLANG.fallbacks[0].name == "no-cuda-graph"


options = st.frozensets(
    st.sampled_from(
        [
            *("--disable-cuda-graph", "--cuda-graph-backend-decode", "--cuda-graph-backend-prefill"),
            *("--disable-custom-all-reduce", "--enforce-eager", "--other"),
        ]
    )
)
words = st.lists(
    st.sampled_from(
        [
            *(
                "--disable-cuda-graph",
                "--enforce-eager",
                "--no-enforce-eager",
                "-O0",
                "-O",
                "0",
                "--",
                "M",
                "--tp",
                "2",
            ),
            *(DECODE, "--cuda-graph-backend-prefill", "full", "disabled", "--disable-custom-all-reduce", "--x=1"),
            *("--cuda-graph-config", JSON_FULL, "-cc", '{"mode":0}'),
        ]
    ),
    max_size=8,
)


@given(words, options, st.sampled_from([("sglang", "serve"), ("vllm", "serve")]), st.integers(1, 8))
def test_no_change_adds_an_option_that_the_engine_lacks_and_none_changes_twice(args, known, start, ranks):
    engine = SGLANG if start[0] == "sglang" else VLLM
    launch = launch_of(args, options=known, start=start, ranks=ranks)
    for each in engine.fallbacks:
        changed = each.change(launch)
        if changed is None:
            continue
        assert changed.argv != launch.argv
        added = {word.partition("=")[0] for word in changed.argv} - {word.partition("=")[0] for word in launch.argv}
        assert added <= known
        again = each.change(changed)
        assert again is None or again == changed
        assert has_flag(changed.argv, "--tp") == has_flag(launch.argv, "--tp")


@pytest.mark.parametrize(
    ("options", "args", "changed"),
    [
        ({"--cuda-graph-config"}, [f"--cuda-graph-conf={JSON_FULL}"], [f"--cuda-graph-config={JSON_OFF}"]),
        (BACKENDS, ["--cuda-graph-backend-d", "full"], [DECODE, PREFILL]),
        (BACKENDS, ["--cuda-graph-backend-d", "disabled", PREFILL], None),
    ],
)  # fmt: skip
def test_an_abbreviated_option_is_edited_in_its_place_and_never_added_twice(options, args, changed):
    launch = launch_of(args, version="0.5.23", options={*options, "--disable-cuda-graph"})
    after = fallback(SGLANG, "no-cuda-graph").change(launch)
    assert (list(after.argv[3:]) if after else None) == changed
