"""Whoever asks for the log gets it line by line, at his own pace, attempt after attempt; nobody waits for him."""

import os
import re
import sys
import threading
from pathlib import Path

import anyio
import pytest
from faces import little, plain
from seen import until, until_sync

from hangguard import LogLine, ServerLost, supervise
from hangguard.errors import WrongProcess
from hangguard.observe.log_lines import BEHIND, LONGEST, LineReader

MIB = 1 << 20
KEY = "correct-horse-battery"


def texts(lines):
    return [line.text for line in lines if line.text]


def written(path):
    """The lines of a file, a progress bar by its steps."""
    return [line for line in re.split(r"[\r\n]+", path.read_bytes().decode()) if line]


# ---------------------------------------------------------------------------------------- the two faces


@pytest.mark.anyio
@pytest.mark.long
async def test_it_begins_with_the_attempt_goes_on_into_the_next_and_ends_with_the_supervision(tmp_path):
    lines = []

    async def follow(server):
        async for line in server.log():
            lines.append(line)  # noqa: PERF401 - looked at while it grows

    async with anyio.create_task_group() as group:
        async with supervise(little(), run_dir=tmp_path / "runs") as server:
            group.start_soon(follow, server)
            await until(lambda: any("fired up" in str(line) for line in lines))
            first, before = Path(server.attempt.log_path), len(lines)
            await server.restart()
            await until(lambda: any("fired up" in str(line) for line in lines[before:]))
            second = Path(server.attempt.log_path)
    assert {line.attempt for line in lines} == {1, 2}
    assert [line.attempt for line in lines] == sorted(line.attempt for line in lines)
    for number, path in ((1, first), (2, second)):
        whole = written(path)
        assert texts(line for line in lines if line.attempt == number) == whole
    assert all(line.left_out_bytes == 0 for line in lines)


def test_the_blocking_face_gives_the_same_also_what_came_after_the_block(tmp_path):
    lines = []
    with supervise(little(), run_dir=tmp_path / "runs") as server:
        stream = server.log()
        thread = threading.Thread(target=lambda: lines.extend(stream))
        thread.start()
        later = server.log()
        assert isinstance(next(later), LogLine)
        path = Path(server.attempt.log_path)
        until_sync(thread.is_alive)
    thread.join(20)
    assert not thread.is_alive()
    whole = written(path)
    assert texts(lines) == whole
    assert texts(later) == whole[1:]  # nobody asked while it ran: the file is there for him


def test_without_following_it_ends_where_the_log_ends(tmp_path):
    with supervise(little(), run_dir=tmp_path / "runs") as server:
        now = texts(server.log(follow=False))
        assert any("fired up" in text for text in now)
        assert written(Path(server.attempt.log_path))[: len(now)] == now


def test_of_a_server_that_was_lost_the_log_can_still_be_read(tmp_path):
    with pytest.raises(ServerLost), supervise(little(), run_dir=tmp_path / "runs") as server:
        os.kill(server.pid, 9)
        server.wait(20)
        assert any("fired up" in text for text in texts(server.log(follow=False)))
        assert any("fired up" in text for text in texts(server.log()))


def test_no_secret_and_nothing_that_drives_a_terminal_is_in_it(tmp_path):
    program = (
        "import http.server, os, sys\n"
        "print('the token is', os.environ['SERVICE_TOKEN'], '\\x1b]0;owned\\x07 and \\x9b31m on', flush=True)\n"
        "handler = http.server.SimpleHTTPRequestHandler\n"
        "http.server.ThreadingHTTPServer(('127.0.0.1', int(sys.argv[1])), handler).serve_forever()\n"
    )
    command = [sys.executable, "-c", program, "{port}"]
    with plain(tmp_path, command, env={**os.environ, "SERVICE_TOKEN": KEY}) as server:
        seen = texts(server.log(follow=False))
        assert KEY.encode() in Path(server.attempt.log_path).read_bytes()
    assert seen[0] == "the token is REDACTED  and  on"
    assert not any(ord(sign) < 32 and sign != "\t" for text in seen for sign in text)


def test_a_run_without_a_log_says_so(tmp_path, monkeypatch):
    def nowhere(*_given, **_options):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("hangguard.store._make", nowhere)
    monkeypatch.setattr("tempfile.mkdtemp", nowhere)
    with plain(tmp_path) as server, pytest.raises(RuntimeError, match=r"there is no log: .*Read-only"):
        server.log()


def test_a_forked_child_is_refused(tmp_path):
    with plain(tmp_path) as server:
        child = os.fork()
        if child == 0:
            try:
                server.log()
            except WrongProcess:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


