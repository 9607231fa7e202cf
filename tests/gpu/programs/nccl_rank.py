"""One rank of an NCCL communicator: one collective operation, then only those ranks go on that are told to.

usage: nccl_rank.py RANK SIZE STORE_FILE; says "up" after the first operation, and begins another for a line on stdin.
"""

import sys

import torch
import torch.distributed as dist

rank, size = int(sys.argv[1]), int(sys.argv[2])
torch.cuda.set_device(rank)
device = torch.device("cuda", rank)
print("began", flush=True)
sys.stdin.readline()
dist.init_process_group("nccl", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=size, device_id=device)
value = torch.ones(1, device=device)
dist.all_reduce(value)
torch.cuda.synchronize()
assert float(value) == size
print("up", flush=True)
for _line in sys.stdin:
    dist.all_reduce(value, async_op=True)
    print("launched", flush=True)
