"""What vLLM answers when it works, what it counts meanwhile, and where it tells that it rests."""

from __future__ import annotations

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


def ready(launch: Launch) -> Request | None:
    """Return the request that proves the engine: every other route answers 200 while it hangs."""
    return request_for(ANSWERS, launch)


def canary(launch: Launch) -> Request | None:
    """Return the request of :func:`ready` with many tokens instead of one."""
    request = ready(launch)
    return longer(request) if request is not None else None


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
