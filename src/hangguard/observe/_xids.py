"""Names of the driver's error numbers. Source: https://docs.nvidia.com/deploy/xid-errors/ (the Xid catalogue)."""

from __future__ import annotations

BY_PROGRAM = frozenset({13, 31, 43, 45})
"""Those for which the catalogue names a user's program first: its illegal access, or its end in the middle of work
(45 follows a SIGKILL as well). The same numbers can come from a broken board; then they keep coming."""

XIDS = {
    13: "graphics engine exception",
    31: "memory page fault of the GPU",
    32: "invalid or corrupted push buffer stream",
    38: "driver firmware error",
    43: "the GPU stopped processing",
    45: "preemptive cleanup after an earlier error, or of a killed process",
    48: "double-bit ECC error",
    61: "internal micro-controller breakpoint",
    62: "internal micro-controller halt",
    63: "ECC: a memory page was retired or a row remapped",
    64: "ECC: a memory page could not be retired or a row not remapped",
    69: "graphics engine class error",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "high rate of single-bit ECC errors",
    94: "contained memory error",
    95: "uncontained memory error",
    109: "context switch timeout",
    110: "security fault",
    119: "the GPU's system processor (GSP) does not answer",
    120: "error of the GPU's system processor (GSP)",
    121: "C2C link error",
    122: "SPI power management failure",
    123: "SPI power management failure",
    140: "unrecovered ECC error",
    149: "NVLink: a link of the network failed",
    154: "the board asks for a recovery",
}
