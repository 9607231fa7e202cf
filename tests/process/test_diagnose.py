"""``hangguard diagnose``: one look at real servers that somebody else started. It touches nothing."""

import contextlib
import getpass
import http.client
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path

import anyio
import pytest
from commands import hangguard, poll
from looked_at import AS_NOBODY, little, python
from terminals import on_a_terminal

from hangguard import BadLaunch, NoSuchServer, Stuck, Unclear, adiagnose, diagnose
from hangguard.observe.lane import Lane
from hangguard.observe.ports import free_port
from hangguard.observe.rights import Rights, rights_of
from hangguard.supervision.diagnose import WITHIN
from hangguard.supervision.found import find_servers
from hangguard.supervision.places import place_of

pytestmark = pytest.mark.anyio

HUNG = "Capture target decode CUDA graph begin"
READY = "ready to roll"
SECRET = "hf_abcdefghijklmnopqrstuvwx"
PROMPT = "what does my doctor say about"


def tree_of(folder):
    """Every file below, with its size and change: what would show that something was written."""
    return {str(path): (path.lstat().st_size, path.lstat().st_mtime_ns) for path in sorted(folder.rglob("*"))}


@contextmanager
def watched(server):
    """Watch the threads of a server all the time; give the set of all states that were ever seen."""
    seen, over = set(), threading.Event()

    def watch():
        while not over.wait(0.02):
            for state in server.states().values():
                seen.update(line for line in state if line == "stopped" or line.startswith(("TracerPid", "SigPnd")))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield seen
    finally:
        over.set()
        watcher.join()


# ------------------------------------------------------------------------------------ states of servers


@pytest.fixture(scope="module")
def looks(tmp_path_factory):
    """Several servers, each looked at by a hangguard of its own, all at once: they mostly wait."""
    folder = tmp_path_factory.mktemp("looks")
    with ExitStack() as everything:

        def start(name, until, **options):
            made = everything.enter_context(little(folder / name, **options)).says(until)
            return made, *look_at(name, made, "--json")

        def look_at(name, made, *words):
            home = folder / f"{name}-home"
            home.mkdir(exist_ok=True)
            running = hangguard(home, "diagnose", made.pid, *words, env={"HOME": str(home)})
            return everything.enter_context(running), time.monotonic()

        found = {
            "hung": start("hung", HUNG, deadlock_at_capture=True, api_key="sk-verysecretkey0123456789"),
            "idle": start("idle", READY, tp=1),
            "stopped": start("stopped", "Load weight begin", faults=(("weights-load", "stop-self"),), fault_rank=1),
            "spin": start("spin", "Load weight begin", faults=(("weights-load", "spin"),), fault_rank=0, tp=1),
        }
        yield found


def result(looks, name):
    server, running, _ = looks[name]
    code = running.wait(60)
    assert running.err == ""
    document = json.loads(running.out)
    assert document["schema"] == 1
    assert document["exit_code"] == code
    assert document["server"]["pid"] == server.pid
    return document, code


def test_a_hung_server_is_stuck_with_its_phase_and_its_suspects(looks):
    document, code = result(looks, "hung")
    verdict = document["verdict"]
    assert (code, verdict["verdict"], verdict["kind"], verdict["phase"]) == (20, "stuck", "idle", "graph-capture")
    assert {suspect["title"] for suspect in verdict["suspects"]} == {"sglang::scheduler_TP0", "sglang::scheduler_TP1"}
    assert all("_deadlock" in " ".join(suspect["at"]) for suspect in verdict["suspects"])
    assert document["log"]["silent_for"] >= verdict["still_for"] - 2  # longer than anybody looked
    assert any("--disable-cuda-graph" in advice for advice in document["advice"])
    assert "sk-verysecret" not in json.dumps(document)


def test_a_healthy_idle_server_is_ready_and_nothing_is_asked_of_it_that_costs(looks):
    document, code = result(looks, "idle")
    assert (code, document["verdict"]["verdict"]) == (0, "ready")
    server = looks["idle"][0]
    assert "POST" not in server.log.read_text().partition(READY)[2]  # no completion: that is not ours to ask


