"""What the server's own options tell: its model and task, its key, its ranks and nodes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from hangguard.changes import has_flag, value_of
from hangguard.engines.answered import task_of_architectures
from hangguard.engines.base import Engine, Flags
from hangguard.facts import Task

_LARGEST_MODEL_CONFIG = 4 * 1024 * 1024
_RAY_CLUSTER = Path("/tmp/ray/ray_current_cluster")  # noqa: S108
"""Ray writes the address of the cluster that runs on this machine there (ray/_private/utils.py, 2.x)."""


def options_known(engine: Engine) -> frozenset[str]:
    """Return the long options that are known of a server, whether its installed source was found or not.

    No other option of vLLM 0.32.0 and SGLang 0.5.23 is the beginning of one of these, so an abbreviation can be told
    from an option. Of an engine whose options are read nowhere, its parser is not known either: none.
    """
    if not engine.option_sources:
        return frozenset()
    values = [getattr(engine.flags, part.name) for part in fields(engine.flags)]
    words = [word for value in values for word in ((value,) if isinstance(value, str) else value or ())]
    return frozenset(word for word in words if word.startswith("--"))


def model_name(engine: Engine, args: tuple[str, ...], positional: str | None) -> str | None:
    """Return the name under which the server will know its model; ``None``: it must be asked."""
    return value_of(args, *engine.flags.served_name) or model_path(engine, args, positional)


def model_path(engine: Engine, args: tuple[str, ...], positional: str | None) -> str | None:
    """Return where the model lies, or its name in a hub."""
    return positional or value_of(args, *engine.flags.model)


def positional_model(engine: Engine, args: tuple[str, ...]) -> str | None:
    """Return the first bare word of the server's own arguments, where that is the model."""
    return args[0] if engine.positional_model and args and not args[0].startswith("-") else None


def task_of(engine: Engine, args: tuple[str, ...], model: str | None, folder: str) -> Task:
    """Return what it computes: as its options say, else as the ``config.json`` of a model on this disk does.

    Where neither tells, it is taken to generate; the server is asked for the others when it refuses that.
    """
    told = engine.task(args) if engine.task is not None else None
    if told is None and engine.task is not None and model is not None:
        told = _task_of_model(Path(folder, model))
    return told or "generate"


def api_key(flags: Flags, args: tuple[str, ...], variables: Mapping[str, str]) -> str | None:
    """Return the key; of several the first, for the server takes each of them."""
    key = value_of(args, *flags.api_key)
    if key is None and flags.api_key_variable is not None:
        key = variables.get(flags.api_key_variable)
    return key or None


def ranks_and_nodes(flags: Flags, args: tuple[str, ...]) -> tuple[int, int]:
    """Return the worker ranks on this machine, and the machines that take part."""
    ranks = _number(args, flags.tensor_parallel) * _number(args, flags.pipeline_parallel)
    nodes = _number(args, flags.nodes)
    groups = 1 if has_flag(args, *flags.shares_ranks) else _number(args, flags.data_parallel)
    here = _number(args, flags.data_parallel_here, default=0)
    if groups > 1 and value_of(args, *flags.data_parallel_here) == "0":
        return 1, max(nodes, 2)  # only the front end is here, and all that work are elsewhere
    if value_of(args, *flags.data_parallel_rank) is not None:
        here = 1  # one group a launch; the others are launches of their own, here or elsewhere
    if 0 < here < groups:
        return max(1, ranks * here), max(nodes, -(-groups // here))
    return max(1, ranks * groups // nodes), nodes


def node_rank(flags: Flags, args: tuple[str, ...]) -> int:
    """Return which of the machines this is."""
    return _number(args, flags.node_rank, default=0)


def answers(engine: Engine, args: tuple[str, ...]) -> bool:
    """Tell whether it answers requests of its own."""
    if has_flag(args, *engine.flags.headless) or (
        engine.flags.headless and value_of(args, "--api-server-count") == "0"
    ):
        return False
    return engine.followers_answer or node_rank(engine.flags, args) == 0


def joins_a_cluster(flags: Flags, args: tuple[str, ...], variables: Mapping[str, str]) -> bool:
    """Tell whether a Ray cluster that runs already will start the workers."""
    by_ray = value_of(args, *flags.executor) == "ray" or has_flag(args, *flags.ray)
    address = variables.get("RAY_ADDRESS", "")
    return by_ray and address != "local" and (bool(address) or _RAY_CLUSTER.exists())


def _number(args: tuple[str, ...], names: tuple[str, ...], *, default: int = 1) -> int:
    text = value_of(args, *names)
    # What is no number is the server's to refuse; it then ends with a usage error.
    return max(default, int(text)) if text and text.isascii() and text.isdigit() else default


def _task_of_model(folder: Path) -> Task | None:
    file = folder / "config.json"
    try:
        if not file.is_file() or file.stat().st_size > _LARGEST_MODEL_CONFIG:
            return None
        config = json.loads(file.read_text("utf-8", "replace"))
    except (OSError, ValueError, RecursionError):
        return None
    names = config.get("architectures") if isinstance(config, dict) else None
    if not isinstance(names, list):
        return None
    return task_of_architectures(map(str, names), labels=_labels(config))


def _labels(config: dict[str, object]) -> int | None:
    """Return how many classes it tells apart: transformers writes ``num_labels`` or the names of each."""
    for key in ("num_labels", "id2label", "label2id"):
        value = config.get(key)
        if isinstance(value, int):
            return value
        if isinstance(value, dict):
            return len(value)
    return None
