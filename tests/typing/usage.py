"""What a user writes. Checked by mypy in strict mode, never run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import tenacity
from typing_extensions import assert_never, assert_type

import hangguard
from hangguard import (
    AsyncServer,
    Attempt,
    Broken,
    Drained,
    Engine,
    Event,
    Exited,
    Expired,
    Fallback,
    GaveUp,
    Launch,
    LeftBehind,
    Limits,
    LogLine,
    Moving,
    Preflight,
    Ready,
    Release,
    Retry,
    Rules,
    RunStatus,
    RunStopped,
    Sample,
    Server,
    ServerLost,
    Stuck,
    Supervision,
    Unclear,
    Unseen,
    Verdict,
    Waiting,
    preflight,
    reattach,
    supervise,
)
from hangguard.testing import little_server_command


def the_shortest() -> str:
    with supervise("vllm serve M --port 8000") as server:
        assert_type(server, Server)
        return server.url


def before_the_launch() -> str:
    look = preflight("vllm serve M --port 8000", limits=Limits(patience=30))
    assert_type(look, Preflight)
    for error in look.refusals:
        raise error
    return " ".join(f"{check.what} {check.answer} {check.helps}" for check in look.poor)


async def asynchronous() -> None:
    async with supervise(["vllm", "serve", "M"], limits=Limits(ready_within=1800)) as server:
        assert_type(server, AsyncServer)
        async for event in server.events():
            assert_type(event.event, str)
        async for line in server.log():
            assert_type(line, LogLine)
        assert_type(await server.sample(), Sample)
        assert_type(await server.stop(drain=60), Release | None)
        assert_type(server.attempt.drained, Drained | None)


def in_a_notebook() -> None:
    supervision = supervise(little_server_command(), engine="sglang", url="http://127.0.0.1:{port}")
    assert_type(supervision, Supervision)
    server = supervision.start()
    assert_type(server.poll(), int | None)
    for event in server.events():
        print(event.as_json())
    for line in server.log(follow=False):
        assert_type(line.left_out_bytes, int)
    supervision.close()


def without_custom_kernels(launch: Launch) -> Launch | None:
    if "--no-custom" in launch.argv:
        return None
    return dataclasses.replace(launch, argv=(*launch.argv, "--no-custom"))


def fallbacks_of_my_own() -> None:
    mine = Fallback(
        name="no-custom",
        change=without_custom_kernels,
        answers=("warm-up", "gpu-oom"),
        alters="results",
        cost="Answers may differ in the last bits.",
    )
    with supervise(["serve"], url="http://localhost:9000", fallbacks=[mine], ready="/ready"):
        pass
    with supervise("serve", fallbacks="any", ready=lambda url: url.startswith("http")):
        pass


async def is_up(url: str) -> bool:
    return bool(url)


def everything_at_once(engine: Engine, env: dict[str, str]) -> Supervision:
    told: list[Event] = []
    return supervise(
        "serve --port {port}",
        engine=dataclasses.replace(engine, default_port=9000),
        ready=is_up,
        fallbacks=engine.fallbacks,
        env=env,
        limits=Limits(patience=30, waiting=float("inf")),
        retry=Retry(
            stop=tenacity.stop_after_attempt(4) | tenacity.stop_after_delay(600),
            wait=tenacity.wait_fixed(1) + tenacity.wait_random(0, 2),
        ),
        on_hang="report",
        on_death="keep",
        pristine=True,
        run_dir="runs",
        hooks=[told.append, print],
    )


def the_whole_story() -> tuple[Attempt, ...]:
    try:
        with supervise("vllm serve M") as server:
            server.wait(timeout=60.0)
            server.restart()
            server.terminate()
    except GaveUp as failure:
        print(failure.report_path, failure.retryable)
        return failure.history
    except ServerLost as loss:
        return (loss.attempt,)
    except LeftBehind as left:
        print(*left.release.left_behind)
    return ()


def what_to_do(verdict: Verdict) -> str:
    match verdict:
        case Moving() | Waiting() | Unclear():
            return f"go on: {verdict.phase}"
        case Ready():
            return "use it"
        case Stuck(suspects=suspects) | Broken(suspects=suspects):
            return f"look at {suspects[0]}" if suspects else "look at the stacks"
        case Exited(exit_code=code, permanent=permanent):
            return f"mend it ({code})" if permanent else "try again"
        case Expired():
            return verdict.kind
        case _:
            assert_never(verdict)


def how_much_memory(sample: Sample) -> str:
    if isinstance(sample.tree, Unseen):
        return sample.tree.reason
    return f"{sum(process.rss_bytes for process in sample.tree.members)} bytes"


def judge_yourself(samples: Iterable[Sample], rules: Rules) -> Verdict:
    memory = hangguard.start(rules)
    for sample in samples:
        memory = hangguard.step(memory, sample)
    return memory.verdict


def look_once(pid: int) -> str:
    look = hangguard.diagnose(pid, within=13.5)
    assert_type(look, hangguard.Look)
    assert_type(look.server, hangguard.FoundServer)
    return what_to_do(look.verdict) + "; ".join((*look.advice, *(missing.reason for missing in look.missing)))


def watch_on(pid: int, started: int) -> Verdict:
    with hangguard.attach(pid, started=started, on_hang="act", hooks=[print]) as watch:
        assert_type(watch, hangguard.Watch)
        for event in watch.events():
            assert_type(event, Event)
        return watch.wait(timeout=5.0)


async def watch_asynchronously(url: str) -> Verdict:
    await hangguard.adiagnose(url=url)
    async with hangguard.attach(url=url) as watch:
        assert_type(watch, hangguard.AsyncWatch)
        return await watch.wait()


def from_outside() -> str:
    with reattach("20261130-030726-6b04c3", run_dir="runs") as run:
        status: RunStatus = run.status()
        if run.wait("ready", timeout=60.0) == "ready":
            stopped: RunStopped = run.stop(drain=60.0, within=90.0)
            return stopped.outcome
        return f"{run.url} {run.pid} {status.state.verdict} {[event['event'] for event in run.events()]}"


async def from_outside_too() -> None:
    async with reattach("20261130") as run:
        async for event in run.events():
            print(event["event"])
        await run.restart()
