"""Every possible cause, what speaks for it and against it: supported by one timeline, ruled out by another."""

from dataclasses import replace

import pytest
from asked import IDLE, KERNEL, LOCKED, PREFILL, Asked, served
from making import BUSY, CORE, SERVER, Member, Story, frames, gpu, rules, watch

from hangguard.engines.generic import GENERIC
from hangguard.engines.sglang import SGLANG
from hangguard.facts import (
    NOT_ASKED,
    Communicator,
    Exited,
    GpuFault,
    GpuHolder,
    Host,
    Launch,
    Listener,
    LockFile,
    Port,
    Unseen,
)
from hangguard.judge import HYPOTHESES, diagnose_memory, rules_for, start, step
from hangguard.judge.advice import BY_CAUSE, LADDERS
from hangguard.judge.endings import Told

OURS = (GpuHolder(pid=102, used_bytes=1),)
KNOWN = {"argv": ("serve", "--model", "M")}


def hung(*at: str, by=None, seconds=30, members=SERVER, channel="futex_do_wait", **more):
    """Load for 22 s, then stand there; the memory of the last second."""
    told = Story(members=members, holders=OURS).goes(22, **BUSY, lines=("Capturing graphs",))
    if at:
        told.moves_to(102, *at, channel=channel)
    return watch(told.goes(seconds, **more).samples, by or rules(**KNOWN))[-1]


def moving(by=None, **more):
    return watch(Story(holders=OURS).goes(22, **BUSY, **more).samples, by or rules(**KNOWN))[-1]


def standing(memory, name: str) -> str:
    return finding(memory, name).standing


def finding(memory, name: str):
    return next(f for f in diagnose_memory(memory).findings if name in f.hypothesis)


def told(memory, reason: str, line: str):
    return replace(memory, told=(Told(reason, line, permanent=False),))


# ---------------------------------------------------------------------------------------- the seed story


def test_the_seed_story_is_told_cause_by_cause():
    memory = hung()
    assert memory.verdict.verdict == "stuck"
    found = {f.hypothesis: f.standing for f in diagnose_memory(memory).findings}
    assert len(found) == len(HYPOTHESES)
    ruled_out = {name for name, s in found.items() if s == "ruled out"}
    assert {
        "out of host memory",
        "out of GPU memory",
        "a crash of a member",
        "a slow load of the weights",
        "a slow JIT compile",
        "a lock file that somebody else holds, or left",
        "a download",
        "a slow disk or a starved machine",
        "communication between the ranks",
        "an attention backend or another kernel",
        "speculative decoding (the drafter)",
        "a wedged driver",
        "somebody else stopped it",
        "the port, or a proxy",
    } <= ruled_out
    assert found["CUDA graphs"] == "supported"
    assert all(f.evidence for f in diagnose_memory(memory).findings)


def test_its_advice_names_the_suspect_and_the_ladder_without_what_is_ruled_out():
    advice = diagnose_memory(hung()).advice
    assert advice[0].startswith("look at ENGINE::Worker_0 (pid 102) < acquire")
    assert any("CUDA graphs off" in step for step in advice)
    assert not any("all-reduce" in step or "speculative" in step for step in advice), "one rank, no drafter"


def test_nothing_is_ruled_out_by_what_was_not_looked_at():
    blind = {"gpus": Unseen("NVML"), "host": Unseen("no /proc"), "stacks": Unseen("no py-spy"), "port": Unseen("no")}
    memory = hung(by=rules(ranks=8), seconds=140, **blind)
    for name in (
        "host memory",
        "GPU memory",
        "lock file",
        "kernel",
        "speculative",
        "hardware",
        "driver",
        "port",
        "ranks",
    ):
        assert standing(memory, name) == "open", name


# --------------------------------------------------------------------------------------------- one by one


def test_host_memory():
    memory = moving()
    assert standing(memory, "host memory") == "ruled out"
    own = replace(memory, trouble=replace(memory.trouble, cgroup_oom_kills=2), oom_kills=2)
    assert standing(own, "host memory") == "supported"
    others = replace(memory, trouble=replace(memory.trouble, cgroup_oom_kills=0), oom_kills=2)
    assert standing(others, "host memory") == "ruled out"
    killed = replace(memory, verdict=Exited(phase="import", kind="oom-kill", why="w"))
    assert standing(killed, "host memory") == "confirmed"
    little = Host(memory_total_bytes=100, memory_available_bytes=1, shm_total_bytes=1, shm_free_bytes=1, oom_kills=0)
    assert standing(replace(memory, last=replace(memory.last, host=little)), "host memory") == "supported"


