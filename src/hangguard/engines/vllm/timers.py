"""Limits of time that vLLM sets itself, and those of the libraries that it brings."""

from __future__ import annotations

from dataclasses import replace

from hangguard.engines.vllm.releases import READ
from hangguard.engines.waiting import NCCL_COLLECTIVE, NCCL_HEARTBEAT, STORE
from hangguard.facts import Timer

TIMERS: tuple[Timer, ...] = (
    Timer(
        name="vLLM's limit on a model step",
        seconds=300.0,
        covers=("serving",),
        variable="VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
        since="0.9.2",
        source=f"vLLM, {READ}, v1/executor/multiproc_executor.py; not with one rank, and not over start-up",
    ),
    Timer(
        name="vLLM's limit on the start of its engine cores",
        seconds=600.0,
        covers=("import", "dist-init", "weights-load", "kv-cache", "jit-compile", "graph-capture"),
        variable="VLLM_ENGINE_READY_TIMEOUT_S",
        since="0.14.1",
        source=f"vLLM, {READ}, v1/engine/core_client.py; with several API servers or data parallel only",
    ),
    Timer(
        name="the engine core's limit on the handshake with its front end",
        seconds=300.0,
        covers=("import",),
        since="0.9.2",
        source=f"vLLM, {READ}, v1/engine/core.py (HANDSHAKE_TIMEOUT_MINS)",
    ),
    replace(NCCL_COLLECTIVE, options=("--distributed-timeout-seconds",)),
    replace(STORE, options=("--cpu-distributed-timeout-seconds",)),
    NCCL_HEARTBEAT,
)
