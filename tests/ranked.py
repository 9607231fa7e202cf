"""The server of several ranks (``gpu/programs/ranks_server.py``) under ``supervise``: what each fault must end in.

``RANKED`` is the engine that describes it, ``FAULTS`` the table of what must be said, ``tell`` runs one of them. What
was seen goes to the folder ``HANGGUARD_RECORD``: every sample (``two-all.jsonl.gz``) and one row a fault
(``two-rows.jsonl``; ``gpu/test_tensor_parallel.py`` keeps another series there). ``tests/gpu/keep_recording.py`` makes
test data and a page of the documentation of both.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from tenacity import stop_after_attempt

from hangguard import GaveUp, Limits, Retry, supervise
from hangguard.engines import common
from hangguard.engines.base import Engine, Flags
from hangguard.engines.common import functions
from hangguard.facts import Attempt, IdlePlace, Marker, Request, StackMarker, Unseen
from hangguard.supervision.evidence import as_plain
from recording import taking

PROGRAM = Path(__file__).parent / "gpu" / "programs" / "ranks_server.py"
FROM = "tests/gpu/programs/ranks_server.py"
WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


def recognise(argv):
    """Return the index of the first argument that is the program's own."""
    return next((n + 1 for n, word in enumerate(argv) if word.endswith("ranks_server.py")), None)


RANKED = Engine(
    name="ranked",
    recognise=recognise,
    flags=Flags(tensor_parallel=("--ranks",)),
    markers=(
        Marker(pattern=r"server_args=", phase="import", source=FROM),
        Marker(pattern=r"Init torch distributed begin", phase="dist-init", source=FROM),
        Marker(pattern=r"Init torch distributed ends", phase="weights-load", gap=True, source=FROM),
        Marker(pattern=r"Load weight begin", phase="weights-load", source=FROM),
        Marker(pattern=r"Load weight end", phase="warm-up", gap=True, source=FROM),
        Marker(pattern=r"Warm-up begin", phase="warm-up", source=FROM),
        Marker(pattern=r"Capture cuda graph begin", phase="graph-capture", source=FROM),
        Marker(pattern=r"ready to roll!", phase="serving", source=FROM),
    ),
    noise=(common.ACCESS_LINE,),
    stack_markers=(
        StackMarker(function="init_torch_distributed", phase="dist-init"),
        StackMarker(function="load_model", phase="weights-load"),
        StackMarker(function="warm_up", phase="warm-up"),
        StackMarker(function="capture", phase="graph-capture"),
    ),
    front_end=(r"ranks_server\.py", common.TRACKER),
    workers=(r"^ranks::worker",),
    idle_places=(IdlePlace(loop="event_loop", inside=functions("receive"), source=FROM),),
    health_path="/health",
    ready=lambda _launch: Request(
        method="POST", path="/v1/completions", body='{"prompt": "hello"}', proof=("choices.0.text",)
    ),
)


@dataclass(frozen=True)
class Fault:
    """One fault, and what must be said of it."""

    option: str
    """What the program is told; ``loop``: somebody stops or kills a rank that is in a collective."""
    verdict: str
    kinds: tuple[str, ...]
    """The first is that on GPUs, the last that on CPUs."""
    phase: str
    names_rank: bool = True
    """Whether one rank is at fault, which must be the first suspect."""
    signal: int | None = None
    beside: bool = False
    """On GPUs: run beside a neighbour on the first of them, whose presence hides that board's counters."""


FAULTS = {
    "deadlock": Fault("deadlock", "stuck", ("idle",), "graph-capture", names_rank=False, beside=True),
    "late": Fault("late", "stuck", ("hot", "idle"), "dist-init", beside=True),
    "killed": Fault("loop", "broken", ("survivors",), "warm-up", signal=signal.SIGKILL, beside=True),
    "absent": Fault("absent", "stuck", ("busy", "idle"), "warm-up"),
    "stopped": Fault("loop", "stuck", ("stopped",), "warm-up", signal=signal.SIGSTOP),
    # Stacks cannot tell whose kernel it is: all ranks wait for one.
    "spin": Fault("spin", "stuck", ("busy",), "warm-up", names_rank=False),
}


