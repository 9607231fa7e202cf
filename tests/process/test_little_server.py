"""The little server is what it says: it starts, answers, deadlocks for real, and leaves nothing behind."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from commands import poll

from hangguard.testing import little_server_command

PROMPT = {"model": "tiny", "prompt": "hello world", "max_tokens": 6}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def stat_fields(pid):
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


def alive(pid):
    fields = stat_fields(pid)
    return fields is not None and fields[0] not in "ZX"


def cpu_ticks(pids):
    return sum(int(fields[11]) + int(fields[12]) for fields in map(stat_fields, pids) if fields)


def title(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


class Started:
    """One little server in a session of its own, and everything that was seen of its tree."""

    def __init__(self, folder, **options):
        self.port = options.setdefault("port", free_port())
        options.setdefault("phase_seconds", 0.1)
        self.log_path = folder / "server.log"
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                little_server_command(**options), stdout=log, stderr=log, start_new_session=True
            )

    def members(self):
        """Return the pids of the session that the server leads; its number is kept from reuse until the end."""
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        session = str(self.process.pid)
        return [pid for pid in pids if (fields := stat_fields(pid)) and fields[3] == session and alive(pid)]

    def exit_code(self):
        """Return how the main process ended, without reaping it; ``None`` while it runs."""
        seen = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if seen is None:
            return None
        return seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status

    def titles(self):
        return {title(pid): pid for pid in self.members()}

    def log(self):
        return self.log_path.read_text(errors="replace")

    def ready(self):
        poll(lambda: "fired up" in self.log() or self.exit_code() is not None)
        assert self.exit_code() is None, self.log()
        return self

    def ask(self, path, body=None, *, key=None, within=5.0):
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}")
        if body is not None:
            request.data = json.dumps(body).encode()
        if key:
            request.add_header("Authorization", f"Bearer {key}")
        try:
            with urllib.request.urlopen(request, timeout=within) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def wait(self, within=10.0):
        poll(lambda: self.exit_code() is not None, within)
        return self.exit_code()

    def end(self):
        """Kill what is left of the session, by pid, and reap the main process."""
        for pid in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        poll(lambda: not self.members())
        self.process.wait(5)


@pytest.fixture
def start(tmp_path):
    """Return a function that starts a little server; all of them are ended afterwards."""
    started = []

    def begin(**options):
        started.append(Started(tmp_path, **options))
        return started[-1]

    yield begin
    for server in started:
        server.end()


def test_a_healthy_start_takes_about_three_seconds_and_answers_a_completion(start):
    began = time.monotonic()
    server = start(phase_seconds=0.4).ready()
    took = time.monotonic() - began
    assert 1.5 < took < 15
    status, answer = server.ask("/v1/completions", PROMPT)
    assert status == 200
    assert len(answer["choices"][0]["text"].split()) == 6
    assert server.ask("/v1/models")[1]["data"][0]["id"] == "tiny"
    assert server.ask("/health")[0] == 200


def test_the_log_has_the_markers_of_sglang_in_order(start):
    log = start().ready().log()
    markers = [
        "server_args=", "TP0] Init torch distributed begin.", "TP0] Init torch distributed ends.",
        "TP0] Load weight begin.", "Loading safetensors checkpoint shards: 100%", "TP0] Load weight end.",
        "TP0] KV Cache is allocated.", "TP0] Memory pool end.", "TP0] Capture target prefill CUDA graph begin.",
        "TP0] Capture target prefill CUDA graph end.", "TP0] Capture target decode CUDA graph begin.",
        "TP0] Capture target decode CUDA graph end.", "TP0] max_total_num_tokens=",
        "Uvicorn running on", "The server is fired up and ready to roll!",
    ]  # fmt: skip
    places = [log.index(marker) for marker in markers]
    assert places == sorted(places)


def test_members_have_the_titles_of_sglang_and_hold_their_memory(start):
    titles = start(tp=2, hold_mb=64).ready().titles()
    assert {"sglang::scheduler_TP0", "sglang::scheduler_TP1", "sglang::detokenizer"} <= titles.keys()
    assert len(titles) == 4
    resident = int(Path(f"/proc/{titles['sglang::scheduler_TP0']}/statm").read_text().split()[1]) * 4096
    assert resident > 64 << 20


def test_titles_need_no_setproctitle():
    program = (
        "import sys; sys.modules['setproctitle'] = None\n"
        "from hangguard.testing._process import set_title\n"
        "set_title('sglang::scheduler_TP0')\n"
        "print(open('/proc/self/cmdline').read().rstrip('\\0'), open('/proc/self/comm').read())"
    )
    seen = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert seen.split() == ["sglang::scheduler_TP0", "sglang::schedul"]


def test_a_deadlock_at_capture_is_a_real_one(start):
    server = start(deadlock_at_capture=True)
    poll(lambda: server.log().count("Capture target decode CUDA graph begin") == 2)
    schedulers = [pid for name, pid in server.titles().items() if "scheduler" in name]
    assert len(schedulers) == 2
    threads = lambda: [  # noqa: E731
        (task / "wchan").read_text() for pid in schedulers for task in Path(f"/proc/{pid}/task").iterdir()
    ]
    # per worker: two threads wait for each other's lock, one for the main process's end
    poll(lambda: sum("futex" in channel for channel in threads()) == 4)
    members = server.members()
    before, length = cpu_ticks(members), len(server.log())
    time.sleep(1.0)  # the time over which stillness is measured, not a wait for something
    assert cpu_ticks(members) - before <= 1
    assert len(server.log()) == length
    assert len(server.members()) == 4
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", server.port), 1):
        pass


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stack_of_the_deadlock_shows_the_step_and_the_other_ranks_wait(start, rank):
    server = start(deadlock_at_capture=True, fault_rank=rank)
    poll(lambda: server.log().count("Capture target decode CUDA graph end") == 1)
    pid = poll(lambda: server.titles().get(f"sglang::scheduler_TP{rank}"))

    def dump():
        spy = Path(sys.executable).with_name("py-spy")
        return subprocess.run(
            [spy, "dump", "--nonblocking", "--pid", str(pid)], check=False, capture_output=True, text=True, timeout=20
        ).stdout

    assert "init_cuda_graphs" in poll(lambda: dump() if "_deadlock" in dump() else "")


def test_disable_cuda_graph_cures_the_deadlock(start):
    server = start(deadlock_at_capture=True, disable_cuda_graph=True).ready()
    assert server.ask("/v1/completions", PROMPT)[0] == 200
    assert "Capture target" not in server.log()


def test_the_newer_form_of_the_flag_cures_it_too(start, tmp_path):
    command = little_server_command(port=free_port(), phase_seconds=0.05, deadlock_at_capture=True)
    command += ["--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-prefill=disabled"]
    log = tmp_path / "newer.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink)
    try:
        poll(lambda: "fired up" in log.read_text())
    finally:
        process.terminate()
        assert process.wait(5) == 0


def test_sigterm_ends_it_with_code_0_and_leaves_no_process(start):
    server = start(leave_shm=True).ready()
    members = server.members()
    assert len(members) == 5  # with the resource tracker
    began = time.monotonic()
    os.kill(server.process.pid, signal.SIGTERM)
    assert server.wait() == 0
    assert time.monotonic() - began < 2
    poll(lambda: not any(map(alive, members)))


def test_sigterm_to_the_whole_group_is_a_clean_end_too(start):
    server = start().ready()
    os.killpg(server.process.pid, signal.SIGTERM)
    assert server.wait() == 0
    poll(lambda: not server.members())
    assert "crashed" not in server.log()


def test_workers_end_within_a_second_of_the_main_process_even_deadlocked(start):
    server = start(deadlock_at_capture=True)
    poll(lambda: server.log().count("Capture target decode CUDA graph begin") == 2)
    os.kill(server.process.pid, signal.SIGKILL)
    assert server.wait() == -signal.SIGKILL
    poll(lambda: not server.members(), within=1.0)


def test_orphans_live_on(start):
    server = start(orphans=True).ready()
    workers = [pid for pid in server.members() if pid != server.process.pid]
    os.kill(server.process.pid, signal.SIGKILL)
    server.wait()
    time.sleep(0.5)  # they would be gone by now
    assert len(workers) == 3
    assert all(map(alive, workers))


def test_the_key_is_checked(start):
    server = start(api_key="secret-key").ready()
    assert server.ask("/v1/models")[0] == 401
    assert server.ask("/v1/completions", PROMPT)[0] == 401
    assert server.ask("/v1/completions", PROMPT, key="wrong")[0] == 401
    assert server.ask("/v1/completions", PROMPT, key="secret-key")[0] == 200
    assert server.ask("/health")[0] == 200


def test_an_embedding_server_answers_embeddings_and_no_completion(start):
    server = start(is_embedding=True).ready()
    status, answer = server.ask("/v1/embeddings", {"model": "tiny", "input": "hello"})
    assert status == 200
    assert len(answer["data"][0]["embedding"]) == 8
    assert server.ask("/v1/completions", PROMPT)[0] == 404


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stuck_worker_means_no_completion_although_the_front_end_answers(start, rank):
    server = start(faults=(("serving", "deadlock"),), fault_rank=rank, fault_after=2, shallow_health=True).ready()
    assert server.ask("/v1/completions", PROMPT)[0] == 200
    with pytest.raises(TimeoutError):
        server.ask("/v1/completions", PROMPT, within=0.7)
    assert server.ask("/health")[0] == 200
    assert server.ask("/v1/models")[0] == 200


def test_a_worker_that_is_killed_takes_the_server_with_it(start):
    server = start(crash_exit=0).ready()
    os.kill(server.titles()["sglang::scheduler_TP1"], signal.SIGKILL)
    assert server.wait() == 0
    assert "Subprocess scheduler_1" in server.log()
    assert "crashed with exit code -9" in server.log()
    poll(lambda: not server.members())


@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [
        ("exit:7", 7, "crashed with exit code 7"),
        ("raise", 1, "Scheduler hit an exception"),
        ("segv", 1, "crashed with exit code -11"),
        ("oom", 1, "CUDA out of memory"),
        ("kill-self", 1, "crashed with exit code -9"),
    ],
)
def test_faults_that_end_it(start, kind, code, words):
    server = start(faults=(("weights-load", kind),), phase_seconds=0.02)
    assert server.wait() == code
    assert words in server.log()
    poll(lambda: not server.members())


@pytest.mark.parametrize(
    "phase", ["import", "dist-init", "weights-load", "kv-cache", "jit-compile", "graph-capture", "warm-up"]
)
def test_a_sleep_in_any_phase_only_makes_it_later(start, phase):
    began = time.monotonic()
    start(faults=((phase, "sleep:0.6"),), phase_seconds=0.02).ready()
    assert time.monotonic() - began > 0.6


def test_a_spin_burns_a_core(start):
    server = start(faults=(("weights-load", "spin"),), fault_rank=0, phase_seconds=0.02)
    pid = poll(lambda: "TP0] Load weight begin" in server.log() and server.titles()["sglang::scheduler_TP0"])
    before = cpu_ticks([pid])
    poll(lambda: cpu_ticks([pid]) - before > 20)


def test_a_compile_is_silent_and_works_in_a_child(start):
    server = start(jit_seconds=1.0, tp=1, phase_seconds=0.02)
    poll(lambda: "Running FlashInfer autotune" in server.log())
    assert poll(lambda: [pid for pid, name in ((p, title(p)) for p in server.members()) if "sys.argv[1]" in name])
    server.ready()
    assert "FlashInfer autotune completed." in server.log()


@pytest.mark.parametrize("cure", ["--disable-custom-all-reduce", "LITTLE_CURE=1"])
def test_a_cure_takes_the_fault_away(start, tmp_path, cure, monkeypatch):
    options = {"faults": (("dist-init", "exit:3"),), "phase_seconds": 0.02}
    assert start(**options, cured_by=cure).wait() == 3
    if not cure.startswith("-"):
        monkeypatch.setenv("LITTLE_CURE", "1")
        start(**options, cured_by=cure).ready()
        return
    command = little_server_command(**options, port=free_port(), cured_by=cure)
    log = tmp_path / "cured.log"
    with log.open("wb") as sink:
        process = subprocess.Popen([*command, cure], stdout=sink, stderr=sink)
    try:
        poll(lambda: "fired up" in log.read_text())
    finally:
        process.terminate()
        assert process.wait(5) == 0


def test_a_fault_may_happen_once(start, tmp_path):
    options = {"faults": (("dist-init", "exit:3"),), "once": str(tmp_path / "once"), "phase_seconds": 0.02}
    assert start(**options).wait() == 3
    start(**options).ready()


def test_it_can_ignore_sigterm(start):
    server = start(ignore_term=True).ready()
    os.killpg(server.process.pid, signal.SIGTERM)
    time.sleep(0.3)  # it would be gone by now
    assert len(server.members()) == 4
    assert server.ask("/v1/completions", PROMPT)[0] == 200


def test_it_can_print_much_before_it_listens(start):
    assert len(start(banner_bytes=300_000, phase_seconds=0.02).ready().log()) > 300_000


def test_it_can_print_one_long_line(start):
    server = start(long_line=3_000_000, phase_seconds=0.02).ready()
    assert max(map(len, server.log().splitlines())) == 3_000_000


def test_it_can_flood_its_log(start):
    server = start(flood=True, phase_seconds=0.02)
    size = lambda: server.log_path.stat().st_size  # noqa: E731
    poll(lambda: size() > 5_000_000)


def test_it_can_print_rubbish(start):
    raw = start(garbage=True, phase_seconds=0.02).ready().log_path.read_bytes()
    assert b"\x1b[2J" in raw
    assert b"\0" in raw


def test_it_can_become_a_daemon(start):
    server = start(fork_and_exit=True)
    assert server.wait() == 0
    log = poll(lambda: server.log() if "fired up" in server.log() else "")
    pid = int(log.split("Started server process [")[1].split("]")[0])
    try:
        assert alive(pid)
        assert server.ask("/v1/completions", PROMPT)[0] == 200
    finally:
        os.kill(pid, signal.SIGTERM)
    poll(lambda: not alive(pid))


@pytest.mark.parametrize("code", [0, 9])
def test_it_can_leave_early(start, code):
    server = start(exit_early=code, phase_seconds=0.02)
    assert server.wait() == code
    assert "fired up" not in server.log()


def test_shared_memory_is_really_there_and_its_own_tracker_removes_it(start):
    server = start(leave_shm=True, phase_seconds=0.02).ready()
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    name = next(line.split()[-1] for line in maps.splitlines() if "/dev/shm/psm_" in line)
    assert Path(name).exists()
    os.kill(server.process.pid, signal.SIGTERM)
    server.wait()
    poll(lambda: not Path(name).exists())


def test_a_flag_that_it_does_not_know_is_refused_in_sglangs_words(start, tmp_path):
    command = [*little_server_command(port=1), "--no-such-flag"]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=20)
    assert result.returncode == 2
    assert "error: unrecognized arguments: --no-such-flag" in result.stderr


def test_a_missing_model_is_told(start, tmp_path):
    server = start(model_path=str(tmp_path / "nowhere"))
    assert server.wait() == 1
    assert "is not a local folder and is not a valid model identifier" in server.log()


def test_a_port_in_use_is_told(start):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        server = start(port=holder.getsockname()[1], phase_seconds=0.02)
        assert server.wait() == 1
        assert "error while attempting to bind on address" in server.log()
