"""Why it ended: exit codes lie, so members and their words go first. Logs are those of real servers."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from making import rules
from recorded import rules_of

from hangguard.facts import Departed, Exit, Unseen
from hangguard.judge.endings import reason_of, told_by

VLLM, SGLANG = rules_of("vllm"), rules_of("sglang")
ROOT = (10, 10)
NEVER_TOLD = Unseen("the kernel is older than 6.15")


def gone(title, code, pid=20) -> Departed:
    return Departed(pid=pid, started=pid, title=title, exit_code=code, noticed_at=5.0)


def end(code) -> Exit:
    return Exit(code=code, at=6.0)


ENGINE_CORE_KILLED = (
    "(APIServer pid=1) ERROR 11-29 13:10:01 [core_client.py:600] Engine core proc EngineCore_0 died unexpectedly",
    "(APIServer pid=1) vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
)
WORKER_KILLED = (
    "(EngineCore pid=2) ERROR 11-29 [multiproc_executor.py:258] Worker proc VllmWorker-0 died unexpectedly",
)
SGLANG_KILLED_ITSELF = (
    "[2026-11-29 13:00:00] Scheduler hit an exception: Traceback (most recent call last):",
    "[2026-11-29 13:00:00] Received sigquit from a child process. It usually means the child failed.",
)
BAD_FLAG = ("vllm serve: error: unrecognized arguments: --no-such-flag",)
GPU_OOM = ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",)
ROOT_GONE = gone("python -m server", -9, pid=10)


@pytest.mark.parametrize(
    ("by", "code", "lines", "departed", "oom_kills", "ready", "reason", "permanent", "said"),
    [
        pytest.param(VLLM, 0, ENGINE_CORE_KILLED, [gone("VLLM::EngineCore", -9), gone("VLLM::Worker", -15, 21)], 0,
                     True, "crash", False, "VLLM::EngineCore (pid 20) ended by signal 9 (SIGKILL)",
                     id="vLLM exits with 0 when its engine core was killed"),
        pytest.param(VLLM, 0, WORKER_KILLED, [gone("VLLM::Worker_TP1", -9, 21), gone("VLLM::Worker_TP0", -15),
                     gone("VLLM::EngineCore", 1, 22)], 0, True, "crash", False, "VLLM::Worker_TP1 (pid 21)",
                     id="the worker that was killed is named, not those sent away"),
        pytest.param(VLLM, 1, (), [gone("VLLM::Worker", 7)], 0, False, "crash", False, "exit code 7",
                     id="a worker that left by itself"),
        pytest.param(VLLM, 1, (), [gone("VLLM::EngineCore", -11)], 0, False, "crash", False, "SIGSEGV",
                     id="a segmentation fault"),
        pytest.param(SGLANG, -9, SGLANG_KILLED_ITSELF, [gone("sglang::scheduler", -3)], 0, False, "crash", False,
                     "sglang::scheduler", id="SGLang kills itself: no oom"),
        pytest.param(SGLANG, -9, SGLANG_KILLED_ITSELF, [], 3, False, "crash", False, "hit an exception",
                     id="and the OOM kills of others do not change that"),
        pytest.param(VLLM, 1, ENGINE_CORE_KILLED, [gone("VLLM::EngineCore", -9)], 1, True, "oom-kill", False,
                     "1 kills on this machine", id="an oom-kill by the counter"),
        pytest.param(VLLM, -9, (), [ROOT_GONE], 1, False, "oom-kill", False, "the launched process",
                     id="an oom-kill of the launched process"),
        pytest.param(VLLM, -9, (), [ROOT_GONE], 0, False, "signal", False, "SIGKILL", id="killed, and no OOM kill"),
        pytest.param(VLLM, 1, (), [gone("VLLM::EngineCore", -11)], 2, False, "crash", False, "SIGSEGV",
                     id="OOM kills of others do not explain another signal"),
        pytest.param(VLLM, 2, BAD_FLAG, [], 0, False, "bad-flag", True, "--no-such-flag", id="a bad flag"),
        pytest.param(VLLM, 1, ("OSError: M/x is not a local folder and is not a valid model identifier",), [], 0,
                     False, "missing-model", True, "M/x", id="a missing model"),
        pytest.param(VLLM, 1, ("OSError: [Errno 98] Address already in use",), [], 0, False, "port", False,
                     "Errno 98", id="the port"),
        pytest.param(VLLM, 1, (*GPU_OOM, *ENGINE_CORE_KILLED), [gone("VLLM::EngineCore", 1)], 0, False, "gpu-oom",
                     False, "2.00 GiB", id="out of GPU memory, before the words of those who noticed"),
        pytest.param(VLLM, 1, (*GPU_OOM, *BAD_FLAG), [], 0, False, "bad-flag", True, "unrecognized",
                     id="what is permanent goes first"),
        pytest.param(VLLM, -15, (), [gone("VLLM::Worker", -15)], 0, True, "signal", False, "SIGTERM",
                     id="SIGTERM from outside, to everybody"),
        pytest.param(VLLM, -2, (), [], 0, True, "signal", False, "SIGINT", id="Ctrl-C from outside"),
        pytest.param(VLLM, -6, (), [], 0, True, "crash", False, "SIGABRT", id="abort"),
        pytest.param(VLLM, 0, (), [], 0, False, "finished", False, "before it was ever ready", id="0 before ready"),
        pytest.param(VLLM, 0, (), [], 0, True, "finished", False, "after it was ready", id="0 after ready"),
        pytest.param(VLLM, 0, (), [gone("cc1plus", 1), gone("nvcc", -9, 21)], 0, True, "finished", False, "code 0",
                     id="helpers may fail"),
        pytest.param(VLLM, 0, (), [gone("python -c from multiprocessing.resource_tracker import main", -9)], 0, True,
                     "finished", False, "code 0", id="and so may a tracker"),
        pytest.param(VLLM, NEVER_TOLD, (), [], 0, False, "unknown", False, "older than 6.15", id="code unseen"),
        pytest.param(VLLM, NEVER_TOLD, (), [gone("VLLM::Worker", NEVER_TOLD)], 0, False, "unknown", False, "6.15",
                     id="no code of anybody was seen"),
        pytest.param(VLLM, NEVER_TOLD, GPU_OOM, [], 0, False, "gpu-oom", False, "2.00 GiB", id="unseen, but told"),
        pytest.param(VLLM, 3, (), [], 0, False, "crash", False, "exit code 3", id="just a code"),
        pytest.param(rules(workers=()), 1, (), [gone("helper", -11)], 0, False, "crash", False, "helper",
                     id="an engine without known workers: the first by a signal"),
        pytest.param(rules(workers=()), -15, (), [gone("helper", -15)], 0, False, "signal", False, "SIGTERM",
                     id="but not by SIGTERM"),
    ],
)  # fmt: skip
def test_the_reason(by, code, lines, departed, oom_kills, ready, reason, permanent, said):
    ending = reason_of(
        end(code), told_by(lines, by), tuple(departed), root=ROOT, oom_kills=oom_kills, was_ready=ready, rules=by
    )
    assert (ending.reason, ending.permanent) == (reason, permanent)
    assert said in ending.why


def test_the_words_are_kept_as_evidence():
    told = told_by((*GPU_OOM, *ENGINE_CORE_KILLED), VLLM)
    ending = reason_of(end(1), told, (), root=ROOT, oom_kills=0, was_ready=False, rules=VLLM)
    assert ending.evidence[0] == f"gpu-oom: {GPU_OOM[0]}"
    assert all(re.match(r"(gpu-oom|crash): ", line) for line in ending.evidence)


def test_no_exit_at_all_is_unknown():
    ending = reason_of(None, (), (), root=ROOT, oom_kills=0, was_ready=False, rules=VLLM)
    assert (ending.reason, ending.why) == ("unknown", "the exit code could not be seen: its parent never told")


# ---------------------------------------------------------------------------------- whole logs, as recorded


LOGS = Path(__file__).parents[1] / "engines" / "logs"


def ending_of(log: str, code, departed=()):
    by = VLLM if log.startswith("vllm") else SGLANG
    lines = tuple((LOGS / f"{log}.log").read_text(errors="replace").splitlines())
    return reason_of(
        end(code), told_by(lines, by)[-64:], tuple(departed), root=ROOT, oom_kills=0, was_ready=False, rules=by
    )


@pytest.mark.parametrize(
    ("log", "code", "departed", "reason", "said"),
    [
        ("vllm-0.32.0-cpu-enginecore-sigkill", 0, [gone("VLLM::EngineCore", -9)], "crash", "VLLM::EngineCore"),
        ("vllm-0.32.0-cpu-enginecore-sigkill", 0, [gone("VLLM::EngineCore", NEVER_TOLD)], "crash", "unexpectedly"),
        ("vllm-0.32.0-cpu-worker-sigkill", 0, [gone("VLLM::Worker", -9)], "crash", "VLLM::Worker"),
        ("vllm-0.32.0-cpu-serve-deadlock-exec-timeout30", 0, [gone("VLLM::EngineCore", 1)], "crash", "exit code 1"),
        ("vllm-0.32.0-cpu-load-segv", 1, [gone("VLLM::Worker", -11)], "crash", "SIGSEGV"),
        ("vllm-0.32.0-cpu-load-exit", 1, [gone("VLLM::Worker", 7)], "crash", "exit code 7"),
        ("vllm-0.32.0-cpu-load-raise", 1, [], "crash", "WorkerProc"),
        ("vllm-0.32.0-cpu-tp2-rank-absent-timeout30", 1, [], "dist-timeout", "Wait timeout"),
        ("sglang-0.5.23-cpu-scheduler-sigkill", -3, [gone("sglang::scheduler", -9)], "crash", "sglang::scheduler"),
        ("sglang-0.5.23-cpu-tp2-refused", -9, [], "crash", "hit an exception"),
    ],
)
def test_the_reason_by_a_whole_log(log, code, departed, reason, said):
    ending = ending_of(log, code, departed)
    assert (ending.reason, ending.permanent) == (reason, False)
    assert said in ending.why


@pytest.mark.parametrize("code", [0, -15, -2])
@pytest.mark.parametrize("log", sorted(f.stem for f in LOGS.glob("*healthy.log")))
def test_a_healthy_server_that_was_sent_away_has_not_crashed(log, code):
    # Those logs end with the shutdown, in which vLLM says "EngineDeadError"; only some say that it was asked to.
    says_so = log.startswith(("vllm-0.32.0-cpu-compile", "vllm-0.32.0-cpu-eager", "sglang-0.5.23"))
    expected = "signal" if code or says_so else "finished"
    assert ending_of(log, code, [gone("VLLM::EngineCore", -15)]).reason == expected


@pytest.mark.parametrize(("pid", "reason"), [(6436, "signal"), (6437, "crash")])
def test_a_core_that_its_own_front_end_killed_when_it_was_sent_away_is_no_crash_and_any_other_is(pid, reason):
    ending = ending_of("vllm-0.32.0-cpu-compile-healthy", 0, [gone("VLLM::EngineCore", -9, pid)])
    assert ending.reason == reason
    assert ("shutdown triggered" in ending.why) == (reason == "signal")


DIED = "(EngineCore pid=2) ERROR 11-30 [multiproc_executor.py:315] Worker proc VllmWorker-{} died unexpectedly"
SENT_AWAY = (  # what vLLM 0.32.0 says of every process of its list, one that was killed before among them
    "(APIServer pid=1) WARNING [shutdown] Process manager: force killing remaining process EngineCore pid 20",
    "(APIServer pid=1) WARNING [system_utils.py:225] [shutdown] force killing sub process VLLM::Worker_TP pid 21",
    "(APIServer pid=1) WARNING [system_utils.py:225] [shutdown] force killing sub process VLLM::Worker_TP1 pid 22",
)
SHUT_DOWN = "(APIServer pid=1) INFO [launcher.py:254] [shutdown] API server: shutdown triggered"
RANKS = (gone("VLLM::EngineCore", -15, 20), gone("VLLM::Worker_TP0", -9, 21), gone("VLLM::Worker_TP1", -9, 22))


@pytest.mark.parametrize("rank", [0, 1])
def test_of_ranks_that_all_ended_by_sigkill_the_one_is_named_that_the_engine_found_dead_first(rank):
    for lines in ((DIED.format(rank),), (DIED.format(rank), *SENT_AWAY)):
        ending = why(0, lines, RANKS, ready=True)
        assert (ending.reason, ending.permanent) == ("crash", False)
        assert ending.why.startswith(f"VLLM::Worker_TP{rank} (pid {21 + rank}) ended by signal 9")


def test_a_death_that_no_title_can_be_told_of_is_a_crash_all_the_same():
    departed = (gone("VLLM::Worker_PP0_TP0", -9, 21), gone("VLLM::Worker_PP1_TP0", -9, 22))
    ending = why(0, (DIED.format(1), *SENT_AWAY), departed, ready=True)
    assert (ending.reason, ending.why) == ("crash", DIED.format(1))


TIMED_OUT = "(EngineCore pid=2) ERROR 11-30 [core.py:1512] TimeoutError: RPC call to execute_model timed out."


def test_an_engine_that_gave_up_and_then_sent_its_ranks_away_has_crashed_although_it_ends_with_0():
    ending = why(0, (TIMED_OUT, *SENT_AWAY), RANKS, ready=True)
    assert (ending.reason, ending.why) == ("crash", TIMED_OUT)


@pytest.mark.parametrize("late", [DIED.format(0), TIMED_OUT])
def test_what_is_said_after_it_was_asked_to_stop_is_no_crash(late):
    ending = why(0, (SHUT_DOWN, *SENT_AWAY, late), RANKS, ready=True)
    assert ending.reason == "signal"


# ---------------------------------------------------------------------------------- told apart by evidence


def why(code, lines=(), departed=(), *, by=VLLM, t=6.0, ready=False, **more):
    told = told_by(tuple(lines), by, t)
    defaults = {"root": ROOT, "oom_kills": 0, "was_ready": ready, "rules": by}
    return reason_of(end(code), told, tuple(departed), **{**defaults, **more})


@pytest.mark.parametrize(
    ("own", "machine", "reason"),
    [
        pytest.param(1, 1, "oom-kill", id="its own control group counted it"),
        pytest.param(1, 0, "oom-kill", id="the machine's counter was not needed"),
        pytest.param(0, 5, "crash", id="the kills were somebody else's"),
        pytest.param(None, 5, "oom-kill", id="its own was not seen"),
    ],
)
def test_the_counter_of_its_own_control_group_decides(own, machine, reason):
    killed = [gone("VLLM::EngineCore", -9)]
    assert why(1, ENGINE_CORE_KILLED, killed, oom_kills=machine, cgroup_oom_kills=own).reason == reason


def test_sglang_that_kills_itself_after_its_scheduler_was_killed_for_memory():
    said = ("[2026-11-29 15:12:00] Subprocess scheduler_0 (pid=7) crashed with exit code -9. Triggering SIGQUIT",)
    assert why(-9, said, by=SGLANG, cgroup_oom_kills=1).reason == "oom-kill"
    assert why(-9, said, by=SGLANG, cgroup_oom_kills=0).reason == "crash"
    assert (
        why(-9, SGLANG_KILLED_ITSELF, [gone("sglang::scheduler", 1)], by=SGLANG, cgroup_oom_kills=0).reason == "crash"
    )


@pytest.mark.parametrize(
    ("noticed_at", "reason", "said"),
    [(6.0, "signal", "ended by signal 9"), (5.0, "crash", "sglang::scheduler (pid 20) ended by signal 9")],
    ids=["together", "before"],
)
def test_children_that_die_with_a_killed_parent_are_not_what_ended_it(noticed_at, reason, said):
    """A SIGKILL of SGLang's main process takes its scheduler along in the same instant (PR_SET_PDEATHSIG)."""
    scheduler = Departed(pid=20, started=20, title="sglang::scheduler", exit_code=-9, noticed_at=noticed_at)
    found = reason_of(end(-9), (), (ROOT_GONE, scheduler), root=ROOT, oom_kills=0, was_ready=True, rules=SGLANG)
    assert found.reason == reason
    assert said in found.why


