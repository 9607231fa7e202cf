"""Where threads wait, and for what; and the limits that engines and their libraries set themselves.

A stack is read from its innermost frame outwards, an engine's own rows before those that all share. Files are parts
of paths, as stacks show them.
"""

from __future__ import annotations

from dataclasses import replace

from hangguard.engines.common import functions
from hangguard.facts import Timer, WaitSite

_ANY = r".*"
_C10D = "distributed_c10d.py"

# Read from the innermost frame outwards; in one frame the first row counts.
EVERYWHERE: tuple[WaitSite, ...] = (
    *(
        WaitSite(function=_ANY, file=file, waits_for="lock", source=source)
        for file, source in (
            ("filelock", "the package filelock: huggingface_hub, Triton and vLLM lock their caches with it"),
            ("file_baton.py", "torch/utils/file_baton.py: presence of the file is the lock of an extension's build"),
        )
    ),
    *(
        WaitSite(function=_ANY, file=file, waits_for="download", source="clients of model hubs, and what they stand on")
        for file in (
            "huggingface_hub",
            "hf_transfer",
            "modelscope",
            "requests/",
            "urllib3",
            "httpx",
            "httpcore",
            "aiohttp",
            "http/client.py",
            "ssl.py",
            "boto",
        )
    ),
    WaitSite(
        function=functions(
            "_create_c10d_store", "_(?:tcp|env|file)_rendezvous_handler", "_torchelastic_use_agent_store"
        ),
        file="rendezvous.py",
        waits_for="peers",
        source="torch/distributed/rendezvous.py, 2.1 to 2.11: the client polls the store, the server waits for all",
    ),
    WaitSite(
        function=functions("_store_based_barrier"),
        file=_C10D,
        waits_for="peers",
        source="torch/distributed/distributed_c10d.py: every rank adds itself to the store",
    ),
    WaitSite(
        function=functions("_new_process_group_helper", "new_group", "_new_group_with_tag"),
        file=_C10D,
        waits_for="communicator",
        source="torch/distributed/distributed_c10d.py; NCCL's communicator init burns a core without a system call "
        "(measured, NCCL 2.28.9)",
    ),
    WaitSite(
        function=functions("ncclCommInitRank(?:Config|Scalable)?", "ncclCommInitAll", "ncclCommSplit"),
        waits_for="communicator",
        source="NCCL's own names; vLLM and SGLang call them in pynccl_wrapper.py",
    ),
    WaitSite(
        function=functions(
            "(?:monitored_)?barrier",
            "all_reduce(?:_coalesced)?",
            "all_gather\\w*",
            "all_to_all\\w*",
            "broadcast(?:_object_list)?",
            "reduce(?:_scatter\\w*)?",
            "gather(?:_object)?",
            "scatter(?:_object_list)?",
            "send",
            "recv",
            "batch_isend_irecv",
            "_coalescing_manager",
        ),
        file=_C10D,
        waits_for="collective",
        source="torch/distributed/distributed_c10d.py, 2.1 to 2.11",
    ),
    WaitSite(
        function=functions("nccl(?:AllReduce|AllGather|Broadcast|ReduceScatter|Reduce|Send|Recv|GroupEnd)"),
        waits_for="collective",
        source="NCCL's own names; vLLM and SGLang call them in pynccl_wrapper.py",
    ),
    WaitSite(
        function=functions("synchronize", "wait", "query", "elapsed_time"),
        file="torch/cuda/",
        waits_for="kernel",
        source="torch/cuda/__init__.py and streams.py",
    ),
    WaitSite(
        function=functions("cu(?:da)?(?:Stream|Device|Ctx|Event)Synchronize", "cu(?:da)?(?:Stream|Event)Query"),
        waits_for="kernel",
        source="names of the CUDA runtime and driver, as ctypes wrappers and native stacks show them",
    ),
    WaitSite(
        function=_ANY,
        file="torch/utils/cpp_extension.py",
        waits_for="compile",
        source="ninja and nvcc run as children",
    ),
    *(
        WaitSite(function=_ANY, file=file, waits_for="compile", source="waits for compiler children or a pool of them")
        for file in (
            "torch/_inductor/async_compile.py",
            "torch/_inductor/compile_worker",
            "torch/_inductor/cpp_builder.py",
            "torch/_inductor/runtime/triton_heuristics.py",
            "triton/compiler",
            "triton/backends",
            "triton/runtime/build.py",
            "flashinfer/jit",
            "deep_gemm",
            "tilelang/",
        )
    ),
)

_VLLM_READ = "vLLM, released source 0.8.5 to 0.33.0"
_SGLANG_READ = "SGLang, released source 0.4.6.post5 to 0.5.23"

