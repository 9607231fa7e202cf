"""NCCL's own account: told only where it is ours and readable, and asked for only where that cannot harm."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from seen import PROGRAMS, launch, member, target, until_sync

from hangguard.facts import NOT_ASKED, Ask, Communicator, Tree, Unseen
from hangguard.observe import Shared
from hangguard.observe._nccl_members import version_of_nccl
from hangguard.observe._ras_answer import UnreadableError, read_json, read_text
from hangguard.observe.nccl_ras import CommunicatorsProbe
from hangguard.observe.procfs import read_stat

pytestmark = pytest.mark.anyio
RECORDED = Path(__file__).parent / "ras"
NAME = "5b0c1f7e2a94d3c8"
ASK, LAST = Ask(communicators=True), Ask(communicators=True, last=True)


class RasServer:
    """A real process that answers as NCCL does."""

    def __init__(self, answers, mode="speak", *, port=0, maps=None, pids=None, ipv6=False):
        argv = [sys.executable, str(PROGRAMS / "ras_server.py"), str(port), str(answers), mode]
        argv += ["--maps", str(maps)] if maps else []
        argv += ["--as", ",".join(map(str, pids))] if pids else []
        argv += ["--ipv6"] if ipv6 else []
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.port = int(self.process.stdout.readline())
        self.pid = self.process.pid

    def was_asked(self):
        """End it, and tell whether it was asked for its communicators."""
        self.process.stdin.close()
        return "asked" in self.process.stdout.read()

    def end(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def serve():
    with contextlib.ExitStack() as ending:

        def start(answers, mode="speak", **options):
            server = RasServer(RECORDED / answers, mode, **options)
            ending.callback(server.end)
            return server

        yield start


@pytest.fixture
def library(tmp_path):
    """A file that is loaded under the name of an NCCL of this version."""

    def make(version):
        path = tmp_path / f"libnccl.so.{version}"
        path.write_bytes(b"x" * 4096)
        return path

    return make


async def look(port, pids, ask=ASK, *, nodes=1, tree=None, address=None):
    shared = Shared(tasks=None)
    shared.tree = tree or Tree(members=tuple(member(pid) for pid in pids))
    probe = CommunicatorsProbe(target(given=launch(nodes=nodes), ras_address=address or ("127.0.0.1", port)), shared)
    began = time.monotonic()
    try:
        return await probe.look(ask)
    finally:
        await probe.aclose()
        assert time.monotonic() - began < 5.0


async def test_a_healthy_communicator_is_told_with_its_ranks(serve, library):
    server = serve("healthy", maps=library("2.29.7"))
    seen = await look(server.port, [server.pid])
    assert seen == (
        Communicator(name=NAME, size=2, counts=((0, 45), (1, 45)), pids=((0, server.pid), (1, server.pid))),
        Communicator(name="11aa22bb33cc44dd", size=1, counts=((0, 0),), pids=((0, server.pid),)),
    )


async def test_it_is_asked_only_when_asked_for(serve, library):
    server = serve("healthy", maps=library("2.29.7"))
    assert await look(server.port, [server.pid], Ask(stacks=True)) == NOT_ASKED
    assert not server.was_asked()


@pytest.mark.parametrize(
    ("answers", "what"),
    [
        ("missing", {"missing_ranks": (1,), "counts": ((0, 45),)}),
        ("missing-2.28.9", {"missing_ranks": (1,), "counts": ((0, 45),)}),  # its JSON lacks a comma
        ("mismatch", {"behind_ranks": (1,), "counts": ((0, 46), (1, 45))}),
        ("failed", {"failed_ranks": (0, 1), "counts": ((0, 45), (1, 45))}),
    ],
)
async def test_what_is_out_of_order_is_told_by_rank(serve, library, answers, what):
    server = serve(answers, maps=library("2.29.7"))
    (seen,) = await look(server.port, [server.pid])
    assert seen == Communicator(name=NAME, size=2, pids=((0, server.pid), (1, server.pid)), **what)


async def test_a_communicator_that_is_still_made_is_told(serve, library):
    server = serve("init", maps=library("2.30.7"))
    ready, made = await look(server.port, [server.pid])  # a third has not even a size yet
    assert ready.uninitialised_ranks == ()
    assert (made.size, made.uninitialised_ranks) == (2, (0, 1))


async def test_no_communicator_is_seen_not_unseen(serve, library):
    server = serve("none", maps=library("2.29.7"))
    assert await look(server.port, [server.pid]) == ()


async def test_an_older_nccl_answers_in_text(serve, library):
    server = serve("healthy-text-only", maps=library("2.27.7"))
    assert isinstance(await look(server.port, [server.pid], LAST), Unseen)  # no answer at all: nothing is made up
    server = serve("init-one", maps=library("2.27.7"))
    (seen,) = await look(server.port, [server.pid], LAST)
    assert seen == Communicator(name=NAME, size=2, uninitialised_ranks=(0,), pids=((0, server.pid), (1, server.pid)))


async def test_malformed_json_is_asked_again_as_text(serve, tmp_path, library):
    (tmp_path / "answer.json").write_text((RECORDED / "malformed.json").read_text())
    (tmp_path / "answer.txt").write_text((RECORDED / "mismatch.txt").read_text())
    server = serve(tmp_path / "answer", maps=library("2.28.9"))
    seen = await look(server.port, [server.pid], LAST)
    assert (seen[0].name, seen[0].behind_ranks) == (NAME, (1,))


async def test_malformed_json_and_no_text_is_unseen(serve, library):
    server = serve("malformed", maps=library("2.29.7"))
    seen = await look(server.port, [server.pid])
    assert isinstance(seen, Unseen)
    assert seen.reason.startswith("the answer of NCCL cannot be read: ")


@pytest.mark.parametrize("version", ["2.26.2", "2.28.9", None])
async def test_an_nccl_that_a_question_may_crash_is_asked_in_the_last_look_only(serve, library, version):
    maps = library(version) if version else None
    server = serve("healthy", maps=maps)
    seen = await look(server.port, [server.pid])
    assert seen == Unseen(
        f"says hello; not asked more, because a question may crash NCCL {version or 'of unknown version'} "
        "(safe from 2.29.2 on)"
    )
    assert not server.was_asked()
    server = serve("healthy", maps=maps)
    assert len(await look(server.port, [server.pid], LAST)) == 2
    assert server.was_asked()


async def test_refused_says_that_there_is_no_communicator_yet(serve):
    server = serve("healthy")
    server.end()
    seen = await look(server.port, [os.getpid()])
    assert isinstance(seen, Unseen)
    assert seen.reason.startswith("refused: there is no communicator yet")


@pytest.mark.parametrize("ipv6", [False, True])
async def test_localhost_is_either_address(serve, library, ipv6):
    server = serve("healthy", maps=library("2.29.7"), ipv6=ipv6)
    assert len(await look(0, [server.pid], address=("localhost", server.port))) == 2
    server.end()
    assert "refused" in (await look(0, [os.getpid()], address=("localhost", server.port))).reason


async def test_a_stopped_process_accepts_and_never_answers(serve, library):
    server = serve("healthy", maps=library("2.29.7"))
    os.kill(server.pid, signal.SIGSTOP)
    until_sync(lambda: read_stat(f"/proc/{server.pid}/stat").state == "T")
    assert await look(server.port, [server.pid]) == Unseen(
        f"accepts and never answers: the process that listens is stopped (pid {server.pid})"
    )
    os.kill(server.pid, signal.SIGCONT)
    assert len(await look(server.port, [server.pid])) == 2


async def test_a_silent_process_that_runs_is_not_called_stopped_for_sure(serve):
    server = serve("healthy", "silent")
    seen = await look(server.port, [server.pid])
    assert seen == Unseen("accepts and never answers: the process that listens is stopped, or its RAS thread hangs")


async def test_another_rank_is_tried_when_one_is_stopped(serve, library):
    """All ranks listen on one port, and the kernel chooses: with one of two stopped, three tries as a rule do."""
    first = serve("healthy", maps=library("2.29.7"))
    second = serve("healthy", port=first.port, maps=library("2.29.7"))
    os.kill(second.pid, signal.SIGSTOP)
    for _ in range(8):
        seen = await look(first.port, [first.pid, second.pid])
        if not isinstance(seen, Unseen):
            break
    assert len(seen) == 2


async def test_a_question_without_an_answer_says_so(serve, library):
    server = serve("healthy", "hello", maps=library("2.29.7"))
    assert await look(server.port, [server.pid]) == Unseen(
        "NCCL accepted the question, and has no answer of all its processes in time"
    )


@pytest.mark.long
async def test_an_endless_answer_ends_at_the_deadline(serve, library):
    server = serve("healthy", "drip", maps=library("2.29.7"))
    assert isinstance(await look(server.port, [server.pid]), Unseen)


async def test_another_server_on_the_port_is_not_nccl(serve):
    server = serve("healthy", "nonsense")
    seen = await look(server.port, [server.pid])
    assert isinstance(seen, Unseen)
    assert "is not answered by NCCL" in seen.reason


async def test_the_nccl_of_another_launch_is_not_believed(serve, library):
    """The same default port, the same user: the process at the other end is no member."""
    stranger = serve("healthy", maps=library("2.29.7"))
    ours = serve("healthy", maps=library("2.29.8"))
    seen = await look(stranger.port, [ours.pid])
    assert seen == Unseen(f"port {stranger.port} answers for other processes")
    assert not stranger.was_asked()


async def test_an_answer_about_other_processes_is_not_believed(serve, library):
    server = serve("healthy", maps=library("2.29.7"), pids=(4_000_001, 4_000_002))
    assert await look(server.port, [server.pid]) == Unseen("answers for other processes: pid 4000001, 4000002")


async def test_ranks_on_other_machines_are_believed_beside_ours(serve, library):
    server = serve("mismatch", maps=library("2.29.7"), pids=(4_000_001, os.getpid()))
    assert isinstance(await look(server.port, [server.pid, os.getpid()]), Unseen)
    (seen,) = await look(server.port, [server.pid, os.getpid()], nodes=2)
    assert seen.behind_ranks == (1,)


async def test_without_an_address_or_members_nobody_is_asked():
    probe = CommunicatorsProbe(target(), Shared(tasks=None))
    assert await probe.look(ASK) == Unseen("this launch was given no NCCL_RAS_ADDR of its own")
    await probe.aclose()
    seen = await look(1, [], tree=Unseen("no"))
    assert seen == Unseen("the members are unseen: no")
    seen = await look(1, [os.getpid()], address=("a.name.example", 1))
    assert seen == Unseen("NCCL_RAS_ADDR is neither a numeric address nor localhost: a.name.example")


def read_recorded(name):
    return read_text((RECORDED / name).read_text().replace("@0@", "100").replace("@1@", "101"))


BOTH = ((0, 100), (1, 101))


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("healthy.txt", [Communicator(name="#0-0", size=2), Communicator(name="#0-1", size=2)]),
        ("missing.txt", [Communicator(name=NAME, size=2, missing_ranks=(1,), pids=((1, 101),))]),
        (
            "mismatch.txt",
            [
                Communicator(name=NAME, size=2, behind_ranks=(1,), counts=((0, 41), (1, 0)), pids=BOTH),
                Communicator(name="#1-0", size=2),
            ],
        ),
        (
            "mismatch-8.txt",
            [
                Communicator(
                    name=NAME, size=8, behind_ranks=(5,), pids=((5, 101),),
                    counts=tuple((rank, 640 if rank == 5 else 641) for rank in range(8)),
                )
            ],
        ),
        (
            "mismatch-several.txt",
            [
                Communicator(
                    name=NAME, size=8, behind_ranks=(2, 6), pids=((2, 100), (6, 101)),
                    counts=tuple((rank, 0 if rank in {2, 6} else 7) for rank in range(8)),
                )
            ],
        ),
        (
            "init.txt",
            [Communicator(name="#0-0", size=2, uninitialised_ranks=(0, 1)), Communicator(name="#1-0", size=2)],
        ),
        ("init-one.txt", [Communicator(name=NAME, size=2, uninitialised_ranks=(0,), pids=BOTH)]),
        (
            "left-2.24.txt",
            [
                Communicator(
                    name=NAME, size=4, missing_ranks=(2, 3), behind_ranks=(1,), counts=((0, 12), (1, 11)), pids=BOTH
                )
            ],
        ),
        ("failed.txt", [Communicator(name=NAME, size=2, failed_ranks=(1,), pids=((1, 101),))]),
        ("none.txt", []),
    ],
)  # fmt: skip
def test_the_report_for_people_is_read(name, seen):
    assert list(read_recorded(name)) == seen


def test_a_report_that_does_not_say_which_ranks_differ_is_no_answer():
    """Half of the ranks is no outlier for NCCL, so none is named; "none behind" would be wrong."""
    with pytest.raises(UnreadableError, match="does not say which 4 ranks differ"):
        read_recorded("mismatch-halves.txt")


@pytest.mark.parametrize("name", ["healthy.txt", "missing.txt", "mismatch.txt", "mismatch-several.txt"])
def test_a_report_cut_short_is_never_read_as_better_than_it_is(name):
    whole = (RECORDED / name).read_text()
    problems = [bool(c.missing_ranks or c.behind_ranks) for c in read_recorded(name)]
    for end in range(0, whole.index("Warnings"), 7):
        with pytest.raises(UnreadableError):
            read_text(whole[:end])
    assert any(problems) is (name != "healthy.txt")


@pytest.mark.parametrize("name", ["healthy", "missing", "mismatch", "init", "failed"])
def test_json_cut_short_or_of_another_form_is_no_answer(name):
    whole = (RECORDED / f"{name}.json").read_text().replace("@0@", "100").replace("@1@", "101")
    assert read_json(whole)
    for end in range(0, len(whole) - 2, 11):
        with pytest.raises(UnreadableError):
            read_json(whole[:end])
    for broken in (
        whole.replace('"rank"', '"rang"'),
        whole.replace('"collective_counts": {', '"collective_counts": [1], "x": {'),
        whole.replace('"pid": 100', '"pid": null'),
        whole.replace('"ranks": [', '"ranks": 5, "x": ['),
        "[]",
        "null",
        "{",
        '{"communicators": 3}',
        '{"communicators": [null]}',
        "[" * 100_000,
    ):
        with pytest.raises(UnreadableError):
            read_json(broken)


def test_the_version_of_a_wheel_is_read_from_its_folder(tmp_path, serve):
    site = tmp_path / "site-packages"
    (site / "nvidia" / "nccl" / "lib").mkdir(parents=True)
    library = site / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    library.write_bytes(b"x" * 4096)
    (site / "nvidia_nccl_cu13-2.29.3.dist-info").mkdir()
    new = serve("healthy", maps=library)
    assert version_of_nccl("/proc", [member(new.pid)]) == (2, 29, 3)
    (site / "nvidia_nccl_cu12-2.21.5.dist-info").mkdir()  # two wheels write into one folder: which one, nobody knows
    assert version_of_nccl("/proc", [member(new.pid)]) is None


def test_the_oldest_nccl_of_all_members_counts(serve, library):
    old, new = serve("healthy", maps=library("2.28.9")), serve("healthy", maps=library("2.30.7"))
    assert version_of_nccl("/proc", [member(new.pid), member(old.pid)]) == (2, 28, 9)
    assert version_of_nccl("/proc", [member(os.getpid())]) is None
