"""Where CPython keeps what a stack is made of: the offsets of struct members, by version.

3.10 to 3.12: offsetof() over ``Include/internal/pycore_{runtime,interp,pystate,frame}.h``, ``Include/cpython/code.h``
and ``frameobject.h`` of 3.10.13, 3.11.7 and 3.12.1, on x86-64 and, with the sizes of its pthread types, on aarch64:
they are the same, and stay the same within a minor version (py-spy has one set for each, too). 3.13 tells its own at
the beginning of ``_PyRuntime`` (``_Py_DebugOffsets`` in ``pycore_runtime.h``).
"""

from __future__ import annotations

import re
import struct

from .memory import Memory, Unreadable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

COOKIE = b"xdebugpy"
FINAL = 0xF0


class Layout:
    """The offsets of one version, in bytes. ``None``: that version has no such member."""

    def __init__(self, version: str, **offsets: int | None) -> None:
        self.version = version
        # Of _PyRuntimeState, PyInterpreterState and PyThreadState.
        self.interpreters = offsets["interpreters"] or 0
        self.main_thread = offsets["main_thread"]
        self.next_interpreter = offsets["next_interpreter"] or 0
        self.threads = offsets["threads"] or 0
        self.next_thread = offsets["next_thread"] or 0
        self.thread_interpreter = offsets["thread_interpreter"] or 0
        self.thread_frame = offsets["thread_frame"] or 0
        self.cframe_frame = offsets["cframe_frame"]  # 3.11 and 3.12 keep a _PyCFrame between thread and frame
        self.thread_id = offsets["thread_id"] or 0
        self.native_id = offsets["native_id"]
        # Of _PyInterpreterFrame; of PyFrameObject in 3.10.
        self.frame_size = offsets["frame_size"] or 0
        self.frame_code = offsets["frame_code"] or 0
        self.frame_previous = offsets["frame_previous"] or 0
        self.frame_instruction = offsets["frame_instruction"] or 0
        self.frame_owner = offsets["frame_owner"]
        self.frame_line = offsets["frame_line"]
        # Of PyCodeObject.
        self.code_size = offsets["code_size"] or 0
        self.code_file = offsets["code_file"] or 0
        self.code_name = offsets["code_name"] or 0
        self.code_lines = offsets["code_lines"] or 0
        self.code_first_line = offsets["code_first_line"] or 0
        self.code_instructions = offsets["code_instructions"]
        # Of PyASCIIObject and PyBytesObject.
        self.text_data = offsets["text_data"] or 0
        self.bytes_data = offsets["bytes_data"] or 0


TEXT_LENGTH, TEXT_STATE, BYTES_LENGTH = 16, 32, 16
"""``PyASCIIObject.length`` and ``.state``, ``PyVarObject.ob_size``: the same in all of them."""
WIDE_TEXT = {48: 72, 40: 56}
"""sizeof(PyCompactUnicodeObject) by sizeof(PyASCIIObject): where text begins that is not ASCII."""

_COMMON = {
    "next_interpreter": 0,
    "next_thread": 8,
    "thread_interpreter": 16,
    "native_id": None,
    "cframe_frame": None,
    "frame_owner": None,
    "frame_line": None,
    "code_instructions": None,
    "bytes_data": 32,
}
_KNOWN: Mapping[str, dict[str, int | None]] = {
    "3.10": {
        **_COMMON,
        "interpreters": 32,
        "main_thread": 72,
        "threads": 8,
        "thread_frame": 24,
        "thread_id": 176,
        "frame_size": 112,
        "frame_code": 32,
        "frame_previous": 24,
        "frame_instruction": 96,
        "frame_line": 100,
        "code_size": 128,
        "code_file": 104,
        "code_name": 112,
        "code_lines": 120,
        "code_first_line": 40,
        "text_data": 48,
    },
    "3.11": {
        **_COMMON,
        "interpreters": 40,
        "main_thread": 80,
        "threads": 16,
        "thread_frame": 56,
        "cframe_frame": 8,
        "thread_id": 152,
        "native_id": 160,
        "frame_size": 80,
        "frame_code": 32,
        "frame_previous": 48,
        "frame_instruction": 56,
        "frame_owner": 69,
        "code_size": 184,
        "code_file": 112,
        "code_name": 120,
        "code_lines": 136,
        "code_first_line": 72,
        "code_instructions": 184,
        "text_data": 48,
    },
    "3.12": {
        **_COMMON,
        "interpreters": 40,
        "main_thread": 64,
        "threads": 72,
        "thread_frame": 56,
        "cframe_frame": 0,
        "thread_id": 136,
        "native_id": 144,
        "frame_size": 80,
        "frame_code": 0,
        "frame_previous": 8,
        "frame_instruction": 56,
        "frame_owner": 70,
        "code_size": 192,
        "code_file": 112,
        "code_name": 120,
        "code_lines": 136,
        "code_first_line": 68,
        "code_instructions": 192,
        "text_data": 40,
    },
}


def layout_of(memory: Memory, symbols: Mapping[str, int]) -> Layout:
    """Return the layout of the interpreter in it. Raises :class:`Unreadable` for one that is not known."""
    version = _version(memory, symbols)
    if version == "3.13":
        return _told(memory, symbols["_PyRuntime"])
    if version not in _KNOWN:
        raise Unreadable(f"the stacks of Python {version} cannot be read from here")
    return Layout(version, **_KNOWN[version])


def _version(memory: Memory, symbols: Mapping[str, int]) -> str:
    if "Py_Version" in symbols:
        number = memory.word(symbols["Py_Version"])  # PY_VERSION_HEX
        if number & 0xF0 != FINAL:
            raise Unreadable("the stacks of an unfinished Python cannot be read from here")
        return f"{number >> 24 & 0xFF}.{number >> 16 & 0xFF}"
    # Before 3.11 only the names tell: of libpython3.10.so.1.0, of the program, or of a module that it loaded.
    for mapping in memory.mappings:
        if named := re.search(r"python(3\.\d+)", mapping.path):
            return named[1]
    raise Unreadable("which Python it is cannot be told")


def _told(memory: Memory, runtime: int) -> Layout:
    """Read ``_Py_DebugOffsets`` of 3.13: the cookie, then words in the order of the header."""
    words = struct.unpack("<8s43Q", memory.read(runtime, 8 * 44))
    if words[0] != COOKIE or words[1] >> 16 != 0x030D:
        raise Unreadable("this Python 3.13 does not tell where it keeps its stacks")
    if words[2]:
        raise Unreadable("the stacks of a free-threaded Python cannot be read from here")
    _, _, interpreters = words[3:6]
    interpreter, thread, frame, code = words[6:19], words[19:28], words[28:34], words[34:44]
    offsets = {
        "interpreters": interpreters,
        "next_interpreter": interpreter[2],
        "threads": interpreter[3],
        "next_thread": thread[2],
        "thread_interpreter": thread[3],
        "thread_frame": thread[4],
        "thread_id": thread[5],
        "native_id": thread[6],
        "frame_size": frame[0],
        "frame_previous": frame[1],
        "frame_code": frame[2],
        "frame_instruction": frame[3],
        "frame_owner": frame[5],
        "code_size": code[0],
        "code_file": code[1],
        "code_name": code[2],
        "code_lines": code[4],
        "code_first_line": code[5],
        "code_instructions": code[9],
    }
    if not all(0 <= offset < 1 << 20 for offset in offsets.values()):
        raise Unreadable("this Python 3.13 tells offsets that cannot be")
    return Layout("3.13", main_thread=None, cframe_frame=None, frame_line=None, text_data=40, bytes_data=32, **offsets)