VLLM: tuple[WaitSite, ...] = (
    WaitSite(
        function=functions("wait_for_engine_startup", "wait_for_completion_or_failure"),
        waits_for="start-up",
        source=f"{_VLLM_READ}, v1/engine/utils.py: a poll of 10 s without an end",
    ),
    WaitSite(
        function=functions("wait_until_ready"),
        file="shm_broadcast.py",
        waits_for="peers",
        source=f"{_VLLM_READ}: the reader of a message queue waits for its writer, the writer for all readers",
    ),
    WaitSite(
        function=functions("wait_for_ready"),
        waits_for="start-up",
        source=f"{_VLLM_READ}, v1/executor/multiproc_executor.py: the engine core waits for its workers",
    ),
    WaitSite(
        function=functions("dequeue", "enqueue", "acquire_read", "acquire_write"),
        file="shm_broadcast.py",
        waits_for="message",
        source=f"{_VLLM_READ}: between engine core and workers; burns a core in sched_yield at times (vllm#19036)",
    ),
    WaitSite(
        function=functions("all_reduce", "gather", "all_gather(?:_into_tensor)?", "(?:send|recv)_tensor_dict"),
        file="cpu_communicator.py",
        waits_for="collective",
        source="vLLM 0.32.0, CPU build: the ranks of one host meet in shared memory, and who waits there burns a core "
        "without a system call (seen with two ranks)",
    ),
)

SGLANG: tuple[WaitSite, ...] = (
    WaitSite(
        function=functions("_wait_for_scheduler_ready", "_launch_scheduler_processes"),
        waits_for="start-up",
        source=f"{_SGLANG_READ}, entrypoints/engine.py: polls the pipes of the schedulers, without an end",
    ),
    WaitSite(
        function=functions("dist_barrier_after_load", "monitored_barrier_after_load"),
        waits_for="collective",
        source=f"{_SGLANG_READ}: all ranks meet after their weights are loaded, 480 s",
    ),
)

_NCCL_COLLECTIVE = Timer(
    name="torch.distributed's limit on NCCL collectives",
    seconds=600.0,
    covers=("dist-init", "weights-load", "kv-cache", "warm-up"),
    source="torch 2.1 to 2.11: default_pg_nccl_timeout, 10 min; not over collectives inside graphs, nor over the "
    "engines' own pynccl and custom kernels",
)
_NCCL_HEARTBEAT = Timer(
    name="the heartbeat monitor of torch's NCCL watchdog",
    seconds=480.0,
    covers=("dist-init", "weights-load", "kv-cache", "jit-compile", "graph-capture", "warm-up", "serving"),
    variable="TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
    source="torch 2.3 and later (600 s before 2.5): aborts when the watchdog itself hangs, in a CUDA call for example",
)
_STORE = Timer(
    name="torch.distributed's limit on gloo and the store",
    seconds=1800.0,
    covers=("dist-init",),
    source="torch 2.1 to 2.11: default_pg_timeout, 30 min (1800.90 s measured in reports)",
)

VLLM_TIMERS: tuple[Timer, ...] = (
    Timer(
        name="vLLM's limit on a model step",
        seconds=300.0,
        covers=("serving",),
        variable="VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
        since="0.9.2",
        source=f"{_VLLM_READ}, v1/executor/multiproc_executor.py; not with one rank, and not over start-up",
    ),
    Timer(
        name="vLLM's limit on the start of its engine cores",
        seconds=600.0,
        covers=("import", "dist-init", "weights-load", "kv-cache", "jit-compile", "graph-capture"),
        variable="VLLM_ENGINE_READY_TIMEOUT_S",
        since="0.14.1",
        source=f"{_VLLM_READ}, v1/engine/core_client.py; with several API servers or data parallel only",
    ),
    Timer(
        name="the engine core's limit on the handshake with its front end",
        seconds=300.0,
        covers=("import",),
        since="0.9.2",
        source=f"{_VLLM_READ}, v1/engine/core.py (HANDSHAKE_TIMEOUT_MINS)",
    ),
    replace(_NCCL_COLLECTIVE, options=("--distributed-timeout-seconds",)),
    replace(_STORE, options=("--cpu-distributed-timeout-seconds",)),
    _NCCL_HEARTBEAT,
)

SGLANG_TIMERS: tuple[Timer, ...] = (
    Timer(
        name="SGLang's scheduler watchdog",
        seconds=300.0,
        covers=("serving",),
        options=("--watchdog-timeout",),
        source=f"{_SGLANG_READ}, managers/scheduler.py; looks twice per limit, so it fires after 300 to 450 s",
    ),
    Timer(
        name="SGLang's soft watchdog",
        seconds=0.0,
        covers=("import", "dist-init", "weights-load", "kv-cache", "jit-compile", "graph-capture", "serving"),
        options=("--soft-watchdog-timeout",),
        since="0.5.7",
        ends=False,
        source=f"{_SGLANG_READ}; off unless set, and only logs",
    ),
    Timer(
        name="SGLang's barrier after the weights are loaded",
        seconds=480.0,
        covers=("weights-load",),
        since="0.5.6.post2",
        source=f"{_SGLANG_READ}, model_executor/model_runner.py",
    ),
    Timer(
        name="SGLang's barrier after the weights are loaded",
        seconds=300.0,
        covers=("weights-load",),
        until="0.5.5.post3",
        source=f"{_SGLANG_READ}, model_executor/model_runner.py",
    ),
    Timer(
        name="SGLang's limit on its warm-up request",
        seconds=600.0,
        covers=("warm-up",),
        variable="SGLANG_WARMUP_TIMEOUT",
        source=f"{_SGLANG_READ}, entrypoints/http_server.py: it kills itself; the variable since 0.5.5.post3",
    ),
    replace(_NCCL_COLLECTIVE, options=("--dist-timeout",)),
    replace(_STORE, options=("--dist-timeout",)),
    _NCCL_HEARTBEAT,
)
