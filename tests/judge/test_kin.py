"""Processes that begin and end: compilers and new kinds are news, a shell that polls beside a hang is none."""

import pytest
from asked import API, LOCKED, WORKER, Asked
from making import BUSY, CORE, SERVER, Member, Story, first, seen, watch

from hangguard.facts import Process, Tree
from hangguard.judge.kin import BEGAN, ENDED, Kin, read_kin

SHELL = Member(
    90, "bash -c 'server & until curl -sf localhost; do sleep 2; done'", 1, 1, python=False, works=False, name="bash"
)
LOCK = ("acquire lock.py", "capture_model runner.py")


def polls(number, name="sleep"):
    return Member(1000 + number, f"{name} 2", SHELL.pid, 1, python=False, works=False, cpu=0.0, name=name)


def beside_a_shell(told, rounds, **stretch):
    """Every two seconds a ``sleep`` ends and the next one begins; now and then it is nvidia-smi."""
    for number in range(rounds):
        child = polls(number, "nvidia-smi" if number % 10 == 5 else "sleep")
        told.gains(child).goes(2, **stretch)
        told.members = tuple(m for m in told.members if m.pid != child.pid)
    return told


def test_a_hang_beside_a_shell_that_polls_is_found_as_soon_as_without_it():
    told = Story(members=(SHELL, *SERVER)).goes(22, **BUSY)
    beside_a_shell(told.moves_to(CORE.pid, *LOCK), 40)
    alone = Story().goes(22, **BUSY).moves_to(CORE.pid, *LOCK).goes(40)
    found, expected = first(watch(told.samples), "stuck"), first(watch(alone.samples), "stuck")
    assert found.verdict.kind == expected.verdict.kind == "idle"
    assert found.now - expected.now <= 20.0, "only the first sleep and the first nvidia-smi are news"


def test_compilers_one_after_the_other_are_progress_though_all_are_of_one_kind():
    told = Story().goes(22, **BUSY)
    for number in range(60):
        compiler = Member(1000 + number, "/usr/lib/gcc/cc1plus -quiet x.cpp", CORE.pid, 1, python=False, cpu=0.0,
                          name="cc1plus")  # fmt: skip
        told.gains(compiler).goes(2)
        told.members = tuple(m for m in told.members if m.pid != compiler.pid)
    assert seen(watch(told.samples)) == {"moving"}


class TestServing:
    def test_a_hang_beside_a_shell_that_polls_is_found(self):
        server = Asked(story=Story(members=(SHELL, API, WORKER)))
        server.story.moves_to(102, *LOCKED)
        for number in range(30):
            child = polls(number, "nvidia-smi")
            server.story.gains(child)
            server.goes(2, running=4)
            server.story.members = tuple(m for m in server.story.members if m.pid != child.pid)
        assert server.first("stuck") is not None

    @pytest.mark.parametrize("parent", [102, 103], ids=["of a worker", "of a helper of a worker"])
    def test_children_of_a_worker_are_work_however_many_came_before(self, parent):
        server = Asked(story=Story(members=(API, WORKER, Member(103, "python pool.py", 102, 1, cpu=0.0))))
        server.story.moves_to(102, *LOCKED)
        for number in range(60):
            child = Member(1000 + number, "python step.py", parent, 1, python=False, cpu=0.0)
            server.story.gains(child)
            server.goes(2, running=4)
            server.story.members = tuple(m for m in server.story.members if m.pid != child.pid)
        assert server.seen() == {"ready"}


def tree(*members):
    return Tree(members=tuple(
        Process(pid=pid, started=pid, parent=parent, title=name, name=name, state="S", threads=1, cpu_seconds=0.0,
                reaped_cpu_seconds=0.0, minor_faults=0, major_faults=0, rss_bytes=0, read_chars=0, written_chars=0,
                disk_read_bytes=0)
        for pid, parent, name in members
    ))  # fmt: skip


def test_a_kind_is_news_when_it_begins_first_and_when_it_ends_first():
    told = []
    kin = Kin()
    for members in ([(1, 0, "a")], [(1, 0, "a"), (2, 1, "b")], [(1, 0, "a")], [(1, 0, "a"), (3, 1, "b")], [(1, 0, "a")],
                    [(1, 0, "a"), (4, 2, "b")]):  # fmt: skip
        kin, news = read_kin(kin, tree(*members))
        told.append(news)
    assert told == ["", BEGAN, ENDED, "", "", BEGAN]
    assert read_kin(kin.forget(), tree((1, 0, "a"), (4, 2, "b"), (5, 1, "b")))[1] == BEGAN