# ------------------------------------------------------------------------------------- slow and dropped


def test_a_slow_reader_skips_is_told_so_and_costs_no_memory(tmp_path):
    program = (
        "import http.server, os, sys, threading, pathlib, time\n"
        "def write():\n"
        "    while not pathlib.Path('go').exists(): time.sleep(.01)\n"
        "    for n in range(600): os.write(1, b'x' * 99_999 + b'\\n')\n"
        "    os.write(1, b'the last line\\n')\n"
        "os.write(1, b'the first line\\n')\n"
        "threading.Thread(target=write).start()\n"
        "handler = http.server.SimpleHTTPRequestHandler\n"
        "http.server.ThreadingHTTPServer(('127.0.0.1', int(sys.argv[1])), handler).serve_forever()\n"
    )
    with plain(tmp_path, [sys.executable, "-c", program, "{port}"]) as server:
        stream = server.log()
        assert next(stream).text == "the first line"
        (tmp_path / "go").touch()
        until_sync(lambda: Path(server.attempt.log_path).stat().st_size > 60_000_000)
        left_out, lines = 0, 0
        for line in stream:
            left_out, lines = left_out + line.left_out_bytes, lines + 1
            assert len(line.text) < LONGEST + 100
            if line.text == "the last line":
                break
    assert left_out > 40 * MIB
    assert lines < 300


@pytest.mark.anyio
async def test_dropping_it_ends_its_thread_and_closes_the_file(tmp_path):
    async with supervise(little(), run_dir=tmp_path / "runs") as server:
        path = os.path.realpath(server.attempt.log_path)

        def threads():
            return {thread for thread in threading.enumerate() if thread.name == "hangguard log lines"}

        def held():
            links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd.isdigit()
                    if os.path.lexists(f"/proc/self/fd/{fd}")]  # fmt: skip
            return links.count(path)

        before, held_before = threads(), held()
        stream = server.log()
        await stream.next_or_none()
        (its_own,) = threads() - before
        assert held() == held_before + 1
        del stream
        await until(lambda: not its_own.is_alive() and held() == held_before)


# --------------------------------------------------------------------------------------- the reader itself


def read(reader):
    lines = []
    while not reader.is_at_end():
        lines += reader.read()
    return lines


@pytest.fixture
def path(tmp_path):
    return tmp_path / "server.log"


def test_a_reader_that_is_too_far_behind_goes_on_at_a_whole_line(path):
    path.write_bytes(b"first\n")
    reader = LineReader(str(path))
    assert read(reader) == [(0, b"first")]
    lines = [b"line %07d" % number for number in range(3 * BEHIND // 13)]
    with path.open("ab") as log:
        log.write(b"\n".join(lines) + b"\n")
    seen = read(reader)
    assert seen[0][0] > 2 * BEHIND
    assert all(left_out == 0 for left_out, _ in seen[1:])
    assert [line for _, line in seen] == lines[-len(seen) :]
    reader.close()


def test_a_reader_who_came_late_reads_the_start_first(path):
    path.write_bytes(b"arguments\n" + b"x" * 79 + b"\n" * 2 * BEHIND + b"end\n")
    reader = LineReader(str(path))
    seen = read(reader)
    assert seen[0] == (0, b"arguments")
    assert seen[-1][1] == b"end"
    reader.close()


@pytest.mark.long
def test_a_reader_that_may_not_skip_reads_everything(path):
    path.write_bytes(b"y" * 99 + b"\n")
    with path.open("ab") as log:
        log.write((b"x" * 99 + b"\n") * (2 * BEHIND // 100))
    reader = LineReader(str(path), behind=None)
    assert len(read(reader)) == 2 * BEHIND // 100 + 1
    reader.close()


def test_what_has_no_end_is_given_at_the_end_and_what_was_left_out_last_is_told(path):
    path.write_bytes(b"whole\npart")
    reader = LineReader(str(path))
    assert (read(reader), reader.rest(), reader.rest()) == ([(0, b"whole")], [(0, b"part")], [])
    with path.open("ab") as log:
        log.write(b"x" * 2 * BEHIND)
    assert read(reader) == []
    assert reader.rest() == [(2 * BEHIND, b"")]
    reader.close()


def test_a_log_truncated_in_place_is_read_from_its_start(path):
    path.write_bytes(b"a long first line\nrest")
    reader = LineReader(str(path))
    read(reader)
    path.write_bytes(b"new\n")
    assert reader.read() == [(0, b"new")]
    reader.close()
