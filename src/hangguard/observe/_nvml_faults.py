"""What the driver tells of faults. Loaded by its path by ``_nvml_reader``, so it imports nothing of hangguard.

Everything here runs in a thread of its own: the wait for events lasts a second by design, and a wedged driver may
keep any of these calls for ever. The figures of the boards never wait for it.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

_WAIT_MILLISECONDS = 1000
_LOOK_EVERY = 5.0
"""Seconds between two looks at counters and states; each look is a few calls to the board's own controller."""
_OVERDUE = 10.0
"""A thread that has not come back for so long hangs in the driver: a wait takes one second, a look far less."""
_LOST_GPU_XID = 79  # "GPU has fallen off the bus"
_NO_INSTANCE = 0xFFFFFFFF

# nvml.h, nvmlGpuFabricInfo: the state, and two bits of the health mask.
_FABRIC_COMPLETED = 3
_ROUTE_UNHEALTHY_SHIFT, _ROUTE_UNHEALTHY = 4, 1


class FaultWatch:
    """Watches all boards from ``begin`` on. ``read`` never waits."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._boards: dict[int, _Board] = {}
        self._lock = threading.Lock()
        self._is_complete = False
        self._came_back_at = time.monotonic()
        self._problem: str | None = None
        self._events: Any = None
        self._events_problem: str | None = None
        # Not supported by this board or its driver, unknown to this driver, or a form that it does not know yet.
        self._absent = (
            nvml.NVML_ERROR_NOT_SUPPORTED,
            nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
            nvml.NVML_ERROR_INVALID_ARGUMENT,
            getattr(nvml, "NVML_ERROR_ARGUMENT_VERSION_MISMATCH", 25),
        )
        self.lost_codes = (nvml.NVML_ERROR_GPU_IS_LOST, getattr(nvml, "NVML_ERROR_RESET_REQUIRED", 16))

    def begin(self) -> None:
        """Start the thread; it ends with the program."""
        threading.Thread(target=self._run, name="faults", daemon=True).start()

    def read(self, index: int) -> list[dict[str, Any]] | dict[str, str]:
        """Return the faults of one board, oldest first, or why they cannot be told. Safe in any thread."""
        with self._lock:
            board = self._boards.get(index)
            faults = [dict(fault) for fault in board.faults.values()] if board is not None else []
            problem = self._why_unseen(board)
        if faults:
            return faults
        return {"unseen": problem} if problem is not None else []

    def note_lost(self, index: int, detail: str, *, is_new: bool) -> None:
        """Note that a question about a board was answered with its loss. Safe in any thread.

        ``is_new``: it has answered such questions before.
        """
        with self._lock:
            board = self._boards.setdefault(index, _Board())
        self._add(board, "lost", detail=detail, is_new=is_new)

    def _why_unseen(self, board: _Board | None) -> str | None:
        silent_for = time.monotonic() - self._came_back_at
        if self._problem is not None:
            return self._problem
        if silent_for > _OVERDUE:
            return f"the watch for faults hangs in the driver for {silent_for:.0f} s"
        if not self._is_complete or board is None:
            return "the faults are being read for the first time"
        if board.problems:
            return next(iter(board.problems.values()))
        if "events" in board.parts and self._events_problem is not None:
            return self._events_problem
        return None if board.parts else "this board and its driver tell of no faults"

    def _run(self) -> None:
        try:
            self._open()
            while True:
                self._look()
                self._is_complete = True
                look_again_at = time.monotonic() + _LOOK_EVERY
                while time.monotonic() < look_again_at:
                    self._came_back_at = time.monotonic()
                    self._wait_for_event()
        except Exception as error:  # noqa: BLE001 - the named edge: the figures do not depend on this thread
            self._problem = f"the watch for faults ended: {type(error).__name__}: {error}"

    def _open(self) -> None:
        nvml = self._nvml
        for index in range(nvml.nvmlDeviceGetCount()):
            with self._lock:
                board = self._boards.setdefault(index, _Board())
            board.handle = self._ask(board, "handle", nvml.nvmlDeviceGetHandleByIndex, index)
            board.parts.discard("handle")
        try:
            self._events = nvml.nvmlEventSetCreate()
        except (nvml.NVMLError, AttributeError):
            return  # a driver without events
        for board in list(self._boards.values()):
            self._register(board)

    def _register(self, board: _Board) -> None:
        nvml = self._nvml
        if board.handle is None:
            return
        wanted = nvml.nvmlEventTypeXidCriticalError | nvml.nvmlEventTypeDoubleBitEccError
        supported = self._ask(board, "events", nvml.nvmlDeviceGetSupportedEventTypes, board.handle)
        if supported is not None and supported & wanted:
            self._ask(board, "events", nvml.nvmlDeviceRegisterEvents, board.handle, supported & wanted, self._events)
        else:
            board.parts.discard("events")

    def _wait_for_event(self) -> None:
        nvml = self._nvml
        if not any("events" in board.parts for board in list(self._boards.values())):
            time.sleep(_WAIT_MILLISECONDS / 1000)
            return
        try:
            event = nvml.nvmlEventSetWait(self._events, _WAIT_MILLISECONDS)
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_TIMEOUT:
                self._events_problem = None
            else:  # a lost board makes every wait return at once: without a rest this would be a hot loop
                self._events_problem = f"NVML, wait for events: {error}"
                time.sleep(_WAIT_MILLISECONDS / 1000)
            return
        self._events_problem = None
        device = _address(event.device)
        for board in list(self._boards.values()):
            if board.handle is not None and _address(board.handle) == device:
                self._note_event(board, event)

    def _note_event(self, board: _Board, event: Any) -> None:
        if event.eventType & self._nvml.nvmlEventTypeXidCriticalError:
            code = int(event.eventData)
            instance = getattr(event, "gpuInstanceId", _NO_INSTANCE)
            kind = "lost" if code == _LOST_GPU_XID else "xid"
            self._add(board, kind, code=code, instance=None if instance == _NO_INSTANCE else int(instance))
        elif event.eventType & self._nvml.nvmlEventTypeDoubleBitEccError:
            self._add(board, "ecc", detail="an uncorrected memory error")

    def _look(self) -> None:
        for board in list(self._boards.values()):
            if board.handle is not None:
                self._look_at_ecc(board)
                self._look_at_rows(board)
                self._look_at_fabric(board)
                self._came_back_at = time.monotonic()

    def _look_at_ecc(self, board: _Board) -> None:
        nvml = self._nvml
        kinds = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
        total = self._ask(board, "ecc", nvml.nvmlDeviceGetTotalEccErrors, board.handle, *kinds)
        if total is None:
            return
        if board.ecc_before is None:
            board.ecc_before = total
        if (more := total - board.ecc_before) > 0:
            self._add(board, "ecc", detail=f"{more} uncorrected memory error{'s' if more > 1 else ''}")

    def _look_at_rows(self, board: _Board) -> None:
        """The kernel of the row remapper; https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/."""
        rows = self._ask(board, "rows", lambda: self._nvml.nvmlDeviceGetRemappedRows(board.handle))
        if rows is None:
            return
        _corrected, _uncorrected, is_pending, has_failed = rows
        if has_failed:
            self._add(board, "remapped-rows", state="failed", detail="a memory row could not be remapped")
        if is_pending:
            self._add(board, "remapped-rows", state="pending", detail="a bad memory row is in use until the next reset")

    def _look_at_fabric(self, board: _Board) -> None:
        """Only a registration that ended badly is a fault: a board without NVSwitch has no fabric to join."""
        info = self._ask(board, "fabric", self._fabric, board.handle)
        if info is None:
            return
        if info.state == 0:  # NVML_GPU_FABRIC_STATE_NOT_SUPPORTED
            board.parts.discard("fabric")
        elif info.state == _FABRIC_COMPLETED and info.status != self._nvml.NVML_SUCCESS:
            reason = self._nvml.NVMLError(info.status)
            self._add(board, "fabric", detail=f"the board could not join the NVSwitch fabric: {reason}")
        elif (info.healthMask >> _ROUTE_UNHEALTHY_SHIFT) & 3 == _ROUTE_UNHEALTHY:
            self._add(board, "fabric", state="route", detail="a route through the NVSwitch fabric is unhealthy")

    def _fabric(self, handle: Any) -> Any:
        info = self._nvml.c_nvmlGpuFabricInfo_v2_t()
        self._nvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
        return info

    def _ask(self, board: _Board, part: str, call: Callable[..., Any], *args: Any) -> Any:
        """Return the answer; ``None``: there is none, and the board knows why."""
        nvml = self._nvml
        try:
            answer = call(*args)
        except nvml.NVMLError as error:
            with self._lock:
                board.parts.discard(part)
                board.problems.pop(part, None)
                if error.value not in (*self._absent, *self.lost_codes):
                    board.parts.add(part)
                    board.problems[part] = f"NVML, {part}: {error}"
            if error.value in self.lost_codes:
                self._add(board, "lost", detail=str(error))
            return None
        except (AttributeError, TypeError, ValueError):
            return None  # a version of nvidia-ml-py that lacks the call or knows other arguments
        with self._lock:
            board.parts.add(part)
            board.problems.pop(part, None)
        return answer

    def _add(
        self, board: _Board, kind: str, *, detail: str = "", code: int | None = None,
        state: str = "", instance: int | None = None, is_new: bool = False,
    ) -> None:  # fmt: skip
        """Note a fault; one that is known already is counted, not listed again: a broken program makes thousands."""
        with self._lock:
            fault = board.faults.setdefault(
                (kind, code, state, instance),
                {"kind": kind, "code": code, "instance": instance, "count": 0, "detail": detail,
                 "at": time.monotonic() if is_new or self._is_complete or code is not None else None},
            )  # fmt: skip
            if is_new and fault["at"] is None:  # the first look of the watch came later than the loss
                fault["at"] = time.monotonic()
            fault["count"] += code is not None
            fault["detail"] = detail or fault["detail"]


class _Board:
    """What is known of one board."""

    def __init__(self) -> None:
        self.handle: Any = None
        self.faults: dict[tuple[str, int | None, str, int | None], dict[str, Any]] = {}
        self.parts: set[str] = set()
        """The sources that this board and its driver have."""
        self.problems: dict[str, str] = {}
        """Those that have it, and did not let us look."""
        self.ecc_before: int | None = None


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
