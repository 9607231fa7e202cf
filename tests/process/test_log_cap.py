"""What a log takes of the disk is bounded, and whoever writes or reads it is not disturbed by that."""

import errno
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from disks import disk_bytes, mounted, overlay
from seen import until_sync

from hangguard import Exited, GaveUp, Limits, supervise
from hangguard.act._hole import MARK, HollowFile
from hangguard.facts import Ask, Log
from hangguard.observe.log_lines import LineReader
from hangguard.observe.logs import LogProbe

MIB = 1 << 20
KEEP = MIB
SLACK = 192 * 1024
"""Ends of lines are looked for in 64 KiB at either edge, and a file has blocks and their tree."""


@contextmanager
def on(disk, tmp_path):
    if disk == "ext4":
        yield tmp_path
    elif disk == "overlay":
        with overlay(tmp_path / "overlay") as made:
            yield made
    else:
        with mounted(tmp_path / disk, disk) as made:
            yield made


class Writer:
    """Has the log as a server has it: handed down, for appending."""

    def __init__(self, path):
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self.written = 0

    def write(self, data):
        self.written += len(data)
        while data:
            data = data[os.write(self.file, data) :]

    def lines(self, first, number):
        self.write(b"".join(b"line %07d %s\n" % (n, b"x" * 80) for n in range(first, first + number)))

    def state(self):
        return os.lseek(self.file, 0, os.SEEK_CUR), os.fstat(self.file).st_size


@pytest.fixture
def log(tmp_path):
    return tmp_path / "server.log"


@pytest.fixture
def writer(log):
    made = Writer(log)
    yield made
    os.close(made.file)


@contextmanager
def hollow(path, keep=KEEP):
    status = path.stat()
    made = HollowFile(str(path), (status.st_dev, status.st_ino), keep)
    try:
        yield made
    finally:
        made.close()


def kept_lines(path):
    """The lines that are still there, hole and mark taken out."""
    before, mark, after = path.read_bytes().partition(MARK)
    assert mark
    assert after.startswith(b"\0")
    assert after.count(b"\0") == len(after) - len(after.lstrip(b"\0"))
    assert after.lstrip(b"\0").startswith(b"\n")
    return before.splitlines(), after.lstrip(b"\0\n").splitlines()


WHOLE = re.compile(rb"line \d{7} x{80}")


# ------------------------------------------------------------------------------------------ the hole


@pytest.mark.parametrize("disk", ["ext4", "tmpfs", "overlay"])
def test_disk_use_is_bounded_and_the_writer_and_both_ends_are_as_they_were(tmp_path, disk):
    with on(disk, tmp_path) as folder:
        path = folder / "server.log"
        writer = Writer(path)
        try:
            with hollow(path) as file:
                for round_ in range(40):
                    writer.lines(round_ * 10_000, 10_000)
                    before = writer.state()
                    file.keep()
                    assert writer.state() == before == (writer.written, writer.written)
                    assert disk_bytes(path) <= KEEP + SLACK
                assert file.cut_bytes > writer.written - KEEP - SLACK
                head, tail = kept_lines(path)
        finally:
            os.close(writer.file)
    assert all(map(WHOLE.fullmatch, head))
    assert all(map(WHOLE.fullmatch, tail))
    assert head[0].startswith(b"line 0000000")
    assert tail[-1].startswith(b"line 0399999")
    assert len(b"\n".join(tail)) >= KEEP * 7 // 8


def test_a_log_within_its_bound_is_not_touched(log, writer):
    writer.lines(0, 10_000)
    content, changed = log.read_bytes(), log.stat().st_mtime_ns
    with hollow(log) as file:
        assert file.keep() == 0
    assert (log.read_bytes(), log.stat().st_mtime_ns) == (content, changed)


def test_another_file_that_has_its_name_is_not_touched(log, writer):
    writer.lines(0, 20_000)
    with hollow(log) as file:
        log.rename(log.with_suffix(".1"))
        log.write_bytes(b"of somebody else\n" * 200_000)
        with pytest.raises(OSError) as refused:
            file.keep()
        assert refused.value.errno == errno.ESTALE
    assert log.read_bytes() == b"of somebody else\n" * 200_000
    assert MARK not in log.with_suffix(".1").read_bytes()


