"""What would give a source that was not seen goes by why it was not seen."""

from dataclasses import replace

import pytest

from hangguard.facts import Unseen
from hangguard.observe.stacks import MISSING
from hangguard.supervision.advice import missing_in
from hangguard.supervision.found import FoundServer
from hangguard.testing.scripted import plain_sample, scripted_launch

LATE, OF_PY_SPY = "no answer within 4 s", "py-spy did not answer within 3.2 s"
BUSY, INSTALL, PERMISSION = "too busy to be looked at in that time", "pip install 'hangguard[stacks]'", "--cap-add"


def helped(source, reason, *, pid=7):
    """What is said to help, of one source that was not seen."""
    sample = replace(plain_sample(), **{source: Unseen(reason)})
    (missing,) = missing_in((sample,), FoundServer(pid=pid, started=1, launch=scripted_launch()))
    assert missing.reason == reason
    return missing.helps


@pytest.mark.parametrize(
    ("source", "reason", "says"),
    [
        ("stacks", MISSING.reason, INSTALL),
        ("stacks", f"{MISSING.reason}; the guardian: no frames", INSTALL),
        ("stacks", LATE, BUSY),
        ("stacks", OF_PY_SPY, BUSY),
        ("stacks", "py-spy may not read this process", PERMISSION),
        ("log", LATE, BUSY),
        ("log", "its output goes to a pipe", "--log FILE"),
        ("gpus", "the NVIDIA driver did not answer within 5 s", "dmesg"),
    ],
)
def test_the_help_is_for_this_reason_and_no_other(source, reason, says):
    helps = helped(source, reason)
    assert says in helps
    assert not [other for other in (BUSY, INSTALL, PERMISSION) if other != says and other in helps]


@pytest.mark.parametrize("reason", ["py-spy's answer cannot be read", "py-spy ended with code 3"])
def test_nothing_is_said_to_help_where_nothing_is_known_to(reason):
    assert helped("stacks", reason) == ""


@pytest.mark.parametrize("reason", [LATE, MISSING.reason])
def test_a_member_that_could_not_be_read_is_helped_alike(reason):
    sample = plain_sample()
    stacks = tuple(replace(stack, threads=Unseen(reason), is_python=True) for stack in sample.stacks)
    (missing,) = missing_in((replace(sample, stacks=stacks),), FoundServer(pid=7, started=1, launch=scripted_launch()))
    assert (BUSY if reason == LATE else INSTALL) in missing.helps
