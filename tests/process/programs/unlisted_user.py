"""A supervising program where /dev/shm may be entered and not listed: prints one JSON object. Argument: a folder."""

import json
import os
import sys
from pathlib import Path

import anyio

from hangguard import supervise

FOLDER = Path(sys.argv[1])
THEIRS = Path("/dev/shm/psm_theirs")
SERVER = """
import http.server, mmap, os, sys
file = os.open(sys.argv[1], os.O_RDWR)
kept = mmap.mmap(file, 0)
os.close(file)
http.server.test(http.server.SimpleHTTPRequestHandler, port=int(sys.argv[2]), bind="127.0.0.1")
"""


def listing():
    try:
        return os.listdir("/dev/shm")
    except OSError as problem:
        return problem.strerror


async def main():
    THEIRS.write_bytes(b"somebody's")
    argv = [sys.executable, "-c", SERVER, str(THEIRS), "{port}"]
    async with supervise(argv, url="http://127.0.0.1:{port}", run_dir=FOLDER) as server:
        pass
    release = server.attempt.release
    item = next(item for item in release.items if item.resource == "files")
    return {
        "listing": listing(),
        "theirs": THEIRS.read_text() if THEIRS.exists() else None,
        "answers": [(file.path, file.answer) for file in release.files],
        "unseen": item.detail,
        "item": [item.answer],
        "unattributed": release.unattributed_files,
    }


print(json.dumps(anyio.run(main)))
