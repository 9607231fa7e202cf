"""What a person could do next: one change at a time, in the order in which reports say that it helped.

The ladders are those of public reports of hangs (two hundred read), by the phase in which a launch stopped. Hardware
and a wedged driver are never answered with a flag.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Mapping
from dataclasses import replace

from hangguard.facts import Broken, Exited, Expired, Finding, Phase, Stuck
from hangguard.judge.memory import Memory

LADDERS: dict[Phase, tuple[str, ...]] = {
    "import": ("is a file system slow, or does the launch wait for other machines or for a cluster?",),
    "dist-init": (
        "on one PCIe machine: NCCL_P2P_DISABLE=1 and --disable-custom-all-reduce together (one alone moves the hang)",
        "on an NVSwitch machine: NCCL_NVLS_ENABLE=0, and look at the fabric manager",
        "over machines: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, the host's own IP, fresh ports",
        "NCCL_DEBUG=INFO shows the rank whose init begins and does not end",
    ),
    "weights-load": (
        "while bytes move, wait; then load without mmap, prefetch, or from a local copy",
        "--load-format dummy tells whether it is the weights at all",
    ),
    "kv-cache": (
        "switch speculative decoding off if it is on",
        "--disable-custom-all-reduce",
        "another attention or MoE backend",
    ),
    "jit-compile": (
        "remove a lock file that nobody holds",
        "a private, local cache folder; precompile, or mount the cache",
        "another backend for the kernels that are built; torch.compile off",
    ),
    "graph-capture": (
        (
            "fewer graph sizes (SGLang --cuda-graph-max-bs, since 0.5.14 --cuda-graph-max-bs-decode; "
            "vLLM --max-cudagraph-capture-size)"
        ),
        "--disable-custom-all-reduce",
        "CUDA graphs off (SGLang --disable-cuda-graph, vLLM --enforce-eager)",
    ),
    "warm-up": (
        "switch speculative decoding off if it is on",
        "--disable-custom-all-reduce",
        "CUDA graphs off; then another attention or MoE backend",
    ),
    "serving": ("restart it at once: what it held is lost already; the evidence is kept",),
}

BY_CAUSE = {
    "the overlap scheduler": "--disable-overlap-schedule (SGLang), --no-async-scheduling (vLLM)",
    "speculative decoding (the drafter)": "leave the speculative options out",
    "CUDA graphs": "CUDA graphs off (SGLang --disable-cuda-graph, vLLM --enforce-eager)",
    "an attention backend or another kernel": "another attention backend (triton is the widest)",
    "a lock file that somebody else holds, or left": "look at who holds the lock; one that nobody holds may be removed",
    "the port, or a proxy": "exempt loopback from the proxy (no_proxy=127.0.0.1,localhost), or take another port",
}
"""Answers to causes that the evidence supports, whatever the phase."""

_LEFT = "left by a build of that extension that was killed in its middle (SIGKILL, no memory, a container's end)"
_NO_OPTION = "no option of the server ends this wait, and the same launch would wait again"

BY_REASON = {
    "oom-kill": "give it more memory, or load with less: fewer loading threads, no pinned host cache",
    "host-memory": "give it more memory, or compile with fewer jobs (MAX_JOBS)",
    "gpu-oom": "a smaller share of GPU memory, shorter contexts, fewer sequences; look who else holds the GPU",
    "shm-full": "a larger /dev/shm (docker --shm-size=10g or --ipc=host), and look what is left in it",
    "disk-full": "make room: the line says where",
    "limits": "raise the limit: ulimit -n, ulimit -u, ulimit -l, pids.max (docker --pids-limit)",
    "port": "take another port, or end who holds it",
    "wrong-gpu": "install a build for this GPU's architecture",
    "driver": "bring driver and CUDA libraries together: a newer driver, or an older build",
    "library": "reinstall the package that the line names, for this Python, CUDA and torch",
    "broken-model": "download the model again; a newer engine or transformers if it does not know the model",
    "download": "try again, or load from a local copy (HF_HUB_OFFLINE=1)",
    "dist-timeout": "a timer of the library ran out: look at the rank that was late or absent, not at the timer",
    "signal": "find out who sent it: a person, a service manager, a scheduler, a container's limit",
}


_SAID_SO = "read the first error in its log: that it does not end only follows from it"


def advice_for(memory: Memory, findings: tuple[Finding, ...]) -> tuple[str, ...]:
    """Return what a person could try, the likeliest first."""
    verdict = memory.verdict
    if verdict.kind in {"hardware", "wedged"} and isinstance(verdict, (Broken, Exited)):
        return ("drain the machine; reset the board or reboot; no flag and no relaunch helps", "keep the kernel's log")
    if isinstance(verdict, Exited):
        return _of_a_reason(verdict.kind, permanent=verdict.permanent)
    if isinstance(verdict, Broken) and verdict.reason:
        return (_SAID_SO, *_of_a_reason(verdict.reason, permanent=verdict.permanent))
    if isinstance(verdict, Stuck) and verdict.kind == "stopped":
        return ("find out who stopped it; kill -CONT lets it go on",)
    if verdict.left_locks:
        return (*about_left_locks(verdict.left_locks), _NO_OPTION)
    if isinstance(verdict, Expired) and verdict.kind == "ready_within":
        told = () if memory.hang is None else advice_for(replace(memory, verdict=memory.hang, hang=None), findings)
        raised = "raise ready_within if it was still moving"
        return (*told, raised) if told else (raised, *_of_a_hang(memory, findings)[:2])
    if isinstance(verdict, (Stuck, Broken, Expired)):
        looks = (f"look at {verdict.suspects[0]}",) if isinstance(verdict, (Stuck, Broken)) and verdict.suspects else ()
        return (*(looks or ("look at the stacks in the evidence",)), *_of_a_hang(memory, findings))
    return ()


def about_left_locks(paths: tuple[str, ...]) -> tuple[str, ...]:
    """Return who can have left these locks by presence, and, where it can only be one, the command that removes it."""
    if len(paths) > 1:
        told = ", ".join(paths[:8])
        return (f"one of these was {_LEFT}: {told}; look which extension is built before one is removed",)
    return tuple(
        f"{path} was {_LEFT}; if nothing else builds in {posixpath.dirname(path)} now: rm -- {shlex.quote(path)}"
        for path in paths
    )


def _of_a_reason(reason: str, *, permanent: bool) -> tuple[str, ...]:
    known = (BY_REASON[reason],) if reason in BY_REASON else ()
    again = ("fix the command: the same launch would end the same way again",)
    return (*known, *(again if permanent and not known else ()))


def _of_a_hang(memory: Memory, findings: tuple[Finding, ...]) -> tuple[str, ...]:
    """Answers to what is supported, then the ladder of the phase without what is ruled out."""
    standing = {f.hypothesis: f.standing for f in findings}
    supported = [BY_CAUSE[name] for name, s in standing.items() if s in {"supported", "confirmed"} and name in BY_CAUSE]
    ladder = [step for step in LADDERS[memory.verdict.phase] if not _is_excluded(step, standing, memory)]
    return tuple(dict.fromkeys([*ladder[: memory.verdict.phase == "serving"], *supported, *ladder]))


def _is_excluded(step: str, standing: Mapping[str, str], memory: Memory) -> bool:
    """Whether the evidence, or the command, leaves nothing to this step."""
    ruled_out = {name for name, s in standing.items() if s == "ruled out"}
    given = " ".join(word.replace("_", "-") for word in memory.rules.argv or ())
    return (
        (("all-reduce" in step or "NCCL" in step) and "communication between the ranks" in ruled_out)
        or ("speculative" in step and "speculative decoding (the drafter)" in ruled_out)
        or ("graph" in step and "CUDA graphs" in ruled_out)
        or ("lock file" in step and "a lock file that somebody else holds, or left" in ruled_out)
        or (step.startswith("--") and step.split(maxsplit=1)[0] in given)
    )
