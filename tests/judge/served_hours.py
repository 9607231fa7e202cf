"""Hours of serving that never happened: what a watcher sees of the engine in ``modelled.py``, and what is judged.

One look a second; the dear sources are there for the asking. Boards may have other holders, metrics may be off or
come and go, clients may keep idle connections, looks may be lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from modelled import CANARY, PIECES, TOKENS_PER_SECOND, Engine, Piece, Request

from hangguard.engines.sglang import SGLANG
from hangguard.engines.vllm import VLLM
from hangguard.facts import (
    NOT_ASKED,
    Ask,
    Gpu,
    GpuHolder,
    Host,
    Launch,
    Listener,
    Log,
    Port,
    Process,
    Reply,
    Sample,
    Serving,
    Stack,
    StackFrame,
    ThreadStack,
    Tree,
    Unseen,
)
from hangguard.judge import Memory, Rules, next_ask, rules_for, start, step

TITLES = {
    "vllm": ("/venv/bin/python3 /venv/bin/vllm serve M", "VLLM::EngineCore"),
    "sglang": ("python -m sglang.launch_server --model-path M", "sglang::scheduler"),
}


@dataclass
class Server(Engine):
    """The engine on its machine, and everything that a watcher could see of it."""

    scraped: Serving | None = None

    @property
    def rules(self) -> Rules:
        """By which it is judged."""
        launch = Launch(
            argv=(self.engine,), env=(), cwd="/", engine=self.engine, url="http://h:8000", host="h", port=8000
        )
        return rules_for(VLLM if self.engine == "vllm" else SGLANG, launch)

    def look(self, ask: Ask) -> Sample:
        """Return what a look with this question brings."""
        if ask.canary and self.canary.state != "waiting":
            self._send_canary()
        tree = self._tree()
        lines = self._lines()
        self.log_bytes += sum(len(line) + 1 for line in lines)
        return Sample(
            t=self.t,
            tree=tree,
            log=Log(total_bytes=self.log_bytes, lines=lines),
            port=Port(
                port=8000,
                listener=Listener(pid=100, title="server", ours=True),
                clients=self._clients() if self.clients_seen else NOT_ASKED,
            ),
            health=self._health(),
            answer=Reply(state="good", since=5000.0, status=200),
            gpus=tuple(self._gpu(index) for index in range(self.gpus)),
            host=Host(
                memory_total_bytes=64 << 30,
                memory_available_bytes=32 << 30,
                shm_total_bytes=1 << 30,
                shm_free_bytes=1 << 29,
                oom_kills=0,
            ),
            stacks=tuple(self._stack(p) for p in tree.members) if ask.stacks else NOT_ASKED,
            serving=self._serving(),
            canary=self.canary,
            quiet_until=self.t + 30.0 if self.piece.wanted and not self.hung else None,
        )

    def _send_canary(self) -> None:
        self.canaries += 1
        self.canaries_to_sleepers += self.piece.asleep and not self.hung
        self.canary = Reply(state="waiting", since=self.t)
        self.queue.append(Request(0.1, CANARY, canary=True))

    def _clients(self) -> int:
        ours = sum(r.canary for r in (*self.running, *self.queue))
        return len(self.running) + len(self.queue) - ours + self.idle_connections

    def _health(self) -> Reply:
        """vLLM's is 200 whatever happens; SGLang's waits for a token, for 20 s."""
        if self.engine == "vllm" or self.worked or not (self.running or self.piece.asleep):
            return Reply(state="good", since=self.t, status=200)
        return Reply(state="bad", since=self.t, status=503)

    def _serving(self) -> Serving | Unseen:
        if self.metrics == "off":
            return Unseen("the route of the metrics answers 404")
        if self.metrics == "flaky" and int(self.t) % 900 < 200:
            return Unseen("no answer within 5 s")
        before = self.scraped
        if before is None or int(self.t) % 2 == 0:
            # vLLM's gauges travel with the engine's outputs: without a step they stay as they were.
            stays = self.engine == "vllm" and not self.worked and bool(self.running) and before is not None
            self.scraped = before = Serving(
                running=before.running if stays and before else len(self.running),
                waiting=before.waiting if stays and before else len(self.queue),
                generated_tokens=self.generated,
                prompt_tokens=self.prompt,
                is_asleep=None if self.piece.wanted else self.piece.asleep and not self.hung,
                at=self.t,
            )
        return before

    def _tree(self) -> Tree:
        return Tree(
            members=tuple(self._process(pid, rate) for pid, rate in self._rates().items()),
            births=self.births,
            deaths=self.deaths,
            cpu_seconds=sum(self.cpu.values()),
            read_chars=self.finished * 2000,
            written_chars=self.finished * 2000,
        )

    def _process(self, pid: int, rate: float) -> Process:
        main, worker = TITLES[self.engine]
        title = {100: main, 102: worker}.get(pid, "/usr/local/cuda/bin/ptxas -v x.ptx")
        return Process(
            pid=pid,
            started=pid,
            parent={100: 1, 102: 100}.get(pid, 102),
            title=title,
            name=title.rsplit("/", 1)[-1][:15],
            state="R" if rate > 0.5 else "S",
            threads=40 if pid < 200 else 1,
            cpu_seconds=self.cpu.get(pid, 0.0),
            reaped_cpu_seconds=0.0,
            minor_faults=0,
            major_faults=0,
            rss_bytes=1 << 30,
            read_chars=0,
            thread_states="RS" if rate > 0.5 else "S",
        )

    def _lines(self) -> tuple[str, ...]:
        """Statistics and access lines, as the engines print them while they work."""
        if not self.worked or not self.prints:
            return ()
        n, q = len(self.running), len(self.queue)
        if self.engine == "sglang":
            rate = n * TOKENS_PER_SECOND + self.rng.random()
            line = f"Decode batch, #running-req: {n}, #token: {self.generated}, token usage: 0.1, cuda graph: True, "
            return (f"[2026-01-01 00:00:00] {line}gen throughput (token/s): {rate:.2f}, #queue-req: {q}",)
        if int(self.t) % 10:
            return ()
        head = (
            "(APIServer pid=100) INFO 01-01 00:00:00 [loggers.py:310] Engine 000: Avg prompt throughput: 17.6 tokens/s"
        )
        return (f"{head}, Avg generation throughput: {n * 30.0} tokens/s, Running: {n} reqs, Waiting: {q} reqs",)

    def _gpu(self, index: int) -> Gpu:
        power = (self.working if self.worked else self.floor) + self.rng.uniform(-1.5, 1.5)
        percent = self.rng.uniform(85, 100) if self.worked else 100.0 if self.hung == "hot" else 0.0
        holders = (GpuHolder(pid=102, used_bytes=70 << 30),)
        if self.neighbour:
            power, percent = self.rng.uniform(self.floor, self.working), self.rng.choice((0.0, 50.0, 100.0))
            holders = (*holders, GpuHolder(pid=9999, used_bytes=8 << 30))
        return Gpu(
            index=index,
            uuid=f"GPU-{index}",
            name="a board",
            memory_used_bytes=70 << 30,
            memory_total_bytes=140 << 30,
            utilization_percent=percent,
            power_watts=power,
            holders=holders,
            faults=(),
        )

    def _stack(self, process: Process) -> Stack:
        place, channel = self._place(process.pid)
        frames = tuple(StackFrame(function=f, file=file, line=7) for f, file in place)
        return Stack(
            pid=process.pid,
            started=process.started,
            title=process.title,
            threads=(ThreadStack(name="MainThread", thread_id=process.pid, active=False, frames=frames),)
            if process.pid < 200
            else Unseen("no Python in it"),
            is_python=process.pid < 200,
            wait_channel=channel,
        )

    def _place(self, pid: int) -> tuple[tuple[tuple[str, str], ...], str]:
        if pid == 100:
            return (("select", "selectors.py"), ("run_once", "asyncio/base_events.py")), "ep_poll"
        if pid >= 200:
            return (), ""
        loop = ("run_busy_loop", "vllm/v1/engine/core.py")
        if self.engine == "sglang":
            loop = ("event_loop_overlap", "sglang/srt/managers/scheduler.py")
        if self.hung == "idle":
            return (("acquire", "threading.py"), ("execute_model", "model_runner.py"), loop), "futex_do_wait"
        if self.hung:  # a kernel that never ends, or a loop
            at = ("synchronize", "torch/cuda/streams.py") if self.gpus else ("forward", "model.py")
            return (at, ("execute_model", "model_runner.py"), loop), ""
        if self.worked and self.gpus:
            return (("synchronize", "torch/cuda/streams.py"), ("execute_model", "model_runner.py"), loop), ""
        if self.worked:
            return ((f"layer_{self.rng.randrange(40)}", "model.py"), ("execute_model", "model_runner.py"), loop), ""
        if self.compiles:
            channel = "do_wait" if self.compiler is not None else ""
            return (("make_cubin", "triton/backends/nvidia/compiler.py"), ("compile", "triton/compiler/c.py"), loop), (
                channel
            )
        if self.engine == "sglang":
            return (("recv_requests", "sglang/srt/managers/scheduler.py"), loop), ""
        return (("get", "queue.py"), ("_process_input_queue", "vllm/v1/engine/core.py"), loop), "futex_do_wait"


def hours(server: Server, seconds: float) -> Iterator[Memory]:
    """Watch this server for so long, as supervision does, and return every memory."""
    memory, rng, until = start(server.rules), server.rng, server.t + seconds
    while server.t < until:
        server.piece = server.comes(rng.choice(PIECES)(rng))
        server.compile_left = server.piece.compiles
        ends = min(until, server.t + server.piece.seconds)
        while server.t < ends:
            server.second()
            if rng.random() < 0.02:  # a look was lost
                continue
            if rng.random() < 0.0005:  # the watcher did not get to run
                for _ in range(rng.randrange(2, 60)):
                    server.second()
            memory = step(memory, server.look(next_ask(memory)))
            yield memory


def a_stall(server: Server, how: str, *, watched: float = 330.0) -> float | None:
    """Let the server hang in a burst; return the seconds until it is called stuck, or ``None``."""
    memory, rng = start(server.rules), server.rng
    idle, bursts = Piece("idle", 40.0), Piece("bursts", rng.uniform(40.0, 120.0), rng.uniform(0.5, 3.0))
    for server.piece in (idle, bursts):  # idle first: the floor of every board is known from its start
        for _ in range(round(server.piece.seconds)):
            server.second()
            memory = step(memory, server.look(next_ask(memory)))
    server.hangs(how)
    while server.t < (server.hung_at or 0.0) + watched:
        server.second()
        memory = step(memory, server.look(next_ask(memory)))
        if memory.verdict.verdict == "stuck":
            return server.t - (server.hung_at or 0.0)
    return None
