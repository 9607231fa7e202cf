"""Where threads of every engine wait, and for what; and the limits that the libraries below them set themselves.

A stack is read from its innermost frame outwards, an engine's own rows before those that all share. Files are parts
of paths, as stacks show them.
"""

from __future__ import annotations

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

NCCL_COLLECTIVE = Timer(
    name="torch.distributed's limit on NCCL collectives",
    seconds=600.0,
    covers=("dist-init", "weights-load", "kv-cache", "warm-up"),
    source="torch 2.1 to 2.11: default_pg_nccl_timeout, 10 min; not over collectives inside graphs, nor over the "
    "engines' own pynccl and custom kernels",
)
NCCL_HEARTBEAT = Timer(
    name="the heartbeat monitor of torch's NCCL watchdog",
    seconds=480.0,
    covers=("dist-init", "weights-load", "kv-cache", "jit-compile", "graph-capture", "warm-up", "serving"),
    variable="TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
    source="torch 2.3 and later (600 s before 2.5): aborts when the watchdog itself hangs, in a CUDA call for example",
)
STORE = Timer(
    name="torch.distributed's limit on gloo and the store",
    seconds=1800.0,
    covers=("dist-init",),
    source="torch 2.1 to 2.11: default_pg_timeout, 30 min (1800.90 s measured in reports)",
)
