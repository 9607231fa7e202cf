"""What may be changed of a launch of SGLang where it hangs."""

from __future__ import annotations

import json
from typing import Any

from hangguard.changes import value_of, with_flag, words_of
from hangguard.engines import common
from hangguard.engines.sglang.command import recognise
from hangguard.engines.sglang.releases import LAST_READ
from hangguard.facts import Fallback, Launch

_PHASES_OF_GRAPHS = ("decode", "prefill")


def no_cuda_graph(launch: Launch) -> Launch | None:
    """Switch CUDA graphs off, in the form that this release and this command take.

    ``--disable-cuda-graph`` is the lowest in rank since 0.5.14: a backend that the command names, or the JSON
    of ``--cuda-graph-config``, wins over it (arg_groups/cuda_graph_hook.py), so those are edited in place.
    """
    if recognise(launch.argv) is None:
        return None
    words = words_of(launch)
    config = _graph_config(words)
    if config is None:
        return None
    named = {phase: _named_backend(words, config, phase) for phase in _PHASES_OF_GRAPHS}
    off = common.is_given(words, "--disable-cuda-graph")
    still_on = [
        phase
        for phase in _PHASES_OF_GRAPHS
        if (named[phase] or ("disabled" if off or _switched_off(words, phase) else "")) != "disabled"
    ]
    if not still_on:
        return None
    if not any(named.values()) and common.accepts(launch, "--disable-cuda-graph", until=LAST_READ):
        return with_flag(launch, "--disable-cuda-graph")
    return _disable_by_name(launch, config, still_on)


def _disable_by_name(launch: Launch, config: dict[str, Any], phases: list[str]) -> Launch | None:
    for phase in phases:
        option = f"--cuda-graph-backend-{phase}"
        if "backend" in config.get(phase, {}):
            config = {**config, phase: {**config[phase], "backend": "disabled"}}
            launch = with_flag(launch, "--cuda-graph-config", json.dumps(config))
        elif common.accepts(launch, option, since="0.5.14"):
            launch = with_flag(launch, option, "disabled")
        else:
            return None
    return launch


def _graph_config(argv: tuple[str, ...]) -> dict[str, Any] | None:
    """Return the JSON of ``--cuda-graph-config``, ``{}`` without it, ``None`` for one that is not understood."""
    text = value_of(argv, "--cuda-graph-config")
    if text is None:
        return {}
    try:
        config = json.loads(text)
    except ValueError:
        return None
    understood = isinstance(config, dict) and all(isinstance(part, dict) for part in config.values())
    return config if understood else None


def _named_backend(argv: tuple[str, ...], config: dict[str, Any], phase: str) -> str:
    named = config.get(phase, {}).get("backend") or value_of(argv, f"--cuda-graph-backend-{phase}")
    return str(named or "")


def _switched_off(argv: tuple[str, ...], phase: str) -> bool:
    return common.is_given(argv, f"--disable-{phase}-cuda-graph")


def no_custom_all_reduce(launch: Launch) -> Launch | None:
    """Fall back to NCCL for all-reduce; without effect on one rank."""
    return common.without_custom_all_reduce(launch, recognised=recognise(launch.argv) is not None)


FALLBACKS = (
    Fallback(
        name="no-cuda-graph",
        change=no_cuda_graph,
        # The ladder of graph-capture ends here, and a warm-up request replays what was captured. Autotune and
        # DeepGEMM's compile run without graphs as well, so jit-compile is not answered.
        answers=("graph-capture", "warm-up"),
        alters="speed",
        cost="Decoding runs without CUDA graphs: answers stay the same, tokens come noticeably slower, most of all "
        "for small batches.",
    ),
    Fallback(
        name="no-custom-all-reduce",
        change=no_custom_all_reduce,
        # Confirmed in reports for dist-init (with P2P off), the first all-reduce after load, and warm-up.
        answers=("dist-init", "kv-cache", "jit-compile", "graph-capture", "warm-up"),
        alters="speed",
        cost="All-reduce goes through NCCL instead of SGLang's own kernel: somewhat slower between GPUs, most of "
        "all for small batches.",
    ),
)
