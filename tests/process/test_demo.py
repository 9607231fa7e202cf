"""``hangguard demo``: the whole story in under a minute, on CPU, and nothing is left."""

import json
import re
from pathlib import Path

import pytest
from commands import hangguard, poll
from terminals import check_live_lines, on_a_terminal


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    """``demo --json`` and ``demo`` on a terminal, at once: they mostly wait. Gives the document and the screen."""
    folders = [tmp_path_factory.mktemp(name) for name in ("json", "terminal")]
    # A /dev/shm of its own: names that other programs leave in the common one say nothing about the demo.
    script = 'mount -t tmpfs tmpfs /dev/shm && "$@"; code=$?; ls -A /dev/shm >"$0"; exit $code'
    private_shm = ["unshare", "--mount", "sh", "-c", script, str(folders[0] / "shm")]
    with (
        hangguard(folders[0], "demo", "--json", inside=private_shm) as as_json,
        on_a_terminal(folders[1], 100, "demo") as (shown, read, screen),
    ):
        poll(lambda: read() and shown.process.poll() is not None, 60.0)
        frames = read()
        assert (as_json.wait(60.0), shown.wait()) == (0, 0)
        assert as_json.err == ""
        yield json.loads(as_json.out), screen, frames, folders


def test_the_hang_is_found_in_seconds_and_the_next_attempt_answers(demos):
    document = demos[0]
    assert document["ready"] is True
    assert document["seconds"] < 60
    first, second = document["attempts"]
    keys = {"number", "verdict", "kind", "phase", "still_for", "seconds_to_verdict", "fallbacks", "released"}
    assert keys <= set(first) & set(second)
    assert (first["number"], first["verdict"], first["kind"], first["phase"]) == (1, "stuck", "idle", "graph-capture")
    assert 10 <= first["still_for"] <= first["seconds_to_verdict"] + 0.1
    assert first["seconds_to_verdict"] < 15
    assert first["fallbacks"] == []
    assert (second["number"], second["verdict"], second["fallbacks"]) == (2, "ready", ["no-cuda-graph"])
    assert [first["released"], second["released"]] == ["released", "released"]


@pytest.mark.long
def test_it_leaves_nothing_behind(demos):
    document, _, _, folders = demos
    assert document["left_behind"] == []
    runs = [run.name for folder in folders for run in folder.glob("state/hangguard/runs/*")]
    assert len(runs) == 2
    assert [
        pid for pid, environment in environments() if any(f"HANGGUARD_RUN_ID={r}" in environment for r in runs)
    ] == []
    assert (folders[0] / "shm").read_text() == ""


def test_a_person_sees_it_happen_and_reads_at_the_end_what_happened(demos):
    _, screen, frames, folders = demos
    lines = check_live_lines(frames, 100)
    assert any(re.search(r"attempt 1, \d+ s · graph-capture · nothing moved for [5-9] s", line) for line in lines)
    assert any("attempt 2, " in line for line in lines)
    text = screen.text
    for line in (
        r"STUCK \(idle\) in graph-capture: nothing moved for 1\d s;",
        r"released: nothing of it is left",
        r"trying again with no-cuda-graph \(\+ --disable-cuda-graph\), which alters speed",
        r"READY at http://127\.0\.0\.1:\d+, CHANGED: \+ --disable-cuda-graph",
        r"^attempt +with +verdict +phase +found after +then$",
        r"^1 +as asked for +stuck \(idle\) +graph-capture +1\d\.\d s +released$",
        r"^2 +no-cuda-graph +ready +serving +- +released$",
        r"^Hung at graph-capture, found out 1\d\.\d s after its last movement, ended with proof,$",
        r"^started again with --disable-cuda-graph: it answered a request\.$",
        r"^\d\d s in all\. Left behind: nothing\.$",
    ):
        assert re.search(line, text, re.MULTILINE), f"{line}\n{text}"
    (evidence,) = folders[1].glob("state/hangguard/runs/*/attempt-1.evidence.json")
    assert f"Evidence: {evidence}" in text.replace("\n", "")
    assert json.loads(evidence.read_text())["attempt"]["verdict"]["verdict"] == "stuck"
    assert len(text.rstrip().splitlines()) <= 30, "it fits a screen"


def environments():
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                yield int(entry.name), (entry / "environ").read_text(errors="replace").split("\0")
            except OSError:
                continue
