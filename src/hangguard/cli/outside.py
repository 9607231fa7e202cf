"""What the commands share that ask and tell a run from outside: each is bounded, and every ending has its exit code."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable

import anyio

from hangguard.cli.exits import LEFT, NO_SERVER, TOO_LATE, USAGE
from hangguard.cli.words import as_typed
from hangguard.errors import BadLaunch, NoAnswer, NoSuchRun, NoSuchServer, RunOver
from hangguard.redact import clean_text, redact

INTERRUPTED = 130


def ask_outside(question: Callable[[], Awaitable[int]]) -> int:
    """Run one command to its end; return its exit code."""
    try:
        return anyio.run(question)
    except RunOver as over:
        return _say(str(over), LEFT if over.living else NO_SERVER)
    except (NoSuchRun, NoSuchServer) as none:
        return _say(str(none), NO_SERVER)
    except BadLaunch as wrong:
        return _say(str(wrong), USAGE)
    except (NoAnswer, TimeoutError) as silent:
        return _say(str(silent), TOO_LATE)
    except KeyboardInterrupt:
        return _say("nobody waits for it any more; what was asked for goes on", INTERRUPTED)


def _say(text: str, code: int) -> int:
    # Each run that may be meant has a line of its own.
    lines = "\n".join(clean_text(line) for line in redact(as_typed(text)).splitlines())
    print(f"hangguard: {lines}", file=sys.stderr)
    return code
