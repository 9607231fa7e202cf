"""What the server counts, asked of real servers; and nothing that it does not say is ever a zero."""

import json
import subprocess
import threading
import urllib.request
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import anyio
import pytest
from seen import Clock, in_a_thread, launch, target, until, until_sync

from hangguard.engines.counters import CANARY_TOKENS, canary_for, load_routes_for, longer, metrics_for
from hangguard.engines.sglang import SGLANG
from hangguard.engines.vllm import VLLM
from hangguard.facts import Ask, Listener, Port, Reply, Request, Serving, Unseen
from hangguard.observe._prometheus import read_metrics
from hangguard.observe.canary import CanaryProbe
from hangguard.observe.client import Client
from hangguard.observe.ports import free_port
from hangguard.observe.serving import ServingProbe
from hangguard.observe.target import Shared
from hangguard.testing import little_server_command

pytestmark = pytest.mark.anyio

# As the real servers print them (vLLM 0.32.0, SGLang 0.5.23), other lines left out.
VLLM_TEXT = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a \\"b\\" } c"} 2.0
vllm:num_requests_running{engine="1",model_name="a \\"b\\" } c"} 1.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 3.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 9.0
vllm:engine_sleep_state{engine="0",model_name="tiny",sleep_state="awake"} 1.0
vllm:engine_sleep_state{engine="0",model_name="tiny",sleep_state="weights_offloaded"} 0.0
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 15.0
vllm:generation_tokens_total{engine="0",model_name="tiny"} 401.0
vllm:generation_tokens_created{engine="0",model_name="tiny"} 1.7e+09
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="tiny"} 7.0
"""
ASLEEP = VLLM_TEXT.replace('"awake"} 1.0', '"awake"} 0.0')
SGLANG_TEXT = """\
sglang:num_running_reqs{engine_type="unified",model_name="tiny",pp_rank="0",priority="",tp_rank="0"} 4.0
sglang:num_running_reqs{engine_type="unified",model_name="tiny",pp_rank="0",priority="",tp_rank="1"} 4.0
sglang:num_running_reqs{engine_type="unified",model_name="tiny",pp_rank="0",priority="7",tp_rank="0"} 4.0
sglang:num_queue_reqs{engine_type="unified",model_name="tiny",pp_rank="0",tp_rank="0"} 0.0
sglang:generation_tokens_total{model_name="tiny"} 100.0
sglang:realtime_tokens_total{mode="prefill_cache",model_name="tiny",tp_rank="0",dp_rank="0"} 900.0
sglang:realtime_tokens_total{mode="prefill_compute",model_name="tiny",tp_rank="0",dp_rank="0"} 100.0
sglang:realtime_tokens_total{mode="prefill_compute",model_name="tiny",tp_rank="1",dp_rank="1"} 11.0
sglang:realtime_tokens_total{mode="decode",model_name="tiny",tp_rank="0",dp_rank="0"} 50.0
sglang:realtime_tokens_total{mode="decode",model_name="tiny",tp_rank="1",dp_rank="1"} 7.0
sglang:dp_cooperation_realtime_tokens_total{mode="decode",model_name="tiny",num_prefill_ranks="1"} 50.0
"""


def test_the_counters_of_vllm_are_added_up_over_engines():
    seen = read_metrics(VLLM_TEXT, metrics_for(VLLM, "0.32.0"), at=5.0)
    assert seen == Serving(running=3, waiting=3, generated_tokens=401, prompt_tokens=15, is_asleep=False, at=5.0)
    assert read_metrics(ASLEEP, VLLM.metrics, at=5.0).is_asleep is True


def test_the_counters_of_sglang_are_those_of_one_rank_of_each_replica():
    seen = read_metrics(SGLANG_TEXT, metrics_for(SGLANG, "0.5.23"), at=5.0)
    assert seen == Serving(running=4, waiting=0, generated_tokens=57, prompt_tokens=1011, at=5.0)


@pytest.mark.parametrize(("version", "tokens"), [("0.5.6.post2", None), ("0.5.7", 57), ("0.5.23", 57), (None, 57)])
def test_a_counter_that_grows_only_at_the_end_of_a_request_is_never_taken(version, tokens):
    seen = read_metrics(SGLANG_TEXT, metrics_for(SGLANG, version), at=0)
    assert seen.generated_tokens == tokens


@pytest.mark.parametrize("text", ["", "\0\1", "vllm:num_requests_running", "vllm:num_requests_running{ 1", "\n" * 999])
def test_what_is_no_metrics_has_none(text):
    assert read_metrics(text, VLLM.metrics, at=0) == Serving()


@pytest.mark.parametrize("value", ["NaN", "+Inf", "x", ""])
def test_what_is_no_number_is_no_zero(value):
    text = VLLM_TEXT.replace(" 401.0", f" {value}")
    assert read_metrics(text, VLLM.metrics, at=0).generated_tokens is None


@pytest.mark.parametrize(
    ("version", "paths"),
    [
        ("0.4.10", ["/get_load"]),
        ("0.5.7", ["/get_load"]),
        ("0.5.8", ["/v1/loads?include=core"]),
        ("0.5.23", ["/v1/loads?include=core"]),
        (None, ["/v1/loads?include=core", "/get_load"]),
    ],
)  # fmt: skip
def test_load_routes_by_version(version, paths):
    assert [route.path for route in load_routes_for(SGLANG, version)] == paths


@pytest.mark.parametrize("engine", [VLLM, SGLANG], ids=lambda engine: engine.name)
def test_the_canary_generates_a_hundred_tokens_and_an_embedder_is_asked_as_it_is(engine):
    body = json.loads(canary_for(engine, launch(tokenizes=True)).body)
    assert (body["max_tokens"], body["ignore_eos"], body["model"]) == (CANARY_TOKENS, True, "{model}")
    embedder = launch(task="embed")
    ready, asked = engine.ready(embedder), canary_for(engine, embedder)
    assert (asked.path, json.loads(asked.body)) == (ready.path, json.loads(ready.body))
    assert canary_for(engine, launch(answers=False)) is None


def test_the_length_of_token_ids_stands_in_the_sampling_parameters():
    ids = Request(method="POST", path="/generate", body='{"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}')
    assert json.loads(longer(ids).body)["sampling_params"] == {"max_new_tokens": CANARY_TOKENS, "ignore_eos": True}
    assert json.loads(longer(ids).body)["input_ids"] == [1]
    health = Request(method="GET", path="/health")
    assert longer(health) == health


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append(self.path)
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        answer = self.server.routes.get(self.path, 404)
        if answer == "hang":
            self.server.gate.wait(30)
            answer = 500
        status, body = (answer, b"") if isinstance(answer, int) else (200, answer.encode())
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_):
        pass


@contextmanager
def serving(routes):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.block_on_close = True, False
    server.handle_error = lambda *_: None
    server.routes, server.asked, server.gate = routes, [], threading.Event()
    with in_a_thread(server):
        yield server


@asynccontextmanager
async def probing(port, engine=VLLM, kind=ServingProbe, *, ours=True, env=(), version=None, within=5.0):
    clock = Clock()
    given = launch(port, model="M", version=version)
    if env:
        from dataclasses import replace

        given = replace(given, env=env)
    asked = target(
        given=given,
        clock=clock,
        probe_within=within,
        metrics_path=engine.metrics_path,
        metrics=metrics_for(engine, version),
        metrics_hint=engine.metrics_hint,
        load_routes=load_routes_for(engine, version),
        quiet_routes=engine.quiet_routes,
        canary=canary_for(engine, given),
    )
    async with anyio.create_task_group() as tasks:
        listener = Listener(pid=1, title="x", ours=ours)
        shared = Shared(tasks=tasks, port=Port(port=port, listener=listener))
        probe = kind(asked, shared)
        probe.clock, probe.shared = clock, shared
        yield probe
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await probe.aclose()


async def seen(probe):
    """What it sees once it has an answer."""

    async def look():
        answer = await probe.look(Ask())
        waiting = isinstance(answer, Unseen) and "no answer for" in answer.reason
        return None if waiting else answer

    return await until(look)


async def later(probe, seconds):
    probe.clock.jumped += seconds
    return await seen(probe)


async def later_still_waiting(probe, seconds):
    probe.clock.jumped += seconds
    return await probe.look(Ask())


async def test_numbers_come_every_two_seconds_while_requests_are_there_and_carry_their_time():
    with serving({"/metrics": VLLM_TEXT}) as server:
        async with probing(server.server_port) as probe:
            first = await seen(probe)
            assert (first.running, first.generated_tokens) == (3, 401)
            assert await later(probe, 1) == first
            assert len(server.asked) == 1
            server.routes["/metrics"] = VLLM_TEXT.replace(" 401.0", " 402.0")
            second = await until(lambda: _newer(probe, first))
            assert second.generated_tokens == 402
            assert second.at > first.at


async def _newer(probe, first):
    answer = await later(probe, 6)
    return answer if isinstance(answer, Serving) and answer.at != first.at else None


async def test_an_idle_server_is_asked_every_five_seconds():
    idle = VLLM_TEXT.replace(" 2.0", " 0").replace('c"} 1.0', 'c"} 0').replace(" 3.0", " 0")
    with serving({"/metrics": idle}) as server:
        async with probing(server.server_port) as probe:
            assert (await seen(probe)).running == 0
            await later(probe, 3)
            assert len(server.asked) == 1
            await later(probe, 3)
            assert len(server.asked) == 2


@pytest.mark.parametrize("engine", [VLLM, SGLANG], ids=lambda engine: engine.name)
async def test_numbers_that_are_wanted_now_are_asked_for_now(engine):
    loads = json.dumps({"loads": [{"num_running_reqs": 3, "num_waiting_reqs": 3}]})
    routes = {"/metrics": VLLM_TEXT} if engine is VLLM else {"/v1/loads?include=core": loads}
    with serving(routes) as server:
        async with probing(server.server_port, engine) as probe:
            first = await seen(probe)
            assert (first.running, first.waiting) == (3, 3)
            assert await probe.look(Ask()) == first

            async def newer():
                answer = await probe.look(Ask(counters=True))
                return isinstance(answer, Serving) and answer.at > first.at

            await until(newer)
            (path,) = routes
            assert server.asked.count(path) >= 2


async def test_a_metrics_route_that_hangs_is_unseen_and_asked_once():
    with serving({"/metrics": VLLM_TEXT}) as server:
        async with probing(server.server_port) as probe:
            await seen(probe)
            server.routes["/metrics"] = "hang"
            for _ in range(4):
                answer = await later_still_waiting(probe, 3)
            assert isinstance(answer, Unseen)
            assert answer.reason.startswith("GET /metrics: no answer for ")
            assert len(server.asked) == 2


async def test_serving_missing_says_what_switches_it_on():
    with serving({}) as server:
        async with probing(server.server_port, SGLANG, version="0.5.23") as probe:
            answer = await seen(probe)
            assert answer.reason == (
                "GET /metrics: 404; SGLang counts only when it was started with --enable-metrics; "
                "GET /v1/loads?include=core: 404"
            )
            await later(probe, 30)
            assert server.asked.count("/metrics") == 1, "each question is a line in the server's log"
        server.routes["/metrics"] = "python_info 1\n"
        async with probing(server.server_port, VLLM) as probe:
            assert (await seen(probe)).reason == (
                "the metrics have none of the counters that are known; "
                "vLLM counts unless it was started with --disable-log-stats"
            )


@pytest.mark.parametrize("status", [401, 500, 503])
async def test_another_status_is_unseen(status):
    with serving({"/metrics": status}) as server:
        async with probing(server.server_port) as probe:
            assert await seen(probe) == Unseen(f"GET /metrics: {status}")


async def test_an_answer_without_end_is_not_read_to_it():
    with serving({"/metrics": "x" * (5 << 20)}) as server:
        async with probing(server.server_port) as probe:
            assert await seen(probe) == Unseen("GET /metrics: the answer is larger than 4 MiB")


async def test_the_first_two_requests_at_once_share_a_client():
    with serving({"/a": "1", "/b": "2"}) as server:
        client, answers = Client(target(given=launch(server.server_port))), []

        async def ask(path):
            answers.append(await client.send(Request(method="GET", path=path)))

        async with anyio.create_task_group() as group:
            group.start_soon(ask, "/a")
            group.start_soon(ask, "/b")
        await client.aclose()
        assert sorted(answers) == [(200, b"1"), (200, b"2")]


async def test_nobody_is_asked_who_is_not_ours():
    with serving({"/metrics": VLLM_TEXT}) as server:
        async with probing(server.server_port, ours=False) as probe:
            assert "not by ours" in (await probe.look(Ask())).reason
            probe.shared.port = Port(port=server.server_port, listener=None)
            assert await probe.look(Ask()) == Unseen(f"nobody listens on port {server.server_port} yet")
            assert server.asked == []


async def test_a_server_that_nobody_knows_has_no_counters():
    with serving({}) as server:
        from hangguard.engines.generic import GENERIC

        async with probing(server.server_port, GENERIC) as probe:
            assert await probe.look(Ask()) == Unseen("no counters are known of this server")
            assert server.asked == []


LOADS = {
    "loads": [
        {"dp_rank": 0, "num_running_reqs": 2, "num_waiting_reqs": 1},
        {"dp_rank": 1, "num_running_reqs": 1, "num_waiting_reqs": 0},
    ]
}


async def test_without_metrics_the_load_route_counts_the_requests_and_no_tokens():
    with serving({"/v1/loads?include=core": json.dumps(LOADS)}) as server:
        async with probing(server.server_port, SGLANG, version="0.5.23") as probe:
            answer = await seen(probe)
            assert (answer.running, answer.waiting) == (3, 1)
            assert (answer.generated_tokens, answer.prompt_tokens) == (None, None)
    old = json.dumps([{"dp_rank": 0, "num_reqs": 5, "num_waiting_reqs": 2, "num_tokens": 9}])
    with serving({"/get_load": old}) as server:
        for version in ("0.5.6", None):
            async with probing(server.server_port, SGLANG, version=version) as probe:
                assert (await until(lambda probe=probe: _served(probe))).running == 3


async def _served(probe):
    answer = await seen(probe)
    return answer if isinstance(answer, Serving) else None


@pytest.mark.parametrize("body", ["", "[]", "{}", '{"loads": []}', '{"loads": [{}]}', '{"loads": 1}', "[" * 100_000])
async def test_a_load_route_that_says_nothing_is_unseen(body):
    with serving({"/v1/loads?include=core": body}) as server:
        async with probing(server.server_port, SGLANG, version="0.5.23") as probe:
            assert isinstance(await seen(probe), Unseen)


async def test_a_load_route_that_needs_a_hanging_scheduler_is_unseen_and_never_zero():
    with serving({"/v1/loads?include=core": "hang"}) as server:
        async with probing(server.server_port, SGLANG, version="0.5.10") as probe:
            await probe.look(Ask())
            await until(lambda: _asked(probe, server, "/v1/loads?include=core"))
            for _ in range(3):
                answer = await later_still_waiting(probe, 3)
            assert isinstance(answer, Unseen)
            assert "GET /v1/loads?include=core: no answer for " in answer.reason
            assert server.asked.count("/v1/loads?include=core") == 1


async def _asked(probe, server, path):
    await probe.look(Ask())
    return path in server.asked


async def test_an_old_gauge_of_an_idle_server_is_corrected_by_the_load_route():
    """SGLang to 0.5.15 keeps its running gauge for 30 s after the last request: that is no stall."""
    idle = json.dumps({"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]})
    with serving({"/metrics": SGLANG_TEXT, "/v1/loads?include=core": idle}) as server:
        async with probing(server.server_port, SGLANG, version="0.5.10") as probe:
            assert (await seen(probe)).running == 4
            assert server.asked == ["/metrics"]
            corrected = await until(lambda: _running(probe, 0))
            assert corrected.generated_tokens == 57


async def _running(probe, number):
    answer = await later(probe, 2.1)
    return answer if isinstance(answer, Serving) and answer.running == number else None


@pytest.mark.parametrize("route", ["hang", 404, json.dumps(LOADS)], ids=["hangs", "missing", "agrees"])
async def test_a_stall_stays_a_stall(route):
    with serving({"/metrics": SGLANG_TEXT, "/v1/loads?include=core": route}) as server:
        async with probing(server.server_port, SGLANG, version="0.5.10") as probe:
            for _ in range(4):
                answer = await later(probe, 2.1)
                assert (answer.running, answer.generated_tokens) in {(4, 57), (3, 57)}
            assert "/v1/loads?include=core" in server.asked


async def test_sleep_and_pause_are_seen_where_the_server_tells_of_them():
    routes = {"/metrics": VLLM_TEXT, "/is_sleeping": '{"is_sleeping": false}', "/is_paused": '{"is_paused": true}'}
    with serving(routes) as server:
        async with probing(server.server_port, env=(("VLLM_SERVER_DEV_MODE", "1"),)) as probe:
            assert (await seen(probe)).is_asleep is True
            server.routes["/is_paused"] = '{"is_paused": false}'
            assert (await until(lambda: _asleep(probe, False))).running == 3
            server.routes["/metrics"] = ASLEEP
            await until(lambda: _asleep(probe, True))
        for env in ((), (("VLLM_SERVER_DEV_MODE", "0"),)):
            server.asked.clear()
            async with probing(server.server_port, env=env) as probe:
                assert (await seen(probe)).is_asleep is True, "the metrics tell of sleep"
                assert server.asked == ["/metrics"]


async def _asleep(probe, wanted):
    answer = await later(probe, 6)
    return answer if isinstance(answer, Serving) and answer.is_asleep is wanted else None


async def test_a_hung_engine_is_not_taken_for_one_that_sleeps():
    routes = {"/metrics": VLLM_TEXT, "/is_sleeping": "hang", "/is_paused": "hang"}
    with serving(routes) as server:
        async with probing(server.server_port, env=(("VLLM_SERVER_DEV_MODE", "1"),)) as probe:
            for _ in range(3):
                answer = await later(probe, 6)
            assert answer.is_asleep is False
            assert server.asked.count("/is_sleeping") == 1


CANARY = Ask(canary=True)
GOOD = json.dumps({"choices": [{"text": "x"}]})


async def test_no_canary_is_sent_unless_it_is_asked_for_and_one_stays_open_until_it_is_answered():
    with serving({"/v1/completions": "hang"}) as server:
        async with probing(server.server_port, kind=CanaryProbe) as probe:
            assert (await probe.look(Ask())).state == "not-asked"
            assert server.asked == []
            assert (await probe.look(CANARY)).state == "waiting"
            probe.clock.jumped += 1000
            for ask in (Ask(), CANARY, Ask()):
                assert (await probe.look(ask)).state == "waiting"
            assert server.asked == ["/v1/completions"]
            server.gate.set()
            answer = await until(lambda: _settled(probe))
            assert (answer.state, answer.status) == ("bad", 500)


async def _settled(probe):
    reply = await probe.look(Ask())
    return reply if reply.state != "waiting" else None


async def test_a_good_canary_stays_known_and_none_follows_within_a_minute():
    with serving({"/v1/completions": GOOD}) as server:
        async with probing(server.server_port, kind=CanaryProbe) as probe:
            await probe.look(CANARY)
            good = await until(lambda: _settled(probe))
            assert good.state == "good"
            probe.clock.jumped += 59
            assert await probe.look(CANARY) == good
            assert len(server.asked) == 1
            probe.clock.jumped += 2
            await probe.look(CANARY)
            assert len(server.asked) == 2


async def test_no_canary_is_sent_to_a_server_that_sleeps():
    with serving({"/v1/completions": GOOD}) as server:
        async with probing(server.server_port, kind=CanaryProbe) as probe:
            probe.shared.serving = Serving(is_asleep=True)
            reply = await probe.look(CANARY)
            assert (reply.state, reply.detail) == ("not-asked", "it sleeps")
            assert server.asked == []
            probe.shared.serving = Serving(is_asleep=None)
            await probe.look(CANARY)
            assert (await until(lambda: _settled(probe))).state == "good"


async def test_canary_missing_says_why():
    from hangguard.engines.generic import GENERIC

    with serving({}) as server:
        async with probing(server.server_port, GENERIC, kind=CanaryProbe) as probe:
            reply = await probe.look(CANARY)
            assert isinstance(reply, Reply)
            assert (reply.state, reply.detail) == ("not-asked", "no request is known that makes this server work")


@contextmanager
def little_server(**options):
    port = free_port()
    command = little_server_command(port=port, phase_seconds=0.05, hold_mb=1, shallow_health=True, **options)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            until_sync(lambda: _answers(port, process), within=30)
            yield port
        finally:
            process.terminate()


def _answers(port, process):
    assert process.poll() is None
    try:
        return complete(port, 1)
    except OSError:
        return None


def complete(port, tokens):
    body = json.dumps({"model": "tiny", "prompt": "a b c", "max_tokens": tokens}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", data=body)
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)


async def test_a_real_server_counts_its_tokens_and_a_stalled_one_keeps_its_request_running():
    with little_server(enable_metrics=True, faults=(("serving", "deadlock"),), fault_after=4) as port:
        async with probing(port, SGLANG, version="0.5.16") as probe:
            first = await until(lambda: _running(probe, 0))
            warm = threading.Thread(target=complete, args=(port, 1))  # behind the request that the server sends itself
            warm.start()
            await until(lambda: not warm.is_alive(), within=20)
            before = await until(lambda: _newer(probe, first))
            done = threading.Thread(target=complete, args=(port, 100))
            done.start()
            await until(lambda: not done.is_alive(), within=20)
            after = await until(lambda: _newer(probe, before))
            assert (after.running, after.generated_tokens) == (0, before.generated_tokens + 100)
            assert after.prompt_tokens == before.prompt_tokens + 3
            stuck = threading.Thread(target=_complete_in_vain, args=(port,), daemon=True)
            stuck.start()
            stalled = await until(lambda: _running(probe, 1))
            for _ in range(5):
                again = await later(probe, 2.1)
                assert (again.running, again.generated_tokens) == (1, stalled.generated_tokens)
            async with probing(port, SGLANG, version="0.5.16", kind=CanaryProbe) as canary:
                assert (await canary.look(CANARY)).state == "waiting"
                queued = await until(lambda: _waiting(probe, 1))
                assert queued.running == 1


async def _waiting(probe, number):
    answer = await later(probe, 2.1)
    return answer if isinstance(answer, Serving) and answer.waiting == number else None


def _complete_in_vain(port):
    try:
        complete(port, 1)
    except OSError:
        pass


async def test_a_real_server_without_metrics_still_tells_its_requests():
    with little_server() as port:
        async with probing(port, SGLANG, version="0.5.16") as probe:
            answer = await until(lambda: _running(probe, 0))
            assert (answer.running, answer.waiting, answer.generated_tokens) == (0, 0, None)
