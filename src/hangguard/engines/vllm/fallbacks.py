"""What may be changed of a launch of vLLM where it hangs."""

from __future__ import annotations

import json

from hangguard.changes import value_of, with_flag, words_of
from hangguard.engines import common
from hangguard.engines.vllm.command import recognise
from hangguard.facts import Fallback, Launch


def eager(launch: Launch) -> Launch | None:
    """Switch torch.compile and CUDA graphs off."""
    option = "--enforce-eager"
    if recognise(launch.argv) is None or _is_eager(words_of(launch)) or not common.accepts(launch, option):
        return None
    return with_flag(launch, option, replacing=("--no-enforce-eager",))


def _is_eager(argv: tuple[str, ...]) -> bool:
    # The last of --enforce-eager and --no-enforce-eager counts; every other form is one level or one JSON.
    switches = [word for word in argv if word.replace("_", "-") in {"--enforce-eager", "--no-enforce-eager"}]
    if switches:
        return switches[-1].replace("_", "-") == "--enforce-eager"
    return common.is_given(argv, "--enforce-eager") or _level(argv) == "0" or _compiles_nothing(argv)


def _level(argv: tuple[str, ...]) -> str | None:
    """Return the optimisation level as text: ``-O0``, ``-O=0``, ``-O 0``, ``--optimization-level 0``."""
    glued = [word[2:].lstrip("=") for word in argv if word.startswith("-O") and len(word) > len("-O")]
    return glued[-1] if glued else value_of(argv, "-O", "--optimization-level")


def _compiles_nothing(argv: tuple[str, ...]) -> bool:
    """Tell whether the compilation config asks for no graphs and no compiling (``mode``, ``level`` to 0.11.0)."""
    wish: dict[str, object] = {}
    text = value_of(argv, "--compilation-config", "-cc")
    if text is not None:
        try:
            wish = dict(json.loads(text))
        except (ValueError, TypeError):
            return False
    for key in ("cudagraph_mode", "mode", "level"):  # one field: --compilation-config.mode 0, -cc.mode=0
        value = value_of(argv, f"--compilation-config.{key}", f"--compilation-config.{key.replace('_', '-')}")
        value = value if value is not None else value_of(argv, f"-cc.{key}")
        wish |= {key: value} if value is not None else {}
    level = str(wish.get("mode", wish.get("level")))
    return (
        str(wish.get("cudagraph_mode")).upper() == "NONE"
        and level.upper() in {"0", "NONE"}
        and bool({"mode", "level"} & wish.keys())
    )


def no_custom_all_reduce(launch: Launch) -> Launch | None:
    """Fall back to NCCL for all-reduce; without effect on one rank."""
    return common.without_custom_all_reduce(launch, recognised=recognise(launch.argv) is not None)


FALLBACKS = (
    Fallback(
        name="eager",
        change=eager,
        # kv-cache: between the compile and the capture the log places a hang only roughly.
        answers=("jit-compile", "kv-cache", "graph-capture", "warm-up"),
        alters="speed",
        cost="The model runs without torch.compile and without CUDA graphs: starting is faster, tokens come "
        "noticeably slower, most of all for small batches.",
    ),
    Fallback(
        name="no-custom-all-reduce",
        change=no_custom_all_reduce,
        # The profiling run (jit-compile here) has the first all-reduce.
        answers=("dist-init", "jit-compile", "kv-cache", "graph-capture", "warm-up"),
        alters="speed",
        cost="All-reduce goes through NCCL instead of vLLM's own kernel: somewhat slower between GPUs, most of all "
        "for small batches.",
    ),
)
