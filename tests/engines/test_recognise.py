"""Which command starts which engine, and where its own arguments begin."""

import json
import shlex
from dataclasses import replace

import pytest

from hangguard.engines import ENGINES, GENERIC, SGLANG, VLLM, engine_named, sglang, vllm
from hangguard.engines.answered import task_of_architectures
from hangguard.engines.common import version_key
from hangguard.engines.counters import CANARY_TOKENS
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
    ("nohup vllm serve M", "vllm", ["M"]),
    ("env -i vllm serve M", "vllm", ["M"]),
    ("env A=B nohup numactl -N 0 -m 0 uv run --python 3.11 -- vllm serve M --x", "vllm", ["M", "--x"]),
    ("conda run -n e --no-capture-output python -m sglang.launch_server --tp 8", "sglang", ["--tp", "8"]),
    ("numactl --nobody-knows 0 vllm serve M", None, None),
    ("srun -N 1 vllm serve M", None, None),
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
        ([], None),
        (["--task", "embed"], "embed"),
        (["--task=generate"], "generate"),
        (["--task=auto"], None),
        (["--task", "score"], "rerank"),
        (["--task", "reward"], "pool"),
        (["--task", "transcription"], "transcribe"),
        (["--runner", "pooling"], "embed"),
        (["--runner", "pooling", "--convert", "classify"], "classify"),
        (["--runner", "auto"], None),
        (["--convert", "embed"], "embed"),
        (["--hf-overrides", '{"architectures": ["Qwen3ForSequenceClassification"]}'], "classify"),
        (["--hf-overrides", '{"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1}'], "rerank"),
        (["--hf-overrides", "{", "--runner", "pooling"], "embed"),
        (["--hf-overrides", '{"x": 1}'], None),
    ],
)
def test_vllm_task(args, task):
    assert VLLM.task(tuple(args)) == task


@pytest.mark.parametrize(
    ("names", "labels", "task"),
    [
        (["LlamaForCausalLM"], None, "generate"),
        (["BertModel"], None, "embed"),
        (["XLMRobertaForSequenceClassification"], 1, "rerank"),
        (["Qwen2ForSequenceClassification"], 5, "classify"),
        (["BertForTokenClassification"], None, "pool"),
        (["InternLM2ForRewardModel"], None, "pool"),
        (["WhisperForConditionalGeneration"], None, "transcribe"),
        (["Qwen2_5_VLForConditionalGeneration"], None, "generate"),
        (["Something", "BertModel"], None, "embed"),
        (["Contriever"], None, None),
        ([], None, None),
    ],
)
def test_architectures_tell_the_task(names, labels, task):
    assert task_of_architectures(names, labels=labels) == task


@pytest.mark.parametrize("engine", [SGLANG, VLLM], ids=lambda engine: engine.name)
@pytest.mark.parametrize(("task", "path"), [("generate", "/v1/completions"), ("embed", "/v1/embeddings")])
def test_ready_means_that_something_was_computed(engine, task, path):
    request = engine.ready(launch_of(task=task))
    body = json.loads(request.body)
    assert (request.method, request.path, body["model"]) == ("POST", path, "{model}")
    assert task == "embed" or (body["max_tokens"], body["temperature"]) == (1, 0)


def launch_of(**more):
    return Launch(argv=("x",), env=(), cwd="/", url="http://h:1", host="h", port=1, **more)


@pytest.mark.parametrize("engine", [SGLANG, VLLM], ids=lambda engine: engine.name)
@pytest.mark.parametrize("task", ["generate", "embed", "rerank", "classify", "transcribe", "pool"])
@pytest.mark.parametrize("version", [None, "0.4.6.post5", "0.5.23", "0.8.5", "0.33.0"])
def test_every_task_has_its_request_first_and_the_others_behind_it(engine, task, version):
    request = engine.ready(launch_of(task=task, version=version))
    assert request.task == task
    others = [other.task for other in request.otherwise]
    assert {task, *others} == {"generate", "embed", "rerank", "classify", "transcribe", "pool"}
    assert not any(other.otherwise for other in request.otherwise)


@pytest.mark.parametrize("engine", [SGLANG, VLLM], ids=lambda engine: engine.name)
def test_a_server_without_tokenizer_gets_token_ids_and_must_return_some(engine):
    request = engine.ready(launch_of(tokenizes=False))
    body = json.loads(request.body)
    assert (body.get("prompt") or body.get("input_ids")) == [1]
    assert any("ids" in place for place in request.proof)
    assert "Hello" not in "".join(other.body or "" for other in request.otherwise)


@pytest.mark.parametrize("engine", [SGLANG, VLLM], ids=lambda engine: engine.name)
def test_a_node_that_never_answers_is_asked_nothing(engine):
    assert engine.ready(launch_of(answers=False)) is None


