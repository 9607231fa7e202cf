"""The nouns: frozen values that every layer speaks in.

A fact is what was seen, asked for or decided. Facts know no clock and no machine: times are monotonic
seconds carried inside them, counters are cumulative (differences are taken in ``judge``), and what could not
be seen is an :class:`Unseen` with its reason, never zero.
"""

from __future__ import annotations

from hangguard.facts.asked import AppliedChange as AppliedChange
from hangguard.facts.asked import Fallback as Fallback
from hangguard.facts.asked import Launch as Launch
from hangguard.facts.asked import Limits as Limits
from hangguard.facts.checked import Answer as Answer
from hangguard.facts.checked import Check as Check
from hangguard.facts.checked import Driver as Driver
from hangguard.facts.checked import EarlierRun as EarlierRun
from hangguard.facts.checked import GuardianTrial as GuardianTrial
from hangguard.facts.checked import MemoryLimit as MemoryLimit
from hangguard.facts.checked import ModelFiles as ModelFiles
from hangguard.facts.checked import Permissions as Permissions
from hangguard.facts.checked import Preflight as Preflight
from hangguard.facts.checked import ProcessLimits as ProcessLimits
from hangguard.facts.checked import ResourceLimit as ResourceLimit
from hangguard.facts.checked import Room as Room
from hangguard.facts.checked import Surroundings as Surroundings
from hangguard.facts.decided import Broken as Broken
from hangguard.facts.decided import Confidence as Confidence
from hangguard.facts.decided import Diagnosis as Diagnosis
from hangguard.facts.decided import Exited as Exited
from hangguard.facts.decided import Expired as Expired
from hangguard.facts.decided import Finding as Finding
from hangguard.facts.decided import Judged as Judged
from hangguard.facts.decided import Measure as Measure
from hangguard.facts.decided import Moving as Moving
from hangguard.facts.decided import Ready as Ready
from hangguard.facts.decided import Standing as Standing
from hangguard.facts.decided import Stuck as Stuck
from hangguard.facts.decided import Suspect as Suspect
from hangguard.facts.decided import Unclear as Unclear
from hangguard.facts.decided import Verdict as Verdict
from hangguard.facts.decided import Waiting as Waiting
from hangguard.facts.done import Attempt as Attempt
from hangguard.facts.done import Daemon as Daemon
from hangguard.facts.done import Drained as Drained
from hangguard.facts.done import Release as Release
from hangguard.facts.done import ReleaseItem as ReleaseItem
from hangguard.facts.done import RemovedFile as RemovedFile
from hangguard.facts.done import Resource as Resource
from hangguard.facts.done import SharedSegment as SharedSegment
from hangguard.facts.done import Survivor as Survivor
from hangguard.facts.done import ToldBy as ToldBy
from hangguard.facts.known import PHASES as PHASES
from hangguard.facts.known import Alters as Alters
from hangguard.facts.known import IdlePlace as IdlePlace
from hangguard.facts.known import LoadRoute as LoadRoute
from hangguard.facts.known import Marker as Marker
from hangguard.facts.known import Metric as Metric
from hangguard.facts.known import Permission as Permission
from hangguard.facts.known import Phase as Phase
from hangguard.facts.known import QuietRoute as QuietRoute
from hangguard.facts.known import Request as Request
from hangguard.facts.known import StackMarker as StackMarker
from hangguard.facts.known import Symptom as Symptom
from hangguard.facts.known import Task as Task
from hangguard.facts.known import Timer as Timer
from hangguard.facts.known import Unseen as Unseen
from hangguard.facts.known import WaitsFor as WaitsFor
from hangguard.facts.known import WaitSite as WaitSite
from hangguard.facts.seen import NOT_ASKED as NOT_ASKED
from hangguard.facts.seen import Ask as Ask
from hangguard.facts.seen import Communicator as Communicator
from hangguard.facts.seen import Departed as Departed
from hangguard.facts.seen import Exit as Exit
from hangguard.facts.seen import Gpu as Gpu
from hangguard.facts.seen import GpuFault as GpuFault
from hangguard.facts.seen import GpuHolder as GpuHolder
from hangguard.facts.seen import Growth as Growth
from hangguard.facts.seen import HeldFile as HeldFile
from hangguard.facts.seen import HeldFiles as HeldFiles
from hangguard.facts.seen import Host as Host
from hangguard.facts.seen import Listener as Listener
from hangguard.facts.seen import LockFile as LockFile
from hangguard.facts.seen import Log as Log
from hangguard.facts.seen import LogLine as LogLine
from hangguard.facts.seen import Port as Port
from hangguard.facts.seen import Process as Process
from hangguard.facts.seen import Reply as Reply
from hangguard.facts.seen import Sample as Sample
from hangguard.facts.seen import Serving as Serving
from hangguard.facts.seen import Stack as Stack
from hangguard.facts.seen import StackFrame as StackFrame
from hangguard.facts.seen import ThreadStack as ThreadStack
from hangguard.facts.seen import Tree as Tree