def test_its_own_kill_is_no_oom_kill_where_it_said_another_cause():
    assert why(-9, GPU_OOM, by=SGLANG, cgroup_oom_kills=1, departed=[gone("sglang::scheduler", 1)]).reason == "gpu-oom"


@pytest.mark.parametrize(
    ("free", "reason", "said"),
    [(0.0, "shm-full", "0.0% of /dev/shm"), (0.6, "crash", "cut short"), (None, "crash", "/dev/shm was full, or")],
)
def test_a_sigbus_is_put_down_to_what_was_seen(free, reason, said):
    for ending in (why(1, (), [gone("VLLM::Worker", -7)], shm_free_share=free), why(-7, shm_free_share=free)):
        assert ending.reason == reason
        assert said in ending.why


@pytest.mark.parametrize(
    ("line", "free", "reason"),
    [
        ("Fatal Python error: Bus error", 0.0, "shm-full"),
        ("Fatal Python error: Bus error", 0.6, "crash"),
        ("Fatal Python error: Bus error", None, "shm-full"),
        ("Bus error. It is possible that dataloader's workers are out of shared memory.", 0.6, "shm-full"),
    ],
)
def test_a_line_that_only_says_bus_error_is_put_down_to_what_was_seen_too(line, free, reason):
    """CPython's fault handler prints it after every SIGBUS."""
    ending = why(-7, (line,), shm_free_share=free)
    assert ending.reason == reason
    assert line in ending.why


