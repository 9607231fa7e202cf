"""A 4xx that names the key, the task or the model is a living front end: what to give is said, or the next is asked."""

import json

import pytest
from seen import launch
from test_answers import COMPLETION, GOOD, answering, probing, serving

from hangguard.engines import SGLANG, VLLM
from hangguard.facts import Request
from hangguard.observe.answers import HealthProbe

pytestmark = pytest.mark.anyio

NO_ROUTE = (404, {"detail": "Not Found"})


def routes(**known):
    """Answer by route (slashes as underscores); every other one is not there, as FastAPI says it."""

    def answer(handler):
        status, content = known.get(handler.path.strip("/").replace("/", "_"), NO_ROUTE)
        handler.reply(status, json.dumps(content).encode())

    return answer


async def ask(server, engine, **more):
    given = launch(server.server_address[1], **{"model": "M", **more})
    async with probing(server, given=given, request=engine.ready(given)) as probing_it:
        return await probing_it.settled()


def asked(server):
    return [(one.command, one.path) for one in server.asked]


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize(
    ("key", "says"), [(None, "wants an API key, and its command shows none"), ("k", "refuses the API key")]
)
async def test_a_key_that_is_missing_or_wrong(status, key, says):
    with serving(answering(status, {"error": "Unauthorized"})) as server:
        reply = await ask(server, VLLM, api_key=key)
        assert (reply.state, reply.status, reply.refuses) == ("bad", status, "key")
        assert says in reply.detail
        assert "--api-key" in reply.detail
        assert "ready='/health'" in reply.detail


async def test_a_key_that_is_missing_for_the_callers_path_the_health_and_the_models_name():
    with serving(answering(401, {"error": "Unauthorized"})) as server:
        for kind, more in (
            (HealthProbe, {"health_path": "/h"}),
            (None, {"ready": "/r"}),
            (None, {"request": COMPLETION}),
        ):
            given = launch(server.server_address[1])
            async with probing(server, *([kind] if kind else []), given=given, **more) as probing_it:
                assert (await probing_it.settled()).refuses == "key"


EMBEDDING = {"v1_embeddings": (200, {"data": [{"embedding": [0.5]}]})}
RERANKER = {"v1_rerank": (200, {"results": [{"index": 0, "relevance_score": 0.0}]})}
CLASSIFIER = {"classify": (200, {"data": [{"probs": [0.0, 1.0]}]})}
OLD = (400, {"object": "error", "message": "The model does not support Completions API", "code": 400})
NEW = (501, {"error": {"message": "The model does not support Completions API", "type": "NotImplementedError"}})


@pytest.mark.parametrize("server_routes", [EMBEDDING, RERANKER, CLASSIFIER], ids=["embed", "rerank", "classify"])
@pytest.mark.parametrize("refusal", [NO_ROUTE, OLD, NEW, (405, {})], ids=["404", "400", "501", "405"])
async def test_a_server_that_does_something_else_is_asked_for_that(server_routes, refusal):
    with serving(routes(v1_completions=refusal, **server_routes)) as server:
        assert (await ask(server, VLLM)).state == "good"
        assert asked(server)[0] == ("POST", "/v1/completions")


async def test_an_embedding_model_that_only_pools_and_one_that_transcribes():
    with serving(routes(pooling=(200, {"data": [{"data": [[0.1]]}]}))) as server:
        assert (await ask(server, VLLM)).state == "good"
    with serving(routes(v1_audio_transcriptions=(200, {"text": ""}))) as server:
        assert (await ask(server, VLLM)).state == "good"
        form = server.asked[-1]
        assert form.headers["Content-Type"].startswith("multipart/form-data; boundary=")


async def test_what_was_asked_for_by_flags_is_asked_first():
    with serving(routes(**RERANKER, **EMBEDDING)) as server:
        assert (await ask(server, VLLM, task="rerank")).state == "good"
        assert asked(server) == [("POST", "/v1/rerank")]


async def test_a_server_that_does_nothing_that_is_known_is_told_what_to_give_and_asked_again():
    with serving(routes()) as server:
        given = launch(server.server_address[1], model="M")
        async with probing(server, given=given, request=VLLM.ready(given)) as probing_it:
            reply = await probing_it.settled()
            assert (reply.state, reply.status, reply.refuses) == ("bad", 404, "task")
            assert "give ready=" in reply.detail
            assert "/v1/completions" in reply.detail
            probing_it.clock.jumped += 2
            server.answer = answering(200, GOOD[0])
            assert (await probing_it.settled()).state == "good"


async def test_a_server_that_fails_at_what_it_does_is_not_asked_for_something_else():
    for status in (400, 429, 500, 503):
        with serving(routes(v1_completions=(status, {"message": "out of memory"}), **EMBEDDING)) as server:
            reply = await ask(server, VLLM)
            assert (reply.state, reply.status, reply.refuses) == ("bad", status, None)
            assert asked(server) == [("POST", "/v1/completions")]


