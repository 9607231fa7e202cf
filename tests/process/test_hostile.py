"""What a stranger's process names, says or answers neither ends a look, nor leads it astray, nor speaks through it."""

import json
import os
import random
import shutil
import sys
import time
from dataclasses import replace

import pytest
from commands import poll
from looked_at import python, started
from test_stacks import DEADLOCK, running

from hangguard import BadLaunch, diagnose, pystacks
from hangguard.cli.diagnose import _print_table
from hangguard.engines import SGLANG, VLLM
from hangguard.engines.counters import load_routes_for, metrics_for
from hangguard.facts import Unseen
from hangguard.launching import read_command
from hangguard.observe._prometheus import read_metrics
from hangguard.observe._ras_answer import UnreadableError, read_json, read_text
from hangguard.observe.ports import free_port
from hangguard.observe.procfs import read_title
from hangguard.observe.serving import _reader_of_loads
from hangguard.observe.stacks import find_py_spy
from hangguard.pystacks import layouts, read_threads, start_time
from hangguard.redact import secrets_of
from hangguard.report.issue import TRACKERS, issue_for
from hangguard.report.share import Placeholders
from hangguard.supervision import places
from hangguard.supervision.found import FoundServer
from hangguard.supervision.places import here, on_loopback

QUICKLY = 5.0
"""Seconds for what took minutes or hours before; it takes milliseconds."""


def takes_no_time(question):
    began = time.monotonic()
    answer = question()
    assert time.monotonic() - began < QUICKLY
    return answer


# --------------------------------------------------------------------------------- the whole look


HOSTILE = r"""
import http.server, os, sys, threading

def wait():
    threading.Event().wait()

wait.__code__ = wait.__code__.replace(co_name="evil\x1b]0;t\x07\x1b[2J\n## heading", co_filename="/a\x1b[31m\n.py")
threading.Thread(target=wait, name="\x1b[2J\n", daemon=True).start()

class Hostile(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/metrics":
            body = ('vllm:num_requests_running{%s} 1\n' % ("a" * 2000000)).encode()
            body += b'vllm:num_requests_running{a="b"} 1.7e308\nvllm:num_requests_running{a="c"} 1.7e308\n'
        else:
            body = b"\x1b[2J\x1b]0;t\x07 said \n## heading"
        self.send_response(200 if self.path == "/metrics" else 500, "\x1b[2J")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Hostile)
print("\x1b[2J\x1b]0;t\x07 up [red]", flush=True)
server.serve_forever()
"""


def test_a_server_that_says_what_it_likes_is_looked_at_and_drives_no_terminal(tmp_path):
    """Titles, names of functions and threads, log, answers, metrics: none ends the look or gets its escapes out."""
    port = free_port()
    model = "ev\x1b[2J\x1b]0;t\x07il\n## heading\u202e"
    with python(tmp_path / "hostile", HOSTILE, "serve", model, "--port", port, port=port) as server:
        server.says("up")
        look = diagnose(server.pid, url=server.url, engine="vllm", within=8)
        assert look.server.pid == server.pid
        for text in (*(issue_for(look, tracker) for tracker in TRACKERS), Placeholders(look.server).text("x")):
            assert not {"\x1b", "\x07", "\u202e"} & set(text)
        story = issue_for(look, "vllm").partition("Describe the bug")[2].partition("```")[0]
        assert "\n## heading" not in story


SLEEPS = "import os, sys, time\nprint('up', flush=True)\ntime.sleep(600)\n"


def test_paths_of_another_mount_namespace_are_not_opened_in_ours(tmp_path):
    """Root of a container names a file: in our mounts that path is somebody else's file."""
    assert os.geteuid() == 0, "this test is about what root does"
    config = tmp_path / "ours.yaml"
    config.write_text(f"served-model-name: swordfish\nport: {free_port()}\n")
    (tmp_path / "vllm").write_text(SLEEPS)
    command = [sys.executable, str(tmp_path / "vllm"), "serve", "M", "--config", str(config)]
    with started(tmp_path / "other", command, inside=("unshare", "--mount")) as server:
        poll(lambda: os.readlink(f"/proc/{server.pid}/ns/mnt") != os.readlink("/proc/self/ns/mnt"))
        server.says("up")
        look = diagnose(server.pid, engine="vllm", within=3)
        assert "swordfish" not in repr(look)
        assert any("--config was not read" in note for note in look.server.notes)
    with started(tmp_path / "ours", command) as server:
        server.says("up")
        assert diagnose(server.pid, engine="vllm", within=3).server.launch.model == "swordfish"


