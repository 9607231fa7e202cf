"""What the library calls its arguments, in the words of the command line. The texts themselves stand only there."""

from __future__ import annotations

import re

TYPED = {
    "cwd": "working directory",
    "engine": "--engine",
    "env": "the environment",
    "fallbacks": "--fallbacks",
    "log": "--log",
    "match": "--match",
    "on_death": "--on-death",
    "on_hang": "--on-hang",
    "patience": "--patience",
    "pid": "PID",
    "ready": "--ready-path",
    "ready_within": "--ready-within",
    "run_dir": "--run-dir",
    "started": "--started",
    "url": "--url",
    "within": "--within",
}
"""How an argument of the library is given on the command line."""

_NAMES = "|".join(TYPED)
_LEAD = r"(^|\b(?:and|another|by|give|in|needs|or|with) )"
_BARE = r"(?=[\s,.;:)]|$)"
_ARGUMENT = re.compile(rf"""{_LEAD}({_NAMES})=(?:'([^']*)'|"([^"]*)"|{_BARE})""", re.IGNORECASE)
"""``Give url='http://…'``, ``pid=, url= or match=``. Not just anywhere: what a server says holds such words too."""
_IN_A_ROW = re.compile(rf"(, )({_NAMES})={_BARE}")
_NAMED = re.compile(r"^(match|within)(?= is )|(?<=\braise )(ready_within)\b|\bLimits\.(patience|ready_within)\b")


def as_typed(text: str) -> str:
    """Return a text of the library's with its arguments as options of the command line."""
    text = _IN_A_ROW.sub(_option, _ARGUMENT.sub(_option, text))
    text = _NAMED.sub(lambda found: TYPED[found[1] or found[2] or found[3]], text)
    return text.replace("what diagnose() shows", "what hangguard diagnose --json shows")


def _option(found: re.Match[str]) -> str:
    lead, name, *values = found.groups()
    value = next((value for value in values if value is not None), None)
    the = "the " if name == "cwd" and not lead.startswith("another") else ""
    return f"{lead}{the}{TYPED[name.lower()]}" + ("" if value is None else f" {value or repr(value)}")