def test_a_stopped_member_is_named_and_what_lets_it_go_on(looks):
    document, code = result(looks, "stopped")
    assert (code, document["verdict"]["verdict"], document["verdict"]["kind"]) == (20, "stuck", "stopped")
    culprit = document["verdict"]["suspects"][0]
    assert culprit["title"] == "sglang::scheduler_TP1"
    assert f"kill -CONT {culprit['pid']}" in document["advice"][0]


def test_a_server_that_only_burns_cpu_is_neither_healthy_nor_called_stuck_after_one_look(looks):
    document, code = result(looks, "spin")
    assert (code, document["verdict"]["verdict"]) == (21, "unclear")
    assert "produced nothing" in document["verdict"]["why"]


def test_all_of_it_takes_less_than_15_seconds_of_looking(looks):
    for name in looks:
        document, _ = result(looks, name)
        assert document["seconds"] < WITHIN


def ask(server):
    """Ask for a completion, and never mind the answer."""
    body = json.dumps({"model": "tiny", "prompt": PROMPT, "max_tokens": 4}).encode()
    request = urllib.request.Request(server.url + "/v1/completions", body, {"Content-Type": "application/json"})
    with contextlib.suppress(OSError, http.client.HTTPException):
        urllib.request.urlopen(request, timeout=60).read()


def test_a_server_that_answers_its_health_route_while_requests_hang_is_not_called_healthy(tmp_path):
    """In the usual time it is said that nothing came out; a longer look proves it."""
    options = {"shallow_health": True, "faults": (("serving", "deadlock"),)}
    with little(tmp_path / "server", **options) as server:
        server.says(READY)
        asker = threading.Thread(target=ask, args=(server,))
        asker.start()
        with hangguard(tmp_path, "diagnose", server.pid, "--json") as quick:
            with hangguard(tmp_path, "diagnose", server.pid, "--json", "--within", "40") as longer:
                assert quick.wait(60) == 21
                assert "nothing came out" in json.loads(quick.out)["verdict"]["why"]
                assert longer.wait(80) == 20
                verdict = json.loads(longer.out)["verdict"]
                assert (verdict["verdict"], verdict["kind"]) == ("stuck", "serving")
        server.end()
        asker.join()


# -------------------------------------------------------------------------------------- it touches nothing


def test_states_before_are_states_after_and_no_file_is_written(tmp_path):
    home = tmp_path / "home"
    (home / "state").mkdir(parents=True)
    env = {"HOME": str(home), "XDG_STATE_HOME": str(home / "state"), "PYTHONDONTWRITEBYTECODE": "1"}
    with little(tmp_path / "server", deadlock_at_capture=True) as server:
        server.says(HUNG, times=2)
        before, files = server.states(), tree_of(server.folder)
        with watched(server) as seen, hangguard(home, "diagnose", server.pid, "--json", env=env) as running:
            assert running.wait(60) == 20
        assert server.states() == before
        assert seen == {"TracerPid:\t0", "SigPnd:\t0000000000000000"}  # not even for a moment
        assert tree_of(server.folder) == files
        assert {Path(path).suffix for path in tree_of(home)} <= {"", ".out", ".err"}  # the test's own two
        assert list((home / "state").iterdir()) == []
        assert server.process.poll() is None


TRAPS = """
import os, sys, time
for name in ("python", "py-spy", "env", "sh", "git", "nvidia-smi", "ps", "sglang"):
    open(name, "w").write("#!/bin/sh\\ntouch " + sys.argv[1] + "\\n")
    os.chmod(name, 0o755)
open("sitecustomize.py", "w").write("open(%r, 'w')" % sys.argv[1])
open("sglang.py", "w").write("open(%r, 'w')" % sys.argv[1])
env = {"PATH": os.getcwd(), "PYTHONPATH": os.getcwd(), "LD_PRELOAD": "/nowhere.so", "PYTHONSTARTUP": "sitecustomize.py"}
os.execve(sys.executable, ["./python", "-c", "import time; print('up', flush=True); time.sleep(600)",
          "-m", "sglang.launch_server", "--port", sys.argv[2]], env)
"""


