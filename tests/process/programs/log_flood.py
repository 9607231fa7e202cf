"""A server whose log is a flood.

usage: log_flood.py PORT MEGABYTES FOLDER [BOUND]. It prints a first line with its arguments and a symptom, answers on
the port, and once FOLDER/go is there it writes so many megabytes of numbered lines, then ``the last line``, and notes
in FOLDER/done what its own descriptor says: offset, size, flags, device and inode. With BOUND it rests after every 64
megabytes until its log takes no more megabytes of the disk than that.
"""

import fcntl
import http.server
import json
import os
import sys
import threading
import time
from pathlib import Path

port, megabytes, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
bound = int(sys.argv[4]) << 20 if len(sys.argv) > 4 else None
STEP = 64 << 20
LINE = b"line %09d of the flood, which is as long as a line of a log often is\n"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_line):
        pass


def state():
    status = os.fstat(1)
    return {
        "offset": os.lseek(1, 0, os.SEEK_CUR),
        "size": status.st_size,
        "flags": fcntl.fcntl(1, fcntl.F_GETFL),
        "file": [status.st_dev, status.st_ino],
    }


def write():
    while not (folder / "go").exists():
        time.sleep(0.01)
    before, written, number, most = state(), 0, 0, 0
    while written < megabytes << 20:
        block = b"".join(LINE % n for n in range(number, number + 10_000))
        number += 10_000
        while block:
            sent = os.write(1, block)
            written, block = written + sent, block[sent:]
        if bound is not None and written % STEP < len(LINE) * 10_000:
            most = max(most, os.fstat(1).st_blocks * 512)
            while os.fstat(1).st_blocks * 512 > bound:
                time.sleep(0.02)
    os.write(1, b"the last line\n")
    (folder / "part").write_text(json.dumps({"before": before, "after": state(), "lines": number, "most": most}))
    (folder / "part").rename(folder / "done")


os.write(1, f"args: {sys.argv[1:]}\nRuntimeError: CUDA out of memory, says the head\n".encode())
threading.Thread(target=write, daemon=True).start()
http.server.ThreadingHTTPServer(("127.0.0.1", port), Quiet).serve_forever()
