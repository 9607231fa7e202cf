"""From the answer of NCCL's RAS thread to the communicators. Pure.

Two forms: JSON (since NCCL 2.28.7), and a report for people. The report lists only what is out of the ordinary.
Source: src/ras/client_support.cc of https://github.com/NVIDIA/nccl, 2.24.3 to 2.30.7.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hangguard.facts import Communicator

_SUCCESS, _IN_PROGRESS = 0, 7
"""ncclResult_t, nccl.h."""
_MOST_RANKS = 1 << 16

# 2.28.7 and 2.28.9 forget a comma in the description of a missing rank.
_NO_COMMA = re.compile(r'("nvml_dev":\s*-?\d+)(\s*"status")')


class UnreadableError(ValueError):
    """The answer is not of a form that is known."""


def read_json(text: str) -> tuple[Communicator, ...]:
    """Return the communicators of a JSON answer. Raises :class:`UnreadableError`."""
    try:
        document, _end = json.JSONDecoder().raw_decode(_NO_COMMA.sub(r"\1,\2", text).lstrip())
        told = [_of_json(entry) for entry in document["communicators"]]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as problem:
        raise UnreadableError(f"{type(problem).__name__}: {problem}") from problem
    return tuple(communicator for communicator in told if communicator.size > 0)  # 0: still being made


def _of_json(entry: dict[str, Any]) -> Communicator:
    ranks = {int(rank["rank"]): rank for rank in entry["ranks"]}
    missing = {int(rank["rank"]): rank for rank in entry["missing_ranks"]}
    status = {number: rank["status"] for number, rank in ranks.items()}
    pids = {number: int(rank["pid"]) for number, rank in (ranks | missing).items()}
    counts = {number: {str(k): int(v) for k, v in rank["collective_counts"].items()} for number, rank in ranks.items()}
    return Communicator(
        name=str(entry["hash"]).removeprefix("0x"),
        size=int(entry["size"]),
        missing_ranks=tuple(sorted(missing)),
        uninitialised_ranks=_where(status, lambda told: told["init_state"] == _IN_PROGRESS),
        failed_ranks=_where(
            status,
            lambda told: (
                told["abort_flag"] or not {told["init_state"], told["async_error"]} <= {_SUCCESS, _IN_PROGRESS}
            ),
        ),
        behind_ranks=_behind(counts),
        counts=tuple(sorted((number, sum(count.values())) for number, count in counts.items())),
        pids=tuple(sorted((number, pid) for number, pid in pids.items() if pid > 0)),
    )


def _where(status: dict[int, dict[str, Any]], holds: Callable[[dict[str, Any]], bool]) -> tuple[int, ...]:
    return tuple(sorted(number for number, told in status.items() if holds(told)))


def _behind(counts: dict[int, dict[str, int]]) -> tuple[int, ...]:
    """Return the ranks that have launched fewer operations of some kind than another rank."""
    most: dict[str, int] = {}
    for count in counts.values():
        for kind, launched in count.items():
            most[kind] = max(launched, most.get(kind, 0))
    return tuple(sorted(n for n, count in counts.items() if any(count.get(kind, 0) < most[kind] for kind in most)))


# "    0         1         4         8        32        32   RUNNING  MISMATCH"
_GROUP = re.compile(r"\s*(\d+)\s+(\d+)\s+\d+\s+[\d-]+\s+(\d+)\s+\d+\s+([A-Z]+)\s+([A-Z,]+)\s*")
_SECTION = re.compile(r"#(\d+)-(\d+) \(([0-9a-f]+)\) (INCOMPLETE|ERROR|MISMATCH)\s*")
_RANK = re.compile(
    r"\s+Rank (?P<rank>\d+)"
    r"(?: has status (?P<status>[A-Z]+)| has launched up to operation (?P<launched>\d+)"
    r"|(?P<none> has not launched any operations)| reported (?P<error>[\w ]+?))?"
    r" -- (?:GPU .*? managed by process (?P<pid>\d+) on node \S+|\[process information not found\])\s*"
)
_SEVERAL = re.compile(
    r"\s+(?P<how_many>\d+) ranks (?:have status (?P<status>[A-Z]+)|have launched up to operation (?P<launched>\d+)"
    r"|(?P<none>have not launched any operations)|reported (?P<error>[\w ]+))\s*"
)
_COUNTS = re.compile(r"\s+Communicator ranks have different (\w+) operation counts\s*")
_UNKNOWN = re.compile(r"\s+(?:The unknown ranks: |Rank )([\d,]+)(?: has status UNKNOWN)?\s*")
_ABSENT = ("NOCOMM", "UNKNOWN")
"""Status of a rank whose process answered that it has no such communicator; 2.24 and 2.25 call it UNKNOWN."""


def read_text(text: str) -> tuple[Communicator, ...]:
    """Return the communicators of the report for people. Raises :class:`UnreadableError`.

    Ranks that are in order are not in the report. Where it says that some ranks differ, and not which, there is no
    answer: it would read as if none did.
    """
    if "No communicator data collected!" in text:
        return ()
    groups: list[re.Match[str]] = []
    details: dict[tuple[int, int], _Reading] = {}
    reading: _Reading | None = None
    for line in text.splitlines():
        if group := _GROUP.fullmatch(line):
            groups.append(group)
        elif section := _SECTION.fullmatch(line):
            which, what = (int(section[1]), int(section[2])), section[4]
            reading = details.setdefault(which, _Reading(section[3]))
            reading.begin(what)
        elif reading is not None and not line.startswith(" ") and line.strip():
            reading = None  # another heading
        elif reading is not None:
            reading.read(line)
    if not groups or "Warnings\n" not in text:
        raise UnreadableError("the report has no table of communicators, or no end")
    return tuple(_of_groups(groups, details))


def _of_groups(groups: Iterable[re.Match[str]], details: dict[tuple[int, int], _Reading]) -> Iterator[Communicator]:
    told = 0
    for group in groups:
        number, how_many, size, status = int(group[1]), int(group[2]), int(group[3]), group[4]
        told += how_many
        if size > _MOST_RANKS or told > _MOST_RANKS:
            raise UnreadableError(f"a communicator of {size} ranks")
        for index in range(how_many):
            reading = details.get((number, index))
            if reading is None and group[5] != "OK":
                raise UnreadableError(f"the report does not say what is {group[5]}")
            yield (reading or _Reading(f"#{number}-{index}")).communicator(size, status)


@dataclass
class _Reading:
    """What the sections of one communicator said so far."""

    name: str
    missing: set[int] = field(default_factory=set)
    uninitialised: set[int] = field(default_factory=set)
    initialised: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    counts: dict[str, dict[int, int]] = field(default_factory=dict)
    pids: dict[int, int] = field(default_factory=dict)
    unnamed: list[tuple[int, str, dict[str, str | None]]] = field(default_factory=list)
    """Numbers of ranks that a line was about, as long as the ranks themselves were not listed."""
    _section: str = ""
    _about: dict[str, str | None] = field(default_factory=dict)
    _kind: str = ""

    def begin(self, section: str) -> None:
        self._section, self._about, self._kind = section, {}, ""

    def read(self, line: str) -> None:
        """Take in one indented line."""
        if several := _SEVERAL.fullmatch(line):
            self._about = several.groupdict()
            self.unnamed.append((int(several["how_many"]), self._kind, self._about))
        elif rank := _RANK.fullmatch(line):
            told = rank.groupdict()
            if rank["pid"] is not None:
                self.pids[int(rank["rank"])] = int(rank["pid"])
            if any(told[key] is not None for key in ("status", "launched", "none", "error")):
                self._note(int(rank["rank"]), self._kind, told)
            else:
                self._forget_unnamed()
                self._note(int(rank["rank"]), self._kind, self._about)
        elif counts := _COUNTS.fullmatch(line):
            self._kind, self._about = counts[1], {}
        elif unknown := _UNKNOWN.fullmatch(line):
            self._forget_unnamed()
            self.missing.update(int(number) for number in unknown[1].split(","))
        elif "different status" in line:
            self._kind, self._about = "", {}

    def _forget_unnamed(self) -> None:
        """The ranks of the last line about several of them are listed below it, so none is unnamed."""
        if self.unnamed and self.unnamed[-1][2] is self._about:
            self.unnamed.pop()

    def _note(self, rank: int, kind: str, told: dict[str, str | None]) -> None:
        status = told.get("status")
        if self._section == "INCOMPLETE" or status in _ABSENT:
            self.missing.add(rank)
        elif self._section == "ERROR" or status == "ABORT":
            self.failed.add(rank)
        elif status is not None:
            (self.uninitialised if status == "INIT" else self.initialised).add(rank)
        elif told.get("none") is not None or told.get("launched") is not None:
            self.counts.setdefault(kind, {})[rank] = int(told.get("launched") or 0)

    def communicator(self, size: int, status: str) -> Communicator:
        """Return the communicator; ``status`` is that of its group, the furthest of all its ranks."""
        for how_many, kind, about in self.unnamed:
            self._note_the_rest(how_many, kind, about, size)
        if status == "INIT":
            self.uninitialised |= set(range(size)) - self.missing - self.failed
        counts = self._counts_by_rank()
        sums = {rank: sum(count.values()) for rank, count in counts.items()}
        return Communicator(
            name=self.name,
            size=size,
            missing_ranks=tuple(sorted(self.missing)),
            uninitialised_ranks=tuple(sorted(self.uninitialised)),
            failed_ranks=tuple(sorted(self.failed)),
            behind_ranks=_behind(counts),
            counts=tuple(sorted(sums.items())) if len(self.counts) == 1 else (),
            pids=tuple(sorted(self.pids.items())),
        )

    def _note_the_rest(self, how_many: int, kind: str, about: dict[str, str | None], size: int) -> None:
        """Ranks that were only counted are those that are named nowhere under the same heading, if that fits."""
        status = about.get("status")
        if about.get("error") is not None:
            raise UnreadableError(f"the report does not say which {how_many} ranks failed")
        named = (
            set(self.counts.get(kind, {})) if status is None else self.uninitialised | self.initialised | self.failed
        )
        rest = set(range(size)) - named - self.missing
        if len(rest) != how_many:
            raise UnreadableError(f"the report does not say which {how_many} ranks differ")
        self._section = "MISMATCH"
        for rank in rest:
            self._note(rank, kind, about)

    def _counts_by_rank(self) -> dict[int, dict[str, int]]:
        counts: dict[int, dict[str, int]] = {}
        for kind, by_rank in self.counts.items():
            for rank, launched in by_rank.items():
                counts.setdefault(rank, {})[kind] = launched
        return counts
