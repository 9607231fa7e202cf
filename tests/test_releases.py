"""What a person is told of files: what was removed, what else appeared, and the one command for it."""

import shlex

from hangguard.act.files import files_item
from hangguard.facts import CleanupReport, NewName, Release, RemovedFile, Survivor
from hangguard.report.releases import LONGEST, file_notes, removal_command
from hangguard.report.runs import cleanup_lines
from hangguard.supervision.events import Released

ALIVE = (Survivor(pid=7, started=1, title="worker", state="D", wait_channel="nv_wait"),)


def had(answer, path="/dev/shm/psm_a", *, why="", holders=(), used_bytes=3 << 20):
    return RemovedFile(
        path=path, kind="file", answer=answer, why=why, used_bytes=used_bytes, device=1, inode=2, pid=3, started=4,
        holders=holders,
    )  # fmt: skip


def told(*files, survivors=(), unattributed=(), unseen=()):
    item = files_item(files, survivors=survivors, unattributed=unattributed, unseen=unseen)
    return item.answer, item.ours, item.detail


def test_nothing_there_is_nothing_to_say():
    assert told() == ("released", True, "")
    assert file_notes(Release(items=())) == ()


def test_what_was_removed_or_gone_is_released():
    assert told(had("removed"), had("removed"), had("gone")) == ("released", True, "2 removed, 6 MiB")
    assert file_notes(Release(items=(), files=(had("removed"),))) == ("1 file that it left removed (3 MiB)",)


def test_what_a_stranger_has_is_held_by_him_and_not_by_us():
    by_one = had("busy", holders=("pid 9 (reader)",))
    assert told(had("removed"), by_one) == ("held", False, "/dev/shm/psm_a by pid 9 (reader)")
    assert told(had("busy")) == ("held", False, "/dev/shm/psm_a by somebody")
    assert told(had("refused", why="it has 2 names"))[:2] == ("held", False)


def test_what_a_living_member_has_is_held_by_us():
    answer, ours, detail = told(had("unknown", why="a member lives"), survivors=ALIVE)
    assert (answer, ours) == ("held", True)
    assert "while a member lives" in detail
    assert told(survivors=ALIVE)[0] == "released"


def test_what_could_not_be_asked_is_unknown():
    assert told(had("unknown", why="no leases"))[0] == "unknown"


def test_new_names_are_somebody_elses_unless_a_member_could_not_be_seen():
    assert told(unattributed=("/dev/shm/x",))[0] == "released"
    answer, _, detail = told(unattributed=("/dev/shm/x",), unseen=("pid 7: Permission denied",))
    assert answer == "unknown"
    assert "pid 7: Permission denied" in detail
    assert told(unseen=("pid 7: Permission denied",))[0] == "released"


def new(*paths, use="at rest", why=""):
    return tuple(NewName(path=path, use=use, why=why) for path in paths)


def test_the_command_means_exactly_these_names_whatever_they_are():
    names = ("/dev/shm/a b", "/dev/shm/-rf", "/dev/shm/$(reboot)", "/dev/shm/it's\nnew")
    command = removal_command(names)
    assert shlex.split(command) == ["rm", "--", *names]
    assert removal_command(()) == ""
    (note,) = file_notes(Release(items=(), new_names=new(*names)))
    assert command in note
    assert "perhaps somebody else's" in note


def test_a_long_command_is_cut_between_two_names():
    names = tuple(f"/dev/shm/psm_{number:05}" for number in range(500))
    (note,) = file_notes(Release(items=(), new_names=new(*names)))
    shown = note.rpartition("if nobody's: ")[2]
    assert len(shown) <= LONGEST + 4
    assert shown.endswith(" ...")
    assert set(shown.split()[2:-1]) <= set(names)


def test_no_command_names_what_somebody_has_or_what_could_not_be_looked_at():
    theirs = new("/dev/shm/theirs", use="in use", why="pid 9 (trainer)")
    dark = new("/dev/shm/dark", use="unknown", why="no leases")
    release = Release(items=(), new_names=(*theirs, *new("/dev/shm/rests"), *dark))
    used, at_rest, unknown = file_notes(release)
    assert used == "1 new name in /dev/shm meanwhile, in use, left alone: /dev/shm/theirs (pid 9 (trainer))"
    assert at_rest.endswith("if nobody's: rm -- /dev/shm/rests")
    assert "could not be seen whether somebody has it: /dev/shm/dark (no leases)" in unknown
    assert "rm" not in used.split() + unknown.split()
    assert release.unattributed_files == ("/dev/shm/theirs", "/dev/shm/rests", "/dev/shm/dark")
    assert [name.command for name in release.new_names] == ["", "rm -- /dev/shm/rests", ""]
    assert [name["command"] for name in Released(t=0, attempt=1, release=release).as_json()["new_names"]] == [
        "", "rm -- /dev/shm/rests", "",
    ]  # fmt: skip


def test_a_cleaning_offers_the_removal_of_names_at_rest_alone():
    names = (*new("/dev/shm/theirs", use="in use"), *new("/dev/shm/rests"), *new("/dev/shm/dark", use="unknown"))
    report = CleanupReport(items=tuple(name.as_item() for name in names), dry_run=True)
    lines = [line.text for line in cleanup_lines(report, "hangguard clean --yes")]
    assert [line for line in lines if " rm " in line] == [
        "left, for nobody knows whose; if nobody's: rm -- /dev/shm/rests"
    ]
    assert any("/dev/shm/theirs" in line and "[somebody else's]" in line for line in lines)
    assert any("could not be seen whether somebody has it" in line for line in lines)
    assert report.answer == "released"  # none of it is ours
