"""Every exception.

::

    HangguardError
    ├── BadLaunch            the command or an option cannot be understood (a ValueError); nothing was started
    ├── Refused              nothing was started, because it could not work
    │   ├── CommandNotFound          no such program, or no such directory
    │   ├── CommandNotExecutable     it exists but may not be executed
    │   └── PortInUse                somebody else listens where the server would
    ├── GaveUp               no attempt became ready; carries the whole story
    │   ├── Permanent                the same launch would fail the same way again
    │   ├── NotReadyInTime           ``ready_within`` is over
    │   └── StoppedEarly             it was asked to stop, from outside, before it was ready
    ├── ServerLost           it was ready, and has ended by itself or was found dead
    ├── LeftBehind           something of ours is still there after the stop, and cannot be ended
    ├── NoSuchServer         no server was found to look at, or not exactly one
    ├── NoSuchRun            no run has this name, or several have it, or it is not to be believed
    │   └── RunOver                  the run is over, or nobody lives who could be asked or told
    ├── NoAnswer             the supervisor of a run lives, and does not answer
    ├── GuardianFailed       the guardian process could not be started or spoke another protocol
    └── WrongProcess         the handle was touched in a forked child of the program that made it

Fields come first and the text is made from them; all are picklable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hangguard.facts import Attempt, Diagnosis, Finding, Listener, Release


def _rebuild(kind: type[HangguardError], args: tuple[Any, ...], fields: dict[str, Any]) -> HangguardError:
    error = kind.__new__(kind)
    Exception.__init__(error, *args)
    error.__dict__.update(fields)
    return error


NO_END = (
    "A process that SIGKILL does not end is another user's (sudo), or it waits in the kernel, usually in the GPU "
    "driver: only a reboot of the machine ends that."
)


def _sentences(problem: str, advice: str) -> str:
    text = f"{problem}. {advice}".rstrip(". ")
    return text if text.endswith("?") else f"{text}."


def _left_behind(attempt: Attempt) -> str:
    left = attempt.release.left_behind if attempt.release is not None else ()
    return f"LEFT BEHIND: {'; '.join(left)}" if left else ""


class HangguardError(Exception):
    """The base. Catch it to catch everything that hangguard raises by itself."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.args, dict(self.__dict__)))

    def __str__(self) -> str:
        return self.text()

    def text(self) -> str:
        """Return what happened and what to do, made from the fields."""
        return " ".join(str(part) for part in self.args)


