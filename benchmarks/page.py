"""The page: tables made from what was found, and from nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from contenders import CIRCUS, LIVENESS, STARTUP, SUPERVISORD, TIMEOUT_START, Outcome
from replays import Hung, Watched, percentile
from scenarios import HANGS, HEALTHY, SCENARIOS, Scenario

from hangguard.engines.sglang import SGLANG
from hangguard.engines.vllm import VLLM
from hangguard.facts import Limits

ABOUT = """\
hangguard beside what people use today: the same programs, everybody at the defaults that they document. This page is
written by one command and by nothing else:

```console
$ nox -s scoreboard
```"""

PROGRAMS = """\
## Real programs

Small servers in SGLang's shape (`benchmarks/programs`): several real processes, an HTTP front end, no GPU. What goes
wrong in them really does, and every one is watched from its launch for the time in the last table. Nobody was told
which is which; only the owner of the *pause* tells hangguard that he wants it (`server.quiet()`)."""

NOTICED = """\
*never*: not within the time for which it was watched. *computed*: what its rule says, from what was measured until
then; it was not waited for. A liveness probe without a startup probe notices within 20 s because it ends every start
that takes longer, as the next table shows."""

REPLAYED = """\
## The judge alone

Recordings of real vLLM and SGLang starts (on CPU and on one H200), each stretched piece by piece by factors of up to 5
and looked at once a second, with late and lost looks, gaps of the watcher of up to 40 s, sources hidden for up to a
minute or for good, other programs on the GPU, a starved machine. Stacks were not recorded: every member always stands
in the same lock, which is the worst case. The hours of serving are a model (`tests/judge/modelled.py`): idle, bursts,
long prefills and answers, overload, compiles behind a first request, sleep and pause, metrics that are off or come and
go, idle connections, shared boards. A sleep that neither the server nor the handle tells of is not in it."""

HUNG = """\
Hangs: the same recordings with a fault, and stalls of the modelled server; seconds after the last movement. The targets
are a median of 12 s and 95 % within 45 s where stacks are seen, and 30 s for a serving stall. Something is missing
where the counters are off or come and go, where others use the same boards, or where CPU is burnt and there is no GPU
whose power could tell work from a spin; what is not found within the watch (200 s, 330 s) stays *unclear*, or unnoticed
where neither counters nor clients can be seen."""

TIMERS = """\
## What the engines bring themselves

Documented, not measured: read from their sources. 0 s: off unless it is set."""

COMMANDS = """\
## Commands

