"""SGLang, releases 0.4.6.post5 to 0.5.23 as read, and the real 0.5.16 (H200) and 0.5.23 (CPU) as run."""

from __future__ import annotations

from hangguard.engines.base import Engine
from hangguard.engines.common import TRACKER
from hangguard.engines.sglang.answers import LOAD_ROUTES, METRICS, canary, ready
from hangguard.engines.sglang.command import FLAGS, OPTION_SOURCES, recognise, task
from hangguard.engines.sglang.fallbacks import FALLBACKS
from hangguard.engines.sglang.log import MARKERS, NOISE, QUIET_LINES, SYMPTOMS
from hangguard.engines.sglang.stacks import IDLE_PLACES, STACK_MARKERS, WAIT_SITES
from hangguard.engines.sglang.timers import TIMERS

SGLANG = Engine(
    name="sglang",
    recognise=recognise,
    distributions=("sglang",),
    option_sources=OPTION_SOURCES,
    flags=FLAGS,
    default_port=30000,
    positional_model=True,
    task=task,
    followers_answer=False,  # their /health is a constant 200 (launch_dummy_health_check_server)
    markers=MARKERS,
    noise=NOISE,
    stack_markers=STACK_MARKERS,
    symptoms=SYMPTOMS,
    front_end=(
        r"^sglang::(?:detokenizer|data_parallel_controller|detokenizer_router|tokenizer_worker)",
        r"\bsglang\.launch_server\b",
        r"(?:^|[/ ])sglang serve\b",
        TRACKER,
    ),
    workers=(r"^sglang::scheduler",),
    wait_sites=WAIT_SITES,
    timers=TIMERS,
    idle_places=IDLE_PLACES,
    idle_spins=True,  # 92 to 101 % of a core without a request, 0.5.16 and 0.5.23
    health_path="/health",
    ready=ready,
    metrics_path="/metrics",
    metrics=METRICS,
    metrics_on="--enable-metrics",
    metrics_hint="SGLang counts only when it was started with --enable-metrics",
    load_routes=LOAD_ROUTES,
    quiet_lines=QUIET_LINES,
    canary=canary,
    fallbacks=FALLBACKS,
)