@pytest.mark.parametrize("code", [137, 143, 130, 129])
def test_a_shell_in_front_passes_the_signal_on(code):
    ending = why(code)
    assert ending.reason == "signal"
    assert "somebody else stopped it" in ending.why


def test_a_shell_passes_an_oom_kill_and_a_fault_on_too():
    assert why(137, cgroup_oom_kills=1).reason == "oom-kill"
    assert why(139).reason == "crash"
    assert why(2).reason == "crash"


def test_a_kill_without_words_of_a_worker_says_that_nothing_was_counted():
    assert "no kill by the OOM killer was counted" in why(0, (), [gone("VLLM::Worker", -9)], ready=True).why


def test_what_follows_from_something_else_is_named_last():
    timed_out = "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined."
    assert why(1, (timed_out, *GPU_OOM)).reason == "gpu-oom"
    assert why(1, (timed_out, *ENGINE_CORE_KILLED)).reason == "dist-timeout"


def test_the_words_of_last_week_do_not_explain_the_end_of_a_ready_server():
    old = told_by(GPU_OOM, VLLM, 6.0)
    week = Exit(code=-15, at=600_000.0)
    told = {"root": ROOT, "oom_kills": 0, "rules": VLLM}
    assert reason_of(week, old, (), was_ready=True, **told).reason == "signal"
    assert reason_of(Exit(code=1, at=60.0), old, (), was_ready=True, **told).reason == "gpu-oom"
    assert reason_of(Exit(code=1, at=600.0), old, (), was_ready=False, **told).reason == "gpu-oom", "a start is slow"


