"""The layers of the design hold: who may import whom is a contract, not a habit."""

from importlinter.cli import lint_imports


def test_every_import_contract_is_kept(monkeypatch, capsys):
    from pathlib import Path

    monkeypatch.chdir(Path(__file__).parent.parent)
    code = lint_imports(config_filename="pyproject.toml", no_cache=True)
    assert code == 0, capsys.readouterr().out
