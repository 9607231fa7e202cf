"""What a server answers, or that it does not, without ever waiting for it."""

import functools
import json
import socket
import struct
import threading
import time
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import anyio
import pytest
from seen import Clock, in_a_thread, launch, target, until

from hangguard.facts import Ask, Listener, Port, Request, Unseen
from hangguard.observe.answers import HealthProbe, ReadinessProbe
from hangguard.observe.target import Shared

pytestmark = pytest.mark.anyio

COMPLETION = Request(method="POST", path="/v1/completions", body='{"model": "{model}", "prompt": "a"}')


class Server(ThreadingHTTPServer):
    """Answers as told, and remembers what it was asked."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, answer):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = answer
        self.asked = []
        self.gate = threading.Event()

    def handle_error(self, request, client_address):
        pass


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length).decode(errors="replace")
        self.server.asked.append(self)
        self.server.answer(self)

    do_POST = do_GET

    def reply(self, status, body=b"", headers=()):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextmanager
def serving(answer):
    server = Server(answer)
    with in_a_thread(server):
        yield server


class Probing:
    def __init__(self, probe, shared, clock):
        self.probe = probe
        self.shared = shared
        self.clock = clock

    async def look(self):
        return await self.probe.look(Ask())

    async def settled(self):
        return await until(self._settled)

    async def _settled(self):
        reply = await self.look()
        return reply if reply.state != "waiting" else None


@asynccontextmanager
async def probing(server, kind=ReadinessProbe, *, ours=True, port=None, given=None, **more):
    number = server.server_address[1] if server is not None else 1
    clock = Clock()
    more.setdefault("probe_within", 1.0)
    asked = target(given=given or launch(number, model="M"), clock=clock, **more)
    if port is None:
        port = Port(port=number, listener=Listener(pid=1, title="x", ours=ours))
    async with anyio.create_task_group() as tasks:
        shared = Shared(tasks=tasks, port=port)
        probe = kind(asked, shared)
        yield Probing(probe, shared, clock)
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await probe.aclose()


def answering(status, content):
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return lambda handler: handler.reply(status, body)


def one_json(text):
    return json.loads(text)


GOOD = [
    {"choices": [{"text": ""}]},
    {"choices": [{"message": {"content": "a"}}]},
    {"data": [{"embedding": [0.1, 0.2]}]},
    {"text": "a", "meta_info": {}},
    {"embedding": [0.1]},
    [{"embedding": [0.1]}],
]
EMPTY = [{}, {"choices": []}, {"data": []}, [], "ok", b"OK", b"", {"object": "error", "message": "no"}, {"text": None}]


@pytest.mark.parametrize("content", GOOD, ids=str)
async def test_an_answer_with_content_is_good(content):
    with serving(answering(200, content)) as server:
        async with probing(server, request=COMPLETION) as probing_it:
            reply = await probing_it.settled()
            assert (reply.state, reply.status) == ("good", 200)
            sent = one_json(server.asked[0].body)
            assert sent == {"model": "M", "prompt": "a"}
            assert server.asked[0].headers["Content-Type"] == "application/json"
            assert "Authorization" not in server.asked[0].headers
            probing_it.clock.jumped += 1000
            assert await probing_it.look() == reply
            assert len(server.asked) == 1, "once ready, nothing more is asked"


@pytest.mark.parametrize("content", EMPTY, ids=str)
async def test_a_200_without_content_is_bad(content):
    with serving(answering(200, content)) as server:
        async with probing(server, request=COMPLETION) as probing_it:
            reply = await probing_it.settled()
            assert (reply.state, reply.status) == ("bad", 200)
            assert "without content" in reply.detail


@pytest.mark.parametrize("status", [307, 400, 429, 500, 503])
async def test_another_status_is_bad_and_asked_again_after_two_seconds(status):
    with serving(answering(status, b"the reason\n of it")) as server:
        async with probing(server, request=COMPLETION) as probing_it:
            reply = await probing_it.settled()
            assert (reply.state, reply.status, reply.detail) == ("bad", status, "the reason of it")
            assert reply.refuses is None
            await probing_it.look()
            assert len(server.asked) == 1
            probing_it.clock.jumped += 2
            server.answer = answering(200, GOOD[0])
            assert (await probing_it.settled()).state == "good"
            assert len(server.asked) == 2


async def test_a_reset_connection_has_failed_and_is_asked_again_at_the_next_look():
    def reset(handler):
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        handler.connection.close()

    with serving(reset) as server:
        async with probing(server, request=COMPLETION) as probing_it:
            reply = await probing_it.settled()
            assert reply.state == "failed"
            assert reply.status is None
            assert "Error" in reply.detail
            asked = len(server.asked)
            server.answer = answering(200, GOOD[0])
            assert (await probing_it.settled()).state == "good"
            assert len(server.asked) == asked + 1


async def test_an_answer_of_100_megabytes_is_not_read_to_its_end():
    sent = []

    def flood(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", str(100 * 1024 * 1024))
        handler.end_headers()
        for _ in range(100):
            handler.wfile.write(b"x" * 1024 * 1024)
            sent.append(1)

    with serving(flood) as server:
        async with probing(server, request=COMPLETION) as probing_it:
            reply = await probing_it.settled()
            assert reply.state == "bad"
            assert len(reply.detail) <= 400
            assert len(sent) < 50
        async with probing(server, ready="/ready") as probing_it:
            assert (await probing_it.settled()).state == "good"


async def test_answer_hanging_is_waiting_within_its_deadline_one_in_flight_and_left_open():
    """A request without an answer is no unseen source: it is seen to wait, since when it was sent."""

    def never(handler):
        handler.server.gate.wait(30)
        handler.reply(200, json.dumps(GOOD[0]).encode())

    with serving(never) as server:
        async with probing(server, request=COMPLETION, probe_within=0.3) as probing_it:
            began = probing_it.clock()
            first = await probing_it.look()
            assert time.monotonic() - began < 2
            assert first.state == "waiting"
            assert began <= first.since <= began + 1
            await until(lambda: server.asked)
            for _ in range(10):
                probing_it.clock.jumped += 100
                assert await probing_it.look() == first
            await until(lambda: time.monotonic() - began > 0.5)
            assert len(server.asked) == 1
            server.gate.set()
            assert (await probing_it.settled()).state == "good"
            assert len(server.asked) == 1


async def test_answer_hanging_is_unseen_within_its_deadline():
    """The name that every probe has; the state of an open request is ``waiting``."""
    with serving(lambda handler: handler.server.gate.wait(30)) as server:
        async with probing(server, request=COMPLETION) as probing_it:
            with anyio.fail_after(1):
                assert (await probing_it.look()).state == "waiting"


async def test_leaving_while_a_request_is_open_takes_no_time():
    with serving(lambda handler: handler.server.gate.wait(30)) as server:
        async with probing(server, request=COMPLETION) as probing_it:
            await probing_it.look()
            await until(lambda: server.asked)
            began = time.monotonic()
        assert time.monotonic() - began < 1


async def test_answer_missing_says_why():
    async with probing(None, port=Port(port=1, listener=None), request=COMPLETION) as probing_it:
        reply = await probing_it.look()
        assert (reply.state, reply.detail) == ("not-asked", "nobody listens on port 1 yet")
    async with probing(None) as probing_it:
        reply = await probing_it.look()
        assert (reply.state, reply.detail) == ("not-asked", "nothing was given by which readiness is known")
    async with probing(None, HealthProbe) as probing_it:
        reply = await probing_it.look()
        assert (reply.state, reply.detail) == ("not-asked", "no health route is known for this server")


async def test_a_stranger_is_never_asked():
    with serving(answering(200, GOOD[0])) as server:
        async with probing(server, ours=False, request=COMPLETION) as probing_it:
            reply = await probing_it.look()
            assert reply.state == "not-asked"
            assert "held by process 1" in reply.detail
            assert server.asked == []


@pytest.mark.parametrize("port", [Unseen("x"), Port(port=1, listener=Listener(pid=None, title="", ours=None))])
async def test_where_it_cannot_be_told_who_listens_asking_is_the_way_to_know(port):
    with serving(answering(200, GOOD[0])) as server:
        async with probing(server, port=port, request=COMPLETION) as probing_it:
            assert (await probing_it.settled()).state == "good"


async def test_a_server_that_runs_elsewhere_is_asked_without_a_listener_of_ours():
    with serving(answering(200, GOOD[0])) as server:
        number = server.server_address[1]
        given = launch(number, model="M", delegates_to="docker")
        nobody = Port(port=number, listener=None)
        async with probing(server, port=nobody, given=given, request=COMPLETION) as probing_it:
            assert (await probing_it.settled()).state == "good"


async def test_no_proxy_of_the_environment_is_used_and_the_key_is_sent(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with serving(answering(200, GOOD[0])) as server:
        given = launch(server.server_address[1], model="M", api_key="secret")
        async with probing(server, given=given, request=COMPLETION) as probing_it:
            assert (await probing_it.settled()).state == "good"
        assert server.asked[0].headers["Authorization"] == "Bearer secret"
        assert server.asked[0].headers["Connection"] == "close"
        assert "secret" not in repr(given)


async def test_a_redirect_is_not_followed_and_the_key_goes_nowhere_else():
    with serving(answering(200, GOOD[0])) as elsewhere:
        place = f"http://127.0.0.1:{elsewhere.server_address[1]}/v1/completions"
        with serving(lambda handler: handler.reply(307, headers=[("Location", place)])) as server:
            given = launch(server.server_address[1], model="M", api_key="secret")
            async with probing(server, given=given, request=COMPLETION) as probing_it:
                reply = await probing_it.settled()
            assert (reply.state, reply.status) == ("bad", 307)
            assert len(server.asked) == 1
        assert elsewhere.asked == []


async def test_the_name_of_the_model_is_asked_for_where_it_is_not_known():
    def answer(handler):
        if handler.path == "/v1/models":
            handler.reply(200, json.dumps({"data": [{"id": 'the "base"'}, {"id": "lora"}]}).encode())
        else:
            handler.reply(200, json.dumps(GOOD[0]).encode())

    with serving(answer) as server:
        given = launch(server.server_address[1])
        async with probing(server, given=given, request=COMPLETION) as probing_it:
            assert (await probing_it.settled()).state == "good"
        assert [one.path for one in server.asked] == ["/v1/models", "/v1/completions"]
        assert one_json(server.asked[1].body)["model"] == 'the "base"'


@pytest.mark.parametrize(("status", "content"), [(404, b"no route"), (200, {"data": []}), (200, b"no json")])
async def test_a_server_that_does_not_name_its_model_is_bad(status, content):
    with serving(answering(status, content)) as server:
        given = launch(server.server_address[1])
        async with probing(server, given=given, request=COMPLETION) as probing_it:
            reply = await probing_it.settled()
            assert reply.state == "bad"
            assert reply.detail.startswith("GET /v1/models")


async def test_a_get_of_the_engine_needs_no_content():
    with serving(answering(200, b"")) as server:
        request = Request(method="GET", path="/health_generate")
        async with probing(server, request=request) as probing_it:
            assert (await probing_it.settled()).state == "good"


async def test_health_is_not_asked_while_requests_in_flight_are_counted():
    """SGLang's health route generates a token: it would be one of them."""
    with serving(answering(200, b"")) as server:
        async with probing(server, HealthProbe, health_path="/health") as probing_it:
            assert (await probing_it.probe.look(Ask(counters=True))).state == "not-asked"
            assert (await probing_it.settled()).state == "good"
            probing_it.clock.jumped += 60
            assert (await probing_it.probe.look(Ask(counters=True))).state == "good"
            assert len(server.asked) == 1


