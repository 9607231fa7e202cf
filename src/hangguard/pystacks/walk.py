"""From the interpreter to its threads, their frames, and the names of what they run.

The process runs on meanwhile. So everything is checked: each object by its type, whose address is known; each
thread by its interpreter; and each stack is read several times. All but its innermost frame must be the same
every time, and the innermost one stand on them several times. And the thread must have slept, or have run on in
between: one that was only interrupted stands still in the middle of a call.
"""

from __future__ import annotations

import struct
import time

from .layouts import BYTES_LENGTH, TEXT_LENGTH, TEXT_STATE, WIDE_TEXT, Layout
from .lines import line_of
from .memory import Memory, Torn, Unreadable
from .running import clock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

MOST_INTERPRETERS = 64
MOST_THREADS = 512
MOST_FRAMES = 20_000
"""A recursion deeper than that is cut there."""
INNERMOST, OUTERMOST = 192, 64
"""How many frames of a deep stack are told."""
TRIES = 8
AGAIN, THE_SAME = 6, 2
"""How often a stack is read again at once, and how often it must be the same with its innermost frame. A walk through a
thread that runs mixes moments: in a loop of short calls one in a thousand had an innermost frame in a wrong place."""
INTERRUPTED = 0.2
"""Seconds in which a thread that can run is expected to run: two periods of a control group's limit."""
LONGEST_TEXT = 4096
LONGEST_TABLE = 1 << 20

_EXECUTING = (0, 2)
"""``FRAME_EXECUTING`` and ``FRAME_UNWINDING`` of 3.10: a frame in any other state is not on a stack."""
_OF_GENERATOR = 1
"""``FRAME_OWNED_BY_GENERATOR``: it always stands on the frame that asked it, but for the moment when it yields."""
_OF_C_STACK = 3
"""``FRAME_OWNED_BY_CSTACK`` (3.12 and later): the frame that marks an entry from C; it runs no code of the program."""


class Code:
    """What a frame runs."""

    __slots__ = ("file", "first_line", "instructions", "lines", "name")

    def __init__(self, name: str, file: str, first_line: int, lines: bytes, instructions: int) -> None:
        self.name = name
        self.file = file
        self.first_line = first_line
        self.lines = lines
        self.instructions = instructions


