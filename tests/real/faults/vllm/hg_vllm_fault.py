"""A real-deadlock injector for a real vLLM server (v1 engine, CPU build).

Put this folder on PYTHONPATH: vLLM finds the entry point in the sibling
.dist-info folder (group vllm.general_plugins) and calls register() in the API
server, in the engine core and in every worker. No install step is needed.

HG_FAULT chooses what goes wrong in the worker (empty = nothing):
  load-lock      model load takes a non-reentrant lock twice   (0% CPU, for ever)
  load-event     model load waits for a helper thread that waits for it
  load-spin      model load spins in Python                    (100% CPU, for ever)
  load-slow      model load sleeps 1 s at a time for HG_SECONDS, then goes on
                 (a slow start, not a hang: the false-positive control)
  load-raise     model load raises (a real crash path)
  load-segv      model load dies by SIGSEGV
  load-exit      the worker leaves with os._exit(7) in model load
  warmup-lock    as load-lock, in the compile/warm-up step; --enforce-eager
                 skips that step in vLLM itself, so the fallback cures it
  warmup-spin    busy loop in the warm-up step, likewise cured
  warmup-raise   raises in the warm-up step, likewise cured
  init-absent    rank HG_RANK (default 1) never reaches init_process_group, so
                 the others wait in the rendezvous; with one rank: it waits
  init-slow      likewise, it sleeps for HG_SECONDS and goes on
  coll-mismatch  rank 0 enters one more barrier than the others after load
                 (a real gloo collective that never completes)
  serve-lock     execute_model deadlocks from call HG_AFTER (default 3) on
  serve-spin     likewise with a busy loop
HG_RANK limits a fault to one rank (default: every rank; 1 for init-absent).
HG_CURE = name of an environment variable, or NAME=VALUE; when the worker sees
it set (to VALUE) the fault is off: stands for an environment fallback.
HG_ONCE = path of a file: the fault happens only while the file can be created
(first launch only), so that a plain retry cures it.
"""

import os
import sys
import threading
import time


def _say(text):
    if os.environ.get("HG_FAULT_QUIET") != "1":
        print(f"[hg-fault] pid {os.getpid()} {text}", file=sys.stderr, flush=True)


def _armed():
    cure = os.environ.get("HG_CURE", "")
    if cure:
        name, _, value = cure.partition("=")
        seen = os.environ.get(name)
        if seen is not None and (not value or seen == value):
            return False
    once = os.environ.get("HG_ONCE")
    if once:
        try:
            os.close(os.open(once, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
    return True


def _lock_twice():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # never returns


def _circular_wait():
    done, go = threading.Event(), threading.Event()

    def helper():
        go.wait()  # set only after done, which needs us
        done.set()

    threading.Thread(target=helper, name="hg-helper", daemon=True).start()
    done.wait()
    go.set()


def _spin():
    while True:
        pass


def _act(kind):
    if not _armed():
        return
    _say(f"fault {kind} now")
    if kind == "lock":
        _lock_twice()
    elif kind == "event":
        _circular_wait()
    elif kind == "spin":
        _spin()
    elif kind == "slow":
        end = time.monotonic() + float(os.environ.get("HG_SECONDS", "60"))
        while time.monotonic() < end:
            time.sleep(1)
    elif kind == "raise":
        raise RuntimeError("hg-fault: injected failure")
    elif kind == "segv":
        os.kill(os.getpid(), 11)
    elif kind == "exit":
        os._exit(7)


def register():
    fault = os.environ.get("HG_FAULT", "")
    if not fault or getattr(register, "done", False):
        return
    register.done = True
    stage, _, kind = fault.partition("-")
    only = os.environ.get("HG_RANK")

    def mine(rank):
        return only is None or int(only) == rank

    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.cpu_worker import CPUWorker

    if stage == "load":
        plain = CPUWorker.load_model

        def load_model(self, *args, **kwargs):
            if mine(self.rank):
                _act(kind)
            return plain(self, *args, **kwargs)

        CPUWorker.load_model = load_model
    elif stage == "warmup":
        plain = CPUModelRunner.profile_run  # reached only when compiling

        def profile_run(self, *args, **kwargs):
            if not self.vllm_config.model_config.enforce_eager:
                _act(kind)
            return plain(self, *args, **kwargs)

        CPUModelRunner.profile_run = profile_run
    elif stage == "init":
        plain = CPUWorker.init_device
        absent = int(only or "1")

        def init_device(self, *args, **kwargs):
            world = self.parallel_config.world_size
            if self.rank == absent or world == 1:
                _act("lock" if kind == "absent" else kind)
            return plain(self, *args, **kwargs)

        CPUWorker.init_device = init_device
    elif stage == "coll":
        plain = CPUWorker.load_model

        def load_model(self, *args, **kwargs):
            out = plain(self, *args, **kwargs)
            if self.rank == int(only or "0") and _armed():
                import torch.distributed as dist

                _say("fault coll-mismatch now (one barrier too many)")
                dist.barrier()
            return out

        CPUWorker.load_model = load_model
    elif stage == "serve":
        plain = CPUWorker.execute_model
        count = [0]

        def execute_model(self, *args, **kwargs):
            count[0] += 1
            if count[0] >= int(os.environ.get("HG_AFTER", "3")) and mine(self.rank):
                _act(kind)
            return plain(self, *args, **kwargs)

        CPUWorker.execute_model = execute_model