def test_a_broken_board_explains_a_crash_and_is_permanent():
    ending = why(1, ENGINE_CORE_KILLED, [gone("VLLM::EngineCore", -6)], hardware="GPU 0: xid 79: off the bus")
    assert (ending.reason, ending.permanent) == ("hardware", True)


LOAD_FAILED = (
    "(Worker pid=21) ERROR 11-29 22:04:51 [multiproc_executor.py:953] WorkerProc failed to start.",
    '(Worker pid=21) ERROR 11-29 22:04:51 [multiproc_executor.py:953]     raise RuntimeError("no such kernel")',
    "(Worker pid=21) ERROR 11-29 22:04:51 [multiproc_executor.py:953] RuntimeError: no such kernel",
    "(EngineCore pid=20) ERROR 11-29 22:04:54 [core.py:1510] EngineCore failed to start.",
    "(EngineCore pid=20) ERROR 11-29 22:04:54 [core.py:1510] Exception: WorkerProc failed. See root cause.",
    "Exception: WorkerProc initialization failed due to an exception in a background process. See root cause.",
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
)


def test_the_exception_of_a_worker_is_named_where_the_worker_itself_ends_with_0():
    """As vLLM 0.32.0: the worker that raised ends with 0, its engine core with 1, and both say a lot."""
    departed = (gone("VLLM::Worker", 0, 21), gone("VLLM::EngineCore", 1))
    told = told_by(LOAD_FAILED, VLLM)
    found = reason_of(end(1), told, departed, root=ROOT, oom_kills=0, was_ready=False, rules=VLLM)
    assert found.reason == "crash"
    assert "RuntimeError: no such kernel" in found.why
    assert any("RuntimeError: no such kernel" in line for line in found.evidence)


