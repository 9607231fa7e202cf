"""A disk that stops answering: a file system in user space, with two files of zeros.

usage: states_disk.py FOLDER MEGABYTES. Mounts itself over FOLDER and says ``mounted``. After so many megabytes it
answers no reading any more, says ``silent``, and answers all of it when a line comes on stdin. Who waits for
``weights``, which goes through the page cache for the first who opens it, is in state D, who waits for ``direct`` is in
state S. It ends with stdin; a reading that is open then fails, so nothing stays behind in the kernel. (The protocol:
include/uapi/linux/fuse.h, 7.31.)
"""

import ctypes
import errno
import os
import select
import struct
import sys

LOOKUP, FORGET, GETATTR, OPEN, READ, RELEASE, FLUSH, INIT, INTERRUPT, BATCH_FORGET = 1, 2, 3, 14, 15, 18, 25, 26, 36, 42
NODES = {b"weights": 2, b"direct": 3}
ASYNC_READ = 1
DIRECT_IO, KEEP_CACHE = 1, 2
SIZE = 1 << 30
MNT_DETACH = 2

libc = ctypes.CDLL(None, use_errno=True)
folder, megabytes = sys.argv[1].encode(), float(sys.argv[2])
device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)


class Answers:
    waiting, given, are_due, weights_are_open = [], 0, True, False


def attributes(node):
    mode, size = (0o040755, 0) if node == 1 else (0o100644, SIZE)
    return struct.pack("<6Q10I", node, size, size // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def reply(unique, data=b"", error=0):
    try:
        os.write(device, struct.pack("<IiQ", 16 + len(data), -error, unique) + data)
    except FileNotFoundError:
        pass  # whoever asked has been killed meanwhile


def answer(operation, unique, node, body):
    if operation == INIT:
        reply(unique, struct.pack("<IIIIHHIIHH8I", 7, 31, 128 << 10, ASYNC_READ, 8, 8, 128 << 10, 1, 32, 0, *[0] * 8))
    elif operation == LOOKUP:
        found = NODES.get(body.rstrip(b"\0"))
        if found is None:
            reply(unique, error=errno.ENOENT)
        else:
            reply(unique, struct.pack("<4Q2I", found, 0, 60, 60, 0, 0) + attributes(found))
    elif operation == GETATTR:
        reply(unique, struct.pack("<QII", 60, 0, 0) + attributes(node))
    elif operation == OPEN:
        is_direct = Answers.weights_are_open or node == NODES[b"direct"]
        Answers.weights_are_open |= node == NODES[b"weights"]
        reply(unique, struct.pack("<QII", 1, DIRECT_IO | KEEP_CACHE if is_direct else 0, 0))
    elif operation == READ:
        (size,) = struct.unpack_from("<I", body, 16)
        if Answers.given >= megabytes * (1 << 20) and Answers.are_due:
            Answers.are_due = False
            print("silent", flush=True)
        if not Answers.are_due:
            Answers.waiting.append((unique, size))
        else:
            Answers.given += size
            reply(unique, bytes(size))
    elif operation in {FLUSH, RELEASE}:
        reply(unique)
    elif operation not in {FORGET, BATCH_FORGET, INTERRUPT}:
        reply(unique, error=errno.ENOSYS)


options = b"fd=%d,rootmode=40000,user_id=%d,group_id=%d,allow_other" % (device, os.getuid(), os.getgid())
if libc.mount(b"states_disk", folder, b"fuse", 6, options) != 0:
    sys.exit(f"mount: {os.strerror(ctypes.get_errno())}")
print("mounted", flush=True)
try:
    while True:
        readable, _, _ = select.select([device, sys.stdin], [], [])
        if sys.stdin in readable:
            if not os.read(0, 100):
                break
            megabytes, Answers.are_due = float("inf"), True
            for unique, size in Answers.waiting:
                reply(unique, bytes(size))
            Answers.waiting = []
        if device in readable:
            request = os.read(device, 1 << 18)
            _, operation, unique, node = struct.unpack_from("<IIQQ", request)
            answer(operation, unique, node, request[40:])
finally:
    libc.umount2(folder, MNT_DETACH)
