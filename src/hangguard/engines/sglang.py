"""SGLang, releases 0.4.6.post5 to 0.5.23 as read, and the real 0.5.16 (H200) and 0.5.23 (CPU) as run."""

from __future__ import annotations

import json
from typing import Any

from hangguard.changes import has_flag, value_of, with_flag, words_of
from hangguard.engines import common, questions, symptoms, waiting
from hangguard.engines.answered import request_for
from hangguard.engines.base import Engine, Flags
from hangguard.engines.counters import longer
from hangguard.facts import Fallback, IdlePlace, Launch, LoadRoute, Marker, Metric, Request, StackMarker, Symptom, Task

_LAST_READ = "0.5.23"
_READ = "released source, 0.4.6.post5 to 0.5.23"
_RAN = "log of a real start, 0.5.16 and 0.5.23"


MODULES = ("sglang.launch_server", "hangguard.testing.server")
"""The little server of ``hangguard.testing`` takes SGLang's options and prints its log lines."""


def recognise(argv: tuple[str, ...]) -> int | None:
    """Find ``sglang serve`` (0.5.3 and later) or ``python -m sglang.launch_server``."""
    index = common.after_console_script(argv, "sglang", "serve")
    return index if index is not None else common.after_python_module(argv, MODULES)


def task(args: tuple[str, ...]) -> Task | None:
    """Tell whether the server was asked to embed; everything else it reads from the model."""
    return "embed" if has_flag(args, "--is-embedding") else None


def ready(launch: Launch) -> Request | None:
    """Return the request that proves the scheduler: ``/v1/models`` and ``/model_info`` answer while it hangs."""
    return request_for(questions.SGLANG, launch)


_MARKERS = (
    Marker(pattern=r"server_args=", phase="import", source=f"{_RAN}; before any child exists"),
    Marker(pattern=r"Init torch distributed begin", phase="dist-init", until="0.5.20", source=f"{_READ}; {_RAN}"),
    Marker(pattern=r"Init parallel begin", phase="dist-init", since="0.5.21", source=f"{_READ}; {_RAN}"),
    Marker(
        pattern=r"Init torch distributed ends\. elapsed=",
        phase="weights-load",
        gap=True,
        until="0.5.20",
        source=f"{_READ}; {_RAN}",
    ),
    Marker(
        pattern=r"Init parallel ends\. elapsed=",
        phase="weights-load",
        gap=True,
        since="0.5.21",
        source=f"{_READ}; {_RAN}",
    ),
    Marker(pattern=r"Load weight begin\.", phase="weights-load", source=f"{_READ}; {_RAN}"),
    Marker(
        pattern=r"(?:Loading safetensors checkpoint|Loading pt checkpoint|Multi-thread loading(?: pt checkpoint)?)"
        r" shards:\s+\d+%",
        phase="weights-load",
        source=f"{_READ}; the bar stands on rank 0 only",
    ),
    # With overlapped loading the weights are committed after the graphs are captured.
    Marker(
        pattern=r"Load weight end\. Committed real weights",
        phase="warm-up",
        gap=True,
        since="0.5.18",
        source=_READ,
    ),
    Marker(pattern=r"Load weight end\.(?! Committed)", phase="kv-cache", gap=True, source=f"{_READ}; {_RAN}"),
    Marker(pattern=r"Using KV cache dtype", phase="kv-cache", since="0.5.3", until="0.5.14", source=_READ),
    Marker(pattern=r"KV Cache is allocated", phase="kv-cache", source=f"{_READ}; {_RAN}"),
    Marker(pattern=r"KV Cache VA upper bound", phase="kv-cache", since="0.5.16", source=_READ),
    # The seed story on the CPU build ends here: what follows is autotune, then capture.
    Marker(pattern=r"Memory pool end\. avail mem=", phase="graph-capture", gap=True, source=f"{_READ}; {_RAN}"),
    Marker(pattern=r"Running FlashInfer autotune", phase="jit-compile", since="0.5.6", source=_READ),
    Marker(
        pattern=r"FlashInfer autotune completed",
        phase="graph-capture",
        gap=True,
        since="0.5.6",
        source=_READ,
    ),
    Marker(
        pattern=r"Entering DeepGEMM JIT Pre-Compile session|Try DeepGEMM JIT Compiling|DeepGEMM warmup:\s+\d+%",
        phase="jit-compile",
        source=f"{_READ}; by its own text 10 to 20 min when cold",
    ),
    # "Capture cuda graph begin. This can take up to several minutes" to 0.5.13; role names since 0.5.14.
    Marker(pattern=r"(?i:Capture .*graph begin)\.", phase="graph-capture", source=f"{_READ}; {_RAN}"),
    Marker(
        pattern=r"Capturing (?:batches \(bs=|num tokens \(|prefill shape \()",
        phase="graph-capture",
        source=f"{_READ}; {_RAN}; num tokens to 0.5.20, prefill shape since 0.5.21",
    ),
    Marker(pattern=r"Compiling num tokens \(", phase="graph-capture", since="0.5.7", source=_READ),
    # The decode capture follows the prefill capture, and the drafter's follows both.
    Marker(pattern=r"(?i:Capture .*graph end)\.", phase="graph-capture", gap=True, source=f"{_READ}; {_RAN}"),
    Marker(
        pattern=r"max_total_num_tokens=",
        phase="warm-up",
        gap=True,
        source=f"{_READ}; {_RAN}; first rank only",
    ),
    Marker(pattern=r"Engine startup timings \(s\):", phase="warm-up", since="0.5.17", source=f"{_READ}; {_RAN}"),
    Marker(pattern=r"INFO:\s+Started server process", phase="warm-up", source=f"uvicorn; {_RAN}"),
    Marker(pattern=r"Uvicorn running on", phase="warm-up", source=f"uvicorn; {_RAN}; one real request follows"),
    Marker(pattern=r"The server is fired up and ready to roll!", phase="serving", source=f"{_READ}; {_RAN}"),
)