SPAWNED = "/venv/bin/python3.11 -B -c from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=31)"


@pytest.mark.parametrize(("earlier", "named"), [(5.0, 21), (3600.0, 20)], ids=["just before", "long ago"])
def test_a_worker_that_ended_before_it_had_its_title_is_the_first(earlier, named):
    young = Departed(pid=21, started=21, title=SPAWNED, exit_code=7, noticed_at=5000.0 - earlier)
    core = Departed(pid=20, started=20, title="VLLM::EngineCore", exit_code=1, noticed_at=5000.0)
    found = reason_of(end(1), (), (young, core), root=ROOT, oom_kills=0, was_ready=False, rules=VLLM)
    assert f"(pid {named})" in found.why


SCHEDULER_FAILED = (
    "[2026-11-29 22:20:12] Scheduler hit an exception: Traceback (most recent call last):",
    '  File "model_runner.py", line 1, in load_model',
    '    raise RuntimeError("no such kernel")',
    "RuntimeError: no such kernel",
    "",
    "[2026-11-29 22:20:12] Received sigquit from a child process. It usually means the child failed.",
)
RPC_TIMED_OUT = (
    "(EngineCore pid=20) ERROR 11-29 22:24:39 [core.py:1512] EngineCore encountered a fatal error.",
    "(EngineCore pid=20) ERROR 11-29 22:24:39 [core.py:1512] TimeoutError: RPC call to execute_model timed out.",
)


