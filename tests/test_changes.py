"""Edits of a launch: read as the engines' parsers read, applied twice changes nothing."""

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hangguard.changes import (
    as_shell,
    describe,
    has_flag,
    spelled_out,
    value_of,
    with_flag,
    with_variable,
    without_flag,
    words_of,
)
from hangguard.facts import Launch

OPTIONS = frozenset(("--max-len", "--max-size", "--data-size", "--data-size-local", "--graph-config", "--eager"))


def launch_of(*argv, env=(), options=None):
    return Launch(argv=argv, env=tuple(env), cwd="/", url="http://h:1", host="h", port=1, options=options)


@pytest.mark.parametrize(
    ("argv", "names", "value"),
    [
        (["--x", "1"], ["--x"], "1"),
        (["--x=1"], ["--x"], "1"),
        (["--x=1", "--x", "2"], ["--x"], "2"),
        (["--x", "2", "-x=1"], ["--x", "-x"], "1"),
        (["--served_model_name", "m"], ["--served-model-name"], "m"),
        (["--served-model-name=m=n"], ["--served_model_name"], "m=n"),
        (["--x", "--y"], ["--x"], None),
        (["--x", "-1"], ["--x"], "-1"),
        (["--x", "-0.5"], ["--x"], "-0.5"),
        (["--xx", "1"], ["--x"], None),
        (["--", "--x", "1"], ["--x"], None),
        (["--x="], ["--x"], ""),
        (["--x"], ["--x"], None),
        ([], ["--x"], None),
        (["-tp", "8"], ["--tensor-parallel-size", "-tp"], "8"),
    ],
)
def test_the_value_that_counts(argv, names, value):
    assert value_of(argv, *names) == value


def test_has_flag():
    assert has_flag(["--enforce_eager"], "--enforce-eager")
    assert has_flag(["--x=1"], "--y", "--x")
    assert not has_flag(["--", "--x"], "--x")
    assert not has_flag(["x", "-"], "--x")


@pytest.mark.parametrize(
    ("before", "name", "value", "after"),
    [
        (["s", "M"], "--x", None, ["s", "M", "--x"]),
        (["s", "--x", "M"], "--x", None, ["s", "--x", "M"]),  # a switch eats no word
        (["s", "--x", "1", "--y"], "--x", "2", ["s", "--x=2", "--y"]),
        (["s", "--x", "1", "--x=3", "M"], "--x", "2", ["s", "--x=2", "M"]),
        (["s", "--x", "2"], "--x", "2", ["s", "--x", "2"]),
        (["s", "--", "M"], "--x", "2", ["s", "--x=2", "--", "M"]),
    ],
)
def test_with_flag(before, name, value, after):
    changed = with_flag(launch_of(*before), name, value)
    assert list(changed.argv) == after
    assert with_flag(changed, name, value) == changed


def test_a_contradicting_flag_goes():
    changed = with_flag(launch_of("s", "--no-x", "M"), "--x", replacing=("--no-x",))
    assert changed.argv == ("s", "--x", "M")


def test_without_flag():
    launch = launch_of("s", "--x", "1", "--y", "M", "--x=2")
    assert without_flag(launch, "--x").argv == ("s", "--y", "M")
    assert without_flag(launch, "--y", switch=True).argv == ("s", "--x", "1", "M", "--x=2")
    assert without_flag(launch, "--z") is launch


def test_a_variable_reaches_the_server_also_through_env():
    launch = launch_of("env", "A=1", "s", "A=1", env=[("A", "1"), ("Z", "1")])
    changed = with_variable(launch, "A", "2")
    assert changed.argv == ("env", "A=2", "s", "A=1")
    assert changed.env == (("A", "2"), ("Z", "1"))
    assert with_variable(changed, "A", "2") == changed


def test_only_the_servers_own_words_are_edited():
    wrapped = ("timeout", "-k", "5", "9", "uv", "run", "--python", "3.11", "--", "vllm", "serve", "M", "-k", "1")
    assert without_flag(launch_of(*wrapped), "-k").argv == wrapped[:-2]
    assert without_flag(launch_of(*wrapped), "--python") == launch_of(*wrapped)
    assert with_flag(launch_of(*wrapped), "--x", "1").argv == (*wrapped, "--x=1")
    assert with_flag(launch_of(*wrapped), "-k", "2").argv == (*wrapped[:-2], "-k=2")


def test_a_variable_reaches_the_server_through_an_env_that_clears_or_unsets_it():
    cleared = with_variable(launch_of("env", "-i", "PATH=/bin", "nohup", "s"), "A", "2")
    assert cleared.argv == ("env", "-i", "PATH=/bin", "A=2", "nohup", "s")
    assert with_variable(cleared, "A", "2") == cleared
    unset = with_variable(launch_of("nice", "env", "-u", "A", "s"), "A", "2")
    assert unset.argv == ("nice", "env", "-u", "A", "A=2", "s")


