"""``python -m hangguard`` and the console script."""

from __future__ import annotations

import os
import sys

from hangguard.first_process import stay_behind_as_pid_1


def main() -> int:
    """Run the command line; say what installs it where its extra is missing."""
    _fill_closed_streams()
    stay_behind_as_pid_1()
    try:
        from hangguard.cli.app import invoke  # noqa: PLC0415 - the extra may be missing
    except ModuleNotFoundError as missing:
        if missing.name not in {"click", "rich"}:
            raise
        advice = f"The command line needs {missing.name}. Install it with:  pip install 'hangguard[cli]'"
        print(advice, file=sys.stderr)  # noqa: T201
        return 1
    return invoke(sys.argv[1:])


def _fill_closed_streams() -> None:
    """A file that we open must not get the number of a stream that the caller has closed (``>&-``)."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one


if __name__ == "__main__":
    sys.exit(main())
