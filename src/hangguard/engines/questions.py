"""The tables of what "answered" means: for SGLang and for vLLM, by task and version."""

from __future__ import annotations

from dataclasses import replace

from hangguard.engines.answered import AUDIO_SECONDS, Answered
from hangguard.facts import Request, Task

_LAST_READ_OF_SGLANG = "0.5.23"
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

SGLANG = (
    Answered(
        request=replace(_COMPLETION, unless_false=("/get_model_info", _GENERATES)),
        tokenizes=True,
        until=_LAST_READ_OF_SGLANG,
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

_OF_VLLM = "entrypoints of 0.32.0, and the releases read"

VLLM = (
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
