"""hangguard and what people use today, each on the same program, at the defaults that it documents."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from around import Family, extensions, free_port, get, start_client, surroundings
from scenarios import PROGRAM, Scenario
from users.daemons import circusd, supervisord

USERS = Path(__file__).parent / "users"
ENDS_WITHIN = 90.0
EPSILON = 1e-6
ALARMS = {"stuck", "broken", "expired", "exited"}


@dataclass(frozen=True)
class Outcome:
    """What one contender said of one program."""

    scenario: Scenario
    contender: str
    hung_after: float | None = None
    """Seconds from the launch until the trouble began; ``None``: it did not."""
    alarm_after: float | None = None
    """Seconds from the launch until the contender acted or gave a verdict."""
    says: str = ""
    phase: str = ""
    culprit: str = ""
    left: int | None = None
    """Processes that were there after its stop; ``None``: not measured."""
    computed: bool = False
    """Whether the moment follows from its rule and from what was measured, and was not waited for."""
    in_between: tuple[str, ...] = ()
    """Verdicts that are no alarm, in order."""

    @property
    def seconds(self) -> float | None:
        """From the beginning of the trouble to the alarm."""
        if self.alarm_after is None or self.hung_after is None:
            return None
        return max(0.0, self.alarm_after - self.hung_after)

    @property
    def names_phase(self) -> bool:
        return bool(self.scenario.phase) and self.phase == self.scenario.phase

    @property
    def names_culprit(self) -> bool:
        return bool(self.scenario.culprit and self.culprit and re.search(self.scenario.culprit, self.culprit))


@dataclass
class Stage:
    """One run: a folder, a port, a client, and the family of the process that was started."""

    scenario: Scenario
    folder: Path
    port: int
    command: list[str]
    began: float = 0.0
    process: subprocess.Popen[str] = field(init=False)
    family: Family = field(init=False)
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def events(self) -> list[dict[str, Any]]:
        lines = self.out.read_text().splitlines() if self.out.exists() else []
        return [json.loads(line) for line in lines if line.startswith("{")]

    def hung_after(self) -> float | None:
        times = [float(path.read_text()) for path in (self.folder / "marks").glob("hung.*")]
        return max(times) - self.began if times else None

    def end(self) -> int:
        """Ask the contender to end, as a person does; return how many of its program are left."""
        self.over.set()
        self.family.look()
        self.process.terminate()
        try:
            self.process.wait(ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        deadline = time.monotonic() + 3.0
        while self.family.alive() and time.monotonic() < deadline:
            time.sleep(0.2)
        left = len(self.family.alive())
        self.family.end()
        return left


Command = Callable[[Stage], list[str]]
Until = Callable[[Stage], Outcome | None]


def run(scenario: Scenario, contender: str) -> list[Outcome]:
    """Run one program under one contender; return what was found (the probes share one run)."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hangguard-scoreboard-")))
        (folder / "marks").mkdir()
        thing = stack.enter_context(surroundings(scenario, folder))
        port = free_port()
        stage = Stage(scenario, folder, port, scenario.command(port, folder / "marks", thing))
        log = stack.enter_context((folder / "log").open("w"))
        stage.began = time.monotonic()
        stage.process = subprocess.Popen(
            COMMANDS[contender](stage),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "TORCH_EXTENSIONS_DIR": str(extensions(folder))},
            start_new_session=True,
        )
        stage.family = Family(stage.process.pid, PROGRAM.name)
        start_client(scenario, port, stage.over)
        if contender == "bare":
            return _with_probes(stage)
        outcome = _watch(stage, UNTIL[contender], contender)
        left = stage.end()
        return [replace(outcome, contender=contender, hung_after=stage.hung_after(), left=left)]


def _watch(stage: Stage, until: Until, contender: str) -> Outcome:
    while time.monotonic() < stage.began + stage.scenario.watched:
        found = until(stage)
        if found is not None:
            return found
        if stage.process.poll() is not None:
            raise RuntimeError(f"{contender} ended by itself: {(stage.folder / 'log').read_text()[-2000:]}")
        time.sleep(0.25)
    return until(stage) or Outcome(stage.scenario, contender, in_between=_in_between(stage))


# -------------------------------------------------------------------------------------------- hangguard