def test_a_link_in_its_place_is_not_followed(log, writer):
    writer.lines(0, 20_000)
    with hollow(log) as file:
        log.rename(log.with_suffix(".1"))
        log.symlink_to(log.with_suffix(".1"))
        with pytest.raises(OSError) as refused:
            file.keep()
        assert refused.value.errno == errno.ELOOP
    assert MARK not in log.read_bytes()


def test_a_log_that_was_given_a_second_name_is_kept_as_it_is(log, writer):
    writer.lines(0, 20_000)
    os.link(log, log.with_suffix(".kept"))
    content = log.read_bytes()
    with hollow(log) as file:
        with pytest.raises(OSError) as refused:
            file.keep()
        assert refused.value.errno == errno.EMLINK
        assert log.read_bytes() == content
        log.with_suffix(".kept").unlink()
        assert file.keep() > 0


def test_a_removed_log_is_bounded_on_because_the_server_writes_on(log, writer):
    writer.lines(0, 20_000)
    with hollow(log) as file:
        file.keep()
        log.unlink()
        writer.lines(20_000, 100_000)
        file.keep()
        assert os.fstat(writer.file).st_blocks * 512 <= KEEP + SLACK


def test_a_log_that_was_truncated_begins_anew(log, writer):
    writer.lines(0, 50_000)
    with hollow(log) as file:
        file.keep()
        os.truncate(log, 0)
        writer.lines(0, 5_000)
        file.keep()
        assert log.read_bytes().count(b"\n") == 5_000
        writer.lines(5_000, 50_000)
        file.keep()
        head, tail = kept_lines(log)
        assert all(map(WHOLE.fullmatch, [*head, *tail]))


def test_whoever_takes_over_goes_on_with_the_same_hole(log, writer):
    writer.lines(0, 50_000)
    with hollow(log) as file:
        file.keep()
    writer.lines(50_000, 50_000)
    with hollow(log) as file:
        file.keep()
    head, tail = kept_lines(log)
    assert all(map(WHOLE.fullmatch, [*head, *tail]))
    assert log.read_bytes().count(MARK) == 1
    assert disk_bytes(log) <= KEEP + SLACK


def test_a_line_without_an_end_is_bounded_too(log, writer):
    writer.write(b"first\n")
    with hollow(log) as file:
        for _ in range(30):
            writer.write(b"x" * MIB)
            file.keep()
            assert disk_bytes(log) <= KEEP + SLACK
    writer.write(b"\nlast\n")
    assert log.read_bytes().startswith(b"first\n")
    lines = read_all(log)
    assert lines[0] == (0, b"first")
    assert lines[-1][1] == b"last"
    assert any(MARK.strip() == line for _, line in lines)
    assert not any(b"\0" in line for _, line in lines)
    assert sum(left_out for left_out, _ in lines) > 29 * MIB


def test_its_descriptor_is_none_that_a_child_takes_for_its_output(log):
    program = f"""
import os
from hangguard.act._hole import HollowFile
status = os.stat({str(log)!r})
file = HollowFile({str(log)!r}, (status.st_dev, status.st_ino), {KEEP})
for number in (0, 1, 2):
    os.close(number)
file.keep()
os._exit(0 if file._file > 2 and not any(os.path.exists(f"/proc/self/fd/{{n}}") for n in (0, 1, 2)) else 9)
"""
    log.write_bytes(b"x\n")
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


def test_a_file_system_without_holes_says_so_and_the_log_stays_whole(tmp_path):
    with mounted(tmp_path / "ramfs", "ramfs") as folder:
        path = folder / "server.log"
        writer = Writer(path)
        try:
            writer.lines(0, 20_000)
            content = path.read_bytes()
            with hollow(path) as file, pytest.raises(OSError) as refused:
                file.keep()
        finally:
            os.close(writer.file)
        assert refused.value.errno == errno.EOPNOTSUPP
        assert path.read_bytes() == content


