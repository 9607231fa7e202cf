"""A gigabyte of log, as a server really writes it: the disk, its descriptor, every line, and what the head says."""

import json
import re
from pathlib import Path

import anyio
from disks import disk_bytes
from seen import until_sync
from test_log_cap import flood

from hangguard.act._hole import MARK
from hangguard.facts import Ask
from hangguard.observe.log_lines import LineReader
from hangguard.observe.logs import LogProbe

MIB = 1 << 20
CAP = 64 * MIB
STEP = 64 * MIB
"""What the server writes before it looks whether the bound is kept."""
LINE = re.compile(rb"line (\d{9}) of the flood, which is as long as a line of a log often is")


def test_a_gigabyte_takes_its_bound_of_the_disk_and_nobody_notices(tmp_path):
    with flood(tmp_path, 1024, tmp_path / "runs", (CAP + MIB) >> 20, log_bytes=CAP) as server:
        path = Path(server.attempt.log_path)
        (tmp_path / "go").touch()
        until_sync((tmp_path / "done").exists, within=100)
        until_sync(lambda: disk_bytes(path) <= CAP + MIB)
        until_sync(lambda: getattr(server.sample().log, "total_bytes", 0) > 1024 * MIB, within=60)
        assert server.attempt.verdict.verdict == "ready"
    assert disk_bytes(path) <= CAP + MIB
    assert server.attempt.log_cut_bytes > (1024 - 65) * MIB
    told = json.loads((tmp_path / "done").read_text())
    assert told["most"] <= CAP + 2 * STEP
    _the_servers_own_descriptor_is_as_it_was(told, path)
    _no_line_is_torn(path, told["lines"])
    anyio.run(_the_symptom_in_the_head_is_found_at_the_end, path)


def _the_servers_own_descriptor_is_as_it_was(told, path):
    before, after = told["before"], told["after"]
    assert after["offset"] == after["size"] > 1024 * MIB
    assert (after["flags"], after["file"]) == (before["flags"], before["file"])
    assert after["file"] == [path.stat().st_dev, path.stat().st_ino]


def _no_line_is_torn(path, number):
    reader, lines = LineReader(str(path), behind=None), []
    while not reader.is_at_end():
        lines += [line for _, line in reader.read()]
    reader.close()
    mark = lines.index(MARK.strip())
    head = [int(LINE.fullmatch(line)[1]) for line in lines[2 : mark - 1]]
    after = next(n for n, line in enumerate(lines[mark:], mark) if LINE.fullmatch(line))
    last = lines.index(b"the last line")
    tail = [int(LINE.fullmatch(line)[1]) for line in lines[after:last]]
    assert lines[0].startswith(b"args:")
    assert head == list(range(len(head)))
    assert tail == list(range(number - len(tail), number))
    assert len(head) > 3 * MIB // 75
    assert len(tail) > 55 * MIB // 75


async def _the_symptom_in_the_head_is_found_at_the_end(path):
    probe = LogProbe(str(path), within=30, telling=("CUDA out of memory",))
    seen = await probe.look(Ask())
    await probe.aclose()
    assert "RuntimeError: CUDA out of memory, says the head" in seen.lines
    assert any(line.startswith("line 000000000 ") for line in seen.lines)
    assert "the last line" in seen.lines
    assert seen.skipped_bytes > 900 * MIB
