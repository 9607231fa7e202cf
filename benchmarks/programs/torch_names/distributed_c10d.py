"""The making of a communicator whose peer is missing (torch/distributed/distributed_c10d.py)."""

from __future__ import annotations


def _new_process_group_helper() -> None:
    while True:  # NCCL burns a core here, without a system call
        sum(range(100_000))
