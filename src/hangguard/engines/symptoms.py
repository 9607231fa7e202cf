"""Log lines that name the reason of an end, in the words of what all Python servers stand on.

The order counts where one line fits several: the cause stands before what follows from it. A line that a healthy
server prints as well must not be here; every recorded healthy log is held against these tables.
"""

from __future__ import annotations

from hangguard.facts import Symptom

BAD_FLAG = (
    # argparse, exit code 2: "vllm serve: error: unrecognized arguments: --x", "error: argument --x: invalid …"
    Symptom(
        pattern=r"\berror: (?:unrecognized arguments|argument |ambiguous option|the following arguments are required)",
        reason="bad-flag",
        permanent=True,
    ),
)

MISSING_MODEL = (
    # transformers and huggingface_hub, the same words since 2023
    Symptom(
        pattern=r"does not appear to have a file named"
        r"|is not a local folder and is not a valid model identifier"
        r"|Repo id must (?:be|use)"
        r"|RepositoryNotFoundError|Repository Not Found for url"
        r"|GatedRepoError|trying to access a gated repo"
        r"|FileNotFoundError: .*(?:config\.json|\.safetensors|tokenizer(?:_config)?\.json|tokenizer\.model)",
        reason="missing-model",
        permanent=True,
    ),
)

BROKEN_MODEL = (
    Symptom(
        # safetensors, bindings and core (0.3 to 0.7): truncated, cut off in a download, or an LFS pointer
        pattern=r"SafetensorError: |Error while deserializing header"
        # torch/serialization.py and caffe2/serialize: the older formats
        r"|PytorchStreamReader failed (?:reading|finding)"
        r"|UnpicklingError: (?:invalid load key|pickle data was truncated)",
        reason="broken-model",
        permanent=True,
    ),
    Symptom(
        # transformers/models/auto (4.x): the installed one is older than the model
        pattern=r"but Transformers does not recognize this architecture"
        r"|Unrecognized configuration class|Should have a `model_type` key in its config\.json"
        # transformers/configuration_utils.py
        r"|It looks like the config file at '.*' is not a valid JSON file",
        reason="broken-model",
        permanent=True,
    ),
    Symptom(
        # vllm and sglang, model registry, loaders and quantisation, the same words in both
        pattern=r"Model architectures \[.*\] (?:failed to be inspected|are not supported for now)"
        r"|Following weights were not initialized from checkpoint"
        r"|There is no module or parameter named .* in "
        r"|(?:Unknown|Invalid) quantization method|Cannot find the config file for \w+$"
        r"|Quantization method specified in the model config .* does not match",
        reason="broken-model",
        permanent=True,
    ),
)

HARDWARE = (
    Symptom(
        # CUDA's own error strings (cudaErrorECCUncorrectable, cudaErrorNvlinkUncorrectable) and NVML's
        pattern=r"uncorrectable (?:ECC|NVLink) error|GPU is lost|fallen off the bus",
        reason="hardware",
        permanent=True,
    ),
)

DRIVER = (
    Symptom(
        # torch/cuda/__init__.py; CUDA errors 35, 100, 222, 803, 804; NVML
        pattern=r"The NVIDIA driver on your system is too old|Found no NVIDIA driver on your system"
        r"|CUDA driver version is insufficient for CUDA runtime version"
        r"|PTX was compiled with an unsupported toolchain"
        r"|unsupported display driver / cuda driver combination"
        r"|forward compatibility was attempted on non supported HW"
        r"|RuntimeError: No CUDA GPUs are available"
        r"|Driver/library version mismatch"
        r"|libcuda\.so(?:\.1)?: cannot open shared object file",
        reason="driver",
        permanent=True,
    ),
    # CUDA error 802: NVSwitch machines before the fabric manager has come up; it may yet come.
    Symptom(pattern=r"CUDA.*system not yet initialized|Error 802: system not yet", reason="driver"),
)

WRONG_GPU = (
    Symptom(
        # CUDA errors 209 and 98, and what nvcc and ptxas say. torch's warning "is not compatible with the current
        # PyTorch installation" is left out: it names every visible board, also one that is not used.
        pattern=r"no kernel image is available for execution on the device"
        r"|CUDA error: invalid device function"
        r"|Unsupported gpu architecture|Value 'sm_\w+' is not defined for option 'gpu-name'"
        r"|(?i:only supported on GPUs with compute capability)|FlashAttention only supports \w+ GPUs or newer"
        r"|is not supported for the current GPU\. Minimum capability",
        reason="wrong-gpu",
        permanent=True,
    ),
)

