"""``hangguard run``, as a user runs it: real processes, real pipes, a real terminal."""

import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from commands import hangguard, poll, run, small
from terminals import check_live_lines, live_lines, on_a_terminal

from hangguard.cli.exits import exit_code_of
from hangguard.cli.live import _line_for as line_of
from hangguard.cli.live import ending
from hangguard.errors import GaveUp, ServerLost
from hangguard.facts import Attempt, Exited, Launch, Release, ReleaseItem
from hangguard.supervision.events import Released

KEYS = {
    "launched": {"pid", "argv"},
    "phase": {"phase", "previous"},
    "verdict": {"verdict", "kind", "phase", "still_for", "unseen"},
    "fallback": {"name", "change", "alters"},
    "stopping": set(),
    "released": {"released", "left_behind"},
    "ready": {"url", "changes"},
    "gave_up": {"why"},
    "ended": {"exit_code", "left_behind"},
}


def check_form(events):
    """Every event has the keys of its kind, the attempts count from 1, and the time never goes back."""
    for event in events:
        assert {"schema", "event", "t", "attempt", *KEYS.get(event["event"], set())} <= set(event), event
        assert event["schema"] == 1
        assert event["attempt"] >= 1
    assert [e["t"] for e in events] == sorted(e["t"] for e in events)
    assert [e["attempt"] for e in events] == sorted(e["attempt"] for e in events)


# ---------------------------------------------------------------------------------------------- events


@pytest.mark.long
def test_a_server_that_runs_changed_is_announced_in_every_event_and_loudly_at_the_end(tmp_path):
    command = small(deadlock_at_capture=True)
    with run(tmp_path, "--patience", "4", command=command) as running:
        launched = running.event("launched")  # seen while it runs: each line is flushed
        assert running.process.poll() is None
        assert launched["argv"][1:3] == ["-m", "hangguard.testing.server"]
        assert "server_args" in poll(lambda: "server_args" in running.out and running.out)
        ready = running.event("ready")
        running.ask()
        assert running.wait() == 0
        events = running.events()
        check_form(events)
        assert not running.named("notice")
        assert {event["event"] for event in events} == set(KEYS) - {"gave_up"}
        stuck = next(e for e in events if e["event"] == "verdict" and e["verdict"] == "stuck")
        assert (stuck["kind"], stuck["phase"], stuck["attempt"]) == ("idle", "graph-capture", 1)
        assert stuck["still_for"] >= 4
        change = {"name": "no-cuda-graph", "change": "+ --disable-cuda-graph", "alters": "speed"}
        (fallback,) = running.named("fallback")
        assert {key: fallback[key] for key in change} == change
        assert ready["changes"] == [change]
        assert [(e["attempt"], e["released"], e["left_behind"]) for e in running.named("released")] == [
            (1, "released", []),
            (2, "released", []),
        ]
        assert events[-1]["event"] == "ended"
        assert "IT RAN CHANGED: no-cuda-graph (+ --disable-cuda-graph; alters speed)" in running.last_line
        assert running.last_line.endswith("[exit code 0]")


@pytest.mark.long
def test_with_events_on_stdout_nothing_else_is_there_and_the_log_goes_to_stderr(tmp_path):
    with run(tmp_path, "--events", "-", events=False) as running:
        poll(lambda: '"ready"' in running.out)
        running.ask(signal.SIGTERM)
        assert running.wait() == 0
        events = running.events(running.out)
        assert len(events) == len(running.out.splitlines())
        check_form(events)
        assert [e["event"] for e in events][:1] + [e["event"] for e in events][-1:] == ["launched", "ended"]
        assert "fired up" in running.err


@pytest.mark.long
def test_quiet_prints_only_the_last_line(tmp_path):
    with run(tmp_path, "--quiet") as running:
        running.event("ready")
        running.ask()
        assert running.wait() == 0
        (line,) = (running.out + running.err).splitlines()
        assert line == "hangguard: ended as asked; nothing is left behind. [exit code 0]"


def test_events_that_cannot_be_written_are_refused_before_anything_starts(tmp_path):
    with run(tmp_path, "--events", tmp_path / "nowhere" / "events", events=False) as running:
        assert running.wait() == 2
        assert "No such file" in running.err