@pytest.mark.parametrize(
    ("reason", "name"),
    [
        ("gpu-oom", "GPU memory"),
        ("download", "download"),
        ("hardware", "the hardware"),
        ("driver", "driver"),
        ("port", "the port"),
    ],
)
def test_what_the_log_names_is_confirmed(reason, name):
    memory = hung()
    assert standing(memory, name) != "confirmed"
    found = finding(told(memory, reason, "its own words"), name)
    assert (found.standing, found.evidence[0]) == ("confirmed", "its own words")


def test_a_crash():
    assert standing(hung(), "crash") == "ruled out"
    told_ = Story(members=(*SERVER, replace(CORE, pid=103))).goes(22, **BUSY).loses(103, -11).goes(2)
    assert standing(watch(told_.samples, rules())[-1], "crash") == "supported"
    memory = watch(told_.goes(30).samples, rules())[-1]
    assert (memory.verdict.verdict, standing(memory, "crash")) == ("broken", "confirmed")


def test_faults_of_programs_support_a_crash_and_not_the_hardware():
    xid = GpuFault(kind="xid", code=31, at=1003.0, by_program=True)
    board = replace(gpu(holders=OURS), faults=(xid,))
    memory = told(hung(gpus=(board,)), "crash", "CUDA error: an illegal memory access was encountered")
    assert "GPU 0: xid 31" in finding(memory, "crash").evidence
    assert standing(memory, "the hardware") == "ruled out"


def test_a_slow_load():
    assert standing(moving(lines=("Starting to load model M",)), "slow load") == "supported"
    assert standing(moving(lines=("Capturing graphs",)), "slow load") == "ruled out"
    assert standing(hung(), "slow load") == "ruled out"


def test_a_slow_compile():
    compiler = Member(300, "/usr/bin/cicc x.cu", 102, 1, python=False, cpu=0.9, name="cicc")
    memory = watch(Story(members=(*SERVER, compiler)).goes(60, cpu=0.1).samples, rules())[-1]
    assert standing(memory, "JIT compile") == "supported"
    assert standing(hung(), "JIT compile") == "ruled out"


def test_a_lock():
    lock = LockFile(path="/c/x.lock", kind="flock", waiters=(102,), owner=7, owner_title="nvcc")
    story = Story(locks=(lock,)).goes(22, **BUSY).moves_to(102, "acquire filelock/_unix.py", "load_model runner.py")
    memory = watch(story.goes(30).samples, rules())[-1]
    found = finding(memory, "lock file")
    assert found.standing in {"supported", "confirmed"}
    assert "held by nvcc (7)" in found.evidence[0]
    assert standing(hung(), "lock file") == "ruled out"


def test_a_download():
    memory = moving()
    outside = replace(memory.outside, bytes_per_second=5e7)
    assert "50.0 MB/s" in finding(replace(memory, outside=outside), "download").evidence[0]
    assert standing(hung(), "download") == "ruled out"


def test_the_machine():
    slow = watch(Story().goes(22, **BUSY).goes(20, stalls={"io": 0.9}, states="D", cpu=0.01).samples, rules())[-1]
    assert standing(slow, "starved machine") == "supported"
    assert standing(hung(), "starved machine") == "ruled out"


def two(by=None, **more):
    second = Member(103, "ENGINE::Worker_TP1", 100, 40, frames("wait_until_ready shm.py", "load_model runner.py"))
    return hung(members=(*SERVER, second), by=by or rules(ranks=2, **KNOWN), **more)


def test_between_the_ranks():
    assert standing(hung(), "between the ranks") == "ruled out"
    found = finding(two(), "between the ranks")
    assert found.standing == "supported"
    assert any("wait_until_ready" in line for line in found.evidence), "the ranks stand in different places"


def test_ncccls_own_thread_names_the_rank_that_is_missing():
    late = Communicator(name="0xabc", size=2, missing_ranks=(1,))
    memory = two()
    asked = replace(memory, trouble=replace(memory.trouble, communicators=(late,), communicators_unseen=""))
    found = finding(asked, "between the ranks")
    assert (found.standing, found.evidence[0]) == ("confirmed", "communicator 0xabc: rank 1 missing")


def test_a_communicator_whose_init_began_and_did_not_end():
    line = "h:102:102 [0] NCCL INFO ncclCommInitRank comm 0x1 rank 0 nranks 2 cudaDev 0 - Init START"
    told_ = Story().goes(22, **BUSY, lines=(line,)).goes(30)
    memory = watch(told_.samples, rules(ranks=2))[-1]
    assert "pid 102: NCCL init began 1 times and ended 0 times" in finding(memory, "between the ranks").evidence


def test_cuda_graphs():
    assert standing(hung(), "CUDA graphs") == "supported"
    off = rules(argv=("serve", "--disable-cuda-graph"))
    assert standing(hung(by=off), "CUDA graphs") == "ruled out"
    assert standing(hung("acquire lock.py", "load_model runner.py"), "CUDA graphs") == "ruled out"


