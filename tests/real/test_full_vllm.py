"""Every fault of the real vLLM, watched and looked at: V1 to V15, what hangs, what ends, and what is healthy."""

import pytest
from real_engines import vllm_command, vllm_environment
from real_watch import command_names, must_agree, must_be_healthy, must_hang, watched

from hangguard import Limits

pytestmark = [pytest.mark.full, pytest.mark.anyio, pytest.mark.timeout(1500, func_only=True)]

EAGER = "--enforce-eager"
TWO_RANKS = ("--tensor-parallel-size", "2", EAGER)
TWO_CORES = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
WORKER, CORE = "VLLM::Worker", "VLLM::EngineCore"
SERVING_WITHIN = 30.0
"""Seconds from the last movement to the verdict, with a request in flight: what the README promises."""


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def vllm(vllm_env, tiny_llama, tmp_path):
    """Start the real vLLM under a watch: options of its own, a fault and its variables, others of its environment."""

    def start(*options, fault=None, limits=None, **variables):
        faults = {name: value for name, value in variables.items() if name.startswith("HG_")}
        env = vllm_environment(cache_dir=tmp_path / "cache", fault=fault, fault_env=faults)
        env |= {name: value for name, value in variables.items() if name not in faults}
        command = vllm_command(vllm_env, tiny_llama, "{port}", *options)
        return watched(command, env=env, folder=tmp_path, limits=limits)

    return start


# ------------------------------------------------------------------------------------------ starts that hang


async def test_v1_a_deadlock_in_the_compile_step(vllm, table):
    async with vllm(fault="warmup-lock") as watch:
        stuck = await watch.until_verdict("stuck")
        look = await watch.look()
    must_hang(stuck, kind="idle", phase="jit-compile", suspect=WORKER, at="_lock_twice")
    assert stuck.still_for < 15
    must_agree(look, stuck)
    assert watch.names().count("stuck") == 1
    table.add("V1", "deadlock in the warm-up and compile step", watch, stuck)


async def test_v1c_the_same_cured_by_its_flag_is_healthy_while_it_starts_and_while_it_serves(vllm, table):
    async with vllm(EAGER, fault="warmup-lock") as watch:
        starting = await watch.look()  # from its first second on
        await watch.until_ready()
        serving = await watch.look()
        watch.ask(4)
        await watch.until(lambda: watch.answers, "an answer")
    must_be_healthy(starting, "moving", "ready")
    must_be_healthy(serving, "ready")
    assert watch.answers == [200]
    assert set(watch.names()) <= {"moving", "ready"}
    table.add("V1c", "the same with `--enforce-eager`", watch, None, healthy="ready, never stuck")


async def test_v2_a_deadlock_in_the_model_load(vllm, table):
    async with vllm(fault="load-lock") as watch:
        stuck = await watch.until_verdict("stuck")
        look = await watch.look()
    must_hang(stuck, kind="idle", phase="weights-load", suspect=WORKER, at="_lock_twice")
    assert stuck.still_for < 15
    must_agree(look, stuck)
    table.add("V2", "deadlock in the model load", watch, stuck)


async def test_v3_a_busy_loop_in_the_model_load(vllm, table):
    """In a place of which nothing is known: only the long patience decides, which is cut short here."""
    async with vllm(fault="load-spin", limits=Limits(patience=60, stop_grace=5)) as watch:
        stuck = await watch.until_verdict("stuck")
        look = await watch.look()
    must_hang(stuck, kind="hot", phase="weights-load", suspect=WORKER, at="_spin")
    assert stuck.confidence == "medium"
    assert (look.code, look.verdict["verdict"], look.verdict["kind"]) == (21, "unclear", "busy")  # as a compile looks
    assert look.verdict["phase"] == "weights-load"
    table.add("V3", "busy loop in the model load (`patience=60`)", watch, stuck)