async def test_health_is_asked_every_five_seconds_and_bad_health_after_two():
    with serving(answering(200, b"")) as server:
        async with probing(server, HealthProbe, health_path="/health") as probing_it:
            assert (await probing_it.settled()).state == "good"
            await probing_it.look()
            assert len(server.asked) == 1
            server.answer = answering(503, b"starting")
            probing_it.clock.jumped += 5
            reply = await probing_it.settled()
            assert (reply.state, reply.status) == ("bad", 503)
            assert len(server.asked) == 2
            probing_it.clock.jumped += 2
            await probing_it.settled()
            assert len(server.asked) == 3
            assert {one.path for one in server.asked} == {"/health"}


async def test_health_hanging_is_unseen_within_its_deadline():
    """One request in flight, however long it takes; the look says since when."""
    with serving(lambda handler: handler.server.gate.wait(30)) as server:
        async with probing(server, HealthProbe, health_path="/health") as probing_it:
            with anyio.fail_after(1):
                first = await probing_it.look()
            assert first.state == "waiting"
            await until(lambda: server.asked)
            probing_it.clock.jumped += 100
            assert await probing_it.look() == first
            assert len(server.asked) == 1


async def test_health_missing_says_why():
    async with probing(None, HealthProbe, health_path="/health") as probing_it:
        reply = await probing_it.settled()
        assert reply.state == "failed"
        assert "ConnectError" in reply.detail
        probing_it.shared.port = Port(port=1, listener=None)
        assert (await probing_it.look()).state == "not-asked"


