"""The ranks beside one another: groups, the odd one, and what the log tells of single ranks."""

from dataclasses import replace

import pytest
from making import BUSY, Member, Story, first, frames, rules, watch

from hangguard.facts import Communicator, Unseen
from hangguard.judge.ranks import Said, by_nccl, groups, note_said, prefix_tree, rank_of, standings

API, TRACKER = Story().members[:2]
LOADED_AT = 1022.0
BARRIER = ("barrier torch/distributed/distributed_c10d.py", "load_model runner.py", "main worker.py")
READS = ("acquire lock.py", "read_shard loader.py", "load_model runner.py", "main worker.py")


def rank(n, *at, title="ENGINE::Worker_TP{n}"):
    return Member(110 + n, title.format(n=n), 100, 40, frames(*at))


def told(*ranks, lines=()) -> Story:
    return Story(members=(API, TRACKER, *ranks)).goes(22, **BUSY, lines=lines).goes(30)


@pytest.mark.parametrize(
    ("title", "named"),
    [
        ("VLLM::Worker_TP1", "TP1"),
        ("VLLM::Worker_DP0_TP1_EP1", "DP0 TP1 EP1"),
        ("VLLM::EngineCore_DP3", "DP3"),
        ("sglang::scheduler_DP1_PP0_TP3_EP2", "DP1 PP0 TP3 EP2"),
        ("VLLM::Worker", ""),
        ("vllm serve M --tp 8 TP1", ""),
        ("python3", ""),
        ("sglang::scheduler_HTTP2", ""),
    ],
)
def test_a_title_names_its_rank(title, named):
    assert rank_of(title) == named


def test_the_one_that_does_not_wait_for_a_peer_is_the_first_suspect_and_the_note_says_why():
    verdict = first(watch(told(*(rank(n, *BARRIER) for n in (0, 1, 3)), rank(2, *READS)).samples), "stuck").verdict
    assert [s.rank for s in verdict.suspects] == ["TP2", "TP0", "TP1", "TP3"]
    assert "TP0, TP1, TP3 wait for a peer in barrier" in verdict.suspects[0].note
    assert "[not where the others are" in str(verdict.suspects[0])


SYNC = ("synchronize torch/cuda/__init__.py", "warm_up runner.py", "main worker.py")


def test_the_one_that_does_not_wait_for_the_gpu_is_the_first_suspect_also_of_two():
    """With NCCL the host waits for the kernel of the collective, not in the collective itself."""
    late = ("acquire lock.py", "warm_up runner.py", "main worker.py")
    verdict = first(watch(told(rank(0, *SYNC), rank(1, *late)).samples), "stuck").verdict
    assert [s.rank for s in verdict.suspects] == ["TP1", "TP0"]
    assert "TP0 wait for the GPU in synchronize" in verdict.suspects[0].note
    assert verdict.suspects[1].note != verdict.suspects[0].note


@pytest.mark.parametrize("at", [("dequeue vllm/shm_broadcast.py", "main worker.py"), SYNC], ids=["message", "kernel"])
def test_a_rank_that_has_nothing_to_do_or_waits_for_the_gpu_too_is_not_the_odd_one(at):
    by = rules()
    message = replace(by.wait_sites[0], function="dequeue", file="shm_broadcast.py", waits_for="message")
    by = replace(by, wait_sites=(message, *by.wait_sites))
    verdict = first(watch(told(rank(0, *SYNC), rank(1, *at)).samples, by), "stuck").verdict
    assert "not where the others are" not in str(verdict.suspects)
    assert verdict.suspects[0].rank == "TP0"


SPUN = ("synchronize torch/cuda/__init__.py", "spin runner.py", "warm_up runner.py", "main worker.py")
TOLD = Communicator(name="0x1", size=2, behind_ranks=(1,), counts=((0, 11), (1, 10)), pids=((0, 110), (1, 111)))


@pytest.mark.parametrize("there", [SPUN, SYNC], ids=["another place", "the same place"])
def test_of_hosts_that_all_wait_for_the_gpu_the_one_that_nccl_names_comes_first(there):
    verdict = first(watch(told(rank(0, *SYNC), rank(1, *there)).samples), "stuck").verdict
    assert [s.rank for s in verdict.suspects] == ["TP0", "TP1"]
    found = by_nccl(verdict, (TOLD,))
    assert [s.rank for s in found.suspects] == ["TP1", "TP0"]
    assert found.suspects[0].note == "NCCL: it has launched fewer collectives than the others"


@pytest.mark.parametrize(
    "said", [Unseen("refused"), (), (replace(TOLD, behind_ranks=()),), (replace(TOLD, behind_ranks=(0, 1)),)],
    ids=["unseen", "no communicator", "even", "everybody"],
)  # fmt: skip
def test_where_nccl_names_nobody_the_order_stays(said):
    verdict = first(watch(told(rank(0, *SYNC), rank(1, *SPUN)).samples), "stuck").verdict
    assert by_nccl(verdict, said) == verdict


def test_what_was_seen_of_a_rank_goes_before_what_nccl_counts():
    verdict = first(watch(told(rank(0, *READS), rank(1, *BARRIER)).samples), "stuck").verdict
    assert verdict.suspects[0].rank == "TP0"
    assert by_nccl(verdict, (TOLD,)) == verdict


