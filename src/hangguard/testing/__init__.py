"""For your tests and for ours: a small real server that can be made to fail in every way.

:func:`little_server_command` returns the command of a server that starts, answers and hangs like SGLang in
small: several real processes, memory really held, an HTTP front end, no GPU and no model. Give it to
``supervise(…, engine="sglang")`` to see what your program does when the server deadlocks.
"""

from __future__ import annotations

import sys
from typing import Literal, TypeAlias

__all__ = ["FaultPhase", "Leftover", "little_server_command"]

FaultPhase: TypeAlias = Literal[
    "import", "dist-init", "weights-load", "kv-cache", "jit-compile", "graph-capture", "warm-up", "serving"
]
"""Where a fault happens, see ``faults``."""

Leftover: TypeAlias = Literal["mapped", "semaphore", "socket", "worker"]
"""What the little server never tidies up, see ``leave``."""


def little_server_command(
    *,
    port: int | None = None,
    host: str = "127.0.0.1",
    model_path: str = "tiny",
    tp: int = 2,
    api_key: str | None = None,
    is_embedding: bool = False,
    enable_metrics: bool = False,
    disable_cuda_graph: bool = False,
    hold_mb: int = 32,
    phase_seconds: float = 0.4,
    jit_seconds: float = 0.0,
    token_seconds: float = 0.01,
    deadlock_at_capture: bool = False,
    faults: tuple[tuple[FaultPhase, str], ...] = (),
    fault_rank: int | None = None,
    fault_after: int = 1,
    cured_by: str | None = None,
    once: str | None = None,
    crash_exit: int | None = None,
    ignore_crash: bool = False,
    shallow_health: bool = False,
    ignore_term: bool = False,
    orphans: bool = False,
    fork_and_exit: bool = False,
    exit_early: int | None = None,
    leave_shm: bool = False,
    leave: tuple[Leftover, ...] = (),
    banner_bytes: int = 0,
    long_line: int = 0,
    flood: bool = False,
    garbage: bool = False,
    python: str = sys.executable,
) -> list[str]:
    """Return the command of the little server, for :func:`hangguard.supervise` or for ``subprocess``.

    ``port=None`` writes ``{port}``, which ``supervise`` fills with a free one. ``faults`` are pairs of a phase
    and a kind: ``deadlock``, ``spin``, ``sleep:SECONDS``, ``exit:CODE``, ``raise``, ``segv``, ``oom``,
    ``kill-self``, ``stop-self``. They happen in every rank, or in ``fault_rank``; at ``serving`` from request
    number ``fault_after`` on; not where ``cured_by`` (a flag, or ``NAME=VALUE`` of the environment) is given;
    with ``once`` (the path of a file) in the first launch only. A deadlock at graph capture is cured by
    ``--disable-cuda-graph``, as in the real thing: the step is skipped.

    ``leave`` names what it has and never tidies up: memory ``mapped`` with its descriptor closed, a ``semaphore``, the
    name of a ``socket`` in the temp folder, and such memory in each ``worker``. The log says ``left: PATH``.

    What each other option does: ``python -m hangguard.testing.server --help``.
    """
    command = [python, "-m", "hangguard.testing.server", "--model-path", model_path, "--host", host]
    command += ["--port", "{port}" if port is None else str(port), "--tp", str(tp)]
    command += ["--hold-mb", str(hold_mb), "--phase-seconds", str(phase_seconds)]
    values: tuple[tuple[str, object, object], ...] = (
        ("--api-key", api_key, None),
        ("--jit-seconds", jit_seconds, 0.0),
        ("--token-seconds", token_seconds, 0.01),
        ("--fault-rank", fault_rank, None),
        ("--fault-after", fault_after, 1),
        ("--cured-by", cured_by, None),
        ("--once", once, None),
        ("--crash-exit", crash_exit, None),
        ("--exit-early", exit_early, None),
        ("--banner-bytes", banner_bytes, 0),
        ("--long-line", long_line, 0),
    )
    switches = (
        ("--is-embedding", is_embedding),
        ("--enable-metrics", enable_metrics),
        ("--disable-cuda-graph", disable_cuda_graph),
        ("--deadlock-at-capture", deadlock_at_capture),
        ("--ignore-crash", ignore_crash),
        ("--shallow-health", shallow_health),
        ("--ignore-term", ignore_term),
        ("--orphans", orphans),
        ("--fork-and-exit", fork_and_exit),
        ("--leave-shm", leave_shm),
        ("--flood", flood),
        ("--garbage", garbage),
    )
    command += [f"{flag}={value}" for flag, value, default in values if value != default]
    command += [flag for flag, given in switches if given]
    command += [f"--fault={phase}:{kind}" for phase, kind in faults]
    command += [f"--leave={kind}" for kind in leave]
    return command