@pytest.mark.parametrize(
    ("by", "code", "lines", "departed", "said"),
    [
        (SGLANG, -9, SCHEDULER_FAILED, [gone("sglang::scheduler", -9)], "RuntimeError: no such kernel"),
        (VLLM, 0, RPC_TIMED_OUT, [gone("VLLM::Worker", -9, 21)], "TimeoutError: RPC call to execute_model timed out."),
    ],
    ids=["SGLang after an exception", "vLLM after its own limit"],
)
def test_a_member_that_its_own_server_killed_is_not_what_ended_it(by, code, lines, departed, said):
    """Both kill what is left of them by SIGKILL, after they have said why (kill_process_tree, system_utils.py)."""
    told = told_by(lines, by)
    found = reason_of(end(code), told, tuple(departed), root=ROOT, oom_kills=0, was_ready=False, rules=by)
    assert found.reason == "crash"
    assert said in found.why
    assert "somebody may have sent it" not in found.why


CORE_KILLED_IN_ITS_START = (
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
)
CORE_KILLED_UNDER_A_WORKER = (
    "(Worker pid=21) ERROR 11-30 03:19:07 [multiproc_executor.py:953] WorkerProc failed to start.",
    "(Worker pid=21) ERROR 11-30 03:19:07 [multiproc_executor.py:953] BrokenPipeError: [Errno 32] Broken pipe",
    *CORE_KILLED_IN_ITS_START,
)
WORKER_KILLED_IN_ITS_START = (*LOAD_FAILED[3:5], *LOAD_FAILED[6:])


