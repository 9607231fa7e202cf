"""``run --detach``, ``status``, ``wait`` and ``stop``, as a user runs them."""

import json
import os
import signal
from contextlib import contextmanager
from functools import partial

import httpx
import pytest
from commands import hangguard, poll, run, small
from terminals import on_a_terminal

from hangguard import reattach
from hangguard.store import SUPERVISOR_LOG

URL = ("--url", "http://127.0.0.1:1")


def words_of(text):
    """What was printed, by the word at the beginning of each line."""
    return dict(line.split(" ", 1) for line in text.splitlines() if " " in line)


def folder_of(tmp_path):
    """The folder of the one run that is there; none yet: nothing."""
    runs = tmp_path / "state" / "hangguard" / "runs"
    found = list(runs.iterdir()) if runs.exists() else []
    return found[0] if found else None


def state_of(folder):
    try:
        return json.loads((folder / "state.json").read_text())
    except FileNotFoundError:
        return {}


@contextmanager
def detached(tmp_path, *words, command=None):
    """A run in the background that is ready; ended with the test."""
    with run(tmp_path, "--detach", *words, command=command) as running:
        assert running.wait(60) == 0, running.err
        said = words_of(running.out)
        assert set(said) == {"run", "url"}
        assert httpx.get(f"{said['url']}/v1/models", trust_env=False).status_code == 200
        try:
            yield running, said["run"], said["url"]
        finally:
            stop(tmp_path, said["run"])


def told(tmp_path, *words, env=None):
    """Run a command to its end; return its exit code and what it printed."""
    with hangguard(tmp_path, *words, env=env) as running:
        code = running.wait(60)
        return code, running.out, running.err


def stop(tmp_path, run_id, *words):
    return told(tmp_path, "stop", run_id, *words)


def test_a_detached_run_is_asked_waited_for_and_stopped_and_another_goes_on(tmp_path):
    with detached(tmp_path) as (beside, _, beside_url), detached(tmp_path) as (running, run_id, url):
        folder = tmp_path / "state" / "hangguard" / "runs" / run_id
        supervisor = state_of(folder)["supervisor"][0]
        assert os.getsid(supervisor) == supervisor != running.process.pid
        assert {os.readlink(f"/proc/{supervisor}/fd/{fd}") for fd in (1, 2)} == {str(folder / SUPERVISOR_LOG)}
        assert os.readlink(f"/proc/{supervisor}/fd/0") == "/dev/null"
        assert f"READY at {url}" in running.err
        assert oct((folder / SUPERVISOR_LOG).stat().st_mode)[-3:] == "600"
        code, out, _ = told(tmp_path, "status", run_id, "--json")
        document = json.loads(out)
        assert (code, document["told_by"], document["state"]["url"]) == (0, "supervisor", url)
        code, out, _ = told(tmp_path, "status", run_id)
        assert (code, words_of(out)["stage"], words_of(out)["url"]) == (0, "ready", url)
        assert told(tmp_path, "wait", run_id, "--timeout", "20")[:2] == (0, "ready\n")
        assert told(tmp_path, "wait", url, "--timeout", "60")[:2] == (0, "ready\n")
        assert told(tmp_path, "wait", run_id, "--for", "stuck", "--timeout", "1")[:2] == (124, "timeout\n")
        with hangguard(tmp_path, "wait", run_id, "--for", "stuck", "--timeout", "60") as waits:
            code, out, _ = stop(tmp_path, run_id, "--drain", "5", "--within", "20")
            assert (code, words_of(out)["stopped"]) == (0, run_id)
            assert waits.wait() == 14
            assert waits.out == "exit\n"
        poll(lambda: not os.path.exists(f"/proc/{supervisor}"))
        assert "ended as asked; nothing is left behind. [exit code 0]" in (folder / SUPERVISOR_LOG).read_text()
        assert told(tmp_path, "wait", run_id, "--for", "exit")[:2] == (0, "exit\n")
        assert told(tmp_path, "wait", run_id)[:2] == (14, "exit\n")
        code, out, _ = told(tmp_path, "status", run_id)
        assert (code, words_of(out)["stage"]) == (14, "over")
        code, _, err = stop(tmp_path, run_id)
        assert code == 22
        assert f"hangguard clean {run_id}" in err
        assert httpx.get(f"{beside_url}/v1/models", trust_env=False).status_code == 200
        assert beside.process.returncode == 0


