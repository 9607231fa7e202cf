"""What the documentation shows is true: its Python compiles, its runnable parts run, its commands are those of CI."""

import ast
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hangguard.cli import exits
from hangguard.cli.app import cli

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(?P<mark><!-- runnable -->\n+)?^```python\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
RUN_WITHIN = 100
VLLM = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "M", "--port"]


def blocks():
    return [
        pytest.param(found, id=f"{page.name}-{number}")
        for page in PAGES
        for number, found in enumerate(BLOCK.finditer(page.read_text()), start=1)
    ]


@pytest.fixture
def run_python(tmp_path):
    """Run a program as a user would, but with the files of its run in a folder of the test's own."""
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}

    def run(*words):
        command = [sys.executable, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_WITHIN, check=False, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.mark.parametrize("block", blocks())
def test_a_python_block_compiles(block):
    compile(block["code"], "block", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("block", [param for param in blocks() if param.values[0]["mark"]])
def test_a_runnable_block_runs(block, run_python):
    assert run_python("-c", block["code"])


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_an_example_compiles(path):
    compile(path.read_text(), str(path), "exec")


def test_the_example_tells_what_is_refused_without_a_traceback(tmp_path):
    """A port that somebody has, and a command that cannot be meant: neither is a ``GaveUp``."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for command in (["vllm", "serve", "M", "--port", "{nothing}"], [*VLLM, port]):
            words = [sys.executable, str(ROOT / "examples" / "serve.py"), *command]
            env = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
            done = subprocess.run(words, capture_output=True, text=True, timeout=RUN_WITHIN, check=False, env=env)
            assert done.returncode == 1
            assert done.stderr.strip()
            assert "Traceback" not in done.stderr


def test_the_readme_calls_no_run_by_a_day_on_which_there_may_be_two():
    commands = re.findall(
        r"^\$ hangguard (?:wait|stop|status|clean) (\S*)", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    assert "RUN" in commands
    assert not [word for word in commands if re.fullmatch(r"\d{8}", word)]


def test_the_first_program_of_the_readme_catches_whatever_is_raised():
    code = next(found["code"] for found in BLOCK.finditer((ROOT / "README.md").read_text()))
    assert "except HangguardError" in code


def test_the_example_server_comes_up_anyway(run_python):
    said = run_python(str(ROOT / "examples" / "demo_server.py"))
    assert "the first attempt was stuck in graph-capture and was released" in said
    assert "answered:" in said


def test_ci_runs_the_test_command_of_the_readme():
    commands = re.findall(r"^```console\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    (command,) = [line for text in commands for line in text.splitlines() if line.endswith("nox")]
    assert command.removeprefix("$ ") in (ROOT / ".ci" / "run").read_text().splitlines()


def test_every_exit_code_stands_in_the_table():
    text = (ROOT / "docs" / "verdicts.md").read_text()
    table = text[text.index("## Exit codes") :]
    listed = codes_of_table(table)
    codes = {value for name, value in vars(exits).items() if name.isupper() and name != "SIGNAL_BASE"}
    assert listed == codes


def codes_of_help(command):
    told = " ".join(cli.commands[command].help.split()).partition("Exit codes: ")[2]
    return {int(code) for code in re.findall(r"(?:^|; |, |: )(\d+)(?=[ ,])", told)}


def codes_of_table(text):
    return {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}


@pytest.mark.parametrize("command", ["status", "wait", "stop"])
def test_the_page_about_runs_has_the_exit_codes_of_the_help(command):
    text = (ROOT / "docs" / "runs.md").read_text()
    (row,) = re.findall(rf"^\| `{command} RUN` \|.*\| (.*) \|$", text, re.MULTILINE)
    listed = {int(code) for code in re.findall(r"(?:^|; )(\d+) ", row)} | {exits.USAGE, exits.INTERNAL}
    assert listed == codes_of_help(command)


def test_the_page_about_verdicts_has_the_exit_codes_of_the_help():
    text = (ROOT / "docs" / "verdicts.md").read_text()
    run, looks, clean = (
        codes_of_table(part) for part in re.split(r"^Of `", text[text.index("## Exit") :], flags=re.MULTILINE)[-3:]
    )
    assert run == codes_of_help("run")
    assert looks == codes_of_help("diagnose") | codes_of_help("attach")
    assert clean | {exits.INTERNAL} == codes_of_help("clean")
    assert codes_of_help("preflight") == {0, 13, 126, 127, 2, 1}
    assert codes_of_help("ps") == {0, 22, 2, 1}


@pytest.mark.parametrize("command", sorted(set(cli.commands) - {"demo"}))
def test_every_exit_code_of_a_help_is_one_of_the_table_of_codes(command):
    known = {value for name, value in vars(exits).items() if name.isupper() and name != "SIGNAL_BASE"}
    assert codes_of_help(command)
    assert codes_of_help(command) <= known


def test_what_a_relaunch_without_a_change_says_is_explained():
    assert "starting the same once more: an unchanged" in " ".join((ROOT / "docs" / "verdicts.md").read_text().split())


def test_every_verdict_stands_in_the_table():
    from typing import get_args

    from hangguard.facts import Verdict

    text = (ROOT / "docs" / "verdicts.md").read_text()
    for kind in get_args(Verdict):
        assert f"`{kind.verdict}`" in text


def test_the_page_about_several_gpus_says_what_its_recordings_say():
    command = [sys.executable, str(ROOT / "tests" / "gpu" / "several_gpus_page.py")]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert (ROOT / "docs" / "several-gpus.md").read_text() == said
