"""What good starts teach: kept in a small file of the user's, lengthening only, lost without harm."""

import json
import os
from pathlib import Path

import anyio
import pytest

from hangguard import Launch, Unseen, learned
from hangguard.learned import GOOD_STARTS, MOST_ENTRIES, Lesson, key_of, note_start, read_lesson
from hangguard.supervision.lessons import note_good_start, patience_learned

LAUNCH = Launch(
    argv=("vllm", "serve", "m", "--port", "8000", "--enforce-eager"),
    env=(("NCCL_P2P_DISABLE", "1"),),
    cwd="/",
    engine="vllm",
    version="0.33.0",
    url="http://127.0.0.1:8000",
    host="127.0.0.1",
    port=8000,
)


def with_(**changes):
    from dataclasses import replace

    return replace(LAUNCH, **changes)


def test_a_longer_stretch_counts_whole_and_a_shorter_one_half():
    lesson = Lesson().after((("weights-load", 8.0),)).after((("weights-load", 20.0), ("jit-compile", 2.0)))
    assert dict(lesson.still) == {"weights-load": 20.0, "jit-compile": 2.0}
    assert dict(lesson.after((("weights-load", 10.0),)).still) == {"weights-load": 15.0, "jit-compile": 1.0}


def test_nothing_is_taught_before_there_were_enough_good_starts():
    lesson = Lesson()
    for _ in range(GOOD_STARTS):
        assert lesson.patience == ()
        lesson = lesson.after((("kv-cache", 4.0),))
    assert dict(lesson.patience) == {"kv-cache": 4.0}


def test_the_port_and_the_key_make_no_other_kind_of_start_but_a_flag_a_version_and_a_variable_do():
    key = key_of(LAUNCH, ())
    same = ("vllm", "serve", "m", "--port=9", "--api-key", "s", "--enforce-eager")
    assert key_of(with_(argv=same), ()) == key
    others = [
        key_of(with_(argv=("vllm", "serve", "m")), ()),
        key_of(with_(version="0.34.0"), ()),
        key_of(with_(env=()), ()),
        key_of(LAUNCH, Unseen("wedged")),
        key_of(LAUNCH, (), "driver 580"),
    ]
    assert len({key, *others}) == 1 + len(others)


def test_a_start_is_found_again_under_its_own_key_only(tmp_path):
    path = str(tmp_path / "state" / "learned.json")
    for _ in range(GOOD_STARTS):
        note_start(path, "a", (("import", 3.0),))
    assert dict(read_lesson(path, "a").patience) == {"import": 3.0}
    assert read_lesson(path, "b") == Lesson()
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert [p.name for p in Path(path).parent.iterdir()] == ["learned.json"]


@pytest.mark.parametrize(
    "content", [b'{"schema": 1, "starts": {"a"', b"\x00\xff\xfe", b"[]", b'{"schema": 7, "starts": {}}', b""]
)
def test_a_file_that_cannot_be_understood_is_kept_beside_the_new_one(tmp_path, content):
    path = tmp_path / "learned.json"
    path.write_bytes(content)
    assert read_lesson(str(path), "a") == Lesson()
    assert path.read_bytes() == content
    note_start(str(path), "a", (("import", 3.0),))
    assert read_lesson(str(path), "a").starts == 1
    assert (tmp_path / "learned.json.broken").read_bytes() == content


def test_numbers_that_cannot_be_are_not_taken(tmp_path):
    path = tmp_path / "learned.json"
    still = {"import": -5, "weights-load": "long", "kv-cache": True, "no-such-phase": 9, "warm-up": 2.5}
    path.write_text(json.dumps({"schema": 1, "starts": {"a": {"starts": 9, "still": still}, "b": 7}}))
    assert read_lesson(str(path), "a").patience == (("warm-up", 2.5),)
    assert read_lesson(str(path), "b") == Lesson()


def test_a_link_in_its_place_is_not_followed(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("mine")
    path = tmp_path / "learned.json"
    path.symlink_to(secret)
    assert read_lesson(str(path), "a") == Lesson()
    note_start(str(path), "a", ())
    assert secret.read_text() == "mine"
    assert not path.is_symlink()


def test_a_folder_in_its_place_teaches_nothing_and_costs_no_descriptor(tmp_path):
    path = tmp_path / "learned.json"
    path.mkdir()
    before = os.listdir("/proc/self/fd")
    assert read_lesson(str(path), "a") == Lesson()
    with pytest.raises(OSError, match="directory"):
        note_start(str(path), "a", ())
    assert os.listdir("/proc/self/fd") == before
    assert path.is_dir()


def test_the_file_stays_small(tmp_path):
    path = str(tmp_path / "learned.json")
    for n in range(MOST_ENTRIES + 20):
        note_start(path, f"k{n}", (("import", 1.0),))
    kept = json.loads(Path(path).read_text())["starts"]
    assert len(kept) == MOST_ENTRIES
    assert f"k{MOST_ENTRIES + 19}" in kept
    assert "k0" not in kept


@pytest.mark.anyio
async def test_three_good_starts_later_the_patience_is_known(monkeypatch, tmp_path):
    monkeypatch.setattr(learned, "default_path", lambda: str(tmp_path / "learned.json"))
    for _ in range(GOOD_STARTS):
        assert await patience_learned(LAUNCH, ()) == ()
        await note_good_start(LAUNCH, (), (("weights-load", 6.0),))
    assert await patience_learned(LAUNCH, ()) == (("weights-load", 6.0),)


@pytest.mark.anyio
async def test_a_place_that_cannot_be_written_is_no_fault(monkeypatch):
    monkeypatch.setattr(learned, "default_path", lambda: "/proc/no/such/learned.json")
    with anyio.fail_after(10):
        await note_good_start(LAUNCH, (), ())
        assert await patience_learned(LAUNCH, ()) == ()


NASTY = (
    "1e999",
    "-Infinity",
    "NaN",
    str(10**400),
    str(-(10**400)),
    "1" * 5000,
    "true",
    '"' + "9" * 100_000 + '"',
    "[]",
)


@pytest.mark.parametrize("nasty", NASTY)
@pytest.mark.parametrize("field", ["starts", "still", "at"])
def test_a_number_that_nothing_can_have_teaches_nothing_and_raises_nothing(tmp_path, field, nasty):
    path = str(tmp_path / "learned.json")
    values = {"starts": "3", "still": '{"kv-cache": 4.0}', "at": "1.0"}
    values[field] = f'{{"kv-cache": {nasty}}}' if field == "still" else nasty
    entry = ", ".join(f'"{name}": {value}' for name, value in values.items())
    Path(path).write_text(f'{{"schema": 1, "starts": {{"key": {{{entry}}}}}}}')
    lesson = read_lesson(path, "key")
    assert lesson.starts == (3 if field != "starts" and nasty != "1" * 5000 else 0)
    assert dict(lesson.still) == ({"kv-cache": 4.0} if field != "still" and nasty != "1" * 5000 else {})
    assert note_start(path, "other", (("kv-cache", 5.0),)).starts == 1
    assert read_lesson(path, "other").starts == 1
