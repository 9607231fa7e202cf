"""For each rule that can say stuck or broken: what it is for, and the nearest healthy thing, which it must not call so.

The table is held against the source: a rule that is not in it fails the first test.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
from making import BUSY, Member, first, seen, watch
from shaped import BARRIER, BATON, FIRST, GATHER, GROUP, IDLE, LOCK, STEP, STREAM, Served, Start, boards, by

from hangguard.facts import GpuFault, GpuHolder, LockFile, Unseen
from hangguard.judge import Memory, broken, serving, startup, waits

ALARMS = {"stuck", "broken"}
LOAD = "load_model vllm/v1/worker/gpu_model_runner.py"
CAPTURE = "capture_model vllm/v1/worker/gpu_model_runner.py"
REFUSED, HIDDEN, OFF = Unseen("operation not permitted"), Unseen("MIG"), Unseen("the metrics answer 404")
Tale = Callable[[], Sequence[Memory]]


@dataclass(frozen=True)
class Rule:
    """A rule with the story that it is for, and its nearest healthy neighbour."""

    by: str
    """The module and function that says it."""
    kind: str
    hangs: Tale
    healthy: Tale


def a_start(
    *at: str, seconds: float = 60, channel: str = "futex_do_wait", ranks: int = 1, then=None, made=None, **rates
) -> Tale:
    def tale():
        told = Start(ranks=ranks, count=ranks, **(made or {}))
        told.all_at(*at, channel=channel).goes(seconds, **rates)
        if then is not None:
            then(told)
        return watch(told.samples, by(ranks=ranks))

    return tale


def a_server(*at: str, seconds: int = 60, ranks: int = 1, engine: str = "vllm", then=None, **rates) -> Tale:
    def tale():
        server = Served(engine=engine, ranks=ranks, count=ranks).flows(15)
        server.goes(seconds, **{"running": 2, "at": at or STEP[engine], **rates})
        if then is not None:
            then(server)
        return server.memories

    return tale


# ------------------------------------------------------------------------------------------ starts


def stopped(state: str, seconds: float, **rates) -> Tale:
    def tale():
        told = Start().all_at(*LOCK, LOAD).stops(FIRST, state).goes(seconds, **rates)
        return watch(told.stops(FIRST, None).goes(8, **BUSY).samples, by())

    return tale


def ranks_in_a_barrier(second: str, **theirs) -> Tale:
    """Rank 0 burns a core in a barrier; rank 1 hangs as well, or still works."""

    def tale():
        told = Start(ranks=2, count=2, phase="graph-capture").all_at(*BARRIER, CAPTURE, channel="")
        cpu = {FIRST: 1.0, FIRST + 1: theirs.get("cpu", 0.0)}
        told.members = tuple(replace(m, cpu=cpu.get(m.pid, m.cpu)) for m in told.members)
        for n in range(20):
            told.moves_to(FIRST + 1, second.format(n), CAPTURE, channel=theirs.get("channel", "futex_do_wait")).goes(3)
        return watch(told.samples, by(ranks=2))

    return tale


def a_tuner_that_goes_round(*, moves: bool) -> Tale:
    def tale():
        told = Start(phase="dist-init")
        for n in range(60):
            told.all_at(f"pass_{n % 9 if moves else 0} tuner.py", "init_device worker.py", channel="").goes(3, cpu=1.0)
        return watch(told.samples, by())

    return tale


def a_kernel(**rates) -> Tale:
    return a_start(*STREAM, CAPTURE, channel="", made={"phase": "graph-capture"}, **rates)


def a_first_kernel_of(watts) -> Tale:
    """A kernel runs all the time on a board whose power cannot be read; the host stands still, or goes on."""

    def tale():
        told = Start(phase="dist-init")
        for n in range(70):
            at = (
                ("synchronize torch/cuda/streams.py", "init_device x")
                if watts == "stands"
                else (f"tune_{n} x.py", "init_device x")
            )
            told.all_at(*at, channel="").goes(3, percent=100.0, watts=HIDDEN, cpu=1.0)
        return watch(told.samples, by())

    return tale


def a_lock(**changes) -> Tale:
    lock = replace(LockFile(path="/c/lock", kind="presence", waiters=(FIRST,), age_seconds=4000.0), **changes)
    return a_start(*BATON, channel="hrtimer_nanosleep", seconds=150, made={"phase": "jit-compile", "locks": (lock,)})


# ---------------------------------------------------------------------------------------- serving


def stopped_server(seconds: int) -> Tale:
    def tale():
        server = Served(ranks=2, count=2).flows(15)
        server.story.stops(FIRST)
        server.goes(seconds, running=0, at=IDLE["vllm"])
        server.story.stops(FIRST, None)
        return server.goes(20, running=0).memories

    return tale


def a_rank_that_compiles(
    *, boards_at=(0.0, 122.0), compiles: bool, stacks: Unseen | None = None, seconds: int = 90
) -> Tale:
    """Rank 0 waits in a collective, with a hot core, for rank 1: that compiles in its own process, or hangs too."""

    def tale():
        server = Served(ranks=2, count=2).flows(15)
        server.story.members = tuple(
            replace(m, cpu=1.0) if m.pid in (FIRST, FIRST + 1) else m for m in server.story.members
        )
        for n in range(seconds // 3):
            server.story.moves_to(FIRST, *GATHER, *STEP["vllm"], channel="")
            other = (f"pass_{n % 5} triton/backends/nvidia/compiler.py",) if compiles else GATHER
            server.story.moves_to(FIRST + 1, *other, *STEP["vllm"], channel="")
            hide = {} if stacks is None else {"stacks": stacks}
            server.goes(3, running=2, percent=(boards_at[0], 0.0), watts=(boards_at[1], 122.0), **hide)
        return server.memories

    return tale


def hot_in_an_unknown_place(*, moves: bool) -> Tale:
    def tale():
        server = Served().flows(15)
        for n in range(50):
            place = f"advance_{n % 6 if moves else 0} grammar.py"
            server.goes(3, running=2, cpu=1.0, at=(place, *STEP["vllm"]), channel="")
        return server.memories

    return tale


def on_a_shared_board(*, moves: bool) -> Tale:
    """Somebody else works on the same board, so that its power says nothing of us."""

    def tale():
        server = Served().flows(15)
        (board,) = boards((70.0, 300.0))
        shared = replace(board, holders=(*board.holders, GpuHolder(pid=4711, used_bytes=1)))
        for n in range(130):
            place = f"layer_{n % 30 if moves else 0} model.py"
            server.goes(3, running=1, gpus=(shared,), at=(place, *STEP["vllm"]), channel="", cpu=0.0)
        return server.memories

    return tale


def a_test_request(**rates) -> Tale:
    return a_server(*LOCK, *STEP["vllm"], seconds=120, counters=OFF, clients=3, canary="waiting", **rates)


def tokens_now_and_then(server: Served) -> None:
    for _ in range(6):
        server.goes(1, running=2, tokens=2).goes(14, running=2)


# ----------------------------------------------------------------------------------------- broken


def a_fault(fault: GpuFault, *, moves: bool, ours: bool = True) -> Tale:
    def tale():
        told = Start()
        (board,) = boards((0.0, 122.0))
        holders = board.holders if ours else (GpuHolder(pid=4711, used_bytes=1),)
        other = replace(board, index=1, uuid="GPU-1", holders=holders, faults=(fault,))
        shown = (board, other)
        told.goes(40, gpus=shown, **(BUSY if moves else {}))
        return watch(told.samples, by())

    return tale


def in_the_driver(*stretches: tuple[float, str], moves: bool = False) -> Tale:
    def tale():
        told = Start().all_at(*LOCK, LOAD, channel="nvidia_ioctl")
        for seconds, state in stretches:
            told.goes(seconds, **({**BUSY, "states": state} if moves else {"states": state}))
        return watch(told.samples, by())

    return tale


def a_death(
    code, *, title: str | None = None, seconds: float = 40, replaced: bool = False, settled: float = 3.0
) -> Tale:
    """A member ends while the others stand in a collective."""

    def tale():
        told = Start(ranks=2, count=2).all_at(*GATHER, LOAD, channel="futex_do_wait")
        pid = FIRST + 1
        if title is not None:
            pid = 400
            told.gains(Member(pid, title, FIRST, 1, python=False, works=False)).goes(settled, **BUSY)
        told.loses(pid, code).goes(3, **BUSY)
        if replaced:
            told.gains(Member(500, "VLLM::Worker_TP1", 101, 40, told.members[-1].at))
        told.goes(seconds, **({"cpu": 1.0, "faults": 300.0} if title is not None or replaced else {}))
        return watch(told.samples, by(ranks=2))

    return tale


def a_child_between_fork_and_exec() -> Sequence[Memory]:
    """A probe for a compiler that is not there: it bears its parent's title, is seen once, and ends with 255."""
    told = Start(ranks=2, count=2)
    told.gains(Member(400, "VLLM::Worker_TP0", FIRST, 1, python=False, works=False)).goes(1, **BUSY).loses(400, 255)
    told.goes(20, **BUSY)
    told.all_at(*STREAM, LOAD, channel="folio_wait_bit_common").goes(60, states="DS")
    return watch(told.samples, by(ranks=2))


