"""Limits of time that SGLang sets itself, and those of the libraries that it brings."""

from __future__ import annotations

from dataclasses import replace

from hangguard.engines.sglang.releases import READ
from hangguard.engines.waiting import NCCL_COLLECTIVE, NCCL_HEARTBEAT, STORE
from hangguard.facts import Timer

TIMERS: tuple[Timer, ...] = (
    Timer(
        name="SGLang's scheduler watchdog",
        seconds=300.0,
        covers=("serving",),
        options=("--watchdog-timeout",),
        source=f"SGLang, {READ}, managers/scheduler.py; looks twice per limit, so it fires after 300 to 450 s",
    ),
    Timer(
        name="SGLang's soft watchdog",
        seconds=0.0,
        covers=("import", "dist-init", "weights-load", "kv-cache", "jit-compile", "graph-capture", "serving"),
        options=("--soft-watchdog-timeout",),
        since="0.5.7",
        ends=False,
        source=f"SGLang, {READ}; off unless set, and only logs",
    ),
    Timer(
        name="SGLang's barrier after the weights are loaded",
        seconds=480.0,
        covers=("weights-load",),
        since="0.5.6.post2",
        source=f"SGLang, {READ}, model_executor/model_runner.py",
    ),
    Timer(
        name="SGLang's barrier after the weights are loaded",
        seconds=300.0,
        covers=("weights-load",),
        until="0.5.5.post3",
        source=f"SGLang, {READ}, model_executor/model_runner.py",
    ),
    Timer(
        name="SGLang's limit on its warm-up request",
        seconds=600.0,
        covers=("warm-up",),
        variable="SGLANG_WARMUP_TIMEOUT",
        source=f"SGLang, {READ}, entrypoints/http_server.py: it kills itself; the variable since 0.5.5.post3",
    ),
    replace(NCCL_COLLECTIVE, options=("--dist-timeout",)),
    replace(STORE, options=("--dist-timeout",)),
    NCCL_HEARTBEAT,
)
