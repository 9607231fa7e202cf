"""Real engines in made-up timelines: vLLM and SGLang by their own tables, with as many ranks and boards as it takes."""

from __future__ import annotations

from dataclasses import dataclass, field

from asked import Asked
from making import BUSY, Member, Story, frames, gpu

from hangguard.engines.base import Engine
from hangguard.engines.generic import GENERIC
from hangguard.engines.sglang import SGLANG
from hangguard.engines.vllm import VLLM
from hangguard.facts import Gpu, GpuHolder, Launch, Limits, Phase, Unseen
from hangguard.judge import Memory, Rules, rules_for

ENGINES: dict[str, Engine] = {"vllm": VLLM, "sglang": SGLANG, "generic": GENERIC}
TRACKER = Member(
    99, "python -c from multiprocessing.resource_tracker import main;main(5)", 100, 1, frames("main"), works=False
)
FIRST = 102
"""The pid of the first worker."""

# ------------------------------------------------------------------------------------------ where they stand

CORE_PY, SCHEDULER_PY = "vllm/v1/engine/core.py", "sglang/srt/managers/scheduler.py"
FRONT = {
    "vllm": ("poll zmq/sugar/poll.py", "wait_for_engine_startup vllm/v1/engine/utils.py"),
    "sglang": ("_recv multiprocessing/connection.py", "_wait_for_scheduler_ready sglang/srt/entrypoints/engine.py"),
    "generic": ("main server.py",),
}
LOOP = {
    "vllm": (f"run_busy_loop {CORE_PY}",),
    "sglang": (f"event_loop_overlap {SCHEDULER_PY}",),
    "generic": ("loop server.py",),
}
IDLE = {
    "vllm": ("get queue.py", f"_process_input_queue {CORE_PY}", *LOOP["vllm"]),
    "sglang": (f"recv_requests {SCHEDULER_PY}", *LOOP["sglang"]),
    "generic": ("wait server.py", *LOOP["generic"]),
}
SPINS_IDLE = (
    "acquire_read vllm/distributed/device_communicators/shm_broadcast.py",
    "dequeue vllm/distributed/device_communicators/shm_broadcast.py",
    "worker_busy_loop vllm/v1/executor/multiproc_executor.py",
)
"""A worker of vLLM's with two ranks, waiting for its next call."""

C10D = "torch/distributed/distributed_c10d.py"
STORE = ("_create_c10d_store torch/distributed/rendezvous.py", "init_process_group " + C10D)
GROUP = ("_new_process_group_helper " + C10D, "init_process_group " + C10D)
BARRIER = ("barrier " + C10D, "wrapper torch/distributed/c10d_logger.py")
GATHER = ("all_gather_into_tensor " + C10D, "wrapper torch/distributed/c10d_logger.py")
STREAM = ("synchronize torch/cuda/streams.py",)
DEVICE = ("synchronize torch/cuda/__init__.py",)
LOCK = ("acquire lock.py",)
FILELOCK = ("acquire filelock/_api.py",)
BATON = ("wait torch/utils/file_baton.py", "_jit_compile torch/utils/cpp_extension.py")
HUB = ("read ssl.py", "read http/client.py", "snapshot_download huggingface_hub/_snapshot_download.py")
STEP = {
    "vllm": (
        "execute_model vllm/v1/worker/gpu_model_runner.py",
        f"step {CORE_PY}",
        f"_process_engine_step {CORE_PY}",
        *LOOP["vllm"],
    ),
    "sglang": (
        "forward_decode sglang/srt/model_executor/model_runner.py",
        f"run_batch {SCHEDULER_PY}",
        *LOOP["sglang"],
    ),
    "generic": ("step server.py", *LOOP["generic"]),
}
"""Inside a request."""

# ------------------------------------------------------------------------------------------- what they print

LINES: dict[str, dict[str, str]] = {
    "vllm": {
        "import": "INFO [api_server.py:1] vLLM API server version 0.32.0",
        "dist-init": "INFO [parallel_state.py:1] world_size=2 rank=0 local_rank=0 distributed_init_method=tcp://h:1",
        "weights-load": "INFO [gpu_model_runner.py:1] Starting to load model M...",
        "jit-compile": "INFO [gpu_model_runner.py:1] Model loading took 1.0 GiB memory and 22.0 seconds",
        "kv-cache": "INFO [gpu_worker.py:1] Available KV cache memory: 50.0 GiB",
        "graph-capture": "INFO [gpu_model_runner.py:1] Capturing CUDA graphs: 0%",
        "warm-up": "INFO [core.py:1] init engine (profile, create kv cache, warmup model) took 30 seconds",
    },
    "sglang": {
        "import": "[2026-01-01 00:00:00] server_args={}",
        "dist-init": "[2026-01-01 00:00:00 TP0] Init torch distributed begin.",
        "weights-load": "[2026-01-01 00:00:00 TP0] Load weight begin. avail mem=139.0 GB",
        "jit-compile": "[2026-01-01 00:00:00 TP0] Running FlashInfer autotune...",
        "kv-cache": "[2026-01-01 00:00:00 TP0] KV Cache is allocated. #tokens: 1000",
        "graph-capture": "[2026-01-01 00:00:00 TP0] Memory pool end. avail mem=10.0 GB",
        "warm-up": "INFO:     Uvicorn running on http://127.0.0.1:30000",
    },
    "generic": {"import": "hello"},
}