def test_the_words_of_a_config_file_come_before_those_of_the_command():
    launch = Launch(
        argv=("nice", "s", "--x", "1"),
        file_args=("--x", "0", "--y"),
        env=(),
        cwd="/",
        url="http://h:1",
        host="h",
        port=1,
    )
    assert words_of(launch) == ("--x", "0", "--y", "s", "--x", "1")
    assert value_of(words_of(launch), "--x") == "1"


def test_describe():
    before = launch_of("s", "--x", "1", "--api-key", "abcdefgh", env=[("A", "1"), ("HF_TOKEN", "qwertyui")])
    assert describe(before, before) == ""
    assert describe(before, with_flag(before, "--enforce-eager")) == "+ --enforce-eager"
    assert describe(before, with_flag(before, "--x", "2")) == "- --x 1, + --x=2"
    assert describe(before, with_variable(before, "NCCL_DEBUG", "INFO")) == "+ NCCL_DEBUG=INFO"
    secret = with_variable(with_flag(before, "--api-key", "zyxwvuts"), "HF_TOKEN", "mnbvcxyz")
    assert not any(word in describe(before, secret) for word in ("abcdefgh", "qwertyui", "zyxwvuts", "mnbvcxyz"))


def test_as_shell_is_read_back_by_a_shell_and_holds_no_key():
    launch = launch_of("s", "a b", "--json", '{"x": "$HOME"}', "--api-key", "abcdefgh")
    assert shlex.split(as_shell(launch)) == ["s", "a b", "--json", '{"x": "$HOME"}', "--api-key", "REDACTED"]


words = st.lists(
    st.sampled_from(["--x", "--x=1", "--y", "-y", "1", "-1", "M", "--", "--x_z", "env", "A=1", ""]), max_size=8
)


@given(words, st.sampled_from(["--x", "--y", "--x-z"]), st.sampled_from([None, "1", "", "a b"]))
def test_every_edit_twice_is_the_same_as_once(argv, name, value):
    launch = launch_of("s", *argv)
    once = with_flag(launch, name, value)
    assert with_flag(once, name, value) == once
    assert has_flag(once.argv, name)
    assert value is None or value_of(once.argv, name) == value
    gone = without_flag(once, name)
    assert not has_flag(gone.argv, name)
    assert without_flag(gone, name) == gone
    varied = with_variable(launch, "A", "2")
    assert with_variable(varied, "A", "2") == varied


@pytest.mark.parametrize(
    ("word", "full"),
    [
        ("--max-l", "--max-len"),
        ("--max_l=3", "--max-len=3"),
        ("--e", "--eager"),
        ("--data-size-", "--data-size-local"),
        ("--no-eag", "--no-eager"),
        ("--graph-conf.mode=0", "--graph-config.mode=0"),
        ("--max", "--max"),  # several: a usage error of the server's
        ("--data-size", "--data-size"),  # an option of its own, and no abbreviation
        ("--data_size=2", "--data_size=2"),
        ("--no-eager", "--no-eager"),
        ("--other", "--other"),
        ("--", "--"),
        ("-e", "-e"),
        ("max-l", "max-l"),
    ],
)
def test_an_abbreviated_option_is_spelled_out_where_it_can_be_one_only(word, full):
    assert spelled_out((word, "1"), OPTIONS) == (full, "1")
    assert spelled_out((word, "1"), None) == (word, "1")
    assert spelled_out(("--", word), OPTIONS) == ("--", word)


def test_an_edit_of_an_abbreviated_option_changes_that_very_word():
    launch = launch_of("s", "--max_l", "3", "M", "--graph-c={}", options=OPTIONS)
    assert with_flag(launch, "--max-len", "4").argv == ("s", "--max-len=4", "M", "--graph-c={}")
    assert with_flag(launch, "--graph-config", "{1}").argv == ("s", "--max_l", "3", "M", "--graph-config={1}")
    assert without_flag(launch, "--max-len").argv == ("s", "M", "--graph-c={}")
    assert with_flag(launch, "--max-len", "3") == launch
    assert with_flag(launch_of("s", "--no-ea", options=OPTIONS), "--eager", replacing=("--no-eager",)).argv[1:] == (
        "--eager",
    )
    assert words_of(launch) == ("s", "--max-len", "3", "M", "--graph-config={}")


def test_what_may_be_another_option_is_left_alone_by_an_edit():
    launch = launch_of("s", "--max", "3", "--data-size", "2", options=OPTIONS)
    assert with_flag(launch, "--max-len", "4").argv == (*launch.argv, "--max-len=4")
    assert with_flag(launch, "--data-size-local", "1").argv == (*launch.argv, "--data-size-local=1")
    assert without_flag(launch, "--max-size", "--data-size-local") == launch
