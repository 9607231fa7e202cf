"""Threads in nested functions and generators, and a main thread in a recursion, all in one lock.

Arguments: how many threads, how deep the recursion.
"""

import sys
import threading

LOCK = threading.Lock()
LOCK.acquire()


def generator():
    yield from inner()


def inner():
    LOCK.acquire()
    yield 1


def work():
    def nested():
        return [list(generator()) for _ in range(1)]

    try:
        nested()
    finally:
        print("never")


class Größe:  # noqa: PLC2401 - names may be anything
    def tiefer(self, left):
        if left:
            return self.tiefer(
                left - 1,
            )
        print("standing", flush=True)
        with LOCK:
            return None


sys.setrecursionlimit(5000)
for _ in range(int(sys.argv[1])):
    threading.Thread(target=work, daemon=True).start()
Größe().tiefer(int(sys.argv[2]))
