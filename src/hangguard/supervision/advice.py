"""What one look could not see and what would give it, and what a person does next."""

from __future__ import annotations

from collections.abc import Iterable

from hangguard.facts import (
    NOT_ASKED,
    Broken,
    Exited,
    Expired,
    Moving,
    Ready,
    Reply,
    Sample,
    Stack,
    Stuck,
    Unclear,
    Unseen,
    Verdict,
    Waiting,
)
from hangguard.judge import Memory, permitted
from hangguard.judge.policy import changed_by
from hangguard.judge.serving import SILENT_WITHOUT_GPUS
from hangguard.observe.stacks import MISSING
from hangguard.supervision.found import FoundServer
from hangguard.supervision.look import Look, Missing

_HELPS = {
    "processes": "run it on the machine where the server runs",
    "log": "--log FILE, or start the server with its output in a file",
    "GPUs": "the driver does not answer: see dmesg",
    "health": "",
    "port": "--url http://HOST:PORT",
}
_OF_THIS_MACHINE = {"processes", "log", "port", "host", "stacks", "locks"}
"""Sources that always answer where there is time enough; a driver, a server or a peer may be what does not."""
_INSTALL = "pip install 'hangguard[stacks]' beside hangguard"
_BUSY = (
    "this machine, or the process, is too busy to be looked at in that time: look longer "
    "(hangguard diagnose --within 40), or once less runs here"
)
LONG_LOOK = 30.0
"""Seconds of a look after which a longer one of the same kind would tell nothing more."""
_FIND_OUT = ("or let hangguard find out: hangguard run -- COMMAND",)
_PERMISSION = "sudo hangguard diagnose; in a container start it with --cap-add SYS_PTRACE"


def missing_in(samples: tuple[Sample, ...], server: FoundServer) -> tuple[Missing, ...]:
    """Return what could not be seen in the newest look at each source, and what would give it."""
    found = [Missing(source="server", reason=note) for note in server.notes]
    for source, name in (
        ("processes", "tree"), ("log", "log"), ("port", "port"), ("health", "health"), ("GPUs", "gpus"),
        ("host", "host"), ("counters of requests", "serving"), ("stacks", "stacks"), ("locks", "locks"),
        ("communicators", "communicators"),
    ):  # fmt: skip
        if source == "communicators" and server.launch.ranks * server.launch.nodes == 1:
            continue
        facts = [fact for sample in samples if (fact := getattr(sample, name)) != NOT_ASKED]
        if facts and isinstance(facts[-1], Unseen):
            reason = facts[-1].reason
            helps = _help_for(source, reason) if server.pid or not _is_permission(reason) else _HELPS.get(source, "")
            found.append(Missing(source=source, reason=reason, helps=helps))
    return (*found, *_unseen_members(samples), *_unseen_bytes(samples))


def _unseen_members(samples: tuple[Sample, ...]) -> list[Missing]:
    stacks = newest_stacks(samples)
    if isinstance(stacks, Unseen):
        return []
    by_reason: dict[str, list[str]] = {}
    for stack in stacks:
        if isinstance(stack.threads, Unseen) and stack.is_python:
            by_reason.setdefault(stack.threads.reason, []).append(f"{stack.title[:40]} ({stack.pid})")
    return [
        Missing(
            source="stacks",
            reason=f"{', '.join(who[:4])}{f' and {len(who) - 4} more' if len(who) > 4 else ''}: {reason}",
            helps=_help_for("stacks", reason),
        )
        for reason, who in by_reason.items()
    ]


def _unseen_bytes(samples: tuple[Sample, ...]) -> list[Missing]:
    tree = samples[-1].tree if samples else NOT_ASKED
    if isinstance(tree, Unseen) or all(process.read_chars is not None for process in tree.members):
        return []
    return [Missing(source="bytes read", reason="the kernel shows them to the server's own user", helps=_PERMISSION)]


def _help_for(source: str, reason: str) -> str:
    """Return what would give a source, by why it was not seen; empty: nothing that is known would."""
    if _is_permission(reason):
        return _PERMISSION
    if reason.startswith(MISSING.reason):
        return _INSTALL
    return _BUSY if source in _OF_THIS_MACHINE and _is_late(reason) else _HELPS.get(source, "")


