"""Where threads of SGLang stand: in which phase, waiting for what, and with nothing to do."""

from __future__ import annotations

from hangguard.engines.common import functions
from hangguard.engines.sglang.releases import READ
from hangguard.facts import IdlePlace, StackMarker, WaitSite

STACK_MARKERS = (
    StackMarker(
        function=functions(
            "init_torch_distributed",
            "init_parallel_runtime",
            "_init_parallel_groups",
            "init_distributed_environment",
            "initialize_model_parallel",
        ),
        phase="dist-init",
    ),
    StackMarker(
        function=functions("load_model", "load_model_with_memory_saver", "dist_barrier_after_load"),
        phase="weights-load",
    ),
    StackMarker(
        function=functions("init_memory_pool", "init_memory_pools", "alloc_memory_pool"),
        phase="kv-cache",
    ),
    StackMarker(
        function=functions(
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
        function=functions(
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
    StackMarker(function=functions("_wait_and_warmup", "_execute_server_warmup"), phase="warm-up"),
)

WAIT_SITES: tuple[WaitSite, ...] = (
    WaitSite(
        function=functions("_wait_for_scheduler_ready", "_launch_scheduler_processes"),
        waits_for="start-up",
        source=f"SGLang, {READ}, entrypoints/engine.py: polls the pipes of the schedulers, without an end",
    ),
    WaitSite(
        function=functions("dist_barrier_after_load", "monitored_barrier_after_load"),
        waits_for="collective",
        source=f"SGLang, {READ}: all ranks meet after their weights are loaded, 480 s",
    ),
)

IDLE_PLACES = (
    IdlePlace(
        loop=functions(r"event_loop_\w+"),
        inside=functions(
            "recv_requests", "recv_limit_reached", "recv_pyobj", "recv", "recv_multipart", "poll", "sleep", "select",
            "maybe_sleep", "self_check_during_idle", "on_idle", "_?broadcast_pyobj", r"broadcast_pyobj_\w+",
            "_broadcast_reqs_across_ranks", "broadcast", "wrapper", "process_input_requests", "get_next_batch_to_run",
            "receive", "readline", "readinto", "recv_into",
        ),
        source="srt/managers/scheduler.py, 0.4.6.post5 to 0.5.23: it polls; ranks but the first wait for its broadcast",
    ),
)  # fmt: skip
