"""What ``supervise`` may be asked for: each argument that cannot be meant is refused before anything is made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hangguard.errors import BadLaunch
from hangguard.facts import Fallback, Limits
from hangguard.supervision.log_cap import LEAST
from hangguard.supervision.retry import Retry

_ALLOWED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("command", lambda v: isinstance(v, (str, Sequence)) and not isinstance(v, bytes), "text, or a sequence of words"),
    ("url", lambda v: v is None or isinstance(v, str), "text or None"),
    (
        "ready",
        lambda v: v is None or isinstance(v, str) or callable(v),
        "a path, a callable that takes the URL, or None",
    ),
    (
        "fallbacks",
        lambda v: (
            v in (None, "auto", "any")
            or (isinstance(v, Sequence) and not isinstance(v, str) and all(isinstance(f, Fallback) for f in v))
        ),
        "None, 'auto', 'any', or a sequence of Fallback",
    ),
    ("env", lambda v: v is None or isinstance(v, Mapping), "a mapping or None"),
    ("limits", lambda v: v is None or isinstance(v, Limits), "Limits(...) or None"),
    ("retry", lambda v: v is None or isinstance(v, Retry), "Retry(...) or None"),
    ("on_hang", lambda v: v in ("act", "report"), "'act' or 'report'"),
    ("on_death", lambda v: v in ("stop", "keep"), "'stop' or 'keep'"),
    (
        "log_bytes",
        lambda v: v is None or (isinstance(v, int) and not isinstance(v, bool) and v >= LEAST),
        "a whole number of bytes, 1048576 (1 MiB) or more, or None",
    ),
    ("hooks", lambda v: isinstance(v, Sequence) and all(callable(hook) for hook in v), "a sequence of callables"),
)


def check_asked(**given: object) -> None:
    """Refuse what cannot be meant, before anything is made of it."""
    for name, is_allowed, what in _ALLOWED:
        value = given[name]
        if not is_allowed(value):
            problem = _of_one_hook(value) if name == "hooks" else ""
            raise BadLaunch(problem or f"{name} is {_shown(value)}", advice=f"It must be {what}")


def _of_one_hook(hooks: object) -> str:
    """Return which one of several cannot be called; empty: there is no sequence of them at all."""
    if not isinstance(hooks, Sequence) or isinstance(hooks, (str, bytes)):
        return ""
    number, hook = next((number, hook) for number, hook in enumerate(hooks) if not callable(hook))
    return f"hooks[{number}] is {_a(type(hook).__name__)}, and cannot be called"


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, (str, int, float)) else _a(type(value).__name__)


def _a(name: str) -> str:
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
