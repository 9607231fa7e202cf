"""Answers for NVML, one JSON line a question. Run as a program, by its path, by :mod:`hangguard.observe.gpus`.

A call into a wedged driver never returns, and one in state D cannot even be killed; so NVML is loaded only
here, in a process that can be left behind. Every byte on stdin is a question; the first line is sent unasked,
once the driver is open. The program ends when stdin does, or when its parent is gone, even while NVML hangs.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # The folder of this file comes first on the path of a program; its modules would shadow foreign names.
    _here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - nothing may be imported yet
    sys.path[:] = [folder for folder in sys.path if folder != _here]

import json
import queue
import select
import threading
from collections.abc import Callable
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
    # so the parent is watched as well.
    poll = select.poll()
    poll.register(_STDIN, select.POLLIN)
    parent = os.getppid()
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
        return {"gpus": [self._read_gpu(index) for index in range(count)]}

    def _read_gpu(self, index: int) -> dict[str, Any]:
        nvml = self._nvml
        handle = self._ask(nvml.nvmlDeviceGetHandleByIndex, index)
        if isinstance(handle, dict):  # "GPU is lost", for example: every figure is unseen for that reason
            return {"index": index, "lost": handle["unseen"]}
        return {
            "index": index,
            "uuid": self._ask(nvml.nvmlDeviceGetUUID, handle),
            "name": self._ask(nvml.nvmlDeviceGetName, handle),
            "memory": self._ask(self._memory, handle),
            "utilization": self._ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            "milliwatts": self._ask(nvml.nvmlDeviceGetPowerUsage, handle),
            "holders": self._ask(self._holders, handle),
            "mig": self._ask(self._mig_uuids, handle),
        }

    def _ask(self, call: Callable[..., Any], *args: Any) -> Any:
        """Return the answer, or the reason why there is none."""
        try:
            return call(*args)
        except (self._nvml.NVMLError, self._nvml.NVMLLibraryMismatchError) as error:
            return {"unseen": f"NVML: {error}"}
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

    def _holders(self, handle: Any) -> list[list[int | None]]:
        nvml = self._nvml
        compute = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        try:
            graphics = nvml.nvmlDeviceGetGraphicsRunningProcesses(handle)
        except nvml.NVMLError as error:
            if error.value != nvml.NVML_ERROR_NOT_SUPPORTED:
                raise
            graphics = []  # a board that has no graphics has nobody who uses it for that
        by_pid = {process.pid: process.usedGpuMemory for process in (*graphics, *compute)}
        return [[pid, by_pid[pid]] for pid in sorted(by_pid)]

    def _mig_uuids(self, handle: Any) -> list[str]:
        nvml = self._nvml
        try:
            current, _pending = nvml.nvmlDeviceGetMigMode(handle)
        except (nvml.NVMLError, AttributeError):
            return []  # a board that cannot be divided
        if not current:
            return []
        uuids = []
        for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            try:
                uuids.append(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)))
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_NOT_FOUND:  # the numbers have gaps
                    raise
        return uuids


if __name__ == "__main__":
    main()
