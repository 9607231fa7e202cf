"""Loads weights from a disk that may be slow, one page after the other. usage: states_reader.py mapped|read PATH"""

import mmap
import sys

SIZE = 16 << 20


def load(how, path):
    with open(path, "rb", buffering=0) as weights:
        if how == "read":
            for _ in range(0, SIZE, mmap.PAGESIZE):
                weights.read(mmap.PAGESIZE)
            return
        with mmap.mmap(weights.fileno(), SIZE, prot=mmap.PROT_READ) as mapped:
            for page in range(0, SIZE, mmap.PAGESIZE):
                mapped[page]


print("loads the weights", flush=True)
load(*sys.argv[1:])
print("has loaded them", flush=True)
