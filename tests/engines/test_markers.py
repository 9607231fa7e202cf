"""Log lines, by engine and version, place a start in its phase."""

import json
import re
from pathlib import Path

import pytest

from hangguard.engines import ENGINES, SGLANG, VLLM, engine_named
from hangguard.engines.common import in_range, markers_for, version_key
from hangguard.facts import PHASES

LOGS = Path(__file__).parent / "logs"

# The phase in which the log leaves each start, and whether the last line was the end of a phase (a gap).
FINAL_PHASE = {
    "sglang-0.5.16-h200-capture": ("graph-capture", False),
    "sglang-0.5.16-h200-healthy": ("serving", False),
    "sglang-0.5.16-h200-nograph": ("serving", False),
    "sglang-0.5.23-cpu-forward-deadlock-watchdog20": ("serving", False),
    "sglang-0.5.23-cpu-graph-step-deadlock": ("graph-capture", True),  # after "Memory pool end."
    "sglang-0.5.23-cpu-healthy": ("serving", False),
    "sglang-0.5.23-cpu-scheduler-sigkill": ("serving", False),
    "sglang-0.5.23-cpu-tp2-refused": ("dist-init", False),
    "vllm-0.26.0-h200-capture": ("jit-compile", False),  # no line before the capture's bar; stacks place it
    "vllm-0.26.0-h200-eager": ("serving", False),
    "vllm-0.26.0-h200-healthy": ("serving", False),
    "vllm-0.26.0-h200-spin": ("serving", False),
    "vllm-0.32.0-cpu-apiserver-sigkill": ("serving", False),
    "vllm-0.32.0-cpu-compile-healthy": ("serving", False),
    "vllm-0.32.0-cpu-dp2-healthy": ("serving", False),
    "vllm-0.32.0-cpu-eager-healthy": ("serving", False),
    "vllm-0.32.0-cpu-enginecore-sigkill": ("serving", False),
    "vllm-0.32.0-cpu-enginecore-sigstop-in-compile": ("kv-cache", False),
    "vllm-0.32.0-cpu-load-deadlock": ("weights-load", True),
    "vllm-0.32.0-cpu-load-exit": ("weights-load", True),
    "vllm-0.32.0-cpu-load-raise": ("weights-load", True),
    "vllm-0.32.0-cpu-load-segv": ("weights-load", True),
    "vllm-0.32.0-cpu-serve-deadlock-exec-timeout30": ("serving", False),
    "vllm-0.32.0-cpu-tp2-collective-mismatch": ("weights-load", False),
    "vllm-0.32.0-cpu-tp2-healthy": ("serving", False),
    "vllm-0.32.0-cpu-tp2-rank-absent-timeout30": ("dist-init", False),
    "vllm-0.32.0-cpu-warmup-deadlock": ("jit-compile", False),
    "vllm-0.32.0-cpu-worker-sigkill": ("serving", False),
}

SYMPTOM = {
    "sglang-0.5.23-cpu-forward-deadlock-watchdog20": "crash",
    "sglang-0.5.23-cpu-healthy": "asked-to-stop",
    "sglang-0.5.23-cpu-scheduler-sigkill": "crash",
    "sglang-0.5.23-cpu-tp2-refused": "crash",
    "vllm-0.32.0-cpu-compile-healthy": "asked-to-stop",
    "vllm-0.32.0-cpu-eager-healthy": "crash",  # its engine core was killed after the healthy part
    "vllm-0.32.0-cpu-enginecore-sigkill": "crash",
    "vllm-0.32.0-cpu-load-exit": "crash",
    "vllm-0.32.0-cpu-load-raise": "crash",
    "vllm-0.32.0-cpu-load-segv": "crash",
    "vllm-0.32.0-cpu-serve-deadlock-exec-timeout30": "crash",
    "vllm-0.32.0-cpu-tp2-rank-absent-timeout30": "dist-timeout",
    "vllm-0.32.0-cpu-worker-sigkill": "crash",
}


def read(name):
    """Return engine, version and lines of a log."""
    engine, version = name.split("-")[:2]
    text = (LOGS / f"{name}.log").read_text("utf-8", "replace")
    return engine_named(engine), version, [line for line in re.split(r"[\r\n]+", text) if line]


