"""Real starts that burn CPU: for nothing, for a compiler, or for one step after another."""

import re

import pytest
from seen import until
from states import FAILURES
from watched import program, watching_all

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_a_loop_in_one_place_is_hot_and_compilers_and_changing_places_are_work(tmp_path):
    """All with the shortest patience there is, so that what is long by design is short here."""
    for name in ("real", "named"):
        (tmp_path / name).mkdir()
    async with watching_all(
        tmp_path,
        spin=program("slow", "spin"),
        changing=program("slow", "changing"),
        real=program("compile", "real", tmp_path / "real"),
        named=program("compile", "named", tmp_path / "named"),
    ) as seen:
        for name, words in (("real", r"compiling: \d compiler process"), ("named", "compiling: 1 compiler process$")):
            await until(lambda name=name, words=words: re.match(words, seen[name].why), within=60.0)
        hot = await seen["spin"].until("stuck", "hot")
        assert hot.confidence == "medium"
        assert "no place is known" in hot.why
        assert hot.suspects[0].pid == seen["spin"].root
        assert hot.suspects[0].at[0].startswith("spin (states_slow.py:")
        for name in ("changing", "real", "named"):
            await seen[name].goes_on_for(seen["spin"].age)
            assert not seen[name].classes & FAILURES, name
