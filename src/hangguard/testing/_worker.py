"""The children of the little server: the schedulers, one a rank, and the detokenizer.

The functions carry the names of SGLang's own steps, so that a stack reads like the real one's.
"""

from __future__ import annotations

import binascii
import contextlib
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from hangguard.testing._faults import commit, fault_for
from hangguard.testing._leftovers import leave
from hangguard.testing._options import Options
from hangguard.testing._process import Channel, end_with, log, set_title

PAGE = 4096
MB = 1 << 20
WORDS = ("the", "server", "that", "hangs", "is", "found", "and", "one", "which", "answers", "goes", "on")

# Ends with its parent; burns CPU in silence, as nvcc and cc1plus do.
COMPILER = """
import os, sys, time
end, parent = time.monotonic() + float(sys.argv[1]), os.getppid()
while time.monotonic() < end and os.getppid() == parent:
    sum(range(100_000))
"""


def run_child(options: Options) -> int:
    """Run as what ``--role`` says until the main process closes the channel."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the group; the main process ends us
    if options.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not options.orphans:
        end_with(options.lifeline)
    channel = Channel(socket.socket(fileno=options.channel))
    try:
        if options.role == "detokenizer":
            _detokenize(channel)
        else:
            Scheduler(options, channel).run()
    except OSError as gone:  # the main process died between two messages
        log(f"Scheduler lost the main process: {gone}")
    except RuntimeError:
        log(f"Scheduler hit an exception: {traceback.format_exc()}")
        return 1
    while options.orphans:
        time.sleep(3600)
    return 0


def _detokenize(channel: Channel) -> None:
    set_title("sglang::detokenizer")
    channel.send({"done": "import"})
    while (request := channel.receive()) is not None:
        channel.send({"text": " ".join(str(word) for word in _list(request["words"]))})


class Scheduler:
    """One rank: the phases of a start in order, then requests, one at a time."""

    def __init__(self, options: Options, channel: Channel) -> None:
        self._options = options
        self._channel = channel
        self._seconds = options.phase_seconds
        self._suffix = f"_TP{options.rank}" if options.tp > 1 else ""
        self._prefix = f" TP{options.rank}" if options.tp > 1 else ""
        self._held: list[bytearray] = []
        self._served = 0
        self._left: list[object] = []

    def run(self) -> None:
        """Start up, waiting for all ranks after each phase; then serve."""
        steps: tuple[tuple[str, Callable[[], None]], ...] = (
            ("import", self.import_everything),
            ("dist-init", self.init_torch_distributed),
            ("weights-load", self.load_model),
            ("kv-cache", self.init_memory_pool),
            ("jit-compile", self.run_autotune),
            ("graph-capture", self.init_cuda_graphs),
        )
        for phase, step in steps:
            step()
            self._channel.send({"done": phase})
            if self._channel.receive() is None:
                return
        self.event_loop_normal()

    def import_everything(self) -> None:
        set_title(f"sglang::scheduler{self._suffix}")
        self._work(self._seconds)
        self._fault("import")

    def init_torch_distributed(self) -> None:
        self._log("Init torch distributed begin.")
        self._fault("dist-init")
        self._work(self._seconds)
        self._log(f"Init torch distributed ends. elapsed={self._seconds:.2f} s, mem usage=0.09 GB")

    def load_model(self) -> None:
        self._log("Load weight begin. avail mem=139.13 GB")
        self._fault("weights-load")
        bar = "Loading safetensors checkpoint shards: {percent:3d}% Completed | {done}/{steps} [00:00<00:00]"
        self._bar(bar, steps=4, seconds=self._seconds, each=self._read_a_shard)
        self._log(
            f"Load weight end. elapsed={self._seconds:.2f} s, type=LlamaForCausalLM, avail mem=134.11 GB, "
            "mem usage=5.02 GB."
        )

    def init_memory_pool(self) -> None:
        self._left = [leave(kind) for kind in self._options.leave if kind == "worker"]
        self._fault("kv-cache")
        self._work(self._seconds / 2)
        self._hold(self._options.hold_mb * MB // 2)
        self._work(self._seconds / 2)
        self._log("KV Cache is allocated. dtype: torch.bfloat16, #tokens: 4096, K size: 0.01 GB, V size: 0.01 GB")
        self._log("Memory pool end. avail mem=69.51 GB")

    def run_autotune(self) -> None:
        """Compile in a child, silently; only where the options ask for it."""
        if not (self._options.jit_seconds or any(f.phase == "jit-compile" for f in self._options.faults)):
            return
        self._log("Running FlashInfer autotune with cache: autotune.json")
        self._fault("jit-compile")
        compiler = [sys.executable, "-I", "-S", "-c", COMPILER, str(self._options.jit_seconds)]
        subprocess.run(compiler, check=True)
        self._log("FlashInfer autotune completed.")

    def init_cuda_graphs(self) -> None:
        if self._options.disable_cuda_graph:
            return
        self._capture("prefill", "Capturing num tokens (num_tokens=2048 avail_mem=69.39 GB)")
        self._log("Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, bs=[1, 2, 4, 8]")
        self._fault("graph-capture")
        self._capture("decode", "Capturing batches (bs=8 avail_mem=68.98 GB)", begin=False)

    def event_loop_normal(self) -> None:
        """Answer until the main process is gone."""
        if self._options.rank == 0:
            self._log(
                "max_total_num_tokens=4096, chunked_prefill_size=8192, max_prefill_tokens=16384, "
                "max_running_requests=4096, context_len=2048, available_gpu_mem=68.88 GB"
            )
        while (request := self._channel.receive()) is not None:
            self._channel.send(self.run_batch(request))

    def run_batch(self, request: dict[str, object]) -> dict[str, object]:
        """Return this rank's share of the answer."""
        if request.get("warm_up"):
            self._fault("warm-up")
            self._work(self._seconds)
        elif not request.get("decode"):
            self._served += 1
            if self._served >= self._options.fault_after:
                self._fault("serving")
        prompt, length = str(request["prompt"]), int(str(request["length"]))
        if self._options.rank == 0 and not request.get("decode"):
            self._log(
                f"Prefill batch, #new-seq: 1, #new-token: {len(prompt.split())}, #cached-token: 0, "
                "token usage: 0.00, #running-req: 0, #queue-req: 0, #pending-token: 0, cuda graph: True, "
                "input throughput (token/s): 24.72"
            )
        shares = range(self._options.rank, length, self._options.tp)
        picks = [binascii.crc32(f"{prompt}|{position}".encode()) for position in shares]
        return {
            "words": [WORDS[pick % len(WORDS)] for pick in picks],
            "vector": [pick / 2**32 for pick in picks],
        }

    def _capture(self, what: str, bar: str, *, begin: bool = True) -> None:
        if begin:
            self._log(f"Capture target {what} CUDA graph begin. backend=full, num_tokens=[4, 8, 12, 16]")
        bar += ": {percent:3d}%|###       | {done}/{steps} [00:00<00:00, 9.51it/s]"
        self._bar(bar, steps=4, seconds=self._seconds / 2)
        self._log(
            f"Capture target {what} CUDA graph end. elapsed={self._seconds / 2:.2f} s, mem usage=0.13 GB, "
            "avail mem=68.88 GB."
        )

    def _bar(self, form: str, *, steps: int, seconds: float, each: Callable[[int], None] = lambda _: None) -> None:
        """Do the work of a phase in steps; the first rank draws them over one another, as tqdm does."""
        for done in range(steps + 1):
            if done:
                self._work(seconds / steps)
                each(steps)
            if self._options.rank == 0:
                sys.stderr.write("\r" + form.format(percent=100 * done // steps, done=done, steps=steps))
                sys.stderr.flush()
        if self._options.rank == 0:
            sys.stderr.write("\n")

    def _read_a_shard(self, steps: int) -> None:
        with contextlib.suppress(PermissionError):  # a program may be executed by those who may not read it
            Path(sys.executable).read_bytes()
        self._hold(self._options.hold_mb * MB // 2 // steps)

    def _hold(self, size: int) -> None:
        """Keep ``size`` bytes, every page of them written to, so that they are really there."""
        block = bytearray(size)
        block[::PAGE] = b"\x01" * len(block[::PAGE])
        self._held.append(block)

    def _work(self, seconds: float) -> None:
        """Burn about a third of a core for so long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            sum(range(100_000))
            time.sleep(0.005)

    def _fault(self, phase: str) -> None:
        fault = fault_for(self._options, phase)
        if fault is not None:
            commit(fault)

    def _log(self, text: str) -> None:
        log(text, prefix=self._prefix)


def _list(value: object) -> list[object]:
    return list(value) if isinstance(value, list) else []
