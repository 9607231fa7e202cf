"""What vLLM prints: the lines that tell the phase, those that are no news, and those that tell what is wrong."""

from __future__ import annotations

from hangguard.engines import common, symptoms
from hangguard.engines.vllm.releases import RAN, READ
from hangguard.facts import Marker, Symptom

MARKERS = (
    Marker(pattern=r"non-default args:", phase="import", source=f"{READ}; {RAN}"),
    Marker(pattern=r"Resolved architecture:", phase="import", source=f"{READ}; {RAN}"),
    Marker(pattern=r"Initializing a V1 LLM engine", phase="import", source=f"{READ}; {RAN}; workers spawn"),
    Marker(
        pattern=r"world_size=\d+ rank=\d+ local_rank=\d+ distributed_init_method",
        phase="dist-init",
        source=f"{READ}; {RAN}",
    ),
    Marker(
        pattern=r"rank \d+ in world size \d+ is assigned",
        phase="weights-load",
        gap=True,
        source=f"{READ}; {RAN}",
    ),
    Marker(
        pattern=r"Starting to load model|Loading model from scratch",
        phase="weights-load",
        source=f"{READ}; {RAN}",
    ),
    Marker(
        pattern=r"Loading safetensors checkpoint shards:\s+\d+%",
        phase="weights-load",
        source=f"{READ}; {RAN}; the bar stands on rank 0 only",
    ),
    # The weights are read; repacking and quantising them is silent and still to come.
    Marker(pattern=r"Loading weights took [\d.]+ seconds", phase="weights-load", source=f"{READ}; {RAN}"),
    Marker(pattern=r"Model loading took", phase="jit-compile", gap=True, source=f"{READ}; {RAN}"),
    Marker(
        pattern=r"Warming up model for the compilation",
        phase="jit-compile",
        source=f"{RAN}, CPU build: all compiling happens after it",
    ),
    Marker(pattern=r"Starting torch\.compile", phase="jit-compile", since="0.32.0", source=READ),
    Marker(
        pattern=r"Using cache directory: .* for vLLM's torch\.compile",
        phase="jit-compile",
        source=f"{READ}; {RAN}",
    ),
    Marker(
        pattern=r"Dynamo bytecode transform time|Compiling a graph for|Directly load the",
        phase="jit-compile",
        source=f"{READ}; {RAN}",
    ),
    # The profiling run, with its own kernels to build, comes before the memory is known: same phase.
    Marker(pattern=r"torch\.compile took", phase="jit-compile", since="0.18.1", source=f"{READ}; {RAN}"),
    Marker(pattern=r"Profiling CUDA graph memory", phase="graph-capture", since="0.18.1", source=READ),
    Marker(pattern=r"Warming up done\.", phase="kv-cache", gap=True, source=f"{RAN}, CPU build"),
    Marker(
        pattern=r"Available KV cache memory|Explicitly set \(.*\) GiB for KV cache",
        phase="kv-cache",
        source=f"{READ}; {RAN}",
    ),
    # Kernel warm-up may follow, then the graphs: the phase with the longer patience.
    Marker(
        pattern=r"KV cache size: [\d,]+ tokens",
        phase="jit-compile",
        gap=True,
        source=f"{READ}; {RAN}; 'GPU KV cache size' to 0.29.0",
    ),
    Marker(pattern=r"JIT kernel warmup starting", phase="jit-compile", since="0.29.0", source=READ),
    # FlashInfer's autotune and DeepGEMM still come after it (model_executor/warmup/kernel_warmup.py, 0.32.0).
    Marker(pattern=r"JIT kernel warmup finished", phase="jit-compile", since="0.29.0", source=READ),
    Marker(
        pattern=r"Running FlashInfer autotune with|FlashInfer autotune cache file|\[Autotuner\]: Autotuning process",
        phase="jit-compile",
        source=f"{READ}, 0.29.0 and later; {RAN}",
    ),
    Marker(
        pattern=r"DeepGEMM warmup|Compiling CuTeDSL kernels|JIT kernel warmup \(",
        phase="jit-compile",
        source=f"{READ}, 0.14.1 and later",
    ),
    Marker(pattern=r"Capturing CUDA graphs?\b", phase="graph-capture", source=f"{READ}; {RAN}"),
    # On a cold H200 98 s of JIT in child processes followed this line.
    Marker(pattern=r"Graph capturing finished in", phase="warm-up", gap=True, source=f"{READ}; {RAN}"),
    Marker(
        pattern=r"init engine \(profile, create kv cache, warmup model\) took",
        phase="warm-up",
        source=f"{READ}; {RAN}",
    ),
    Marker(pattern=r"Starting vLLM API server", phase="warm-up", until="0.17.1", source=READ),
    Marker(pattern=r"Starting vLLM server on", phase="warm-up", since="0.18.1", source=f"{READ}; {RAN}"),
    Marker(pattern=r"Available routes are", phase="warm-up", source=f"{READ}; {RAN}"),
    # uvicorn's, on stderr; there is no warm-up request of the server's own.
    Marker(pattern=r"Application startup complete\.", phase="serving", source=f"uvicorn; {RAN}"),
)

NOISE = (
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

SYMPTOMS = (
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
        pattern=r"EngineCore failed to start|Engine core initialization failed|WorkerProc (?:failed to start|hit an "
        r"exception|initialization failed)",
        reason="crash",
        final=True,
    ),
    Symptom(
        pattern=r"EngineCore encountered a(?:n issue| fatal error)"
        r"|WorkerProc was terminated|WorkerProc failed\."
        r"|(?P<role>Worker) proc \w+-(?P<rank>\d+) died unexpectedly"
        r"|Engine core proc \S+ died unexpectedly"
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
