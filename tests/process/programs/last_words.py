"""A parent and its workers, all in one lock: the tree of a hung server. Arguments: how many workers, then a folder."""

import multiprocessing
import os
import sys
import threading
from multiprocessing import shared_memory
from pathlib import Path


def wait_for_the_peer(folder):
    Path(folder, f"worker.{os.getpid()}").touch()
    threading.Event().wait()


def wait_for_the_workers(folder):
    Path(folder, f"parent.{os.getpid()}").touch()
    threading.Event().wait()


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    memory = shared_memory.SharedMemory(create=True, size=4096)
    Path(sys.argv[2], "shm-name").write_text(memory.name)
    workers = [context.Process(target=wait_for_the_peer, args=(sys.argv[2],)) for _ in range(int(sys.argv[1]))]
    for worker in workers:
        worker.start()
    wait_for_the_workers(sys.argv[2])
