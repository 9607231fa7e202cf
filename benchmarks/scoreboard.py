"""Write docs/scoreboard.md: hangguard beside what people use today, on the same programs, and the judge on its own.

    python benchmarks/scoreboard.py [--only programs|replays] [--seed N] [--into FILE]

Whole, it takes half an hour on two free cores. A machine with other work on it spoils the programs: the page tells the
load. Of what ``--only`` leaves out the page says that it was not run.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import page
import replays
from contenders import Outcome, run_all
from scenarios import HANGS, HEALTHY, SCENARIOS

HERE = Path(__file__).parent
STARTS, HANGS_REPLAYED, HOURS, STALLS = 528, 320, 100, 200
"""528: every recorded healthy start 24 times."""


def main() -> int:
    asked = arguments()
    began, load_before = time.monotonic(), os.getloadavg()[1]
    outcomes = None if asked.only == "replays" else run_programs()
    replayed = None if asked.only == "programs" else run_replays(asked.seed)
    text = page.written(
        machine={**machine(), "load of 5 minutes": f"{load_before:.1f} before, {os.getloadavg()[1]:.1f} at the end"},
        versions={name: version(name) for name in ("hangguard", "mirakuru", "supervisor", "circus")},
        outcomes=outcomes,
        replayed=replayed,
        seed=asked.seed,
        minutes=(time.monotonic() - began) / 60,
    )
    asked.into.write_text(text)
    print(f"written: {asked.into}")
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("programs", "replays"))
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--into", type=Path, default=HERE.parent / "docs" / "scoreboard.md")
    return parser.parse_args()


def run_programs() -> list[Outcome]:
    """Run every program under every contender. Only hangguard and the probes need the cores for themselves."""
    cores = max(1.0, (os.cpu_count() or 1) - 0.4)
    outcomes = []
    for contenders, room in (
        (("hangguard",), cores),
        (("bare",), 1.5 * cores),
        (("mirakuru", "supervisord", "circus"), 3 * cores),
    ):
        say(f"{', '.join(contenders)}: {len(SCENARIOS)} programs each")
        outcomes += run_all([(s, c) for s in SCENARIOS for c in contenders], room, say)
    order = {scenario.name: n for n, scenario in enumerate((*HANGS, *HEALTHY))}
    return sorted(outcomes, key=lambda outcome: order[outcome.scenario.name])


def run_replays(seed: int) -> page.Replayed:
    say(f"{STARTS} healthy starts, {HANGS_REPLAYED} hangs, {HOURS} hours of serving, {STALLS} stalls")
    return page.Replayed(
        starts=replays.healthy_days(STARTS, seed),
        hangs=replays.hung_days(HANGS_REPLAYED, seed),
        hours=replays.served_hours(HOURS, seed),
        stalls=replays.stalls(STALLS, seed),
    )


def machine() -> dict[str, str]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {memory:.0f} GiB, no GPU, {platform.machine()}",
        "kernel": f"{platform.system()} {platform.release().split('-')[0]}",
        "Python": platform.python_version(),
    }


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