def test_what_does_not_exist_is_22_for_every_command(tmp_path):
    for words in (("status",), ("stop",), ("wait", "--timeout", "5")):
        code, out, err = told(tmp_path, *words, "20990101-000000-abcdef")
        assert (code, out) == (22, "")
        assert "hangguard ps" in err
    assert told(tmp_path, "wait", "http://127.0.0.1:1", "--for", "exit", "--timeout", "20")[0] == 22
    assert told(tmp_path, "wait", "http://127.0.0.1:1", "--timeout", "2")[:2] == (124, "timeout\n")
    assert told(tmp_path, "run", "--json", *URL, "--", "true")[0] == 2
    assert told(tmp_path, "run", "--detach", "--events", "-", *URL, "--", "true")[0] == 2


FAILS = {
    "does not exist": (URL, ["/no/such/program"], 127, "was not found"),
    "is no command": ((), ["true"], 2, "does not show where the server will answer"),
    "has no model": ((), small(model_path="/no/such/model"), 11, "gave up after 1 attempt"),
    "ends with 7": (("--attempts", "1", "--fallbacks", "none"), small(exit_early=7), 7, "gave up after 1 attempt"),
}


@pytest.mark.parametrize("what", FAILS)
def test_a_command_that_fails_before_it_is_ready_gives_the_code_and_reason_of_the_foreground(tmp_path, what):
    words, command, code, says = FAILS[what]
    with run(tmp_path, "--detach", *words, command=command, events=False) as running:
        assert running.wait(60) == code
        assert says in running.err
        assert running.out == ""


def test_a_server_that_hangs_is_relaunched_in_the_background_and_what_was_changed_is_printed(tmp_path):
    command = small(deadlock_at_capture=True)
    with run(tmp_path, "--detach", "--json", "--patience", "4", command=command) as running:
        folder = poll(partial(folder_of, tmp_path))
        poll((folder / "control.sock").exists)
        with reattach(str(folder)) as outside:  # a command would have to be faster than the relaunch
            assert outside.wait("stuck", timeout=90) == "stuck"
        assert running.wait(90) == 0
        document = json.loads(running.out)
        assert document["changes"] == ["+ --disable-cuda-graph"]
        assert "trying again with no-cuda-graph" in running.err
        code, out, _ = told(tmp_path, "status", document["run"])
        assert code == 0
        assert "changed + --disable-cuda-graph" in out
        assert "before attempt 1: stuck (idle) in graph-capture" in out
        assert stop(tmp_path, document["run"])[0] == 0


def test_ctrl_c_while_it_waits_asks_the_background_to_stop(tmp_path):
    with run(tmp_path, "--detach", command=small(phase_seconds=10.0)) as running:
        running.event("launched")
        running.ask(signal.SIGINT)
        assert running.wait() == 0
        assert "ended as asked; nothing is left behind" in running.err
        assert running.out == ""


def test_somebody_who_stops_it_before_it_is_ready_is_told_to_whoever_waits(tmp_path):
    with run(tmp_path, "--detach", command=small(phase_seconds=10.0)) as running:
        running.event("launched")
        assert stop(tmp_path, folder_of(tmp_path).name)[0] == 0
        assert running.wait() == 14
        assert "it was stopped before it was ready" in running.err


def test_it_survives_its_terminal_also_before_it_is_ready(tmp_path):
    with on_a_terminal(tmp_path, 100, "run", "--detach", "--events", tmp_path / "events", "--",
                       *small(phase_seconds=2.0)) as (running, _, __):  # fmt: skip
        running.event("launched")
        folder = folder_of(tmp_path)
        supervisor = state_of(folder)["supervisor"][0]
        os.kill(running.process.pid, signal.SIGHUP)  # what a terminal that closes sends to its session
        assert running.wait() == -signal.SIGHUP
        poll(lambda: running.named("ready"), within=60)
        assert os.path.exists(f"/proc/{supervisor}")
        assert told(tmp_path, "wait", folder.name, "--timeout", "30")[:2] == (0, "ready\n")
        assert stop(tmp_path, folder.name)[0] == 0


def test_every_command_ends_in_time_when_the_supervisor_is_stopped(tmp_path):
    with detached(tmp_path) as (_, run_id, _url):
        supervisor = state_of(folder_of(tmp_path))["supervisor"][0]
        os.kill(supervisor, signal.SIGSTOP)
        try:
            code, out, _ = told(tmp_path, "status", run_id)
            assert (code, words_of(out)["told"], words_of(out)["stage"]) == (21, "by state file", "ready")
            assert "does not answer" in words_of(out)["note"]
            assert told(tmp_path, "wait", run_id, "--for", "exit", "--timeout", "3")[:2] == (124, "timeout\n")
            code, _, err = stop(tmp_path, run_id)
            assert code == 124
            assert f"kill -CONT {supervisor}" in err
        finally:
            os.kill(supervisor, signal.SIGCONT)
        assert told(tmp_path, "status", run_id)[0] == 0
