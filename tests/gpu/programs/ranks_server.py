"""A small server of several ranks, one process each, with real collectives between them, and faults by option.

usage: ranks_server.py --port N [--ranks N] [--device cuda|cpu] [--hold-gib G] [--fault NAME --fault-rank R]

``absent``: one rank never calls the collective of the warm-up; ``late``: one never comes to the making of the
communicator; ``spin``: a kernel on one rank's GPU never ends; ``deadlock``: every rank, at graph capture, in two locks
of its own; ``loop``: all ranks go on with collectives for ever, so that somebody can stop or kill one in them.

The front end answers /health at once, and a completion when all ranks have run an all-reduce for it. It takes no
notice of a rank that ends.
"""

import argparse
import ctypes
import glob
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
"""A program that is ended while it uses NVLink multicast can take the whole fabric with it."""
PR_SET_NAME = 15  # linux/prctl.h
READING, MULTIPLYING = 4.0, 3.0
"""Seconds of the load: for the host alone, which shows what an idle context draws, then on the GPU."""
ROUNDS = 20


def say(text, rank=None):
    by = "" if rank is None else f" TP{rank}"
    sys.stderr.write(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}{by}] {text}\n")
    sys.stderr.flush()


# ----------------------------------------------------------------------------------------------- the front end


class FrontEnd:
    def __init__(self, options):
        self.requests = queue.Queue()
        with socket.socket() as spare:
            spare.bind(("127.0.0.1", 0))
            store = spare.getsockname()[1]
        words = [
            sys.executable, os.path.abspath(__file__), "--port", str(options.port), "--ranks", str(options.ranks),
            "--device", options.device, "--hold-gib", str(options.hold_gib), "--fault", options.fault,
            "--fault-rank", str(options.fault_rank), "--store", str(store),
        ]  # fmt: skip
        env = {**os.environ, **WITHOUT_MULTICAST, "NCCL_DEBUG": ""}  # it speaks on stdout, as the ranks do
        self.ranks = [
            subprocess.Popen(
                [*words, "--rank", str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
            )
            for rank in range(options.ranks)
        ]

    def wait_for_ranks(self):
        for number, rank in enumerate(self.ranks):
            if rank.stdout.readline() != "ready\n":
                say(f"rank {number} has ended before it was ready")
                never()  # as engines of which nobody asks whether their workers live

    def serve(self):
        while True:
            answered = self.requests.get()
            for rank in self.ranks:
                rank.stdin.write("run\n")
                rank.stdin.flush()
            answered.put([rank.stdout.readline().strip() for rank in self.ranks])

    def ask(self):
        answered = queue.Queue()
        self.requests.put(answered)
        return answered.get()


def listen(port, front_end):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer({"status": "ok"})

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.answer({"choices": [{"text": " ".join(front_end.ask())}]})

        def answer(self, content):
            body = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()


# ---------------------------------------------------------------------------------------------------- one rank


class Rank:
    def __init__(self, options):
        import torch
        import torch.distributed

        self.torch, self.dist = torch, torch.distributed
        self.options, self.number, self.on_gpu = options, options.rank, options.device == "cuda"
        self.fault = options.fault if options.fault in {"deadlock", "loop"} or self.is_faulty else ""
        if self.on_gpu:
            torch.cuda.set_device(self.number)
        torch.set_num_threads(1)
        self.device = torch.device("cuda", self.number) if self.on_gpu else torch.device("cpu")
        self.value = torch.ones(2**24 if self.on_gpu else 2**16, device=self.device)

    @property
    def is_faulty(self):
        return self.number == self.options.fault_rank

    def say(self, text):
        say(text, self.number)

    def work(self):
        self.init_torch_distributed()
        self.load_model()
        self.warm_up()
        run = self.capture()
        print("ready", flush=True)
        self.event_loop(run)

    def init_torch_distributed(self):
        self.say(f"Init torch distributed begin. pid={os.getpid()}")
        ranks, first = self.options.ranks, self.number == 0
        store = self.dist.TCPStore("127.0.0.1", self.options.store, ranks, is_master=first)
        if self.fault == "late":
            never()
        how = {"backend": "nccl", "device_id": self.device} if self.on_gpu else {"backend": "gloo"}
        self.dist.init_process_group(store=store, rank=self.number, world_size=ranks, **how)
        self.say("Init torch distributed ends. elapsed=1.0 s")

    def load_model(self):
        self.say("Load weight begin.")
        self.held = self.torch.ones(int(self.options.hold_gib * 2**28), device=self.device)
        until = time.monotonic() + READING
        while time.monotonic() < until:  # touches new pages, as reading does
            bytes(2**24 + time.monotonic_ns() % 4096)
            time.sleep(0.02)
        side = 8192 if self.on_gpu else 256
        a = self.torch.randn(side, side, device=self.device)
        a = a.bfloat16() if self.on_gpu else a
        for part in range(1, 5):
            until = time.monotonic() + MULTIPLYING / 4
            while time.monotonic() < until:
                for _ in range(10):
                    a @ a
                self.synchronize()
            self.say(f"Loading safetensors checkpoint shards: {25 * part}%")
        self.say("Load weight end.")

    def warm_up(self):
        self.say("Warm-up begin.")
        for n in range(ROUNDS):
            if n == ROUNDS // 2 and self.fault == "absent":
                never()
            if n == ROUNDS // 2 and self.fault == "spin":
                self.spin()
            self.reduce_together()
        self.say(f"Warm-up: {ROUNDS} rounds, pid={os.getpid()}")
        while self.fault == "loop":
            self.reduce_together()

    def capture(self):
        self.say("Capture cuda graph begin.")
        if self.fault == "deadlock":
            deadlock()
        if not self.on_gpu:
            return self.reduce_together
        graph = self.torch.cuda.CUDAGraph()
        # NCCL's watchdog asks for events from its own thread, which a capture in the global mode forbids.
        with self.torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.value.fill_(1)
            self.dist.all_reduce(self.value)

        def replay():
            graph.replay()
            self.synchronize()
            return float(self.value[0])

        assert replay() == self.options.ranks
        self.say("Capture cuda graph end.")
        return replay

    def event_loop(self, run):
        while receive():
            print(f"{run():.0f}", flush=True)

    def reduce_together(self):
        self.value.fill_(1)
        self.dist.all_reduce(self.value)
        self.synchronize()
        return float(self.value[0])

    def synchronize(self):
        if self.on_gpu:
            self.torch.cuda.synchronize()

    def spin(self):
        """A kernel that waits for a flag which nobody sets."""
        import cupy

        source = 'extern "C" __global__ void spin(volatile int* flag) { while (*flag == 0) {} }'
        flag = self.torch.zeros(1, dtype=self.torch.int32, device=self.device)
        with cupy.cuda.Device(self.number), cupy.cuda.ExternalStream(self.torch.cuda.current_stream().cuda_stream):
            cupy.RawKernel(source, "spin")((1,), (32,), (cupy.asarray(flag),))
        self.synchronize()


def never():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def receive():
    return sys.stdin.readline()


def deadlock():
    first, second = threading.Lock(), threading.Lock()
    both = threading.Barrier(2)

    def take(mine, other):
        with mine:
            both.wait()
            other.acquire()

    threading.Thread(target=take, args=(second, first), daemon=True).start()
    take(first, second)


def retitle(title):
    """The kernel reads /proc/PID/cmdline from this memory; fields 48 and 49 of /proc/PID/stat, proc(5).

    The short name changes too, as with setproctitle, which every engine uses.
    """
    ctypes.CDLL(None).prctl(PR_SET_NAME, title.encode()[:15], 0, 0, 0)
    with open("/proc/self/stat") as file:
        start, end = map(int, file.read().rpartition(")")[2].split()[45:47])
    ctypes.memmove(start, title.encode()[: end - start - 1].ljust(end - start, b"\0"), end - start)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--hold-gib", type=float, default=8)
    parser.add_argument("--fault", choices=("", "absent", "late", "spin", "deadlock", "loop"), default="")
    parser.add_argument("--fault-rank", type=int, default=1)
    parser.add_argument("--store", type=int)
    parser.add_argument("--rank", type=int)
    options = parser.parse_args()
    if options.rank is not None:
        retitle(f"ranks::worker_TP{options.rank}")
        Rank(options).work()
        return
    options.ranks = options.ranks or len(glob.glob("/dev/nvidia[0-9]*"))
    say(f"server_args={vars(options)}")
    front_end = FrontEnd(options)
    listen(options.port, front_end)
    front_end.wait_for_ranks()
    say("The server is fired up and ready to roll!")
    front_end.serve()


if __name__ == "__main__":
    main()
