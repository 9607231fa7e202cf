"""NCCL's RAS thread of two real ranks: who is behind, and who is gone. Run with ``-m gpu2``, on two GPUs."""

import os
import signal
import time

import anyio
import pytest
from nccl_ranks import ranks

from hangguard import Unseen

pytestmark = [pytest.mark.gpu2, pytest.mark.timeout(240)]


async def look_until(started, condition, within=60.0):
    with anyio.fail_after(within):
        while True:
            began = time.monotonic()
            seen = await started.look()
            assert time.monotonic() - began < 5.0
            if not isinstance(seen, Unseen) and condition(seen):
                return seen
            await anyio.sleep(0.5)


def test_the_rank_that_did_not_come_is_behind_and_the_stopped_one_is_missing(tmp_path):
    with ranks(2, tmp_path) as started:
        started.go(0, 1)
        assert started.said(0, 1) == ["up\n", "up\n"]
        (even,) = anyio.run(look_until, started, lambda seen: len(seen[0].counts) == 2)
        assert (even.size, even.behind_ranks, even.missing_ranks) == (2, (), ())
        assert [pid for _rank, pid in even.pids] == started.pids
        started.go(0)  # rank 0 begins another operation, and waits for rank 1
        assert started.said(0) == ["launched\n"]
        (uneven,) = anyio.run(look_until, started, lambda seen: bool(seen[0].behind_ranks))
        assert uneven.behind_ranks == (1,)
        os.kill(started.pids[1], signal.SIGSTOP)
        (missing,) = anyio.run(look_until, started, lambda seen: bool(seen[0].missing_ranks))
        assert missing.missing_ranks == (1,)
        assert started.processes[0].poll() is None, "the question has harmed nobody"
