"""How SGLang is started: its commands, and the options of them that hangguard must read."""

from __future__ import annotations

from hangguard.changes import has_flag, value_of, words_of
from hangguard.engines import common
from hangguard.engines.base import Flags
from hangguard.facts import Launch, Task

MODULES = ("sglang.launch_server", "hangguard.testing.server")
"""The little server of ``hangguard.testing`` takes SGLang's options and prints its log lines."""

OPTION_SOURCES = (
    "sglang/srt/server_args.py",
    "sglang/srt/arg_groups/fields/*.py",
    "sglang/srt/arg_groups/*.py",
)

FLAGS = Flags(
    model=("--model-path", "--model"),
    tensor_parallel=("--tp-size", "--tensor-parallel-size", "--tp"),
    pipeline_parallel=("--pp-size", "--pipeline-parallel-size", "--pp"),
    data_parallel=("--dp-size", "--data-parallel-size", "--dp"),
    shares_ranks=("--enable-dp-attention",),
    nodes=("--nnodes",),
    config="--config",
    ray=("--use-ray",),
)


def recognise(argv: tuple[str, ...]) -> int | None:
    """Find ``sglang serve`` (0.5.3 and later) or ``python -m sglang.launch_server``."""
    index = common.after_console_script(argv, "sglang", "serve")
    return index if index is not None else common.after_python_module(argv, MODULES)


def half_of(launch: Launch) -> str:
    """Return which half of the work it does, ``prefill`` or ``decode``; empty: all of it.

    A router sends every request to one of each.
    """
    mode = value_of(words_of(launch), "--disaggregation-mode") or ""
    return mode if mode in {"prefill", "decode"} else ""


def task(args: tuple[str, ...]) -> Task | None:
    """Tell whether the server was asked to embed; everything else it reads from the model."""
    return "embed" if has_flag(args, "--is-embedding") else None
