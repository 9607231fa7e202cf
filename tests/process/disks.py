"""File systems of a test's own, gone with its block."""

import subprocess
from contextlib import contextmanager


@contextmanager
def mounted(folder, kind, *options):
    """Mount one of the kernel's file systems over a new folder."""
    folder.mkdir()
    subprocess.run(["mount", "-t", kind, *options, "none", str(folder)], check=True, timeout=10)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=10)


@contextmanager
def overlay(folder):
    """What a container writes to: a layer over another one."""
    folder.mkdir()
    for name in ("lower", "upper", "work"):
        (folder / name).mkdir()
    where = ",".join(f"{name}dir={folder / name}" for name in ("lower", "upper", "work"))
    with mounted(folder / "seen", "overlay", "-o", where) as made:
        yield made


def disk_bytes(path):
    return path.stat().st_blocks * 512
