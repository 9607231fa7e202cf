"""Which Pythons there are here, beside the one that runs the tests."""

import functools
import shutil
import subprocess
import sys
from pathlib import Path


@functools.cache
def pythons():
    """Return an interpreter a minor version, 3.10 to 3.13, by version: this one, pyenv's, those on PATH."""
    found = {f"3.{sys.version_info.minor}": sys.executable}
    root = (
        subprocess.run(["pyenv", "root"], capture_output=True, check=False, text=True)
        if shutil.which("pyenv")
        else None
    )
    for version in ("3.10", "3.11", "3.12", "3.13"):
        folders = sorted(Path(root.stdout.strip(), "versions").glob(version + ".*")) if root else []
        candidates = [*(str(folder / "bin" / "python") for folder in folders), shutil.which("python" + version)]
        for candidate in filter(None, candidates):
            # A pyenv shim of a version that is not switched on exists, and fails.
            if subprocess.run([candidate, "-c", "pass"], capture_output=True, check=False).returncode == 0:
                found.setdefault(version, candidate)
    return found


PYTHONS = sorted(pythons().items())