_NOISE = (
    common.ACCESS_LINE,
    # The answer to a health probe of ours (or of a neighbour's) that nobody served.
    r"Health check failed\. Server couldn't get a response",
    # --log-requests: a front end takes requests in beside a hung scheduler (srt/managers/tokenizer_manager.py).
    r"\] Receive: obj=",
)

_STACK_MARKERS = (
    StackMarker(
        function=common.functions(
            "init_torch_distributed",
            "init_parallel_runtime",
            "_init_parallel_groups",
            "init_distributed_environment",
            "initialize_model_parallel",
        ),
        phase="dist-init",
    ),
    StackMarker(
        function=common.functions("load_model", "load_model_with_memory_saver", "dist_barrier_after_load"),
        phase="weights-load",
    ),
    StackMarker(
        function=common.functions("init_memory_pool", "init_memory_pools", "alloc_memory_pool"),
        phase="kv-cache",
    ),
    StackMarker(
        function=common.functions(
            "_?flashinfer_autotune",
            "flashinfer_autotune_context",
            "run_flashinfer_autotune_forward",
            "maybe_flashinfer_autotune_speculative_draft",
            "kernel_warmup",
            "_maybe_compile_deep_gemm_one_type_all",
            "_compile_deep_gemm_one_type_all",
            "pp_parallel_deep_gemm_warmup",
            "maybe_precompile_model_kernels_after_loading",
        ),
        phase="jit-compile",
    ),
    StackMarker(
        function=common.functions(
            "init_cuda_graphs",
            "init_all_cuda_graphs",
            "init_device_graphs",
            "init_(?:decode|prefill|piecewise)_cuda_graphs?",
            "capture",
            "capture_cuda_graphs",
            "capture_(?:decode|prefill)_graph",
            "capture_one_(?:batch_size|shape|stream)",
        ),
        phase="graph-capture",
    ),
    StackMarker(function=common.functions("_wait_and_warmup", "_execute_server_warmup"), phase="warm-up"),
)

_SYMPTOMS = (
    # srt/utils/network.py wait_port_available, after 30 s
    Symptom(pattern=r"port at \d+ is not available|Port \d+ is (?:not available|already in use)", reason="port"),
    Symptom(
        # model_executor/pool_configurator.py; the second is raised or warned when ranks see unlike free memory
        pattern=r"Not enough memory\. Please try|No available memory|The memory capacity is unbalanced",
        reason="gpu-oom",
    ),
    Symptom(
        # model_executor/model_runner_components/load_model_utils.py: the barrier after loading, 300 or 480 s
        pattern=r"could finish the model loading, but there are other ranks",
        reason="dist-timeout",
    ),
    *symptoms.SHARED,
    Symptom(
        pattern=r"Scheduler hit an exception"
        r"|Initialization failed\."
        r"|scheduler died during initialization"
        r"|Rank \d+ scheduler is dead"
        r"|Received sigquit from a child process"
        r"|SIGQUIT received\.",
        reason="crash",
        final=True,
    ),
    Symptom(
        pattern=r"(?:Detokenizer|Tokenizer)Manager hit an exception"
        r"|\bwatchdog timeout \("
        r"|Capture cuda graph failed",
        reason="crash",
    ),
    # utils/watchdog.py: it says whom it found dead, and then kills all the others itself
    Symptom(pattern=r"Subprocess \S+ \(pid=(?P<pid>\d+)\) crashed with exit code", reason="crash"),
    # managers/tokenizer_manager.py, 0.5.23
    Symptom(pattern=r"SIGTERM received\..* Draining requests and shutting down", reason="asked-to-stop"),
)

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
    if not any(named.values()) and common.accepts(launch, "--disable-cuda-graph", until=_LAST_READ):
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