def test_a_minority_is_the_suspect_where_nobody_waits_for_a_peer():
    ranks = (*(rank(n, "acquire lock.py", "capture_model") for n in range(3)), rank(3, "acquire lock.py", "load_model"))
    verdict = first(watch(told(*ranks).samples), "stuck").verdict
    assert verdict.suspects[0].rank == "TP3"
    assert "alone here; TP0, TP1, TP2 stand in acquire (lock.py)" in verdict.suspects[0].note


def test_ranks_that_all_stand_at_one_place_keep_their_order_without_a_note():
    verdict = first(watch(told(*(rank(n, *BARRIER) for n in range(4))).samples), "stuck").verdict
    assert [(s.rank, s.note) for s in verdict.suspects] == [(f"TP{n}", "") for n in range(4)]


def test_two_ranks_in_different_places_are_told_so():
    ranks = (rank(0, *BARRIER), rank(1, "wait_until_ready shm_broadcast.py", "main worker.py"))
    by = rules()
    by = replace(
        by,
        wait_sites=(
            replace(by.wait_sites[0], function="wait_until_ready", file="shm_broadcast", waits_for="peers"),
            *by.wait_sites,
        ),
    )
    verdict = first(watch(told(*ranks).samples, by), "stuck").verdict
    assert {s.note for s in verdict.suspects} == {"another place than TP1", "another place than TP0"}


# ------------------------------------------------------------------------------------------- the prefix tree


def test_frames_that_a_group_shares_stand_once():
    story = told(*(rank(n, *BARRIER) for n in range(3)), rank(3, *READS))
    tree, stacks = story.samples[-1].tree, story.samples[-1].stacks
    members = standings(tree, rules(), stacks)
    assert [len(group) for group in groups(members)] == [3, 1]
    assert prefix_tree(members) == (
        "main (worker.py) > load_model (runner.py)",
        "  barrier (distributed_c10d.py)  <- TP0, TP1, TP2",
        "  read_shard (loader.py) > acquire (lock.py)  <- TP3",
    )


def test_many_ranks_and_deep_stacks_stay_short():
    deep = tuple(f"f{n} deep.py" for n in range(40))
    story = told(*(rank(n, *deep) for n in range(64)))
    (line,) = prefix_tree(standings(story.samples[-1].tree, rules(), story.samples[-1].stacks))
    assert "35 more" in line
    assert line.endswith("<- TP0 … TP63 (64)")


def test_a_member_whose_stack_is_unseen_is_said_so():
    story = told(rank(0, *BARRIER), replace(rank(1, *BARRIER), python=False))
    lines = prefix_tree(standings(story.samples[-1].tree, rules(), story.samples[-1].stacks))
    assert lines[-1] == "not seen: TP1"


# ---------------------------------------------------------------------------------------------- said in logs


@pytest.mark.parametrize(
    ("line", "last"),
    [
        ("(Worker_TP1 pid=812) INFO 11-29 Loading weights", ("TP1", "INFO 11-29 Loading weights")),
        ("(EngineCore_DP0 pid=700) INFO x", ("DP0", "INFO x")),
        ("[2026-04-11 10:11:12 DP0 TP1] Load weight begin.", ("DP0 TP1", "Load weight begin.")),
        ("[2026-04-11 10:11:12] server_args=ServerArgs(tp_size=2)", None),
        ("(APIServer pid=1) INFO TP1", None),
    ],
)
def test_lines_are_kept_by_rank(line, last):
    assert note_said(Said(), (line,), ()).last == ((last,) if last else ())


def nccl(pid, word):
    return f"host7:{pid}:{pid + 3} [0] NCCL INFO ncclCommInitRank comm 0x55 rank 0 nranks 2 commId 0x1 - Init {word}"


def test_a_rank_whose_nccl_init_never_completed_is_suspected():
    lines = (nccl(110, "START"), nccl(111, "START"), nccl(110, "COMPLETE"))
    verdict = first(watch(told(*(rank(n, *BARRIER) for n in range(2)), lines=lines).samples), "stuck").verdict
    assert (verdict.suspects[0].rank, verdict.suspects[0].note) == (
        "TP1", "NCCL: Init START without Init COMPLETE, which others have",
    )  # fmt: skip


def test_a_rank_that_never_began_its_nccl_init_is_suspected():
    lines = (nccl(110, "START"),)
    verdict = first(watch(told(*(rank(n, *BARRIER) for n in range(2)), lines=lines).samples), "stuck").verdict
    assert verdict.suspects[0].rank == "TP1"
    assert "has not begun an init" in verdict.suspects[0].note


def test_a_rank_whose_last_line_is_another_is_suspected():
    lines = tuple(f"(Worker_TP{n} pid={110 + n}) INFO Loading weights took {n}.5 seconds" for n in range(3))
    lines = (*lines, "(Worker_TP3 pid=113) INFO Starting to load model")
    verdict = first(watch(told(*(rank(n, *BARRIER) for n in range(4)), lines=lines).samples), "stuck").verdict
    assert verdict.suspects[0].rank == "TP3"
    assert "Starting to load model" in verdict.suspects[0].note