@dataclass
class Story:
    """One fault as it was told and seen."""

    name: str
    events: list[object] = field(default_factory=list)
    samples: list[object] = field(default_factory=list)
    attempt: Attempt | None = None
    fault_at: float | None = None
    text: str = ""
    answers: list[str] = field(default_factory=list)
    """What a healthy server said, asked twice."""
    answered_at: float | None = None
    series: str = "two"
    """What the names of the files begin with in which it is kept."""

    def verdicts(self):
        return [event.verdict for event in self.events if event.event == "verdict"]


def command(python=sys.executable, **options):
    """Return the command line; options with underscores as in Python."""
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return [str(python), str(PROGRAM), "--port", "{port}", *words]


@contextmanager
def recorded(story):
    """Keep every sample that is taken meanwhile."""
    try:
        with taking(story.samples):
            yield
    finally:
        write_samples(story)


def tell(name, *, folder, python=sys.executable, ranks, rank=None, limits=None, **options):
    """Run one fault (``healthy``: none) to its end, and return the story."""
    fault, story = FAULTS.get(name), Story(name)
    rank = ranks - 1 if rank is None else rank
    words = command(python, ranks=ranks, fault=fault.option if fault else "", fault_rank=rank, **options)
    made = supervise(
        words,
        engine=RANKED,
        env={**os.environ, **WITHOUT_MULTICAST},
        run_dir=folder,
        limits=limits or Limits(ready_within=90, stop_grace=2),
        retry=Retry(stop=stop_after_attempt(1)),
        hooks=[story.events.append],
    )
    over = threading.Event()
    harm = threading.Thread(target=_harm, args=(story, fault, made, ranks, rank, over), daemon=True)
    with recorded(story):
        if fault is not None and fault.signal is not None:
            harm.start()
        try:
            with made as server:
                story.answers = [ask(server.url) for _ in range(2)]
                story.answered_at = server.sample().t
        except GaveUp as gave_up:
            story.text = str(gave_up)
        finally:
            over.set()
    story.attempt = made.history[-1]
    return story


def ask(url):
    """Return the text of a completion: the sum of every rank."""
    reply = httpx.post(f"{url}/v1/completions", json={"prompt": "hello"}, timeout=30, trust_env=False)
    return reply.json()["choices"][0]["text"]


def _harm(story, fault, made, ranks, rank, over):
    """Once all ranks loop in collectives, send one of them the signal: it is the child that its line names."""
    while not over.wait(0.2):
        log = made.log_path(1)
        text = Path(log).read_text(errors="replace") if log and os.path.exists(log) else ""
        found = dict(re.findall(r" TP(\d+)\] Warm-up: \d+ rounds, pid=(\d+)", text))
        if len(found) == ranks and not over.wait(2.0):
            story.fault_at = time.monotonic()
            os.kill(int(found[str(rank)]), fault.signal)
            return


# --------------------------------------------------------------------------------------------- what must be said


def must_be_said(story, *, rank, on_gpu):
    """The verdict, its kind and phase; the rank that is at fault first; the release."""
    fault, verdict = FAULTS[story.name], story.attempt.verdict
    kind = fault.kinds[0 if on_gpu else -1]
    said = f"{verdict}\n{story.text}"
    assert (verdict.verdict, verdict.kind, verdict.phase) == (fault.verdict, kind, fault.phase), said
    if fault.names_rank:
        first = verdict.suspects[0]
        assert first.title == f"ranks::worker_TP{rank}", said
    assert not [v for v in story.verdicts()[:-1] if v.verdict in {"stuck", "broken", "expired", "exited"}], said
    assert story.attempt.release.answer == "released", story.attempt.release
    assert story.attempt.release.left_behind == ()


