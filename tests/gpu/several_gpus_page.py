"""The page of the documentation about several GPUs, made of the recordings in ``tests/judge/data``.

usage: several_gpus_page.py > docs/several-gpus.md

What the boards, NCCL and the release showed stands in the rows as it was recorded; the verdicts of the real engines are
those of the code of now over the recorded samples.
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))

from hangguard.judge.farewell import FAREWELL  # noqa: E402
from tp_recordings import DATA, ROWS, judged_again  # noqa: E402

NOTHING = "none"
FOUND = {"stuck", "broken", "expired"}

RANKS_HEAD = """# Several GPUs: real hangs between real ranks

Recorded on H200 GPUs of one host, NVLink multicast off. The samples are test data: every verdict on this page is judged
again from them, on any machine, by `tests/judge/test_h200x2.py` and `tests/judge/test_tp_recordings.py`, and the page
is written from them by `python tests/gpu/several_gpus_page.py`.

## Ranks of NCCL

{boards} GPUs, one rank on each. The server is `tests/gpu/programs/ranks_server.py`: it loads, makes a communicator,
runs all-reduces, captures one in a CUDA graph, and answers only with a further one (`pytest tests/gpu -m gpu2`).

"""
RANKS_COLUMNS = (
    "what was done", "verdict", "phase", "first suspect", "what NCCL's RAS said", "seconds without product",
    "watts (utilisation)", "release", "left in /dev/shm",
)  # fmt: skip
RANKS_WHAT = {
    "healthy": "nothing",
    "deadlock": "all ranks deadlocked on the host at graph capture",
    "late": "one rank never comes to the communicator's init",
    "killed": "one rank SIGKILLed inside a collective",
    "absent": "one rank never calls the collective",
    "stopped": "one rank SIGSTOPped inside a collective",
    "spin": "a kernel on one rank's GPU never ends",
}

ENGINES_HEAD = """
## Real vLLM and SGLang with tensor parallelism

Two ranks, a Llama of 4 layers without weights, NCCL for every all-reduce, four clients that ask without a pause. A row
on one GPU has both ranks there: NCCL takes each for a host of its own (`NCCL_HOSTID`), and they talk through sockets.
*Deadlock*: both ranks wait for themselves where the CUDA graphs are captured; hangguard ends the server and starts it
with one changed option, and that one answers: it is the one of which a rank is killed then. (vLLM's lock on one GPU
stood in a function by which no phase is known: there the phase is the one before.) It is run again by
`pytest tests/gpu -m engines_on_gpus`.

"""
ENGINES_COLUMNS = (
    "engine, GPUs", "what was done", "verdict", "phase", "whom it names", "what NCCL's RAS said",
    "seconds to the verdict", "watts (utilisation)", "memory afterwards", "release", "started again with",
)  # fmt: skip
ENGINES_WHAT = {
    "healthy": "nothing; requests are worked on",
    "stopped": "the last rank SIGSTOPped in a step",
    "deadlock": "deadlock of both ranks at graph capture",
    "killed": "the last rank SIGKILLed in a step",
}
ENDED_EARLY = {("sglang-killed", 1)}
"""Recorded, and ended in the midst of its farewell by the rules of then: test data, and no row."""

ENGINES_NOTES = """
What the real engines taught:

- **The rank that dies is not the one that complains.** SGLang's other rank said `Scheduler hit an exception` within the
  same second, with an error of NCCL or gloo. A member that a signal ended while all others lived on is named before
  whatever they say after it.
- **A crash takes its time.** With the other rank inside a collective of NCCL, SGLang waits for 60 s for CUDA core dumps
  before it ends. Until then the verdict is *waiting* (farewell), and names the dead rank.
- **A start can fail and never end.** vLLM 0.26 on two GPUs, with the fused all-reduces that it takes by itself, said
  `EngineCore failed to start` (an error of cuBLAS after FlashInfer had made its workspace for them), and lived on until
  it was ended. That is *broken* (failed), {farewell:.0f} s after the last words, with their reason. Without
  them it starts.
- **vLLM's fused all-reduce uses NVLink multicast** (FlashInfer's backend `mnnvl`), whatever NCCL is told. Where
  multicast must stay off: `--compilation-config '{{"pass_config": {{"fuse_allreduce_rms": false}}}}'`; in SGLang
  `--enforce-disable-flashinfer-allreduce-fusion`.
