"""The real vLLM with two tensor-parallel ranks: which of them is named when one stops, dies, spins, locks or is late.

A healthy start is V15, a start in which a rank never comes V9 (test_full_vllm.py). The ranks meet in gloo while they
start, and in the shared memory of vLLM's own all-reduce in every step: who waits there burns a core. With
``HANGGUARD_RECORD=tests/judge/data`` the samples are kept, which tests/judge/test_vllm_ranks.py judges again.
"""

import pytest
from real_engines import vllm_command, vllm_environment
from real_watch import must_agree, must_hang, title_of, watched

import recording

pytestmark = [pytest.mark.full, pytest.mark.anyio, pytest.mark.timeout(1500, func_only=True)]

EAGER = "--enforce-eager"
TWO_RANKS = ("--tensor-parallel-size", "2")
TWO_CORES = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
WORKERS = ("VLLM::Worker_TP0", "VLLM::Worker_TP1")
CLIENTS = 4
SERVING_WITHIN = 30.0
"""Seconds from the last movement to the verdict, with a request in flight: what the README promises."""


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def vllm(vllm_env, tiny_llama, tmp_path):
    """Start the real vLLM with two ranks under a watch, which keeps its samples under a name."""

    def start(name, *options, fault=None, watch=None, **variables):
        env = vllm_environment(cache_dir=tmp_path / "cache", fault=fault, fault_env=variables) | TWO_CORES
        command = vllm_command(vllm_env, tiny_llama, "{port}", *TWO_RANKS, *options)
        return recording.recorded(f"vllm-tp2-{name}", watched(command, env=env, folder=tmp_path, **(watch or {})))

    return start


async def until_in_flight(watch):
    """Wait until the clients' requests are in the engine's steps: all of them ask on and on."""
    watch.keep_asking(CLIENTS)
    await watch.until(lambda: len(watch.answers) >= CLIENTS, "answers")


# ------------------------------------------------------------------------------------------------- servers


@pytest.mark.parametrize("rank", [1, 0])
async def test_v18a_a_rank_stopped_by_a_signal_within_its_steps(vllm, table, rank):
    async with vllm(f"stopped-{rank}", EAGER) as watch:
        await watch.until_ready()
        await until_in_flight(watch)
        held = watch.member(WORKERS[rank])
        watch.hold(held)
        stuck = await watch.until_verdict("stuck")
        look = await watch.look()
        answered = len(watch.answers)
        assert held.status() == "stopped"
        watch.let_go_on()
        await watch.until(lambda: len(watch.answers) >= answered + 2 * CLIENTS, "the answers")
        await watch.until(lambda: watch.names()[-1] == "ready", "ready again")
    must_hang(stuck, kind="stopped", phase="serving", suspect=WORKERS[rank], rank=f"TP{rank}")
    assert stuck.suspects[0].pid == held.pid
    must_agree(look, stuck)
    assert set(watch.answers) == {200}
    assert watch.names().count("stuck") == 1
    table.add(f"V18a TP{rank}", f"TP=2: SIGSTOP of rank {rank} while {CLIENTS} clients ask", watch, stuck)


@pytest.mark.parametrize("rank", [1, 0])
async def test_v18b_a_rank_killed_within_its_steps(vllm, table, rank):
    """vLLM ends the other rank and itself, with exit code 0."""
    async with vllm(f"killed-{rank}", EAGER) as watch:
        await watch.until_ready()
        await until_in_flight(watch)
        victim = watch.member(WORKERS[rank])
        watch.kill(victim)
        ended = await watch.until_over()
    assert (ended.verdict, ended.kind, ended.exit_code, ended.phase) == ("exited", "crash", 0, "serving"), ended
    assert ended.why.startswith(f"{WORKERS[rank]} (pid {victim.pid}) ended by signal 9"), ended
    assert watch.answers[-1] != 200  # whoever asked was told so, and does not wait
    table.add(f"V18b TP{rank}", f"TP=2: SIGKILL of rank {rank} while {CLIENTS} clients ask", watch, ended)