def must_be_healthy(story, *, ranks):
    """Ready, nothing else than moving on the way, two answers of all ranks, and released."""
    assert story.attempt is not None
    assert {v.verdict for v in story.verdicts()} <= {"moving", "ready"}, [str(v) for v in story.verdicts()]
    assert story.attempt.was_ready
    assert story.answers == [" ".join([str(ranks)] * ranks)] * 2
    assert story.attempt.release.answer == "released", story.attempt.release


def seconds_to_verdict(story):
    """Return the seconds from the last movement, or from the signal, to the verdict."""
    return story.attempt.settled_at - (story.fault_at or story.attempt.last_movement_at)


# ------------------------------------------------------------------------------------------------ what is kept


def row_of(story, **more):
    """Return what the table of the documentation shows of one story, as plain values."""
    attempt = story.attempt
    verdict, settled = attempt.verdict, attempt.settled_at
    looks = [s for s in story.samples if s.t <= settled + 0.01 and not isinstance(s.gpus, Unseen)]
    asked = [s.communicators for s in story.samples if _asked(s.communicators)]
    suspects = [{"rank": s.rank, "title": s.title, "note": s.note, "at": s.at[:3]} for s in _suspects(verdict)]
    told = asked[-1] if asked else Unseen("NCCL was not asked")
    return {
        "scenario": story.name,
        "settled_at": settled,
        "verdict": verdict.verdict,
        "kind": verdict.kind,
        "phase": verdict.phase,
        "confidence": verdict.confidence,
        "why": verdict.why,
        "suspects": suspects[:8],
        "unseen": list(verdict.unseen),
        "seconds_from_last_movement": round(settled - attempt.last_movement_at, 1),
        "seconds_unproductive": round(verdict.still_for, 1),
        "seconds_from_signal": None if story.fault_at is None else round(settled - story.fault_at, 1),
        "seconds_from_spawn": round(settled - attempt.started_at, 1),
        "nccl": as_plain(told),
        "nccl_names": _named_by_nccl(told),
        "nccl_while_starting": sorted({s.communicators.reason for s in story.samples if _refused(s.communicators)}),
        "gpus": [
            {"index": g.index, "watts": as_plain(g.power_watts), "percent": as_plain(g.utilization_percent)}
            for g in (looks[-1].gpus if looks else ())
        ],
        "release": as_plain(attempt.release) if attempt.release else None,
        "shm_left": list(attempt.release.unattributed_files) if attempt.release else [],
        "verdicts": [f"{v.verdict} {v.kind}".strip() for v in story.verdicts()],
        "numbers": [str(number) for number in verdict.numbers],
        **more,
    }


def keep(story, **more):
    """Add the row of a story to the record; return it."""
    row = row_of(story, **more)
    if folder := os.environ.get("HANGGUARD_RECORD"):
        with open(os.path.join(folder, f"{story.series}-rows.jsonl"), "a") as out:
            out.write(json.dumps(row) + "\n")
    return row


def write_samples(story):
    """Add the samples of a story to the record, if there is one."""
    if folder := os.environ.get("HANGGUARD_RECORD"):
        with gzip.open(
            os.path.join(folder, f"{story.series}-all.jsonl.gz"), "at"
        ) as out:  # members of gzip may follow another
            for sample in story.samples:
                out.write(json.dumps({"scenario": story.name, **as_plain(sample)}) + "\n")


def _suspects(verdict):
    return getattr(verdict, "suspects", ())


def _asked(communicators):
    return not (isinstance(communicators, Unseen) and communicators.reason.startswith("not asked"))


def _refused(communicators):
    return isinstance(communicators, Unseen) and _asked(communicators)


def _named_by_nccl(told):
    """Return the ranks that NCCL names, by what it says of them."""
    if isinstance(told, Unseen):
        return {}
    names = ("missing_ranks", "uninitialised_ranks", "failed_ranks", "behind_ranks")
    found = {name: sorted({r for c in told for r in getattr(c, name)}) for name in names}
    return {name: ranks for name, ranks in found.items() if ranks}
