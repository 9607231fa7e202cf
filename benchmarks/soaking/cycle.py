"""One cycle: a supervising program starts a server, things are done to them, and then nothing of it may be left."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import soaked
from soaking import eyes
from soaking.made import Kills, Made
from soaking.plan import Moment, Plan
from soaking.strangers import SERVER, Visitors

HERE = Path(__file__).parents[1]
USER = HERE / "users" / "soaked.py"

WITHIN = 5.0
"""Seconds after the death of the supervising program, and after any other end, until nothing may be left."""
ENDS_WITHIN = 120.0


@dataclass
class Found:
    """What came of one cycle."""

    number: int
    how: str = ""
    seconds: float = 0.0
    gone_after: float = 0.0
    last: str = ""
    """Who was the last of it to go."""
    left: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    touched: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)
    unattributed: list[str] = field(default_factory=list)
    """Files that were made when the last look was over, or whose makers we killed before there was one: nobody can tell
    whose they are."""
    by_design: int = 0
    """Processes that were left where supervisor and guardian died at once, and were found by their log."""

    @property
    def is_good(self) -> bool:
        return not (self.left or self.files or self.touched or self.wrong)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Cycle:
    """One supervising program, in this process or as a child of it, and what is done to it."""

    def __init__(self, plan: Plan, folder: Path, port: int) -> None:
        self.plan = plan
        self.found = Found(plan.number)
        self.folder = folder / f"cycle-{plan.number}"
        self.folder.mkdir()
        self.visitors = Visitors()
        self._token = f"soak-{secrets.token_hex(8)}"
        self._port = port if plan.fixed_port else 0
        self._over = threading.Event()
        self._killed_at: float | None = None
        self._kills = Kills(self.found.killed)
        self._made = Made(self.folder, self._kills)

    def run(self) -> Found:
        began = time.monotonic()
        try:
            if self.plan.where == "here":
                self._run_here()
            else:
                self._run_child()
            self.found.touched += self.visitors.troubles()
        finally:
            self.visitors.end()
        self.found.seconds = time.monotonic() - began
        if self.found.is_good:
            shutil.rmtree(self.folder)
        return self.found

    # ------------------------------------------------------------------------------- what is started

    @property
    def _runs(self) -> Path:
        return self.folder / "runs"

    def _command(self) -> list[str]:
        words = [f"--port={self._port or '{port}'}", f"--tp={self.plan.tp}", "--phase-seconds=0.02", "--hold-mb=2"]
        return [sys.executable, SERVER, *words, *(f"--leave={kind}" for kind in self.plan.leaves)]

    def _env(self) -> dict[str, str]:
        ours = {"SOAK_CYCLE": self._token, "SOAK_SAID": str(self.folder / "said")}
        return {**os.environ, **ours, "SOAK_ESCAPES": ",".join(self.plan.escapes)}

    def _asked(self) -> dict[str, Any]:
        return {
            "command": self._command(),
            "env": self._env(),
            "run_dir": str(self._runs),
            "events": str(self.folder / "events"),
            "face": self.plan.face,
            "attempts": self.plan.attempts,
            "forks": self.plan.forks,
            "forked": str(self.folder / "forked"),
            "ending": self.plan.ending,
            "ending_at": asdict(self.plan.ending_at),
        }

    def _run_here(self) -> None:
        with self._watching(os.getpid()) as tree:
            try:
                self._take_outcome(soaked.use(self._asked()))
            except Exception as error:  # noqa: BLE001 - whatever it is, it must not be
                self.found.wrong.append(f"raised {error!r}")
            self._over.set()
            self._nothing_left(tree)

    def _run_child(self) -> None:
        with (self.folder / "out").open("wb") as out, (self.folder / "errors").open("wb") as errors:
            user = subprocess.Popen(
                [sys.executable, str(USER), json.dumps(self._asked())],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                env=self._env(),
                start_new_session=True,
            )
        with self._watching(user.pid) as tree:
            me = eyes.identity_of(user.pid)
            assert me is not None
            if self._wait_for(self.plan.ending_at, is_over=lambda: user.poll() is not None):
                self._do_to_it(user, tree)
            try:
                code = user.wait(ENDS_WITHIN)
            except subprocess.TimeoutExpired:
                self.found.wrong.append(f"the supervising program did not end within {ENDS_WITHIN:g} s")
                user.kill()
                code = user.wait()
            self._over.set()
            if self.plan.ending == "both" and self._killed_at is not None:
                self._left_by_design(tree)
            else:
                self._nothing_left(tree)
            self._judge_child(code)
            self._end_forked()

    def _do_to_it(self, user: subprocess.Popen[bytes], tree: eyes.Tree) -> None:
        ending = self.plan.ending
        number = {"sigint": signal.SIGINT, "sigterm": signal.SIGTERM, "sigkill": signal.SIGKILL, "both": signal.SIGKILL}
        if ending not in number or user.poll() is not None:
            return
        if ending == "both":
            guardian = self._guardian(tree, user.pid)
            if guardian is None:
                self.found.how = "there was no guardian yet"
            else:
                eyes.signal_exactly(guardian)
        user.send_signal(number[ending])
        if ending != "sigint":
            self._killed_at, self._kills.supervisor_at = time.monotonic(), time.time()
            self.found.killed.append("supervisor and guardian" if ending == "both" else "supervisor")

    def _judge_child(self, code: int) -> None:
        said = (self.folder / "out").read_text().splitlines()
        if said:
            self._take_outcome(json.loads(said[-1]))
        elif self._killed_at is not None and code in {-signal.SIGKILL, -signal.SIGTERM}:
            self.found.how = self.found.how or self.plan.ending
        else:
            errors = (self.folder / "errors").read_text()
            early = code == -signal.SIGINT or "KeyboardInterrupt" in errors.splitlines()[-1:]
            if self.plan.ending == "sigint" and early:  # it came while Python was importing
                self.found.how = "KeyboardInterrupt"
            else:
                self.found.wrong.append(f"the supervising program ended with {code}: {errors[-1500:]}")

    def _forked(self) -> set[eyes.Identity]:
        """Return the child that the supervising program has forked: the user's, and so not ours to end."""
        with contextlib.suppress(FileNotFoundError):
            pid, started = (self.folder / "forked").read_text().split()
            return {(int(pid), int(started))}
        return set()

    def _end_forked(self) -> None:
        for who in self._forked():
            if not eyes.is_well(who):
                self.found.touched.append(f"the child that the supervising program forked ({eyes.describe(who)})")
            eyes.signal_exactly(who)

    def _take_outcome(self, outcome: dict[str, Any]) -> None:
        self.found.how = outcome["how"]
        self.found.wrong += [f"the release says that it is left: {line}" for line in outcome.get("left_behind", ())]

    # ---------------------------------------------------------------------------------- what is done

    @contextlib.contextmanager
    def _watching(self, top: int):  # noqa: ANN202 - a context manager of a tree
        tree = eyes.Tree(top)
        works = [threading.Thread(target=work, args=(tree, top)) for work in (self._visit, self._kill)]
        for work in works:
            work.start()
        try:
            yield tree
        finally:
            self._over.set()
            for work in works:
                work.join()
            tree.close()

    def _wait_for(self, moment: Moment, *, is_over: Callable[[], bool]) -> bool:
        """Wait for a moment; say whether it came before the end."""
        ends = time.monotonic() + ENDS_WITHIN
        while moment.after != "began" and not soaked.has_told(str(self.folder / "events"), moment.after):
            if is_over() or time.monotonic() > ends:
                return False
            time.sleep(0.01)
        due = time.monotonic() + moment.seconds
        while (left := due - time.monotonic()) > 0:
            if is_over():
                return False
            time.sleep(min(0.05, left))
        return True

    def _visit(self, tree: eyes.Tree, top: int) -> None:
        del tree, top
        if self._wait_for(Moment("launched", 0.0), is_over=self._over.is_set):
            run = next(self._runs.iterdir())
            self.visitors.arrive(run, self._command() if self._port else None)

    def _kill(self, tree: eyes.Tree, top: int) -> None:
        victim = self.plan.victim
        if not victim or not self._wait_for(self.plan.victim_at, is_over=self._over.is_set):
            return
        tree.look()
        who = self._choose(victim, tree, top)
        if who is not None and eyes.signal_exactly(who):
            self.found.killed.append(victim)

    def _choose(self, victim: str, tree: eyes.Tree, top: int) -> eyes.Identity | None:
        guardian = self._guardian(tree, top)
        if victim == "guardian" or guardian is None:
            return guardian
        living = sorted(tree.living() - self.visitors.processes.keys(), key=lambda who: who[1])
        roots = [who for who in living if tree.parent.get(who) == guardian[0] and SERVER in eyes.command_of(who[0])]
        if victim == "root":
            return roots[0] if roots else None
        if victim == "escaped":
            said = {who for who, kind in self._made.members() if kind != "root"}
            return next((who for who in living if who in said), None)
        workers = [who for who in living if roots and tree.parent.get(who) == roots[0][0]]
        return workers[self.plan.number % len(workers)] if workers else None

    @staticmethod
    def _guardian(tree: eyes.Tree, top: int) -> eyes.Identity | None:
        tree.look()
        found = [who for who in tree.living() if tree.parent.get(who) == top]
        return next((who for who in found if "guardian.py" in eyes.command_of(who[0])), None)

    # ------------------------------------------------------------------------------- what must hold

    def _living(self, tree: eyes.Tree, *, everywhere: bool = False) -> set[eyes.Identity]:
        living = tree.living() | {who for who, _ in self._made.members() if eyes.lives(who)}
        if everywhere:
            living |= eyes.with_token(self._token)
        return living - self.visitors.processes.keys() - self._forked()

    def _nothing_left(self, tree: eyes.Tree) -> None:
        """Look until nobody is there any more, and then for everything else."""
        began = self._killed_at or time.monotonic()
        tree.look()
        while living := self._living(tree) or self._living(tree, everywhere=True):
            self.found.last = eyes.describe(next(iter(living)))
            self.found.gone_after = time.monotonic() - began
            if self.found.gone_after > WITHIN:
                break
            time.sleep(0.02)
            tree.look()
        left = self._living(tree, everywhere=True)
        self.found.left = [eyes.describe(who) for who in left]
        for who in left:
            eyes.signal_exactly(who)
        self._files_left(tree)

    def _files_left(self, tree: eyes.Tree) -> None:
        is_last_words = time.monotonic() + WITHIN  # the guardian's process is gone, and it was the last to delete
        for path, maker in self._made.files(tree):
            while os.path.lexists(path) and time.monotonic() < is_last_words and self._living(tree):
                time.sleep(0.02)
            if not os.path.lexists(path):
                continue
            is_nobodys = self._made.is_nobodys(path, maker, tree)
            (self.found.unattributed if is_nobodys else self.found.files).append(str(path))
            path.unlink()

    def _left_by_design(self, tree: eyes.Tree) -> None:
        """Supervisor and guardian died at once: what is left must be found by its log, and is ended by us."""
        tree.look()
        time.sleep(0.5)
        left = self._living(tree, everywhere=True)
        by_log = eyes.with_output_below(self._runs, left)
        lost = [eyes.describe(who) for who in left - by_log if eyes.lives(who)]
        self.found.left = lost
        self.found.by_design = len(by_log)
        for who in left:
            eyes.signal_exactly(who)
        while any(eyes.lives(who) for who in left):
            time.sleep(0.02)
        for path, _ in self._made.files(tree):
            if os.path.lexists(path):
                path.unlink()