def test_a_title_is_read_without_any_of_its_keys(tmp_path):
    with python(tmp_path / "s", SLEEPS, "--api-key", "first-secret", "second-secret", "--port", "1") as server:
        server.says("up")
        assert read_title(server.pid).endswith("--api-key REDACTED REDACTED --port 1")


# ------------------------------------------------------------------------------------- what it answers


def test_metrics_that_are_no_numbers_and_labels_without_an_end_are_no_fault_of_ours():
    metrics = metrics_for(VLLM, None)
    name = next(metric.name for metric in metrics if metric.field == "running")
    infinite = f'{name}{{a="b"}} 1.7e308\n{name}{{a="c"}} 1.7e308\n'
    assert read_metrics(infinite, metrics, at=1.0).running is None
    endless = f"{name}{{{'a' * 1_000_000}}} 1\n"
    assert takes_no_time(lambda: read_metrics(endless, metrics, at=1.0)).running == 1
    assert read_metrics(f'{name}{{engine="0",model_name="M"}} 2\n', metrics, at=1.0).running == 2


def test_a_load_that_is_no_number_is_not_understood():
    for route in load_routes_for(SGLANG, None):
        entry = {name: 0 for name in (route.waiting, route.running, route.total) if name}
        for value in ("1e999", "Infinity", "NaN", "null", "[]"):
            entries = "[" + json.dumps(entry).replace(": 0", f": {value}") + "]"
            body = entries if route.under is None else f'{{"{route.under}": {entries}}}'
            assert isinstance(_reader_of_loads(route)(body.encode(), 1.0), Unseen), (route.path, value)


def test_an_answer_of_ras_with_figures_that_cannot_be_is_unreadable():
    with pytest.raises(UnreadableError):
        read_json('{"communicators": [{"hash": "1", "size": 1e999, "ranks": [], "missing_ranks": []}]}')
    row = "    0     60000         4         8        32        32   RUNNING  OK\n"
    with pytest.raises(UnreadableError, match="ranks"):
        takes_no_time(lambda: read_text(row * 100_000 + "Warnings\n"))


# ------------------------------------------------------------------------------------ what it names


def of_config(folder, text):
    (folder / "c.yaml").write_text(text)
    argv = ["vllm", "serve", "M", "--config", str(folder / "c.yaml")]
    return read_command(argv, env={}, cwd="/", must_exist=False)[0]


def merges(depth):
    lines = ["a0: &a0 {k: v, l: w}"]
    lines += [f"a{n}: &a{n} {{<<: [{','.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, depth)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [
        merges(40),
        "a: &a 1\nb: [" + ",".join(["*a"] * 5000) + "]",
        "port: 0x" + "f" * 100_000,
        "port: 1" + ":59" * 20_000,
        "a: {b: 0x" + "f" * 100_000 + "}",
        "a:\n  2024-01-01: b\n",
        "a: " + "[" * 50_000,
    ],
    ids=["merges", "aliases", "hexadecimal", "sexagesimal", "nested-number", "keys", "deep"],
)
def test_a_configuration_that_would_take_all_memory_or_cannot_be_written_is_refused(tmp_path, text):
    with pytest.raises(BadLaunch):
        takes_no_time(lambda: of_config(tmp_path, text))


def test_merges_as_people_write_them_are_read(tmp_path):
    text = "base: &base {a: 1}\nspeculative-config:\n  <<: *base\n  b: 2\nport: 9\n"
    assert '{"a": 1, "b": 2}' in of_config(tmp_path, text).file_args


@pytest.mark.parametrize(
    "text",
    [
        "api-key: sword-fish: x", "api-key: 'sword-fish\n\tx: y", "api-key: *sword-fish", "api-key: !sword-fish x",
        "? [sword-fish]\n: x", "api-key: !!int sword-fish", 'api-key: "sword-fish\\q"', "api-key: %sword-fish",
    ],
)  # fmt: skip
def test_the_error_of_a_configuration_cites_nothing_of_it(tmp_path, text):
    with pytest.raises(BadLaunch) as caught:
        of_config(tmp_path, text)
    assert "sword" not in str(caught.value)


def test_every_key_of_a_configuration_is_known_as_a_secret(tmp_path):
    launch = of_config(tmp_path, "api-key: [first-secret, second-secret]\nhf-token: third-secret\n")
    assert {"first-secret", "second-secret", "third-secret"} <= secrets_of(launch)


