"""What SGLang answers when it works, and what it counts meanwhile."""

from __future__ import annotations

from dataclasses import replace

from hangguard.engines.answered import AUDIO_SECONDS, Answered, request_for
from hangguard.engines.counters import longer
from hangguard.engines.sglang.releases import LAST_READ, READ
from hangguard.facts import Launch, LoadRoute, Metric, Request, Task

_OF_SGLANG = "srt/entrypoints/http_server.py of 0.5.23"
_COMPLETION = Request(
    method="POST",
    path="/v1/completions",
    body='{"model": "{model}", "prompt": "Hello", "max_tokens": 1, "temperature": 0}',
    task="generate",
)
_SCORES = Request(method="POST", path="/classify", proof=("embedding", "0.embedding"))
_SCORED: tuple[Task, ...] = ("classify", "pool")
# A model that does not generate takes a completion for an embedding, and the front end fails over it with a 500.
_GENERATES = "is_generation"

ANSWERS = (
    Answered(
        request=replace(_COMPLETION, unless_false=("/get_model_info", _GENERATES)),
        tokenizes=True,
        until=LAST_READ,
        source=f"{_OF_SGLANG}; /get_model_info in all releases read",
    ),
    Answered(
        request=replace(_COMPLETION, unless_false=("/model_info", _GENERATES)),
        tokenizes=True,
        since="0.5.24a0",
        source=f"{_OF_SGLANG}, which logs that /get_model_info will go",
    ),
    Answered(
        request=Request(
            method="POST",
            path="/generate",
            body='{"input_ids": [1], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}',
            task="generate",
            proof=("output_ids", "meta_info.completion_tokens"),
        ),
        tokenizes=False,
        source=f"{_OF_SGLANG}: its own warm-up sends token ids so",
    ),
    Answered(
        request=Request(
            method="POST", path="/v1/embeddings", body='{"model": "{model}", "input": "Hello"}', task="embed"
        ),
        tokenizes=True,
        source=f"{_OF_SGLANG}; rerankers and classifiers answer it too",
    ),
    Answered(
        request=Request(
            method="POST", path="/encode", body='{"input_ids": [1]}', task="embed", proof=("embedding", "0.embedding")
        ),
        tokenizes=False,
        source=f"{_OF_SGLANG}: its own warm-up",
    ),
    Answered(
        request=Request(
            method="POST",
            path="/v1/rerank",
            body='{"query": "Hello", "documents": ["Hello"]}',
            task="rerank",
            proof=("0.score", "results.0.relevance_score"),
        ),
        tokenizes=True,
        source=f"{_OF_SGLANG}; srt/entrypoints/openai/serving_rerank.py",
    ),
    *(
        Answered(
            request=replace(_SCORES, task=task, body=body),
            tokenizes=tokenizes,
            source=f"{_OF_SGLANG}: the scores of a reward model or classifier come as an embedding",
        )
        for task in _SCORED
        for tokenizes, body in ((True, '{"text": "Hello"}'), (False, '{"input_ids": [1]}'))
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
        source=_OF_SGLANG,
    ),
)


def ready(launch: Launch) -> Request | None:
    """Return the request that proves the scheduler: ``/v1/models`` and ``/model_info`` answer while it hangs."""
    return request_for(ANSWERS, launch)


def canary(launch: Launch) -> Request | None:
    """Return the request of :func:`ready` with many tokens instead of one."""
    request = ready(launch)
    return longer(request) if request is not None else None


# observability/metrics_collector.py and metrics_reporter.py (metrics/collector.py to 0.5.8).
# sglang:generation_tokens_total is not here: it grows when a request ends, so it stands still through every long
# healthy answer. The running gauge is written with each prefill and every 40th decode step; to 0.5.15 it keeps its
# last value for up to 30 s of idleness, so the load routes are asked too where nothing moves.
_TOTAL_OF_PRIORITIES = (("priority", ""),)
METRICS = (
    Metric(field="running", name="sglang:num_running_reqs", labels=_TOTAL_OF_PRIORITIES, source=READ),
    Metric(field="waiting", name="sglang:num_queue_reqs", labels=_TOTAL_OF_PRIORITIES, source=READ),
    Metric(
        field="generated_tokens",
        name="sglang:realtime_tokens_total",
        labels=(("mode", "decode"),),
        since="0.5.7",
        source=f"{READ}; after every decode step, whatever its help text says",
    ),
    Metric(
        field="prompt_tokens",
        name="sglang:realtime_tokens_total",
        labels=(("mode", "prefill_.*"),),
        since="0.5.7",
        source=f"{READ}; prefill_compute and prefill_cache, after every prefill batch",
    ),
)

LOAD_ROUTES = (
    LoadRoute(
        path="/v1/loads?include=core",
        under="loads",
        running="num_running_reqs",
        waiting="num_waiting_reqs",
        since="0.5.8",
        source="released source; asks the schedulers to 0.5.12, a snapshot that they publish since 0.5.13",
    ),
    LoadRoute(
        path="/get_load",
        total="num_reqs",
        waiting="num_waiting_reqs",
        until="0.5.7.post9",
        source="released source, 0.4.10 to 0.5.7; asks the schedulers",
    ),
)