def by(engine: str = "vllm", *, ranks: int = 1, nodes: int = 1, limits: Limits | None = None, **changes) -> Rules:
    """The rules of a launch of this engine."""
    launch = Launch(argv=("x",), env=(), cwd="/", engine=engine, url="http://h:1", host="h", port=1, ranks=ranks,
                    nodes=nodes, **changes)  # fmt: skip
    return rules_for(ENGINES[engine], launch, limits)


def members(engine: str = "vllm", ranks: int = 1) -> tuple[Member, ...]:
    """Front end, tracker and workers (pids from 102 on), all idle."""
    title = {
        "vllm": "/venv/bin/python3 /venv/bin/vllm serve M",
        "sglang": "python -m sglang.launch_server --model-path M",
        "generic": "python serve.py",
    }[engine]
    front = Member(100, title, at=frames(*FRONT[engine]), channel="poll_schedule_timeout", works=False)
    one = {"vllm": "VLLM::EngineCore", "sglang": "sglang::scheduler", "generic": "python worker.py"}[engine]
    many = {"vllm": "VLLM::Worker_TP{}", "sglang": "sglang::scheduler_TP{}", "generic": "python worker.py {}"}[engine]
    core = ()
    if engine == "vllm" and ranks > 1:
        waits = frames("dequeue vllm/distributed/device_communicators/shm_broadcast.py", f"step {CORE_PY}")
        core = (Member(101, one, 100, 40, waits, works=False),)
    parent = 101 if core else 100
    titles = (one,) if ranks == 1 else tuple(many.format(n) for n in range(ranks))
    work = tuple(Member(FIRST + n, t, parent, 40, frames(*IDLE[engine])) for n, t in enumerate(titles))
    others = (Member(98, "sglang::detokenizer", 100, 8, frames("recv zmq"), works=False),) if engine == "sglang" else ()
    return (front, TRACKER, *core, *work, *others)


def pids(ranks: int) -> tuple[int, ...]:
    return tuple(range(FIRST, FIRST + ranks))


def boards(*levels: tuple[float | Unseen, float | Unseen], ranks: int = 1) -> tuple[Gpu, ...]:
    """One board for each (utilisation, watts), held by the workers, one each."""
    return tuple(
        gpu(percent=percent, watts=watts, used=70 << 30, index=n,
            holders=(GpuHolder(pid=FIRST + min(n, ranks - 1), used_bytes=1 << 30),))
        for n, (percent, watts) in enumerate(levels)
    )  # fmt: skip


@dataclass
class Start(Story):
    """A start of a real engine: 22 s of loading, with boards that show their floor, then whatever is told."""

    engine: str = "vllm"
    ranks: int = 1
    count: int = 1
    """Boards."""
    floor: float = 122.0
    phase: Phase = "weights-load"
    members: tuple[Member, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.members = members(self.engine, self.ranks)
        lines = LINES[self.engine]
        before = tuple(lines[p] for p in lines if p == "import")
        self.goes(12, **BUSY, lines=before).goes(10, **BUSY, lines=(lines.get(self.phase, "loading"),))

    def goes(self, seconds, *, percent=0.0, watts=None, gpus=None, **more):
        """``percent`` and ``watts`` are those of all boards, or one for each."""
        drawn = self.floor if watts is None else watts
        each = [_each(percent, self.count), _each(drawn, self.count)]
        made = boards(*zip(*each, strict=True), ranks=self.ranks) if gpus is None else gpus
        return super().goes(seconds, gpus=made, **more)

    def all_at(self, *at: str, channel: str | Unseen | None = None) -> Start:
        """Put all workers there."""
        for pid in pids(self.ranks):
            self.moves_to(pid, *at, channel=channel)
        return self

    @property
    def began(self) -> float:
        """When the loading was over."""
        return 1022.0


@dataclass
class Served(Asked):
    """A server of a real engine that has answered."""

    engine: str = "vllm"
    ranks: int = 1
    nodes: int = 1
    count: int = 1
    floor: float = 122.0
    by: Rules = field(init=False)
    story: Story = field(init=False)

    def __post_init__(self) -> None:
        self.by = by(self.engine, ranks=self.ranks, nodes=self.nodes)
        self.story = Story(members=members(self.engine, self.ranks))
        super().__post_init__()

    def goes(self, seconds, *, percent=0.0, watts=None, gpus=None, at=None, channel=None, **more):
        """``percent`` and ``watts`` are those of all boards, or one for each; ``at`` is where all workers stand."""
        drawn = self.floor if watts is None else watts
        each = [_each(percent, self.count), _each(drawn, self.count)]
        made = boards(*zip(*each, strict=True), ranks=self.ranks) if gpus is None else gpus
        if at is not None or channel is not None:
            for pid in pids(self.ranks):
                self.story.moves_to(pid, *(at or ()), channel=channel)
        return super().goes(seconds, gpus=made, **more)

    def flows(self, seconds: int = 30, *, watts: tuple[float, float] | None = None) -> Served:
        """Eight requests at work; their watts vary as work does."""
        low, high = watts or (2.4 * self.floor, 4.0 * self.floor)
        for n in range(seconds):
            drawn = high if n % 2 else low
            self.goes(1, running=8, tokens=480, at=STEP[self.engine], percent=95.0, watts=drawn, cpu=0.9)
        return self

    def after(self, t: float) -> list[Memory]:
        return [m for m in self.memories if m.now > t]


def _each(value, count):
    return tuple(value) if isinstance(value, (tuple, list)) else (value,) * count


def without_stacks(reason: str = "operation not permitted") -> Unseen:
    return Unseen(reason)
