"""A stop that was asked for is no failure, however the server takes it: not in exit code, verdict or history."""

import signal
import sys

import pytest
from commands import run
from faces import plain

from hangguard import Limits

SERVER = """
import http.server, os, signal, sys
def end(*_):
    sys.stderr.write(sys.argv[3] + "\\n")
    sys.stderr.flush()
    os._exit(int(sys.argv[2]))
signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[2] == "never" else end)
http.server.test(http.server.SimpleHTTPRequestHandler, port=int(sys.argv[1]), bind="127.0.0.1")
"""
LIMITS = Limits(ready_within=30, stop_grace=0.5)
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB."


def command(code, words=""):
    return [sys.executable, "-c", SERVER, "{port}", str(code), words]


@pytest.mark.long
@pytest.mark.parametrize(
    ("code", "words", "returned"),
    [(0, "", 0), (3, "Traceback (most recent call last):", 3), (1, OOM, 1), ("never", "", -signal.SIGKILL)],
)
@pytest.mark.parametrize("ask", ["stop", "terminate", "leave"])
def test_however_the_server_takes_it(tmp_path, code, words, returned, ask):
    told = []
    with plain(tmp_path, command(code, words), limits=LIMITS, hooks=[told.append]) as server:
        if ask == "stop":
            assert server.stop().answer == "released"
        elif ask == "terminate":
            server.terminate()
            assert server.wait(20) == returned
    assert server.returncode == returned
    (attempt,) = server.history
    assert (attempt.verdict.verdict, attempt.was_ready) == ("ready", True)
    assert attempt.stopped_because == "asked"
    assert server.diagnosis.findings == ()
    names = [event.event for event in told]
    assert "gave_up" not in names
    assert {event.verdict.verdict for event in told if event.event == "verdict"} <= {"moving", "ready"}
    assert names[-1] == "ended"


@pytest.mark.parametrize("code", [1, 3])
def test_the_command_line_ends_with_0(tmp_path, code):
    with run(tmp_path, "--url", "http://127.0.0.1:{port}", command=command(code, OOM)) as running:
        running.event("ready")
        running.ask(signal.SIGTERM)
        assert running.wait() == 0
        assert running.named("gave_up") == []
        assert {event["verdict"] for event in running.named("verdict")} <= {"moving", "ready"}