"""


def named(row):
    """What NCCL said of the ranks, and whether it agrees with the first suspect."""
    if "unseen" in row["nccl"]:
        return row["nccl"]["unseen"].split(":")[0]
    counts = "; ".join(", ".join(f"rank {r}: {n}" for r, n in c["counts"]) for c in row["nccl"] if c["counts"])
    said = ", ".join(f"{what.removesuffix('_ranks')} {ranks}" for what, ranks in row["nccl_names"].items())
    if not said:
        return f"nobody is behind ({counts or 'no counts'})"
    first = row["suspects"][0]["rank"] if row["suspects"] else ""
    agreed = any(f"TP{rank}" == first for ranks in row["nccl_names"].values() for rank in ranks)
    return f"{said} ({counts or 'no counts'}): {'agreed' if agreed else 'did not agree'}"


def watts_of(row):
    return ", ".join(f"{_number(gpu['watts'])} W ({_number(gpu['percent'])} %)" for gpu in row["gpus"]) or NOTHING


def _number(value):
    return f"{value:.0f}" if isinstance(value, (int, float)) else "?"


def release_of(row):
    release = row["release"] or {"items": [], "seconds": 0.0}
    answers = {item["answer"] for item in release["items"]}
    return f"{', '.join(sorted(answers)) or 'unknown'}, {release['seconds']:.1f} s"


def line_of_ranks(row):
    first = row["suspects"][0] if row["suspects"] else None
    is_hang = row["verdict"] in FOUND
    return (
        RANKS_WHAT[row["scenario"]],
        f"{row['verdict']} {row['kind']}".strip(),
        row["phase"],
        f"{first['rank'] or first['title']} ({first['note'] or 'no odd one'})" if first else NOTHING,
        named(row) if is_hang else NOTHING,
        str(row["seconds_unproductive"]) if is_hang else NOTHING,
        watts_of(row),
        release_of(row),
        str(len(row["shm_left"])),
    )


def line_of_engine(row):
    verdict = judged_again(row)[-1].verdict
    fault = row["scenario"].partition("-")[2]
    is_healthy = fault == "healthy"
    suspects = getattr(verdict, "suspects", ())
    names = ", ".join(f"{s.rank} ({s.note or s.at[0]})" for s in suspects[: row["ranks"]] if s.rank)
    seconds = row["seconds_from_signal"] or row["seconds_unproductive"]
    return (
        f"{row['engine']} {row['version']}, {row['boards']}",
        ENGINES_WHAT[fault],
        f"{verdict.verdict} {verdict.kind}".strip(),
        verdict.phase,
        NOTHING if is_healthy else names or verdict.why.partition(";")[0],
        NOTHING if is_healthy else named(row),
        NOTHING if is_healthy else f"{seconds:.1f}",
        watts_of(row),
        "as the attempt before" if is_healthy else ", ".join(f"{mib:.0f} MiB" for mib in row["memory_mib"]["after"]),
        NOTHING if is_healthy else release_of(row),
        ", ".join(row["changes"]) or NOTHING,
    )


def table(columns, lines):
    rows = ["| " + " | ".join(cell.replace("|", "/") for cell in line) + " |\n" for line in lines]
    return f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}\n" + "".join(rows)


def page():
    """Return the whole page."""
    ranks = [json.loads(line) for line in (DATA / "h200x2-rows.jsonl").read_text().splitlines()]
    engines = [row for row in ROWS if (row["scenario"], row["boards"]) not in ENDED_EARLY]
    order = list(ENGINES_WHAT)
    engines.sort(key=lambda row: (row["engine"], row["boards"], order.index(row["scenario"].partition("-")[2])))
    return (
        RANKS_HEAD.format(boards=ranks[0]["ranks"])
        + table(RANKS_COLUMNS, map(line_of_ranks, ranks))
        + ENGINES_HEAD
        + table(ENGINES_COLUMNS, map(line_of_engine, engines))
        + ENGINES_NOTES.format(farewell=FAREWELL)
    )


if __name__ == "__main__":
    print(page(), end="")