@pytest.mark.parametrize(("version", "route"), [("0.5.23", "/get_model_info"), ("0.5.24", "/model_info")])
def test_sglang_is_asked_whether_it_generates_before_it_is_asked_to(version, route):
    assert SGLANG.ready(launch_of(version=version)).unless_false == (route, "is_generation")


HALVES = {
    "prefill": ["--disaggregation-mode", "prefill"],
    "decode": ["--disaggregation-mode=decode"],
    "decode, with underscores": ["--disaggregation_mode", "decode"],
}


@pytest.mark.parametrize("words", HALVES.values(), ids=HALVES)
@pytest.mark.parametrize("version", [None, "0.4.6.post5", "0.5.23", "0.6.0"])
@pytest.mark.parametrize("tokenizes", [True, False])
def test_a_half_of_a_disaggregated_sglang_is_asked_as_its_own_warm_up_asks_and_nothing_else(words, version, tokenizes):
    half = replace(launch_of(version=version, tokenizes=tokenizes), argv=("sglang", "serve", "m", *words))
    request = SGLANG.ready(half)
    body = json.loads(request.body)
    assert (request.method, request.path) == ("POST", "/generate")
    assert (body["bootstrap_host"], body["bootstrap_room"]) == ("2.2.2.2", 0)
    assert 1 < body["sampling_params"]["max_new_tokens"] <= 8
    assert request.otherwise == ()  # a request without a room can end a prefill server
    assert request.unless_false is None


def test_the_canary_of_a_half_has_its_room_too_and_only_a_decode_half_is_made_to_generate():
    prefill, decode = (
        replace(launch_of(), argv=("sglang", "serve", "m", "--disaggregation-mode", mode))
        for mode in ("prefill", "decode")
    )
    assert SGLANG.canary(prefill) == SGLANG.ready(prefill)
    body = json.loads(SGLANG.canary(decode).body)
    assert (body["bootstrap_host"], body["bootstrap_room"]) == ("2.2.2.2", 0)
    assert body["sampling_params"]["max_new_tokens"] == CANARY_TOKENS
    assert SGLANG.canary(decode).otherwise == ()


def test_a_half_is_known_by_its_config_file_and_a_whole_server_by_null():
    whole = replace(launch_of(), argv=("sglang", "serve", "m", "--disaggregation-mode", "null"))
    assert SGLANG.ready(whole) == SGLANG.ready(launch_of())
    by_file = replace(launch_of(), argv=("sglang", "serve"), file_args=("--disaggregation-mode", "decode"))
    assert SGLANG.ready(by_file).path == "/generate"
    assert SGLANG.ready(replace(by_file, answers=False)) is None


KV_ROLES = {
    "kv_producer": '{"kv_connector": "NixlConnector", "kv_role": "kv_producer"}',
    "kv_consumer": '{"kv_connector": "MooncakeConnector", "kv_role": "kv_consumer"}',
}


@pytest.mark.parametrize("config", KV_ROLES.values(), ids=KV_ROLES)
def test_the_halves_of_vllm_answer_plain_requests_and_are_asked_those(config):
    half = replace(launch_of(), argv=("vllm", "serve", "m", "--kv-transfer-config", config))
    assert VLLM.ready(half) == VLLM.ready(launch_of())
    assert VLLM.canary(half) == VLLM.canary(launch_of())


@pytest.mark.parametrize(
    "words",
    [
        ["--kv-transfer-config", '{"kv_connector":"P2pNcclConnector","kv_role":"kv_producer"}'],
        ["--kv-transfer-config.kv_connector=P2pNcclConnector"],
    ],
)
def test_a_half_of_vllm_that_an_id_without_a_peer_would_end_is_asked_for_its_health_alone(words):
    half = replace(launch_of(), argv=("vllm", "serve", "m", *words))
    request = VLLM.ready(half)
    assert (request.method, request.path, request.otherwise) == ("GET", "/health", ())
    assert VLLM.canary(half) is None


@pytest.mark.parametrize(
    "table", [(*sglang.answers.ANSWERS, sglang.answers.HALF), vllm.answers.ANSWERS], ids=["sglang", "vllm"]
)
def test_the_table_of_answers_is_well_formed(table):
    for row in table:
        assert row.source
        assert all(version is None or version_key(version) for version in (row.since, row.until))
        assert row.request.path.startswith("/")
        assert row.request.body is None or isinstance(json.loads(row.request.body), dict)
        assert row.request.body is None or not row.request.form


def test_engines_are_pure():
    import ast
    from pathlib import Path

    import hangguard.engines

    banned = {"os", "time", "subprocess", "socket", "logging", "anyio", "psutil", "httpx"}
    for file in Path(hangguard.engines.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not banned & {name.split(".")[0] for name in names}, file
