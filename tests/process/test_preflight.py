"""``hangguard preflight``: what stands in the way of a launch, in real worlds. Nothing is changed or started."""

import contextlib
import json
import os
import pwd
import subprocess
import sys
import threading
import time
from pathlib import Path

import anyio
import psutil
import pytest
from commands import hangguard, marked, poll
from faces import living_of_runs
from looked_at import AS_NOBODY, little
from seen import PROGRAMS
from terminals import on_a_terminal
from test_cgroups import group

from hangguard import BadLaunch, CommandNotFound, PortInUse, apreflight, preflight, read_command, supervise
from hangguard.act import _link
from hangguard.facts import MemoryLimit
from hangguard.observe.cgroups import Cgroups
from hangguard.observe.earlier_runs import read_earlier_runs
from hangguard.observe.model_files import find_model
from hangguard.observe.pci import gpu_translations
from hangguard.observe.ports import free_port
from hangguard.observe.procfs import read_started
from hangguard.observe.rooms import room_at
from hangguard.supervision import surroundings
from hangguard.testing import little_server_command

pytestmark = pytest.mark.anyio

MIB = 1 << 20
SECRET = "hf_abcdefghijklmnopqrstuvwx"


def words(port=None, **options):
    """A command that is known as SGLang's, and would start if anybody started it."""
    return little_server_command(**{"tp": 2, "port": port or free_port(), **options})


def rows(document, what):
    return [row for row in document["checks"] if row["what"] == what]


def row(document, what):
    (found,) = rows(document, what)
    return found


def run(folder, *given, code=0, inside=(), env=None, without=(), options=()):
    """Run the command with --json, and return its document."""
    with hangguard(
        folder, "preflight", "--json", *options, "--", *given, inside=inside, env=env, without=without
    ) as running:
        assert running.wait(30) == code, running.err
        document = json.loads(running.out)
    assert document["schema"] == 1
    assert document["exit_code"] == code
    assert document["refused"] == (code != 0)
    assert document["seconds"] < 10
    return document


def as_nobody(folder, *inside, identity="65534", **how):
    """Run it as another user, who may search few folders: with a program that he may execute."""
    folder.chmod(0o777)
    another = tuple(identity if word == "65534" else word for word in AS_NOBODY)
    given = ("sleep", "--tp", "2", "--port", str(free_port()))
    return run(folder, *given, inside=(*inside, *another), options=("--engine", "sglang"), **how)


def mounted(*mounts):
    """Behind these mounts, which nobody else sees."""
    return ("unshare", "--mount", "sh", "-c", f'{" && ".join(mounts)} && exec "$0" "$@"')


def tree_of(folder):
    return {str(path): (path.lstat().st_size, path.lstat().st_mtime_ns) for path in sorted(folder.rglob("*"))}


# ---------------------------------------------------------------------------------------- nothing is changed


def test_states_before_are_states_after_and_no_file_is_written(tmp_path):
    home, model = tmp_path / "home", tmp_path / "model"
    home.mkdir()
    model.mkdir()
    (model / "config.json").write_text("{}")
    caches = {"TORCH_EXTENSIONS_DIR": str(home / "x"), "HF_HOME": str(home / "hf")}
    env = {"HOME": str(home), "XDG_STATE_HOME": str(home / "state"), "PYTHONDONTWRITEBYTECODE": "1", **caches}
    with little(tmp_path / "bystander") as bystander:
        bystander.says("ready to roll")
        before, files = bystander.states(), tree_of(model)
        shm = sorted(os.listdir("/dev/shm"))
        out = tmp_path / "out"
        out.mkdir()
        document = run(out, *words(), "--model-path", str(model), env=env)
        assert row(document, "model")["answer"] == "good"
        assert bystander.states() == before
        assert tree_of(home) == {}
        assert tree_of(model) == files
        assert sorted(os.listdir("/dev/shm")) == shm
        assert {path.suffix for path in out.rglob("*") if path.is_file()} == {".out", ".err"}  # the test's own


def test_nothing_that_the_command_names_is_executed(tmp_path):
    mark = tmp_path / "executed"
    server = tmp_path / "server"
    server.write_text(f"#!/bin/sh\ntouch {mark}\n")
    server.chmod(0o755)
    document = run(tmp_path, str(server), options=("--url", "http://127.0.0.1:{port}"))
    assert row(document, "command")["answer"] == "good"
    assert not mark.exists()


