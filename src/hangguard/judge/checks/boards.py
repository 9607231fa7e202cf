"""The GPUs: which, who has them, whether they are sound, the driver, and the way from one to another."""

from __future__ import annotations

from collections.abc import Iterator

from hangguard.changes import has_flag, value_of
from hangguard.facts import Check, Gpu, Unseen
from hangguard.judge.checks.ground import Ground, size, unseen

HELD = 512 << 20
"""Used memory of a GPU above which somebody has it: the driver's own share of a large board is below."""
LATCHED_PERCENT = 90.0

_TRANSLATED = ("DMA", "DMA-FQ")


def gpus(ground: Ground) -> Iterator[Check]:
    """Whether the launch has as many GPUs as it wants, and whether they can be seen."""
    boards, ranks = ground.seen.gpus, ground.launch.ranks
    if isinstance(boards, Unseen):
        yield unseen(
            "GPUs",
            boards,
            patience=ground.without_proof,
            loses="whether a GPU works: a kernel that never ends cannot be told from a long one",
            helps="nvidia-smi; in a container --gpus all (NVIDIA_DRIVER_CAPABILITIES with utility)",
        )
    elif not boards and not _wants_gpus(ground):
        yield Check(what="GPUs", answer="good", found="none here, and none is wanted")
    elif not boards:
        yield Check(
            what="GPUs",
            answer="missing",
            found="no NVIDIA driver and no device, or CUDA_VISIBLE_DEVICES leaves none",
            means="only a build of the engine for CPUs will start",
            helps="docker run --gpus all",
        )
    else:
        names = sorted({gpu.name for gpu in boards})
        found = f"{len(boards)}: {', '.join(names)}"
        if ranks > len(boards):
            yield Check(
                what="GPUs",
                answer="missing",
                found=found,
                means=f"{ranks} ranks want one each",
                helps=f"CUDA_VISIBLE_DEVICES with {ranks} of them, or fewer ranks",
            )
        elif ranks > 1 and len(names) > 1:
            means = "unlike boards in one launch run as slow as the slowest, or not at all"
            helps = "CUDA_VISIBLE_DEVICES with like ones (and CUDA_DEVICE_ORDER=PCI_BUS_ID)"
            yield Check(what="GPUs", answer="poor", found=found, means=means, helps=helps)
        else:
            yield Check(what="GPUs", answer="good", found=found)


def _wants_gpus(ground: Ground) -> bool:
    is_cpu = (value_of(ground.words, "--device") or "").startswith("cpu") or "+cpu" in (ground.launch.version or "")
    packages = ground.seen.packages
    is_cpu_build = not isinstance(packages, Unseen) and any(
        name.endswith("-cpu") or "+cpu" in version for name, version in packages
    )
    return ground.is_known and not is_cpu and not is_cpu_build


def neighbours(ground: Ground) -> Iterator[Check]:
    """Who has memory on a GPU of this launch already. Nobody of them is ours, and nobody is ended."""
    boards, titles = ground.seen.gpus, dict(ground.seen.titles)
    if isinstance(boards, Unseen) or not boards:
        return
    taken = [gpu for gpu in boards if _is_taken(gpu)]
    for gpu in taken:
        used, total = gpu.memory_used_bytes, gpu.memory_total_bytes
        memory = f"{_size(used)} of {_size(total)} used"
        holders = () if isinstance(gpu.holders, Unseen) else gpu.holders
        who = ", ".join(f"process {h.pid}{f' ({titles[h.pid][:60]})' if h.pid in titles else ''}" for h in holders[:3])
        nobody = "by nobody who can be seen: a process that ended badly, or one of another container"
        yield Check(
            what=f"GPU {gpu.index}",
            answer="poor",
            found=f"{memory}, {f'by {who}' if holders else nobody}",
            means="the server may find too little, and what others draw is not to be told from what it does",
            patience=ground.without_proof,
            loses="whether that GPU works for this server",
            helps="another board: CUDA_VISIBLE_DEVICES; or fuser -v /dev/nvidia* to see who has it",
        )
    for gpu in boards:
        if not _is_taken(gpu) and _is_latched(gpu):
            yield Check(
                what=f"GPU {gpu.index}",
                answer="poor",
                found=f"{gpu.utilization_percent:.0f} % busy, and nobody has memory on it",
                means="its counter is latched by somebody who died: it says nothing until the board is used and left",
                loses="utilisation of that GPU",
            )
    if not taken:
        yield Check(what="GPU memory", answer="good", found="nobody has any of it")


def _is_taken(gpu: Gpu) -> bool:
    holds = not isinstance(gpu.holders, Unseen) and bool(gpu.holders)
    return holds or (not isinstance(gpu.memory_used_bytes, Unseen) and gpu.memory_used_bytes > HELD)


def _is_latched(gpu: Gpu) -> bool:
    percent, holders = gpu.utilization_percent, gpu.holders
    return not isinstance(percent, Unseen) and percent >= LATCHED_PERCENT and holders == ()


