"""How vLLM is started: its commands, and the options of them that hangguard must read."""

from __future__ import annotations

import json

from hangguard.changes import value_of
from hangguard.engines import common
from hangguard.engines.answered import task_of_architectures
from hangguard.engines.base import Flags
from hangguard.facts import Task

_MODULES = ("vllm.entrypoints.openai.api_server",)

OPTION_SOURCES = (
    "vllm/engine/arg_utils.py",
    "vllm/entrypoints/openai/cli_args.py",
    "vllm/entrypoints/launchers/cli_args.py",
    "vllm/entrypoints/cli/serve.py",
)

FLAGS = Flags(
    tensor_parallel=("--tensor-parallel-size", "-tp"),
    pipeline_parallel=("--pipeline-parallel-size", "-pp"),
    data_parallel=("--data-parallel-size", "-dp"),
    data_parallel_here=("--data-parallel-size-local", "-dpl"),
    data_parallel_rank=("--data-parallel-rank", "-dpn"),
    nodes=("--nnodes", "-n"),
    node_rank=("--node-rank", "-r"),
    headless=("--headless",),
    config="--config",
    no_tokenizer=("--skip-tokenizer-init", "--tokens-only"),
    executor=("--distributed-executor-backend", "--data-parallel-backend", "-dpb"),
    api_key_variable="VLLM_API_KEY",
)


def recognise(argv: tuple[str, ...]) -> int | None:
    """Find ``vllm serve`` or ``python -m vllm.entrypoints.openai.api_server``."""
    index = common.after_console_script(argv, "vllm", "serve")
    if index is not None:
        return index
    index = common.after_python_module(argv, ("vllm.entrypoints.cli.main",))
    if index is not None:
        return index + 1 if argv[index : index + 1] == ("serve",) else None
    return common.after_python_module(argv, _MODULES)


_TASKS: dict[str, Task] = {
    "generate": "generate",
    "embed": "embed",
    "embedding": "embed",
    "pooling": "embed",
    "token_embed": "pool",
    "encode": "pool",
    "reward": "pool",
    "token_classify": "pool",
    "classify": "classify",
    "score": "rerank",
    "transcription": "transcribe",
}


def task(args: tuple[str, ...]) -> Task | None:
    """Tell what the server was asked to compute: ``--task`` to 0.12, ``--runner`` and ``--convert`` since 0.10.

    ``--hf-overrides`` may name another architecture, and with it another task.
    """
    for option in ("--task", "--convert"):
        if (named := _TASKS.get(value_of(args, option) or "")) is not None:
            return named
    overridden = _overrides(value_of(args, "--hf-overrides"))
    names = overridden.get("architectures")
    if isinstance(names, list):
        labels = overridden.get("num_labels")
        told = task_of_architectures(map(str, names), labels=labels if isinstance(labels, int) else None)
        if told is not None:
            return told
    return _TASKS.get(value_of(args, "--runner") or "")


def _overrides(text: str | None) -> dict[str, object]:
    try:
        read = json.loads(text or "{}")
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}