def _hangguard(stage: Stage) -> list[str]:
    asked = {
        "command": stage.command,
        "out": str(stage.out),
        "run_dir": str(stage.folder / "runs"),
        "quiet": 110.0 if stage.scenario.quiet else 0.0,
    }
    return [sys.executable, str(USERS / "with_hangguard.py"), json.dumps(asked)]


def _hangguard_says(stage: Stage) -> Outcome | None:
    """The first verdict that ends an attempt."""
    for event in stage.events():
        if event["event"] in {"verdict", "lost"} and event.get("verdict") in ALARMS:
            return Outcome(
                stage.scenario,
                "hangguard",
                alarm_after=event["t"] - stage.began,
                says=f"{event['verdict']} {event['kind']}".strip(),
                phase=event["phase"],
                culprit=_culprit(stage.scenario, event),
                in_between=_in_between(stage),
            )
    return None


def _culprit(scenario: Scenario, event: dict[str, Any]) -> str:
    """The first suspect; where there is none, what the sentence says."""
    suspects = event["suspects"]
    if suspects:
        return str(suspects[0])
    return str(event["why"]) if scenario.culprit and re.search(scenario.culprit, event["why"]) else ""


def _in_between(stage: Stage) -> tuple[str, ...]:
    words = [f"{e['verdict']} {e['kind']}".strip() for e in stage.events() if e["event"] == "verdict"]
    return tuple(dict.fromkeys(w for w in words if w.split(" ")[0] in {"waiting", "unclear"}))


# ------------------------------------------------------------------------------------------- mirakuru


def _mirakuru(stage: Stage) -> list[str]:
    asked = {"command": stage.command, "out": str(stage.out), "url": f"http://127.0.0.1:{stage.port}"}
    return [sys.executable, str(USERS / "with_mirakuru.py"), json.dumps(asked)]


def _mirakuru_says(stage: Stage) -> Outcome | None:
    lost = next((e for e in stage.events() if e["event"] == "lost"), None)
    if lost is None:
        return None
    return Outcome(stage.scenario, "mirakuru", alarm_after=lost["t"] - stage.began, says=lost["error"])


# ------------------------------------------------------------------------------ supervisord and circus


def _started_anew(stage: Stage) -> Outcome | None:
    """They look at the life of the one process that they started."""
    if len(stage.family.servers) < 2:
        return None
    return Outcome(stage.scenario, "", alarm_after=stage.family.servers[1][0] - stage.began, says="started anew")


# ---------------------------------------------------------------------------------------------- probes


@dataclass(frozen=True)
class Probe:
    """A probe as the kubelet makes it: a GET, 200 to 399 is success, failures in a row count."""

    period: float = 10.0
    within: float = 1.0
    failures: int = 3
    delay: float = 0.0

    def goes_on(self, port: int, began: float, over: threading.Event, *, until_good: bool) -> float | None:
        """Probe; return when it has failed too often, or ``None`` when it is over (or was good once)."""
        due, failed = began + self.delay, 0
        while not over.wait(max(0.0, due - time.monotonic())):
            status = get(port, "/health", within=self.within)
            good = status is not None and 200 <= status < 400
            if good and until_good:
                return None
            failed = 0 if good else failed + 1
            if failed >= self.failures:
                return time.monotonic()
            due += self.period
        return None


LIVENESS = Probe()
STARTUP = Probe(failures=60, delay=15.0)
TIMEOUT_START = 90.0


def _with_probes(stage: Stage) -> list[Outcome]:
    """Run the program bare; beside it everybody who only asks its health route, and does nothing about it."""
    found: dict[str, float] = {}
    ready: list[float] = []

    def liveness() -> None:
        _note(found, "liveness", LIVENESS.goes_on(stage.port, stage.began, stage.over, until_good=False))

    def startup_then_liveness() -> None:
        failed = STARTUP.goes_on(stage.port, stage.began, stage.over, until_good=True)
        if failed is None and not stage.over.is_set():
            failed = LIVENESS.goes_on(stage.port, time.monotonic(), stage.over, until_good=False)
        _note(found, "startup", failed)

    def notify() -> None:
        while not stage.over.is_set() and not ready:
            if get(stage.port, "/v1/models", within=1.0) == 200:
                ready.append(time.monotonic())
            stage.over.wait(0.5)

    threads = [threading.Thread(target=work) for work in (liveness, startup_then_liveness, notify)]
    for thread in threads:
        thread.start()
    ended = _until_it_ends(stage)
    stage.end()
    for thread in threads:
        thread.join()
    hung = stage.hung_after()
    return [
        _of_probe(stage, "liveness", found.get("liveness"), ended, hung),
        _of_startup(stage, found.get("startup"), ended, hung, was_ready=bool(ready)),
        _of_systemd(stage, ready[0] if ready else None, ended, hung),
    ]


