"""Secrets out, at the edge of every writer.

Whatever leaves the program as text or JSON (reports, events, logs, error texts) passes through :func:`redact`
once. What it knows: flags and variables whose names say that they hold a secret, passwords in URLs,
authorization headers, tokens of well-known shapes, and the secrets of the launch at hand (``known``).
A secret that is none of these cannot be told from any other word, and stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from hangguard.facts import Launch

T = TypeVar("T")

REDACTED = "REDACTED"
_SHORTEST_KNOWN = 6
"""A shorter value would blacken ordinary words of every text."""
_SHORTEST_CUT = 8
"""The same for the beginning of a value, at the end of a text."""

# ------------------------------------------------------------------------------------ names that tell

_SECRET_PARTS = frozenset(
    ("secret", "secrets", "password", "passwd", "passphrase", "credential", "credentials", "apikey")
)
_SECRET_LAST = frozenset(("key", "keys", "token", "pat", "pwd"))
# A key or token as the last word is no secret after these: --kv-cache-key, --stop-token, SORT_KEY.
_HARMLESS_BEFORE_LAST = frozenset(
    (
        *(
            "cache",
            "kv",
            "sort",
            "primary",
            "foreign",
            "public",
            "partition",
            "routing",
            "route",
            "shard",
            "hash",
        ),
        *(
            "bos",
            "eos",
            "pad",
            "unk",
            "mask",
            "stop",
            "stops",
            "think",
            "reasoning",
            "image",
            "video",
            "audio",
        ),
        *("special", "first", "last", "next", "max", "min", "num", "new", "per", "speculative", "draft"),
    )
)
_HARMLESS_AUTH = frozenset(("sock", "type", "mode", "url"))
_SWITCHES = frozenset(("allow", "enable", "disable", "no", "use", "require", "skip"))
_ABBREVIATED = frozenset(("--api-k", "--api-ke"))
"""Beginnings of ``--api-key`` that argparse takes for it."""
_SAYS_TOO_LITTLE = frozenset((("key",), ("keys",), ("pat",), ("pwd",)))
"""Alone, these name anything: PWD is a folder, a JSON "key" may be a key of a table."""


def _is_secret_name(name: str) -> bool:
    """Tell by its name whether a flag, variable or JSON key holds a secret: ``--hf-token``, ``AWS_SECRET_…``."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.lstrip("-"))
    parts = [part for part in re.split(r"[-_. ]+", snake.lower()) if part]
    if not parts or (parts[0] in _SWITCHES and name.startswith("-")):
        return False
    if parts[0] == "aws":
        return not {"region", "profile", "output"} & set(parts)
    if tuple(parts) in _SAYS_TOO_LITTLE and not name.startswith("--"):
        return False
    if parts[-1] in {"file", "path", "dir", "keyfile", "certfile"}:
        return False  # where it lies is no secret: --ssl-keyfile, GOOGLE_CREDENTIALS_FILE
    if name.replace("_", "-") in _ABBREVIATED:
        return True
    if "auth" in parts or "authorization" in parts:
        return not _HARMLESS_AUTH & set(parts)
    if _SECRET_PARTS & set(parts):
        return True
    return parts[-1] in _SECRET_LAST and not (len(parts) > 1 and parts[-2] in _HARMLESS_BEFORE_LAST)


# --------------------------------------------------------------------------------- shapes that tell

