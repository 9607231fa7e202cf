"""Real servers that have answered: hung behind a health route that says 200, idle, overloaded, quiet as was asked."""

import contextlib
import json
import threading
import urllib.request

import pytest
from faces import fetch, little
from seen import until
from watched import USUAL, watching_all

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]


class Client:
    """Asks again and again, each time until it is answered, until the server is gone; in a thread of its own."""

    def __init__(self, url):
        self.url, self.answers = url, 0
        threading.Thread(target=self._ask, daemon=True).start()

    def _ask(self):
        body = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 4}).encode()
        headers = {"Content-Type": "application/json"}
        with contextlib.suppress(OSError):
            while True:
                request = urllib.request.Request(f"{self.url}/v1/completions", body, headers)
                with urllib.request.urlopen(request, timeout=300) as answer:
                    answer.read()
                self.answers += 1


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_requests_that_get_no_token_are_a_hang_and_idleness_overload_and_wanted_quiet_are_none(tmp_path):
    """The first request is the one that proves it ready; from the second on the fault of each happens."""

    def server(kind=None, **options):
        faults = (("serving", kind),) if kind else ()
        options = {"enable_metrics": True, "shallow_health": True, "fault_after": 2, "faults": faults, **options}
        return little(**options), {"engine": "sglang"}

    async with watching_all(
        tmp_path,
        limits=USUAL,
        hung=server("deadlock", tp=2, fault_rank=1),
        idle=server(),
        overload=server("sleep:1.5"),
        quiet=server("deadlock"),
    ) as seen:
        ready_at = {}
        for name in seen:
            ready_at[name] = (await seen[name].until("ready")).since
            await until(lambda name=name: seen[name].server is not None, within=30.0)
        with seen["quiet"].server.quiet(at_most=1000.0):
            clients = {name: [Client(seen[name].server.url)] for name in ("hung", "quiet")}
            clients["overload"] = [Client(seen["overload"].server.url) for _ in range(8)]
            stuck = await seen["hung"].until("stuck", "serving")
            assert (stuck.phase, stuck.confidence) == ("serving", "high")
            assert " running and 0 waiting" in stuck.why
            first = stuck.suspects[0]
            assert (first.title, first.note) == ("sglang::scheduler_TP1", "outside its idle loop")
            assert any(frame.startswith("run_batch ") for frame in first.at)
            assert fetch(f"{seen['hung'].server.url}/health") == 200
            for name in ("idle", "overload", "quiet"):
                await seen[name].goes_on_for(seen["hung"].age)
            waiting = await seen["quiet"].until("waiting", "quiet")
            assert "quiet was asked for" in waiting.why
            assert clients["quiet"][0].answers == clients["hung"][0].answers == 0
        assert not seen["quiet"].others("ready", ("waiting", "quiet"), since=ready_at["quiet"])
        assert not seen["idle"].others("ready", since=ready_at["idle"])
        assert seen["idle"].why == "idle: nobody asks"
        assert not seen["overload"].others("ready", since=ready_at["overload"])
        assert seen["overload"].why.startswith("serving: ")
        assert sum(client.answers for client in clients["overload"]) > 5
