"""Where a process has the symbols of its Python interpreter: from the ELF image in its memory, not from files.

The file may be deleted, or lie in another mount namespace or on a dead disk; and nothing that the process names is
to be opened. Elf64 little endian, with a GNU hash table, as every toolchain writes it since 2006.
"""

from __future__ import annotations

import struct

from .memory import Memory, Torn, has_interpreter

NAMES = ("_PyRuntime", "Py_Version", "PyCode_Type", "PyUnicode_Type", "PyBytes_Type")
"""Exported by every CPython, in libpython or in the program (Py_Version: from 3.11 on)."""

PT_LOAD, PT_DYNAMIC = 1, 2
DT_STRTAB, DT_SYMTAB, DT_GNU_HASH = 5, 6, 0x6FFFFEF5
ET_EXEC = 2
MOST_ENTRIES = 512
MOST_OF_A_CHAIN = 256


def find_symbols(memory: Memory) -> dict[str, int] | None:
    """Return the address of each of :data:`NAMES` that it has; ``None``: there is no interpreter in it."""
    found: dict[str, int] = {}
    for start in _images(memory):
        try:
            image = _Image(memory, start)
        except (Torn, ValueError):  # no ELF image, or one without what is asked for
            continue
        for name in NAMES:
            # As the dynamic linker has it: what the program itself defines goes before its libraries.
            if name not in found and (address := image.find(name)) is not None:
                found[name] = address
    return found if "_PyRuntime" in found else None


def _images(memory: Memory) -> list[int]:
    """Return where the program and every libpython begin, in that order."""
    found = [m for m in memory.mappings if m.offset == 0 and has_interpreter(m.path, memory.program)]
    return [m.start for m in sorted(found, key=lambda m: (m.path != memory.program, m.start))]


class _Image:
    """One ELF file as it is mapped. Raises :class:`ValueError` when it cannot be used."""

    def __init__(self, memory: Memory, start: int) -> None:
        self._memory = memory
        header = memory.read(start, 64)
        if header[:6] != b"\x7fELF\x02\x01":
            raise ValueError("not 64 bits, little endian")
        kind, (table,), (size, count) = (
            struct.unpack_from("<H", header, 16)[0],
            struct.unpack_from("<Q", header, 32),
            struct.unpack_from("<HH", header, 54),
        )
        if size != 56 or not 0 < count <= 64:
            raise ValueError("unknown program headers")
        segments = [struct.unpack("<IIQQQQQQ", memory.read(start + table + 56 * n, 56)) for n in range(count)]
        first = min(s[3] - s[2] for s in segments if s[0] == PT_LOAD)
        self._bias = 0 if kind == ET_EXEC else start - first
        dynamic = next(s for s in segments if s[0] == PT_DYNAMIC) if any(s[0] == PT_DYNAMIC for s in segments) else None
        if dynamic is None:
            raise ValueError("linked statically")
        entries = self._entries(self._bias + dynamic[3], dynamic[6])
        self._strings, self._symbols = self._pointer(entries[DT_STRTAB]), self._pointer(entries[DT_SYMTAB])
        if DT_GNU_HASH not in entries:
            raise ValueError("without a GNU hash table")
        self._hash = self._pointer(entries[DT_GNU_HASH])
        self._buckets, self._first, blooms, _ = struct.unpack("<IIII", memory.read(self._hash, 16))
        self._bucket_table = self._hash + 16 + 8 * blooms

    def _entries(self, address: int, size: int) -> dict[int, int]:
        text = self._memory.read(address, min(size, 16 * MOST_ENTRIES))
        entries = dict(struct.iter_unpack("<QQ", text[: len(text) // 16 * 16]))
        if DT_STRTAB not in entries or DT_SYMTAB not in entries:
            raise ValueError("without symbols")
        return entries

    def _pointer(self, value: int) -> int:
        """Glibc's linker writes addresses into the dynamic section, musl's leaves it as it is in the file."""
        return value if value >= self._bias else value + self._bias

    def find(self, name: str) -> int | None:
        """Return the address of a symbol that is defined here."""
        wanted = name.encode()
        number = 5381
        for byte in wanted:
            number = (number * 33 + byte) & 0xFFFFFFFF
        if not self._buckets:
            return None
        index = self._number(self._bucket_table + 4 * (number % self._buckets))
        if index < self._first:
            return None
        chain = self._bucket_table + 4 * self._buckets
        for _ in range(MOST_OF_A_CHAIN):
            hashed = self._number(chain + 4 * (index - self._first))
            if hashed | 1 == number | 1 and (address := self._symbol(index, wanted)) is not None:
                return address
            if hashed & 1:
                break
            index += 1
        return None

    def _symbol(self, index: int, wanted: bytes) -> int | None:
        text, _info, _other, section, value, _size = struct.unpack(
            "<IBBHQQ", self._memory.read(self._symbols + 24 * index, 24)
        )
        if not section or self._memory.read(self._strings + text, len(wanted) + 1) != wanted + b"\0":
            return None
        return int(self._bias + value)

    def _number(self, address: int) -> int:
        return int(struct.unpack("<I", self._memory.read(address, 4))[0])
