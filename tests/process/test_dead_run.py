# ruff: noqa: F811  fixtures are imported by their names
"""What a dead run has left goes on proof, and nothing else does: the most telling of ``test_cleanup.py``, quickly."""

import mmap
import os
import signal
import sys
from pathlib import Path

import pytest
from left import Made, below, bystander, cleaned, identity, in_shm, is_over, keep, made, of  # noqa: F401 - fixtures
from seen import until_sync

from hangguard.run_state import STATE


def test_a_dry_run_tells_everything_and_touches_nothing(made, bystander):
    file = made.file()
    before = (made.path / STATE).read_bytes()
    try:
        report = cleaned(made, really=False)
        assert (report.dry_run, report.answer, report.left_behind) == (True, "released", ())
        (process,) = of(report, "process")
        assert (process.pid, process.whose, process.answer) == (made.server.pid, "ours", "gone")
        assert process.proof == "the run launched it, and its start time agrees"
        assert process.done.startswith("would be ended")
        assert process.run_id == made.run_id
        (shm,) = of(report, "file")
        assert (shm.name, shm.done, shm.size_bytes) == (str(file), "would be removed", 4096)
        assert "write lease granted" in shm.proof
        assert made.server.poll() is None
        assert file.exists()
        assert (made.path / STATE).read_bytes() == before
    finally:
        file.unlink()


def test_what_is_proved_to_be_of_it_ends_and_everybody_who_looks_like_it_lives_on(made, bystander):
    file = made.file()
    report = cleaned(made)
    assert (report.dry_run, report.answer) == (False, "released")
    assert made.server.wait(5) == -signal.SIGTERM
    (process,) = of(report, "process")
    assert process.done == "ended by SIGTERM"
    assert not file.exists()
    assert is_over(made)
    assert (made.path / "attempt-1.log").exists()  # the logs are evidence
    assert of(cleaned(made), "process") == []  # and again: there is nothing to do


@pytest.mark.parametrize("who", ["supervisor", "guardian", "lock"])
def test_nothing_of_a_run_is_touched_that_somebody_cares_for(made, who):
    file = made.file()
    if who == "lock":
        lock = made.path / "lock"
        program = (
            "import fcntl, sys, time; f = open(sys.argv[1], 'a'); fcntl.flock(f, 2); print('held', file=f, flush=1)"
        )
        holder = made.start([sys.executable, "-c", f"{program}; time.sleep(100)", str(lock)])
        until_sync(lambda: lock.exists() and lock.read_text())
    else:
        holder = made.start()
        made.note(**{who: identity(holder)})
    try:
        report = cleaned(made)
        (item,) = report.items
        assert (item.what, item.answer, report.alive) == ("run", "alive", (made.run_id,))
        assert f"pid {holder.pid}" in item.proof
        assert made.server.poll() is None
        assert holder.poll() is None
        assert file.exists()
        assert not is_over(made)
    finally:
        file.unlink()


def test_only_the_very_file_goes_that_a_member_had_and_nobody_has(made, in_shm):
    ours = made.file()
    others = {
        "at rest, named like ours": made.file(noted=False),
        "was there before": made.file(),
        "was only read": made.file(how="mapped"),
        "somebody has it now": made.file(),
        "has another name too": made.file(),
    }
    link = Path(f"{others['has another name too']}-link")
    os.link(others["has another name too"], link)
    for path in (ours, link, *others.values()):
        in_shm(path)
    before = others["was there before"].stat()
    made.note(shm_before=((before.st_dev, before.st_ino),))
    with others["somebody has it now"].open("r+b") as opened, mmap.mmap(opened.fileno(), 0):
        report = cleaned(made)
    assert not ours.exists()
    assert {name for name, path in others.items() if not path.exists()} == set()
    items = {item.name: item for item in report.items}
    assert items[str(ours)].done == "removed"
    busy = items[str(others["somebody has it now"])]
    assert (busy.whose, busy.answer) == ("somebody else's", "left")
    assert f"pid {os.getpid()}" in busy.proof
    assert items[str(others["at rest, named like ours"])].whose == "unknown"
    assert "rm --" in items[str(others["at rest, named like ours"])].done
    assert report.left_behind == ()
