"""Sphinx: furo, MyST, and the numbers of the code, so that the pages cannot drift from it."""

from __future__ import annotations

from importlib.metadata import version as version_of

from hangguard import ENGINES, Limits, learned
from hangguard.delegates import DELEGATES
from hangguard.engines import sglang, vllm
from hangguard.engines.answered import Answered
from hangguard.engines.generic import GENERIC
from hangguard.facts import PHASES
from hangguard.judge import (
    asking,
    asks,
    boards,
    broken,
    farewell,
    patience,
    progress,
    served,
    serving,
    startup,
    stillness,
)
from hangguard.judge.checks import CHECKS, room
from hangguard.judge.checks.ground import size
from hangguard.supervision.run import additions
from hangguard.wrappers import WRAPPERS

project = "hangguard"
author = "the hangguard authors"
copyright = "the hangguard authors"
version = release = version_of("hangguard")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.doctest"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"hangguard {version}"
python_use_unqualified_type_names = True
suppress_warnings = ["myst.header"]

autodoc_member_order = "bysource"
autodoc_class_signature = "separated"
autodoc_default_options = {"members": True, "exclude-members": "__init__, __new__"}

KIB, MIB = 1024, 1024**2
WHY = {
    "HANGGUARD_RUN_ID": "tells whose a process is, after supervisor and guardian have died",
    "SPT_NOENV": "a retitled process (setproctitle) leaves its environment readable",
    "PYTHONFAULTHANDLER": "Python stacks in the log when a process dies by a fault",
    "PYTHONUNBUFFERED": "the log is current, not a buffer behind",
    "NCCL_RAS_ADDR": "NCCL (2.24 and later) tells this machine there which ranks have come and which are behind",
}


def number(value: float) -> str:
    return f"{value:g}"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ("---",) * len(head), *rows])


def answered(row: Answered) -> tuple[str, ...]:
    asked = row.request
    servers = {True: "with tokenizer", False: "token ids only", None: "all"}[row.tokenizes]
    versions = " ".join(f"{word} {version}" for word, version in (("from", row.since), ("to", row.until)) if version)
    proof = " or ".join(f"`{place}`" for place in asked.proof) or "`choices`, `data`, `text` or `embedding`"
    return asked.task, servers, f"{asked.method} `{asked.path}`", proof, versions


ANSWERED_HEAD = ("task", "servers", "asked", "must hold", "versions")

myst_enable_extensions = ["substitution", "colon_fence"]
myst_substitutions = {
    **{
        name: number(getattr(module, name))
        for module, names in (
            (
                patience,
                (
                    "PATIENCE",
                    "PATIENCE_WITHOUT_STACKS",
                    "UNPROVEN",
                    "BUSY_PATIENCE",
                    "HOT_PATIENCE_ELSEWHERE",
                    "HOT_LOOKS",
                    "STALE",
                    "LEARNED_FACTOR",
                    "LEARNED_AT_MOST",
                ),
            ),
            (asking, ("LOOK_CLOSER",)),
            (progress, ("WINDOW", "GAP", "FAULT_RATE", "FAULT_SLACK", "BUSY_LOOKS")),
            (boards, ("SPINNING_PERCENT", "NEAR_FLOOR", "CLEARLY_ABOVE")),
            (broken, ("HANGS_ON", "WEDGED_FOR")),
            (farewell, ("FAREWELL",)),
            (startup, ("STOPPED_BESIDE_BUSY",)),
            (serving, ("STOOD_HOT", "SILENT_FOR", "SILENT_WITHOUT_STACKS", "SILENT_WITHOUT_GPUS", "CANARY_OPEN")),
            (served, ("CANARY_EVERY", "CANARY_AT_MOST")),
            (asks, ("CANARY_AFTER", "ANSWERED_LATELY", "CANARY_IDLE_EVERY")),
        )
        for name in names
    },
    **{
        name: size(getattr(room, name))
        for name in (
            "SHM_FOR_RANKS",
            "SHM_FOR_ONE",
            "MEMORY_FOR_FRONT_END",
            "MEMORY_FOR_RANK",
            "CACHE_ROOM",
            "LOG_ROOM",
        )
    },
    **{name: number(getattr(room, name)) for name in ("FEW_FILES", "TASKS_FOR_RANK")},
    "checks": "\n".join(f"- {(check.__doc__ or '').splitlines()[0]}" for check in CHECKS),
    "APART": number(stillness.APART),
    "INSIDE_CHANNELS": ", ".join(f"`{channel}`" for channel in stillness.INSIDE_CHANNELS),
    "BYTE_RATE": number(progress.BYTE_RATE / KIB),
    "BYTE_SLACK": number(progress.BYTE_SLACK / KIB),
    "RSS_STEP": number(progress.RSS_STEP / MIB),
    "GPU_MEMORY_STEP": number(progress.GPU_MEMORY_STEP / MIB),
    "GPU_BUSY_PERCENT": number(boards.BUSY_PERCENT),
    "BUSY_SHARE": number(progress.BUSY_SHARE * 100),
    "CPU_RATE": number(progress.CPU_RATE * 100),
    "CPU_RATE_PER_THREAD": number(progress.CPU_RATE_PER_THREAD * 100),
    "unclear_budget": number(Limits().unclear),
    "waiting_budget": number(Limits().waiting),
    "probe_within": number(Limits().probe_within),
    "stop_grace": number(Limits().stop_grace),
    "death_grace": number(Limits().death_grace),
    "phases": ", ".join(PHASES),
    "hot_patience": ", ".join(f"{number(seconds)} s in {phase}" for phase, seconds in patience.HOT_PATIENCE.items()),
    "good_starts": number(learned.GOOD_STARTS),
    "answered_sglang": table(ANSWERED_HEAD, [answered(row) for row in sglang.answers.ANSWERS]),
    "answered_vllm": table(ANSWERED_HEAD, [answered(row) for row in vllm.answers.ANSWERS]),
    "wrappers": ", ".join(f"`{wrapper.shown}`" for wrapper in WRAPPERS),
    "delegates": ", ".join(f"`{name}`" for name in sorted(DELEGATES)),
    "fallbacks": table(
        ("engine", "name", "answers a hang in", "alters", "cost"),
        [(e.name, f"`{f.name}`", ", ".join(f.answers), f.alters, f.cost) for e in ENGINES for f in e.fallbacks],
    ),
    "additions": table(
        ("variable", "value", "why"),
        [(f"`{name}`", f"`{value}`", WHY[name]) for name, value in additions("the run's id", GENERIC, 0).items()]
        + [(f"`{name}`", f"`{value}`", f"{e.name} only") for e in ENGINES for name, value in e.environment],
    ),
}

# The standard library's names have no pages here: the build must work without a network, so without intersphinx.
nitpick_ignore_regex = [
    (r"py:.*", r"(collections|contextlib|types|typing|os|pathlib|enum|dataclasses|subprocess|anyio|tenacity)\..*"),
]
