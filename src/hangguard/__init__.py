"""Start an LLM server and get back one that answers, or the reason why it does not.

Names are loaded when they are used: ``import hangguard`` itself costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hangguard.act.cleanup import aclean_up as aclean_up
    from hangguard.changes import has_flag as has_flag
    from hangguard.changes import value_of as value_of
    from hangguard.changes import with_flag as with_flag
    from hangguard.changes import with_variable as with_variable
    from hangguard.changes import without_flag as without_flag
    from hangguard.engines import ENGINES as ENGINES
    from hangguard.engines.base import Engine as Engine
    from hangguard.engines.base import Flags as Flags
    from hangguard.errors import BadLaunch as BadLaunch
    from hangguard.errors import CommandNotExecutable as CommandNotExecutable
    from hangguard.errors import CommandNotFound as CommandNotFound
    from hangguard.errors import GaveUp as GaveUp
    from hangguard.errors import GuardianFailed as GuardianFailed
    from hangguard.errors import HangguardError as HangguardError
    from hangguard.errors import LeftBehind as LeftBehind
    from hangguard.errors import NoAnswer as NoAnswer
    from hangguard.errors import NoSuchRun as NoSuchRun
    from hangguard.errors import NoSuchServer as NoSuchServer
    from hangguard.errors import NotReadyInTime as NotReadyInTime
    from hangguard.errors import Permanent as Permanent
    from hangguard.errors import PortInUse as PortInUse
    from hangguard.errors import Refused as Refused
    from hangguard.errors import RunOver as RunOver
    from hangguard.errors import ServerLost as ServerLost
    from hangguard.errors import StoppedEarly as StoppedEarly
    from hangguard.errors import WrongProcess as WrongProcess
    from hangguard.facts import AppliedChange as AppliedChange
    from hangguard.facts import Ask as Ask
    from hangguard.facts import Attempt as Attempt
    from hangguard.facts import Broken as Broken
    from hangguard.facts import Check as Check
    from hangguard.facts import CleanupItem as CleanupItem
    from hangguard.facts import CleanupReport as CleanupReport
    from hangguard.facts import Communicator as Communicator
    from hangguard.facts import Daemon as Daemon
    from hangguard.facts import Departed as Departed
    from hangguard.facts import Diagnosis as Diagnosis
    from hangguard.facts import Drained as Drained
    from hangguard.facts import EndedProcess as EndedProcess
    from hangguard.facts import Exit as Exit
    from hangguard.facts import Exited as Exited
    from hangguard.facts import Expired as Expired
    from hangguard.facts import Fallback as Fallback
    from hangguard.facts import Finding as Finding
    from hangguard.facts import Gpu as Gpu
    from hangguard.facts import GpuFault as GpuFault
    from hangguard.facts import GpuHolder as GpuHolder
    from hangguard.facts import Growth as Growth
    from hangguard.facts import HeldFile as HeldFile
    from hangguard.facts import HeldFiles as HeldFiles
    from hangguard.facts import Host as Host
    from hangguard.facts import IdlePlace as IdlePlace
    from hangguard.facts import Launch as Launch
    from hangguard.facts import Limits as Limits
    from hangguard.facts import Listener as Listener
    from hangguard.facts import LoadRoute as LoadRoute
    from hangguard.facts import LockFile as LockFile
    from hangguard.facts import Log as Log
    from hangguard.facts import LogLine as LogLine
    from hangguard.facts import Marker as Marker
    from hangguard.facts import Measure as Measure
    from hangguard.facts import Metric as Metric
    from hangguard.facts import Moving as Moving
    from hangguard.facts import NewName as NewName
    from hangguard.facts import PastAttempt as PastAttempt
    from hangguard.facts import Place as Place
    from hangguard.facts import Port as Port
    from hangguard.facts import Preflight as Preflight
    from hangguard.facts import Process as Process
    from hangguard.facts import QuietLine as QuietLine
    from hangguard.facts import QuietRoute as QuietRoute
    from hangguard.facts import Ready as Ready
    from hangguard.facts import Release as Release
    from hangguard.facts import ReleaseItem as ReleaseItem
    from hangguard.facts import RemovedFile as RemovedFile
    from hangguard.facts import Reply as Reply
    from hangguard.facts import Request as Request
    from hangguard.facts import RunState as RunState
    from hangguard.facts import RunStatus as RunStatus
    from hangguard.facts import RunStopped as RunStopped
    from hangguard.facts import Sample as Sample
    from hangguard.facts import Serving as Serving
    from hangguard.facts import SharedSegment as SharedSegment
    from hangguard.facts import Stack as Stack
    from hangguard.facts import StackFrame as StackFrame
    from hangguard.facts import StackMarker as StackMarker
    from hangguard.facts import Stuck as Stuck
    from hangguard.facts import Survivor as Survivor
    from hangguard.facts import Suspect as Suspect
    from hangguard.facts import Symptom as Symptom
    from hangguard.facts import ThreadStack as ThreadStack
    from hangguard.facts import Timer as Timer
    from hangguard.facts import Tree as Tree
    from hangguard.facts import Unclear as Unclear
    from hangguard.facts import Unseen as Unseen
    from hangguard.facts import Verdict as Verdict
    from hangguard.facts import Waiting as Waiting
    from hangguard.facts import WaitSite as WaitSite
    from hangguard.judge import Budget as Budget
    from hangguard.judge import GiveUp as GiveUp
    from hangguard.judge import Keep as Keep
    from hangguard.judge import Memory as Memory
    from hangguard.judge import Relaunch as Relaunch
    from hangguard.judge import Rules as Rules
    from hangguard.judge import assess as assess
    from hangguard.judge import next_move as next_move
    from hangguard.judge import rules_for as rules_for
    from hangguard.judge import start as start
    from hangguard.judge import step as step
    from hangguard.launching import read_command as read_command
    from hangguard.looking import Attachment as Attachment
    from hangguard.looking import Watch as Watch
    from hangguard.looking import attach as attach
    from hangguard.looking import clean_up as clean_up
    from hangguard.looking import diagnose as diagnose
    from hangguard.looking import preflight as preflight
    from hangguard.observe import Observer as Observer
    from hangguard.observe import Target as Target
    from hangguard.reattaching import ReattachedRun as ReattachedRun
    from hangguard.reattaching import Reattachment as Reattachment
    from hangguard.reattaching import reattach as reattach
    from hangguard.supervision.attach import AsyncWatch as AsyncWatch
    from hangguard.supervision.diagnose import adiagnose as adiagnose
    from hangguard.supervision.events import Attached as Attached
    from hangguard.supervision.events import BecameReady as BecameReady
    from hangguard.supervision.events import Draining as Draining
    from hangguard.supervision.events import Ended as Ended
    from hangguard.supervision.events import Event as Event
    from hangguard.supervision.events import FallbackChosen as FallbackChosen
    from hangguard.supervision.events import GivenUp as GivenUp
    from hangguard.supervision.events import Launched as Launched
    from hangguard.supervision.events import Notice as Notice
    from hangguard.supervision.events import PhaseChanged as PhaseChanged
    from hangguard.supervision.events import Released as Released
    from hangguard.supervision.events import Stopping as Stopping
    from hangguard.supervision.events import VerdictChanged as VerdictChanged
    from hangguard.supervision.found import FoundServer as FoundServer
    from hangguard.supervision.handle import AsyncServer as AsyncServer
    from hangguard.supervision.look import Look as Look
    from hangguard.supervision.look import Missing as Missing
    from hangguard.supervision.preflight import apreflight as apreflight
    from hangguard.supervision.reattach import AsyncReattachedRun as AsyncReattachedRun
    from hangguard.supervision.retry import Retry as Retry
    from hangguard.sync import Server as Server
    from hangguard.sync import Supervision as Supervision
    from hangguard.sync import supervise as supervise

_HOMES = {
    "act.cleanup": ("aclean_up",),
    "changes": ("has_flag", "value_of", "with_flag", "with_variable", "without_flag"),
    "engines": ("ENGINES",),
    "engines.base": ("Engine", "Flags"),
    "errors": (
        "BadLaunch", "CommandNotExecutable", "CommandNotFound", "GaveUp", "GuardianFailed", "HangguardError",
        "LeftBehind", "NoAnswer", "NoSuchRun", "NoSuchServer", "NotReadyInTime", "Permanent", "PortInUse", "Refused",
        "RunOver", "ServerLost", "StoppedEarly", "WrongProcess",
    ),
    "facts": (
        "AppliedChange", "Ask", "Attempt", "Broken", "Check", "CleanupItem", "CleanupReport", "Communicator",
        "Daemon", "Departed", "Diagnosis", "Drained", "EndedProcess", "Exit", "Exited", "Expired", "Fallback",
        "Finding", "Gpu", "GpuFault", "GpuHolder", "Growth", "HeldFile", "HeldFiles", "Host", "IdlePlace", "Launch",
        "Limits", "Listener", "LoadRoute", "LockFile", "Log", "LogLine", "Marker", "Measure", "Metric", "Moving",
        "NewName", "PastAttempt", "Place", "Port", "Preflight", "Process", "QuietLine", "QuietRoute", "Ready",
        "Release", "ReleaseItem", "RemovedFile", "Reply", "Request", "RunState", "RunStatus", "RunStopped", "Sample",
        "Serving", "SharedSegment", "Stack", "StackFrame", "StackMarker", "Stuck", "Survivor", "Suspect", "Symptom",
        "ThreadStack", "Timer", "Tree", "Unclear", "Unseen", "Verdict", "WaitSite", "Waiting",
    ),
    "judge": (
        "Budget", "GiveUp", "Keep", "Memory", "Relaunch", "Rules", "assess", "next_move", "rules_for", "start",
        "step",
    ),
    "launching": ("read_command",),
    "looking": ("Attachment", "Watch", "attach", "clean_up", "diagnose", "preflight"),
    "observe": ("Observer", "Target"),
    "reattaching": ("ReattachedRun", "Reattachment", "reattach"),
    "supervision.attach": ("AsyncWatch",),
    "supervision.diagnose": ("adiagnose",),
    "supervision.events": (
        "Attached", "BecameReady", "Draining", "Ended", "Event", "FallbackChosen", "GivenUp", "Launched", "Notice",
        "PhaseChanged", "Released", "Stopping", "VerdictChanged",
    ),
    "supervision.found": ("FoundServer",),
    "supervision.handle": ("AsyncServer",),
    "supervision.look": ("Look", "Missing"),
    "supervision.preflight": ("apreflight",),
    "supervision.reattach": ("AsyncReattachedRun",),
    "supervision.retry": ("Retry",),
    "sync": ("Server", "Supervision", "supervise"),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)  # noqa: PLE0605 - test_exports holds this and the imports above together


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        msg = f"module 'hangguard' has no attribute {name!r}"
        raise AttributeError(msg)
    value = getattr(import_module(f"hangguard.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