def test_a_full_disk_has_room_again(tmp_path):
    with mounted(tmp_path / "tmpfs", "tmpfs", "-o", "size=4m") as folder:
        path = folder / "server.log"
        writer = Writer(path)
        try:
            with pytest.raises(OSError) as full:
                writer.lines(0, 100_000)
            assert full.value.errno == errno.ENOSPC
            with hollow(path) as file:
                assert file.keep() > 0
            writer.lines(0, 10_000)
        finally:
            os.close(writer.file)


# --------------------------------------------------------------------------------------- its readers


def cut_log(path, writer):
    writer.write(b"ERROR in the head\n")
    writer.lines(0, 60_000)
    with hollow(path) as file:
        file.keep()
        return file.cut_bytes


def read_all(path):
    reader = LineReader(str(path), behind=None)
    lines = []
    while not reader.is_at_end():
        lines += reader.read()
    lines += reader.rest()
    reader.close()
    return lines


@pytest.mark.anyio
async def test_the_probe_passes_over_the_hole_and_says_so(log, writer):
    cut = cut_log(log, writer)
    probe = LogProbe(str(log), within=10, telling=("ERROR", "hangguard"))
    seen = await probe.look(Ask())
    assert isinstance(seen, Log)
    assert seen.lines[0] == "ERROR in the head"
    assert seen.lines[-1].startswith("line 0059999")
    assert MARK.strip().decode() in seen.lines
    assert seen.total_bytes == writer.written
    assert cut - SLACK <= seen.skipped_bytes <= cut
    assert all(WHOLE.fullmatch(line.encode()) for line in seen.lines if line.startswith("line"))
    writer.write(b"and on\n")
    assert (await probe.look(Ask())).lines == ("and on",)
    await probe.aclose()


@pytest.mark.anyio
async def test_the_probe_whose_next_bytes_were_cut_out_goes_on_behind_the_hole(log, writer):
    writer.write(b"first\n")
    probe = LogProbe(str(log), within=10)
    assert (await probe.look(Ask())).lines == ("first",)
    writer.lines(0, 400_000)  # more than one look reads
    with hollow(log) as file:
        file.keep()
    seen = await probe.look(Ask())
    assert seen.total_bytes == writer.written
    assert seen.lines[-1].startswith("line 0399999")
    assert all(WHOLE.fullmatch(line.encode()) for line in seen.lines if line.startswith("line"))
    assert not any("\0" in line for line in seen.lines)
    assert seen.skipped_bytes > writer.written - 2 * KEEP
    await probe.aclose()


def test_a_reader_of_lines_passes_over_the_hole_and_says_how_much_it_was(log, writer):
    cut = cut_log(log, writer)
    lines = read_all(log)
    assert lines[0] == (0, b"ERROR in the head")
    assert lines[-1][1].startswith(b"line 0059999")
    skips = [left_out for left_out, _ in lines if left_out]
    assert len(skips) == 1
    assert cut - SLACK <= skips[0] <= cut
    assert all(WHOLE.fullmatch(line) for _, line in lines[1:] if line and line != MARK.strip())


def test_a_hole_of_zeros_is_one_also_where_the_file_system_does_not_tell(tmp_path):
    with mounted(tmp_path / "ramfs", "ramfs") as folder:
        path = folder / "server.log"
        path.write_bytes(b"head\n" + bytes(MIB) + b"\ntail\n")
        file = os.open(path, os.O_RDONLY)
        assert os.lseek(file, 5, os.SEEK_DATA) == 5
        os.close(file)
        lines = read_all(path)
    assert [line for _, line in lines] == [b"head", b"tail"]
    assert MIB - 4096 <= lines[1][0] <= MIB


def test_zero_bytes_that_the_server_wrote_itself_are_no_hole(log, writer):
    writer.write(b"\0head\0er\n\0\0\0one\n" + bytes(100) + b"two\n\0")
    assert [line.replace(b"\0", b"") for _, line in read_all(log)] == [b"header", b"one", b"two", b""]


# ------------------------------------------------------------------------------------- a whole launch

FLOOD = Path(__file__).parent / "programs" / "log_flood.py"


