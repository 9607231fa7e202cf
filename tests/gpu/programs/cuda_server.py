"""A small server that holds GPU memory, as real ones do: loads, works on the GPU, captures, serves.

usage: cuda_server.py --port N [--hold-gib 8] [--fault deadlock] [--no-capture]
``deadlock``: two locks at "capture", with the memory held; ``--no-capture`` skips that step.
"""

import argparse
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch


def say(text):
    print(text, file=sys.stderr, flush=True)


def deadlock():
    first, second = threading.Lock(), threading.Lock()
    both = threading.Barrier(2)

    def take(mine, other):
        with mine:
            both.wait()
            other.acquire()

    threading.Thread(target=take, args=(second, first), daemon=True).start()
    take(first, second)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--hold-gib", type=float, default=8)
    parser.add_argument("--fault", default="")
    parser.add_argument("--no-capture", action="store_true")
    options = parser.parse_args()
    say(f"Load weight begin. pid={os.getpid()}")
    held = [torch.ones(int(options.hold_gib * 2**30 / 4), dtype=torch.float32, device="cuda")]
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    until = time.monotonic() + 3
    while time.monotonic() < until:
        for _ in range(50):
            b = a @ a
        torch.cuda.synchronize()
        say(f"Load weight step {float(b[0, 0]):.0f}")
    say("Load weight end.")
    if not options.no_capture:
        say("Capture cuda graph begin.")
        if options.fault == "deadlock":
            deadlock()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            b = a @ a
        say("Capture cuda graph end.")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            total = float(held[0][:1000].sum())
            body = json.dumps({"data": [total]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
