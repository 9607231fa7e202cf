"""What was found on the real engines, as the table of docs/real-engines.md."""

from __future__ import annotations

import os
import platform
import re
import time
from dataclasses import dataclass, field

_PATH = re.compile(r"(?<![\w.])(?:/[^\s/]+)+/")
_PREFIX = re.compile(r"\(\w+ pid=\d+\) ERROR [\d-]+ [\d:]+ \[\S+\] |\[\d{4}-[\d :-]+\] ")
"""What stands before a line of the log: who said it, and when."""

_ROW = re.compile(r"\| [VS]\d")

HEAD = """\
# Real engines

Faults in the real vLLM and the real SGLang, on the CPU, each found by a watch that only reports, and by one look of
`hangguard diagnose` from another environment while it hung. Every row is a test (`tests/real/test_full_*.py`) that
asserts verdict, kind, phase and the first suspect, and how it ended, by a look that is not hangguard's own: nothing of
the server lives, its port is free, and of shared memory and named sockets nothing is left that a member had. Beside it
a program of the same title, files at rest with names like the server's in `/dev/shm` and the temporary folder, and
sockets survive, all of them made after the launch. This page is written by one command and by nothing else; of a part
(`-- -k s4`) it writes the rows anew and keeps the others:

```console
$ nox -s real-full
```

{machine}

*Seconds*: from the last movement to the verdict; for an end, from what was done to the verdict that tells it. *One
look*: what it said, and how long the whole program took, on a machine that the server keeps busy too. *Release*: what
the proof said, and how many names of shared memory and of sockets hangguard itself removed; *unseen*: how many
were made in the last five seconds before their owner was killed, and stay, because nobody knows whose they were; *in
TMPDIR*: how many files the engine left in the temporary folder, of which the release lists the one where the workers of
vLLM have met. *Run*: when, and with which version of the engine.

| | fault | verdict | phase | first suspect | seconds | one look | release | run |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


@dataclass
class Table:
    """One row a scenario, in the order of their numbers."""

    rows: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def add(self, number, fault, watch, verdict, *, healthy=""):
        """Add what was found; ``healthy`` instead of a verdict where nothing must be found."""
        looks = "; ".join(str(look) for look in watch.looks)
        cells = (healthy, "", "", "") if verdict is None else _found(watch, verdict)
        run = f"{time.strftime('%Y-%m-%d')}, {watch.launch.version or '(version not found)'}"
        self.rows[number] = tuple(map(_cell, (number, fault, *cells, looks or "-", _release(watch), run)))

    def keep(self, page):
        """Take from an earlier page the rows that were not made now."""
        for line in page.splitlines():
            if _ROW.match(line):
                cells = tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])
                self.rows.setdefault(cells[0], cells)

    def text(self):
        """Return the page."""
        machine = (
            f"{os.cpu_count()} cores ({platform.machine()}), {platform.system()} "
            f"{platform.release().partition('-')[0]}, Python {platform.python_version()}."
        )
        rows = sorted(self.rows.values(), key=lambda row: _order(row[0]))
        return HEAD.format(machine=machine) + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _found(watch, verdict):
    kind = f"{verdict.verdict} ({verdict.kind})" if verdict.kind else verdict.verdict
    suspects = getattr(verdict, "suspects", ())
    who = _PATH.sub("", _PREFIX.sub("", verdict.why.partition(";")[0]))[:160]
    if suspects:
        first = suspects[0]
        place = f" in `{first.at[0]}`" if first.at else f": {first.note}" if first.note else ""
        who = f"`{first.title[:40]}`{place}"
    seconds = verdict.still_for
    if verdict.verdict == "exited":
        at = watch.fault_at
        seconds = None if at is None else watch.verdicts()[-1][0] - at
    return kind, verdict.phase, who, "-" if seconds is None else f"{seconds:.1f}"


def _release(watch):
    removed = sum(file.answer == "removed" for file in watch.release.files)
    told = [watch.release.answer, f"removed: {removed}" if removed else ""]
    told.append(f"unseen: {watch.left_unseen}" if watch.left_unseen else "")
    told.append(f"in TMPDIR: {len(watch.left_in_temp)}" if watch.left_in_temp else "")
    return "; ".join(filter(None, told))


def _cell(text):
    return text.replace("|", "\\|").replace("\n", " ")


def _order(number):
    letters = number.lstrip("VS")
    digits = re.match(r"\d+", letters)[0]
    return number[0] != "V", int(digits), letters
