"""What SGLang prints: the lines that tell the phase, those that are no news, and those that tell what is wrong."""

from __future__ import annotations

from hangguard.engines import common, symptoms
from hangguard.engines.sglang.releases import RAN, READ
from hangguard.facts import Marker, QuietLine, Symptom

MARKERS = (
    Marker(pattern=r"server_args=", phase="import", source=f"{RAN}; before any child exists"),
    Marker(pattern=r"Init torch distributed begin", phase="dist-init", until="0.5.20", source=f"{READ}; {RAN}"),
    Marker(pattern=r"Init parallel begin", phase="dist-init", since="0.5.21", source=f"{READ}; {RAN}"),
    Marker(
        pattern=r"Init torch distributed ends\. elapsed=",
        phase="weights-load",
        gap=True,
        until="0.5.20",
        source=f"{READ}; {RAN}",
    ),
    Marker(
        pattern=r"Init parallel ends\. elapsed=",
        phase="weights-load",
        gap=True,
        since="0.5.21",
        source=f"{READ}; {RAN}",
    ),
    Marker(pattern=r"Load weight begin\.", phase="weights-load", source=f"{READ}; {RAN}"),
    Marker(
        pattern=r"(?:Loading safetensors checkpoint|Loading pt checkpoint|Multi-thread loading(?: pt checkpoint)?)"
        r" shards:\s+\d+%",
        phase="weights-load",
        source=f"{READ}; the bar stands on rank 0 only",
    ),
    # With overlapped loading the weights are committed after the graphs are captured.
    Marker(
        pattern=r"Load weight end\. Committed real weights",
        phase="warm-up",
        gap=True,
        since="0.5.18",
        source=READ,
    ),
    Marker(pattern=r"Load weight end\.(?! Committed)", phase="kv-cache", gap=True, source=f"{READ}; {RAN}"),
    Marker(pattern=r"Using KV cache dtype", phase="kv-cache", since="0.5.3", until="0.5.14", source=READ),
    Marker(pattern=r"KV Cache is allocated", phase="kv-cache", source=f"{READ}; {RAN}"),
    Marker(pattern=r"KV Cache VA upper bound", phase="kv-cache", since="0.5.16", source=READ),
    # The seed story on the CPU build ends here: what follows is autotune, then capture.
    Marker(pattern=r"Memory pool end\. avail mem=", phase="graph-capture", gap=True, source=f"{READ}; {RAN}"),
    Marker(pattern=r"Running FlashInfer autotune", phase="jit-compile", since="0.5.6", source=READ),
    Marker(
        pattern=r"FlashInfer autotune completed",
        phase="graph-capture",
        gap=True,
        since="0.5.6",
        source=READ,
    ),
    Marker(
        pattern=r"Entering DeepGEMM JIT Pre-Compile session|Try DeepGEMM JIT Compiling|DeepGEMM warmup:\s+\d+%",
        phase="jit-compile",
        source=f"{READ}; by its own text 10 to 20 min when cold",
    ),
    # "Capture cuda graph begin. This can take up to several minutes" to 0.5.13; role names since 0.5.14.
    Marker(pattern=r"(?i:Capture .*graph begin)\.", phase="graph-capture", source=f"{READ}; {RAN}"),
    Marker(
        pattern=r"Capturing (?:batches \(bs=|num tokens \(|prefill shape \()",
        phase="graph-capture",
        source=f"{READ}; {RAN}; num tokens to 0.5.20, prefill shape since 0.5.21",
    ),
    Marker(pattern=r"Compiling num tokens \(", phase="graph-capture", since="0.5.7", source=READ),
    # The decode capture follows the prefill capture, and the drafter's follows both.
    Marker(pattern=r"(?i:Capture .*graph end)\.", phase="graph-capture", gap=True, source=f"{READ}; {RAN}"),
    Marker(
        pattern=r"max_total_num_tokens=",
        phase="warm-up",
        gap=True,
        source=f"{READ}; {RAN}; first rank only",
    ),
    Marker(pattern=r"Engine startup timings \(s\):", phase="warm-up", since="0.5.17", source=f"{READ}; {RAN}"),
    Marker(pattern=r"INFO:\s+Started server process", phase="warm-up", source=f"uvicorn; {RAN}"),
    Marker(pattern=r"Uvicorn running on", phase="warm-up", source=f"uvicorn; {RAN}; one real request follows"),
    Marker(pattern=r"The server is fired up and ready to roll!", phase="serving", source=f"{READ}; {RAN}"),
)

NOISE = (
    common.ACCESS_LINE,
    # The answer to a health probe of ours (or of a neighbour's) that nobody served.
    r"Health check failed\. Server couldn't get a response",
    # --log-requests: a front end takes requests in beside a hung scheduler (srt/managers/tokenizer_manager.py).
    r"\] Receive: obj=",
)

# No route tells it. Both last until they are taken back, whatever becomes of the other. Access lines are printed once
# the route has answered, unless --log-level-http (or --log-level) is above info.
QUIET_LINES = (
    QuietLine(
        begins=common.asked_for("/pause_generation"),
        ends=common.asked_for("/continue_generation"),
        source="srt/entrypoints/http_server.py, 0.5.23: the schedulers poll, and run no batch (_engine_paused)",
    ),
    QuietLine(
        begins=common.asked_for("/release_memory_occupation"),
        ends=common.asked_for("/resume_memory_occupation"),
        source="srt/entrypoints/http_server.py, 0.5.23, GET and POST: weights or KV cache are not there",
    ),
)

SYMPTOMS = (
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