class BadLaunch(HangguardError, ValueError):
    """The command or an option cannot be understood. Nothing was started."""

    def __init__(self, problem: str, *, advice: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.advice = advice

    def text(self) -> str:
        """Return the problem and the advice."""
        return _sentences(self.problem, self.advice)


class Refused(HangguardError):
    """Nothing was started, because it could not work."""


class CommandNotFound(Refused):
    """No such program, or no such working directory."""

    def __init__(self, path: str, *, what: str = "command") -> None:
        super().__init__(path)
        self.path = path
        self.what = what

    def text(self) -> str:
        """Return which one, and where it was looked for."""
        if self.what == "directory":
            return f"The working directory {self.path!r} does not exist. Give another cwd=."
        return (
            f"The command {self.path!r} was not found. Check its name, or give its full path; "
            "the PATH of the launch's own environment was searched."
        )


class CommandNotExecutable(Refused):
    """It exists but may not be executed."""

    def __init__(self, path: str, *, problem: str = "permission denied") -> None:
        super().__init__(path)
        self.path = path
        self.problem = problem

    def text(self) -> str:
        """Return which one and why."""
        return (
            f"{self.path!r} cannot be executed: {self.problem}. "
            "Check that it is a program and has its execute permission (chmod +x)."
        )


class PortInUse(Refused):
    """Somebody else listens on the port, or the unix socket, where the server would answer.

    Or nobody does, and the kernel still does not give the port to a server: then ``listener`` is ``None``, and
    ``without_listener`` says what is left there (TIME_WAIT, connections that a process holds).
    """

    def __init__(
        self, port: int, listener: Listener | None, *, socket_path: str | None = None, without_listener: str = ""
    ) -> None:
        super().__init__(port)
        self.port = port
        self.listener = listener
        self.socket_path = socket_path
        self.without_listener = without_listener

    def text(self) -> str:
        """Return whose port it is, and what to do."""
        who = "somebody whose process cannot be seen from here"
        if self.listener is not None and self.listener.pid is not None:
            who = f"process {self.listener.pid} ({self.listener.title})"
        if self.socket_path is not None:
            return (
                f"The socket {self.socket_path} is in use by {who}. Nothing was started. "
                "Stop that process yourself if it is yours, or choose another path."
            )
        if self.without_listener:
            return (
                f"Nobody listens on port {self.port}, and it cannot be bound: {self.without_listener}. Nothing was "
                "started. Wait a minute, end who holds it, or choose another port: '{port}' in the command is filled "
                "with a free one."
            )
        return (
            f"Port {self.port} is in use by {who}. Nothing was started. "
            "Stop that process yourself if it is yours, or choose another port: "
            "'{port}' in the command is filled with a free one."
        )


class GaveUp(HangguardError):
    """No attempt became ready. ``history`` has every attempt with its verdict, newest last."""

    def __init__(
        self,
        why: str,
        history: tuple[Attempt, ...] = (),
        *,
        diagnosis: Diagnosis | None = None,
        report_path: str | None = None,
        retryable: bool = False,
    ) -> None:
        super().__init__(why)
        self.why = why
        self.history = history
        self.diagnosis = diagnosis
        self.report_path = report_path
        self.retryable = retryable

    def text(self) -> str:
        """Return the story: each attempt, what to try, what speaks for it, and what is ruled out."""
        lines = [self.why]
        for attempt in self.history:
            verdict = attempt.verdict
            what = f"{verdict.verdict} ({verdict.kind})" if verdict.kind else verdict.verdict
            line = f"attempt {attempt.number}: {what} in {verdict.phase}"
            if verdict.still_for:
                line += f", nothing moved for {verdict.still_for:.0f} s"
            if attempt.fallbacks:
                line += f", with {', '.join(attempt.fallbacks)}"
            if verdict.why:
                line += f": {verdict.why}"
            lines.append(line)
        if self.history and (left := _left_behind(self.history[-1])):
            lines += [left, NO_END]
        if self.diagnosis is not None:
            lines += [f"try: {advice}" for advice in self.diagnosis.advice]
            has_ended = bool(self.history) and self.history[-1].verdict.verdict == "exited"
            lines += _found(self.diagnosis, in_short=has_ended)
        if self.report_path:
            lines.append(f"evidence: {self.report_path}")
        if self.history and self.history[-1].log_path:
            lines.append(f"log: {self.history[-1].log_path}")
        return "\n  ".join(lines)


def _found(diagnosis: Diagnosis, *, in_short: bool) -> list[str]:
    """Return what was found, first what speaks for something; ``in_short``: of what is ruled out the names alone."""
    lines = [_line_of(f) for f in diagnosis.findings if f.standing in {"confirmed", "supported"}]
    lines += [f"ranks: {line}" for line in diagnosis.ranks[:40]]
    ruled_out = [f for f in diagnosis.findings if f.standing == "ruled out"]
    if in_short and ruled_out:
        return [*lines, f"ruled out: {', '.join(f.hypothesis for f in ruled_out)} (why: in the evidence)"]
    return lines + [_line_of(f) for f in ruled_out]


def _line_of(finding: Finding) -> str:
    told: list[str] = []
    for evidence in finding.evidence:  # a line of the log is often quoted in the next
        if not any(evidence in other for other in (*told, *(e for e in finding.evidence if len(e) > len(evidence)))):
            told.append(evidence)
    return f"{finding.standing}: {finding.hypothesis}" + (f" ({'; '.join(told)})" if told else "")


class Permanent(GaveUp):
    """The same launch would fail the same way again: a rejected flag, a missing model, the hardware."""


class NotReadyInTime(GaveUp):
    """``ready_within`` is over."""


class StoppedEarly(GaveUp):
    """Somebody else asked the run to stop (``hangguard stop``) before any attempt was ready."""


class ServerLost(HangguardError):
    """The server was ready and has ended, or hung and was ended. Before it was ever ready you get :class:`GaveUp`."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(attempt.number)
        self.attempt = attempt

    def text(self) -> str:
        """Return how it ended, or where it hung."""
        verdict = self.attempt.verdict
        text = f"The server is lost: {verdict.verdict} ({verdict.kind}). {verdict.why}".strip()
        if suspects := getattr(verdict, "suspects", ()):
            text += f" Look at {suspects[0]}."
        if self.attempt.evidence_path:
            text += f" Evidence: {self.attempt.evidence_path}."
        if self.attempt.log_path:
            text += f" Log: {self.attempt.log_path}."
        left = _left_behind(self.attempt)
        return f"{text} {left}. {NO_END}" if left else text


class LeftBehind(HangguardError):
    """Something of ours is still there after the stop. ``release`` lists it."""

    def __init__(self, release: Release) -> None:
        super().__init__(release.answer)
        self.release = release

    def text(self) -> str:
        """Return what is left, and who holds it."""
        left = "; ".join(self.release.left_behind)
        return f"Left behind after the stop: {left}. {NO_END}"


class NoSuchServer(HangguardError):
    """No server was found to look at, or not exactly one. ``candidates`` are (pid, title) of those that were."""

    def __init__(self, problem: str, candidates: tuple[tuple[int, str], ...] = (), *, advice: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.candidates = candidates
        self.advice = advice

    def text(self) -> str:
        """Return the problem, those that could be meant, and how to say which."""
        found = "".join(f"\n  pid {pid}: {title[:160]}" for pid, title in self.candidates)
        return _sentences(self.problem, self.advice) + found


class NoSuchRun(HangguardError):
    """No run has this name, or several have (``candidates``), or what it says of itself is not to be believed."""

    def __init__(
        self, problem: str, candidates: tuple[str, ...] = (), *, advice: str = "", described: tuple[str, ...] = ()
    ) -> None:
        """``described``: the candidates, each as a line with how it stands and its command."""
        super().__init__(problem)
        self.described = described or candidates
        self.problem = problem
        self.candidates = candidates
        self.advice = advice

    def text(self) -> str:
        """Return the problem, what to do, and those that could be meant."""
        found = "".join(f"\n  {line}" for line in self.described[:20])
        return _sentences(self.problem, self.advice) + found


class RunOver(NoSuchRun):
    """The run is over, or nobody lives who could be asked or told. ``living`` are pids of it that do all the same."""

    def __init__(self, run_id: str, outcome: str = "", living: tuple[int, ...] = (), *, name: str = "") -> None:
        """``name``: how it is called on a command line, where its id alone does not lead to its folder."""
        what = (
            f"The run {run_id} is over" if outcome and not living else f"Nobody of run {run_id} can be asked any more"
        )
        detail = f" ({outcome})" if outcome else ": its supervisor and its guardian are dead"
        left = f"; of its server live {', '.join(f'process {pid}' for pid in living)}" if living else ""
        super().__init__(f"{what}{detail}{left}", advice=f"To see what is left: hangguard clean {name or run_id}")
        self.run_id = run_id
        self.outcome = outcome
        self.living = living


class NoAnswer(HangguardError):
    """The supervisor of a run lives, and does not answer: it is stopped, wedged, or has no control socket."""

    def __init__(self, run_id: str, pid: int, problem: str) -> None:
        super().__init__(run_id)
        self.run_id = run_id
        self.pid = pid
        self.problem = problem

    def text(self) -> str:
        """Return who does not answer, and what can be done."""
        return (
            f"The supervisor of run {self.run_id}, process {self.pid}, does not answer: {self.problem}. "
            f"If it is stopped, let it go on: kill -CONT {self.pid}."
        )


class GuardianFailed(HangguardError):
    """The guardian process could not be started, or spoke another protocol."""

    def __init__(self, problem: str, *, left: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.left = left
        """What of the server may run, or start yet; empty: nothing."""

    def text(self) -> str:
        """Return the problem, and what is left."""
        left = self.left or "nothing of the server was left running"
        return f"The guardian could not do its work: {self.problem}. {left[0].upper()}{left[1:]}."


class WrongProcess(HangguardError):
    """The handle was touched in a forked child. The server belongs to the program that made it."""

    def __init__(self, owner: int, here: int) -> None:
        super().__init__(owner, here)
        self.owner = owner
        self.here = here

    def text(self) -> str:
        """Return whose it is."""
        return (
            f"This server belongs to process {self.owner}; process {self.here} is a forked child of it and "
            "can neither ask nor stop it. Use its url, or start a server of your own."
        )
