"""Waits in silence for a compiler. usage: states_compile.py real|named FOLDER SECONDS

real: gcc -O2, again and again, over a large file that is made first. named: a program that only has a compiler's name.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

how, folder, seconds = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
BURN = "import os, time\nend, parent = time.monotonic() + {}, os.getppid()\nwhile time.monotonic() < end and os.getppid() == parent:\n    sum(range(10_000))"


def source(functions):
    lines = (f"double f{n}(double *v, int i) {{ double s = 0; for (int k = 0; k < i; k++) for (int j = k; j < i; j++)"
             f" s += v[j] * v[k] / (v[i] + {n}) - (s > v[j] ? v[k] * {n} : s); return s; }}" for n in range(functions))
    return "\n".join(lines)


print("compiles", flush=True)
if how == "named":
    compiler = folder / "cc1plus"
    compiler.symlink_to(sys.executable)
    subprocess.run([compiler, "-c", BURN.format(seconds)], check=True)
else:
    (folder / "large.c").write_text(source(4000))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        subprocess.run(["gcc", "-O2", "-c", "large.c", "-o", "large.o"], cwd=folder, check=True)
print("has compiled", flush=True)
time.sleep(1000)