def test_links_are_not_followed_where_events_are_written(tmp_path):
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "events").symlink_to(tmp_path / "victim")
    with run(tmp_path) as running:
        assert running.wait() == 2
    assert (tmp_path / "victim").read_text() == "mine"


# ------------------------------------------------------------------------------------------ exit codes


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--no-such-option", "--", "true"), "no-such-option"),
        (("--port", "80", "vllm", "serve", "M"), "Options of the server go after --"),
        (("--url", "nonsense", "--", "true"), "--url nonsense is no base URL"),
        (("--engine", "nonsense", "--", "true"), "Known are: sglang, vllm, generic"),
        (("--ready-within", "-1", "--", "true"), "ready-within"),
        (("--patience", "nan", "--url", "http://127.0.0.1:1", "--", "true"), "--patience must be a number of seconds"),
        (("--ready-within", "soon", "--", "true"), "ready-within"),
        (("--attempts", "0", "--", "true"), "attempts"),
        (("--fallbacks", "never", "--", "true"), "fallbacks"),
        ((), "there is no command"),
        (("--", ""), "command is empty"),
        (("--", "true"), "Give --url http://127.0.0.1:8000, or put"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error(tmp_path, words, says):
    with hangguard(tmp_path, "run", *words) as running:
        assert running.wait() == 2
        assert says in running.err
        assert "Traceback" not in running.err
        assert running.out == ""


def test_every_command_says_in_one_line_of_80_columns_what_it_does(tmp_path):
    with hangguard(tmp_path, "--help", env={"COLUMNS": "80"}) as running:
        assert running.wait() == 0
        commands = running.out.partition("Commands:\n")[2].splitlines()
    assert len(commands) == 10
    assert [line for line in commands if "..." in line or not line.endswith(".") or len(line) > 80] == []


def test_durations_are_shown_as_seconds(tmp_path):
    with hangguard(tmp_path, "run", "--help") as running:
        assert running.wait() == 0
        assert "--ready-within SECONDS" in running.out
        assert "FLOAT" not in running.out


def test_a_release_that_is_not_proved_is_not_said_to_be_none():
    free = ReleaseItem(resource="processes", answer="released")
    unknown = ReleaseItem(resource="files", answer="unknown", detail="there are new names")
    held = ReleaseItem(resource="port", answer="held", detail="pid 7", ours=False)
    line, style = line_of(Released(t=0.0, attempt=1, release=Release(items=(free, unknown))))
    assert (line, style) == ("RELEASE NOT PROVED: files: there are new names", "yellow")
    line, _ = line_of(Released(t=0.0, attempt=1, release=Release(items=(held, unknown))))
    assert line == "NOT RELEASED: port held: pid 7; files unknown: there are new names"


def test_a_command_that_is_not_there_or_may_not_be_executed(tmp_path):
    plain = tmp_path / "plain"
    plain.write_text("#!/bin/sh\n")
    url = ("--url", "http://127.0.0.1:1")
    with hangguard(tmp_path, "run", *url, "--", tmp_path / "missing") as running:
        assert running.wait() == 127
        assert "was not found" in running.err
    with hangguard(tmp_path, "run", *url, "--", plain) as running:
        assert running.wait() == 126
        assert "chmod +x" in running.err


def test_a_taken_port_is_refused_and_its_holder_named(tmp_path):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        with run(tmp_path, command=small(port=holder.getsockname()[1])) as running:
            assert running.wait() == 13
            assert f"process {os.getpid()}" in running.last_line
            check_form(running.events())
            assert {e["event"] for e in running.events()} <= {"gave_up", "ended"}


ONE_UNCHANGED = ("--attempts", "1", "--fallbacks", "none")
NEVER_READY = {
    "has no model": ((), {"model_path": "/no/such/model"}, 11),
    "ends with 0": ((), {"exit_early": 0}, 14),
    "is too slow": (("--ready-within", "3"), {"phase_seconds": 1.0}, 124),
    "loses a worker": ((), {"faults": (("weights-load", "exit:7"),)}, 10),
    "hangs, one attempt": (("--quiet", "--attempts", "1", "--patience", "3"), {"deadlock_at_capture": True}, 10),
    "ends with 7, one attempt": (ONE_UNCHANGED, {"exit_early": 7}, 7),
    "ends with 0, one attempt": (ONE_UNCHANGED, {"exit_early": 0}, 14),
}


@pytest.fixture(scope="module")
def never_ready(tmp_path_factory):
    """All of them at once: they mostly wait."""
    with ExitStack() as all_of_them:
        yield {
            name: all_of_them.enter_context(run(tmp_path_factory.mktemp("run"), *words, command=small(**options)))
            for name, (words, options, _) in NEVER_READY.items()
        }


@pytest.mark.parametrize("name", NEVER_READY)
@pytest.mark.long
def test_exit_codes_of_a_server_that_never_became_ready(never_ready, name):
    running, code = never_ready[name], NEVER_READY[name][2]
    assert running.wait() == code
    assert running.last_line.startswith("hangguard: gave up after 1 attempt: ")
    assert running.last_line.endswith(f"[exit code {code}]")
    events = running.events()
    check_form(events)
    assert [e["event"] for e in events][-2:] == ["gave_up", "ended"]


def test_the_only_line_of_a_quiet_run_that_hung_says_what_where_and_who(never_ready):
    running, _ = never_ready["hangs, one attempt"], never_ready["hangs, one attempt"].wait()
    (line,) = (running.out + running.err).splitlines()
    assert re.match(
        r"hangguard: gave up after 1 attempt: stuck \(idle\) in graph-capture: nothing moved for \d+ s; .*; "
        r"look at .+ \(pid \d+\) at .+; no attempts left \(1 of 1\)\. Evidence: /",
        line,
    )
    (gave_up,) = running.named("gave_up")
    assert gave_up["why"] in line


@pytest.mark.long
def test_a_server_that_ends_by_itself_after_it_was_ready(tmp_path):
    with run(tmp_path) as running:
        pid = running.event("launched")["pid"]
        running.event("ready")
        os.kill(pid, signal.SIGTERM)  # somebody else's doing: hangguard was not asked
        assert running.wait() == 14
        assert "The server is lost" in running.last_line


def test_what_is_left_behind_is_said_and_goes_before_how_it_ended():
    """Nothing survives SIGKILL but a process that waits in a driver: this one is made up."""
    held = ReleaseItem(resource="processes", answer="held", detail="pid 7 (server), state D in nv_wait")
    launch = Launch(argv=("x",), env=(), cwd="/", url="http://h:1", host="h", port=1)
    verdict = Exited(phase="serving", kind="crash", exit_code=3)
    last = Attempt(
        number=1, launch=launch, verdict=verdict, started_at=0, last_movement_at=0, settled_at=0, exit_code=3,
        release=Release(items=(held,)),
    )  # fmt: skip
    for failure in (None, ServerLost(last), GaveUp("why", (last,))):
        assert exit_code_of(failure, last, pass_through=True) == 12
    assert "LEFT BEHIND: processes: pid 7 (server), state D in nv_wait" in ending(None, last, 12)[0]


def test_a_signal_before_it_is_ready_is_asking_too(tmp_path):
    with run(tmp_path, command=small(phase_seconds=2.0)) as running:
        running.event("launched")
        running.ask(signal.SIGTERM)
        assert running.wait() == 0
        assert running.named("ready") == []
        assert running.named("released")[-1]["released"] == "released"


@pytest.mark.long
def test_a_hang_up_that_nohup_has_ignored_stays_ignored(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # inherited, as from nohup
    try:
        with run(tmp_path) as running:
            signal.signal(signal.SIGHUP, before)
            running.event("ready")
            running.ask(signal.SIGHUP)
            url = running.named("ready")[0]["url"]
            poll(lambda: httpx.get(f"{url}/v1/models", trust_env=False).status_code == 200)
            assert running.named("stopping") == []
            running.ask(signal.SIGTERM)
            assert running.wait() == 0
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.long
def test_the_second_signal_ends_the_grace_and_not_the_proof(tmp_path):
    with run(tmp_path, command=small(ignore_term=True)) as running:
        running.event("ready")
        running.ask()
        running.event("stopping")
        began = time.monotonic()
        poll(lambda: "once more ends its grace" in running.err)
        time.sleep(0.3)  # not waiting for anything: a second request is later than the echo of the first
        assert running.process.poll() is None
        running.ask()
        assert running.wait() == 0
        assert time.monotonic() - began < 8
        assert running.named("released")[-1]["released"] == "released"


# --------------------------------------------------------------------------------------------- readers


@pytest.mark.long
def test_readers_that_are_gone_cost_nothing(tmp_path):
    out, into = os.pipe()
    os.close(out)
    os.mkfifo(tmp_path / "fifo")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    with run(tmp_path, "--events", tmp_path / "fifo", events=False, stdout=into, stderr=into) as running:
        os.close(into)
        poll(lambda: select.select([reader], [], [], 0)[0] and b"launched" in os.read(reader, 65536))
        os.close(reader)
        wait_for_answer(tmp_path)
        running.ask()
        assert running.wait() == 0


@pytest.mark.long
def test_readers_that_never_read_cost_nothing(tmp_path):
    ends = [os.pipe() for _ in range(2)]
    for _, into in ends:
        fill(into)
    os.mkfifo(tmp_path / "fifo")
    words = ("--events", tmp_path / "fifo")
    with run(tmp_path, *words, events=False, stdout=ends[0][1], stderr=ends[1][1]) as running:
        wait_for_answer(tmp_path)
        running.ask()
        assert running.wait() == 0
    for end in ends:
        for fd in end:
            os.close(fd)


@pytest.mark.long
def test_a_reader_of_the_fifo_who_comes_late_gets_every_event(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with run(tmp_path, "--events", tmp_path / "fifo", events=False) as running:
        poll(lambda: "READY" in running.err)
        with (tmp_path / "fifo").open() as reader:
            running.ask()
            text = reader.read()
        assert running.wait() == 0
    assert [e["event"] for e in running.events(text)][:1] == ["launched"]
    assert running.events(text)[-1]["event"] == "ended"


def test_events_go_through_a_process_substitution_of_a_shell(tmp_path):
    script = '"$0" -m hangguard run --attempts 1 --events >(cat >"$1") -- "${@:2}" --exit-early 0; echo code=$?'
    words = ["bash", "-c", script, sys.executable, str(tmp_path / "copy"), *small()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    assert "code=14" in done.stdout
    assert poll(lambda: '"ended"' in (tmp_path / "copy").read_text())


@pytest.mark.long
def test_closed_standard_streams_are_no_obstacle(tmp_path):
    script = 'exec "$@" >&- 2>&- <&-'
    words = ["sh", "-c", script, "sh", sys.executable, "-m", "hangguard", "run", "--events", str(tmp_path / "events")]
    done = subprocess.run([*words, "--", *small(exit_early=0)], timeout=30, check=False)
    assert done.returncode == 14
    assert '"ended"' in (tmp_path / "events").read_text()


def fill(fd):
    os.set_blocking(fd, False)
    while select.select([], [fd], [], 0)[1]:
        os.write(fd, b"x" * 4096)
    os.set_blocking(fd, True)


def wait_for_answer(folder):
    """Wait until the server's log says that a request was answered: nothing of hangguard's own can be read."""

    def answered():
        return any("completions HTTP" in log.read_text() for log in folder.glob("state/hangguard/runs/*/*.log"))

    assert poll(answered, 30.0)


# ----------------------------------------------------------------------------- the log, secrets, folders


@pytest.mark.long
def test_what_could_drive_a_terminal_is_not_passed_on(tmp_path):
    with run(tmp_path, command=small(garbage=True)) as running:
        running.event("ready")
        running.ask()
        assert running.wait() == 0
        assert "fired up" in running.out
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f\x80-\x9f]", running.out + running.err)
        assert "owned" not in running.out
        (log,) = tmp_path.glob("state/hangguard/runs/*/attempt-1.log")
        assert b"\x1b]0;owned" in log.read_bytes()  # it was there


@pytest.mark.long
def test_a_line_without_an_end_costs_no_memory_and_is_cut_aloud(tmp_path):
    with run(tmp_path, command=small(long_line=200 << 20)) as running:
        running.event("ready")
        status = Path(f"/proc/{running.process.pid}/status").read_text()
        assert int(re.search(r"VmHWM:\s+(\d+)", status)[1]) < 150 * 1024
        running.ask()
        assert running.wait() == 0
        assert "bytes are left out here" in running.out
        assert max(map(len, running.out.splitlines())) < 20_000
        for log in tmp_path.glob("state/hangguard/runs/*/attempt-1.log"):
            log.unlink()


@pytest.mark.long
def test_secrets_are_in_nothing_that_is_written(tmp_path):
    key, token = "sesame-open-1234", "opaque-token-5678"
    command = small(api_key=key, model_path=f"{token}-{key}")
    with run(tmp_path, command=command, env={"HF_TOKEN": token}) as running:
        running.event("ready")
        running.ask()
        assert running.wait() == 0
        assert "model_path='REDACTED-REDACTED'" in running.out  # the log has it, and it is followed
        for text in (running.events_path.read_text(), running.out, running.err):
            assert key not in text
            assert token not in text
        assert (tmp_path / "events").stat().st_mode & 0o777 == 0o600


@pytest.mark.long
def test_a_run_without_a_folder_goes_on_and_says_what_is_lost(tmp_path):
    (tmp_path / "taken").write_text("a file")
    with run(tmp_path, "--run-dir", tmp_path / "taken") as running:
        running.event("ready")
        (notice, *_) = running.named("notice")
        assert str(tmp_path / "taken") in notice["text"]
        assert notice["attempt"] == 1
        running.ask()
        assert running.wait() == 0
        assert "cannot be used" in running.err
    assert (tmp_path / "taken").read_text() == "a file"


@pytest.mark.long
def test_no_home_is_no_obstacle(tmp_path):
    command = small(exit_early=0)
    with run(tmp_path, command=command, without=("HOME",)) as running:
        assert running.wait() == 14
        assert list(tmp_path.glob("state/hangguard/runs/*/attempt-1.log"))
    (tmp_path / "taken").write_text("a file")
    nowhere = {"HOME": str(tmp_path / "taken" / "home"), "TMPDIR": str(tmp_path)}
    with run(tmp_path, command=command, env=nowhere, without=("XDG_STATE_HOME",)) as running:
        assert running.wait() == 14
        assert "may not outlive the machine's next start" in running.err
        assert list(tmp_path.glob("hangguard-*/attempt-1.log"))


# ------------------------------------------------------------------------------------------- a terminal


@pytest.mark.long
def test_on_a_terminal_one_live_line_tells_the_truth(tmp_path):
    command = small(deadlock_at_capture=True, phase_seconds=0.4)
    words = ("run", "--patience", "4", "--fallbacks", "none", "--attempts", "1", "--", *command)
    with on_a_terminal(tmp_path, 80, *words) as (running, read, screen):
        poll(lambda: read() and running.process.poll() is not None, 30.0)
        frames = read()
        assert running.process.returncode == 10  # not 143: the server was ended by us
    shown = "\n".join(sorted(check_live_lines(frames, 80)))
    assert re.search(r"attempt 1, \d s · \S+ · moving \(.+\) · 3 processes, \d+ MiB", shown), shown
    assert re.search(r"attempt 1, \d+ s · graph-capture · nothing moved for [234] s · 3 processes", shown), shown
    assert re.search(r"STUCK \(idle\) in graph-capture: nothing moved for \d s;", screen.text)
    assert not live_lines([screen.text]), "the live line is gone at the end"
    assert "server_args" not in screen.text, "the log is not followed on a terminal"
    assert re.search(r"hangguard: gave up after 1 attempt:.*\[exit\s+code\s+10\]", screen.text, re.DOTALL)


@pytest.mark.long
def test_a_narrow_terminal_gets_a_shorter_line_and_not_two(tmp_path):
    with on_a_terminal(tmp_path, 34, "run", "--", *small(exit_early=0)) as (running, read, _):
        poll(lambda: read() and running.process.poll() is not None, 30.0)
        assert check_live_lines(read(), 34)


def test_ctrl_c_on_a_terminal_stops_with_visible_progress(tmp_path):
    with on_a_terminal(tmp_path, 80, "run", "--", *small(ignore_term=True)) as (running, read, screen):
        poll(lambda: read() and "READY at" in screen.text)
        assert poll(lambda: any("READY at http://127.0.0.1" in line for line in live_lines(read()[-3:])))
        running.ask()
        poll(lambda: any(re.search(r"stopping \(asked\): 3 processes left", line) for line in live_lines(read())))
        running.ask()
        poll(lambda: read() and running.process.poll() is not None)
        read()
        assert running.process.returncode == 0
        assert "ended as asked; nothing is left behind. [exit code 0]" in screen.text
