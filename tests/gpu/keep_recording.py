"""Make test data of what ``test_two_gpus.py`` and ``test_tensor_parallel.py`` have recorded.

usage: keep_recording.py RECORD_FOLDER DATA_FOLDER

Writes ``h200x2-FAULT.jsonl.gz`` and ``h200x2-rows.jsonl`` (another prefix: ``HANGGUARD_PREFIX``), and of real engines
``tp2x2-ENGINE-FAULT.jsonl.gz`` (two ranks on two boards) and ``tp-rows.jsonl``, without paths of the machine. The page
of the documentation is made of these by ``several_gpus_page.py``.
"""

import gzip
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from recording import clean, write

AFTER = 3.0
"""Seconds of samples that are kept after the verdict."""
TITLE = 160
"""Characters of a command line that are kept of real engines and their compilers."""


def samples_of(record, series):
    found = {}
    with gzip.open(record / f"{series}-all.jsonl.gz", "rt") as file:
        for line in file:
            found.setdefault(json.loads(line)["scenario"], []).append(clean(line.strip()))
    return found


def kept(lines, settled_at):
    """The samples up to a little after the verdict; looks after the stop see nobody any more."""
    return [line for line in lines if json.loads(line)["t"] <= settled_at + AFTER]


def slim(line):
    """A sample without what fills most of it where hundreds of compilers run: their ends, and their command lines."""
    sample = json.loads(line)
    tree = sample["tree"]
    if "unseen" in tree:
        return line
    tree["departed"] = [d for d in tree["departed"] if d["exit_code"] != 0 or "::" in d["title"]]
    for process in (*tree["members"], *tree["departed"]):
        process["title"] = process["title"][:TITLE]
    return json.dumps(sample)


def rows_of(record, series):
    """The rows of a series, of one that was run again the last; none, if it was not recorded."""
    path = record / f"{series}-rows.jsonl"
    rows = [json.loads(clean(line)) for line in path.read_text().splitlines()] if path.exists() else []
    return list({row["scenario"]: row for row in rows}.values())


def keep_two(record, data):
    prefix = os.environ.get("HANGGUARD_PREFIX", "h200x2")
    rows = rows_of(record, "two")
    samples = samples_of(record, "two") if rows else {}
    for row in rows:
        write(kept(samples[row["scenario"]], row["settled_at"]), data / f"{prefix}-{row['scenario']}.jsonl.gz")
    if rows:
        (data / f"{prefix}-rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def keep_engines(record, data):
    """The healthy start of an engine is the beginning of what one of its ranks was stopped in: it has no file."""
    path = data / "tp-rows.jsonl"
    before = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    found = {(row["scenario"], row["boards"]): row for row in before}
    rows = rows_of(record, "engines")
    samples = samples_of(record, "engines") if rows else {}
    for row in rows:
        found[row["scenario"], row["boards"]] = row
        name = f"tp{row['ranks']}x{row['boards']}-{row['scenario']}.jsonl.gz"
        if not row["scenario"].endswith("-healthy"):
            write(map(slim, kept(samples[row["scenario"]], row["settled_at"])), data / name)
    path.write_text("".join(json.dumps(row) + "\n" for _, row in sorted(found.items())))


def main():
    record, data = Path(sys.argv[1]), Path(sys.argv[2])
    keep_two(record, data)
    keep_engines(record, data)


if __name__ == "__main__":
    main()
