"""What SGLang answers when it works, and what it counts meanwhile."""

from __future__ import annotations

from dataclasses import replace

from hangguard.engines.answered import AUDIO_SECONDS, Answered, request_for
from hangguard.engines.counters import longer
from hangguard.engines.sglang.command import half_of
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


# One half of a disaggregated pair. A request without the room that a router gives to both halves is refused with 400
# ("Disaggregated request received without bootstrap room id", managers/scheduler.py), and can end the server: a prefill
# half with several data-parallel groups (an assertion in managers/data_parallel_controller.py), and a decode half with
# the transfer backend "fake" (seen with 0.5.23: it wants the host). So none of the other rows follows this one.
# This host stands for no peer at all (FAKE_BOOTSTRAP_HOST, disaggregation/utils.py): this half computes, nothing is
# transferred, and the prefix cache keeps nothing of it. The server's own warm-up asks in the same words, and so does
# /health. Seen with 0.5.23 on the CPU: a prefill half with Mooncake, a decode half with Mooncake and with "fake".
# Eight tokens as there: the first comes with the prompt, and a decode half that is asked for one computes nothing.
# Rooms are spread over the data-parallel groups by their remainder; this one is the first's.
HALF = Answered(
    request=Request(
        method="POST",
        path="/generate",
        body='{"input_ids": [10, 11, 12, 13], '
        '"sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": true}, '
        '"bootstrap_host": "2.2.2.2", "bootstrap_room": 0}',
        task="generate",
        proof=("output_ids", "meta_info.completion_tokens"),
    ),
    source=f"{_OF_SGLANG}, _send_disaggregation_warmup_requests",
)


def ready(launch: Launch) -> Request | None:
    """Return the request that proves the scheduler: ``/v1/models`` and ``/model_info`` answer while it hangs."""
    return request_for((HALF,) if half_of(launch) else ANSWERS, launch)


def canary(launch: Launch) -> Request | None:
    """Return the request of :func:`ready` with many tokens, where it generates more than one.

    A prefill half never does (``max_new_tokens = 1``, disaggregation/prefill.py): its request is the whole proof.
    """
    request = ready(launch)
    return longer(request) if request is not None and half_of(launch) != "prefill" else request


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
