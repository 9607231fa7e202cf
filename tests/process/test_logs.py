"""What the server writes arrives as lines, whatever it is, and nothing that it writes can hurt the reader."""

import os
import resource
import threading
import time

import pytest
from seen import until

from hangguard.facts import Ask, Log, Unseen
from hangguard.observe.logs import LogProbe

pytestmark = pytest.mark.anyio

MIB = 1024 * 1024


@pytest.fixture
def path(tmp_path):
    made = tmp_path / "server.log"
    made.touch()
    return made


@pytest.fixture
async def probe(path):
    made = LogProbe(str(path), within=30)
    yield made
    await made.aclose()


def write(path, data):
    with path.open("ab") as file:
        file.write(data)


async def look(probe):
    seen = await probe.look(Ask())
    assert isinstance(seen, Log), seen
    return seen


async def test_lines_arrive_once_and_in_order(path, probe):
    write(path, b"one\ntwo\n")
    assert await look(probe) == Log(total_bytes=8, lines=("one", "two"))
    assert await look(probe) == Log(total_bytes=8)
    write(path, b"three\r\n\n   \nfour\n")
    seen = await look(probe)
    assert seen.lines == ("three", "four")
    assert seen.total_bytes == path.stat().st_size


async def test_a_line_across_looks_arrives_whole(path, probe):
    write(path, b"start\nLoading saf")
    assert (await look(probe)).lines == ("start",)
    write(path, b"etensors\nnext")
    assert (await look(probe)).lines == ("Loading safetensors",)


async def test_a_character_across_looks_arrives_whole(path, probe):
    snowman = "\N{SNOWMAN}".encode()
    write(path, b"a" + snowman[:1])
    assert (await look(probe)).lines == ()
    write(path, snowman[1:] + b"\n")
    assert (await look(probe)).lines == ("a\N{SNOWMAN}",)


async def test_last_words_without_an_end_arrive_after_a_pause_and_whole_once_they_go_on(path, probe):
    write(path, b"Killed")
    assert (await look(probe)).lines == ()
    assert (await look(probe)).lines == ("Killed",)
    assert (await look(probe)).lines == ()
    write(path, b" by the kernel\n")
    assert (await look(probe)).lines == ("Killed by the kernel",)
    write(path, b"Done")
    await look(probe)
    assert (await look(probe)).lines == ("Done",)
    write(path, b"\nnext\n")
    assert (await look(probe)).lines == ("next",)


async def test_a_progress_bar_gives_a_line_a_step(path, probe):
    write(path, b"".join(b"\rshards: %3d%%" % step for step in range(0, 101, 25)) + b"\n")
    assert (await look(probe)).lines == tuple(f"shards: {step:3d}%" for step in range(0, 101, 25))


async def test_control_characters_are_gone(path, probe):
    write(path, b"\x1b[1;31mERROR\x1b[0m\x07 in\ttab \x1b]0;title\x07\x00\x08end\n")
    write(path, "evil \u202etxt\u2028 \x9b31mred\n".encode())
    assert (await look(probe)).lines == ("ERROR in\ttab end", "evil txt 31mred")


async def test_binary_garbage_does_no_harm(path, probe):
    write(path, os.urandom(3 * MIB) + b"\nafter\n")
    seen = await look(probe)
    assert seen.lines[-1] == "after"
    assert seen.total_bytes == path.stat().st_size
    for line in seen.lines:
        assert not any(ord(sign) < 32 and sign != "\t" for sign in line)
        assert len(line) <= 8192


async def test_a_line_of_a_gigabyte_costs_neither_memory_nor_time(path, probe):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    write(path, b"before\n")
    os.truncate(path, 1024 * MIB)
    began = time.monotonic()
    seen = await look(probe)
    write(path, b"\nafter\n")
    after = await look(probe)
    assert time.monotonic() - began < 5
    assert seen.lines[0] == "before"
    assert seen.skipped_bytes >= 1024 * MIB - 16 * MIB
    assert after.lines[-1] == "after"
    assert after.total_bytes == path.stat().st_size
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


