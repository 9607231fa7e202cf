"""Answers for NVML, one JSON line a question. Run as a program, by its path, by :mod:`hangguard.observe.gpus`.

A call into a wedged driver never returns, and one in state D cannot even be killed; so NVML is loaded only
here, in a process that can be left behind. Every byte on stdin is a question; the first line is sent unasked,
once the driver is open. The program ends when stdin does, or when its parent is gone, even while NVML hangs. Argument:
the pid of the parent.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # The folder of this file comes first on the path of a program; its modules would shadow foreign names.
    _here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - nothing may be imported yet
    sys.path[:] = [folder for folder in sys.path if folder != _here]

import importlib.util
import json
import queue
import select
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

_STDIN = 0


def main() -> NoReturn:
    """Pass questions on to the thread that asks NVML; end with stdin or with the parent."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what the driver's library may print must not end up among the answers
    questions: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_answer, args=(questions, answers), daemon=True).start()
    _pass_on(questions)
    os._exit(0)  # the thread may be inside NVML: an orderly exit would run the library's destructors under it


def _pass_on(questions: queue.SimpleQueue[bytes]) -> None:
    # A forked child of the supervising program holds the other end of stdin open beyond its parent's death,
    # so the parent is watched as well. It says who it is: it may be dead already, and the parent now be another.
    poll = select.poll()
    poll.register(_STDIN, select.POLLIN)
    parent = int(sys.argv[1]) if len(sys.argv) > 1 else os.getppid()
    if os.getppid() != parent:
        return
    try:
        poll.register(os.pidfd_open(parent), select.POLLIN)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):
        pass  # Linux before 5.3, a sandbox, a Python built without it: the end of stdin must do
    while all(descriptor == _STDIN for descriptor, _ in poll.poll()) and os.getppid() == parent:
        asked = os.read(_STDIN, 64)
        if not asked:
            return
        questions.put(asked)


def _answer(questions: queue.SimpleQueue[bytes], answers: int) -> None:
    try:
        driver = _Driver()
        driver.open()
        _write(answers, {"hello": os.getpid()})
        while True:
            for _ in questions.get():
                _write(answers, driver.read())
    finally:
        os._exit(1)  # whatever went wrong here, the asker must not wait for it


def _write(answers: int, answer: dict[str, Any]) -> None:
    line = json.dumps(answer).encode() + b"\n"
    try:
        while line:
            line = line[os.write(answers, line) :]
    except OSError:
        os._exit(0)  # nobody listens any more


