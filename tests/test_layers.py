"""The layers of the design hold: who may import whom is a contract, not a habit."""

from pathlib import Path

from importlinter.cli import lint_imports

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


def test_every_import_contract_is_kept(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    code = lint_imports(config_filename="pyproject.toml", no_cache=True)
    assert code == 0, capsys.readouterr().out


def test_a_broken_contract_would_be_found(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text(BROKEN)
    assert lint_imports(config_filename="pyproject.toml", no_cache=True) != 0
    assert "1 broken" in capsys.readouterr().out
