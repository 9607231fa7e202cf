"""NCCL's RAS thread of a real communicator of one rank. Run with ``-m gpu``."""

import anyio
import pytest
from nccl_ranks import ranks

from hangguard import Ask, Communicator, Unseen

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]


def test_it_refuses_before_there_is_a_communicator_and_tells_of_it_after(tmp_path):
    with ranks(1, tmp_path) as started:
        before = anyio.run(started.look)
        assert isinstance(before, Unseen)
        assert before.reason.startswith("refused")
        started.go(0)
        assert started.said(0) == ["up\n"]
        (seen,) = anyio.run(started.look)
        assert isinstance(seen, Communicator)
        assert (seen.size, seen.missing_ranks, seen.uninitialised_ranks) == (1, (), ())
        assert seen.pids == ((0, started.pids[0]),)
        assert started.processes[0].poll() is None
        careful = anyio.run(started.look, Ask(communicators=True))  # by its version it may be asked, or only greeted
        assert careful == (seen,) or "says hello; not asked more" in careful.reason