def test_nothing_that_the_server_names_is_executed(tmp_path):
    """Its interpreter, what lies on its PATH and PYTHONPATH: each would leave a mark."""
    mark = tmp_path / "executed"
    with python(tmp_path / "trap", TRAPS, mark, free_port()) as server:
        server.says("up")
        mark.unlink(missing_ok=True)  # its own start may have run what it wrote
        look = diagnose(server.pid, engine="sglang", within=4)
        assert look.server.pid == server.pid
        assert not mark.exists()


@contextmanager
def everybodys_folder():
    """A folder that another user can reach."""
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="hg-"))
    folder.chmod(0o777)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


LOOKS_LIKE_A_SERVER = """
import os, sys, time
descriptor = os.open(sys.argv[1], os.O_PATH)
os.dup2(descriptor, 1)
os.dup2(descriptor, 2)
open(sys.argv[2], "w").close()
time.sleep(600)
"""


def test_a_server_that_has_said_nothing_yet_is_looked_at(tmp_path):
    with python(tmp_path / "silent", "import time\ntime.sleep(600)\n") as server:
        assert diagnose(server.pid, within=3).log_tail == ()


def test_root_reads_with_the_rights_of_the_servers_user(tmp_path):
    """A log that is a descriptor of a foreign file, and a configuration that is a link to one, show nothing."""
    assert os.geteuid() == 0, "this test is about what root does"
    with everybodys_folder() as folder:
        secret = folder / "shadow"
        secret.write_text("vllm: error: the password is swordfish\n")
        secret.chmod(0o600)
        (folder / "config.yaml").symlink_to(secret)
        (folder / "given.log").symlink_to(secret)
        words = (secret, folder / "up", "--config", folder / "config.yaml", "--port", free_port())
        with python(tmp_path / "hostile", LOOKS_LIKE_A_SERVER, *words, inside=AS_NOBODY) as server:
            poll((folder / "up").exists)
            assert rights_of(server.pid) == Rights(65534, 65534, ())
            for log in (None, str(folder / "given.log")):
                look = diagnose(server.pid, engine="vllm", log=log, within=4)
                assert "swordfish" not in repr(look)
                assert look.log_path is None
                assert look.log_tail == ()
                (missing,) = [m for m in look.missing if m.source == "log"]
                assert "ermi" in missing.reason or "may not read" in missing.reason
        (folder / "own.log").write_text("one line\n")
        with python(
            tmp_path / "honest", LOOKS_LIKE_A_SERVER, folder / "own.log", folder / "up2", inside=AS_NOBODY
        ) as s:
            poll((folder / "up2").exists)
            assert diagnose(s.pid, within=4).log_tail == ("one line",)


async def test_rights_are_of_one_thread_alone():
    assert os.geteuid() == 0, "this test is about what root does"
    lane = Lane("rights", Rights(65534, 65534, ()))
    with pytest.raises(PermissionError):
        await lane.ask(lambda: Path("/etc/shadow").read_bytes(), within=5)
    assert Path("/etc/shadow").read_bytes()
    assert "\nUid:\t0\t0\t0\t0" in Path("/proc/self/status").read_text()
    lane.close()


def test_a_log_that_is_no_file_is_not_opened(tmp_path):
    """A FIFO would make us wait; a terminal or a device would do something."""
    os.mkfifo(tmp_path / "fifo")
    with little(tmp_path / "server", tp=1) as server:
        server.says(READY)
        look = diagnose(server.pid, log=str(tmp_path / "fifo"), within=4)
        assert [m.reason for m in look.missing if m.source == "log"] == [f"{tmp_path}/fifo: it is no regular file"]


