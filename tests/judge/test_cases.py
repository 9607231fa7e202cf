"""Public reports of hangs, and of what only looked like one, told again as timelines.

``data/cases.jsonl`` holds the 78 reports of the corpus whose verdict is sure. 59 of them are told here, by what the
report says of CPU, GPU, power, log, counters and stacks; phase, stacks and the rest of the machine are supplied. The
other 19 stand in ``NOT_TOLD``, each with its reason: 13 are about the end of a server and what is left of it, 6 give
too little to see, or nothing that stands still. A test holds the two to all of them.

The corpus' names against ours: not-a-hang is never stuck and never broken; external-wait is waiting (or moving, where
its own growth is seen); idle-deadlock is stuck (idle); busy-hang is stuck (hot, busy, serving); serving-stall is stuck
(serving, stopped); crash-with-survivors is broken (survivors); resource-exhaustion is exited; the tag ``hardware`` is
broken (hardware). Where several machines take part, one of them cannot tell its own hang from a peer that is late:
before ready such a hang is waiting (peers), and ends with that budget.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from making import BUSY, MIB, Member, first, seen, watch
from shaped import (
    BARRIER,
    BATON,
    DEVICE,
    FILELOCK,
    FIRST,
    GATHER,
    GROUP,
    HUB,
    IDLE,
    LOCK,
    SPINS_IDLE,
    STEP,
    STREAM,
    Served,
    Start,
    boards,
    by,
)

from hangguard.facts import GpuFault, Limits, LockFile, Unseen
from hangguard.judge import Memory

CASES = {c["id"]: c for c in map(json.loads, (Path(__file__).parent / "data" / "cases.jsonl").read_text().splitlines())}
ALARMS = {"stuck", "broken"}
REFUSED, OFF = Unseen("operation not permitted"), Unseen("the route of the metrics answers 404")
WARM = "compile_or_warm_up_model vllm/v1/worker/gpu_worker.py"
LOAD = "load_model vllm/v1/worker/gpu_model_runner.py"
INIT = "init_worker_distributed_environment vllm/v1/worker/gpu_worker.py"
SGL_INIT = "init_torch_distributed sglang/srt/model_executor/model_runner.py"
SHM = "WARNING [shm_broadcast.py:1] No available shared memory broadcast block found in 60 seconds."


@dataclass(frozen=True)
class Told:
    """A report as a timeline, and what must be said of it."""

    story: Callable[[], Sequence[Memory]]
    verdict: str
    kinds: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()
    """Empty: the corpus' phase is ours."""
    then: str = ""
    """How it ends, if it is watched on."""


def start(engine="vllm", *, nodes=1, ranks=1, limits=None, **made):
    """Return a start, and how it is judged."""
    told = Start(engine=engine, ranks=ranks, count=made.pop("count", 1), **made)
    return told, lambda: watch(told.samples, by(engine, ranks=ranks, nodes=nodes, limits=limits))


def hangs(*at, seconds=60, channel="futex_do_wait", engine="vllm", nodes=1, ranks=1, limits=None, made=None, **rates):
    """A start that comes to a stand there."""

    def story():
        told, judged = start(engine, nodes=nodes, ranks=ranks, limits=limits, **(made or {}))
        told.all_at(*at, channel=channel).goes(seconds, **rates)
        return judged()

    return story


def goes_on(*at, seconds=600, engine="vllm", channel="", made=None, **rates):
    """A slow start."""
    return hangs(*at, seconds=seconds, channel=channel, engine=engine, made=made, **rates)


def stalls(
    *at, engine="vllm", ranks=1, nodes=1, count=1, floor=122.0, work=None, seconds=200, running=2, inside=True, **rates
):
    """A server that worked, and no longer gives tokens."""

    def story():
        server = Served(engine=engine, ranks=ranks, nodes=nodes, count=count, floor=floor).flows(20, watts=work)
        server.goes(seconds, running=running, at=(*at, *STEP[engine]) if inside else at, **rates)
        return server.memories

    return story


