"""A server that has answered, in stretches: what its counters say, who is connected, where its workers stand."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from making import MIB, NOT_ASKED, Member, Story, frames, rules

from hangguard.facts import Gpu, GpuHolder, IdlePlace, Listener, Port, Reply, Sample, Serving, Unseen, WaitSite
from hangguard.judge import Memory, Rules, next_ask, start, step

IDLE = ("get queue.py", "_process_input_queue core.py", "run_busy_loop core.py")
LOCKED = ("acquire lock.py", "execute_model runner.py", "step core.py", "run_busy_loop core.py")
KERNEL = ("synchronize torch/cuda/streams.py", "get_output runner.py", "step core.py", "run_busy_loop core.py")
PREFILL = ("forward model.py", "execute_model runner.py", "step core.py", "run_busy_loop core.py")

API = Member(100, "python -m engine.server", at=frames("select selectors.py", "run_once events.py"), works=False)
WORKER = Member(102, "ENGINE::Worker_0", 100, 40, frames(*IDLE))
PLACES = (IdlePlace(loop="run_busy_loop", inside="get|_process_input_queue|wait"),)
SITES = (
    WaitSite(function="synchronize", file="torch/cuda", waits_for="kernel"),
    WaitSite(function="acquire", file="filelock", waits_for="lock"),
)
FLOOR = 120.0


def served(**changes) -> Rules:
    return rules(**{"idle_places": PLACES, "wait_sites": SITES, "has_counters": True, **changes})


@dataclass
class Asked:
    """Plays a server as supervision does: the dear sources are in a sample only when they were asked for."""

    by: Rules = field(default_factory=served)
    story: Story = field(default_factory=lambda: Story(members=(API, WORKER)))
    memory: Memory = field(init=False)
    memories: list[Memory] = field(default_factory=list)
    tokens: float = 0.0
    prompt: float = 0.0
    canary: Reply = field(default_factory=lambda: Reply(state="not-asked", since=0.0))
    canaries: int = 0

    def __post_init__(self) -> None:
        self.memory = start(self.by)
        self.story.holders = (GpuHolder(pid=102, used_bytes=70 << 30),)
        self.story.gpu_memory = 70 << 30
        self.goes(12)
        assert self.memory.verdict.verdict == "ready"

    def goes(
        self,
        seconds: int,
        *,
        running: int | None = 0,
        waiting: int | None = 0,
        tokens: float = 0.0,
        prompt: float = 0.0,
        counters: Unseen | None = None,
        asleep: bool | None = None,
        clients: int | Unseen = 0,
        canary: str = "good",
        status: int = 200,
        at: tuple[str, ...] | None = None,
        watts: float | Unseen = FLOOR,
        percent: float = 0.0,
        gpus: tuple[Gpu, ...] | Unseen | None = None,
        **more,
    ) -> Asked:
        """Go on for so many seconds. ``canary`` is what happens to a request of ours: good, waiting, bad, failed."""
        if at is not None:
            self.story.moves_to(102, *at)
        for _ in range(seconds):
            self.tokens += tokens
            self.prompt += prompt
            ready = Reply(state="good", since=1001.0, status=200)
            self.story.goes(1, answer=ready, watts=watts, gpu_percent=percent, **more)
            t = self.story.t
            ask = next_ask(self.memory)
            if ask.canary and self.canary.state != "waiting":
                self.canaries += 1
                self.canary = Reply(state="waiting", since=t)
            elif self.canary.state == "waiting" and canary != "waiting":
                self.canary = Reply(state=canary, since=t, status=status)
            serving = counters or Serving(
                running=running,
                waiting=waiting,
                generated_tokens=round(self.tokens),
                prompt_tokens=round(self.prompt),
                is_asleep=asleep,
                at=t,
            )
            sample = replace(
                self.story.samples[-1],
                serving=serving,
                port=Port(
                    port=8000,
                    listener=Listener(pid=100, title="server", ours=True),
                    clients=clients if ask.sockets else NOT_ASKED,
                ),
                canary=self.canary,
                stacks=self.story.samples[-1].stacks if ask.stacks else NOT_ASKED,
            )
            self.steps(sample if gpus is None else replace(sample, gpus=gpus))
        return self

    def steps(self, sample: Sample) -> None:
        self.memory = step(self.memory, sample)
        self.memories.append(self.memory)

    def since(self, t: float) -> list[Memory]:
        return [m for m in self.memories if m.now > t]

    @property
    def verdict(self):
        return self.memory.verdict

    def first(self, verdict: str) -> Memory | None:
        return next((m for m in self.memories if m.verdict.verdict == verdict), None)

    def seen(self) -> set[str]:
        return {m.verdict.verdict for m in self.memories if m.ready_at is not None}


__all__ = ["API", "FLOOR", "IDLE", "KERNEL", "LOCKED", "MIB", "PREFILL", "SITES", "WORKER", "Asked", "served"]