class _Driver:
    """NVML through nvidia-ml-py, opened once."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._problem: dict[str, Any] | None = {"unseen": "not opened"}
        self._faults: Any = None
        self._names: dict[int, dict[str, Any]] = {}
        """What a board was called when it could still tell."""
        self._holding = _Holding()
        self._versions: dict[str, Any] = {}

    def open(self) -> None:
        self._problem = self._open()

    def _open(self) -> dict[str, Any] | None:
        try:
            import pynvml  # noqa: PLC0415 - loading may block on a slow disk, so the thread does it
        except ImportError as error:
            return {"unseen": f"nvidia-ml-py cannot be imported: {error}"}
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            names = {
                pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "library",
                pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "driver",
            }
            return {"unseen": f"nvmlInit: {error}", "absent": names.get(error.value)}
        except pynvml.NVMLLibraryMismatchError as error:  # not an NVMLError
            return {"unseen": f"nvmlInit: {error}"}
        self._versions = {
            "version": self._ask(pynvml.nvmlSystemGetDriverVersion),
            "cuda": self._ask(pynvml.nvmlSystemGetCudaDriverVersion),
        }
        self._faults = _load("_nvml_faults").FaultWatch(pynvml)
        self._faults.begin()
        return None

    def read(self) -> dict[str, Any]:
        """Return every GPU, or why there is none to return."""
        if self._problem is not None and self._nvml is not None:
            self.open()  # the driver may have been loaded since
        if self._problem is not None:
            return self._problem
        count = self._ask(self._nvml.nvmlDeviceGetCount)
        if isinstance(count, dict):
            return count
        return {"gpus": [self._read_gpu(index) for index in range(count)], "driver": self._versions}

    def _read_gpu(self, index: int) -> dict[str, Any]:
        nvml = self._nvml
        handle = self._ask(nvml.nvmlDeviceGetHandleByIndex, index)
        figures = {"handle": handle} if isinstance(handle, dict) else self._figures(handle)
        lost = next((answer for answer in figures.values() if _code(answer) in self._faults.lost_codes), None)
        if lost is not None:
            self._faults.note_lost(index, lost["unseen"], is_new=index in self._names)
            figures = {"handle": lost}  # whatever else it still says is not worth anything
        faults = self._faults.read(index)
        if "handle" in figures:
            return {"index": index, **self._names.get(index, {}), "lost": figures["handle"]["unseen"], "faults": faults}
        named = {key: figures[key] for key in ("uuid", "name", "mig")}
        self._names[index] = {key: name for key, name in named.items() if not isinstance(name, dict)}
        return {"index": index, **figures, "faults": faults}

    def _figures(self, handle: Any) -> dict[str, Any]:
        nvml = self._nvml
        return {
            "uuid": self._ask(nvml.nvmlDeviceGetUUID, handle),
            "name": self._ask(nvml.nvmlDeviceGetName, handle),
            "memory": self._ask(self._memory, handle),
            "utilization": self._ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            "milliwatts": self._ask(nvml.nvmlDeviceGetPowerUsage, handle),
            "holders": self._ask(self._holders, handle),
            "mig": self._ask(self._mig_slices, handle),
        }

    def _ask(self, call: Callable[..., Any], *args: Any) -> Any:
        """Return the answer, or the reason why there is none."""
        try:
            return call(*args)
        except (self._nvml.NVMLError, self._nvml.NVMLLibraryMismatchError) as error:
            return {"unseen": f"NVML: {error}", "code": getattr(error, "value", None)}
        except (AttributeError, TypeError, ValueError, OSError) as error:
            # A version of nvidia-ml-py that lacks the call or knows other arguments.
            return {"unseen": f"nvidia-ml-py: {type(error).__name__}: {error}"}

    def _memory(self, handle: Any) -> list[int]:
        nvml = self._nvml
        try:
            # Version 2 (driver 510) does not count what the driver reserves for itself as used.
            memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        except (nvml.NVMLError, TypeError, AttributeError):
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        return [memory.used, memory.total]

    def _holders(self, handle: Any) -> list[list[int | bool | None]]:
        nvml = self._nvml
        compute = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        try:
            graphics = nvml.nvmlDeviceGetGraphicsRunningProcesses(handle)
        except nvml.NVMLError as error:
            if error.value != nvml.NVML_ERROR_NOT_SUPPORTED:
                raise
            graphics = []  # a board that has no graphics has nobody who uses it for that
        by_pid = {process.pid: process.usedGpuMemory for process in (*graphics, *compute)}
        return [[pid, by_pid[pid], self._holding.is_known(pid)] for pid in sorted(by_pid)]

    def _mig_slices(self, handle: Any) -> list[list[str | int | None]]:
        """Return the UUID of every slice with the number of its GPU instance, by which faults are attributed."""
        nvml = self._nvml
        try:
            current, _pending = nvml.nvmlDeviceGetMigMode(handle)
        except (nvml.NVMLError, AttributeError):
            return []  # a board that cannot be divided
        if not current:
            return []
        slices: list[list[str | int | None]] = []
        for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            try:
                part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
                slices.append([nvml.nvmlDeviceGetUUID(part), self._instance(part)])
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_NOT_FOUND:  # the numbers have gaps
                    raise
        return slices

    def _instance(self, part: Any) -> int | None:
        try:
            return int(self._nvml.nvmlDeviceGetGpuInstanceId(part))
        except (self._nvml.NVMLError, AttributeError):
            return None


class _Holding:
    """Tells whether a pid that NVML names is a process here that has an NVIDIA device open.

    Inside a container the number may be the host's, and then belongs to nobody here, or to a bystander.
    """

    def __init__(self, proc: str = "/proc") -> None:
        self._proc = proc
        self._seen: dict[int, bytes] = {}
        """Who was seen to hold one: pid and start time."""

    def is_known(self, pid: int) -> bool | None:
        """Return ``None`` where its descriptors may not be read."""
        try:
            with open(f"{self._proc}/{pid}/stat", "rb") as stat:  # noqa: PTH123 - read every second
                started = stat.read().rpartition(b")")[2].split()[19]
        except (OSError, IndexError):
            self._seen.pop(pid, None)
            return False
        if self._seen.get(pid) == started:
            return True
        folder = f"{self._proc}/{pid}/fd"
        try:
            descriptors = os.listdir(folder)  # noqa: PTH208
        except PermissionError:
            return None
        except OSError:
            return False
        for descriptor in descriptors:
            try:
                # WSL has /dev/dxg in the place of all device files.
                if os.readlink(f"{folder}/{descriptor}").startswith(("/dev/nvidia", "/dev/dxg")):  # noqa: PTH115
                    self._seen[pid] = started
                    return True
            except OSError:
                continue
        return False


def _code(answer: Any) -> int | None:
    return answer.get("code") if isinstance(answer, dict) else None


def _load(name: str) -> Any:
    """Load a module that lies beside this file: the package is not imported here, it would cost half a second."""
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"hangguard_{name}", path)
    if spec is None or spec.loader is None:
        raise ImportError(name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