async def test_the_callers_path():
    with serving(answering(204, b"")) as server:
        async with probing(server, ready="ready", request=COMPLETION) as probing_it:
            assert (await probing_it.settled()).state == "good"
        assert [(one.command, one.path) for one in server.asked] == [("GET", "/ready")]


async def test_the_callers_function():
    urls = []
    async with probing(None, ready=lambda url: urls.append(url) or len(urls) > 1) as probing_it:
        reply = await probing_it.settled()
        assert (reply.state, reply.detail) == ("bad", "ready() returned False")
        probing_it.clock.jumped += 2
        assert (await probing_it.settled()).state == "good"
        assert urls == ["http://127.0.0.1:1"] * 2


async def test_the_callers_function_that_raises_has_failed_with_its_reason():
    def ready(_url):
        raise RuntimeError("not yet")

    async with probing(None, ready=ready) as probing_it:
        reply = await probing_it.settled()
        assert (reply.state, reply.detail) == ("failed", "RuntimeError: not yet")


async def test_the_callers_function_that_blocks_for_ever_is_waiting_and_blocks_nothing():
    gate = threading.Event()
    calls = []

    def ready(_url):
        calls.append(1)
        return gate.wait(60)

    async with probing(None, ready=ready) as probing_it:
        first = await probing_it.look()
        assert first.state == "waiting"
        began = time.monotonic()
        for _ in range(50):
            assert await probing_it.look() == first
        assert time.monotonic() - began < 3
        assert calls == [1]
    assert not gate.is_set()
    gate.set()


async def test_the_callers_coroutine():
    async def ready(url):
        await anyio.sleep(0.01)
        return url

    class Callable:
        async def __call__(self, url):
            return await ready(url)

    for one in (ready, Callable(), functools.partial(ready)):
        async with probing(None, ready=one) as probing_it:
            assert (await probing_it.settled()).state == "good"


async def test_the_callers_coroutine_that_never_ends_is_cancelled_at_the_end():
    async def ready(_url):
        await anyio.sleep_forever()

    async with probing(None, ready=ready) as probing_it:
        assert (await probing_it.look()).state == "waiting"
