"""What is kept of an attempt that did not go well: the record, the timeline, the stacks, the end of the log."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from hangguard.facts import Attempt, HeldFiles, Judged, Launch, Sample, Unseen
from hangguard.observe.lane import in_time
from hangguard.redact import redact_argv, secrets_of
from hangguard.store import RunFolder, tail_of

log = logging.getLogger("hangguard")

EVIDENCE_WITHIN = 8.0
"""Seconds that gathering evidence may take before the stop goes on without it."""

WITHIN = 3.0
"""Seconds that a disk may take before the evidence is given up: a full or wedged disk must not hold a stop."""

KEPT_TEXT, KEPT_LINES, KEPT_LINE = 4096, 10, 200
"""Characters of the log above which a kept sample holds this many lines at either end, each cut to this length:
180 samples of a flood would else be half a gigabyte."""

KEPT_FILES = 64


async def write_evidence(folder: RunFolder, attempt: Attempt, samples: tuple[Sample, ...]) -> str | None:
    """Write the evidence file of an attempt; return its path, or ``None`` where that was not possible."""
    if folder.path is None:
        return None
    document = {"schema": 1, "attempt": as_plain(attempt), "samples": as_plain(samples)}
    known = folder.known_secrets | secrets_of(attempt.launch)
    name = f"attempt-{attempt.number}.evidence.json"
    try:
        done = await in_time("evidence", lambda: folder.write_json(name, document, known=known), within=WITHIN)
    except OSError as problem:
        log.warning("the evidence of attempt %d could not be written: %s", attempt.number, problem)
        return None
    if isinstance(done, Unseen):
        log.warning("the evidence of attempt %d could not be written: %s", attempt.number, done.reason)
        return None
    return done


def without_bulk(sample: Sample) -> Sample:
    """Return the sample as it is kept: of a flood only the ends, because the log itself lies beside the evidence."""
    files = sample.files
    if isinstance(files, HeldFiles) and len(files.files) > KEPT_FILES:
        more = f"and {len(files.files) - KEPT_FILES} more, not kept"
        files = replace(files, files=files.files[:KEPT_FILES], left_out=(*files.left_out, more))
    if isinstance(files, HeldFiles):
        sample = replace(sample, files=replace(files, others=files.others[:KEPT_FILES], unproved=()))
    log_ = sample.log
    if isinstance(log_, Unseen) or sum(map(len, log_.lines)) <= KEPT_TEXT:
        return sample
    lines = tuple(line[:KEPT_LINE] for line in (*log_.lines[:KEPT_LINES], *log_.lines[KEPT_LINES:][-KEPT_LINES:]))
    left_out = log_.left_out + len(log_.lines) - len(lines)
    return replace(sample, log=replace(log_, lines=lines, left_out=left_out))


async def read_tail(log_path: str | None) -> tuple[str, ...]:
    """Return the end of the log, or one line that says why there is none."""
    if log_path is None:
        return ("(this run has no log)",)
    try:
        tail = await in_time("tail", lambda: tail_of(log_path), within=WITHIN)
    except OSError as problem:
        return (f"(the log cannot be read: {problem})",)
    return (f"(the log cannot be read: {tail.reason})",) if isinstance(tail, Unseen) else tail


def as_plain(value: object) -> Any:
    """Return facts as JSON-like values: a verdict by its name, what is unseen with its reason."""
    if isinstance(value, Unseen):
        return {"unseen": value.reason}
    if isinstance(value, Launch):
        return _launch(value)
    if is_dataclass(value) and not isinstance(value, type):
        plain = {f.name: as_plain(getattr(value, f.name)) for f in fields(value)}
        return {"verdict": value.verdict, **plain} if isinstance(value, Judged) else plain
    if isinstance(value, (tuple, list, frozenset)):
        return [as_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): as_plain(item) for key, item in value.items()}
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)


def _launch(launch: Launch) -> dict[str, Any]:
    """The environment stays out, all but the names that steer an engine."""
    steering = ("CUDA_", "NCCL_", "VLLM_", "SGLANG_", "SGL_", "TORCH_", "PYTORCH_", "GLOO_", "HF_", "TRITON_")
    return {
        "argv": list(redact_argv(launch.argv)),
        "cwd": launch.cwd,
        "engine": launch.engine,
        "version": launch.version,
        "url": launch.url,
        "model": launch.model,
        "ranks": launch.ranks,
        "notes": list(launch.notes),
        "environment": {name: value for name, value in launch.env if name.startswith(steering)},
    }