def _size(count: int | Unseen) -> str:
    return "an unknown part" if isinstance(count, Unseen) else size(count)


def faults(ground: Ground) -> Iterator[Check]:
    """Faults of boards and their fabric that the driver tells of."""
    boards = ground.seen.gpus
    if isinstance(boards, Unseen) or not boards:
        return
    sick = [(gpu, fault) for gpu in boards if not isinstance(gpu.faults, Unseen) for fault in gpu.faults]
    for gpu, fault in sick:
        kind = f"Xid {fault.code}" if fault.kind == "xid" else fault.kind
        is_fabric = fault.kind == "fabric"
        yield Check(
            what=f"GPU {gpu.index} {'fabric' if is_fabric else 'health'}",
            answer="poor",
            found=f"{kind}: {fault.detail}".rstrip(": "),
            means="ranks hang in their first collective" if is_fabric else "no flag helps against a fault of a board",
            helps="systemctl status nvidia-fabricmanager" if is_fabric else "dmesg | grep -i xid; nvidia-smi -q",
        )
    blind = [gpu for gpu in boards if isinstance(gpu.faults, Unseen)]
    if blind:
        which = ", ".join(str(gpu.index) for gpu in blind)
        yield Check(
            what="GPU health",
            answer="unseen",
            found=f"GPU {which}: {getattr(blind[0].faults, 'reason', '')}",
            loses="that a fault of the board ended or stopped the server",
        )
    elif not sick:
        yield Check(what="GPU health", answer="good", found="the driver tells of no fault, nor of the fabric")


RUNTIMES = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime-cu11")
"""Distributions that are the CUDA runtime; since CUDA 13 without a suffix."""


def driver(ground: Ground) -> Iterator[Check]:
    """Whether the driver is new enough for the CUDA of the server's environment.

    A runtime runs on every driver of its own major version (CUDA Compatibility, "Minor Version Compatibility"), and on
    newer ones; on an older one only with NVIDIA's forward-compatibility package, which is why this refuses nothing.
    """
    told, boards = ground.seen.driver, ground.seen.gpus
    if isinstance(boards, Unseen) or not boards:
        return
    if isinstance(told, Unseen):
        yield unseen("driver", told)
        return
    cuda = f", for CUDA up to {told.cuda[0]}.{told.cuda[1]}" if told.cuda else ""
    found = f"{told.version or 'of unknown version'}{cuda}"
    runtime = _runtime(ground)
    if runtime is None or told.cuda is None:
        yield Check(what="driver", answer="good", found=found)
        return
    name, version = runtime
    major = version.partition(".")[0]
    if major.isdigit() and int(major) > told.cuda[0]:
        yield Check(
            what="driver",
            answer="poor",
            found=f"{found}; the server has {name} {version}",
            means="'CUDA driver version is insufficient for CUDA runtime version', but with the compatibility package",
            helps=f"a newer driver, or a torch built for CUDA {told.cuda[0]} (download.pytorch.org/whl/cu{told.cuda[0]}"
            f"{told.cuda[1]})",
        )
    else:
        yield Check(what="driver", answer="good", found=f"{found}; the server has {name} {version}")


def _runtime(ground: Ground) -> tuple[str, str] | None:
    packages = {} if isinstance(ground.seen.packages, Unseen) else dict(ground.seen.packages)
    found = next(((name, packages[name]) for name in RUNTIMES if name in packages), None)
    local = packages.get("torch", "").partition("+cu")[2]
    if found is None and len(local) >= 3 and local.isdigit():
        return "torch for CUDA", f"{local[:-1]}.{local[-1]}"
    return found


def peer_to_peer(ground: Ground) -> Iterator[Check]:
    """Whether an IOMMU stands between the GPUs of several ranks: a hint, NVLink does not pass through it."""
    boards, kinds = ground.seen.gpus, ground.seen.iommu
    several = not isinstance(boards, Unseen) and len(boards) > 1 and ground.launch.ranks > 1
    if not several:
        return
    if isinstance(kinds, Unseen):
        yield unseen("GPU to GPU", kinds, means="an IOMMU in between may make the first collective hang")
    elif _is_off(ground):
        yield Check(what="GPU to GPU", answer="good", found="peer-to-peer is switched off in this launch")
    elif any(kind in _TRANSLATED for kind in kinds):
        yield Check(
            what="GPU to GPU",
            answer="poor",
            found=f"an IOMMU translates what the boards send one another over PCIe ({', '.join(kinds)})",
            means="without NVLink the first collective may hang, or give wrong results",
            helps="kernel parameter iommu=pt; or NCCL_P2P_DISABLE=1 together with --disable-custom-all-reduce",
        )
    else:
        found = "the IOMMU passes it through" if kinds else "no IOMMU stands in between, as far as this machine shows"
        yield Check(what="GPU to GPU", answer="good", found=found)


def _is_off(ground: Ground) -> bool:
    env = ground.launch.environment()
    return env.get("NCCL_P2P_DISABLE", "0") != "0" and has_flag(ground.words, "--disable-custom-all-reduce")