async def test_v4_the_engine_core_stopped_by_a_signal_while_its_worker_compiles(vllm, table):
    async with vllm() as watch:
        await watch.until(lambda: "Warming up model for the compilation" in watch.log, "the compile")
        core = watch.member(CORE)
        watch.hold(core)
        stuck = await watch.until_verdict("stuck")
        look = await watch.look()
        assert core.status() == "stopped"
    # The worker goes on until its compile is done, and says so: then all of it waits for the one that is stopped.
    assert "Warming up done." in watch.log
    must_hang(stuck, kind="stopped", phase="kv-cache", suspect=CORE)
    assert stuck.suspects[0].pid == core.pid
    must_agree(look, stuck)
    table.add("V4", "SIGSTOP of EngineCore during the compile", watch, stuck)


async def test_v8_a_rank_in_one_collective_too_many(vllm, table):
    async with vllm(*TWO_RANKS, fault="coll-mismatch", **TWO_CORES) as watch:
        stuck = await watch.until_verdict("stuck")
        look = await watch.look()
    must_hang(stuck, kind="idle", phase="weights-load", suspect=f"{WORKER}_TP0", at="barrier", rank="TP0")
    assert "TP1" in {suspect.rank for suspect in stuck.suspects}
    must_agree(look, stuck)
    table.add("V8", "TP=2: rank 0 in one barrier too many", watch, stuck)


async def test_v9_a_rank_that_never_reaches_the_rendezvous(vllm, table):
    """Found before the engine's own limit; then that limit is told as what it is."""
    options = (*TWO_RANKS, "--distributed-timeout-seconds", "60")
    async with vllm(*options, fault="init-absent", **TWO_CORES) as watch:
        stuck = await watch.until_verdict("stuck")
        look = await watch.look()
        ended = await watch.until_over()
    must_hang(stuck, kind="idle", phase="dist-init", suspect=WORKER, at="_lock_twice")
    must_agree(look, stuck)
    assert (ended.kind, ended.exit_code) == ("dist-timeout", 1)
    table.add("V9", "TP=2: rank 1 never comes (`--distributed-timeout-seconds 60`)", watch, stuck)


# ------------------------------------------------------------------------------------- servers that hang


@pytest.mark.parametrize(("number", "title"), [("V5", CORE), ("V6", WORKER)])
async def test_v5_v6_a_member_stopped_by_a_signal_while_it_serves(vllm, table, number, title):
    async with vllm(EAGER) as watch:
        await watch.until_ready()
        held = watch.member(title)
        watch.hold(held)
        watch.ask(4)
        stuck = await watch.until_verdict("stuck")
        look = await watch.look()
        assert (held.status(), watch.answers) == ("stopped", [])
        watch.let_go_on()
        await watch.until(lambda: watch.answers, "the answer")
        await watch.until(lambda: watch.names()[-1] == "ready", "ready again")
    must_hang(stuck, kind="stopped", phase="serving", suspect=title)
    assert stuck.suspects[0].pid == held.pid
    must_agree(look, stuck)
    assert watch.answers == [200]
    table.add(number, f"SIGSTOP of {title.removeprefix('VLLM::')} while serving, a client asks", watch, stuck)


async def test_v7_a_deadlock_in_the_forward_pass_with_a_request_in_flight(vllm, table):
    async with vllm(EAGER, fault="serve-lock", HG_AFTER="60") as watch:
        await watch.until_ready()
        watch.ask()
        stuck = await watch.until_verdict("stuck")
        short = await watch.look(again=False)
        long = await watch.look("--within", "40")
        assert watch.answers == []
    must_hang(stuck, kind="serving", phase="serving", suspect=WORKER, at="_lock_twice")
    assert stuck.still_for < SERVING_WITHIN
    must_agree(long, stuck)
    # A quarter of a minute cannot tell a hang from a slow step: it says who stands where, and what a longer look gives.
    assert (short.code, short.verdict["verdict"], short.verdict["kind"]) == (21, "unclear", "serving")
    assert "_lock_twice" in short.verdict["why"]
    table.add("V7", "deadlock in the forward pass, a request in flight", watch, stuck)


