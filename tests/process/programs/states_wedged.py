"""Deadlocks, with a command line that nobody can read. usage: states_wedged.py PATH

The kernel reads a command line from where the process says that its arguments are (PR_SET_MM_MAP): here in a mapped
file, whose disk does not answer. Who reads /proc/PID/cmdline then waits in the kernel.
"""

import ctypes
import mmap
import struct
import sys
import threading
from pathlib import Path

PR_SET_MM, PR_SET_MM_MAP = 35, 14
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.sbrk.restype = ctypes.c_void_p
stat = [int(word) for word in Path("/proc/self/stat").read_text().rpartition(")")[2].split()[1:]]
start_code, end_code, start_stack = stat[22:25]
start_data, end_data, start_brk = stat[41:44]
with open(sys.argv[1], "rb") as file:
    at = libc.mmap(None, ctypes.c_size_t(1 << 20), mmap.PROT_READ, mmap.MAP_PRIVATE, file.fileno(), ctypes.c_long(0))
places = (start_code, end_code, start_data, end_data, start_brk, libc.sbrk(0), start_stack, at, at + 8192, at, at + 8192)
told = struct.pack("11QQIi", *places, 0, 0, -1)
if libc.prctl(PR_SET_MM, ctypes.c_ulong(PR_SET_MM_MAP), told, ctypes.c_ulong(len(told)), ctypes.c_ulong(0)) != 0:
    sys.exit(f"prctl: errno {ctypes.get_errno()}")
print("its command line cannot be read now", flush=True)
gate = threading.Lock()
gate.acquire()
gate.acquire()