def phases(engine, version, lines):
    """Return the markers met, in order, each once in a row."""
    met = []
    for line in lines:
        for marker in markers_for(engine, version):
            if re.search(marker.pattern, line):
                if not met or met[-1] != (marker.phase, marker.gap):
                    met.append((marker.phase, marker.gap))
                break
    return met


def symptom(engine, lines):
    return next((s for s in engine.symptoms if any(re.search(s.pattern, line) for line in lines)), None)


def test_every_log_has_its_line_in_the_table():
    assert {path.stem for path in LOGS.glob("*.log")} == set(FINAL_PHASE)


@pytest.mark.parametrize("name", sorted(FINAL_PHASE))
def test_the_log_ends_in_its_phase(name):
    assert phases(*read(name))[-1] == FINAL_PHASE[name]


@pytest.mark.parametrize("name", sorted(FINAL_PHASE))
def test_an_unknown_version_reads_the_same_log_alike(name):
    engine, version, lines = read(name)
    assert phases(engine, None, lines) == phases(engine, version, lines)


@pytest.mark.parametrize("name", sorted(FINAL_PHASE))
def test_the_symptom_of_the_end(name):
    engine, _, lines = read(name)
    found = symptom(engine, lines)
    assert (found and found.reason) == SYMPTOM.get(name)


@pytest.mark.parametrize("name", sorted(FINAL_PHASE))
def test_no_line_of_a_start_fits_two_phases(name):
    engine, version, lines = read(name)
    for line in lines:
        fits = {(m.phase, m.gap) for m in markers_for(engine, version) if re.search(m.pattern, line)}
        assert len(fits) <= 1, line


def test_a_whole_healthy_start_passes_through_every_phase_in_order():
    assert [phase for phase, gap in phases(*read("sglang-0.5.16-h200-healthy")) if not gap] == [
        *("import", "dist-init", "weights-load", "kv-cache", "graph-capture", "graph-capture", "warm-up", "serving")
    ]
    assert [phase for phase, gap in phases(*read("vllm-0.26.0-h200-healthy")) if not gap] == [
        *("import", "dist-init", "weights-load", "jit-compile", "kv-cache", "jit-compile", "graph-capture"),
        *("warm-up", "serving"),
    ]


@pytest.mark.parametrize(
    ("engine", "version", "line", "phase"),
    [
        (SGLANG, "0.5.13", "[2026-01-01 00:00:00 TP0] Capture cuda graph begin. This can take up", "graph-capture"),
        (SGLANG, "0.5.13", "[2026-01-01 00:00:00 TP3] Init torch distributed begin.", "dist-init"),
        (SGLANG, "0.5.21", "[2026-01-01 00:00:00] Init torch distributed begin.", None),  # text changed in 0.5.21
        (SGLANG, "0.5.20", "[2026-01-01 00:00:00] Init parallel begin.", None),
        (SGLANG, "0.5.23", "[2026-01-01 00:00:00] Init parallel begin.", "dist-init"),
        (SGLANG, "0.5.18", "Load weight end. Committed real weights after CUDA graph capture", "warm-up"),
        (SGLANG, "0.5.9", "[2026-01-01 00:00:00] Load weight end. type=X, avail mem=1 GB", "kv-cache"),
        (SGLANG, "0.5.9", "Multi-thread loading shards:  10% Completed | 1/10", "weights-load"),
        (SGLANG, "0.5.9", "Loading safetensors checkpoint shards: 100% Completed | 1/1", "weights-load"),
        (SGLANG, "0.5.9", "[2026-01-01 00:00:00] Entering DeepGEMM JIT Pre-Compile session.", "jit-compile"),
        (SGLANG, "0.5.9", "Capturing batches (bs=1 avail_mem=1.00 GB):   0%|", "graph-capture"),
        (SGLANG, "0.5.23", "Capturing prefill shape (num_tokens=4 avail_mem=1 GB):   0%|", "graph-capture"),
        (SGLANG, "0.5.3", "[2026-01-01 00:00:00] Using KV cache dtype: torch.bfloat16", "kv-cache"),
        (SGLANG, "0.5.23", "[2026-01-01 00:00:00] KV Cache VA upper bound: 1", "kv-cache"),
        (SGLANG, "0.5.23", "[2026-01-01 00:00:00] Decode batch, #running-req: 1", None),
        (VLLM, "0.17.1", "INFO 01-01 00:00:00 [api_server.py:1] Starting vLLM API server 0 on", "warm-up"),
        (VLLM, "0.18.1", "INFO 01-01 00:00:00 [api_server.py:1] Starting vLLM server on http", "warm-up"),
        (VLLM, "0.29.0", "INFO 01-01 00:00:00 [x.py:1] GPU KV cache size: 262,208 tokens", "jit-compile"),
        (VLLM, "0.32.0", "INFO 01-01 00:00:00 [x.py:1] Starting torch.compile", "jit-compile"),
        (VLLM, "0.33.0", "INFO 01-01 00:00:00 [x.py:1] JIT kernel warmup starting.", "jit-compile"),
        (VLLM, "0.33.0", "INFO 01-01 00:00:00 [x.py:1] Profiling CUDA graph memory", "graph-capture"),
        (VLLM, "0.12.0", "Capturing CUDA graphs (decode, FULL):   3%|", "graph-capture"),
        (VLLM, "0.12.0", "INFO 01-01 00:00:00 [loggers.py:1] Avg prompt throughput: 1.0 tokens/s", None),
    ],
)
def test_wording_by_version(engine, version, line, phase):
    met = phases(engine, version, [line])
    assert (met[0][0] if met else None) == phase


