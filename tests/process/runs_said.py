"""``hangguard ps`` and ``hangguard clean``, run here."""

import json

import pytest

from hangguard.cli.app import invoke


@pytest.fixture
def hangguard(capsys):
    """Return a function that runs it here and returns (exit code, what it printed, what it said)."""

    def run(*words):
        capsys.readouterr()
        code = invoke([str(word) for word in words])
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        return code, printed.out, printed.err

    return run


@pytest.fixture
def listed(hangguard):
    def rows(base, *words):
        code, out, _ = hangguard("ps", "--json", "--run-dir", base, *words)
        assert code == 0
        return {row["run_id"]: row for row in json.loads(out)["runs"]}

    return rows
