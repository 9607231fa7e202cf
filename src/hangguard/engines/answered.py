"""What "answered" means: for every task the request that proves the engine, as rows of a table.

The row of the launch's own task comes first. Flags do not always tell the task, and no route of vLLM does, so
the others follow: where the server says that it does not do the one, the next is asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from hangguard.engines.common import in_range
from hangguard.facts import Launch, Request, Task

AUDIO_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One request that proves one task. ``since`` and ``until`` are versions, both inclusive."""

    request: Request
    tokenizes: bool | None = None
    """Whether it is for servers with a tokenizer, or without; ``None``: for both."""
    since: str | None = None
    until: str | None = None
    source: str


def request_for(table: Iterable[Answered], launch: Launch) -> Request | None:
    """Return the request of this launch, with the others to fall back on; ``None``: it never answers."""
    if not launch.answers:
        return None
    fitting = [
        row.request
        for row in table
        if row.tokenizes in {None, launch.tokenizes} and in_range(launch.version, row.since, row.until)
    ]
    if not fitting:
        return None
    ordered = sorted(fitting, key=lambda request: request.task != launch.task)  # stable: the table's order stays
    return replace(ordered[0], otherwise=tuple(ordered[1:]))


_SUFFIXES: tuple[tuple[str, Task], ...] = (
    ("ForSequenceClassification", "classify"),
    ("ForTokenClassification", "pool"),
    ("ForAudioClassification", "classify"),
    ("ForImageClassification", "classify"),
    ("ForVideoClassification", "classify"),
    ("ClassificationModel", "classify"),
    ("ForRewardModeling", "pool"),
    ("ForRewardModel", "pool"),
    ("RewardModel", "pool"),
    ("ForTextEncoding", "embed"),
    ("EmbeddingModel", "embed"),
    ("ForSpeechSeq2Seq", "transcribe"),
    ("WhisperForConditionalGeneration", "transcribe"),
    ("ForCausalLM", "generate"),
    ("ForConditionalGeneration", "generate"),
    ("ChatModel", "generate"),
    ("LMHeadModel", "generate"),
    ("Model", "embed"),
)
"""vLLM 0.32.0, config/model.py _SUFFIX_TO_DEFAULTS, in its order; SGLang 0.5.23 lists architectures one by one
(configs/model_config.py is_generation_model), with the same answers."""


def task_of_architectures(names: Iterable[str], *, labels: int | None = None) -> Task | None:
    """Return what a model of these architectures (``config.json``) is for; ``None``: they do not tell.

    ``labels``: how many classes a classifier has. One alone is a score, and the model is a reranker.
    """
    for name in names:
        for suffix, task in _SUFFIXES:
            if name.endswith(suffix):
                return "rerank" if task == "classify" and labels == 1 else task
    return None