@pytest.mark.parametrize(
    "argv",
    [
        ["env", "BASH_ENV=/x.sh", "bash", "-c", "vllm serve M --port 9"],  # the shell would read that first
        ["bash", "-c", "time vllm serve M --port 9"],  # a word of the shell's own
        ["bash", "-c", "A=B -u HOME vllm serve M --port 9"],  # env would take -u for its own
    ],
)
def test_a_shell_that_does_something_of_its_own_is_not_left_out(argv):
    launch, _ = read_command(argv, url="http://127.0.0.1:9", env={}, cwd="/", must_exist=False)
    assert launch.argv == tuple(argv)


def test_the_interpreter_of_a_script_that_is_a_fifo_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "vllm")
    argv = [str(tmp_path / "vllm"), "serve", "M"]
    launch, _ = takes_no_time(lambda: read_command(argv, env={}, cwd="/", must_exist=False))
    assert launch.version is None


def test_a_name_is_looked_up_once_and_asked_by_its_address(monkeypatch):
    """What means this machine now could mean another one when it is asked."""
    launch, _ = read_command(
        ["vllm", "serve", "M", "--host", "rebinds.example", "--port", "9"], env={}, cwd="/", must_exist=False
    )
    asked = []

    def look_up(host, *words, **options):
        asked.append(host)
        return [(2, 1, 6, "", ("203.0.113.7", 0)), (2, 1, 6, "", ("127.0.0.2", 0))]

    monkeypatch.setattr(places.socket, "getaddrinfo", look_up)
    assert (here(launch).url, here(launch).host) == ("http://127.0.0.2:9", "127.0.0.2")
    assert set(asked) == {"rebinds.example"}
    assert on_loopback(launch).url == "http://127.0.0.1:9"
    for host in ("203.0.113.7", "::ffff:203.0.113.7"):
        assert here(replace(launch, host=host, url=f"http://{host}:9")).url == "http://127.0.0.1:9"
    for host in ("localhost", "127.0.0.1"):
        assert here(replace(launch, host=host, url=f"http://{host}:9")).url == f"http://{host}:9"


def test_py_spy_is_not_taken_from_the_current_directory(tmp_path, monkeypatch):
    shutil.copy("/bin/true", tmp_path / "py-spy")
    monkeypatch.chdir(tmp_path)
    for path in (".", "", f".{os.pathsep}", "sub/.."):
        assert find_py_spy((), path) is None
    assert find_py_spy((), str(tmp_path)) == str(tmp_path / "py-spy")


def test_names_and_places_are_taken_out_of_a_long_line_in_no_time():
    text = takes_no_time(lambda: Placeholders().text("1." * 30_000 + " somebody@example.org"))
    assert "example.org" not in text


# ----------------------------------------------------------------------------------------- its memory


KNOWN = layouts._KNOWN[f"3.{min(sys.version_info.minor, 12)}"]


@pytest.mark.parametrize("seed", range(6))
def test_a_process_that_lies_about_its_interpreter_is_told_as_unseen_and_never_raises(monkeypatch, seed):
    """Python 3.13 tells its offsets itself, so that they may be anything; here any Python is read with such ones."""
    chance = random.Random(seed)
    with running(sys.executable, str(DEADLOCK), lines=2) as process:
        started = start_time(process.pid)
        for _ in range(60):
            told = dict(KNOWN)
            for name in chance.sample(sorted(told), chance.randint(1, 3)):
                told[name] = chance.choice([0, 1, 8, 64, 1 << 19, (1 << 20) - 1, (KNOWN[name] or 0) + 8])
            lying = layouts.Layout(f"3.{min(sys.version_info.minor, 12)}", **told)
            monkeypatch.setattr(pystacks, "layout_of", lambda _memory, _symbols, lying=lying: lying)
            answer = read_threads(process.pid, started, within=2.0)
            assert ("threads" in answer) != ("unseen" in answer)


# --------------------------------------------------------------------------------------- the list of servers


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_pid_in_the_list_is_whole_whatever_stands_beside_it(monkeypatch, capsys, is_terminal):
    """A pid that is cut short is another process's."""
    launch, _ = read_command(["vllm", "serve", "/models/" + "long/" * 60], env={}, cwd="/", must_exist=False)
    servers = tuple(FoundServer(pid=4194300 + n, started=1, user="u" * 20, launch=launch) for n in range(2))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    _print_table(servers, None)
    words = capsys.readouterr().out.split()
    assert {"4194300", "4194301"} <= set(words)