def _is_late(reason: str) -> bool:
    """Only for advice, as below."""
    return "no answer within" in reason or "not answer within" in reason


def _is_permission(reason: str) -> bool:
    """Only for advice: nothing is decided by these words."""
    return any(word in reason.lower() for word in ("permi", "may not", "not allowed", "ptrace"))


def advice_for(look: Look, memory: Memory) -> tuple[str, ...]:
    """Return what a person does next."""
    verdict, server = look.verdict, look.server
    match verdict:
        case Stuck() if verdict.kind == "stopped":
            pids = " ".join(str(s.pid) for s in verdict.suspects if "stop" in s.note or s.note.startswith("state"))
            return (f"let it go on: kill -CONT {pids or server.pid}", *_ending(server))
        case Stuck() | Broken() | Expired():
            cures = _cures(verdict, server)
            general = (advice for advice in look.diagnosis.advice if not any(flag in advice for flag in cures))
            return (*general, *cures.values(), *(_FIND_OUT if cures else ()), *_ending(server))
        case Exited():
            return (f"it has ended: see the end of its log ({verdict.why})",)
        case Waiting():
            return (f"look at what it waits for ({verdict.why}), and look here again in a minute",)
        case Unclear() if not server.pid:
            return (
                "run this on the machine of the server, as its user or as root",
                "send one small request of your own",
            )
        case Unclear() if verdict.kind == "serving":
            return (_look_longer(look, memory), *_wanted(look))
        case Unclear():
            return ("look again in a minute: the same picture twice says more", *_wanted(look))
        case Moving():
            return ("wait: it moves. Look again when it has been silent for longer than you expect",)
        case Ready():
            return _when_ready(memory)


def _wanted(look: Look) -> list[str]:
    return ["give what could not be seen (above)"] if any(missing.helps for missing in look.missing) else []


def _look_longer(look: Look, memory: Memory) -> str:
    """What proves a silence of a server with requests: a longer look, or a watch where a GPU is busy.

    A GPU that is busy may be in a long prefill, and what it draws with an idle context is not known from one look.
    """
    if look.seconds < LONG_LOOK:
        return "look longer, and ask it for a few tokens: hangguard diagnose --within 40 --canary"
    spinning = memory.boards.spinning
    busy = f"{spinning[0].name} is busy, in a long prefill or for ever: " if spinning else ""
    pid = look.server.pid
    return f"{busy}keep watching, which proves it after {SILENT_WITHOUT_GPUS:.0f} s of silence: hangguard attach {pid}"


def _when_ready(memory: Memory) -> tuple[str, ...]:
    health = memory.last.health if memory.last is not None else NOT_ASKED
    if isinstance(health, Reply) and health.state == "waiting":
        return ("its health route has not answered in this look: send one small request of your own",)
    return ("nothing points to a hang. If a request of yours does not end, look again while it is open",)


def _cures(verdict: Verdict, server: FoundServer) -> dict[str, str]:
    """Changes of the engine's own table that answer a hang in this phase, and apply to this command, by flag."""
    cures: dict[str, str] = {}
    for fallback in permitted("any", server.engine.fallbacks if not verdict.left_locks else ()):
        changed, how = changed_by(fallback, server.launch) if verdict.phase in fallback.answers else (None, "")
        if changed is not None:
            change = how.removeprefix("+ ")
            cures[change] = f"start it again with {change} (alters {fallback.alters}: {fallback.cost})"
    return cures


def _ending(server: FoundServer) -> list[str]:
    if not server.pid:
        return []
    return [f"nothing of it was touched. To end it: kill {server.pid}, and look that its GPU memory is free afterwards"]


def newest_stacks(samples: Iterable[Sample]) -> tuple[Stack, ...] | Unseen:
    """Return the stacks that were taken last, or why there are none."""
    found: tuple[Stack, ...] | Unseen = Unseen("none were taken")
    for sample in samples:
        if sample.stacks != NOT_ASKED:
            found = sample.stacks
    return found
