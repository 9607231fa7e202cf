"""Where threads of vLLM stand: in which phase, waiting for what, and with nothing to do."""

from __future__ import annotations

from hangguard.engines.common import functions
from hangguard.engines.vllm.releases import READ
from hangguard.facts import IdlePlace, StackMarker, WaitSite

# The engine core carries the same names (Executor.determine_available_memory) while it waits for its workers:
# only those who do the work are placed by them. Python 3.10 shows no classes, and there the two look alike.
_AT_WORK = r"(?!(?:\w*Executor|EngineCore\w*)\.)"

STACK_MARKERS = (
    StackMarker(
        function=_AT_WORK
        + functions(
            "init_device",
            "init_worker_distributed_environment",
            "init_distributed_environment",
            "initialize_model_parallel",
            "ensure_model_parallel_initialized",
        ),
        phase="dist-init",
    ),
    StackMarker(function=_AT_WORK + functions("load_model", "reload_weights"), phase="weights-load"),
    StackMarker(function=_AT_WORK + functions("initialize_from_config", "initialize_kv_cache"), phase="kv-cache"),
    StackMarker(
        function=_AT_WORK + functions("capture_model", "_capture_cudagraphs", "profile_cudagraph_memory"),
        phase="graph-capture",
    ),
    StackMarker(function=functions("capture"), file="cudagraph", phase="graph-capture"),
    StackMarker(
        function=_AT_WORK
        + functions(
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

WAIT_SITES: tuple[WaitSite, ...] = (
    WaitSite(
        function=functions("wait_for_engine_startup", "wait_for_completion_or_failure"),
        waits_for="start-up",
        source=f"vLLM, {READ}, v1/engine/utils.py: a poll of 10 s without an end",
    ),
    WaitSite(
        function=functions("wait_until_ready"),
        file="shm_broadcast.py",
        waits_for="peers",
        source=f"vLLM, {READ}: the reader of a message queue waits for its writer, the writer for all readers",
    ),
    WaitSite(
        function=functions("wait_for_ready"),
        waits_for="start-up",
        source=f"vLLM, {READ}, v1/executor/multiproc_executor.py: the engine core waits for its workers",
    ),
    WaitSite(
        function=functions("dequeue", "enqueue", "acquire_read", "acquire_write"),
        file="shm_broadcast.py",
        waits_for="message",
        source=f"vLLM, {READ}: between engine core and workers; burns a core in sched_yield at times (vllm#19036)",
    ),
    WaitSite(
        function=functions("all_reduce", "gather", "all_gather(?:_into_tensor)?", "(?:send|recv)_tensor_dict"),
        file="cpu_communicator.py",
        waits_for="collective",
        source="vLLM 0.32.0, CPU build: the ranks of one host meet in shared memory, and who waits there burns a core "
        "without a system call (seen with two ranks)",
    ),
)

# py-spy names the class on Python 3.11 and later. Read in 0.8.5 to 0.33.0, seen in 0.26.0 and 0.32.0.
IDLE_PLACES = (
    IdlePlace(
        loop=functions("worker_busy_loop"),
        inside=functions(
            "dequeue", "acquire_read", "__enter__", "recv", "recv_multipart", "poll", "wait", "_wait", "select",
            "spin", "sched_yield", "sleep", "record_activity", "_poll",
        ),
        source="v1/executor/multiproc_executor.py: the next call comes over shared memory, or zmq from another node",
    ),
    IdlePlace(
        loop=functions("run_busy_loop"),
        inside=functions("_process_input_queue", "get", "wait", "_wait", "sleep", "has_work"),
        source="v1/engine/core.py: requests come through a queue.Queue",
    ),
)  # fmt: skip