def test_markers_and_symptoms_are_well_formed_and_name_their_source():
    for engine in ENGINES:
        for marker in engine.markers:
            assert re.compile(marker.pattern)
            assert marker.phase in PHASES
            assert marker.source
            assert all(version is None or version_key(version) for version in (marker.since, marker.until))
        for patterns in (engine.noise, engine.front_end, engine.workers):
            assert re.compile("|".join(f"(?:{pattern})" for pattern in patterns))  # no flags for the whole
        for found in engine.symptoms:
            assert re.compile(found.pattern)


NOISE = [
    'INFO:     127.0.0.1:60608 - "GET /health HTTP/1.1" 200 OK',
    '[2026-11-29 15:10:14] INFO:     127.0.0.1:36300 - "GET /health HTTP/1.1" 503 Service Unavailable',
    '[2026-11-29 15:10:14.123] INFO:     [::1]:36300 - "POST /v1/completions HTTP/1.1" 200 OK',
    '(APIServer pid=795) INFO:     127.0.0.1:58712 - "GET /metrics HTTP/1.1" 200 OK',
    'INFO:      - "GET /health HTTP/1.1" 200 OK',
]


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
@pytest.mark.parametrize("line", NOISE)
def test_access_lines_are_noise(engine, line):
    assert any(re.search(pattern, line) for pattern in engine.noise)


@pytest.mark.parametrize(
    ("line", "noise"),
    [
        ("Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 0.0 tokens/s, Running: 8", True),
        ("Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 80.2 tokens/s, Run", False),
        ("Engine 000: Avg prompt throughput: 5.8 tokens/s, Avg generation throughput: 0.0 tokens/s, Run", False),
        ("[shm_broadcast.py:1] No available shared memory broadcast block found in 60 seconds. This", True),
        ("DEBUG 11-29 [utils.py:1] Waiting for 1 local, 0 remote core engine proc(s) to start.", True),
        ("(APIServer pid=1) INFO 11-29 15:30:26 [launcher.py:46] Route: /health, Methods: GET", False),
        ("(APIServer pid=1) INFO:     Started server process [1]", False),
    ],
)
def test_what_is_news_of_vllm(line, noise):
    assert any(re.search(pattern, line) for pattern in VLLM.noise) is noise


@pytest.mark.parametrize("name", sorted(FINAL_PHASE))
def test_no_marker_and_no_symptom_is_noise(name):
    engine, version, lines = read(name)
    for line in lines:
        if any(re.search(pattern, line) for pattern in engine.noise):
            assert not any(re.search(m.pattern, line) for m in markers_for(engine, version)), line
            assert not any(re.search(s.pattern, line) for s in engine.symptoms), line


