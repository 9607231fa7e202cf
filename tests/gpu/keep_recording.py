"""Make test data and a page of the documentation of what ``test_two_gpus.py`` has recorded.

usage: keep_recording.py RECORD_FOLDER DATA_FOLDER [PAGE]

Writes ``h200x2-FAULT.jsonl.gz`` and ``h200x2-rows.jsonl`` (another prefix: ``HANGGUARD_PREFIX``) into DATA_FOLDER,
without paths of the machine, and the table into PAGE.
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
HEAD = """# Several GPUs: real hangs between real ranks

{boards}, one rank on each, NCCL, NVLink multicast off. The server is `tests/gpu/programs/ranks_server.py`: it loads,
makes a communicator, runs all-reduces, captures one in a CUDA graph, and answers only with a further one. Every
row was made by `tests/gpu/test_two_gpus.py`; its samples are judged again, on any machine, by
`tests/judge/test_h200x2.py`.

"""
COLUMNS = (
    "what was done", "verdict", "phase", "first suspect", "what NCCL's RAS said", "seconds without product",
    "watts (utilisation)", "release", "left in /dev/shm",
)  # fmt: skip
NOTHING = "none"
WHAT = {
    "healthy": "nothing",
    "deadlock": "all ranks deadlocked on the host at graph capture",
    "late": "one rank never comes to the communicator's init",
    "killed": "one rank SIGKILLed inside a collective",
    "absent": "one rank never calls the collective",
    "stopped": "one rank SIGSTOPped inside a collective",
    "spin": "a kernel on one rank's GPU never ends",
}


def samples_of(record):
    found = {}
    with gzip.open(record / "two-all.jsonl.gz", "rt") as file:
        for line in file:
            found.setdefault(json.loads(line)["scenario"], []).append(clean(line.strip()))
    return found


def kept(lines, settled_at):
    """The samples up to a little after the verdict; looks after the stop see nobody any more."""
    return [line for line in lines if json.loads(line)["t"] <= settled_at + AFTER]


def named(row):
    """What NCCL said of the ranks, and whether it agrees with the first suspect."""
    if "unseen" in row["nccl"]:
        return row["nccl"]["unseen"].split(":")[0]
    counts = "; ".join(", ".join(f"rank {r}: {n}" for r, n in c["counts"]) for c in row["nccl"])
    said = ", ".join(f"{what.removesuffix('_ranks')} {ranks}" for what, ranks in row["nccl_names"].items())
    if not said:
        return f"nobody is behind ({counts or 'no counts'})"
    first = row["suspects"][0]["rank"] if row["suspects"] else ""
    agreed = any(f"TP{rank}" == first for ranks in row["nccl_names"].values() for rank in ranks)
    return f"{said} ({counts or 'no counts'}): {'agreed' if agreed else 'did not agree'}"


def line_of(row):
    release = row["release"] or {"items": [], "seconds": 0.0}
    answers = {item["answer"] for item in release["items"]}
    first = row["suspects"][0] if row["suspects"] else None
    suspect = f"{first['rank'] or first['title']} ({first['note'] or 'no odd one'})" if first else NOTHING
    watts = ", ".join(f"{_number(gpu['watts'])} W ({_number(gpu['percent'])} %)" for gpu in row["gpus"])
    cells = [
        WHAT.get(row["scenario"], row["scenario"]),
        f"{row['verdict']} {row['kind']}".strip(),
        row["phase"],
        suspect,
        named(row) if row["verdict"] in {"stuck", "broken", "expired"} else NOTHING,
        str(row["seconds_unproductive"]) if row["verdict"] in {"stuck", "broken", "expired"} else NOTHING,
        watts or NOTHING,
        f"{', '.join(sorted(answers)) or 'unknown'}, {release['seconds']:.1f} s",
        str(len(row["shm_left"])),
    ]
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def _number(value):
    return f"{value:.0f}" if isinstance(value, (int, float)) else "?"


def main():
    record, data = Path(sys.argv[1]), Path(sys.argv[2])
    prefix = os.environ.get("HANGGUARD_PREFIX", "h200x2")
    rows = [json.loads(clean(line)) for line in (record / "two-rows.jsonl").read_text().splitlines()]
    rows = list({row["scenario"]: row for row in rows}.values())  # of one that was run again the last
    samples = samples_of(record)
    for row in rows:
        write(kept(samples[row["scenario"]], row["settled_at"]), data / f"{prefix}-{row['scenario']}.jsonl.gz")
    (data / f"{prefix}-rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    head = [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]
    page = HEAD.format(boards=f"{rows[0]['ranks']} GPUs of one host") + "\n".join([*head, *map(line_of, rows), ""])
    if len(sys.argv) > 3:
        Path(sys.argv[3]).write_text(page)
    else:
        print(page)


if __name__ == "__main__":
    main()