def test_where_the_output_goes_into_a_pipe_that_is_said_and_a_log_can_be_given(tmp_path):
    out, into = os.pipe()
    with little(tmp_path / "server", tp=1, out=into) as server:
        os.close(into)
        assert b"server_args" in os.read(out, 4096)
        given = tmp_path / "copy.log"
        given.write_text("the only line\n")
        look = diagnose(server.pid, within=3)
        (missing,) = [m for m in look.missing if m.source == "log"]
        assert "pipe" in missing.reason
        assert "--log" in missing.helps + missing.reason
        assert diagnose(server.pid, log=str(given), within=3).log_tail == ("the only line",)
    os.close(out)


def test_another_users_server_is_looked_at_as_far_as_the_kernel_allows(tmp_path):
    with little(tmp_path / "server", deadlock_at_capture=True) as server:
        server.says(HUNG, times=2)
        with everybodys_folder() as home:
            words = ("diagnose", server.pid, "--json")
            with hangguard(home, *words, inside=AS_NOBODY, env={"HOME": str(home)}) as running:
                assert running.wait(60) in {20, 21}
                document = json.loads(running.out)
    assert document["server"]["processes"] == 4
    assert document["server"]["user"] == getpass.getuser()
    sources = {missing["source"] for missing in document["missing"]}
    assert {"server", "log", "stacks", "bytes read"} <= sources
    assert any("sudo" in missing["helps"] for missing in document["missing"])
    assert document["verdict"]["verdict"] == "unclear"  # what the verdict needs was not seen


# ----------------------------------------------------------------------------------------- which server


async def test_servers_are_found_without_a_name_and_children_are_not_taken_for_servers(tmp_path):
    with little(tmp_path / "one") as one, little(tmp_path / "two", tp=1) as two:
        one.says(READY)
        two.says(READY)
        members = {*one.members()[1:], *two.members()[1:]}
        found = {server.pid: server for server in await find_servers()}
    assert {one.pid, two.pid} <= set(found)
    assert found[one.pid].processes == 4
    assert (found[one.pid].launch.engine, found[one.pid].launch.port) == ("sglang", one.port)
    assert found[one.pid].started == one.started
    assert not {pid for pid in found if pid in members}


def test_several_servers_are_listed_with_what_to_say(tmp_path):
    with little(tmp_path / "one", tp=1) as one, little(tmp_path / "two", tp=1) as two:
        one.says(READY)
        two.says(READY)
        with hangguard(tmp_path, "diagnose") as running:
            assert running.wait() == 22
            assert "servers on this machine" in running.err
            assert "Which one?  hangguard diagnose" in running.err
            rows = [line.split()[0] for line in running.out.splitlines()[1:]]
            assert {str(one.pid), str(two.pid)} <= set(rows)
        with hangguard(tmp_path, "diagnose", "--json") as running:
            assert running.wait() == 22
            assert {one.pid, two.pid} <= {server["pid"] for server in json.loads(running.out)["candidates"]}


def test_alone_on_its_machine_it_needs_no_name(tmp_path):
    """In a pid namespace of its own: this machine may have other servers."""
    script = (
        '"$0" -m hangguard.testing.server --port "$1" --tp 1 --phase-seconds 0.02 --hold-mb 1 >log 2>&1 & '
        'until grep -q "ready to roll" log; do sleep 0.05; done; "$0" -m hangguard diagnose --json; kill $!'
    )
    inside = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "bash", "-c", script)
    command = [*inside, sys.executable, str(free_port())]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    document = json.loads(done.stdout)
    assert document["server"]["launch"]["engine"] == "sglang"
    assert document["verdict"]["verdict"] == "ready", document["verdict"]


def test_any_member_and_the_url_mean_the_whole_server(tmp_path):
    with little(tmp_path / "server", tp=1) as server:
        server.says(READY)
        worker = server.members()[1]
        look = diagnose(worker, within=3)
        assert look.server.pid == server.pid
        assert any(str(worker) in missing.reason for missing in look.missing)
        assert diagnose(server.url, within=3).server.pid == server.pid
        assert diagnose(url=f"{server.url}/v1/completions", within=3).server.pid == server.pid


