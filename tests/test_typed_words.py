"""On the command line nothing speaks of arguments of the library; what a server or a program says is left as it is."""

import pytest

from hangguard.cli.words import TYPED, as_typed


@pytest.mark.parametrize(
    ("library", "typed"),
    [
        ("Give url='http://127.0.0.1:8000', or put", "Give --url http://127.0.0.1:8000, or put"),
        ("Give pid=, url= or match=.", "Give PID, --url or --match."),
        (
            "on_hang='act' needs pid= and started= (its start time). It is what diagnose() shows",
            "--on-hang act needs PID and --started (its start time). It is what hangguard diagnose --json shows",
        ),
        ("The server is named by url= and match=.", "The server is named by --url and --match."),
        ("Limits.patience must be a number", "--patience must be a number"),
        ("Give another cwd=.", "Give another working directory."),
        ("Check its path, and cwd=.", "Check its path, and the working directory."),
        ("With engine='vllm' or 'sglang', flags", "With --engine vllm or 'sglang', flags"),
        ("in the command (or VLLM_API_KEY in env=), or give ready='/health'",
         "in the command (or VLLM_API_KEY in the environment), or give --ready-path /health"),
        ("url='' is no base URL", "--url '' is no base URL"),
        ("match is empty, and would mean", "--match is empty, and would mean"),
        ("raise ready_within if it was still moving", "raise --ready-within if it was still moving"),
        ("for the generic engine; name yours with engine=", "for the generic engine; name yours with --engine"),
    ],
)  # fmt: skip
def test_arguments_are_named_as_they_are_typed(library, typed):
    assert as_typed(library) == typed


@pytest.mark.parametrize(
    "text",
    [
        "expired (ready_within) in graph-capture",
        "its last words: Initializing LLM engine (v0.32) with config: model='M', log='x', url='http://h:1'",
        "python serve.py --url='http://h:1' --engine=x url= log=",
        "with url=http://h:1 and engine=LLMEngine(...)",
        "cwd=/tmp",
        "/home/match is here",
        "the within is 3",
    ],
)
def test_what_only_looks_like_one_is_left_as_it_is(text):
    assert as_typed(text) == text


def test_every_option_in_the_table_is_one_of_the_command_line():
    from hangguard.cli.app import cli

    known = {option for command in cli.commands.values() for one in command.params for option in one.opts}
    assert {word for word in TYPED.values() if word.startswith("--")} <= known
