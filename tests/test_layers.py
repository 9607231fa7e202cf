"""The layers of the design hold: who may import whom is a contract, not a habit."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

BROKEN = """
[tool.importlinter]
root_package = "hangguard"

[[tool.importlinter.contracts]]
name = "the blocking face knows nobody"
type = "forbidden"
source_modules = ["hangguard.sync"]
forbidden_modules = ["hangguard.supervision"]
"""


def lint_imports(folder):
    """Run it in a process of its own: inside ours it would disable every logger that exists."""
    script = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    return subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=False)


def test_every_import_contract_is_kept():
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_broken_contract_would_be_found(tmp_path):
    (tmp_path / "pyproject.toml").write_text(BROKEN)
    done = lint_imports(tmp_path)
    assert done.returncode != 0
    assert "1 broken" in done.stdout
