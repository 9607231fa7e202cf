"""Loads weights from a disk that may be slow. usage: states_reader.py mapped|read PATH"""

import mmap
import sys

how, path = sys.argv[1:]
print("loads the weights", flush=True)
with open(path, "rb") as weights:
    if how == "read":
        while weights.read(1 << 20):
            pass
    else:
        with mmap.mmap(weights.fileno(), 64 << 20, prot=mmap.PROT_READ) as mapped:
            for page in range(0, 64 << 20, mmap.PAGESIZE):
                mapped[page]
print("has loaded them", flush=True)
