"""Which run is meant by a beginning, or by nothing: the only one that lives, and never one of several."""

import pytest
from left import Made, identity
from runs_said import hangguard, listed  # noqa: F401 - fixtures
from test_guardian import keep  # noqa: F401 - fixture

from hangguard import NoSuchRun
from hangguard.act.choosing import the_living_run, the_run


@pytest.fixture
def several(tmp_path, keep):  # noqa: F811
    """Two that are over, one that lives: all of one day."""
    base = tmp_path / "runs"
    runs = [Made(base, keep) for _ in range(3)]
    for over in runs[:2]:
        over.server.kill()
        over.server.wait()
        over.note(stage="over", outcome="stopped as asked")
    runs[2].note(supervisor=identity(runs[2].start()))
    return base, runs


def test_runs_that_are_over_make_nothing_ambiguous(several):
    base, (first, _, living) = several
    assert the_living_run(living.run_id[:4], base).run_id == living.run_id
    assert the_living_run(None, base).run_id == living.run_id
    assert the_living_run(first.run_id, base).run_id == first.run_id  # a whole name means that run, whatever lives
    with pytest.raises(NoSuchRun, match="3 runs begin with"):
        the_run(living.run_id[:4], base)  # who cleans means the dead ones as well


def test_of_several_that_live_none_is_taken_and_each_is_shown_with_stage_and_command(several, keep, hangguard):  # noqa: F811
    base, (first, _, living) = several
    more = Made(base, keep)
    more.note(supervisor=identity(more.start()), command=("vllm", "serve", "M"))
    for words in (["stop"], ["stop", living.run_id[:4]], ["status"], ["wait", "--timeout", "5"]):
        code, _, said = hangguard(*words, "--run-dir", base)
        assert code == 22
        lines = {line.split()[0]: line for line in said.splitlines() if line.startswith("  ")}
        assert set(lines) == {living.run_id, more.run_id}
        assert "vllm serve M" in lines[more.run_id]
        assert lines[more.run_id].split()[1] == more.state.stage
        assert first.run_id not in said
    assert more.server.poll() is None
    assert living.server.poll() is None


def test_where_none_lives_that_is_said(several, hangguard):  # noqa: F811
    base, (_, _, living) = several
    living.note(supervisor=(2**22 - 2, 1))
    living.server.kill()
    living.server.wait()
    code, _, said = hangguard("stop", "--run-dir", base)
    assert (code, "No run lives" in said) == (22, True)
    code, _, said = hangguard("stop", living.run_id[:4], "--run-dir", base)
    assert (code, "none lives" in said) == (22, True)
    code, _, said = hangguard("stop", "--run-dir", base / "none")
    assert (code, "No run lives" in said) == (22, True)


@pytest.mark.long
def test_the_stage_of_a_dead_run_is_that_of_ps_and_its_url_and_verdict_are_not_told(tmp_path, keep, hangguard):  # noqa: F811
    made = Made(tmp_path / "runs", keep)
    made.note(url="http://127.0.0.1:1", verdict="ready")
    code, out, _ = hangguard("status", made.path)
    assert (code, "stage left behind" in out.splitlines()) == (14, True)
    assert "127.0.0.1" not in out
    assert "verdict" not in out
    made.note(supervisor=identity(made.start()))  # it lives, and has no socket: what it noted is of now
    code, out, _ = hangguard("status", made.path)
    assert (code, "stage ready" in out.splitlines(), "verdict ready" in out.splitlines()) == (21, True, True)