def test_a_server_that_does_not_listen_yet_is_found_by_the_url_that_it_will_have(tmp_path):
    with little(tmp_path / "server", deadlock_at_capture=True, tp=1) as server:
        server.says(HUNG)
        assert diagnose(server.url, within=3).server.pid == server.pid


def test_what_does_not_exist_is_said():
    gone = subprocess.Popen(["true"])
    gone.wait()
    with pytest.raises(NoSuchServer, match=f"Process {gone.pid} does not exist"):
        diagnose(gone.pid)
    with pytest.raises(NoSuchServer, match="Nobody listens on port"):
        diagnose(f"http://127.0.0.1:{free_port()}")
    for target in (0, 1, -5, True, 3.5, "nonsense", "ftp://x", "http://", "http://h:99999"):
        with pytest.raises(BadLaunch):
            diagnose(target)
    with pytest.raises(BadLaunch, match="twice"):
        diagnose(5, pid=6)
    with pytest.raises(BadLaunch, match="within"):
        diagnose(os.getpid(), within=0.5)


def test_a_zombie_has_ended_and_is_no_server():
    zombie = subprocess.Popen(["true"])
    poll(lambda: Path(f"/proc/{zombie.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
    with pytest.raises(NoSuchServer, match="has ended"):
        diagnose(zombie.pid)
    zombie.wait()


def test_of_another_machine_only_the_answers_can_be_seen():
    look = diagnose("http://192.0.2.1:8000", within=4)  # TEST-NET-1, RFC 5737: nobody has it
    assert isinstance(look.verdict, Unclear)
    assert look.server.pid == 0
    assert {"server", "processes", "log"} <= {missing.source for missing in look.missing}
    assert look.seconds < 4


def test_a_server_that_ends_meanwhile_has_ended(tmp_path):
    with little(tmp_path / "server", tp=1) as server:
        server.says(READY)
        threading.Timer(2.0, lambda: os.kill(server.pid, signal.SIGTERM)).start()
        look = diagnose(server.pid, within=13)
        assert look.verdict.verdict == "exited"


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("http://h:1/v1", ("http://h:1", "h", 1)),
        ("http://h:1/v1/chat/completions", ("http://h:1", "h", 1)),
        ("https://h/a/b/", ("https://h:443/a/b", "h", 443)),
        ("http://u:p@[::1]:5/health", ("http://[::1]:5", "::1", 5)),
    ],
)
def test_a_url_is_read_as_people_paste_it(url, place):
    assert place_of(url) == place


# ------------------------------------------------------------------------------------- secrets, sharing

TALKS = """
import sys
print("Received request cmpl-1: prompt: 'what does my doctor say about x', params: SamplingParams(n=1)", flush=True)
print("GenerateReqInput(rid='1', text='what does my doctor say about it', input_ids=[1, 2, 3])", flush=True)
print("HF_TOKEN=hf_abcdefghijklmnopqrstuvwx api_key='sk-verysecretkey0123456789'", flush=True)
print("peer node17.example.org at 10.20.30.40:5000, fe80::1ff:fe23:4567:890a, mail me@example.org", flush=True)
print(f"loading /home/alice/models/secret-llm/model.safetensors for alice from {sys.argv[1]}", flush=True)
print("reading http://node17.example.org:8000/v1/models and tcp://10.20.30.40:1234", flush=True)
import time
time.sleep(600)
"""