@pytest.mark.parametrize(
    ("line", "reason", "permanent"),
    [
        ("vllm serve: error: unrecognized arguments: --nope", "bad-flag", True),
        ("launch_server.py: error: argument --port: invalid int value: 'x'", "bad-flag", True),
        ("sglang serve: error: ambiguous option: --cuda-graph-max-bs could match", "bad-flag", True),
        ("OSError: M does not appear to have a file named config.json. Checkout", "missing-model", True),
        ("OSError: M is not a local folder and is not a valid model identifier listed", "missing-model", True),
        ("HFValidationError: Repo id must be in the form 'repo_name'", "missing-model", True),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/m/config.json'", "missing-model", True),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/usr/bin/nvcc'", None, False),
        ("OSError: [Errno 98] Address already in use", "port", False),
        ("[Errno 98] error while attempting to bind on address ('127.0.0.1', 8000): address already", "port", False),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "gpu-oom", False),
        ("OSError: [Errno 28] No space left on device: '/psm_1a2b3c4d'", "shm-full", False),
        ("RuntimeError: unable to write to file </torch_12_3>: No space left on device (28)", "shm-full", False),
        ("Fatal Python error: Bus error", "shm-full", False),
        ("OSError: [Errno 28] No space left on device: '/root/.cache/x'", "disk-full", False),
        ("INFO everything is fine", None, False),
        (
            "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer",
            "broken-model",
            True,
        ),
        (
            "safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata, file not fully "
            "covered",
            "broken-model",
            True,
        ),
        (
            "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
            "broken-model",
            True,
        ),
        (
            "ERROR 03-26 17:12:18 engine.py:400] ValueError: Following weights were not initialized from checkpoint: {'m'}",
            "broken-model",
            True,
        ),
        (
            "ValueError: The checkpoint you are trying to load has model type `qwen2_5_vl` but Transformers does not "
            "recognize this architecture.",
            "broken-model",
            True,
        ),
        ("ValueError: Model architectures ['Foo'] are not supported for now.", "broken-model", True),
        ("ValueError: Unknown quantization method: foo. Must be one of", "broken-model", True),
        ("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", "hardware", True),
        ("RuntimeError: The NVIDIA driver on your system is too old (found version 11040).", "driver", True),
        (
            "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 803: system has unsupported display driver / "
            "cuda driver combination",
            "driver",
            True,
        ),
        ("Failed to initialize NVML: Driver/library version mismatch", "driver", True),
        ("ImportError: libcuda.so.1: cannot open shared object file: No such file or directory", "driver", True),
        ("RuntimeError: CUDA error: no kernel image is available for execution on the device", "wrong-gpu", True),
        ("nvcc fatal   : Unsupported gpu architecture 'compute_120a'", "wrong-gpu", True),
        (
            "NVIDIA GeForce GT 710 with CUDA capability sm_35 is not compatible with the current PyTorch installation.",
            None,
            False,
        ),  # torch names every visible board
        ("ImportError: /v/vllm/_C.abi3.so: undefined symbol: _ZN3c104cuda9SetDeviceEi", "library", True),
        (
            "ImportError: /usr/lib/libstdc++.so.6: version `GLIBCXX_3.4.32' not found (required by /v/x.so)",
            "library",
            True,
        ),
        (
            "(EngineCore pid=7) ERROR 11-29 15:04:07 [core.py:1512] ModuleNotFoundError: No module named 'sgl_kernel'",
            "library",
            True,
        ),
        (
            "WARNING 11-29 [interface.py:1] Failed to import from vllm._C: ModuleNotFoundError(\"No module named 'v'\")",
            None,
            False,
        ),  # optional ones are warned of in healthy starts
        ("OSError: [Errno 24] Too many open files", "limits", False),
        (
            "WARNING Found ulimit of 20000 and failed to automatically increase. This can cause fd limit errors like "
            "`OSError: [Errno 24] Too many open files`.",
            None,
            False,
        ),
        (
            "OpenBLAS blas_thread_init: pthread_create failed for thread 5 of 64: Resource temporarily unavailable",
            "limits",
            False,
        ),
        ("RuntimeError: can't start new thread", "limits", False),
        ("zmq.error.Again: Resource temporarily unavailable", None, False),
        ("NCCL WARN Error while creating shared memory segment /dev/shm/nccl-1YsMbG (size 9637888)", "shm-full", False),
        ("g++: fatal error: Killed signal terminated program cc1plus", "host-memory", False),
        ("OSError: We couldn't connect to 'https://huggingface.co' to load the files", "download", False),
        (
            "torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients. 1/3 clients joined.",
            "dist-timeout",
            False,
        ),
        (
            "[rank1]:[E ProcessGroupNCCL.cpp:563] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum="
            "158046, OpType=GATHER, NumelIn=2867200, NumelOut=0, Timeout(ms)=600000) ran for 600027 milliseconds",
            "dist-timeout",
            False,
        ),
        (
            "RuntimeError: [../gloo/transport/tcp/pair.cc:144] Timed out waiting 1800000ms for recv operation to complete",
            "dist-timeout",
            False,
        ),
        ("torch.AcceleratorError: CUDA error: an illegal memory access was encountered", "crash", False),
    ],
)
@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_symptoms_that_all_share(engine, line, reason, permanent):
    found = symptom(engine, [line])
    assert (found.reason if found else None, bool(found and found.permanent)) == (reason, permanent)


