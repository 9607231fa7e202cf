"""Locks that nobody will let go. usage: states_deadlock.py threads|processes|files

threads: two of one process, each with one lock, each wanting the other's. processes: the same with two processes and
semaphores of multiprocessing. files: the same with two processes and the kernel's locks of files.
"""

import fcntl
import multiprocessing
import os
import sys
import threading


def cross(take, first, second, both):
    take(first)
    both.wait()
    take(second)


def take_file(path):
    fcntl.flock(os.open(path, os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX)


def main(how):
    print(f"two {how} now take two locks in opposite order", flush=True)
    if how == "threads":
        locks = threading.Lock(), threading.Lock()
        both = threading.Barrier(2)
        threading.Thread(target=cross, args=(lambda lock: lock.acquire(), *locks, both), daemon=True).start()
        cross(lambda lock: lock.acquire(), locks[1], locks[0], both)
    made = multiprocessing.get_context("fork")
    both = made.Barrier(2)
    locks, take = (made.Lock(), made.Lock()), lambda lock: lock.acquire()
    if how == "files":
        locks, take = ("one.lock", "two.lock"), take_file
    other = made.Process(target=cross, args=(take, *locks, both))
    other.start()
    cross(take, locks[1], locks[0], both)


main(sys.argv[1])
