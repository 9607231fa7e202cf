"""The little server: ``python -m hangguard.testing.server --port 8000 --deadlock-at-capture``.

SGLang in small, for tests and for the demo: a main process with the HTTP front end, ``--tp`` workers titled
``sglang::scheduler_TP0`` …, a ``sglang::detokenizer``; SGLang's own log lines (0.5.16), memory really held,
and a port that listens only when the workers are ready. It needs the standard library only. What can go wrong
is chosen by flags, see ``--help``.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

from hangguard.testing._leftovers import leave
from hangguard.testing._options import Options, read_options
from hangguard.testing._process import Channel, log

CHUNK = 1 << 16
FLOOD_PAUSE = 0.003  # one chunk of 64 KiB every 3 ms: some 20 MB/s


def main(argv: list[str] | None = None) -> int:
    """Run the server, or one of its children, and return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    options = read_options(words)
    if options.role != "main":
        from hangguard.testing._worker import run_child  # noqa: PLC0415 (the main process starts faster)

        return run_child(options)
    if options.fork_and_exit and os.fork():
        os._exit(0)
    if options.fork_and_exit:
        os.setsid()
    return Main(options, words).run()


class Main:
    """The main process: starts the ranks, leads them through the phases, opens the front end."""

    def __init__(self, options: Options, words: list[str]) -> None:
        self._options = options
        self._words = words
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._ending = threading.Lock()
        self._asked = threading.Event()
        self._read_lifeline, self._lifeline = os.pipe()  # the write end is ours alone: close-on-exec

    def run(self) -> int:
        """Bring everything up, then wait for a signal."""
        self._mind_signals()
        self._chatter()
        if self._options.model_path.startswith("/") and not Path(self._options.model_path).exists():
            return self._miss_the_model()
        time.sleep(self._options.phase_seconds / 2)
        self._forget_faults_of_earlier_launches()
        log(f"server_args=ServerArgs({self._arguments()})")
        keeper = [_shared_memory()] if self._options.leave_shm else []
        keeper += [leave(kind) for kind in self._options.leave if kind != "worker"]
        names = [f"scheduler_{rank}" for rank in range(self._options.tp)]
        schedulers = [self._start_child(name, "scheduler", rank) for rank, name in enumerate(names)]
        detokenizer = self._start_child("detokenizer", "detokenizer", 0)
        self._wait_for(detokenizer)
        self._wait_for_scheduler_ready(schedulers)
        self._open(schedulers, detokenizer)
        while True:  # ends by a signal, or with a worker
            time.sleep(3600)
            del keeper

    def _wait_for_scheduler_ready(self, schedulers: list[Channel]) -> None:
        """Lead the ranks through the phases: nobody begins one before all have ended the last."""
        for phase in ("import", "dist-init", "weights-load", "kv-cache", "jit-compile", "graph-capture"):
            for scheduler in schedulers:
                self._wait_for(scheduler)
            if phase == "dist-init" and self._options.exit_early is not None:
                self._end(self._options.exit_early)
            for scheduler in schedulers:
                scheduler.send({"go": True})

    def _wait_for(self, child: Channel) -> None:
        if child.receive() is None:  # its watcher ends us, or nobody does: --ignore-crash
            threading.Event().wait()

    def _open(self, schedulers: list[Channel], detokenizer: Channel) -> None:
        from hangguard.testing._front_end import FrontEnd, Ranks  # noqa: PLC0415 (the children never need it)

        ranks = Ranks(schedulers, detokenizer)
        log(f"INFO:     Started server process [{os.getpid()}]")
        log("INFO:     Waiting for application startup.")
        log("INFO:     Application startup complete.")
        scheme = "http" if self._options.ssl_certfile is None else "https"
        address = self._options.uds or f"{scheme}://{self._options.host}:{self._options.port}"
        try:
            front_end = FrontEnd(self._options, ranks)
        except OSError as error:
            log(f"ERROR:    [Errno {error.errno}] error while attempting to bind on address {address}: {error}")
            self._end(1)
        log(f"INFO:     Uvicorn running on {address} (Press CTRL+C to quit)")
        threading.Thread(target=front_end.serve_forever, name="front-end", daemon=True).start()
        if ranks.generate("warm up", 8, warm_up=True) is None:
            threading.Event().wait()
        front_end.fired_up.set()
        log("The server is fired up and ready to roll!")

    # ------------------------------------------------------------------------------------- children

    def _start_child(self, name: str, role: str, rank: int) -> Channel:
        """Start one child with its end of a channel and the read end of the lifeline."""
        ours, theirs = socket.socketpair()
        fds = (theirs.fileno(), self._read_lifeline)
        given = [f"--role={role}", f"--rank={rank}", f"--channel={fds[0]}", f"--lifeline={fds[1]}"]
        command = [sys.executable, "-m", "hangguard.testing.server", *self._words, *given]
        child = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL)
        theirs.close()
        self._children[name] = child
        threading.Thread(target=self._watch, args=(name, child), name=f"watch {name}", daemon=True).start()
        return Channel(ours)

    def _watch(self, name: str, child: subprocess.Popen[bytes]) -> None:
        code = child.wait()
        if self._options.ignore_crash or self._ending.locked():  # whom we end ourselves has not crashed
            return
        if code == -signal.SIGTERM and self._asked.wait(0.5):
            return  # the whole group was asked to end, and our own signal is just being handled
        log(f"Subprocess {name} (pid={child.pid}) crashed with exit code {code}. Triggering SIGQUIT for cleanup...")
        given = self._options.crash_exit
        self._end(given if given is not None else max(code, 0) or 1)

    def _end(self, code: int) -> NoReturn:
        """End the children, then this process. Only the first caller does; the others wait for the end."""
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()
        for child in self._children.values():
            child.kill()
        for child in self._children.values():
            child.wait(timeout=5)
        sys.stdout.flush()
        os._exit(code)

    # --------------------------------------------------------------------------------------- habits

    def _mind_signals(self) -> None:
        def stop(number: int, frame: object) -> None:
            del number, frame
            self._asked.set()
            log("INFO:     Shutting down")
            self._end(0)

        signal.signal(signal.SIGINT, stop)
        signal.signal(signal.SIGTERM, signal.SIG_IGN if self._options.ignore_term else stop)

    def _chatter(self) -> None:
        """Print what the flags ask for before anything else happens."""
        line = b"little server: still here, still talking, nothing to see, please move along now\n"
        out = sys.stdout.buffer
        _write(line, self._options.banner_bytes)
        _write(b"x" * CHUNK, self._options.long_line)
        if self._options.long_line:
            out.write(b"\n")
        if self._options.garbage:
            out.write(os.urandom(CHUNK) + b"\0\x1b[2J\x1b]0;owned\x07\xff\xfe\r\r\n")
        out.flush()
        if self._options.flood:
            threading.Thread(target=_flood, name="flood", daemon=True).start()

    def _forget_faults_of_earlier_launches(self) -> None:
        if self._options.once is None:
            return
        from hangguard.testing._faults import first_launch  # noqa: PLC0415

        if not first_launch(self._options.once):
            self._words = [*self._words, "--fault-rank=-1"]  # a rank that no worker has

    def _miss_the_model(self) -> int:
        # the words of transformers, through which SGLang reads the configuration
        log(
            f"OSError: {self._options.model_path} is not a local folder and is not a valid model identifier "
            "listed on 'https://huggingface.co/models'"
        )
        return 1

    def _arguments(self) -> str:
        options = self._options
        return (
            f"model_path={options.model_path!r}, host={options.host!r}, port={options.port}, "
            f"tp_size={options.tp}, is_embedding={options.is_embedding}, "
            f"disable_cuda_graph={options.disable_cuda_graph}"
        )


def _write(piece: bytes, size: int) -> None:
    """Write ``size`` bytes of repeated ``piece`` without holding them in memory."""
    block = piece * max(1, CHUNK // len(piece))
    while size > 0:
        sys.stdout.buffer.write(block[:size])
        size -= len(block)


def _flood() -> None:
    number = 0
    while True:
        number += 1
        line = f"flood {number} {os.urandom(32).hex()}\n".encode()
        sys.stdout.buffer.write(line * (CHUNK // len(line)))
        sys.stdout.buffer.flush()
        time.sleep(FLOOD_PAUSE)


def _shared_memory() -> object:
    """Hold a megabyte of shared memory, which starts a resource tracker of multiprocessing."""
    from multiprocessing.shared_memory import SharedMemory  # noqa: PLC0415 (slow to import, seldom asked for)

    block = SharedMemory(create=True, size=1 << 20)
    if block.buf is not None:
        block.buf[:] = b"\x01" * block.size
    return block


if __name__ == "__main__":
    sys.exit(main())