async def test_300_kilobytes_before_it_listens_arrive_in_one_look(path, probe):
    write(path, b"".join(b"INFO line %d of the start\n" % number for number in range(12_000)))
    seen = await look(probe)
    assert seen.skipped_bytes == 0
    assert seen.lines[0] == "INFO line 0 of the start"
    assert seen.lines[-1] == "INFO line 11999 of the start"
    assert len(seen.lines) == 400
    assert seen.left_out == 12_000 - 400


@pytest.mark.long
async def test_a_flood_of_300_megabytes_says_what_was_skipped_and_its_last_line_arrives(path, probe):
    write(path, b"first\n")
    block = b"0123456789 flood flood flood\n" * 40_000
    with path.open("ab") as file:
        while file.tell() < 300 * MIB:
            file.write(block)
        file.write(b"Application startup complete.\n")
    began = time.process_time()
    seen = await look(probe)
    assert time.process_time() - began < 2
    assert seen.lines[0] == "first"
    assert seen.lines[-1] == "Application startup complete."
    assert seen.skipped_bytes == path.stat().st_size - 16 * MIB
    assert seen.total_bytes == path.stat().st_size
    assert all(line in {"first", "Application startup complete."} or len(line) <= 28 for line in seen.lines)
    assert "0123456789 flood flood flood" in seen.lines
    again = await look(probe)
    assert again.skipped_bytes == seen.skipped_bytes
    os.truncate(path, 0)


async def test_a_log_that_vanishes_is_read_on_because_the_server_writes_on(path, probe):
    with path.open("ab", buffering=0) as server:
        server.write(b"one\n")
        await look(probe)
        path.unlink()
        server.write(b"two\n")
        seen = await look(probe)
    assert seen.lines == ("two",)
    assert seen.total_bytes == 8


async def test_a_replaced_log_is_read_after_the_rest_of_the_old_one(path, probe):
    with path.open("ab", buffering=0) as server:
        server.write(b"one\n")
        await look(probe)
        path.rename(path.with_suffix(".1"))
        server.write(b"two\n")
    write(path, b"three\n")
    assert (await look(probe)).lines == ("two",)
    seen = await look(probe)
    assert seen.lines == ("three",)
    assert seen.total_bytes == 14


async def test_a_log_truncated_in_place_is_read_from_its_start(path, probe):
    write(path, b"a long first line\n")
    await look(probe)
    os.truncate(path, 0)
    write(path, b"new\n")
    seen = await look(probe)
    assert seen.lines == ("new",)
    assert seen.total_bytes == 18 + 4


async def test_the_reader_never_slows_the_writer(path, probe):
    """A server that writes while nobody looks is never blocked: there is no pipe."""
    done = threading.Event()

    def server():
        with path.open("ab", buffering=0) as file:
            for _ in range(1000):
                file.write(b"x" * 999 + b"\n")
        done.set()

    threading.Thread(target=server).start()
    await until(done.is_set)
    assert (await look(probe)).total_bytes == 1_000_000


async def test_log_missing_says_why(tmp_path):
    path = tmp_path / "later.log"
    probe = LogProbe(str(path), within=5)
    assert await probe.look(Ask()) == Unseen(f"{path}: No such file or directory")
    write(path, b"here\n")
    assert (await look(probe)).lines == ("here",)
    await probe.aclose()


async def test_log_of_nobody_says_why():
    probe = LogProbe(None, within=5)
    assert await probe.look(Ask()) == Unseen("the output of the server goes to no file of ours")
    await probe.aclose()


async def test_log_hanging_is_unseen_within_its_deadline(tmp_path):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    probe = LogProbe(str(path), within=0.2)
    began = time.monotonic()
    assert await probe.look(Ask()) == Unseen("no answer within 0.2 s")
    second = await probe.look(Ask())
    assert isinstance(second, Unseen)
    assert "still busy" in second.reason
    assert time.monotonic() - began < 2
    with path.open("w"):
        await probe.aclose()
