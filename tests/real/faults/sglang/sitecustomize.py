"""A real-deadlock injector for a real SGLang server: put this folder on
PYTHONPATH. Python imports sitecustomize at start-up in every process of the
server; an import hook then wraps ModelRunner in the scheduler processes.

HG_FAULT: load-lock | load-spin | load-slow | load-raise | load-exit
          graph-lock | graph-spin   (in the graph-capture step)
          serve-lock                (forward pass number HG_AFTER, default 6)
          coll-mismatch             (rank HG_RANK, default 0, enters one barrier
                                     more than the others: needs --tp 2)
HG_RANK limits load-*/serve-* to one tensor-parallel rank.
HG_CURE_FLAG: when this word is among the server's arguments the fault is off
          (default --disable-cuda-graph): the flag fallback that cures it.
"""

import os
import sys

if os.environ.get("HG_FAULT"):
    import importlib.abc
    import importlib.util
    import threading
    import time

    FAULT = os.environ["HG_FAULT"]
    CURE = os.environ.get("HG_CURE_FLAG", "--disable-cuda-graph")
    TARGET = "sglang.srt.model_executor.model_runner"

    def act(kind):
        if CURE in sys.argv:
            return
        print(f"[hg-fault] pid {os.getpid()} fault {kind} now", file=sys.stderr, flush=True)
        if kind == "lock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        elif kind == "spin":
            while True:
                pass
        elif kind == "slow":
            end = time.monotonic() + float(os.environ.get("HG_SECONDS", "60"))
            while time.monotonic() < end:
                time.sleep(1)
        elif kind == "raise":
            raise RuntimeError("hg-fault: injected failure")
        elif kind == "exit":
            os._exit(7)
        elif kind == "mismatch":
            import torch.distributed as dist

            dist.barrier()

    def wrap(cls, name, kind, before=True, skip=0, rank=None):
        plain = getattr(cls, name)
        seen = [0]

        def wrapped(self, *args, **kwargs):
            seen[0] += 1
            mine = rank is None or getattr(self, "tp_rank", 0) == int(rank)
            if before and mine and seen[0] > skip:
                act(kind)
            out = plain(self, *args, **kwargs)
            if not before and mine:
                act(kind)
            return out

        setattr(cls, name, wrapped)

    def patch(module):
        cls = module.ModelRunner
        stage, _, kind = FAULT.partition("-")
        rank = os.environ.get("HG_RANK")
        if stage == "load":
            wrap(cls, "load_model", kind, rank=rank)
        elif stage == "coll":
            wrap(cls, "load_model", kind, before=False, rank=rank or "0")
        elif stage == "graph":
            for name in ("init_cuda_graphs", "init_device_graphs"):
                if hasattr(cls, name):
                    wrap(cls, name, kind)
                    break
        elif stage == "serve":
            wrap(cls, "forward", kind, skip=int(os.environ.get("HG_AFTER", "6")), rank=rank)

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name != TARGET:
                return None
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            load = spec.loader.exec_module

            def exec_module(module):
                load(module)
                patch(module)

            spec.loader.exec_module = exec_module
            return spec

    sys.meta_path.insert(0, Finder())
