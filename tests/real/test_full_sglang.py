"""Every fault of the real SGLang, watched and looked at: S1 to S6."""

import pytest
from real_engines import sglang_command, sglang_environment
from real_watch import must_agree, must_be_healthy, must_hang, watched

pytestmark = [pytest.mark.full, pytest.mark.anyio, pytest.mark.timeout(1500, func_only=True)]

SCHEDULER = "sglang::scheduler"
SERVING_WITHIN = 30.0
WARMED_UP = "The server is fired up and ready to roll!"
"""Until then its health route answers 503, while it answers requests already."""


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def sglang(sglang_env, tiny_gpt2, tmp_path):
    """Start the real SGLang under a watch: options of its own, a fault and its variables."""

    def start(*options, fault=None, **faults):
        env = sglang_environment(cache_dir=tmp_path / "cache", fault=fault, fault_env=faults)
        return watched(sglang_command(sglang_env, tiny_gpt2, "{port}", *options), env=env, folder=tmp_path)

    return start


async def test_s1_the_scheduler_stopped_by_a_signal_while_it_serves(sglang, table):
    async with sglang() as watch:
        await watch.until_ready()
        await watch.until(lambda: WARMED_UP in watch.log, "the end of its own warm-up")
        held = watch.member(SCHEDULER)
        watch.hold(held)
        watch.ask(4)
        stuck = await watch.until_verdict("stuck")
        look = await watch.look()
        assert (held.status(), watch.answers) == ("stopped", [])
        watch.let_go_on()
        await watch.until(lambda: watch.answers, "the answer")
        await watch.until(lambda: watch.names()[-1] == "ready", "ready again")
    must_hang(stuck, kind="stopped", phase="serving", suspect=SCHEDULER)
    must_agree(look, stuck)
    assert watch.answers == [200]
    table.add("S1", "SIGSTOP of the scheduler while serving, a client asks", watch, stuck)


async def test_s2_the_main_process_killed(sglang, table):
    async with sglang() as watch:
        await watch.until_ready()
        watch.kill(watch.members()[0])
        ended = await watch.until_over()
    assert (ended.kind, ended.exit_code, ended.phase) == ("signal", -9, "serving")
    table.add("S2", "SIGKILL of the main process", watch, ended)


async def test_s3_the_scheduler_killed_is_named_although_the_server_kills_itself(sglang, table):
    async with sglang() as watch:
        await watch.until_ready()
        victim = watch.member(SCHEDULER)
        watch.kill(victim)
        ended = await watch.until_over()
    assert (ended.kind, ended.phase) == ("crash", "serving")
    assert f"(pid {victim.pid}) ended by signal 9" in ended.why
    table.add("S3", "SIGKILL of the scheduler", watch, ended)


async def test_s4_a_deadlock_in_the_forward_pass_is_found_before_its_own_watchdog(sglang, table):
    async with sglang(fault="serve-lock", HG_AFTER="80") as watch:
        await watch.until_ready()
        await watch.until(lambda: WARMED_UP in watch.log, "the end of its own warm-up")
        watch.ask()
        stuck = await watch.until_verdict("stuck")
        assert "watchdog timeout" not in watch.log
        short = await watch.look(again=False)
        long = await watch.look("--within", "40")
        assert watch.answers == []
    must_hang(stuck, kind="serving", phase="serving", suspect=SCHEDULER, at="act")
    assert stuck.still_for < SERVING_WITHIN
    must_agree(long, stuck)
    assert (short.code, short.verdict["verdict"], short.verdict["kind"]) == (21, "unclear", "serving")
    table.add("S4", "deadlock in the forward pass, a request in flight", watch, stuck)


async def test_s5_a_deadlock_where_graphs_are_captured(sglang, table):
    async with sglang(fault="graph-lock") as watch:
        stuck = await watch.until_verdict("stuck")
        look = await watch.look()
    must_hang(stuck, kind="idle", phase="graph-capture", suspect=SCHEDULER, at="act")
    assert stuck.still_for < 15
    must_agree(look, stuck)
    table.add("S5", "deadlock where CUDA graphs are captured", watch, stuck)


async def test_s5c_the_same_cured_by_its_flag_is_healthy_while_it_starts_and_while_it_serves(sglang, table):
    async with sglang("--disable-cuda-graph", fault="graph-lock") as watch:
        starting = await watch.look()  # from its first second on
        await watch.until_ready()
        serving = await watch.look()
        watch.ask(4)
        await watch.until(lambda: watch.answers, "an answer")
    must_be_healthy(starting, "moving", "ready")
    must_be_healthy(serving, "ready")
    assert watch.answers == [200]
    assert set(watch.names()) <= {"moving", "ready"}
    table.add("S5c", "the same with `--disable-cuda-graph`", watch, None, healthy="ready, never stuck")


async def test_s6_a_load_that_fails_is_no_kill_from_outside(sglang, table):
    async with sglang(fault="load-raise") as watch:
        ended = await watch.until_over()
    assert (ended.kind, ended.exit_code, ended.phase) == ("crash", -9, "weights-load")
    assert "hg-fault: injected failure" in " ".join((ended.why, *ended.evidence))
    assert not {"stuck", "broken"} & set(watch.names())
    table.add("S6", "the load raises", watch, ended)