The command of each program is that of `benchmarks/scenarios.py`; a client asks what stands there."""

EMULATED = "Emulated: the same requests at the same times, against the same program."
CHARTS = "as in the chart of vLLM's production stack"
NOTIFY = "with a wrapper that says READY=1 at the first answer (no engine does). Emulated."
SIMPLE = "With `Type=simple` it notices only the end of the process."
HEAD = "Its default method HEAD is unknown to the routes of both engines."

CONTENDERS = {
    "hangguard": "hangguard",
    "liveness": "liveness probe",
    "startup": "startup probe of the charts",
    "systemd": "systemd",
    "mirakuru": "mirakuru",
    "supervisord": "supervisord",
    "circus": "circus",
}

Row = Sequence[str]


@dataclass(frozen=True)
class Replayed:
    """What the judge said of recordings and simulations."""

    starts: list[Watched]
    hangs: list[Hung]
    hours: list[Watched]
    stalls: list[Hung]


def written(
    *,
    machine: dict[str, str],
    versions: dict[str, str],
    outcomes: list[Outcome] | None,
    replayed: Replayed | None,
    seed: int,
    minutes: float,
) -> str:
    """Return the whole page."""
    used = ", ".join(f"{name} {number}" for name, number in versions.items())
    parts = [
        "# Scoreboard",
        ABOUT,
        table(("", ""), [*machine.items(), ("versions", used), ("took", f"{minutes:.0f} minutes")]),
        *(["The programs were not run this time."] if outcomes is None else programs(outcomes)),
        *(["Nothing was replayed this time."] if replayed is None else replay(replayed, seed)),
        *timers(),
        *commands(),
    ]
    return "\n\n".join(parts) + "\n"


def table(head: Row, rows: Iterable[Row]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


# -------------------------------------------------------------------------------------------- programs


def programs(outcomes: list[Outcome]) -> list[str]:
    by = {(o.scenario.name, o.contender): o for o in outcomes}
    head = ("program", *CONTENDERS.values())
    return [
        PROGRAMS,
        "### Seconds from the beginning of the trouble until it was noticed",
        table(head, [(s.name, *(_noticed(by[s.name, c]) for c in CONTENDERS)) for s in HANGS]),
        NOTICED,
        "### False alarms on healthy programs",
        table(head, [(s.name, *(_alarmed(by[s.name, c]) for c in CONTENDERS)) for s in HEALTHY]),
        "Seconds after the launch at which a healthy program was ended or called stuck; -: no alarm.",
        *_scores(by),
        "### What hangguard says",
        table(
            ("program", "verdict", "phase", "first suspect", "on the way"),
            [_said(by[s.name, "hangguard"]) for s in SCENARIOS],
        ),
        "### The programs",
        table(("program", "what happens", "watched"), [(s.name, s.what, f"{s.watched:g} s") for s in SCENARIOS]),
    ]


def _noticed(outcome: Outcome) -> str:
    if outcome.seconds is None:
        return "never"
    number = f"{outcome.seconds:.0f}"
    if outcome.contender == "hangguard":
        number = f"**{number}**"
    return f"{number} (computed)" if outcome.computed and outcome.alarm_after != TIMEOUT_START else number


def _alarmed(outcome: Outcome) -> str:
    return "-" if outcome.alarm_after is None else f"**after {outcome.alarm_after:.0f} s**"


def _scores(by: dict[tuple[str, str], Outcome]) -> list[str]:
    rows = []
    for contender, title in CONTENDERS.items():
        hung = [by[s.name, contender] for s in HANGS]
        well = [by[s.name, contender] for s in HEALTHY]
        names = [o for o in hung if o.scenario.culprit]
        measured = [o.left for o in (*hung, *well) if o.left is not None]
        rows.append((
            title,
            f"{sum(o.seconds is not None for o in hung)} of {len(hung)}",
            f"{sum(o.alarm_after is not None for o in well)} of {len(well)}",
            f"{sum(o.names_phase for o in hung)} of {len(hung)}",
            f"{sum(o.names_culprit for o in names)} of {len(names)}",
            str(sum(measured)) if measured else "not measured (the container or control group ends with it)",
        ))  # fmt: skip
    head = ("", "hangs noticed", "false alarms", "phase named", "culprit named", "processes left after the stop")
    return ["### In sum", table(head, rows)]


def _said(outcome: Outcome) -> Row:
    suspect = outcome.culprit.split(" < ")
    named = f"`{suspect[0]}`" + (f" in `{suspect[1]}`" if len(suspect) > 1 else "") if outcome.culprit else "-"
    phase = outcome.phase or "-"
    if outcome.scenario.phase and outcome.phase and not outcome.names_phase:
        phase += f" (in truth {outcome.scenario.phase})"
    return (outcome.scenario.name, outcome.says or "no alarm", phase, named, ", ".join(outcome.in_between) or "-")


# -------------------------------------------------------------------------------------------- replays


def replay(replayed: Replayed, seed: int) -> list[str]:
    starts, hours = replayed.starts, replayed.hours
    alarms = [day.alarm for day in (*starts, *hours) if day.alarm is not None]
    early = [h for h in replayed.hangs if h.seconds is not None and h.seconds < 0.0]
    watched = [
        _watched("recorded healthy starts on worse days", starts, f"{seed}-0 … {seed}-{len(starts) - 1}"),
        _watched("simulated hours of serving", hours, f"{seed}-0 … {seed}-{len(hours) - 1}"),
    ]
    found = [
        _found("start-up hangs, everything seen", [h for h in replayed.hangs if h.seen]),
        _found("start-up hangs, something hidden for a while or for good", [h for h in replayed.hangs if not h.seen]),
        _found("serving stalls, everything seen", [h for h in replayed.stalls if h.seen]),
        _found("serving stalls, something missing", [h for h in replayed.stalls if not h.seen]),
    ]
    canaries, slept = sum(h.canaries for h in hours), sum(h.canaries_to_sleepers for h in hours)
    return [
        REPLAYED,
        table(("healthy", "runs", "hours", "false alarms", "waiting (sleep, pause) or unclear", "seeds"), watched),
        *([_list_of(alarms)] if alarms else []),
        f"Canaries sent in those hours: {canaries}, of them to a sleeping engine: {slept}.",
        HUNG,
        table(("hung", "runs", "found", "median", "95 %", "slowest"), found),
        f"Called stuck before its fault: {len(early)} of {len(replayed.hangs)} runs.",
    ]


def _watched(name: str, days: list[Watched], seeds: str) -> Row:
    seconds = sum(day.seconds for day in days)
    share = sum(day.undecided for day in days) / seconds
    alarms = sum(day.alarm is not None for day in days)
    return (name, str(len(days)), f"{seconds / 3600:.1f}", f"**{alarms}**", f"{share:.1%} of the time", seeds)


def _found(name: str, hung: list[Hung]) -> Row:
    times = sorted(h.seconds for h in hung if h.seconds is not None and h.seconds >= 0.0)
    share = f"{len(times)} ({len(times) / len(hung):.0%})" if hung else "-"
    marks = [percentile(times, percent) for percent in (50, 95, 100)]
    return (name, str(len(hung)), share, *("-" if mark is None else f"{mark:.1f} s" for mark in marks))


def _list_of(alarms: Sequence[object]) -> str:
    return "\n".join(["False alarms:", "", *(f"- {alarm}" for alarm in alarms[:20])])


# --------------------------------------------------------------------------------- what was not measured


def timers() -> list[str]:
    rows = [
        (
            engine.name,
            timer.name,
            f"{timer.seconds:g} s",
            ", ".join(timer.covers),
            "ends the server" if timer.ends else "only logs",
            timer.source or "-",
        )
        for engine in (SGLANG, VLLM)
        for timer in engine.timers
    ]
    if not rows:
        return []
    return [TIMERS, table(("engine", "timer", "default", "phases", "what it does", "source"), rows)]


def commands() -> list[str]:
    limits, live, first = Limits(), LIVENESS, STARTUP
    budgets = f"ready within {limits.ready_within:g} s, waiting {limits.waiting:g} s, unclear {limits.unclear:g} s"
    liveness = f"`httpGet: /health`, periodSeconds {live.period:g}, timeoutSeconds {live.within:g}, failureThreshold"
    startup = f"initialDelaySeconds {first.delay:g}, periodSeconds {first.period:g}, failureThreshold {first.failures}"
    rows = [
        ("hangguard", f'`supervise(COMMAND, engine="sglang")`, one attempt; limits: {budgets}'),
        ("liveness probe", f"{liveness} {live.failures}: the defaults of Kubernetes. {EMULATED}"),
        ("startup probe of the charts", f"{startup}, then the liveness probe: {CHARTS}. {EMULATED}"),
        ("systemd", f"`Type=notify`, `TimeoutStartSec={TIMEOUT_START:g}` (its default), {NOTIFY} {SIMPLE}"),
        ("mirakuru", f'`HTTPExecutor(COMMAND, url="…/health", method="GET").start()`, timeout 3600 s. {HEAD}'),
        ("supervisord", f"`supervisord -c FILE`: {_ini(SUPERVISORD)}; startsecs 1, autorestart unexpected"),
        ("circus", f"`circusd FILE`: {_ini(CIRCUS)}; check_delay 5, graceful_timeout 30"),
    ]
    return [COMMANDS, table(("who", "how"), rows), _example(HANGS[0])]


def _ini(text: str) -> str:
    section = text[text.rindex("[") :]
    return ", ".join(f"`{line}`" for line in section.splitlines() if line)


def _example(scenario: Scenario) -> str:
    words = scenario.command("PORT", Path("MARKS"), "")
    words[:2] = ["python", "benchmarks/programs/troubled_server.py"]
    return f"For example *{scenario.name}*:\n\n```console\n$ {' '.join(words)}\n```"
