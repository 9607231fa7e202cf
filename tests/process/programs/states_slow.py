"""Starts that are slow, and get on; and one that does not. usage: states_slow.py trickle|steps|changing|spin

trickle: reads a file in pieces, with gaps of 5 to 8 s, and says nothing. steps: says where it is every 8 s. changing:
burns CPU in silence, in one function after another. spin: burns CPU in one place, and gets nowhere.
"""

import os
import sys
import time
from pathlib import Path


def trickle():
    weights = Path("weights")
    weights.write_bytes(bytes(4 << 20))
    while True:
        for gap in (5.0, 8.0, 6.5):
            weights.read_bytes()
            time.sleep(gap)


def steps():
    for part in ("tokenizer", "config", "weights", "adapters", "cache", "graphs", "warm-up", "routes", "metrics"):
        print(f"now the {part}", flush=True)
        time.sleep(8.0)


def burn(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(10_000))


def changing():
    for part in range(1000):
        scope = {"burn": burn}
        exec(f"def convert_layer_{part}(): burn(0.6)", scope)
        scope[f"convert_layer_{part}"]()


def spin():
    os.nice(-15)  # a core of its own, however many tests run beside it
    if os.path.exists("/proc/self/autogroup"):  # there a session has a weight of its own (sched(7))
        Path("/proc/self/autogroup").write_text("-15")
    while True:
        pass


print("begins", flush=True)
globals()[sys.argv[1]]()