@pytest.mark.parametrize(
    ("lines", "departed", "named"),
    [
        (CORE_KILLED_IN_ITS_START, [gone("VLLM::EngineCore", -9)], "VLLM::EngineCore (pid 20)"),
        (CORE_KILLED_UNDER_A_WORKER, [gone("VLLM::EngineCore", -9)], "VLLM::EngineCore (pid 20)"),
        (
            WORKER_KILLED_IN_ITS_START,
            [gone("VLLM::Worker", -9, 21), gone("VLLM::EngineCore", 1)],
            "VLLM::Worker (pid 21)",
        ),
    ],
    ids=["the core", "a worker says so", "a worker"],
)
def test_words_that_only_point_at_others_do_not_explain_a_kill_while_it_starts(lines, departed, named):
    """As vLLM 0.32.0: whoever waited for it says that it failed, and where to read why; nobody has written that."""
    told = told_by(lines, VLLM)
    assert told
    found = reason_of(end(1), told, tuple(departed), root=ROOT, oom_kills=0, was_ready=False, rules=VLLM)
    assert found.reason == "crash"
    assert found.why.startswith(f"{named} ended by signal 9")


def test_a_scheduler_killed_in_its_start_is_named_and_not_what_the_main_process_guesses():
    """As SGLang 0.5.23 (entrypoints/engine.py)."""
    line = "RuntimeError: Rank 0 scheduler died during initialization (exit code: -9). If exit code is -9 (SIGKILL), a"
    told = told_by((f"{line} common cause is the OS OOM killer.",), SGLANG)
    assert told
    departed = (gone("sglang::scheduler", -9),)
    found = reason_of(end(-9), told, departed, root=ROOT, oom_kills=0, was_ready=False, rules=SGLANG)
    assert found.why.startswith("sglang::scheduler (pid 20) ended by signal 9")


SPAWNED = "python -c from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=7) --multiprocessing-fork"
DETOKENIZER_KILLED = (
    "[2026-11-30 04:28:10] Subprocess detokenizer (pid=21) crashed with exit code -9. Triggering SIGQUIT.",
    "[2026-11-30 04:28:10] SIGQUIT received. signum=None, frame=None. It usually means one child failed.",
)


@pytest.mark.parametrize("title", ["sglang::detokenizer", SPAWNED])
def test_whom_the_server_says_that_it_found_dead_is_named_and_not_whom_it_then_killed(title):
    """As SGLang 0.5.23, whose main process then kills its scheduler too."""
    told = told_by(DETOKENIZER_KILLED, SGLANG)
    departed = (gone("sglang::scheduler", -9), gone(title, -9, 21))
    found = reason_of(end(-9), told, departed, root=ROOT, oom_kills=0, was_ready=True, rules=SGLANG)
    assert found.reason == "crash"
    assert "(pid 21) ended by signal 9" in found.why


