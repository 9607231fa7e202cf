"""A node that serves no requests of its own: by what it counts as ready, and whether anybody could see that.

The node that leads is asked, and this one is not. That its start is over shows in where its workers stand, or in a
health route that it opens last. Where neither can be seen, an idle healthy node and a deadlock are the same picture,
and ending it ends the server of all nodes. So nothing follows from its stillness then: it counts as ready as soon as
its log has told all that it tells, and says how little that is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hangguard.facts import PHASES, Port, Reply, Sample, Stack, Unseen
from hangguard.judge.boards import works
from hangguard.judge.patience import PATIENCE_WITHOUT_STACKS
from hangguard.judge.stillness import APART, all_wait_for_work, working_members

if TYPE_CHECKING:
    from hangguard.judge.memory import Memory


def resting_since(memory: Memory, stacks: tuple[Stack, ...], t: float) -> float | None:
    """Return since when all workers of such a node have stood where they wait for work, in every look.

    They need not stand there in one place: an idle scheduler of SGLang goes round through its loop.
    """
    if memory.rules.answers or memory.tree is None or not all_wait_for_work(stacks, memory.tree, memory.rules):
        return None
    since = memory.resting_since
    return t if since is None or since < memory.progress_at else since


def has_started(memory: Memory, sample: Sample) -> bool:
    """Whether the start of such a node is seen to be over."""
    if memory.rules.answers or memory.tree is None:
        return False
    since, at = memory.resting_since, memory.stacks_at
    rests = since is not None and at is not None and since >= memory.progress_at and at - since >= APART
    return rests or memory.place.phase == "serving" or _opened_its_health_route(sample)


def _opened_its_health_route(sample: Sample) -> bool:
    """SGLang's opens it once all its schedulers are ready: launch_dummy_health_check_server, entrypoints/engine.py."""
    port = sample.port
    ours = isinstance(port, Port) and port.listener is not None and port.listener.ours is True
    return ours and isinstance(sample.health, Reply) and sample.health.state == "good"


def cannot_be_seen_ready(memory: Memory) -> bool:
    """Whether nobody could see that the start of such a node is over: the stacks of its workers were not readable."""
    if memory.rules.answers or memory.ready_at is not None or memory.tree is None:
        return False
    if memory.rules.delegates_to is not None:
        return True  # what runs here is a client of whoever starts it
    if not memory.stacks_unseen:
        return False
    looked_at = memory.agreement.stacks if memory.agreement is not None else ()
    seen = {(s.pid, s.started) for s in looked_at if not isinstance(s.threads, Unseen)}
    return any(p.identity not in seen for p in working_members(memory.tree, memory.rules))


def ready_as_far_as_told(memory: Memory) -> str:
    """Return why such a node counts as ready although nobody could see it; "" where it does not.

    At the end of ``ready_within`` the phases past the weights are enough, and so is a log that tells no phase at all.
    One that has been at work for the node that leads ever since is seen in its idle loop by nobody.
    """
    place, at_work = memory.place, memory.boards.is_busy is True and works(memory.boards) is not False
    is_blind = cannot_be_seen_ready(memory)
    if is_blind and _has_said_all(memory) and memory.unproductive_for >= PATIENCE_WITHOUT_STACKS:
        return _words(memory, f"its log has come to {place.phase}, and no line of it says more")
    is_late = memory.now >= memory.rules.deadline
    unfinished = place.said != "" and PHASES.index(place.phase) <= PHASES.index("weights-load")
    quiet = memory.unproductive_for >= PATIENCE_WITHOUT_STACKS
    if unfinished or not (is_late or (memory.rules.attached and quiet)):
        return ""
    if is_blind or (is_late and at_work and not memory.rules.answers and memory.ready_at is None):
        told = f"its log has come to {place.phase}" if place.said else "its log tells no phase"
        return _words(memory, told + (", and its GPUs are busy" if at_work else ""))
    return ""


def _has_said_all(memory: Memory) -> bool:
    """Whether its log stands where the log of a node that leads nobody ends.

    SGLang's ends after the last capture, or after the memory pool where nothing is captured; vLLM's after the capture,
    or with the memory that is left for the KV cache.
    """
    place = memory.place
    return place.phase == "warm-up" or (place.phase, place.said) in {("graph-capture", "end"), ("kv-cache", "begin")}


def _words(memory: Memory, told: str) -> str:
    elsewhere = f"they run in {memory.rules.delegates_to}" if memory.rules.delegates_to else ""
    why = memory.stacks_unseen or elsewhere or "none was asked for"
    return (
        f"ready as far as can be told: this node serves no requests of its own and {told}; where its workers stand "
        f"could not be seen ({why})"
    )
