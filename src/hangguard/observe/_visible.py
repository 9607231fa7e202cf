"""From the figures of every board to the GPUs that a launch can see. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hangguard.facts import Gpu, GpuFault, GpuHolder, Unseen
from hangguard.observe._xids import BY_PROGRAM, XIDS

_NO_MIG_UTILIZATION = Unseen("MIG has no utilisation")


def choose_visible(boards: list[dict[str, Any]], env: Mapping[str, str]) -> tuple[Gpu, ...] | Unseen:
    """Return those of the boards that a program with this environment can use, in its own order.

    Source: torch/cuda/__init__.py, ``_parse_visible_devices``: the first entry decides the form of all, the
    list ends at the first invalid entry, and a repeated entry empties it.
    """
    gpus = [read_gpu(board) for board in boards]
    wanted = env.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return tuple(gpus)
    if wanted.startswith("MIG-"):
        return _by_slice(boards, gpus, _entries(wanted, "MIG-"))
    if wanted.startswith("GPU-"):
        return _by_uuid(gpus, _entries(wanted, "GPU-"))
    return _by_number(gpus, _numbers(wanted), env)


def _by_number(gpus: list[Gpu], numbers: list[int], env: Mapping[str, str]) -> tuple[Gpu, ...] | Unseen:
    chosen = []
    for number in numbers:
        if number >= len(gpus):
            break
        chosen.append(gpus[number])
    # CUDA counts the fastest first unless it is told to count as NVML does, by bus.
    # https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables
    is_same_order = env.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.name for gpu in gpus}) == 1
    if 0 < len(chosen) < len(gpus) and not is_same_order:
        return Unseen(
            "the GPUs differ, and CUDA_VISIBLE_DEVICES counts them in CUDA's own order: "
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    return tuple(chosen)


def _by_uuid(gpus: list[Gpu], prefixes: list[str]) -> tuple[Gpu, ...] | Unseen:
    chosen: list[Gpu] = []
    for prefix in prefixes:
        found = [gpu for gpu in gpus if gpu.uuid.startswith(prefix)]
        if not found and (nameless := [gpu for gpu in gpus if not gpu.uuid]):
            return Unseen(f"GPU {nameless[0].index} does not tell its UUID, and may be {prefix}")
        if len(found) != 1 or found[0] in chosen:
            break
        chosen += found
    return tuple(chosen)


def _by_slice(boards: list[dict[str, Any]], gpus: list[Gpu], slices: list[str]) -> tuple[Gpu, ...] | Unseen:
    """Return the parent boards: NVML has memory and power for the board, and utilisation for nobody."""
    parents: dict[int, Gpu] = {}
    for entry in slices:
        parent = next((gpu for board, gpu in zip(boards, gpus, strict=True) if _holds_slice(board, gpu, entry)), None)
        if parent is None:
            unknown = next((board["mig"] for board in boards if isinstance(board.get("mig", {}), dict)), None)
            if unknown is not None:
                return Unseen(f"the board of {entry} cannot be found: {unknown.get('unseen', 'a GPU is lost')}")
            break
        parents[parent.index] = replace(parent, utilization_percent=_NO_MIG_UTILIZATION)
    return tuple(_without_neighbours(boards, gpu, slices) for gpu in parents.values())


def _without_neighbours(boards: list[dict[str, Any]], gpu: Gpu, slices: list[str]) -> Gpu:
    """Leave out the faults that the driver attributes to GPU instances of which the launch has no slice."""
    board = next(board for board in boards if board["index"] == gpu.index)
    if isinstance(gpu.faults, Unseen) or not isinstance(board.get("mig"), list):
        return gpu
    entries = [entry for entry in board["mig"] if any(str(entry[0]).startswith(wanted) for wanted in slices)]
    instances = {entry[1] for entry in entries}
    if not entries or None in instances:
        return gpu
    told = board["faults"]
    return replace(gpu, faults=tuple(_fault(fault) for fault in told if fault.get("instance") in {None, *instances}))


def _holds_slice(board: dict[str, Any], gpu: Gpu, entry: str) -> bool:
    mig = board.get("mig")
    if isinstance(mig, list) and any(str(part[0]).startswith(entry) for part in mig):
        return True
    # Before driver 470 a slice was named MIG-GPU-<uuid of the board>/<instance>/<instance>.
    return bool(gpu.uuid) and entry.startswith(f"MIG-{gpu.uuid}/")


def _entries(wanted: str, prefix: str) -> list[str]:
    entries: list[str] = []
    for entry in wanted.split(","):
        if entry in entries:
            return []
        if not entry.startswith(prefix):
            break
        entries.append(entry)
    return entries


def _numbers(wanted: str) -> list[int]:
    """Return the numbers at the start; ``""``, ``-1`` and ``NoDevFiles`` have none."""
    numbers: list[int] = []
    for entry in wanted.split(","):
        digits = re.match(r"\+?\d+", entry.strip())
        if digits is None:
            break
        if int(digits[0]) in numbers:
            return []
        numbers.append(int(digits[0]))
    return numbers


def read_gpu(figures: dict[str, Any]) -> Gpu:
    """Turn what the reader says of one board into the fact."""
    if "lost" in figures:
        lost = Unseen(f"NVML does not give the GPU: {figures['lost']}".replace("NVML: ", ""))
        return Gpu(
            index=figures["index"], uuid=_text(figures.get("uuid", "")), name=_text(figures.get("name", "")),
            memory_used_bytes=lost, memory_total_bytes=lost, utilization_percent=lost, power_watts=lost, holders=lost,
            faults=_faults(figures["faults"]),
        )  # fmt: skip
    memory, holders = figures["memory"], figures["holders"]
    power = _number(figures["milliwatts"])
    return Gpu(
        index=figures["index"],
        uuid=_text(figures["uuid"]),
        name=_text(figures["name"]),
        memory_used_bytes=_unseen(memory) or int(memory[0]),
        memory_total_bytes=_unseen(memory) or int(memory[1]),
        utilization_percent=_number(figures["utilization"]),
        power_watts=power if isinstance(power, Unseen) else power / 1000.0,
        holders=_unseen(holders)
        or tuple(GpuHolder(pid=pid, used_bytes=used, known=known) for pid, used, known in holders),
        faults=_faults(figures["faults"]),
    )


def _faults(answer: Any) -> tuple[GpuFault, ...] | Unseen:
    return _unseen(answer) or tuple(_fault(fault) for fault in answer)


def _fault(told: dict[str, Any]) -> GpuFault:
    code, count = told.get("code"), told.get("count", 0)
    words = [str(told.get("detail") or XIDS.get(code or 0, ""))]
    words += [f"{count} times"] if count > 1 else []
    words += ["since before the launch"] if told.get("at") is None else []
    return GpuFault(
        kind=told["kind"],
        code=code,
        detail=", ".join(filter(None, words)).replace("NVML: ", ""),
        at=told.get("at"),
        by_program=code in BY_PROGRAM,
    )


def _unseen(answer: Any) -> Unseen | None:
    return Unseen(str(answer["unseen"])) if isinstance(answer, dict) else None


def _number(answer: Any) -> float | Unseen:
    return _unseen(answer) or float(answer)


def _text(answer: Any) -> str:
    return "" if isinstance(answer, dict) else str(answer)