def _note(found: dict[str, float], name: str, at: float | None) -> None:
    if at is not None:
        found[name] = at


def _until_it_ends(stage: Stage) -> float | None:
    try:
        stage.process.wait(max(0.0, stage.began + stage.scenario.watched - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    return time.monotonic()


def _of_probe(stage: Stage, name: str, failed: float | None, ended: float | None, hung: float | None) -> Outcome:
    at, says = min(
        ((t, word) for t, word in ((failed, "killed by the probe"), (ended, "the process ended")) if t is not None),
        default=(None, ""),
    )
    after = None if at is None else at - stage.began
    return Outcome(stage.scenario, name, hung_after=hung, alarm_after=after, says=says)


def _of_startup(
    stage: Stage, failed: float | None, ended: float | None, hung: float | None, *, was_ready: bool
) -> Outcome:
    outcome = _of_probe(stage, "startup", failed, ended, hung)
    if outcome.alarm_after is None and stage.scenario.hangs and not was_ready:
        last = STARTUP.delay + (STARTUP.failures - 1) * STARTUP.period
        return replace(outcome, alarm_after=last, says="killed by the probe", computed=True)
    return outcome


def _of_systemd(stage: Stage, ready: float | None, ended: float | None, hung: float | None) -> Outcome:
    if ready is None and (ended is None or ended - stage.began > TIMEOUT_START):
        late = stage.scenario.watched >= TIMEOUT_START
        after = TIMEOUT_START if late else None
        return Outcome(stage.scenario, "systemd", hung, after, "start timed out" if late else "", computed=True)
    return _of_probe(stage, "systemd", None, ended, hung)


COMMANDS: dict[str, Command] = {
    "hangguard": _hangguard,
    "mirakuru": _mirakuru,
    "supervisord": lambda stage: supervisord(stage.folder, stage.command),
    "circus": lambda stage: circusd(stage.folder, stage.command),
    "bare": lambda stage: stage.command,
}
UNTIL: dict[str, Until] = {
    "hangguard": _hangguard_says,
    "mirakuru": _mirakuru_says,
    "supervisord": _started_anew,
    "circus": _started_anew,
}


def run_all(jobs: list[tuple[Scenario, str]], cores: float, tell: Callable[[str], None]) -> list[Outcome]:
    """Run these, as many at once as the cores allow."""
    free, room, outcomes = [cores], threading.Condition(), []

    def one(scenario: Scenario, contender: str) -> None:
        found: list[Outcome] = []
        try:
            found = run(scenario, contender)
        finally:
            with room:
                outcomes.extend(found)
                free[0] += scenario.cores
                room.notify_all()
        for outcome in found:
            tell(_line(outcome))

    waiting = sorted(jobs, key=lambda job: -job[0].cores * job[0].watched)
    threads = []
    while waiting:
        with room:
            room.wait_for(lambda: any(scenario.cores <= free[0] + EPSILON for scenario, _ in waiting))
            job = next(job for job in waiting if job[0].cores <= free[0] + EPSILON)
            free[0] -= job[0].cores
        waiting.remove(job)
        threads.append(threading.Thread(target=one, args=job))
        threads[-1].start()
        time.sleep(1.0)  # a start costs more than what follows
    for thread in threads:
        thread.join()
    if len({(o.scenario.name, o.contender) for o in outcomes}) < len(jobs):
        print("some runs failed: see above", file=sys.stderr)
        os._exit(1)
    return outcomes


def _line(outcome: Outcome) -> str:
    seconds = "-" if outcome.seconds is None else f"{outcome.seconds:.1f} s"
    alarm = "-" if outcome.alarm_after is None else f"{outcome.alarm_after:.1f} s"
    words = (outcome.contender, outcome.scenario.name, outcome.says, seconds, f"alarm after {alarm}", outcome.phase)
    return " | ".join((*words, outcome.culprit[:80], f"left {outcome.left}", ", ".join(outcome.in_between)))
