"""What vLLM answers when it works, what it counts meanwhile, and where it tells that it rests."""

from __future__ import annotations

from hangguard.changes import words_of
from hangguard.engines.answered import AUDIO_SECONDS, Answered, request_for
from hangguard.engines.counters import longer
from hangguard.engines.vllm.releases import READ
from hangguard.facts import Launch, Metric, QuietRoute, Request

_OF_VLLM = "entrypoints of 0.32.0, and the releases read"

ANSWERS = (
    Answered(
        request=Request(
            method="POST",
            path="/v1/completions",
            body='{"model": "{model}", "prompt": "Hello", "max_tokens": 1, "temperature": 0}',
            task="generate",
        ),
        tokenizes=True,
        source=f"{_OF_VLLM}; refused with 404 where the model does not generate, 400 before 0.10",
    ),
    Answered(
        request=Request(
            method="POST",
            path="/v1/completions",
            body='{"model": "{model}", "prompt": [1], "max_tokens": 1, "temperature": 0, "return_token_ids": true}',
            task="generate",
            # Before 0.10.2 the ids are not returned: then their number is the proof. The text is always empty.
            proof=("choices.0.token_ids", "usage.completion_tokens"),
        ),
        tokenizes=False,
        source=f"{_OF_VLLM}; openai/completion/protocol.py",
    ),
    Answered(
        request=Request(
            method="POST",
            path="/inference/v1/generate",
            body='{"token_ids": [1], "sampling_params": {"max_tokens": 1, "temperature": 0}}',
            task="generate",
            proof=("choices.0.token_ids",),
        ),
        tokenizes=False,
        source="scale_out/token_in_token_out of 0.32.0: the only route of a server with --tokens-only",
    ),
    Answered(
        request=Request(
            method="POST", path="/v1/embeddings", body='{"model": "{model}", "input": "Hello"}', task="embed"
        ),
        tokenizes=True,
        source=_OF_VLLM,
    ),
    Answered(
        request=Request(method="POST", path="/v1/embeddings", body='{"model": "{model}", "input": [1]}', task="embed"),
        tokenizes=False,
        source=_OF_VLLM,
    ),
    Answered(
        request=Request(
            method="POST",
            path="/classify",
            body='{"model": "{model}", "input": "Hello"}',
            task="classify",
            proof=("data.0.probs",),
        ),
        tokenizes=True,
        source=f"{_OF_VLLM}; there where the model is a classifier",
    ),
    Answered(
        request=Request(
            method="POST",
            path="/v1/rerank",
            body='{"model": "{model}", "query": "Hello", "documents": ["Hello"]}',
            task="rerank",
            proof=("results.0.relevance_score",),
        ),
        tokenizes=True,
        source=_OF_VLLM,
    ),
    Answered(
        request=Request(method="POST", path="/pooling", body='{"model": "{model}", "input": "Hello"}', task="pool"),
        tokenizes=True,
        source=f"{_OF_VLLM}; every model that does not generate",
    ),
    Answered(
        request=Request(method="POST", path="/pooling", body='{"model": "{model}", "input": [1]}', task="pool"),
        tokenizes=False,
        source=_OF_VLLM,
    ),
    Answered(
        request=Request(
            method="POST",
            path="/v1/audio/transcriptions",
            form=(("model", "{model}"),),
            audio_seconds=AUDIO_SECONDS,
            task="transcribe",
            proof=("text",),
        ),
        source=f"{_OF_VLLM}; needs vllm[audio]. Silence is transcribed too, as no words",
    ),
)


# Halves of a disaggregated pair (--kv-transfer-config) answer plain requests: NIXL, Mooncake and MoRI-IO of 0.32.0 do
# nothing where a request names no peer in kv_transfer_params. This connector read the peer from the id of the request,
# and in releases before it caught that (it is gone in 0.32.0) an id without one ended the engine in its first step:
# kv_connector/v1/p2p/p2p_nccl_connector.py, save_kv_layer and start_load_kv. Such an id would make it call the peer.
_PEER_IN_ID = "P2pNcclConnector"
_HEALTH = Answered(
    request=Request(method="GET", path="/health"),
    source=f"{_OF_VLLM}: it listens once its engine has started; this cannot tell a hang later on",
)


def ready(launch: Launch) -> Request | None:
    """Return the request that proves the engine: every other route answers 200 while it hangs."""
    return request_for((_HEALTH,) if _takes_peers_from_ids(launch) else ANSWERS, launch)


def canary(launch: Launch) -> Request | None:
    """Return the request of :func:`ready` with many tokens instead of one; ``None`` where none may be asked."""
    request = ready(launch)
    return longer(request) if request is not None and not _takes_peers_from_ids(launch) else None


def _takes_peers_from_ids(launch: Launch) -> bool:
    """Tell whether the connector is named, in JSON or in the dotted form of the option."""
    return any(_PEER_IN_ID in word for word in words_of(launch))


# v1/metrics/loggers.py. The gauges travel with the engine's output: a hang in the first step of an idle engine
# leaves 0 running and 0 waiting. The counters rise with every step that gave tokens, one after each long prefill.
METRICS = (
    Metric(field="running", name="vllm:num_requests_running", source=READ),
    Metric(field="waiting", name="vllm:num_requests_waiting", source=READ),
    Metric(field="generated_tokens", name="vllm:generation_tokens_total", source=READ),
    Metric(field="prompt_tokens", name="vllm:prompt_tokens_total", source=READ),
    # Set by the front end, so it is true while the engine hangs too. Older releases lack it, some without a sign.
    Metric(
        field="awake",
        name="vllm:engine_sleep_state",
        labels=(("sleep_state", "awake"),),
        source="released source, 0.32.0",
    ),
)

_DEV_MODE = "VLLM_SERVER_DEV_MODE"
# Both ask the engine core: they answer while it sleeps or is paused, and not while it hangs.
QUIET_ROUTES = (
    QuietRoute(path="/is_sleeping", key="is_sleeping", variable=_DEV_MODE, source="0.32.0, entrypoints/serve/dev"),
    QuietRoute(path="/is_paused", key="is_paused", variable=_DEV_MODE, source="0.32.0, entrypoints/rl/online"),
)
