"""Wait sites: which frame tells what a thread waits for."""

import pytest
from making import frames

from hangguard.engines.sglang import SGLANG
from hangguard.engines.vllm import VLLM
from hangguard.engines.waiting import EVERYWHERE
from hangguard.judge.sites import site_of_frames


def waits_for(*at, sites=EVERYWHERE):
    found = site_of_frames(frames(*at), sites)
    return found and found.waits_for


@pytest.mark.parametrize(
    ("at", "what"),
    [
        (("_create_c10d_store torch/distributed/rendezvous.py", "init_process_group x"), "peers"),
        (("_tcp_rendezvous_handler /v/torch/distributed/rendezvous.py",), "peers"),
        (("_new_process_group_helper /v/torch/distributed/distributed_c10d.py",), "communicator"),
        (("NCCLLibrary.ncclCommInitRank /v/vllm/pynccl_wrapper.py",), "communicator"),
        (("ncclCommInitRankConfig(ncclComm*) libnccl.so",), None),
        (("barrier distributed_c10d.py", "wrapper c10d_logger.py"), "collective"),
        (("all_gather_into_tensor torch/distributed/distributed_c10d.py",), "collective"),
        (("all_reduce my_model.py",), None),
        (("synchronize torch/cuda/__init__.py",), "kernel"),
        (("Event.synchronize torch/cuda/streams.py",), "kernel"),
        (("cudaStreamSynchronize x.py",), "kernel"),
        (("synchronize database.py",), None),
        (("acquire x/filelock/_api.py", "snapshot_download huggingface_hub/x.py"), "lock"),
        (("FileBaton.wait torch/utils/file_baton.py", "load torch/utils/cpp_extension.py"), "lock"),
        (("readinto lib/ssl.py", "get huggingface_hub/file_download.py"), "download"),
        (("wait threading.py", "_snapshot huggingface_hub/x.py"), "download"),
        (("communicate subprocess.py", "_run_ninja_build torch/utils/cpp_extension.py"), "compile"),
        (("result concurrent/futures/_base.py", "wait torch/_inductor/async_compile.py"), "compile"),
        (("acquire lock.py", "capture_model"), None),
    ],
)
def test_the_innermost_frame_that_is_known_tells(at, what):
    assert waits_for(*at) == what


@pytest.mark.parametrize(
    ("engine", "at", "what"),
    [
        (VLLM, ("Poller.poll poll.py", "wait_for_engine_startup utils.py"), "start-up"),
        (VLLM, ("poll x", "MessageQueue.wait_until_ready /v/vllm/shm_broadcast.py"), "peers"),
        (VLLM, ("MessageQueue.dequeue /v/vllm/shm_broadcast.py", "EngineCore.step core.py"), "message"),
        (SGLANG, ("Connection.poll connection.py", "_wait_for_scheduler_ready engine.py"), "start-up"),
    ],
)
def test_engines_have_places_of_their_own(engine, at, what):
    assert waits_for(*at, sites=(*engine.wait_sites, *EVERYWHERE)) == what


def test_every_row_names_its_source():
    rows = (*EVERYWHERE, *VLLM.wait_sites, *SGLANG.wait_sites)
    assert all(row.source for row in rows)
    assert all(timer.source for timer in (*VLLM.timers, *SGLANG.timers))
