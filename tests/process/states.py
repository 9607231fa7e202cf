"""What the tests of the states share: outsiders, disks and control groups, each ended with its block."""

import os
import subprocess
import sys
from contextlib import contextmanager

from seen import PROGRAMS
from test_cgroups import hierarchy, remove

FAILURES = {"stuck", "broken", "exited", "expired"}
"""Classes that a start which gets on must never be given."""


@contextmanager
def outsider(name, *words):
    """A program that is nobody's member; what it says can be read line by line."""
    argv = [sys.executable, "-B", str(PROGRAMS / f"{name}.py"), *map(str, words)]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    try:
        yield process
    finally:
        process.stdin.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def end(process):
    """End an outsider before its block ends."""
    process.kill()
    process.wait()


class Disk:
    """A disk that falls silent after so many megabytes; when it is ended nobody waits for it any more."""

    def __init__(self, folder, megabytes):
        folder.mkdir()
        self.folder = folder
        argv = [sys.executable, "-B", str(PROGRAMS / "states_disk.py"), str(folder), str(megabytes)]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        assert self.process.stdout.readline() == "mounted\n"

    def answers(self):
        self.process.stdin.write("go on\n")

    def end(self):
        if self.process.poll() is None:
            self.process.stdin.close()
            self.process.wait(10)
            self.process.stdout.close()


@contextmanager
def disk(folder, megabytes):
    made = Disk(folder, megabytes)
    try:
        yield made
    finally:
        made.end()


@contextmanager
def ending(*disks):
    """End the disks with this block: inside of the one that ends who waits for them, for not even SIGKILL does that."""
    try:
        yield
    finally:
        for one in disks:
            one.end()


FREEZERS = {"freezer": ("freezer.state", "FROZEN", "THAWED"), "": ("cgroup.freeze", "1", "0")}


class Freezer:
    """A control group of our own in the hierarchy of one version; ``freeze`` takes whole processes."""

    def __init__(self, controller):
        self.file, self.on, self.off = FREEZERS[controller]
        self.folder = hierarchy(controller) / f"hangguard-test-states-{os.getpid()}"
        self.folder.mkdir()

    def freeze(self, *pids):
        for pid in pids:
            (self.folder / "cgroup.procs").write_text(str(pid))
        (self.folder / self.file).write_text(self.on)

    def thaw(self):
        (self.folder / self.file).write_text(self.off)


@contextmanager
def freezer(controller):
    made = Freezer(controller)
    try:
        yield made
    finally:
        made.thaw()
        remove(made.folder)


@contextmanager
def thawing(*freezers):
    """Thaw with this block: what is frozen cannot be ended."""
    try:
        yield
    finally:
        for one in freezers:
            one.thaw()