LIBRARY = (
    Symptom(
        # The dynamic loader (glibc) and CPython. Only as the last line of a traceback: a healthy start warns of
        # optional packages that are not there.
        pattern=r"^(?:\([\w-]+ pid=\d+\) )?(?:ERROR [^\]]*\] )?"
        r"(?:\w+\.)*(?:ImportError|ModuleNotFoundError|OSError): "
        r"(?:.*undefined symbol: |.*version `(?:GLIBC|GLIBCXX|CXXABI)_[\w.]+' not found"
        r"|.*cannot open shared object file|No module named |cannot import name )",
        reason="library",
        permanent=True,
    ),
)

LIMITS = (
    Symptom(
        # RLIMIT_NOFILE. vLLM warns of it in healthy starts: "Found ulimit of 20000 …" (system_utils.py)
        pattern=r"^(?!.*Found ulimit of).*(?:\[Errno 24\]|Too many open files)",
        reason="limits",
    ),
    Symptom(
        # RLIMIT_NPROC or pids.max: CPython, libstdc++, OpenBLAS, OpenMP, bash. zmq.error.Again has half of the words.
        pattern=r"can't start new thread|(?:BlockingIOError|OSError): \[Errno 11\]"
        r"|(?:pthread_create|[Tt]hread creation|\bfork\b|system_error).*Resource temporarily unavailable"
        r"|what\(\):\s+Resource temporarily unavailable",
        reason="limits",
    ),
    Symptom(pattern=r"ibv_reg_mr\w*.*Cannot allocate memory|RLIMIT_MEMLOCK", reason="limits"),  # NCCL, memlock
)

RESOURCES = (
    Symptom(pattern=r"(?i:address already in use)|\[Errno 98\]", reason="port"),
    Symptom(
        # torch's own words, the runtime's, and cuBLAS' when its workspace does not fit
        pattern=r"CUDA out of memory|torch\.(?:cuda\.)?OutOfMemoryError|CUDA error: out of memory"
        r"|CUBLAS_STATUS_ALLOC_FAILED|NCCL WARN Cuda failure.*out of memory",
        reason="gpu-oom",
    ),
    Symptom(
        # SIGBUS is how a full tmpfs shows: a page cannot be had when it is first written.
        pattern=r"\bSIGBUS\b|(?i:\bbus error\b)|exit ?code:? -7\b|insufficient shared memory"
        r"|(?:/dev/shm|psm_|torch_\d|nccl-).*No space left on device"
        r"|No space left on device.*(?:/dev/shm|/psm_|/torch_|/nccl-|/sem\.)"
        # NCCL, misc/shmutils.cc: reported with Docker's 64 MiB (vllm#1710, torchtitan#853)
        r"|Error while (?:creating|attaching to) shared memory segment /dev/shm|ncclShmOpen",
        reason="shm-full",
    ),
    Symptom(pattern=r"No space left on device|\[Errno 28\]", reason="disk-full"),
    Symptom(
        pattern=r"^MemoryError\b|DefaultCPUAllocator: can't allocate memory|\[Errno 12\] Cannot allocate memory"
        # gcc's driver, when the kernel's OOM killer took its compiler
        r"|Killed signal terminated program (?:cc1plus|cicc|ptxas)",
        reason="host-memory",
    ),
)

DOWNLOAD = (
    Symptom(
        # huggingface_hub and what it stands on: the hub could not be reached, or broke off
        pattern=r"We couldn't connect to 'https://huggingface\.co'|LocalEntryNotFoundError"
        r"|(?:HfHubHTTPError|HTTPStatusError|HTTPError): .*(?:429|50[0234])"
        r"|Consistency check failed: file should be of size"
        r"|(?:Max retries exceeded|Read timed out).*huggingface\.co",
        reason="download",
    ),
)

DIST_TIMEOUT = (
    Symptom(
        # torch/csrc/distributed: a timer ran out because a peer was late, absent or dead
        pattern=r"Watchdog caught collective operation timeout"
        r"|DistStoreError: |RuntimeError: (?:Wait timeout|Socket Timeout)|wait timeout after \d+ ?ms"
        r"|Timed out after \d+ seconds waiting for (?:clients|workers)"
        r"|The client socket has timed out after \d+"
        r"|Timed out waiting \d+ms for (?:recv|send) operation to complete"
        r"|(?i:Gloo connect\w* failed).*(?i:time)",
        reason="dist-timeout",
    ),
)

CUDA_CRASH = (
    Symptom(
        pattern=r"CUDA error: (?:an illegal memory access|device-side assert|unspecified launch failure|misaligned)"
        r"|CUDA_ERROR_ILLEGAL_ADDRESS|Fatal Python error: (?!Bus error)",
        reason="crash",
    ),
)

SHARED = (
    *BAD_FLAG,
    *MISSING_MODEL,
    *BROKEN_MODEL,
    *HARDWARE,
    *DRIVER,
    *WRONG_GPU,
    *LIBRARY,
    *LIMITS,
    *RESOURCES,
    *DOWNLOAD,
    *DIST_TIMEOUT,
    *CUDA_CRASH,
)
"""All of them. An engine's own causes stand before, the words with which it notes a crash behind."""
