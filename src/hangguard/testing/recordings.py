"""Samples read back from an evidence file, or from a recording with one sample a line: to judge them again.

::

    from hangguard.testing.recordings import read_samples
    verdict = assess(read_samples("attempt-1.evidence.json"), rules)

Fields that a recording lacks (it is older than they are) are as unseen as their defaults say.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Union

from hangguard import facts
from hangguard.facts import Sample, Unseen


def read_samples(path: str | os.PathLike[str]) -> tuple[Sample, ...]:
    """Return the samples of an evidence file (``.json``), or of a recording (``.jsonl``, ``.jsonl.gz``).

    Raises :class:`OSError` where it cannot be read, :class:`ValueError` where it holds something else.
    """
    file = Path(path)
    text = gzip.decompress(file.read_bytes()).decode() if file.suffix == ".gz" else file.read_text(encoding="utf-8")
    return tuple(_sample(document) for document in _documents(text, whole=file.suffix == ".json"))


def _documents(text: str, *, whole: bool) -> Iterator[Any]:
    if whole:
        yield from json.loads(text)["samples"]
        return
    for line in text.splitlines():
        document = json.loads(line)
        if "event" not in document:
            yield document


def _sample(document: Any) -> Sample:
    sample = from_plain(Sample, document)
    if not isinstance(sample, Sample):
        msg = f"no sample: {str(document)[:80]}"
        raise ValueError(msg)  # noqa: TRY004 - the content is wrong, not a type of ours
    return sample


def from_plain(kind: Any, value: Any) -> Any:
    """Return the fact of this type that :func:`hangguard.supervision.evidence.as_plain` made this value of."""
    if isinstance(value, dict) and set(value) == {"unseen"}:
        return Unseen(value["unseen"])
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        return _of_union(arguments, value)
    if origin is tuple and isinstance(value, list):
        kinds = [arguments[0]] * len(value) if arguments[-1:] == (Ellipsis,) else list(arguments)
        return tuple(from_plain(k, v) for k, v in zip(kinds, value, strict=True))
    if is_dataclass(kind) and isinstance(kind, type) and isinstance(value, dict):
        known = _types_of(kind)
        return kind(**{name: from_plain(known[name], v) for name, v in value.items() if name in known})
    return value


def _of_union(kinds: tuple[Any, ...], value: Any) -> Any:
    """The one alternative that the value can be: its shape tells, for all facts are built so."""
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    for kind in kinds:
        shape = list if typing.get_origin(kind) is tuple else dict if is_dataclass(kind) else None
        if kind is not Unseen and shape is not None and isinstance(value, shape):
            return from_plain(kind, value)
    return value


@lru_cache(maxsize=128)
def _types_of(kind: type) -> dict[str, Any]:
    own = vars(sys.modules[kind.__module__])  # names that the facts do not export, and those imported for types only
    hints = typing.get_type_hints(kind, own | vars(facts) | {"Literal": Literal})
    return {field.name: hints[field.name] for field in fields(kind)}
