"""Faults in a real vLLM or SGLang on GPUs, and two ranks on one GPU: put this folder first on PYTHONPATH.

Python imports ``sitecustomize`` in every process of the server, and a hook then changes modules once they are loaded.

``HG_FAULT=capture-lock``: every rank waits for itself where the CUDA graphs of the decode steps are captured, which
the engines themselves leave out with ``--enforce-eager`` and ``--disable-cuda-graph``.
``HG_ONE_BOARD=1``: all ranks work on the first GPU. NCCL refuses two ranks on a GPU of one host, so every process is a
host of its own (``NCCL_HOSTID``), and they talk through sockets:
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-hostid
"""

import importlib.abc
import importlib.util
import os
import sys
import threading

LOCKED = os.environ.get("HG_FAULT") == "capture-lock"
ONE_BOARD = os.environ.get("HG_ONE_BOARD") == "1"


def wait_for_itself():
    print(f"[hg-fault] pid {os.getpid()} capture deadlock now", file=sys.stderr, flush=True)
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def capture_model():
    """As the method of vLLM's model runner whose place it takes is called."""
    wait_for_itself()


def capture(_runner):
    """As the method of SGLang's graph runner is called."""
    wait_for_itself()


def change_vllm_worker(module):
    worker = module.Worker
    init_device, load_model = worker.init_device, worker.load_model

    def on_first_board(self, *args, **more):
        self.local_rank = 0
        return init_device(self, *args, **more)

    def load_and_lock(self, *args, **more):
        loaded = load_model(self, *args, **more)
        self.model_runner.capture_model = capture_model
        return loaded

    if ONE_BOARD:
        worker.init_device = on_first_board
    if LOCKED:
        worker.load_model = load_and_lock


def change_sglang_arguments(module):
    check = module.ServerArgs.check_server_args

    def check_and_step_by_none(self, *args, **more):
        check(self, *args, **more)
        self.gpu_id_step = 0  # the check wants 1 at least

    if ONE_BOARD:
        module.ServerArgs.check_server_args = check_and_step_by_none


def change_sglang_capture(module):
    if LOCKED:
        module.DecodeCudaGraphRunner.capture = capture


CHANGES = {
    "vllm.v1.worker.gpu_worker": change_vllm_worker,
    "sglang.srt.server_args": change_sglang_arguments,
    "sglang.srt.model_executor.runner.decode_cuda_graph_runner": change_sglang_capture,
}


class Changing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        change = CHANGES.pop(name, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec


if ONE_BOARD:
    os.environ["NCCL_HOSTID"] = str(os.getpid())
if ONE_BOARD or LOCKED:
    sys.meta_path.insert(0, Changing())
