"""What will be seen of the server, and what each thing that is not costs: patience, or a proof."""

from __future__ import annotations

from collections.abc import Iterator

from hangguard.changes import has_flag
from hangguard.facts import Check, Permissions, Unseen
from hangguard.judge.checks.ground import Ground, unseen
from hangguard.judge.serving import SILENT_FOR, SILENT_WITHOUT_STACKS


def workers(ground: Ground) -> Iterator[Check]:
    """Whether the server runs below us at all."""
    delegate = ground.launch.delegates_to
    if delegate is not None:
        yield Check(
            what="workers",
            answer="missing",
            found=f"{delegate} starts them elsewhere",
            patience=ground.without_sight,
            loses="everything but its answers: nothing is called a hang",
            helps=next((note for note in ground.launch.notes if delegate in note), ""),
        )


def processes(ground: Ground) -> Iterator[Check]:
    """Whether the processes of others are seen. Those of the server are, as long as they stay this user's."""
    rights = ground.seen.permissions
    if isinstance(rights, Unseen):
        yield unseen(
            "processes",
            rights,
            patience=ground.without_sight,
            loses="every proof: nothing is called a hang",
            helps="mount -t proc proc /proc",
        )
    elif rights.hides_processes:
        yield Check(
            what="processes",
            answer="poor",
            found=f"/proc hides those of other users ({rights.hides_processes})",
            loses="who holds a port, a lock or a GPU, where that is another user; and a server that runs as another "
            "(sudo): nothing is called a hang then",
            helps="mount -o remount,hidepid=0 /proc",
        )
    else:
        yield Check(what="processes", answer="good", found="all of this machine, or of this container, are seen")


def stacks(ground: Ground) -> Iterator[Check]:
    """Whether it will be seen where each process stands: tried on the guardian, a child as the server will be."""
    trial, rights = ground.seen.guardian, ground.seen.permissions
    if isinstance(trial, Unseen):
        means = "whether they can be read was not tried, so the worst is reckoned with"
        yield unseen("stacks", trial, means=means, patience=ground.without_proof)
        return
    if trial.problem:
        return
    if isinstance(trial.stacks, Unseen):
        yield Check(
            what="stacks",
            answer="missing",
            found=trial.stacks.reason,
            patience=ground.without_proof,
            loses="in which function each process stands",
            helps=_how_to_trace(rights),
        )
    else:
        py_spy = "" if trial.py_spy else "; py-spy, which knows more Pythons, is not installed"
        yield Check(what="stacks", answer="good", found=f"those of a child of hangguard's can be read{py_spy}")


def _how_to_trace(rights: Permissions | Unseen) -> str:
    scope = None if isinstance(rights, Unseen) else rights.ptrace_scope
    if scope is not None and scope > 1:
        return f"sysctl kernel.yama.ptrace_scope=1 (it is {scope}{', until the next boot' if scope == 3 else ''})"
    return "docker run --cap-add SYS_PTRACE; or the server as the same user as hangguard"


def wait_channels(ground: Ground) -> Iterator[Check]:
    """Whether the kernel tells in which of its functions a process sleeps."""
    trial = ground.seen.guardian
    if isinstance(trial, Unseen) or trial.problem:
        return
    if isinstance(trial.wait_channel, Unseen) or not trial.wait_channel:
        reason = (
            trial.wait_channel.reason if isinstance(trial.wait_channel, Unseen) else "the kernel does not tell them"
        )
        yield Check(
            what="wait channels",
            answer="missing",
            found=reason,
            patience=ground.without_proof,
            loses="whether a process sleeps for a time, or until another one acts",
            # fs/proc/base.c, proc_pid_wchan: it needs what reading the stacks needs, and the names of functions.
            helps=_how_to_trace(ground.seen.permissions)
            if isinstance(trial.stacks, Unseen)
            else "a kernel with CONFIG_KALLSYMS, and no sandbox that hides /proc/PID/wchan",
        )
    else:
        yield Check(what="wait channels", answer="good", found=f"a sleeping child is in {trial.wait_channel}")


def pidfds(ground: Ground) -> Iterator[Check]:
    """Whether a process can be held by a descriptor, so that a pid that is used again is never signalled."""
    rights = ground.seen.permissions
    if isinstance(rights, Unseen):
        return
    if rights.has_pidfds:
        yield Check(what="pidfds", answer="good", found="the kernel has them")
    else:
        yield Check(
            what="pidfds",
            answer="missing",
            found="pidfd_open(2) is refused, or not there",
            means="signals are sent by pid, right after a look at the start time",
            loses="that a pid cannot have been used again in between; the exit code of an orphan",
            helps="Linux 5.3 or newer, and a seccomp profile that allows pidfd_open",
        )


def pressure(ground: Ground) -> Iterator[Check]:
    """Whether the kernel tells how long tasks waited for CPU and disk."""
    host = ground.seen.host
    if isinstance(host, Unseen):
        return
    if isinstance(host.cpu_stall_seconds, Unseen):
        yield Check(
            what="pressure",
            answer="missing",
            found=host.cpu_stall_seconds.reason,
            loses="that a starved machine, not the server, is the cause of a standstill",
            helps="kernel parameter psi=1",
        )
    else:
        yield Check(what="pressure", answer="good", found="the kernel counts waits for CPU and disk")


def counters(ground: Ground) -> Iterator[Check]:
    """Whether the server will count requests and tokens, which proves a hang while it serves."""
    engine, words = ground.engine, ground.words
    if not engine.metrics or not ground.launch.answers:
        return
    on, off = engine.metrics_on, engine.metrics_off
    if (on and not has_flag(words, on)) or (off and has_flag(words, off)):
        yield Check(
            what="request counters",
            answer="poor",
            found=engine.metrics_hint,
            means=f"a hang while it serves is found after up to {SILENT_WITHOUT_STACKS:.0f} s instead of "
            f"{SILENT_FOR:.0f} s, and sometimes by a request of hangguard's own",
            loses="how many requests wait, and whether tokens come out",
            helps=f"add {on}" if on else f"leave {off} out",
        )
    else:
        yield Check(what="request counters", answer="good", found=f"{engine.name} counts requests and tokens")
