"""Starts that are slow, and get on; and one that does not. usage: states_slow.py trickle|steps|changing|spin

trickle: reads a file in pieces, with gaps of 5 to 8 s, and says nothing. steps: says where it is every 8 s. changing:
burns CPU in silence, in one function after another. spin: burns CPU in one place, and gets nowhere.
"""

import itertools
import sys
import time
from pathlib import Path

from states_share import set_nice


def trickle():
    weights = Path("weights")
    weights.write_bytes(bytes(4 << 20))
    while True:
        for gap in (5.0, 8.0, 6.5):
            weights.read_bytes()
            time.sleep(gap)


def steps():
    for part in itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=2):
        print("now the layer", *part, flush=True)
        time.sleep(8.0)


def burn(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(10_000))


def changing():
    set_nice(19)
    for part in range(10_000):
        scope = {"burn": burn}
        exec(f"def convert_layer_{part}(): burn(0.6)", scope)
        scope[f"convert_layer_{part}"]()


def spin():
    set_nice(-5)  # who wants a core and gets less than half of one is not called hot
    while True:
        pass


print("begins", flush=True)
globals()[sys.argv[1]]()