_FALLBACKS = (
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

# observability/metrics_collector.py and metrics_reporter.py (metrics/collector.py to 0.5.8).
# sglang:generation_tokens_total is not here: it grows when a request ends, so it stands still through every long
# healthy answer. The running gauge is written with each prefill and every 40th decode step; to 0.5.15 it keeps its
# last value for up to 30 s of idleness, so the load routes are asked too where nothing moves.
_TOTAL_OF_PRIORITIES = (("priority", ""),)
_METRICS = (
    Metric(field="running", name="sglang:num_running_reqs", labels=_TOTAL_OF_PRIORITIES, source=_READ),
    Metric(field="waiting", name="sglang:num_queue_reqs", labels=_TOTAL_OF_PRIORITIES, source=_READ),
    Metric(
        field="generated_tokens",
        name="sglang:realtime_tokens_total",
        labels=(("mode", "decode"),),
        since="0.5.7",
        source=f"{_READ}; after every decode step, whatever its help text says",
    ),
    Metric(
        field="prompt_tokens",
        name="sglang:realtime_tokens_total",
        labels=(("mode", "prefill_.*"),),
        since="0.5.7",
        source=f"{_READ}; prefill_compute and prefill_cache, after every prefill batch",
    ),
)

_LOAD_ROUTES = (
    LoadRoute(
        path="/v1/loads?include=core",
        under="loads",
        running="num_running_reqs",
        waiting="num_waiting_reqs",
        since="0.5.8",
        source="released source; asks the schedulers to 0.5.12, a snapshot that they publish since 0.5.13",
    ),
    LoadRoute(
        path="/get_load",
        total="num_reqs",
        waiting="num_waiting_reqs",
        until="0.5.7.post9",
        source="released source, 0.4.10 to 0.5.7; asks the schedulers",
    ),
)


def canary(launch: Launch) -> Request | None:
    """Return the request of :func:`ready` with many tokens instead of one."""
    request = ready(launch)
    return longer(request) if request is not None else None


_IDLE_PLACES = (
    IdlePlace(
        loop=common.functions(r"event_loop_\w+"),
        inside=common.functions(
            "recv_requests", "recv_limit_reached", "recv_pyobj", "recv", "recv_multipart", "poll", "sleep", "select",
            "maybe_sleep", "self_check_during_idle", "on_idle", "_?broadcast_pyobj", r"broadcast_pyobj_\w+",
            "_broadcast_reqs_across_ranks", "broadcast", "wrapper", "process_input_requests", "get_next_batch_to_run",
            "receive", "readline", "readinto", "recv_into",
        ),
        source="srt/managers/scheduler.py, 0.4.6.post5 to 0.5.23: it polls; ranks but the first wait for its broadcast",
    ),
)  # fmt: skip

SGLANG = Engine(
    name="sglang",
    recognise=recognise,
    distributions=("sglang",),
    option_sources=(
        "sglang/srt/server_args.py",
        "sglang/srt/arg_groups/fields/*.py",
        "sglang/srt/arg_groups/*.py",
    ),
    flags=Flags(
        model=("--model-path", "--model"),
        tensor_parallel=("--tp-size", "--tensor-parallel-size", "--tp"),
        pipeline_parallel=("--pp-size", "--pipeline-parallel-size", "--pp"),
        data_parallel=("--dp-size", "--data-parallel-size", "--dp"),
        shares_ranks=("--enable-dp-attention",),
        nodes=("--nnodes",),
        config="--config",
        ray=("--use-ray",),
    ),
    default_port=30000,
    positional_model=True,
    task=task,
    followers_answer=False,  # their /health is a constant 200 (launch_dummy_health_check_server)
    markers=_MARKERS,
    noise=_NOISE,
    stack_markers=_STACK_MARKERS,
    symptoms=_SYMPTOMS,
    front_end=(
        r"^sglang::(?:detokenizer|data_parallel_controller|detokenizer_router|tokenizer_worker)",
        r"\bsglang\.launch_server\b",
        r"(?:^|[/ ])sglang serve\b",
        common.TRACKER,
    ),
    workers=(r"^sglang::scheduler",),
    wait_sites=waiting.SGLANG,
    timers=waiting.SGLANG_TIMERS,
    idle_places=_IDLE_PLACES,
    idle_spins=True,  # 92 to 101 % of a core without a request, 0.5.16 and 0.5.23
    health_path="/health",
    ready=ready,
    metrics_path="/metrics",
    metrics=_METRICS,
    metrics_hint="SGLang counts only when it was started with --enable-metrics",
    load_routes=_LOAD_ROUTES,
    canary=canary,
    fallbacks=_FALLBACKS,
)
