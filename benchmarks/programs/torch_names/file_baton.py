"""The wait for a lock file to go (torch/utils/file_baton.py)."""

from __future__ import annotations

import time
from pathlib import Path


class FileBaton:
    """The presence of the file is the lock."""

    def __init__(self, lock_file_path: str, wait_seconds: float = 0.1) -> None:
        self.lock_file_path = lock_file_path
        self.wait_seconds = wait_seconds

    def wait(self) -> None:
        """Sleep until the file is gone."""
        while Path(self.lock_file_path).exists():
            time.sleep(self.wait_seconds)
