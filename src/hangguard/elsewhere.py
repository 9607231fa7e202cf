"""What a launch may leave outside /dev/shm, and by which names: build locks, rendezvous files, pools of host memory.

Synchronous and standard library only: the guardian imports this file, and ``held``, which asks here what is worth a
closer look. Nothing in here looks at a file.

The names, each from the source of whoever makes the file:

``lock``, in the folder of an extension
    ``torch/utils/file_baton.py``, ``torch/utils/cpp_extension.py``: made with ``O_CREAT | O_EXCL``, kept open for
    reading while the extension is built, then removed. Nobody else opens it: who waits only looks whether it is there.
``vllm_dist_<32 hex>``, in the temp folder
    ``vllm/utils/network_utils.py``, ``get_file_store_init_method``: torch's ``FileStore``, which opens and closes it at
    every operation. Its last user would remove it, and never does where workers are ended by a signal. On CPUs
    ``vllm/v1/worker/cpu_worker.py`` puts the name into the environment that the worker's children get, and into the
    names of its shared memory.
``sglang_host_pool_<32 hex>.mmap``, ``vllm_offload_<id>.mmap``, ``vllm_ec_<id>.mmap``
    ``sglang/srt/mem_cache/storage/mmap/mmap_allocator.py``, ``vllm/v1/kv_offload/cpu/shared_offload_region.py``,
    ``vllm/distributed/ec_transfer/ec_connector/cpu/ec_shared_region.py``: in /dev/shm as a rule.

A file that somebody names himself (``init_method="file:///some/path"``) is not in it, whoever has it open: whoever else
was told that name may still want it when nobody has it open, for such a store is closed between two operations.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from typing import Any

LOCK = "lock"
DEEPEST = 4
"""Folders between that of all extensions and the lock: ``torch_extensions/py311_cu130/NAME/lock``."""
_RENDEZVOUS = "vllm_dist_"
_HEX = frozenset("0123456789abcdef")
_DIGITS = 32
_POOLS = ("sglang_host_pool_", "vllm_offload_", "vllm_ec_")


class Elsewhere:
    """Where a launch may leave files beside /dev/shm, and what lay there before it. Unseen: nothing is ours there."""

    def __init__(
        self,
        *,
        builds: Iterable[str] = (),
        temp: str = "",
        since_ns: int = 0,
        locks: Iterable[tuple[int, int, int]] = (),
        names: Collection[str] = (),
        taken: Iterable[str] = (),
        unseen: Iterable[str] = (),
    ) -> None:
        self.builds = tuple(builds)
        """Real paths of the folders below which extensions are built, on disks where there are leases."""
        self.temp = temp
        """Real path of the folder for temporary files; empty: it could not be looked at."""
        self.since_ns = since_ns
        """When it was looked at, nanoseconds since the epoch, as file systems date their files."""
        self.locks = frozenset(locks)
        """(device, inode, time of the last change) of the build locks that were there."""
        self.names = frozenset(names)
        """Names in the temp folder that engines use and that were there."""
        self.taken = frozenset(taken)
        """Names of rendezvous files that the launch itself was given: by somebody else, who has them too."""
        self.unseen = tuple(unseen)

    def kind_of(self, path: str) -> str:
        """Return what a file of this name is, if it lies where it should: lock, rendezvous, pool; empty: nothing."""
        folder, name = os.path.split(path)
        if name == LOCK:
            return "lock" if any(_is_below(folder, build) for build in self.builds) else ""
        if not self.temp or folder != self.temp or name in self.names:
            return ""
        if is_rendezvous(name):
            return "" if name in self.taken else "rendezvous"
        return "pool" if is_pool(name) else ""

    def is_new(self, found: os.stat_result) -> bool:
        """Whether a lock was made after the launch. Being new does not say by whom."""
        identity = (found.st_dev, found.st_ino, found.st_mtime_ns)
        return identity not in self.locks and found.st_mtime_ns >= self.since_ns

    @staticmethod
    def is_presence_lock(found: os.stat_result, flags: int, locked: Collection[int]) -> bool:
        """Whether an open file is a lock by its presence, and no lock that the kernel knows and frees.

        ``flags`` are those of the descriptor, ``locked`` the inodes that ``/proc/locks`` names. torch opens its lock
        for reading and writes nothing into it; who locks a file by flock(2) or fcntl(2) opens it for writing.
        """
        return flags & os.O_ACCMODE == os.O_RDONLY and found.st_size == 0 and found.st_ino not in locked

    def rendezvous_in(self, text: bytes) -> set[str]:
        """Return the paths of the rendezvous files whose names are in a text: an environment, or a path."""
        found, at = set(), text.find(_RENDEZVOUS.encode())
        while at >= 0 and self.temp:
            name = text[at : at + len(_RENDEZVOUS) + _DIGITS].decode("ascii", "replace")
            path = os.path.join(self.temp, name)  # noqa: PTH118
            if self.kind_of(path) == "rendezvous":
                found.add(path)
            at = text.find(_RENDEZVOUS.encode(), at + 1)
        return found

    def carried(self) -> dict[str, Any]:
        """Return it as JSON can carry it: bytes of paths as latin-1 text, for the other end may have another locale."""
        return {
            "builds": [os.fsencode(build).decode("latin-1") for build in self.builds],
            "temp": os.fsencode(self.temp).decode("latin-1"),
            "since_ns": self.since_ns,
            "locks": sorted(self.locks),
            "names": sorted(name for name in self.names if is_rendezvous(name) or is_pool(name)),
            "taken": sorted(self.taken),
        }


def received(told: Mapping[str, Any]) -> Elsewhere:
    """Return what was carried here."""
    return Elsewhere(
        builds=[os.fsdecode(build.encode("latin-1")) for build in told["builds"]],
        temp=os.fsdecode(told["temp"].encode("latin-1")),
        since_ns=told["since_ns"],
        locks=[(device, inode, made_ns) for device, inode, made_ns in told["locks"]],
        names=told["names"],
        taken=told["taken"],
    )


def is_rendezvous(name: str) -> bool:
    """Whether vLLM gives this name, which nobody can guess, to the file in which its workers meet."""
    digits = name[len(_RENDEZVOUS) :]
    return name.startswith(_RENDEZVOUS) and len(digits) == _DIGITS and _HEX.issuperset(digits)


def is_pool(name: str) -> bool:
    """Whether an engine gives names of this form to its pools of host memory."""
    return name.startswith(_POOLS) and name.endswith(".mmap")


def _is_below(folder: str, build: str) -> bool:
    beginning = build.rstrip("/") + "/"
    return folder.startswith(beginning) and folder[len(beginning) :].count("/") < DEEPEST