_SHAPES = re.compile(
    r"\b(?:"
    r"hf_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|sk-[A-Za-z0-9_-]{16,}"  # OpenAI, Anthropic and those who copied the form
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}"
    r"|glpat-[A-Za-z0-9_-]{16,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}"  # AWS key ids
    r"|AIza[A-Za-z0-9_-]{30,}"  # Google
    r"|xox[a-z]-[A-Za-z0-9-]{10,}"  # Slack
    r"|nvapi-[A-Za-z0-9_-]{16,}"  # NVIDIA
    r"|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{4,}(?:\.[A-Za-z0-9_-]*)?"  # JWT
    r")",
    re.ASCII,
)
_URL_PASSWORD = re.compile(
    r"(?P<before>\b[a-z][a-z0-9+.-]{0,20}://[^\s/:@'\"]{0,256}:)[^\s/'\"]+(?=@)", re.IGNORECASE | re.ASCII
)
_HEADER = re.compile(
    r"(?P<before>\b(?:proxy-)?authorization['\"]?\s{0,4}[:=]\s{0,4}['\"]?(?:(?:bearer|basic|token)\s{1,4})?)"
    r"(?!\s|(?:bearer|basic|token)\b)[^\s'\",;]+",
    re.IGNORECASE | re.ASCII,
)
_BEARER = re.compile(r"(?P<before>\bbearer\s{1,4})(?=[^\s'\",;]*[\d._~+/=-])[^\s'\",;]{8,}", re.IGNORECASE | re.ASCII)
# NAME=VALUE and "name": "value", also inside a line of text or a printed dict: vLLM prints 'api_key': ['…'].
_QUOTED = r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
# A line that was cut, or not yet written to its end, may end inside the quotes.
_CUT = rf"""(?:\[(?:{_QUOTED},\s?)*)?(?:"(?:[^"\\]|\\.)*|'(?:[^'\\]|\\.)*)\\?\Z"""
_ASSIGNMENT = re.compile(
    r"(?P<name>(?<![\w-])(?:--)?[A-Za-z][\w.-]{0,200})(?P<between>['\"]?\s{0,2}[=:]\s{0,2})"
    rf"(?P<value>\[{_QUOTED}(?:,\s?{_QUOTED})*(?:\]|,?\s?\Z)|\[[^\s'\"\[\]{{}}][^'\"\[\]{{}}]*\]|{_QUOTED}|{_CUT}"
    r"|[^\s'\",;&)}\]]+)",
    re.ASCII,
)
_FLAG_IN_TEXT = re.compile(
    r"(?P<flag>(?<![\w-])--[A-Za-z][\w-]{0,80})(?P<space>\s{1,4})(?P<value>\"[^\"]*\"|'[^']*'|(?!-)[^\s'\",;]+)",
    re.ASCII,
)
_NOT_SECRET_VALUES = frozenset(("none", "null", "true", "false", "''", '""', "[", "{", "bearer", "basic", "token"))
_COUNT = re.compile(r"\d+(?:[.,]\d+)*%?", re.ASCII)


def redact(value: T, known: Iterable[str] = ()) -> T:
    """Return the text, the JSON-like value (mappings, lists, tuples) or the fact without secrets.

    Nothing else is changed, and doing it twice changes nothing more. ``known``: literal secrets, see
    :func:`secrets_of`.
    """
    result: Any = _value(value, _literals(known))
    typed: T = result
    return typed