def flood(folder, megabytes, run_dir, *bound, **options):
    return supervise(
        [sys.executable, "-B", str(FLOOD), "{port}", str(megabytes), str(folder), *map(str, bound)],
        url="http://127.0.0.1:{port}",
        ready="/",
        run_dir=run_dir,
        limits=Limits(stop_grace=2.0),
        **options,
    )


def notices(told):
    return [event.text for event in told if event.event == "notice"]


def test_a_flood_is_bounded_while_it_runs_and_that_is_said_once(tmp_path):
    told = []
    with flood(tmp_path, 40, tmp_path / "runs", log_bytes=2 * MIB, hooks=[told.append]) as server:
        (tmp_path / "go").touch()
        path = Path(server.attempt.log_path)
        until_sync((tmp_path / "done").exists, within=60)
        until_sync(lambda: disk_bytes(path) <= 2 * MIB + SLACK)
        assert path.stat().st_size > 40 * MIB
    assert server.attempt.log_cut_bytes > 37 * MIB
    assert disk_bytes(path) <= 2 * MIB + SLACK
    assert b"says the head\n" in path.read_bytes()[:200]
    assert any("the last line" in line for line in server.attempt.log_tail)
    assert [text for text in notices(told) if "cut out" in text] == [
        "the log has more than 2 MiB: its middle is cut out, start and newest part stay"
    ]


@pytest.mark.long
def test_without_a_bound_every_byte_is_kept(tmp_path):
    with flood(tmp_path, 20, tmp_path / "runs", log_bytes=None) as server:
        (tmp_path / "go").touch()
        until_sync((tmp_path / "done").exists, within=60)
    path = Path(server.attempt.log_path)
    assert server.attempt.log_cut_bytes == 0
    assert disk_bytes(path) >= 20 * MIB
    assert b"\0" not in path.read_bytes()


@pytest.mark.long
def test_a_launch_on_a_file_system_without_holes_says_so_once_and_goes_on(tmp_path):
    told = []
    with mounted(tmp_path / "ramfs", "ramfs") as folder:
        with flood(tmp_path, 20, folder / "runs", log_bytes=MIB, hooks=[told.append]) as server:
            (tmp_path / "go").touch()
            until_sync((tmp_path / "done").exists, within=60)
            until_sync(lambda: any("cannot be bounded" in text for text in notices(told)))
            before = server.sample().t
            until_sync(lambda: server.sample().t > before + 1.5)
            assert server.attempt.verdict.verdict == "ready"
        path = Path(server.attempt.log_path)
        assert path.stat().st_size > 20 * MIB
        assert b"\0" not in path.read_bytes()
    said = [text for text in notices(told) if "bounded" in text]
    assert said == ["the log cannot be bounded (Operation not supported): it grows as it is written"]


@pytest.mark.long
def test_a_full_disk_does_not_stop_the_watch(tmp_path):
    with mounted(tmp_path / "tmpfs", "tmpfs", "-o", "size=3m") as folder:
        with flood(tmp_path, 20, folder / "runs") as server:
            (tmp_path / "go").touch()
            until_sync(lambda: os.statvfs(folder).f_bavail == 0, within=30)
            before = server.sample().t
            until_sync(lambda: server.sample().t > before + 3)
            members = [process.pid for process in server.sample().tree.members]
            assert members
            assert server.attempt.verdict.verdict == "ready"
        assert server.attempt.release.answer == "released"
        assert not any(Path(f"/proc/{pid}").exists() for pid in members)


def test_an_attempt_that_went_wrong_keeps_its_log_and_its_error_names_it(tmp_path):
    command = [sys.executable, "-c", "print('the cause'); raise SystemExit(3)"]
    with pytest.raises(GaveUp) as told, supervise(command, url="http://127.0.0.1:9", run_dir=tmp_path / "runs"):
        pass
    attempt = told.value.history[-1]
    assert isinstance(attempt.verdict, Exited)
    assert f"log: {attempt.log_path}" in str(told.value)
    assert Path(attempt.log_path).read_bytes() == b"the cause\n"
