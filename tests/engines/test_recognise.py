"""Which command starts which engine, and where its own arguments begin."""

import json
import shlex

import pytest

from hangguard.engines import ENGINES, GENERIC, SGLANG, VLLM, engine_named
from hangguard.errors import BadLaunch
from hangguard.facts import Launch

COMMANDS = [
    ("vllm serve M", "vllm", ["M"]),
    ("/venv/bin/vllm serve M --port 1", "vllm", ["M", "--port", "1"]),
    ("python -m vllm.entrypoints.openai.api_server --model M", "vllm", ["--model", "M"]),
    ("python3.12 -m vllm.entrypoints.cli.main serve M", "vllm", ["M"]),
    ("python /venv/bin/vllm serve M", "vllm", ["M"]),
    ("/venv/bin/python3 -u -m sglang.launch_server --model-path M", "sglang", ["--model-path", "M"]),
    ("python -um sglang.launch_server --tp 8", "sglang", ["--tp", "8"]),
    ("python -msglang.launch_server --tp 8", "sglang", ["--tp", "8"]),
    ("python -W ignore -X dev -B -m sglang.launch_server", "sglang", []),
    ("python -Wignore -OO -m sglang.launch_server", "sglang", []),
    ("sglang serve --model-path M", "sglang", ["--model-path", "M"]),
    ("env A=B C=D sglang serve M", "sglang", ["M"]),
    ("/usr/bin/env A=B python -m sglang.launch_server", "sglang", []),
    ("env vllm serve M", "vllm", ["M"]),
    ("vllm bench serve", None, None),
    ("vllm", None, None),
    ("sglang generate", None, None),
    ("python -m sglang.bench_serving", None, None),
    ("python -m vllm.entrypoints.cli.main bench", None, None),
    ("python -c 'import vllm' serve", None, None),
    ("python serve.py", None, None),
    ("nohup vllm serve M", None, None),
    ("env -i vllm serve M", None, None),
    ("env A=B", None, None),
    ("docker run image vllm serve M", None, None),
    ("python", None, None),
    ("python -W", None, None),
    ("xpython -m sglang.launch_server", None, None),
    ("./serve_vllm.sh M", None, None),
]


@pytest.mark.parametrize(("command", "name", "args"), COMMANDS)
def test_recognise(command, name, args):
    argv = tuple(shlex.split(command))
    found = {engine.name: engine.recognise(argv) for engine in ENGINES}
    found = {engine: index for engine, index in found.items() if index is not None}
    assert list(found) == ([name] if name else [])
    if name:
        assert list(argv[found[name] :]) == args


def test_names():
    assert [engine_named(engine.name) for engine in ENGINES] == list(ENGINES) == [SGLANG, VLLM, GENERIC]
    with pytest.raises(BadLaunch, match="sglang, vllm, generic"):
        engine_named("tgi")


@pytest.mark.parametrize(
    ("args", "task"),
    [
        ([], "generate"),
        (["--task", "embed"], "embed"),
        (["--task=generate"], "generate"),
        (["--runner", "pooling"], "embed"),
        (["--convert", "embed"], "embed"),
    ],
)
def test_vllm_task(args, task):
    assert VLLM.task(tuple(args)) == task


@pytest.mark.parametrize("engine", [SGLANG, VLLM], ids=lambda engine: engine.name)
@pytest.mark.parametrize(("task", "path"), [("generate", "/v1/completions"), ("embed", "/v1/embeddings")])
def test_ready_means_that_something_was_computed(engine, task, path):
    launch = Launch(argv=("x",), env=(), cwd="/", url="http://h:1", host="h", port=1, task=task)
    request = engine.ready(launch)
    body = json.loads(request.body)
    assert (request.method, request.path, body["model"]) == ("POST", path, "{model}")
    assert task == "embed" or (body["max_tokens"], body["temperature"]) == (1, 0)


def test_engines_are_pure():
    import ast
    from pathlib import Path

    import hangguard.engines

    banned = {"os", "time", "subprocess", "socket", "logging", "anyio", "psutil", "httpx"}
    for file in Path(hangguard.engines.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not banned & {name.split(".")[0] for name in names}, file