@pytest.mark.parametrize(
    ("engine", "line", "reason"),
    [
        (VLLM, "ValueError: No available memory for the cache blocks. Try increasing", "gpu-oom"),
        (VLLM, "Free memory on device (1/80 GiB) on startup is less than desired GPU memory utilization", "gpu-oom"),
        (VLLM, "allocation is less than requested memory for kv", "host-memory"),
        (VLLM, "EngineDeadError: EngineCore encountered an issue", "crash"),
        (VLLM, "ValueError: User-specified max_model_len (99) is greater than the derived max_model_len", "bad-flag"),
        (
            VLLM,
            "ValueError: Total number of attention heads (9) must be divisible by tensor parallel size (2).",
            "bad-flag",
        ),
        (
            SGLANG,
            "ValueError: TP rank 0 could finish the model loading, but there are other ranks that didn't",
            "dist-timeout",
        ),
        (SGLANG, "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "gpu-oom"),
        (SGLANG, "ValueError: port at 30000 is not available in 30 seconds.", "port"),
        (SGLANG, "[2026] Subprocess scheduler_0 (pid=1) crashed with exit code -9. Triggering", "crash"),
    ],
)
def test_symptoms_of_one_engine(engine, line, reason):
    assert symptom(engine, [line]).reason == reason


def test_the_root_cause_comes_before_the_crash_that_follows_it():
    lines = ["Engine core initialization failed. See root cause above.", "torch.OutOfMemoryError: CUDA out of memory."]
    assert symptom(VLLM, lines).reason == "gpu-oom"


def innermost_phase(engine, frames):
    for frame in frames:
        function, _, place = frame.partition(" (")
        for marker in engine.stack_markers:
            if re.fullmatch(marker.function, function) and marker.file in place:
                return marker.phase
    return None


@pytest.mark.parametrize("engine", [SGLANG, VLLM], ids=lambda engine: engine.name)
def test_stacks_place_the_hang_in_graph_capture(engine):
    looks = json.loads((LOGS / f"gpu-{engine.name}-capture.stacks.json").read_text())
    for look in looks:
        found = {
            member: innermost_phase(engine, thread["frames"])
            for member, threads in look["members"].items()
            for thread in threads
            if thread["thread"] == "MainThread"
        }
        workers = {phase for member, phase in found.items() if re.search("::(EngineCor|schedul)", member)}
        assert workers == {"graph-capture"}


@pytest.mark.parametrize(
    ("engine", "frame", "phase"),
    [
        (VLLM, "CPUModelRunner.warming_up_model (cpu_model_runner.py:84)", "jit-compile"),
        (VLLM, "warming_up_model (cpu_model_runner.py:84)", "jit-compile"),  # as py-spy writes it on 3.10
        (VLLM, "Worker.initialize_from_config (gpu_worker.py:853)", "kv-cache"),
        (VLLM, "EngineCore._initialize_kv_caches (core.py:324)", None),  # waits for its workers
        (VLLM, "Executor.determine_available_memory (abstract.py:162)", None),
        (VLLM, "CudaGraphManager.capture (cudagraph_utils.py:419)", "graph-capture"),
        (VLLM, "Worker.init_device (gpu_worker.py:436)", "dist-init"),
        (VLLM, "GPUModelRunner.load_model (gpu_model_runner.py:5028)", "weights-load"),
        (VLLM, "Worker.execute_model (gpu_worker.py:1302)", None),
        (VLLM, "preload_model_list (x.py:1)", None),
        (SGLANG, "ModelRunner.init_torch_distributed (model_runner.py:1261)", "dist-init"),
        (SGLANG, "Scheduler.init_memory_pools (scheduler.py:1098)", "kv-cache"),
        (SGLANG, "BaseRunner._flashinfer_autotune (base_runner.py:392)", "jit-compile"),
        (SGLANG, "Scheduler.event_loop_normal (scheduler.py:1)", None),
    ],
)
def test_frames(engine, frame, phase):
    assert innermost_phase(engine, [frame]) == phase


TITLES = [
    (VLLM, "VLLM::EngineCore", "worker"),
    (VLLM, "VLLM::Worker_TP0", "worker"),
    (VLLM, "VLLM::EngineCore_DP1", "worker"),
    (VLLM, "VLLM::APIServer_0", "front end"),
    (VLLM, "VLLM::DPCoordinator", "front end"),
    (VLLM, "/venv/bin/python3.11 /venv/bin/vllm serve M --port 8000", "front end"),
    (VLLM, "python -m vllm.entrypoints.openai.api_server --model M", "front end"),
    (VLLM, "/venv/bin/python3 -c from multiprocessing.resource_tracker import main;main(20)", "front end"),
    (VLLM, "/venv/bin/python3 -c from multiprocessing.spawn import spawn_main; spawn_main()", None),
    (SGLANG, "sglang::scheduler_DP0_TP1", "worker"),
    (SGLANG, "sglang::detokenizer", "front end"),
    (SGLANG, "sglang::data_parallel_controller", "front end"),
    (SGLANG, "/venv/bin/python /venv/bin/sglang serve --model-path M", "front end"),
    (SGLANG, "python -m sglang.launch_server --model-path M", "front end"),
]


@pytest.mark.parametrize(("engine", "title", "what"), TITLES)
def test_titles(engine, title, what):
    front = any(re.search(pattern, title) for pattern in engine.front_end)
    works = any(re.search(pattern, title) for pattern in engine.workers)
    assert (front, works) == (what == "front end", what == "worker")


def test_versions_sort_as_releases_came():
    ordered = [
        *("0.4.6.post5", "0.4.10.post2", "0.5.1", "0.5.3.post3", "0.5.8", "0.5.8.post1", "0.5.10", "0.5.23"),
        *("0.32.0.dev1", "0.32.0rc1", "0.32.0", "0.33.0a1", "0.33.0b2", "0.33.0rc1.dev2", "0.33.0rc1", "0.33.0", "1.0"),
    ]
    keys = [version_key(version) for version in ordered]
    assert keys == sorted(keys)
    assert len(set(keys)) == len(keys)
    assert version_key("0.32.0+cpu") == version_key("0.32") == version_key("v0.32.0")


@pytest.mark.parametrize("text", ["", "main", "0.5.x", "unknown", "0.5.8 post1 or so", "1" * 5000 + "x"])
def test_what_is_no_version_is_unknown_and_lies_everywhere(text):
    assert version_key(text) is None
    assert in_range(text, "0.5.14", "0.5.19")
    assert in_range(None, "0.5.14", None)


def test_ranges_are_inclusive():
    assert in_range("0.5.14", "0.5.14", "0.5.19")
    assert in_range("0.5.19", "0.5.14", "0.5.19")
    assert not in_range("0.5.13.post1", "0.5.14", None)
    assert not in_range("0.5.20", None, "0.5.19")