async def test_what_the_server_does_is_remembered():
    with serving(routes(v1_embeddings=(503, {}))) as server:
        given = launch(server.server_address[1], model="M")
        async with probing(server, given=given, request=VLLM.ready(given)) as probing_it:
            assert (await probing_it.settled()).status == 503
            probing_it.clock.jumped += 2
            assert (await probing_it.settled()).status == 503
        assert asked(server) == [("POST", "/v1/completions"), *[("POST", "/v1/embeddings")] * 2]


@pytest.mark.parametrize("path", ["get_model_info", "model_info"])
async def test_sglang_is_not_asked_to_generate_where_it_says_that_it_does_not(path):
    version = {"get_model_info": "0.5.23", "model_info": "0.5.24"}[path]
    known = {path: (200, {"is_generation": False}), **EMBEDDING}
    with serving(routes(v1_completions=(500, {"message": "KeyError: 'text'"}), **known)) as server:
        assert (await ask(server, SGLANG, version=version)).state == "good"
        assert asked(server) == [("GET", f"/{path}"), ("POST", "/v1/embeddings")]


@pytest.mark.parametrize("info", [(200, {"is_generation": True}), (200, {}), (200, [1]), NO_ROUTE, (503, {})], ids=str)
async def test_sglang_is_asked_to_generate_where_it_does_not_deny_it(info):
    with serving(routes(get_model_info=info, v1_completions=(200, GOOD[0]))) as server:
        assert (await ask(server, SGLANG)).state == "good"


UNKNOWN = (404, {"error": {"message": "The model `M` does not exist.", "type": "NotFoundError", "code": 404}})


async def test_a_model_of_another_name_is_asked_for_its_name():
    def answer(handler):
        named = handler.path == "/v1/completions" and json.loads(handler.body)["model"]
        known = {"v1_completions": (200, GOOD[0]) if named == "real" else UNKNOWN}
        routes(v1_models=(200, {"data": [{"id": "real"}]}), **known)(handler)

    with serving(answer) as server:
        assert (await ask(server, VLLM)).state == "good"
        assert [path for _, path in asked(server)] == ["/v1/completions", "/v1/models", "/v1/completions"]


async def test_a_model_that_the_server_does_not_know_either_way_is_named():
    with serving(routes(v1_models=(200, {"data": [{"id": "M"}]}), v1_completions=UNKNOWN, **EMBEDDING)) as server:
        reply = await ask(server, VLLM)
        assert (reply.state, reply.refuses) == ("bad", "model")
        assert "--served-model-name" in reply.detail


IDS = {"choices": [{"text": "", "token_ids": [7]}]}
COUNTED = {"choices": [{"text": ""}], "usage": {"completion_tokens": 1}}
NO_IDS = {"choices": [{"text": "a", "token_ids": []}], "usage": {}}


@pytest.mark.parametrize(
    ("engine", "path", "content", "state"),
    [
        (VLLM, "v1_completions", IDS, "good"),
        (VLLM, "v1_completions", COUNTED, "good"),
        (VLLM, "v1_completions", NO_IDS, "bad"),
        (VLLM, "inference_v1_generate", IDS, "good"),
        (SGLANG, "generate", {"output_ids": [7], "meta_info": {}}, "good"),
        (SGLANG, "generate", {"text": "a", "meta_info": {}}, "bad"),
    ],
)
async def test_without_a_tokenizer_the_proof_is_ids_not_text(engine, path, content, state):
    with serving(routes(**{path: (200, content)})) as server:
        assert (await ask(server, engine, tokenizes=False)).state == state


async def test_a_node_that_never_answers_is_asked_nothing_even_where_something_says_200():
    with serving(answering(200, b"")) as server:
        given = launch(server.server_address[1], answers=False, node_rank=1)
        async with probing(server, given=given, request=SGLANG.ready(given)) as probing_it:
            reply = await probing_it.look()
            assert (reply.state, reply.detail.partition(":")[0]) == (
                "not-asked",
                "this node serves no requests of its own",
            )
        async with probing(server, given=given, ready="/health") as probing_it:  # the caller may say so
            assert (await probing_it.settled()).state == "good"


async def test_a_proof_of_one_place_among_several():
    request = Request(method="POST", path="/x", body="{}", proof=("a.0.b", "c"))
    for content, state in (
        ({"a": [{"b": 0.0}]}, "good"),
        ({"c": ""}, "good"),
        ({"a": [], "c": None}, "bad"),
        ({"a": [{"b": []}], "c": {}}, "bad"),
        ({"c": False}, "bad"),
        ([], "bad"),
    ):
        with serving(answering(200, content)) as server:
            async with probing(server, request=request) as probing_it:
                assert (await probing_it.settled()).state == state, content
