"""``python -m hangguard`` and the console script."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line; say what installs it where its extra is missing."""
    try:
        from hangguard.cli.app import invoke  # noqa: PLC0415 - the extra may be missing
    except ModuleNotFoundError as missing:
        if missing.name not in {"click", "rich"}:
            raise
        advice = f"The command line needs {missing.name}. Install it with:  pip install 'hangguard[cli]'"
        print(advice, file=sys.stderr)  # noqa: T201
        return 1
    return invoke(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