def test_secrets_prompts_and_with_share_names_and_places_are_out(tmp_path):
    words = (tmp_path, "--model", "/home/alice/models/secret-llm", "--api-key", "topsecretkey", "--port", free_port())
    env = {"HF_TOKEN": SECRET, "USER": "alice", "MASTER_ADDR": "node17.example.org"}
    with python(tmp_path / "server", TALKS, *words, env=env) as server:
        server.says("tcp://")
        for options in (("--json",), (), ("--issue", "vllm"), ("--issue", "sglang")):
            with ExitStack() as both:
                words = ("diagnose", server.pid, "--engine", "vllm", "--within", "3", *options)
                plain = both.enter_context(hangguard(tmp_path, *words))
                shared = both.enter_context(hangguard(tmp_path, *words, "--share", env={"USER": "alice"}))
                assert plain.wait(30) == shared.wait(30)
                for text in (plain.out, shared.out):
                    assert SECRET not in text
                    assert "sk-verysecret" not in text
                    assert "topsecretkey" not in text
                    assert PROMPT not in text
                    assert len(text) < 60_000
                for name in ("alice", "secret-llm", "node17", "example.org", "10.20.30.40", "fe80:", str(tmp_path)):
                    assert name not in shared.out, (options, name)
                assert socket.gethostname() not in shared.out
                assert "<model>" in shared.out
                if "--json" in options:
                    tail = json.loads(shared.out)["log"]["tail"]
                    assert tail[3].count("<address-1>") == 1
                    assert "<address-1>" in tail[5]  # the same address has the same name
                    assert "127.0.0.1" not in shared.out


def test_the_form_of_each_tracker_has_its_headings_and_closed_fences(tmp_path):
    with little(tmp_path / "server", deadlock_at_capture=True, garbage=True) as server:
        server.says(HUNG)
        for tracker, headings in (
            (
                "vllm",
                ("### Your current environment", "### 🐛 Describe the bug", "### Before submitting a new issue..."),
            ),
            ("sglang", ("### Checklist", "### Describe the bug", "### Reproduction", "### Environment")),
        ):
            with hangguard(tmp_path, "diagnose", server.pid, "--issue", tracker, "--within", "4") as running:
                assert running.wait(30) in {20, 21}
                text = running.out
            places = [text.index(f"\n{heading}\n") for heading in headings]
            assert places == sorted(places)
            assert text.count("\n```") % 2 == 0
            assert text.count("<details>") == text.count("</details>") >= 1
            assert "--deadlock-at-capture" in text
            assert "_deadlock" in text
            assert not [c for c in text if ord(c) < 32 and c not in "\n\t"]
            assert len(text) < 60_000


# ----------------------------------------------------------------------------------------------- faces


async def test_the_asynchronous_face_blocks_nobody(tmp_path):
    """Also on trio; somebody else's task goes on meanwhile."""
    with little(tmp_path / "server", deadlock_at_capture=True, tp=1) as server:
        server.says(HUNG)
        ticks = []

        async def tick():
            while True:
                ticks.append(time.monotonic())
                await anyio.sleep(0.02)

        async with anyio.create_task_group() as group:
            group.start_soon(tick)
            look = await adiagnose(server.pid)
            group.cancel_scope.cancel()
        assert isinstance(look.verdict, Stuck)
        assert look.is_stuck
        assert look.seconds < WITHIN
        assert max(after - before for before, after in itertools.pairwise(ticks)) < 2.0


async def test_the_blocking_face_works_inside_a_running_loop(tmp_path):
    with little(tmp_path / "server", tp=1) as server:
        server.says(READY)
        assert diagnose(server.pid, within=3).server.pid == server.pid


def test_usage_errors_end_with_2(tmp_path):
    for words in (("nonsense",), ("1",), ("--issue", "other"), ("http://",), ("--within", "0")):
        with hangguard(tmp_path, "diagnose", *words) as running:
            assert running.wait() == 2
            assert "Traceback" not in running.err


def test_on_a_terminal_no_line_is_wider_than_it(tmp_path):
    with little(tmp_path / "server", deadlock_at_capture=True) as server:
        server.says(HUNG)
        with on_a_terminal(tmp_path, 80, "diagnose", str(server.pid), "--within", "5") as (running, read, screen):
            running.wait(30)
            read()
            rows = [row for row in screen.text.splitlines() if row.strip()]
        assert max(map(len, rows)) <= 80
        assert any("Next" in row for row in rows)