LOST, ROW = GpuFault(kind="lost", at=1005.0), GpuFault(kind="xid", code=63, at=1005.0)
PROGRAM = GpuFault(kind="xid", code=31, at=1005.0, by_program=True)

RULES = {
    "a stopped member": Rule("startup._stopped", "stopped", stopped("T", 30), stopped("T", 8)),
    "nothing moves, stacks agree": Rule("startup._idle", "idle", a_start(*LOCK, LOAD),
                                        a_start(*LOCK, LOAD, channel="hrtimer_nanosleep", seconds=110)),
    "nothing moves, without stacks": Rule("startup._idle", "idle", a_start(*LOCK, LOAD, seconds=140, stacks=REFUSED),
                                          a_start(*LOCK, LOAD, seconds=900, stacks=REFUSED, states="DS")),
    "hot in a known wait": Rule("startup._hot", "hot", ranks_in_a_barrier("wait threading.py"),
                                ranks_in_a_barrier("make_{} triton/backends/nvidia/compiler.py", cpu=1.0, channel="")),
    "hot in an unknown place": Rule("startup._hot", "hot", a_tuner_that_goes_round(moves=False),
                                    a_tuner_that_goes_round(moves=True)),
    "a kernel that never ends": Rule("startup._busy", "busy", a_kernel(percent=100.0, watts=124.0, cpu=1.0),
                                     a_kernel(percent=100.0, watts=300.0, cpu=1.0)),
    "a kernel whose power is unseen": Rule("startup._busy", "busy", a_first_kernel_of("stands"),
                                           a_first_kernel_of("moves")),
    "a lock that was left behind": Rule("waits._stale", "idle", a_lock(), a_lock(owner=4711, owner_title="ninja")),
    "a stopped worker of a server": Rule("serving._stopped", "stopped", stopped_server(20), stopped_server(3)),
    "a worker outside its loop": Rule("serving._proof", "serving", a_server(*LOCK, *STEP["vllm"]),
                                      a_server(*LOCK, *STEP["vllm"], seconds=15, then=tokens_now_and_then)),
    "a collective that never ends": Rule("serving._proof", "serving", a_rank_that_compiles(compiles=False),
                                         a_rank_that_compiles(compiles=True, seconds=240)),
    "a hot worker beside idle boards": Rule("serving._proof", "serving", hot_in_an_unknown_place(moves=False),
                                            hot_in_an_unknown_place(moves=True)),
    "a worker outside its loop, boards unseen": Rule("serving._proof", "serving", on_a_shared_board(moves=False),
                                                     on_a_shared_board(moves=True)),
    "a board at its floor": Rule("serving._proof", "serving",
                                 a_server(percent=100.0, watts=124.0, stacks=REFUSED, seconds=80),
                                 a_rank_that_compiles(boards_at=(100.0, 124.0), compiles=True, seconds=240)),
    "a board at its floor, without stacks": Rule("serving._proof", "serving",
                                                 a_server(percent=100.0, watts=124.0, stacks=REFUSED, cpu=1.0,
                                                          seconds=140),
                                                 a_rank_that_compiles(boards_at=(100.0, 124.0), compiles=True,
                                                                      stacks=REFUSED, seconds=99)),
    "a test request without an answer": Rule("serving._proof", "serving", a_test_request(),
                                             a_test_request(percent=97.0, watts=420.0)),
    "no tokens, without stacks": Rule("serving._proof", "serving",
                                      a_server(*LOCK, *STEP["vllm"], seconds=140, stacks=REFUSED),
                                      a_server(*LOCK, *STEP["vllm"], seconds=400, stacks=REFUSED, percent=97.0,
                                               watts=420.0)),
    "a board that is lost": Rule("broken._hardware", "hardware", a_fault(LOST, moves=True),
                                 a_fault(LOST, moves=True, ours=False)),
    "a board that is worn, and nothing moves": Rule("broken._hardware", "hardware", a_fault(ROW, moves=False),
                                                    a_fault(ROW, moves=True)),
    "a fault that programs make": Rule("broken._hardware", "hardware", a_fault(LOST, moves=False),
                                       a_fault(PROGRAM, moves=True)),
    "a member in the driver": Rule("broken._wedged", "wedged", in_the_driver((60, "D")),
                                   in_the_driver((20, "D"), (3, "R"), (20, "D"), (3, "R"), (20, "D"))),
    "a member in the driver that still works": Rule("broken._wedged", "wedged", in_the_driver((60, "DS")),
                                                    in_the_driver((60, "DS"), moves=True)),
    "a dead worker": Rule("broken._survivors", "survivors", a_death(-9), a_death(-9, replaced=True)),
    "a worker that died of a bad code": Rule("broken._survivors", "survivors", a_death(1),
                                             a_death(255, title="/usr/bin/cc1plus x.cpp")),
    "one that the engine names": Rule("broken._survivors", "survivors", a_death(Unseen("never told")),
                                      a_child_between_fork_and_exec),
}  # fmt: skip

