"""hangguard as pid 1, in a real pid namespace: it reaps strangers, passes signals on, and ends everything in time."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from commands import marked, poll, run, small
from faces import is_gone
from terminals import on_a_terminal

NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
ORPHANS = 30
ABANDONS = f"""
for n in $(seq {ORPHANS}); do (sleep 0.$n; exit 7) & done
exit 0
"""
TAKES_THE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(1, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""


def contained(folder, *words, **how):
    return run(folder, *words, inside=NAMESPACE, **how)


def pid_1(running):
    """The first process of the namespace, as it is seen from here."""
    (first,) = poll(lambda: psutil.Process(running.process.pid).children())
    return first


def ask(running, number=signal.SIGTERM):
    os.kill(pid_1(running).pid, number)


def inside(running, script):
    """Run a shell in the namespace whose parent is out here, as ``docker exec`` does."""
    words = ["nsenter", "--target", str(pid_1(running).pid), "--pid", "--mount", "sh", "-c", script]
    return subprocess.run(words, timeout=30, check=False).returncode


def members(running):
    return [psutil.Process(pid) for pid in marked(running.mark) if pid != running.process.pid]


# --------------------------------------------------------------------------------------------- reaping


@pytest.mark.long
def test_orphans_of_strangers_are_reaped_and_never_signalled_and_a_bystander_lives_on(tmp_path):
    bystander = subprocess.Popen(["sleep", "100"])
    try:
        with contained(tmp_path) as running:
            running.event("ready")
            first = pid_1(running)
            (program,) = first.children()
            assert inside(running, ABANDONS) == 0
            seen = set()

            def all_gone():
                seen.update(child.pid for child in first.children() if child.pid != program.pid)
                return [child.pid for child in first.children()] == [program.pid]

            poll(all_gone)
            assert len(seen) > ORPHANS / 2, "they were not its children, and the test is worth nothing"
            assert inside(running, "sleep 100 >/dev/null 2>&1 & exit 0") == 0
            (stranger,) = poll(lambda: [child for child in first.children() if child.pid != program.pid])
            time.sleep(1.5)  # not waiting for anything: nobody may touch it meanwhile
            assert not is_gone(stranger)
            ask(running)
            assert running.wait() == 0
            assert running.named("released")[-1]["released"] == "released"
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.long
@pytest.mark.parametrize(("options", "words", "code"), [
    ({"exit_early": 7}, ("--attempts", "1", "--fallbacks", "none"), 7),
    ({"model_path": "/no/such/model"}, (), 11),
])  # fmt: skip
def test_nobody_is_robbed_of_the_exit_code_of_a_child(tmp_path, options, words, code):
    with contained(tmp_path, *words, command=small(**options)) as running:
        assert running.wait() == code
        assert running.last_line.endswith(f"[exit code {code}]")


@pytest.mark.long
def test_elsewhere_than_in_pid_1_nothing_stays_behind(tmp_path):
    with run(tmp_path) as running:
        running.event("ready")
        program = psutil.Process(running.process.pid)
        assert program.cmdline()[1:4] == ["-m", "hangguard", "run"]
        assert program.cmdline() not in [child.cmdline() for child in program.children(recursive=True)]
        running.ask()
        assert running.wait() == 0


# --------------------------------------------------------------------------------------------- signals


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP])
def test_what_asks_to_stop_is_passed_on_and_everything_ends(tmp_path, number):
    with contained(tmp_path) as running:
        running.event("ready")
        tree = members(running)
        assert len(tree) >= 5  # pid 1, the program, the server's main process, a scheduler, the detokenizer
        ask(running, number)
        assert running.wait() == 0
        assert f"{number.name}: stopping the server" in running.err
        assert running.named("released")[-1]["released"] == "released"
        assert all(is_gone(process) for process in tree)


@pytest.mark.long
def test_the_second_one_is_passed_on_too_and_others_are_not_heard(tmp_path):
    with contained(tmp_path, command=small(ignore_term=True)) as running:
        running.event("ready")
        ask(running, signal.SIGUSR1)
        ask(running)
        running.event("stopping")
        time.sleep(0.3)  # not waiting for anything: a second request is later than the echo of the first
        began = time.monotonic()
        ask(running)
        assert running.wait() == 0
        assert time.monotonic() - began < 10
        assert "SIGTERM again" in running.err


@pytest.mark.long
def test_ctrl_c_on_the_terminal_of_the_container_is_one_request_and_not_two(tmp_path):
    take = (sys.executable, "-c", TAKES_THE_TERMINAL)
    command = small(ignore_term=True)
    with on_a_terminal(tmp_path, 100, "run", "--", *command, inside=(*take, *NAMESPACE)) as (running, read, screen):
        poll(lambda: read() and "READY at" in screen.text)
        running.type("\x03")
        poll(lambda: read() and "stopping the server; once more ends its grace" in screen.text)
        time.sleep(1.0)  # not waiting for anything: nobody may ask a second time
        read()
        assert "SIGINT again" not in screen.text
        running.type("\x03")
        poll(lambda: read() and running.process.poll() is not None)
        read()
        assert running.process.returncode == 0
        assert "nothing is left behind" in screen.text


# ------------------------------------------------------------------------------------------ in time


@pytest.mark.long
@pytest.mark.parametrize("deaf", [False, True], ids=["listens", "ignores SIGTERM"])
def test_everything_ends_within_the_time_that_it_is_given(tmp_path, deaf):
    with contained(tmp_path, "--stop-within", 10, command=small(ignore_term=deaf)) as running:
        running.event("ready")
        tree = members(running)
        began = time.monotonic()
        ask(running)
        assert running.wait() == 0
        assert time.monotonic() - began < 10
        assert running.named("released")[-1]["released"] == "released"
        assert all(is_gone(process) for process in tree)


@pytest.mark.long
def test_where_the_program_itself_is_killed_the_guardian_gets_the_time_to_end_the_server(tmp_path):
    with contained(tmp_path) as running:
        running.event("ready")
        (program,) = pid_1(running).children()
        tree = members(running)
        program.kill()
        assert running.wait() == 128 + signal.SIGKILL
        assert all(is_gone(process) for process in tree)
        (log,) = tmp_path.glob("state/hangguard/runs/*/attempt-1.log")
        assert "Shutting down" in log.read_text()  # it was asked, and not only swept away with its namespace