@pytest.mark.parametrize("rank", [1, 0])
async def test_v18c_a_rank_that_locks_up_before_its_collective(vllm, table, rank):
    """The other one burns a core in the all-reduce of vLLM: that is a wait, and no work."""
    async with vllm(f"locked-{rank}", EAGER, fault="serve-lock", HG_AFTER="60", HG_RANK=str(rank)) as watch:
        await watch.until_ready()
        watch.ask()
        stuck = await watch.until_verdict("stuck", within=200)
        look = await watch.look("--within", "40")
        assert watch.answers == []
    must_hang(stuck, kind="serving", phase="serving", suspect=WORKERS[rank], at="_lock_twice", rank=f"TP{rank}")
    assert stuck.still_for < SERVING_WITHIN
    must_agree(look, stuck)
    table.add(f"V18c TP{rank}", f"TP=2: rank {rank} locks up in its step, the other waits for it", watch, stuck)


@pytest.mark.parametrize("rank", [1, 0])
async def test_v18d_a_rank_in_an_endless_loop_before_its_collective(vllm, table, rank):
    """Both burn their cores, one of them in a wait; on two cores nothing else gets on, so that nobody looks beside."""
    async with vllm(f"spun-{rank}", EAGER, fault="serve-spin", HG_AFTER="60", HG_RANK=str(rank)) as watch:
        await watch.until_ready()
        watch.ask()
        stuck = await watch.until_verdict("stuck", within=280)
        assert watch.answers == []
    must_hang(stuck, kind="serving", phase="serving", suspect=WORKERS[rank], at="_spin", rank=f"TP{rank}")
    assert stuck.confidence == "medium"
    table.add(f"V18d TP{rank}", f"TP=2: rank {rank} in an endless loop in its step", watch, stuck)


# ----------------------------------------------------------------------------------------------- starts


async def test_v18e_all_ranks_deadlocked_in_the_compile_step(vllm, table):
    async with vllm("deadlock", fault="warmup-lock") as watch:
        stuck = await watch.until_verdict("stuck")
        look = await watch.look()
    must_hang(stuck, kind="idle", phase="jit-compile", suspect="VLLM::Worker_TP", at="_lock_twice")
    assert watch.log.count("[hg-fault]") == 2
    assert {(s.rank, s.at[0].partition(" ")[0]) for s in stuck.suspects[:2]} == {
        ("TP0", "_lock_twice"),
        ("TP1", "_lock_twice"),
    }
    assert stuck.still_for < 15
    must_agree(look, stuck)
    table.add("V18e", "TP=2: deadlock of all ranks in the compile step", watch, stuck)


async def test_v18f_the_same_is_started_anew_with_one_change_and_answers(vllm, table):
    """The story: found, ended with proof, one option that alters speed only, ready, and both ranks answer."""
    act = {"on_hang": "act", "retry": None, "fallbacks": "auto"}
    async with vllm("cured", fault="warmup-lock", watch=act) as watch:
        await watch.until(lambda: watch.of("ready"), "ready")
        changes, (first,) = watch.server.changes, watch.server.history
        watch.ask(4)
        await watch.until(lambda: watch.answers, "an answer")
        titles = [title_of(process) for process in watch.members()]
    assert [(c.name, c.change, c.alters) for c in changes] == [("eager", "+ --enforce-eager", "speed")]
    must_hang(first.verdict, kind="idle", phase="jit-compile", suspect="VLLM::Worker_TP", at="_lock_twice")
    assert first.release.answer == "released"
    assert {s.rank for s in first.verdict.suspects} >= {"TP0", "TP1"}
    assert watch.answers == [200]
    assert {worker for worker in WORKERS if any(title.startswith(worker) for title in titles)} == set(WORKERS)
    assert watch.names().count("stuck") == 1
    table.add("V18f", 'the same with `fallbacks="auto"`', watch, None, healthy="ready with `--enforce-eager`")


async def test_v18g_a_rank_that_comes_late_is_waited_for(vllm, table):
    """It sleeps meanwhile, which ends by itself as far as anybody can see: unclear at most, and then ready."""
    async with vllm("late", EAGER, fault="init-slow", HG_SECONDS="25") as watch:
        await watch.until_ready()
        watch.ask(4)
        await watch.until(lambda: watch.answers, "an answer")
    assert set(watch.names()) <= {"moving", "unclear", "waiting", "ready"}
    assert watch.answers == [200]
    said = " → ".join(dict.fromkeys(watch.names()))
    table.add("V18g", "TP=2: rank 1 comes 25 s late to the rendezvous", watch, None, healthy=f"{said}, never stuck")
