"""How large a share of the machine's cores a program of these takes, however many tests run beside it."""

import os
from pathlib import Path


def set_nice(nice):
    """Set the weight of this process, and that of its session, which the kernel goes by first (sched(7), autogroup)."""
    os.setpriority(os.PRIO_PROCESS, 0, nice)
    if os.path.exists("/proc/self/autogroup"):
        Path("/proc/self/autogroup").write_text(str(nice))
