"""No fallback adds an option that the installed engine rejects: asked of the engine's own parser, not of a table."""

import json
import subprocess
from dataclasses import replace

import pytest
from real_engines import HERE, sglang_command, vllm_command

from hangguard.engines import ENGINES, engine_named
from hangguard.launching import read_command

OFF = {
    ("vllm", "eager"): "enforce_eager",
    ("vllm", "no-custom-all-reduce"): "disable_custom_all_reduce",
    ("sglang", "no-cuda-graph"): "disable_cuda_graph",
    ("sglang", "no-custom-all-reduce"): "disable_custom_all_reduce",
}
"""The field of the engine's own namespace that each fallback sets."""

# What a user may have written already; each fallback must find a form beside it that the parser takes.
WRITTEN = {
    "vllm": [
        [],
        ["--no-enforce-eager"],
        ["--compilation-config", '{"cudagraph_mode": "FULL"}'],
        ["-O2"],
        ["--enable-prefix-caching", "--gpu-memory-utilization=0.5"],
    ],
    "sglang": [
        [],
        ["--cuda-graph-backend-decode", "full"],
        ["--cuda-graph-backend-decode=full", "--cuda-graph-backend-prefill=breakable"],
        ["--cuda-graph-config", '{"decode": {"backend": "full"}}'],
        ["--disable-decode-cuda-graph"],
        ["--mem-fraction-static=0.5"],
    ],
}


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def engine(request):
    return engine_named(request.param)


@pytest.fixture(scope="module")
def env(engine, request):
    return request.getfixturevalue(f"{engine.name}_env")


@pytest.fixture(scope="module")
def launched(engine, env, tmp_path_factory):
    """Return a function: the launch of a command on two ranks with these further words."""
    spell = {"vllm": vllm_command, "sglang": sglang_command}[engine.name]
    folder = tmp_path_factory.mktemp("model")

    def launch(words=()):
        return read_command(spell(env, folder, 18999, "--tensor-parallel-size", "2", *words))[0]

    return launch


@pytest.fixture(scope="module")
def ask_parser(engine, env, tmp_path_factory):
    """Return a function: what the engine's own parser says to each launch. The imports happen once."""
    said = tmp_path_factory.mktemp("parser") / "stderr"
    with (
        said.open("w") as sink,
        subprocess.Popen(
            [env / "bin" / "python", HERE / "parse_argv.py", engine.name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sink, text=True,
        ) as parser,
    ):  # fmt: skip

        def ask(*launches):
            answers = []
            for launch in launches:
                parser.stdin.write(json.dumps(launch.argv[engine.recognise(launch.argv) :]) + "\n")
                parser.stdin.flush()
                line = parser.stdout.readline()
                assert line, said.read_text()[-3000:]
                answers.append(json.loads(line))
            return answers

        yield ask
        parser.kill()


def with_words(launch, *words):
    return replace(launch, argv=(*launch.argv, *words))


def test_the_version_and_the_options_are_found_without_running_the_engine(engine, launched):
    launch = launched()
    assert launch.engine == engine.name
    assert launch.version is not None
    assert launch.options is not None
    assert "--disable-custom-all-reduce" in launch.options


def test_the_check_can_fail(ask_parser, launched):
    sound, invented, misused = ask_parser(
        launched(), with_words(launched(), "--no-such-flag"), with_words(launched(), "--port", "many")
    )
    assert sound["accepted"], sound["message"]
    assert not invented["accepted"]
    assert "unrecognized arguments: --no-such-flag" in invented["message"]
    assert not misused["accepted"]


def test_every_form_of_every_fallback_is_accepted(engine, ask_parser, launched):
    changed, told = [], []
    for words in WRITTEN[engine.name]:
        for launch in (launched(words), replace(launched(words), options=None)):
            for fallback in engine.fallbacks:
                after = fallback.change(launch)
                assert after is not None, f"{fallback.name} does not apply beside {words}"
                changed.append(after)
                told.append((fallback.name, words))
    for (name, words), answer in zip(told, ask_parser(*changed), strict=True):
        assert answer["accepted"], f"{name} beside {words}: {answer['message']}"
        if not words:
            assert answer["parsed"][OFF[engine.name, name]] is True


def test_all_fallbacks_together_are_accepted(engine, ask_parser, launched):
    launch = launched()
    for fallback in engine.fallbacks:
        launch = fallback.change(launch) or launch
    assert all(fallback.change(launch) is None for fallback in engine.fallbacks)
    (answer,) = ask_parser(launch)
    assert answer["accepted"], answer["message"]
    assert all(answer["parsed"][OFF[engine.name, fallback.name]] for fallback in engine.fallbacks)


def test_every_engine_with_fallbacks_is_asked():
    assert {engine.name for engine in ENGINES if engine.fallbacks} == set(WRITTEN)
