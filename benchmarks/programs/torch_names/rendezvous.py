"""The wait for a peer that never joins the TCP store (torch/distributed/rendezvous.py)."""

from __future__ import annotations

import socket
import time

POLL = 0.008
"""Seconds: some 122 voluntary switches a second, as measured on torch's own client."""


def _create_c10d_store(world_size: int) -> None:
    joined = 1
    with socket.socket() as store:
        store.bind(("127.0.0.1", 0))
        store.listen()
        store.setblocking(False)
        while joined < world_size:
            try:
                store.accept()
                joined += 1
            except BlockingIOError:
                time.sleep(POLL)