def redact_argv(argv: Sequence[str], known: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the words of a command without the values of flags and variables that hold secrets."""
    return tuple(_words(argv, _literals(known)))


def secrets_of(launch: Launch) -> frozenset[str]:
    """Return the literal secrets of this launch: its API key, and the values of flags and variables that hold any."""
    found = {value for name, value in launch.env if _is_secret_name(name)}
    for words in (launch.argv, launch.file_args):
        for word, shown in zip(words, redact_argv(words), strict=True):
            if shown == REDACTED:
                found.add(word)
            elif word != shown and shown.endswith(f"={REDACTED}"):
                found.add(word.partition("=")[2])
    if launch.api_key:
        found.add(launch.api_key)
    # A key from a file often ends in a line break, and is shown without it, or as repr() shows it in an error.
    forms = {form for word in found for form in (word, word.strip(), repr(word)[1:-1])}
    return frozenset(word for word in forms if len(word) >= _SHORTEST_KNOWN)


def clean_text(text: str) -> str:
    """Return one line of foreign text without what could drive a terminal; tabs stay.

    Escape sequences go whole; other control characters, and the marks that reorder what is shown, go singly.
    """
    return _CONTROLS.sub("", _ESCAPES.sub("", text))


# CSI, then OSC and other strings up to their end, then two-character escapes; the one-byte C1 forms too.
_ESCAPES = re.compile(
    "(?:\x1b\\[|\x9b)[0-?]*[ -/]*[@-~]"
    "|(?:\x1b[\\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c\n\r]*(?:\x07|\x1b\\\\|\x9c)?"
    "|\x1b[ -/]*[0-~]"
)
# C0 but tab, DEL, C1; U+061C, U+200E-F, U+202A-E and U+2066-9 turn text round; U+2028-9 break lines;
# lone surrogates cannot be written as UTF-8.
_CONTROLS = re.compile(
    "[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def _literals(known: Iterable[str]) -> tuple[str, ...]:
    # Longest first, so that no secret is cut by a shorter one; a part of our own mark would never come to rest.
    usable = {word for word in known if len(word) >= _SHORTEST_KNOWN and word not in REDACTED}
    return tuple(sorted(usable, key=lambda word: (-len(word), word)))


def _value(value: Any, literals: tuple[str, ...]) -> Any:
    match value:
        case str():
            return _text(value, literals)
        case Mapping():
            return {_key(name, literals): _member(name, member, literals) for name, member in value.items()}
        case tuple() if hasattr(value, "_fields"):  # a NamedTuple takes its members one by one
            members = zip(value._fields, value, strict=True)
            return type(value)(*[_member(name, member, literals) for name, member in members])
        case list() | tuple() if len(value) == 2 and _is_variable(value[0]):  # ("HF_TOKEN", "…")
            return _like(value, [value[0], _hidden(value[1])])
        case list() | tuple() if value and all(isinstance(word, str) for word in value):
            return _like(value, _words(value, literals))
        case list() | tuple():
            return _like(value, [_value(member, literals) for member in value])
        case _ if is_dataclass(value) and not isinstance(value, type):  # a fact or an event stays one
            changed = {f.name: _member(f.name, getattr(value, f.name), literals) for f in fields(value) if f.init}
            return replace(value, **changed)
        case _:
            return value


def _like(value: list[Any] | tuple[Any, ...], members: list[Any]) -> list[Any] | tuple[Any, ...]:
    return members if isinstance(value, list) else tuple(members)


def _key(name: Any, literals: tuple[str, ...]) -> Any:
    return _text(name, literals) if isinstance(name, str) else name


def _member(name: Any, member: Any, literals: tuple[str, ...]) -> Any:
    if isinstance(name, str) and _is_secret_name(name):
        return _hidden(member)
    return _value(member, literals)


def _hidden(member: Any) -> Any:
    match member:
        case None | bool() | "":
            return member
        case list() | tuple():
            return _like(member, [_hidden(each) for each in member])
        case _:
            return REDACTED


def _is_variable(name: Any) -> bool:
    return isinstance(name, str) and bool(_VARIABLE.fullmatch(name)) and _is_secret_name(name)


def _words(words: Sequence[str], literals: tuple[str, ...]) -> list[str]:
    result: list[str] = []
    hide_next = False
    for word in words:
        takes_value = False
        if hide_next and (word == REDACTED or not _looks_like_flag(word)):
            result.append(REDACTED if word else word)
            takes_value = _takes_many(words, len(result) - 1)
        else:
            name, equals, value = word.partition("=")
            if equals and _NAME.fullmatch(name) and _is_secret_name(name):
                result.append(f"{name}={REDACTED}" if value else word)
            else:
                result.append(_text(word, literals))
                takes_value = bool(_FLAG_ALONE.fullmatch(word)) and _is_secret_name(word)
        hide_next = takes_value
    return result


_NAME = re.compile(r"(?:--?)?[A-Za-z_][\w.-]*", re.ASCII)
_FLAG_ALONE = re.compile(r"--?[A-Za-z][\w.-]*", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def _looks_like_flag(word: str) -> bool:
    return bool(re.match(r"--[A-Za-z]", word))


def _takes_many(words: Sequence[str], index: int) -> bool:
    """Tell whether more values follow: vLLM takes several keys after one ``--api-key``."""
    return index + 1 < len(words) and not words[index + 1].startswith("-")


def _text(text: str, literals: tuple[str, ...]) -> str:
    for literal in literals:
        text = _without_cut_end(text.replace(literal, REDACTED), literal)
    text = _SHAPES.sub(REDACTED, text)
    text = _URL_PASSWORD.sub(rf"\g<before>{REDACTED}", text)
    text = _HEADER.sub(rf"\g<before>{REDACTED}", text)
    text = _BEARER.sub(rf"\g<before>{REDACTED}", text)
    text = _ASSIGNMENT.sub(_without_value, text)
    return _FLAG_IN_TEXT.sub(_without_value, text)


def _without_cut_end(text: str, literal: str) -> str:
    """Hide the beginning of a secret at the end of a text: lines are cut, and read before they are written whole."""
    start = text.rfind(literal[:_SHORTEST_CUT])
    if start >= 0 and len(literal) > _SHORTEST_CUT and literal.startswith(text[start:]):
        return text[:start] + REDACTED
    return text


def _without_value(found: re.Match[str]) -> str:
    groups = found.groupdict()
    name = groups.get("name") or groups["flag"]
    between = groups.get("between") or groups["space"]
    value = groups["value"]
    # In prose "token: 5" and "auth: on" are words, and "#new-token: 26" is a count; "token=…" is data.
    prose = between.strip() == ":" and (name.lower() in {"token", "auth"} or _COUNT.fullmatch(value) is not None)
    if prose or not _is_secret_name(name) or value.lower() in _NOT_SECRET_VALUES:
        return found[0]
    quote = value[0] if value[0] in "'\"" and value[-1] == value[0] and len(value) > 1 else ""
    return f"{name}{between}{quote}{REDACTED}{quote}"
