"""Waits in silence for a compiler. usage: states_compile.py real|named FOLDER

real: gcc -O2, again and again, over a large file that is made first. named: a program that only has a compiler's name.
"""

import subprocess
import sys
from pathlib import Path

from states_share import set_nice

LOOP = (
    "for (int k = 0; k < i; k++) for (int j = k; j < i; j++) s += v[j] * v[k] / (v[i] + {n}) - (s > v[j] ? v[k] : s);"
)
FUNCTION = "double f{n}(double *v, int i) {{ double s = 0; " + LOOP + " return s; }}\n"
BURN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(10_000))"

how, folder = sys.argv[1], Path(sys.argv[2])
set_nice(19)
print("compiles", flush=True)
if how == "named":
    compiler = folder / "cc1plus"
    compiler.symlink_to(sys.executable)
    subprocess.run([compiler, "-c", BURN], check=True)
(folder / "large.c").write_text("".join(FUNCTION.format(n=n) for n in range(4000)))
while True:
    subprocess.run(["gcc", "-O2", "-c", "large.c", "-o", "large.o"], cwd=folder, check=True)
