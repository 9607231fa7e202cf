"""A user's program: starts the server with mirakuru's HTTPExecutor, at its defaults but for the method.

Arguments: JSON with command, url, out (a file of JSON lines). SIGTERM ends it.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

from mirakuru import HTTPExecutor
from mirakuru.exceptions import ExecutorError

ASKED = json.loads(sys.argv[1])


class AskedToEnd(Exception):
    """SIGTERM came."""


def end(number: int, frame: object) -> None:
    del number, frame
    raise AskedToEnd


def write(**facts: object) -> None:
    with Path(ASKED["out"]).open("a") as out:
        out.write(json.dumps({"t": time.monotonic(), **facts}) + "\n")


def main() -> None:
    signal.signal(signal.SIGTERM, end)
    # The default method is HEAD, which the health routes of the engines do not know.
    executor = HTTPExecutor(ASKED["command"], url=f"{ASKED['url']}/health", method="GET")
    try:
        try:
            executor.start()
            write(event="ready")
            while True:  # it does not look again
                time.sleep(60)
        except ExecutorError as error:
            write(event="lost", error=type(error).__name__)
            while True:
                time.sleep(60)
    except AskedToEnd:
        executor.stop()
        write(event="ended")


main()