async def test_v7b_the_same_found_before_the_own_limit_of_the_engine_ends_it(vllm, table):
    limit = {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "30"}
    async with vllm(EAGER, fault="serve-lock", HG_AFTER="60", **limit) as watch:
        await watch.until_ready()
        watch.ask()
        stuck = await watch.until_verdict("stuck")
        ended = await watch.until_over()
    must_hang(stuck, kind="serving", phase="serving", suspect=WORKER, at="_lock_twice")
    assert stuck.still_for < SERVING_WITHIN
    assert (ended.kind, ended.exit_code) == ("crash", 0)  # what it calls success
    assert "execute_model timed out" in " ".join((ended.why, *ended.evidence))
    table.add("V7b", "the same with `VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=30`", watch, ended)


async def test_v15_two_ranks_that_compile_at_the_first_request_are_never_stuck(vllm, table):
    compilers = set()
    async with vllm(*TWO_RANKS, **TWO_CORES) as watch:
        await watch.until_phase("serving")  # it says so itself; the first request of all is hangguard's own
        compiling = await watch.look()

        def answered():
            compilers.update(command_names(watch) & {"cc1plus", "g++", "as", "ld", "collect2", "ninja"})
            return watch.of("ready")

        await watch.until(answered, "ready")
        watch.ask(100)
        await watch.until(lambda: watch.answers, "an answer")
    must_be_healthy(compiling, "moving", "ready", "unclear")
    assert compilers, "the test is worth nothing where nothing was compiled"
    assert watch.answers == [200]
    assert set(watch.names()) <= {"moving", "ready"}
    table.add("V15", "none: TP=2, first request", watch, None, healthy="ready, never stuck")


# --------------------------------------------------------------------------------------- servers that end


async def test_v10_the_front_end_killed_leaves_orphans_that_are_ended(vllm, table):
    async with vllm(EAGER) as watch:
        await watch.until_ready()
        orphans = [watch.member(CORE).pid, watch.member(WORKER).pid]
        watch.kill(watch.members()[0])
        ended = await watch.until_over()
    assert (ended.kind, ended.exit_code, ended.phase) == ("signal", -9, "serving")
    assert all(f"({pid})" in ended.why for pid in orphans)  # still there, and by name
    table.add("V10", "SIGKILL of the API server", watch, ended)


@pytest.mark.parametrize(("number", "title"), [("V11", CORE), ("V12", WORKER)])
async def test_v11_v12_a_member_killed_is_named_although_the_server_ends_with_0(vllm, table, number, title):
    async with vllm(EAGER) as watch:
        await watch.until_ready()
        victim = watch.member(title)
        watch.kill(victim)
        ended = await watch.until_over()
    assert (ended.kind, ended.exit_code, ended.phase) == ("crash", 0, "serving")
    assert f"{title}" in ended.why
    assert f"(pid {victim.pid}) ended by signal 9" in ended.why
    table.add(number, f"SIGKILL of {title.removeprefix('VLLM::')}", watch, ended)


async def test_v13_everything_killed_at_once_and_what_it_left_is_removed(vllm, table):
    async with vllm(EAGER) as watch:
        await watch.until_ready()
        watch.kill(*watch.members())
        ended = await watch.until_over()
    assert ended.kind in {"signal", "crash"}
    assert "signal 9" in ended.why
    # With the tracker gone nobody but hangguard unlinks the two rings between engine and worker.
    removed = [file.path for file in watch.release.files if file.answer == "removed"]
    assert sum(path.startswith("/dev/shm/psm_") for path in removed) == 2
    assert sum(path.startswith(f"{watch.temp}/") for path in removed) >= 6  # and the sockets, as after every end
    table.add("V13", "SIGKILL of all, tracker included", watch, ended)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("raise", "RuntimeError: hg-fault: injected failure"),
        ("segv", "signal 11"),
        ("exit", "exit code 7"),
    ],
)
async def test_v14_a_load_that_fails(vllm, table, how, says):
    async with vllm(fault=f"load-{how}") as watch:
        ended = await watch.until_over()
    assert (ended.kind, ended.exit_code, ended.phase) == ("crash", 1, "weights-load")
    assert says in " ".join((ended.why, *ended.evidence))
    assert not {"stuck", "broken"} & set(watch.names())
    table.add(f"V14 {how}", f"the load ends by {how}", watch, ended)
