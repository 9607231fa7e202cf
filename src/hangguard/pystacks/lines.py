"""Which line an instruction is of: CPython's tables of locations."""

from __future__ import annotations


def line_of(table: bytes, first_line: int, instruction: int, *, version: str) -> int:
    """Return the line of the instruction at this offset in bytes; the first line of the code where none is given."""
    if instruction < 0:
        return first_line
    found = _line_of_pairs(table, first_line, instruction) if version == "3.10" else None
    if version != "3.10":
        found = _line_of_entries(table, first_line, instruction)
    return first_line if found is None else found


def _line_of_pairs(table: bytes, line: int, instruction: int) -> int | None:
    """3.10: pairs of (length, difference of lines); -128 means none (Objects/lnotab_notes.txt, PEP 626)."""
    end = 0
    for place in range(0, len(table) - 1, 2):
        length, difference = table[place], table[place + 1]
        difference -= 256 if difference > 127 else 0
        line += 0 if difference == -128 else difference
        end += length
        if instruction < end:
            return None if difference == -128 else line
    return None


def _line_of_entries(table: bytes, line: int, instruction: int) -> int | None:
    """3.11 and later: entries of several forms, each for one to eight code units (Objects/locations.md)."""
    end, place = 0, 0
    while place < len(table):
        form, units = table[place] >> 3 & 15, (table[place] & 7) + 1
        place += 1
        if form in (13, 14):  # the difference of lines in a number of variable length
            difference, place = _signed(table, place)
            line += difference
        elif form in (10, 11, 12):
            line += form - 10
        while place < len(table) and not table[place] & 0x80:  # columns; the next entry begins with the top bit set
            place += 1
        end += 2 * units
        if instruction < end:
            return None if form == 15 else line
    return None


def _signed(table: bytes, place: int) -> tuple[int, int]:
    """Read six bits a byte, lowest first, 0x40: more to come; the lowest bit of all is the sign."""
    value, shift = 0, 0
    while place < len(table) and shift < 60:
        byte = table[place]
        place += 1
        value |= (byte & 0x3F) << shift
        shift += 6
        if not byte & 0x40:
            break
    return (-(value >> 1) if value & 1 else value >> 1), place
