"""A user's program with ``on_death="keep"``. Arguments: folder, how it ends (sleep, exit, raise, leave, interrupt)."""

import os
import signal
import sys
import time
from pathlib import Path

from hangguard import supervise
from hangguard.testing import little_server_command

FOLDER, HOW = Path(sys.argv[1]), sys.argv[2]

supervision = supervise(
    little_server_command(phase_seconds=0.02, hold_mb=2, tp=1, leave_shm=True), on_death="keep", run_dir=FOLDER / "runs"
)
with supervision as server:
    (FOLDER / ".ready").write_text(server.url)
    (FOLDER / ".ready").rename(FOLDER / "ready")
    if HOW == "sleep":
        time.sleep(100)
    elif HOW == "exit":
        os._exit(3)
    elif HOW == "raise":
        raise ValueError(HOW)
    elif HOW == "interrupt":
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(100)
