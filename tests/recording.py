"""Samples of a real run as test data: taken while it runs, without paths of the machine, one a line."""

from __future__ import annotations

import gzip
import json
import os
import re
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

import hangguard.observe
from hangguard.supervision.evidence import as_plain, without_bulk

TOPS = "opt|root|home|tmp|work|srv|mnt|var|workspace|data|scratch|usr/local"
PACKAGES = re.compile(rf"/(?:{TOPS}|usr)(?:/[\w.+@~-]+)*?/(?=(?:site-packages|dist-packages|python3\.\d+)/)")
OTHERS = re.compile(rf"/(?:{TOPS})(?:/[\w.+@~-]+)*/(?=[\w.+@~-]+)")
BOARD = re.compile(r"GPU-[0-9a-f]{8}-[0-9a-f-]{27}")


@contextmanager
def taking(samples):
    """Add every sample that is taken meanwhile."""
    plain = hangguard.observe.Observer.take_sample

    async def take_sample(self, *ask):
        sample = await plain(self, *ask)
        samples.append(without_bulk(sample))
        return sample

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hangguard.observe.Observer, "take_sample", take_sample)
        yield


@asynccontextmanager
async def recorded(name, watched):
    """Enter ``watched``; where ``HANGGUARD_RECORD`` names a folder, keep its samples there as ``NAME.jsonl.gz``."""
    samples = []
    try:
        with taking(samples):
            async with watched as watch:
                yield watch
    finally:
        if folder := os.environ.get("HANGGUARD_RECORD"):
            write([clean(json.dumps(as_plain(s))) for s in samples], Path(folder) / f"{name}.jsonl.gz")


def clean(text):
    """Return the text without paths and names of the machine."""
    boards = {}
    text = OTHERS.sub("", PACKAGES.sub("", text))
    return BOARD.sub(lambda found: boards.setdefault(found[0], f"GPU-{len(boards)}"), text)


def write(lines, path):
    """Write the lines; the same lines give the same file."""
    with path.open("wb") as out, gzip.GzipFile(filename="", mode="wb", fileobj=out, mtime=0) as file:
        file.write(("\n".join(lines) + "\n").encode())