def test_a_kernel():
    assert standing(hung(), "kernel") == "ruled out"
    server = Asked(by=served(**KNOWN)).goes(20, running=8, tokens=480, at=PREFILL, percent=90, watts=300.0, cpu=0.5)
    server.goes(40, running=8, at=KERNEL, percent=100, watts=121.0)
    found = finding(server.memory, "kernel")
    assert found.standing == "confirmed"
    assert "GPU 0 is busy at 121 W, its floor" in found.evidence
    flash = hung("plan flashinfer/decode.py", "load_model runner.py")
    assert standing(flash, "kernel") == "supported"


@pytest.mark.parametrize("given", ["--speculative-algorithm=EAGLE", "--speculative_config", "-sc", "--spec-method"])
def test_the_drafter(given):
    assert standing(hung(), "speculative") == "ruled out"
    assert standing(hung(by=rules(argv=("serve", given))), "speculative") == "open"
    at = ("verify eagle_worker.py", "load_model runner.py")
    assert standing(hung(*at, by=rules(argv=("serve", given))), "speculative") == "supported"


def test_options_that_are_not_known_rule_no_drafter_out():
    assert standing(hung(by=rules()), "speculative") == "open"


def test_the_overlap_scheduler():
    at = ("synchronize copy_done.py", "event_loop_overlap scheduler.py", "run_busy_loop core.py")
    server = Asked(by=served(**KNOWN)).goes(60, running=2, at=at)
    assert server.verdict.verdict == "stuck"
    assert standing(server.memory, "overlap") == "supported"
    assert any("--disable-overlap-schedule" in step for step in diagnose_memory(server.memory).advice)
    assert standing(hung(), "overlap") == "ruled out"
    off = rules(argv=("serve", "--disable-overlap-schedule"))
    assert standing(replace(server.memory, rules=off), "overlap") == "ruled out"


def test_the_hardware():
    assert standing(hung(), "the hardware") == "open", "the faults of this board were not looked at"
    clean = replace(gpu(holders=OURS), faults=())
    assert standing(hung(gpus=(clean,)), "the hardware") == "ruled out"
    ecc = replace(clean, faults=(GpuFault(kind="ecc", at=1003.0),))
    assert standing(moving(), "the hardware") == "open"
    assert standing(hung(gpus=(ecc,)), "the hardware") == "supported"
    lost = hung(gpus=(replace(clean, faults=(GpuFault(kind="lost", at=1003.0),)),))
    assert standing(lost, "the hardware") == "confirmed"
    advice = " ".join(diagnose_memory(lost).advice)
    assert "reboot" in advice
    assert "--" not in advice, "a broken board is never answered with a flag"


def test_faults_from_before_leave_the_hardware_open():
    old = replace(gpu(holders=OURS), faults=(GpuFault(kind="remapped-rows"),))
    assert standing(hung(gpus=(old,)), "the hardware") == "open"


def test_a_wedged_driver():
    told_ = Story().goes(22, **BUSY).moves_to(102, channel="uvm_spin_loop").goes(60, states="D")
    memory = watch(told_.samples, rules())[-1]
    assert standing(memory, "driver") == "confirmed"
    assert standing(hung(), "driver") == "ruled out"


def test_somebody_stopped_it():
    stopped = Story().goes(22, **BUSY).stops(102).goes(30)
    memory = watch(stopped.samples, rules())[-1]
    assert standing(memory, "somebody else stopped") == "confirmed"
    assert "CONT" in diagnose_memory(memory).advice[0]
    assert standing(hung(), "somebody else stopped") == "ruled out"
    ended = watch(Story().goes(5, **BUSY).loses(102, -15).loses(101, 0).loses(100, -15).goes(1).samples, rules())[-1]
    assert standing(ended, "somebody else stopped") == "supported"


def test_a_port_whose_listener_cannot_be_seen_rules_nothing_out():
    memory = moving()
    hidden = Port(port=8000, listener=Listener(pid=None, title="", ours=None))
    own = Port(port=8000, listener=Listener(pid=102, title="server", ours=True))
    assert standing(replace(memory, last=replace(memory.last, port=hidden)), "the port, or a proxy") == "open"
    assert standing(replace(memory, last=replace(memory.last, port=own)), "the port, or a proxy") == "ruled out"


def test_the_port_and_a_proxy():
    memory = hung()
    assert standing(memory, "the port") == "ruled out"
    taken = Port(port=8000, listener=Listener(pid=7, title="nginx", ours=False))
    assert "nginx (7)" in finding(replace(memory, last=replace(memory.last, port=taken)), "the port").evidence[0]
    warm = replace(memory, verdict=replace(memory.verdict, phase="warm-up"), rules=rules(proxy="http_proxy"))
    assert standing(warm, "the port") == "supported"