def serves(*at, engine="vllm", ranks=1, seconds=300, **rates):
    """A healthy server, under load or idle."""

    def story():
        server = Served(engine=engine, ranks=ranks, count=ranks).flows(10)
        for n in range(seconds // 3):
            server.goes(3, at=tuple(place.format(n % 40) for place in at), **rates)
        return server.memories

    return story


def blind(server_rates):
    """Where py-spy is refused."""
    return {**server_rates, "stacks": REFUSED}


SPIN = {"percent": 100.0, "cpu": 1.0, "channel": ""}
"""A kernel that never ends, host in a synchronize."""


# --------------------------------------------------------------------------------- stories of their own


def the_first_all_reduce_spins():
    """C029: P2P through the IOMMU; nothing ever arrives."""
    told, judged = start(ranks=2, count=2, floor=105.0, phase="dist-init")
    told.all_at(*GATHER, INIT, channel="").goes(40, percent=100.0, cpu=1.0, watts=120.0)
    return judged()


def ranks_apart():
    """C084: rank A waits for B in an all-gather, B for new requests."""
    server = Served(engine="sglang", ranks=2, count=2).flows(20)
    server.goes(1, running=2, at=IDLE["sglang"])
    server.story.moves_to(FIRST, *GATHER, *STEP["sglang"], channel="")
    server.story.members = tuple(replace(m, cpu=1.0 if m.pid == FIRST else 0.0) if m.pid in (FIRST, FIRST + 1) else m
                                 for m in server.story.members)  # fmt: skip
    server.goes(60, running=2)
    return server.memories


def one_board_idle(engine, count, *at, **more):
    """C051, C052: all boards but one spin at their floor."""
    levels = {"percent": (*(100.0,) * (count - 1), 0.0), "watts": (*(124.0,) * (count - 1), 122.0)}
    return stalls(*at, engine=engine, ranks=count, count=count, **levels, **more)


def a_test_request_tells(engine, *at, seconds=120, **more):
    """Nothing counts: clients are connected, and a request of ours gets no answer."""
    return stalls(*at, engine=engine, seconds=seconds, counters=OFF, clients=3, canary="waiting", **more)


def a_dead_member(title_pid, code, *, engine="vllm", ranks=1, seconds=40):
    def story():
        server = Served(engine=engine, ranks=ranks, count=ranks).flows(10)
        server.story.loses(title_pid, code)
        server.goes(seconds, running=0, waiting=3)
        return server.memories

    return story


def a_dead_detokenizer():
    """C106: it fell over its own constructor; a second exception kept the signal from its parent."""
    told, judged = start("sglang", phase="warm-up")
    lines = ("huggingface_hub.errors.HTTPStatusError: 429 Client Error", "UnboundLocalError: local variable")
    told.goes(2, **BUSY, lines=lines).loses(98, 1)
    told.all_at(*IDLE["sglang"], channel="").goes(60, cpu=1.0, states="R")
    return judged()


def a_bad_board():
    """C090: failing memory on one of four boards."""
    server = Served(ranks=4, count=4).flows(20)
    xids = tuple(GpuFault(kind="xid", code=code, at=server.memory.now) for code in (48, 63, 94, 154))
    shown = list(boards(*((0.0, 122.0),) * 4, ranks=4))
    shown[2] = replace(shown[2], faults=xids)
    server.goes(60, running=2, gpus=tuple(shown), at=(*GATHER, *STEP["vllm"]))
    return server.memories


def ends(engine, code, *lines, phase, seconds=5):
    """An end that the log explains."""

    def story():
        told, judged = start(engine, phase=phase)
        told.goes(2, **BUSY, lines=lines)
        for member in [m for m in told.members if m.pid != 100]:
            told.loses(member.pid, -15)
        told.loses(100, code).goes(seconds)
        return judged()

    return story


def a_download_that_stands():
    told, judged = start(limits=Limits(waiting=300.0))
    told.all_at(*HUB, LOAD, channel="wait_woken").goes(100, download=100.0 * MIB, sockets=100.0 * MIB)
    told.goes(400, download=0.0, sockets=0.0)
    return judged()


def compilers(*, cpu=0.9, seconds=600):
    """C143: a cold cache; the compilers are there."""

    def story():
        told, judged = start(phase="jit-compile")
        for n in range(3):
            told.gains(Member(300 + n, "/usr/local/cuda/bin/cicc x", FIRST, 1, python=False, cpu=cpu, name="cicc"))
        told.all_at("communicate subprocess.py", "build flashinfer/jit/core.py", WARM, channel="do_wait").goes(seconds)
        return judged()

    return story


def bars(*, seconds, every, line, **rates):
    """A bar that rises now and then, and nothing else does."""

    def story():
        told, judged = start(phase="jit-compile")
        for n in range(1, seconds // every):
            told.all_at(f"tune_{n % 5} flashinfer/autotuner.py", WARM, channel="")
            told.goes(every, lines=(line.format(n), *((SHM,) if n % 3 == 0 else ())), cpu=1.0, states="R", **rates)
        return judged()

    return story


def a_cascade_of_compiles():
    """C158: the first look stands in a synchronize, the second in LLVM: rank 0 was getting on."""
    server = Served(count=1).flows(20)
    for n in range(60):
        server.goes(4, running=2, cpu=1.0, at=("item torch/_tensor.py", *STREAM, *STEP["vllm"]), channel="")
        server.goes(4, running=2, cpu=1.0, at=(f"make_llir_{n} triton/backends/nvidia/compiler.py", *STEP["vllm"]))
    return server.memories


def too_many_threads():
    """C163: one core's worth of work for 15."""
    told, judged = start()
    told.all_at("copy_ torch/_ops.py", LOAD, channel="").goes(900, cpu=0.02, states="RS", stalls={"cpu": 0.95})
    return judged()


def killed_while_it_loads():
    """C160: somebody else's probe ends a start that goes on well."""
    told, judged = start()
    told.goes(120, **BUSY)
    for member in [m for m in told.members if m.pid != 100]:
        told.loses(member.pid, -15)
    told.loses(100, -15).goes(3)
    return judged()


def short_answers_pass_and_long_ones_hang():
    """C065: 128 tokens come, 227 do not."""
    server = Served(engine="sglang", ranks=2, count=2)
    server.goes(5, running=1, tokens=26, percent=90.0, watts=300.0, cpu=0.9).goes(20, at=IDLE["sglang"], cpu=0.99)
    server.goes(4, running=1, tokens=30, percent=90.0, watts=300.0, cpu=0.9, at=STEP["sglang"])
    at = ("cuGraphLaunch torch/cuda/graphs.py", *STEP["sglang"])
    server.goes(90, running=1, percent=100.0, watts=124.0, cpu=1.0, at=at, channel="")
    return server.memories


def after_a_long_idle_time():
    """C066: the first prefill after a quarter of an hour."""
    server = Served(engine="sglang").flows(10).goes(900, at=IDLE["sglang"], cpu=0.99)
    server.goes(200, running=1, stacks=REFUSED)
    return server.memories


def behind_a_health_route_that_times_out():
    """C156: it is only busy; a probe of 2 s gets no answer."""
    server = Served()
    for n in range(300):
        server.goes(1, running=256, waiting=40, tokens=900, percent=99.0, watts=400.0 + 60.0 * (n % 2), cpu=1.0,
                    at=STEP["vllm"], health=Unseen("no answer within 2 s"))  # fmt: skip
    return server.memories


def a_route_that_never_answers():
    """C133: ``/server_info`` hangs before the first request; the server is well."""
    server = Served(engine="sglang").goes(300, counters=Unseen("no answer within 5 s"), health=Unseen("no answer"),
                                          at=IDLE["sglang"], cpu=0.99)  # fmt: skip
    return server.memories


def its_own_warm_up_goes_through_a_proxy():
    """C128: the server's request to itself gets 403; ours does not go that way, and is answered."""
    server = Served(engine="sglang").goes(120, every_second=("Prefill 403: Forbidden",), at=IDLE["sglang"], cpu=0.99)
    return server.memories


def a_bar_that_stands_beside_one_that_moves():
    """C145: the capture waits for DeepGEMM's session inside it."""
    told, judged = start("sglang", phase="graph-capture")
    for n in range(1, 90):
        at = ("compile deep_gemm/jit.py", "capture sglang/srt/model_executor/runner.py")
        told.all_at(*at, channel="").goes(10, cpu=1.0, lines=("Capturing batches 0%| 0/19", f"DeepGEMM warmup: {n}%|"))
    return judged()


STALE = LockFile(path="/root/.cache/torch_extensions/x/lock", kind="presence", waiters=(FIRST,), age_seconds=9000.0)
NFS = LockFile(path="/nfs/.cache/flashinfer/norm.lock", kind="flock", waiters=(FIRST,))
WEDGED = Unseen("NVML did not answer")

# --------------------------------------------------------------------------------------------- the table

TOLD: dict[str, Told] = {
    # idle deadlocks
    "C002": Told(hangs("wait threading.py", "load flashinfer/jit/core.py", "kernel_warmup", engine="sglang", ranks=8,
                       made={"phase": "jit-compile", "count": 8}), "stuck", ("idle",)),
    "C003": Told(hangs(*BARRIER, "in_the_same_node_as vllm/distributed/parallel_state.py",
                       "initialize_model_parallel vllm/distributed/parallel_state.py", nodes=2, ranks=8, seconds=400,
                       limits=Limits(waiting=300.0), made={"phase": "dist-init"}), "waiting", ("peers",),
                 then="expired"),
    "C004": Told(hangs("monitored_barrier " + BARRIER[0].split(" ")[1],
                       "dist_barrier_after_load sglang/srt/model_executor/model_runner.py", engine="sglang", nodes=2,
                       ranks=4), "waiting", ("peers",), ("weights-load",)),
    # The lock of the memory map, not the driver's own channel: the kernel does not say who holds it, and a starved
    # disk looks the same. It is waited for, and ends.
    "C015": Told(hangs(*LOCK, LOAD, channel="rwsem_down_read_slowpath", states="D", seconds=400, gpus=WEDGED,
                       limits=Limits(waiting=300.0)), "waiting", ("disk",), then="expired"),
    "C022": Told(hangs(*GROUP, SGL_INIT, engine="sglang", nodes=2, cpu=0.01, made={"phase": "dist-init"}), "waiting",
                 ("peers",)),
    "C023": Told(hangs(*GATHER, "prepare_mlp_sync_batch sglang/srt/managers/scheduler.py", engine="sglang", nodes=2,
                       ranks=8, made={"phase": "warm-up"}), "waiting", ("peers",), ("warm-up",)),
    # busy hangs
    "C029": Told(the_first_all_reduce_spins, "stuck", ("busy",)),
    "C037": Told(hangs(*DEVICE, *GROUP, INIT, ranks=2, watts=126.0, made={"phase": "dist-init", "count": 2}, **SPIN),
                 "stuck", ("busy",), ("dist-init",)),
    "C045": Told(stalls(*STREAM, engine="sglang", ranks=2, count=2, watts=124.0, **SPIN), "stuck", ("serving",)),
    "C046": Told(stalls(*STREAM, engine="sglang", ranks=8, count=8, watts=125.0, **blind(SPIN)), "stuck", ("serving",)),
    "C047": Told(stalls("tree_speculative_sampling_target_only sgl_kernel/speculative.py", *STREAM, engine="sglang",
                        ranks=2, count=2, floor=22.0, watts=25.0, work=(40.0, 58.0), **SPIN), "stuck", ("serving",)),
    "C048": Told(stalls(*STREAM, engine="sglang", watts=124.0, **SPIN), "stuck", ("serving",)),
    "C049": Told(stalls(*STREAM, floor=115.0, watts=135.0, work=(250.0, 550.0), **SPIN), "stuck", ("serving",)),
    "C050": Told(hangs(*STREAM, WARM, nodes=8, percent=96.0, watts=22.0, cpu=0.003, states="R", channel="", seconds=90,
                       made={"phase": "jit-compile", "floor": 19.0}), "waiting", ("peers",), ("jit-compile",)),
    "C050 while it serves": Told(stalls(*STREAM, nodes=8, floor=19.0, percent=96.0, watts=22.0, work=(42.0, 90.0),
                                        cpu=0.003), "stuck", ("serving",), ("serving",)),
    "C051": Told(one_board_idle("sglang", 4, "copy_done.synchronize torch/cuda/streams.py", nodes=2, cpu=1.0,
                                channel=""), "stuck", ("serving",)),
    "C052": Told(one_board_idle("generic", 8, "wait turbomind.py", counters=OFF, clients=4, canary="waiting"), "stuck",
                 ("serving",)),
    # stalls while serving
    "C061": Told(stalls("copy_done.synchronize torch/cuda/streams.py", engine="sglang", ranks=4, nodes=2, cpu=1.0,
                        channel=""), "stuck", ("serving",)),
    "C065": Told(short_answers_pass_and_long_ones_hang, "stuck", ("serving",)),
    "C066": Told(after_a_long_idle_time, "stuck", ("serving",)),
    "C072": Told(stalls("sample_tokens vllm/v1/worker/gpu_model_runner.py", nodes=2, cpu=1.0, channel="",
                        every_second=(SHM,)), "stuck", ("serving",)),
    "C073": Told(stalls(*STREAM, floor=19.0, percent=96.0, watts=21.0, work=(42.0, 90.0), stacks=REFUSED), "stuck",
                 ("serving",)),
    "C080": Told(stalls("fill_bitmask xgrammar/matcher.py", floor=19.0, work=(42.0, 90.0), channel="futex_do_wait"),
                 "stuck", ("serving",)),
    "C081": Told(a_test_request_tells("sglang", *LOCK), "stuck", ("serving",)),
    "C084": Told(ranks_apart, "stuck", ("serving",)),
    "C089": Told(a_test_request_tells("sglang", *LOCK), "stuck", ("serving",)),
    "C090": Told(a_bad_board, "broken", ("hardware",)),
    "C092": Told(a_test_request_tells("sglang", *LOCK, every_second=("state was deleted in TokenizerManager",)),
                 "stuck", ("serving",)),
    "C097": Told(stalls(*GATHER, "draft_forward sglang/srt/speculative/eagle_worker.py", engine="sglang", ranks=8,
                        count=8, cpu=1.0, channel=""), "stuck", ("serving",)),
    "C098": Told(stalls(*STREAM, floor=19.0, percent=96.0, watts=21.0, work=(42.0, 90.0), cpu=1.0, channel="",
                        every_second=(SHM,)), "stuck", ("serving",)),
    # somebody died, others hang on
    "C099": Told(a_dead_member(FIRST, Unseen("its parent never told")), "broken", ("survivors",)),
    "C101": Told(a_dead_member(FIRST + 1, -6, engine="sglang", ranks=2), "broken", ("survivors",)),
    "C106": Told(a_dead_detokenizer, "broken", ("survivors",), ("warm-up",)),
    # waits for something outside
    "C107": Told(goes_on(*HUB, LOAD, download=150.0 * MIB, channel="wait_woken"), "moving", phases=("weights-load",)),
    "C110": Told(a_download_that_stands, "waiting", ("download",), ("weights-load",), then="expired"),
    "C113": Told(hangs(*BATON, "kernel_warmup", channel="hrtimer_nanosleep",
                       made={"phase": "jit-compile", "locks": (STALE,)}),
                 "waiting", ("stale-lock",)),
    "C114": Told(hangs(*BATON, "load_torch_c_dlpack_extension tvm_ffi/_dlpack.py", engine="sglang",
                       channel="hrtimer_nanosleep", made={"phase": "import"}), "waiting", ("lock",)),
    "C115": Told(hangs(*FILELOCK, "load_cuda_ops flashinfer/jit/core.py", engine="generic", channel="hrtimer_nanosleep",
                       made={"phase": "import", "locks": (NFS,)}), "waiting", ("lock",), ("import",)),
    "C127": Told(hangs(*GROUP, INIT, nodes=2, ranks=8, made={"phase": "dist-init"}), "waiting", ("peers",)),
    "C128": Told(its_own_warm_up_goes_through_a_proxy, "ready", phases=("serving",)),
    "C133": Told(a_route_that_never_answers, "ready", phases=("serving",)),
    "C134": Told(hangs("ncclCommInitRank vllm/distributed/device_communicators/pynccl_wrapper.py", INIT, nodes=2,
                       cpu=1.0, channel="", made={"phase": "dist-init"}), "waiting", ("peers",)),
    # only slow
    "C135": Told(goes_on("process_weights_after_loading", LOAD, cpu=0.03, faults=300.0), "moving",
                 phases=("weights-load",)),
    "C139": Told(goes_on("process_weights_after_loading", LOAD, cpu=0.3, faults=2000.0, seconds=1200), "moving",
                 phases=("weights-load",)),
    "C140": Told(goes_on("read safetensors/torch.py", LOAD, reads=100.0 * MIB, cpu=0.1, seconds=1200), "moving"),
    "C143": Told(compilers(), "moving"),
    "C145": Told(a_bar_that_stands_beside_one_that_moves, "moving", phases=("graph-capture", "jit-compile")),
    "C146": Told(bars(seconds=950, every=43, line="[Autotuner]: Tuning {}/22"), "moving"),
    "C149": Told(bars(seconds=1500, every=60, line="", percent=100.0, watts=400.0), "moving"),
    "C150": Told(hangs(*BARRIER, WARM, nodes=2, seconds=900, made={"phase": "jit-compile"}), "waiting", ("peers",)),
    "C154": Told(serves("layer_{} model.py", *STEP["sglang"], engine="sglang", running=1, percent=99.0, watts=420.0,
                        cpu=1.0, canary="bad", status=503), "ready"),
    "C155": Told(serves(*STEP["vllm"], ranks=4, running=256, waiting=1024, tokens=700, percent=99.0, watts=420.0,
                        cpu=1.0, health=Unseen("no answer within 10 s")), "ready"),
    "C156": Told(behind_a_health_route_that_times_out, "ready"),
    "C156 when it is real": Told(stalls(*STREAM, watts=124.0, **SPIN), "stuck", ("serving",)),
    "C158": Told(a_cascade_of_compiles, "ready"),
    "C159": Told(serves(*SPINS_IDLE, ranks=2, cpu=1.0), "ready"),
    "C160": Told(killed_while_it_loads, "exited", ("signal",)),
    "C163": Told(too_many_threads, "waiting", ("host",)),
    # it ends, and says why
    "C192": Told(ends("vllm", 1, "ValueError: Free memory on device (36.75/121.63 GiB) on startup is less than desired "
                      "GPU memory utilization (0.9, 109.46 GiB).", phase="dist-init"), "exited", ("gpu-oom",),
                 ("dist-init",)),
    "C196": Told(ends("vllm", 1, "misc/shmutils.cc:72 NCCL WARN Call to ncclShmOpen failed", phase="dist-init"),
                 "exited", ("shm-full",)),
    "C198": Told(ends("vllm", 1, "NCCL WARN Error while creating shared memory segment /dev/shm/nccl-1YsMbG (size "
                      "9637888)", phase="dist-init"), "exited", ("shm-full",)),
}  # fmt: skip

_END = "about the end of a server and what is left of it: proved by acts, not told by a timeline"
NOT_TOLD: dict[str, str] = {
    **dict.fromkeys(
        ("C167", "C168", "C174", "C175", "C176", "C180", "C181", "C182", "C183", "C184", "C186", "C187", "C188"), _END
    ),
    "C062": "says that it listens and calls itself ready, and no CPU, GPU, stack or counter",
    "C074": "gives no signal at all",
    "C093": "new requests are answered and none is counted: what was lost does not stand still anywhere",
    "C157": "about a process pool at the end of a program that is no server",
    "C162": "gives no signal at all",
    "C199": "gives the last line and nothing else",
}


def test_every_sure_report_is_told_or_has_a_reason_why_not():
    told = {name.split(" ")[0] for name in TOLD}
    assert not told & set(NOT_TOLD)
    assert told | set(NOT_TOLD) == set(CASES)
    assert (len(CASES), len(told), len(NOT_TOLD)) == (78, 59, 19)
    assert sum(reason == _END for reason in NOT_TOLD.values()) == 13
    assert {CASES[name]["verdict"] for name, reason in NOT_TOLD.items() if reason == _END} == {"cleanup-failure"}


EXPECTED = {
    "not-a-hang/slow": {"moving", "ready", "waiting", "exited", "stuck"},
    "external-wait": {"waiting", "moving", "ready"},
    "idle-deadlock": {"stuck", "waiting"},
    "busy-hang/livelock": {"stuck", "waiting"},
    "serving-stall": {"stuck", "broken"},
    "crash-with-survivors": {"broken"},
    "resource-exhaustion": {"exited"},
}


@pytest.mark.parametrize("name", TOLD)
def test_a_report(name):
    case, told = CASES[name.split(" ")[0]], TOLD[name]
    memories = told.story()
    verdicts = seen(memories)
    assert told.verdict in EXPECTED[case["verdict"]]
    found = first(memories, told.verdict)
    assert found is not None, (verdicts, memories[-1].verdict)
    if told.kinds:
        found = next((m for m in memories if m.verdict.verdict == told.verdict and m.verdict.kind in told.kinds), None)
        assert found is not None, [m.verdict.kind for m in memories if m.verdict.verdict == told.verdict]
    if told.verdict not in ALARMS:
        assert not ALARMS & verdicts, next(m.verdict for m in memories if m.verdict.verdict in ALARMS)
    last = next(m for m in reversed(memories) if m.verdict.verdict == told.verdict)
    assert {found.verdict.phase, last.verdict.phase} & set(told.phases or (case["phase"],))
    if told.verdict == "stuck" and told.kinds != ("idle",):
        assert found.verdict.suspects
    if told.then:
        assert first(memories, told.then) is not None


def test_where_the_corpus_says_slow_nobody_is_told_to_act():
    slow = [name for name, case in CASES.items() if case["verdict"] == "not-a-hang/slow" and name in TOLD]
    assert len(slow) == 15
    assert all(TOLD[name].verdict not in ALARMS for name in slow)


def test_the_ranks_that_disagree_are_told_apart():
    # C084: the one that waits for the other stands outside its loop, the other waits for work.
    verdict = first(ranks_apart(), "stuck").verdict
    notes = {s.pid: s.note for s in verdict.suspects}
    assert notes == {
        FIRST: "waits for a peer in all_gather_into_tensor (distributed_c10d.py)",
        FIRST + 1: "waits for work",
    }
