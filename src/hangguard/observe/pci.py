"""How memory accesses from GPU to GPU travel: whether an IOMMU translates them. Plain functions that block.

NCCL's guide on problems with PCI devices: an IOMMU "can interfere with GPU Direct by redirecting all PCI point-to-point
traffic to the CPU root complex, causing a significant performance reduction or even a hang".
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_NVIDIA = "0x10de"
_DISPLAY = "0x03"
"""PCI class of display controllers, to which 3D controllers belong; pci.ids."""


def gpu_translations(sys: str = "/sys") -> tuple[str, ...]:
    """Return the kinds of IOMMU domain that NVIDIA GPUs are in, each once; empty: in none, or there is no GPU.

    ``identity`` is a pass-through; ``DMA`` and ``DMA-FQ`` are translated
    (Documentation/ABI/testing/sysfs-kernel-iommu_groups, Linux 4.20). Raises OSError where that cannot be read.
    """
    return tuple(sorted(set(_kinds(f"{sys}/kernel/iommu_groups"))))


def _kinds(groups: str) -> Iterator[str]:
    try:
        names = os.listdir(groups)  # noqa: PTH208
    except FileNotFoundError:
        return
    for name in names:
        group = Path(groups, name)
        if any(_is_gpu(device) for device in (group / "devices").iterdir()):
            yield (group / "type").read_text(encoding="ascii", errors="replace").strip()


def _is_gpu(device: Path) -> bool:
    try:
        vendor, kind = ((device / name).read_text(encoding="ascii", errors="replace") for name in ("vendor", "class"))
    except OSError:
        return False
    return vendor.strip() == _NVIDIA and kind.startswith(_DISPLAY)
