"""What the engines have in common: how versions compare, how Python is started, and what every Python server logs."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hangguard.changes import has_flag, with_flag, words_of
from hangguard.engines.base import Engine
from hangguard.facts import Launch, Marker
from hangguard.wrappers import base_name, unwrap

# PEP 440 as far as engines use it: 0.5.8.post1, 0.33.0rc1, 0.32.0+cpu, 0.11.1.dev3+gabc.
_VERSION = re.compile(
    r"v?(?P<release>\d+(?:\.\d+)*)"
    r"(?:[.-]?(?P<pre>a|b|rc)(?P<pre_number>\d+))?"
    r"(?:[.-]?post(?P<post>\d+))?"
    r"(?:[.-]?dev(?P<dev>\d+))?"
    r"(?:\+[\w.-]+)?",
    re.ASCII,
)
_PRE = {"a": 1, "b": 2, "rc": 3}
_FINAL = 4
_NEVER_DEV = float("inf")

PYTHON = re.compile(r"python(?:\d+(?:\.\d+)*)?t?", re.ASCII)


def version_key(version: str) -> tuple[tuple[int, ...], int, int, int, float] | None:
    """Return a key that sorts as versions do, or ``None`` for what is no version."""
    found = _VERSION.fullmatch(version.strip())
    if found is None:
        return None
    release = [int(part) for part in found["release"].split(".")]
    while release and release[-1] == 0:
        release.pop()
    dev = float(found["dev"]) if found["dev"] else _NEVER_DEV
    # X.devN comes before X's own pre-releases; X.rcN.devM just before X.rcN.
    bare_dev = found["dev"] is not None and found["pre"] is None and found["post"] is None
    pre = 0 if bare_dev else _PRE[found["pre"]] if found["pre"] else _FINAL
    post = int(found["post"]) + 1 if found["post"] else 0
    return (tuple(release), pre, int(found["pre_number"] or 0), post, dev)


def in_range(version: str | None, since: str | None, until: str | None) -> bool:
    """Tell whether the version lies between the two (inclusive). An unknown version lies everywhere."""
    key = version_key(version) if version else None
    if key is None:
        return True
    lowest = version_key(since) if since else None
    highest = version_key(until) if until else None
    return (lowest is None or key >= lowest) and (highest is None or key <= highest)


def markers_for(engine: Engine, version: str | None) -> tuple[Marker, ...]:
    """Return the log markers of this version; of an unknown version, all."""
    return tuple(marker for marker in engine.markers if in_range(version, marker.since, marker.until))


def telling_of(engine: Engine) -> tuple[str, ...]:
    """Return the patterns of log lines that must be passed on even out of a flood."""
    quiet = (pattern for q in engine.quiet_lines for pattern in (q.begins, q.ends))
    return (*(m.pattern for m in engine.markers), *(s.pattern for s in engine.symptoms), *quiet)


def accepts(launch: Launch, option: str, *, since: str | None = None, until: str | None = None) -> bool:
    """Tell whether the launch's engine takes the option.

    What the installed source spells decides; where it was not found, the versions between which releases
    were read to have it.
    """
    if launch.options is not None:
        return option in launch.options
    return in_range(launch.version, since, until)


def is_given(argv: Sequence[str], option: str) -> bool:
    """Tell whether a long option is there, written out or abbreviated as argparse allows.

    A prefix that fits several options ends the server with a usage error, so it need not be told apart.
    """
    words = {word.partition("=")[0].replace("_", "-") for word in argv}
    return has_flag(argv, option) or any(
        len(word) > len("--") and option.startswith(word) for word in words if word.startswith("--")
    )


def without_custom_all_reduce(launch: Launch, *, recognised: bool) -> Launch | None:
    """Add ``--disable-custom-all-reduce``, which both engines spell alike in all releases read."""
    option = "--disable-custom-all-reduce"
    one_rank = launch.ranks <= 1 and launch.nodes <= 1
    if not recognised or one_rank or is_given(words_of(launch), option) or not accepts(launch, option):
        return None
    return with_flag(launch, option, replacing=("--no-disable-custom-all-reduce",))


def after_python_module(argv: Sequence[str], modules: Sequence[str]) -> int | None:
    """Return the index after ``python [flags] -m MODULE``, if the module is one of these."""
    index = _after_interpreter_flags(argv)
    if index is None or index >= len(argv):
        return None
    word = argv[index]
    flag = re.match(r"-[A-Za-z]*?m", word)  # also -um, and -mMODULE in one word
    if flag is None:
        return None
    if flag.end() < len(word):
        return index + 1 if word[flag.end() :] in modules else None
    return index + 2 if index + 1 < len(argv) and argv[index + 1] in modules else None


def after_console_script(argv: Sequence[str], script: str, command: str) -> int | None:
    """Return the index after ``SCRIPT COMMAND``, by path or not, also as ``python /bin/SCRIPT COMMAND``."""
    start = unwrap(argv).start
    index: int | None = start
    if start < len(argv) and PYTHON.fullmatch(base_name(argv[start])):
        index = _after_interpreter_flags(argv)
    if index is None or index + 1 >= len(argv):
        return None
    found = base_name(argv[index]) == script and argv[index + 1] == command
    return index + 2 if found else None


def _after_interpreter_flags(argv: Sequence[str]) -> int | None:
    """Return the index of the first word after ``python`` and its flags that is ``-m`` or no flag."""
    index = unwrap(argv).start
    if index >= len(argv) or not PYTHON.fullmatch(base_name(argv[index])):
        return None
    index += 1
    while index < len(argv):
        word = argv[index]
        if word in {"-W", "-X"}:
            index += 2
        elif re.fullmatch(r"-[WX].+|-[bBdEhiIOPqRsSuvVx?]+", word):
            index += 1
        elif re.match(r"-[bBdEiIOPqRsSuvx]*m", word) or not word.startswith("-"):
            return index
        else:
            return None  # -c CODE, or a flag of a later Python: nobody knows what runs
    return None


def functions(*names: str) -> str:
    """Return a pattern that matches these functions, bare (py-spy on 3.10) or qualified (on 3.11 and later)."""
    return rf"(?:.*\.)?(?:{'|'.join(names)})"


# uvicorn: 'INFO:     127.0.0.1:60608 - "GET /health HTTP/1.1" 200 OK', with whatever prefix the engine gives
# it; behind a unix socket the client is empty. Probes of ours make one each: never news.
ACCESS_LINE = r'INFO:\s+(?:\S+ )?- "[A-Z]+ \S* ?HTTP/[\d.]+" \d{3}'


def asked_for(*routes: str) -> str:
    """Return a pattern for the access line of a POST or GET to one of these routes that was answered with 200.

    From the beginning of the line: a prompt that a server logs may hold anything. The prefix is the time, with which
    SGLang sets off uvicorn's lines too; what may stand before a route is ``--root-path``.
    """
    names = "|".join(re.escape(route) for route in routes)
    return rf'^(?:\[[^\]]*\] )?INFO:\s+(?:\S+ )?- "(?:POST|GET) [^\s?"]*(?:{names})(?:\?\S*)? HTTP/[\d.]+" 200'


TRACKER = r"multiprocessing[. ]+resource_tracker|resource_tracker import main"