def living_children():
    """Ours that have not ended. A helper that was killed is reaped with the next one, at the latest."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {child.pid} if child.status() != psutil.STATUS_ZOMBIE else set()
    return found


async def test_both_faces_see_the_same_and_leave_no_child_behind():
    command = words()
    before = living_children()
    asked = await apreflight(command)
    blocking = preflight(command)
    assert [(c.what, c.answer) for c in asked.checks] == [(c.what, c.answer) for c in blocking.checks]
    assert asked.refusals == ()
    assert living_children() == before


async def test_it_can_be_cancelled_at_any_time_and_leaves_no_child():
    before = living_children()
    for seconds in (0.0, 0.02, 0.1, 0.2, 0.4):
        with anyio.move_on_after(seconds):
            await apreflight(words())
        poll(lambda: living_children() <= before)


async def test_a_launch_that_was_read_before_will_do():
    launch, _ = read_command(words())
    found = await apreflight(launch)
    assert found.launch.port == launch.port
    assert any(check.what == "time limits" for check in found.checks)  # so that the engine was known


# ------------------------------------------------------------------------------------------ it can(not) start


def test_a_free_port_is_good_and_a_taken_one_is_refused_while_its_holder_lives_on(tmp_path):
    with little(tmp_path / "holder", tp=1) as holder:
        holder.says("ready to roll")
        before = holder.states()
        document = run(tmp_path, *words(port=holder.port), code=13)
        found = row(document, "port")
        assert str(holder.pid) in found["found"]
        assert found["error"]["type"] == "PortInUse"
        assert holder.states() == before
        assert holder.process.poll() is None
        refusals = preflight(words(port=holder.port)).refusals
        with pytest.raises(PortInUse) as refused, supervise(words(port=holder.port), run_dir=tmp_path / "runs"):
            pass
        assert [str(error) for error in refusals] == [str(refused.value)]  # the very same
    assert row(run(tmp_path, *words()), "port")["answer"] == "good"


@pytest.mark.parametrize(
    ("make", "code", "answer"),
    [(None, 127, "missing"), (0o644, 126, "poor"), (0o755, 0, "good")],
)
def test_a_program_that_is_not_there_or_may_not_be_executed(tmp_path, make, code, answer):
    server = tmp_path / "server"
    if make is not None:
        server.write_text("#!/bin/sh\n")
        server.chmod(make)
    document = run(tmp_path, str(server), code=code, options=("--url", "http://127.0.0.1:{port}"))
    assert row(document, "command")["answer"] == answer
    if code:  # the same as run gives
        with hangguard(tmp_path, "run", "--url", "http://127.0.0.1:{port}", "--", str(server)) as running:
            assert running.wait() == code


def test_a_working_directory_that_is_not_there_is_refused(tmp_path):
    (error,) = preflight(words(), cwd=tmp_path / "nowhere").refusals
    assert isinstance(error, CommandNotFound)
    assert error.what == "directory"


def test_what_cannot_be_understood_is_usage(tmp_path):
    for given in ((), ("--", "./script.sh"), ("--port", "x"), ("--", "vllm", "serve", "m", "--port", "0")):
        with hangguard(tmp_path, "preflight", *given) as running:
            assert running.wait() == 2
            assert "Traceback" not in running.err
    for within in (0, -1, float("nan"), float("inf")):
        with pytest.raises(BadLaunch, match="within"):
            preflight(words(), within=within)


def test_a_model_is_looked_for_as_a_path_and_in_the_hubs_cache(tmp_path):
    whole, empty = tmp_path / "whole", tmp_path / "empty"
    for folder in (whole, empty, tmp_path / "hub/models--a--b/snapshots/1", tmp_path / "hub/models--a--c/snapshots"):
        folder.mkdir(parents=True)
    for folder in (whole, tmp_path / "hub/models--a--b/snapshots/1"):
        (folder / "config.json").write_text("{}")
    (tmp_path / "one.gguf").write_text("")

    def look(name):
        found = find_model(name, str(tmp_path), [str(tmp_path / "hub")])
        return found.is_path, found.exists, found.has_config

    assert look("whole") == look(str(whole)) == look("./one.gguf") == (True, True, True)
    assert look("empty") == (True, True, False)
    assert look("/nowhere/m") == look("./nowhere") == look("a/b/c") == (True, False, True)
    assert look("a/b") == (False, True, True)
    assert look("a/c") == look("a/d") == (False, False, True)  # a download that was broken off is none
    env = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    for name, answer in (("a/b", "good"), ("a/c", "missing"), ("whole", "good")):
        found = preflight(["vllm", "serve", name], env=env, cwd=tmp_path)
        assert next(check for check in found.checks if check.what == "model").answer == answer


def test_flags_are_held_against_the_source_of_the_installed_engine(tmp_path):
    site = tmp_path / "site"
    (site / "sglang-0.5.16.dist-info").mkdir(parents=True)
    (site / "sglang-0.5.16.dist-info/METADATA").write_text("Name: sglang\nVersion: 0.5.16\n")
    source = site / "sglang/srt/server_args.py"
    source.parent.mkdir(parents=True)
    source.write_text('p.add_argument("--model-path")\np.add_argument("--tp")\np.add_argument("--enable-metrics")\n')
    env = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", "m", "--tp", "2"]
    good, poor = (preflight([*command, flag], env=env) for flag in ("--enable-metrics", "--enable-metrix"))
    assert next(check for check in good.checks if check.what == "flags").answer == "good"
    assert "--enable-metrix" in next(check for check in poor.checks if check.what == "flags").found
    assert poor.refusals == ()


def test_variables_and_proxies_are_those_of_the_launch_and_no_secret_is_told(tmp_path):
    env = {"http_proxy": f"http://me:{SECRET}@proxy:3128", "HF_TOKEN": SECRET, "LD_PRELOAD": ""}
    given = ("env", f"LD_AUDIT=/opt/{SECRET}.so", *words(), "--api-key", "topsecretkey")
    document = run(tmp_path, *given, env=env, without=("no_proxy", "NO_PROXY"))
    assert row(document, "variables")["found"].startswith("LD_AUDIT=/opt/")
    assert row(document, "proxy")["helps"] == "NO_PROXY=localhost,127.0.0.1"
    with hangguard(tmp_path, "preflight", "--", *given, env=env, without=("no_proxy", "NO_PROXY")) as running:
        assert running.wait() == 0
        text = running.out
    for said in (json.dumps(document), text):
        assert SECRET not in said
        assert "topsecretkey" not in said
    quiet = run(tmp_path, *words(), without=("LD_PRELOAD", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"))
    assert row(quiet, "variables")["answer"] == "good"
    assert rows(quiet, "proxy") == []


# -------------------------------------------------------------------------------------------------- is there room


@pytest.mark.parametrize(("options", "answer"), [("size=64m", "poor"), ("size=4g", "good"), ("size=4g,ro", "missing")])
def test_shared_memory_small_large_and_read_only(tmp_path, options, answer):
    document = run(tmp_path, *words(), inside=mounted(f"mount -t tmpfs -o {options} tmpfs /dev/shm"))
    found = row(document, "/dev/shm")
    assert found["answer"] == answer
    if answer == "poor":
        assert found["found"] == "64 MiB free of 64 MiB"
        assert "--shm-size" in found["helps"]


def test_limits_are_those_that_the_server_would_inherit(tmp_path):
    low = ("prlimit", "--nofile=1024:1024", "--memlock=65536:65536")
    document = run(tmp_path, *words(), inside=low)
    assert row(document, "open files")["answer"] == "poor"
    assert row(document, "open files")["found"] == "1024"
    assert row(document, "locked memory")["answer"] == "good"  # on one machine nobody needs it
    document = run(tmp_path, *words(), "--nnodes", "2", inside=low)
    assert row(document, "locked memory")["answer"] == "poor"
    document = run(tmp_path, *words(), inside=("prlimit", "--nofile=1024:20000"))
    assert row(document, "open files")["answer"] == "good"


def test_a_limit_of_threads_counts_for_a_user_and_not_for_root(tmp_path):
    low = ("prlimit", "--nproc=400:400")
    assert row(run(tmp_path, *words(), inside=low), "threads")["found"] == "no limit"
    document = as_nobody(tmp_path, *low)
    assert row(document, "threads")["answer"] == "poor"
    assert "ulimit -u" in row(document, "threads")["found"]


def test_a_limit_of_memory_of_the_control_group_is_seen():
    own = (os.getpid(), read_started(os.getpid()))
    found = Cgroups(own)
    found.look()
    without = found.memory_limit()
    assert isinstance(without, MemoryLimit)
    assert without.limit_bytes is None or without.limit_bytes > 64 * MIB
    code = (
        "import os, sys; open(sys.argv[1] + '/cgroup.procs', 'w').write('0'); block = b'x' * (8 << 20)\n"
        "from hangguard.observe.cgroups import Cgroups; from hangguard.observe.procfs import read_started\n"
        "found = Cgroups((os.getpid(), read_started(os.getpid()))); found.look(); seen = found.memory_limit()\n"
        "print(seen.limit_bytes, seen.used_bytes)"
    )
    with group("memory", memory__limit_in_bytes=64 * MIB) as folder:
        done = subprocess.run(
            [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True, timeout=30
        )
    limit, used = map(int, done.stdout.split())
    assert limit == 64 * MIB
    assert 8 * MIB <= used <= limit


def test_a_lock_that_was_left_behind_is_named_and_left_and_one_that_is_built_behind_names_its_builder(tmp_path):
    stale, built = (tmp_path / name / "lock" for name in ("stale", "built"))
    for lock in (stale, built):
        lock.parent.mkdir()
    stale.touch()
    long_ago = time.time() - 4000
    os.utime(stale, (long_ago, long_ago))
    env = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    user = [sys.executable, str(PROGRAMS / "lock_user.py"), "baton", str(built)]
    with subprocess.Popen(user, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as builder:
        assert [builder.stdout.readline() for _ in range(2)] == ["began\n", "held\n"]
        document = run(tmp_path, *words(), env=env)
        assert builder.poll() is None
        builder.stdin.close()
    found = {found["found"].rpartition("holds ")[2].partition(":")[0]: found for found in rows(document, "lock files")}
    assert found[str(stale)]["helps"] == f"rm {stale}"
    assert str(builder.pid) in found[str(built)]["found"]
    assert found[str(built)]["helps"] == ""
    assert stale.exists()
    assert built.exists()
    stale.unlink()
    built.unlink()
    assert row(run(tmp_path, *words(), env=env), "lock files")["answer"] == "good"


def test_a_run_that_goes_on_is_told_apart_from_one_that_nobody_guards(tmp_path):
    """Both guardian and program killed at once: the server stays, and is found by the log that it writes."""
    state = {"XDG_STATE_HOME": str(tmp_path / "state")}
    place = str(tmp_path / "state/hangguard/runs")
    server = little_server_command(tp=1, phase_seconds=0.02, hold_mb=1)
    with hangguard(tmp_path, "run", "--events", tmp_path / "events", "--", *server, env=state) as running:
        running.event("ready")
        (guarded,) = read_earlier_runs(place)
        assert guarded.guardian is not None
        guardian = psutil.Process(guarded.guardian)
        assert guardian.parent().pid == running.process.pid
        members = {child.pid for child in guardian.children(recursive=True)}
        assert {pid for pid, _ in guarded.members} == members
        log = next(Path(guarded.path).glob("attempt-*.log"))
        with subprocess.Popen(["tail", "-f", str(log)], stdout=subprocess.DEVNULL) as reader:
            document = run(tmp_path, *words(), env=state)
            assert row(document, "earlier runs")["answer"] == "good"
            assert str(guarded.guardian) in row(document, "earlier runs")["found"]
            living = [psutil.Process(pid) for pid in members]
            for process in (guardian, psutil.Process(running.process.pid)):
                process.suspend()  # so that neither sees the end of the other
            guardian.kill()
            running.process.kill()
            running.process.wait()
            poll(lambda: all(run.guardian is None for run in read_earlier_runs(place)))
            document = run(tmp_path, *words(), env=state)
            found = row(document, "earlier runs")
            assert found["answer"] == "poor"
            assert found["helps"] == f"hangguard clean {Path(guarded.path).name}"
            assert str(reader.pid) not in found["found"]  # it reads, and wrote nothing
            assert all(process.is_running() for process in living)
            with hangguard(tmp_path, *found["helps"].split()[1:], "--yes", env=state) as cleaning:
                assert cleaning.wait() == 0
            assert not any(process.is_running() and process.status() != "zombie" for process in living)
            poll(lambda: read_earlier_runs(place) == ())
            assert reader.poll() is None
            reader.kill()
    assert row(run(tmp_path, *words(), env=state), "earlier runs")["answer"] == "good"


def test_a_folder_of_runs_that_is_anothers_or_a_link_is_left_out(tmp_path):
    real, place = tmp_path / "elsewhere", tmp_path / "runs"
    for folder in (real, place, place / "other"):
        folder.mkdir()
    (real / "attempt-1.log").touch()
    (place / "link").symlink_to(real)
    os.chown(place / "other", 65534, 65534)
    with (real / "attempt-1.log").open("wb") as log, subprocess.Popen(["sleep", "60"], stdout=log) as writer:
        assert read_earlier_runs(str(place)) == ()
        assert len(read_earlier_runs(str(tmp_path))) == 1
        writer.kill()
    assert read_earlier_runs(str(tmp_path / "nowhere")) == ()


def test_files_that_a_run_recorded_are_told_by_whoever_can_read_its_record(tmp_path):
    (tmp_path / "one").mkdir()
    (found,) = read_earlier_runs(str(tmp_path), recorded=lambda folder: (f"{folder}/left",))
    assert found.files == (f"{tmp_path}/one/left",)
    assert found.guardian is None


# ------------------------------------------------------------------------------------------------ what will be seen


def test_hidden_processes_are_said_and_what_that_loses(tmp_path):
    document = as_nobody(tmp_path, *mounted("mount -t proc -o hidepid=2 proc /proc"))
    assert row(document, "processes")["answer"] == "poor"
    assert "hidepid" in row(document, "processes")["found"]
    assert row(document, "guardian")["answer"] == "good"
    assert row(run(tmp_path, *words()), "processes")["answer"] == "good"


def test_on_a_read_only_machine_there_is_no_log_and_so_no_proof_of_a_hang(tmp_path):
    document = run(
        tmp_path, *words(), inside=mounted("mount -o remount,bind,ro /"), env={"TMPDIR": str(tmp_path / "t")}
    )
    found = row(document, "log and evidence")
    assert found["answer"] == "missing"
    assert found["patience_seconds"] == document["patience_seconds"] == 600
    assert row(document, "caches")["answer"] == "poor"
    assert row(document, "guardian")["answer"] == "good"


def test_a_state_folder_that_cannot_be_written_leaves_the_temporary_one(tmp_path):
    (tmp_path / "state").mkdir()
    closed = mounted(f"mount -t tmpfs -o ro tmpfs {tmp_path}/state")
    document = run(tmp_path, *words(), inside=closed, env={"TMPDIR": str(tmp_path)})
    found = row(document, "log and evidence")
    assert found["answer"] == "poor"
    assert str(tmp_path) in found["found"]


def test_a_user_without_a_home_and_without_a_name(tmp_path):
    nameless = 54321
    with pytest.raises(KeyError):
        pwd.getpwuid(nameless)
    without = ("HOME", "USER", "LOGNAME", "XDG_STATE_HOME")
    document = as_nobody(tmp_path, identity=str(nameless), without=without)
    assert document["refused"] is False
    assert row(document, "log and evidence")["answer"] in {"good", "poor"}
    assert row(document, "caches")["answer"] == "poor"  # nobody may write to a folder named ~


def user(folder, guardian, *, within=8.0, inside=()):
    command = [*inside, sys.executable, str(PROGRAMS / "preflight_user.py"), str(guardian), str(within)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_stacks_that_the_kernel_does_not_show_cost_patience(tmp_path):
    tmp_path.chmod(0o777)
    guardian = tmp_path / "guardian.py"
    guardian.write_text(
        "import ctypes, runpy\n"
        "ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: its memory is shown to CAP_SYS_PTRACE only\n"
        f"runpy.run_path({_link.GUARDIAN!r}, run_name='__main__')\n"
    )
    as_root = user(tmp_path, guardian)
    assert row(as_root, "stacks")["answer"] == "good"
    document = user(tmp_path, guardian, inside=AS_NOBODY)
    found = row(document, "stacks")
    assert found["answer"] == "missing"
    assert found["patience_seconds"] == 120
    assert document["patience_seconds"] >= 120
    assert "SYS_PTRACE" in found["helps"] or "ptrace_scope" in found["helps"]


@pytest.mark.parametrize(
    ("program", "says"),
    [("raise SystemExit(3)", "ended at once"), ("import time\ntime.sleep(100)", "did not answer"), ("print(", "ended")],
)
def test_a_guardian_that_does_not_work_is_refused_within_its_time_and_nothing_of_it_stays(tmp_path, program, says):
    guardian = tmp_path / "guardian.py"
    guardian.write_text(f"{program}\n")
    document = user(tmp_path, guardian, within=3.0)
    found = row(document, "guardian")
    assert says in found["found"]
    assert found["error"]["type"] == "GuardianFailed"
    assert document["took"] < 10
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(guardian) in (p.info["cmdline"] or ())]


async def test_a_source_that_never_answers_costs_its_deadline_and_its_own_rows_only(monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(surroundings, "read_limits", gate.wait)
    began = time.monotonic()
    found = await apreflight(words(), within=2.0)
    assert time.monotonic() - began < 6
    unseen = {check.what: check.found for check in found.checks if check.answer == "unseen"}
    assert "no answer within" in unseen["limits"]
    assert {check.answer for check in found.checks if check.what in {"port", "guardian", "memory"}} == {"good"}
    gate.set()


async def test_a_fault_of_a_source_of_ours_ends_nothing(monkeypatch, caplog):
    monkeypatch.setattr(surroundings, "read_permissions", lambda: 1 / 0)
    found = await apreflight(words())
    (said,) = [check for check in found.checks if check.what == "processes"]
    assert said.answer == "unseen"
    assert "ZeroDivisionError" in said.found
    assert "the look at permissions failed" in caplog.text


def test_an_iommu_that_translates_is_told_from_one_that_passes_through(tmp_path):
    groups = tmp_path / "kernel/iommu_groups"
    for number, (kind, vendor, what) in enumerate(
        [("DMA-FQ", "0x10de", "0x030200"), ("identity", "0x10de", "0x030200"), ("DMA", "0x8086", "0x020000")]
    ):
        device = groups / str(number) / "devices" / f"0000:0{number}:00.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{what}\n")
        (groups / str(number) / "type").write_text(f"{kind}\n")
    assert gpu_translations(str(tmp_path)) == ("DMA-FQ", "identity")
    assert gpu_translations(str(tmp_path / "nothing")) == ()


def test_room_is_that_of_the_nearest_folder_that_exists(tmp_path):
    here, below = room_at(str(tmp_path)), room_at(str(tmp_path / "a" / "b"))
    assert (here.exists, below.exists) == (True, False)
    assert below.is_writable
    assert here.filesystem == below.filesystem
    kind = subprocess.run(["stat", "-f", "-c", "%T", str(tmp_path)], capture_output=True, text=True, check=True)
    assert here.filesystem[:3] == kind.stdout[:3]
    assert room_at("/dev/shm").filesystem == "tmpfs"
    (tmp_path / "file").touch()
    assert not room_at(str(tmp_path / "file")).is_writable


# ------------------------------------------------------------------------------------------------------- on a terminal


def test_on_a_terminal_no_line_is_wider_than_it_and_the_worst_comes_first(tmp_path):
    with little(tmp_path / "holder", tp=1) as holder:
        holder.says("ready to roll")
        given = ("preflight", "--", *words(port=holder.port))
        with on_a_terminal(tmp_path, 80, *given) as (running, read, screen):
            poll(lambda: read() is not None and running.process.poll() is not None, 30.0)
            read()
            lines = [line for line in screen.text.splitlines() if line.strip()]
    assert running.process.returncode == 13
    assert max(map(len, lines)) <= 80
    first = next(index for index, line in enumerate(lines) if line.startswith("REFUSED"))
    in_the_way = lines.index("In the way")
    assert first < in_the_way < lines.index("Good")
    assert lines[in_the_way + 1].split()[0] == "port"


def test_in_a_pipe_every_fact_is_one_line(tmp_path):
    with hangguard(tmp_path, "preflight", "--", *words()) as running:
        assert running.wait() == 0
        text = running.out
    assert running.err == ""
    assert text.splitlines()[0].startswith("Nothing stands in the way")
    assert any(line.startswith("  port ") and "nobody listens" in line for line in text.splitlines())


def test_nobody_is_left(tmp_path):
    """After all of it: no guardian, no reader of the driver."""
    with hangguard(tmp_path, "preflight", "--", *words()) as running:
        assert running.wait() == 0
        assert marked(running.mark) == []
    assert living_of_runs(tmp_path) == []
