"""Holds memory on the GPU, and computes once for every line on stdin: says "up", then "worked" each time."""

import sys

import torch

held = torch.ones(2**26, device="cuda")
print("up", flush=True)
for _line in sys.stdin:
    assert float((held * 2).sum()) == 2.0**27
    print("worked", flush=True)