SAYS = re.compile(r"(?<!def )\b_stuck\(|\bjudged\(\s*(?:Stuck|Broken)\b|\b_say\(Stuck")
HELPERS = {"startup._stuck", "serving._stuck"}


def rules_in_the_source() -> set[str]:
    """Every function of the judge that makes one of these verdicts."""
    found = set()
    for module in (startup, waits, serving, broken):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__ and SAYS.search(inspect.getsource(function)):
                found.add(f"{module.__name__.rsplit('.', 1)[1]}.{name}")
    return found - HELPERS


def test_every_rule_of_the_source_has_its_look_alike():
    # What serving._hung says is decided in serving._proof.
    in_table = {rule.by for rule in RULES.values()}
    in_source = {name.replace("_hung", "_proof") for name in rules_in_the_source()}
    assert not [name for name in in_source if not name.startswith(tuple(in_table))]
    assert not [name for name in in_table if not any(other.startswith(name) for other in in_source)]


def test_every_proof_of_a_stall_has_its_look_alike():
    proofs = len(re.findall(r"^ +return .+, \"(?:high|medium)\", .+$", inspect.getsource(serving._proof), re.MULTILINE))
    assert proofs >= 5
    assert sum(rule.by == "serving._proof" for rule in RULES.values()) >= proofs


@pytest.mark.parametrize("name", RULES)
def test_what_a_rule_is_for_is_found(name):
    rule = RULES[name]
    memories = rule.hangs()
    alarms = [m.verdict for m in memories if m.verdict.verdict in ALARMS]
    assert alarms, seen(memories)
    assert alarms[0].kind == rule.kind, alarms[0].why


@pytest.mark.parametrize("name", RULES)
def test_the_nearest_healthy_thing_is_not_called_so(name):
    memories = RULES[name].healthy()
    alarm = first(memories, "stuck") or first(memories, "broken")
    assert alarm is None, alarm.verdict


def test_all_ranks_in_the_making_of_a_communicator_need_a_window_too():
    healthy = a_start(
        *GROUP, "init_device x", channel="", ranks=2, seconds=9, cpu=1.0, then=lambda told: told.goes(5, **BUSY)
    )
    assert seen(healthy()) == {"moving"}