@pytest.mark.parametrize(
    ("env", "proxy"),
    [
        ((), ""),
        ((("http_proxy", "http://p:3128"),), "http_proxy"),
        ((("HTTP_PROXY", "http://p:3128"), ("no_proxy", "localhost,127.0.0.1")), ""),
        ((("HTTP_PROXY", "http://p:3128"), ("no_proxy", "example.com")), "HTTP_PROXY"),
    ],
)
def test_a_proxy_counts_where_loopback_is_not_exempt(env, proxy):
    launch = Launch(argv=("x",), env=env, cwd="/", url="http://127.0.0.1:1", host="127.0.0.1", port=1)
    assert rules_for(SGLANG, launch).proxy == proxy


# ------------------------------------------------------------------------------------------------ advice


@pytest.mark.parametrize("kind", ["gpu-oom", "oom-kill", "shm-full", "wrong-gpu", "driver", "library", "limits"])
def test_the_reason_of_an_exit_has_its_answer(kind):
    ended = replace(hung(), verdict=Exited(phase="import", kind=kind, why="w", permanent=True))
    assert len(diagnose_memory(ended).advice) == 1


def test_a_permanent_end_without_an_answer_says_to_fix_the_command():
    ended = replace(hung(), verdict=Exited(phase="import", kind="bad-flag", why="w", permanent=True))
    assert diagnose_memory(ended).advice == ("fix the command: the same launch would end the same way again",)


def test_serving_begins_with_a_restart():
    server = Asked().goes(60, running=4, at=LOCKED)
    advice = diagnose_memory(server.memory).advice
    assert advice[0].startswith("look at ENGINE::Worker_0")
    assert advice[1].startswith("restart it at once")


def test_what_goes_well_needs_no_advice():
    assert diagnose_memory(moving()).advice == ()
    assert diagnose_memory(Asked().goes(30, at=IDLE).memory).advice == ()


def test_every_phase_has_its_ladder_and_every_answer_its_hypothesis():
    names = {f.hypothesis for f in diagnose_memory(hung()).findings}
    assert set(BY_CAUSE) <= names
    assert all(LADDERS.values())


def test_a_memory_without_any_sample_leaves_everything_open_or_ruled_out():
    memory = start(rules())
    assert {f.standing for f in diagnose_memory(memory).findings} <= {"open", "ruled out"}
    assert NOT_ASKED.reason
    assert step(memory, Story().goes(1).samples[0]).tree is not None


class TestAnEngineThatNobodyHasDescribed:
    """A script that starts SGLang: two ranks deadlocked, a detokenizer that waits, and no phase but the first."""

    BY = rules_for(GENERIC, Launch(argv=("./serve.sh",), env=(), cwd="/", url="http://h:1", host="h", port=1))
    MEMBERS = (
        Member(90, "/bin/sh ./serve.sh", 1, 1, python=False, works=False, name="sh"),
        Member(100, "python -m sglang.launch_server", 90, 4, frames("wait subprocess.py")),
        Member(103, "sglang::detokenizer", 100, 4, frames("recv zmq.py", "event_loop detokenizer.py")),
        *(
            Member(101 + n, f"sglang::scheduler_TP{n}", 100, 40, frames("take lock.py", "run scheduler.py"))
            for n in (0, 1)
        ),
    )

    def test_neither_its_ranks_nor_its_phases_are_known_to_be_none(self):
        memory = hung(by=self.BY, members=self.MEMBERS, seconds=150)
        assert memory.verdict.verdict == "stuck"
        assert standing(memory, "communication between the ranks") != "ruled out"
        assert "2 ranks" in str(finding(memory, "communication between the ranks"))
        assert not [f for f in diagnose_memory(memory).findings if "get that far" in str(f)]

    def test_the_ranks_are_suspected_before_the_helper_that_is_the_only_one_of_its_kind(self):
        suspects = hung(by=self.BY, members=self.MEMBERS, seconds=150).verdict.suspects
        assert [s.rank for s in suspects[:2]] == ["TP0", "TP1"]
        assert "alone here" not in "".join(s.note for s in suspects)

    def test_of_one_process_it_is_not_known_how_many_ranks_it_has(self):
        memory = hung(by=self.BY, members=self.MEMBERS[:2], seconds=150)
        assert standing(memory, "communication between the ranks") == "open"


def test_a_machine_under_pressure_ends_no_server():
    told_ = Story().goes(22, **BUSY, stalls={"cpu": 0.9}).loses(102, -11).loses(101, 0).loses(100, 1).goes(1)
    memory = watch(told_.samples, rules(**KNOWN))[-1]
    assert (memory.verdict.verdict, standing(memory, "starved machine")) == ("exited", "open")