def test_one_that_was_killed_before_it_had_a_title_is_named_where_the_server_says_that_one_died():
    line = "RuntimeError: Rank 0 scheduler died during initialization (exit code: -9). If exit code is -9 (SIGKILL), a"
    departed = (gone("python -c from multiprocessing.resource_tracker import main", -9, 20), gone(SPAWNED, -9, 21))

    def why(*lines):
        told = told_by(lines, SGLANG)
        return reason_of(end(-9), told, departed, root=ROOT, oom_kills=0, was_ready=False, rules=SGLANG).why

    assert "(pid 21) ended by signal 9" in why(line)
    assert "(pid 21)" not in why("Scheduler hit an exception: RuntimeError: no such kernel")


@pytest.mark.parametrize(
    ("exception", "reason"),
    [("BrokenPipeError: [Errno 32] Broken pipe", "signal"), ("RuntimeError: no such kernel", "crash")],
)
def test_a_scheduler_that_only_misses_its_killed_main_process_has_not_ended_it(exception, reason):
    """As SGLang 0.5.23, killed while it imports: its scheduler comes to its end of the pipe, and lives that long."""
    told = told_by((f"Scheduler hit an exception: {exception}",), SGLANG)
    assert told
    found = reason_of(end(-9), told, (), root=ROOT, oom_kills=0, was_ready=False, rules=SGLANG)
    assert found.reason == reason


def test_the_same_words_after_an_exception_leave_the_kill_to_the_server_itself():
    told = told_by(LOAD_FAILED, VLLM)
    departed = (gone("VLLM::Worker", -9, 21), gone("VLLM::EngineCore", 1))
    found = reason_of(end(1), told, departed, root=ROOT, oom_kills=0, was_ready=False, rules=VLLM)
    assert "RuntimeError: no such kernel" in found.why


RANK_0_COMPLAINS = (
    "[2026-11-30 08:20:27 TP0] Scheduler hit an exception: Traceback (most recent call last):",
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1, remote process exited",
    "[2026-11-30 08:20:27] Received sigquit from a child process. It usually means the child failed.",
)


@pytest.mark.parametrize(
    ("others_at", "said_at", "named"),
    [
        pytest.param(66.0, 5.2, "sglang::scheduler_TP1 (pid 21) ended by signal 9", id="it died alone, and was missed"),
        pytest.param(66.0, 4.0, "sglang::scheduler_TP1 (pid 21) ended by signal 9", id="within the same look"),
        pytest.param(5.6, 5.2, "NCCL error", id="the server ended them all together"),
        pytest.param(66.0, 2.0, "NCCL error", id="it was said before"),
    ],
)
def test_a_rank_that_was_killed_alone_is_named_and_not_the_one_that_misses_it(others_at, said_at, named):
    departed = (
        replace(gone("ninja -v", 0, 30), noticed_at=1.0),  # as after every compile
        replace(gone("ptxas x.ptx", 0, 31), noticed_at=5.0),
        gone("sglang::scheduler_TP1", -9, 21),
        replace(gone("sglang::scheduler_TP0", -6, 20), noticed_at=others_at),
    )
    told = told_by(RANK_0_COMPLAINS, SGLANG, said_at)
    ending = reason_of(
        Exit(code=-9, at=others_at), told, departed, root=ROOT, oom_kills=0, was_ready=True, rules=SGLANG
    )
    assert ending.reason == "crash"
    assert named in ending.why
    assert any("NCCL error" in line for line in ending.evidence)


def test_what_a_dying_rank_has_said_of_the_hardware_counts_although_it_died_alone():
    line = ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",)
    departed = (gone("sglang::scheduler_TP1", -9, 21), replace(gone("sglang::scheduler_TP0", -6), noticed_at=66.0))
    told = told_by(line, SGLANG, 5.2)
    ending = reason_of(Exit(code=-9, at=66.0), told, departed, root=ROOT, oom_kills=0, was_ready=True, rules=SGLANG)
    assert ending.reason == "gpu-oom"