class Walk:
    """One look at one interpreter. What it has read of code is kept from one try to the next."""

    def __init__(self, memory: Memory, symbols: Mapping[str, int], layout: Layout) -> None:
        self._memory = memory
        self._layout = layout
        self._runtime = symbols["_PyRuntime"]
        try:
            self._code_type = symbols["PyCode_Type"]
            self._text_type = symbols["PyUnicode_Type"]
            self._bytes_type = symbols["PyBytes_Type"]
        except KeyError as missing:
            raise Unreadable(f"its interpreter does not export {missing.args[0]}") from None
        self._codes: dict[int, Code] = {}
        self._tasks: frozenset[int] = frozenset()

    def take(self, tasks: frozenset[int]) -> list[dict[str, Any]]:
        """Return every thread with its frames. ``tasks`` are the kernel's numbers of all its threads."""
        main = self._memory.word(self._runtime + self._layout.main_thread) if self._layout.main_thread else None
        self._tasks = tasks
        before = self._states()
        threads = [self._thread(state, interpreter, main) for state, interpreter in before]
        if self._states() != before:
            raise Torn("its threads came and went")
        return sorted(threads, key=lambda thread: (not thread["is_main"], thread["id"]))

    # ------------------------------------------------------------------------------------------ threads

    def _states(self) -> list[tuple[int, int]]:
        """Return the address of every thread state, with that of its interpreter."""
        layout, word = self._layout, self._memory.word
        interpreter = word(self._runtime + layout.interpreters)
        if not interpreter:
            raise Unreadable("its Python has not begun, or has ended")
        found: list[tuple[int, int]] = []
        seen: set[int] = set()
        while interpreter:
            if interpreter in seen or len(seen) >= MOST_INTERPRETERS:
                raise Torn("its interpreters are no list")
            seen.add(interpreter)
            state = word(interpreter + layout.threads)
            while state:
                if len(found) >= MOST_THREADS:
                    raise Unreadable(f"it has more than {MOST_THREADS} Python threads")
                if word(state + layout.thread_interpreter) != interpreter:
                    raise Torn("a thread is of no interpreter")
                found.append((state, interpreter))
                state = word(state + layout.next_thread)
            interpreter = word(interpreter + layout.next_interpreter)
        return found

    def _thread(self, state: int, interpreter: int, main: int | None) -> dict[str, Any]:
        layout, word = self._layout, self._memory.word
        ident = word(state + layout.thread_id)
        number = word(state + layout.native_id) if layout.native_id else ident
        is_main = ident == main if main is not None else number == self._memory.pid
        if layout.native_id and number not in self._tasks:
            # A forked child still knows its parent's number of the thread that forked. It is the first of the child.
            if not is_main and len(self._tasks) > 1:
                raise Torn(f"thread {number} is none of its threads")
            number, is_main = self._memory.pid, True
        if word(state + layout.thread_interpreter) != interpreter:
            raise Torn("a thread has ended")
        return {"id": number, "is_main": is_main, "frames": self._frames(state, number)}

    # ------------------------------------------------------------------------------------------- frames

    def _frames(self, state: int, number: int) -> list[list[Any]]:
        problem: Torn | None = None
        for _ in range(TRIES):
            try:
                first = self._chain(state)
                clocks = self._clocks(number)
                frames = [self._frame(*part) for part in _ends(first)]
                self._see_again(state, first)
                self._see_it_run(state, first, number, clocks)
            except Torn as torn:
                problem = torn
            else:
                return frames
        raise Torn(f"thread {number}: {problem}")

    def _see_again(self, state: int, first: list[tuple[int, int, int, int]]) -> None:
        """See all frames but the innermost at their places every time, and the innermost one on top of them again."""
        whole = [part[:2] for part in first]
        below = whole[1:] or whole
        again = [[part[:2] for part in self._chain(state)] for _ in range(AGAIN)]
        if any(chain[-len(below) :] != below for chain in again) or again.count(whole) < THE_SAME:
            raise Torn("its frames changed")

    def _clocks(self, number: int) -> list[tuple[bool, str]]:
        """Return the clock of the thread; before 3.11 that of all, because its number in the kernel is not known."""
        tasks = (number,) if self._layout.native_id else sorted(self._tasks)
        return [clock(self._memory.pid, task) for task in tasks]

    def _see_it_run(
        self, state: int, first: list[tuple[int, int, int, int]], number: int, before: list[tuple[bool, str]]
    ) -> None:
        """Confirm that the thread slept all the time, or else see it run on and the frames stay."""
        ends_at = time.monotonic() + INTERRUPTED
        now = self._clocks(number)
        while any(one == then and not one[0] for one, then in zip(now, before, strict=True)):
            self._memory.check_time()
            if time.monotonic() >= ends_at:
                raise Unreadable(f"thread {number} waits for a processor, and may be in the middle of a call")
            time.sleep(0.001)
            now = self._clocks(number)
        if now != before:
            self._see_again(state, first)

    def _chain(self, state: int) -> list[tuple[int, int, int, int]]:
        """Return (address, code, instruction, line) of every frame, innermost first."""
        layout = self._layout
        self._memory.forget()
        frame = self._memory.word(state + layout.thread_frame)
        if layout.cframe_frame is not None and frame:
            frame = self._memory.word(frame + layout.cframe_frame)
        found: list[tuple[int, int, int, int]] = []
        owner: int | None = None
        while frame and len(found) < MOST_FRAMES:
            text = self._memory.near(frame, layout.frame_size)
            owner = None if layout.frame_owner is None else text[layout.frame_owner]
            if owner != _OF_C_STACK:
                found.append((frame, _word(text, layout.frame_code), *self._place(text)))
            frame = _word(text, layout.frame_previous)
        if owner == _OF_GENERATOR and not frame:
            raise Torn("a generator was just left")
        return found

    def _place(self, text: bytes) -> tuple[int, int]:
        """Return where a frame is in its code, and the line if it is traced (3.10 alone keeps that)."""
        layout = self._layout
        if layout.frame_line is None:
            return _word(text, layout.frame_instruction), 0
        units, line, _, state = struct.unpack_from("<iiib", text, layout.frame_instruction)
        if state not in _EXECUTING:
            raise Torn("a frame was just left")
        return 2 * units, line

    def _frame(self, _address: int, address_of_code: int, instruction: int, line: int) -> list[Any]:
        code = self._code(address_of_code)
        self._memory.check_time()  # what is known already is not fetched again, and a long table takes long
        if not line:
            offset = instruction - code.instructions
            line = line_of(code.lines, code.first_line, offset, version=self._layout.version)
        return [code.name, code.file, line]

    # ------------------------------------------------------------------------------------------ objects

    def _code(self, address: int) -> Code:
        if address not in self._codes:
            layout = self._layout
            text = self._object(address, self._code_type, max(layout.code_size, 64))
            (first_line,) = struct.unpack_from("<i", text, layout.code_first_line)
            self._codes[address] = Code(
                name=self._text(_word(text, layout.code_name)),
                file=self._text(_word(text, layout.code_file)),
                first_line=first_line,
                lines=self._bytes(_word(text, layout.code_lines)),
                instructions=address + layout.code_instructions if layout.code_instructions else 0,
            )
        return self._codes[address]

    def _object(self, address: int, kind: int, size: int) -> bytes:
        """Read an object whose type is known: ``ob_type`` is the second word of each."""
        text = self._memory.read(address, size)
        if _word(text, 8) != kind:
            raise Torn(f"0x{address:x} is of another type")
        return text

    def _text(self, address: int) -> str:
        ascii_size = self._layout.text_data
        head = self._object(address, self._text_type, ascii_size)
        length, state = _word(head, TEXT_LENGTH), _word(head, TEXT_STATE)
        kind, is_compact, is_ascii = state >> 2 & 7, state >> 5 & 1, state >> 6 & 1
        if kind not in (1, 2, 4) or not is_compact or length > LONGEST_TEXT:
            raise Torn(f"0x{address:x} is no name")
        data = self._memory.read(address + (ascii_size if is_ascii else WIDE_TEXT[ascii_size]), length * kind)
        return data.decode({1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}[kind], "replace")

    def _bytes(self, address: int) -> bytes:
        length = _word(self._object(address, self._bytes_type, 24), BYTES_LENGTH)
        if length > LONGEST_TABLE:
            raise Torn(f"0x{address:x} is no table of lines")
        return self._memory.read(address + self._layout.bytes_data, length)


def _ends(chain: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    """Leave out the middle of a deep stack."""
    return chain if len(chain) <= INNERMOST + OUTERMOST else chain[:INNERMOST] + chain[-OUTERMOST:]


def _word(text: bytes, offset: int) -> int:
    return int(struct.unpack_from("<Q", text, offset)[0])
