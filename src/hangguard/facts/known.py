"""The first words, and what is known of an engine as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Phase: TypeAlias = Literal[
    "import", "dist-init", "weights-load", "kv-cache", "jit-compile", "graph-capture", "warm-up", "serving"
]
PHASES: tuple[Phase, ...] = (
    "import", "dist-init", "weights-load", "kv-cache", "jit-compile", "graph-capture", "warm-up", "serving",
)  # fmt: skip

Alters: TypeAlias = Literal["nothing", "speed", "results"]
"""What a change does to the server: nothing (instrumentation), its speed, or its answers."""

Permission: TypeAlias = Literal["auto", "any"]

Task: TypeAlias = Literal["generate", "embed", "rerank", "classify", "transcribe", "pool"]
"""What a server computes; pool: hidden states or rewards as they come out of the model."""


@dataclass(frozen=True, slots=True)
class Unseen:
    """A source that could not be read, and why. Not the same as "looked, nothing there"."""

    reason: str


NOT_ASKED = Unseen("not asked for in this sample")


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """A log line that tells where start-up is. ``since`` and ``until`` are versions, both inclusive."""

    pattern: str
    """A regular expression, searched in the line."""
    phase: Phase
    """The phase that the launch is in from this line on."""
    gap: bool = False
    """The line ends a phase: ``phase`` is the next one to come, not one that was seen to begin."""
    since: str | None = None
    until: str | None = None
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackMarker:
    """A function name in a Python stack that places a member in a phase, more exactly than the log does."""

    function: str
    """A regular expression that must match the whole function name."""
    phase: Phase
    file: str = ""
    """Part of the file's path that must occur too; empty: any file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """A log line that names the reason of an exit; a group ``pid`` of its pattern, of which process it tells."""

    pattern: str
    reason: str
    permanent: bool = False
    """Whether the same launch would end the same way again."""
    final: bool = False
    """Whether the engine says by it that its start has failed for good: whatever lives on then is on its way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One HTTP request, as data, and what its answer must hold. ``body`` is JSON text; ``None``: no body."""

    method: Literal["GET", "POST"]
    path: str
    body: str | None = None
    form: tuple[tuple[str, str], ...] = ()
    """Fields of a multipart form, sent instead of a body."""
    audio_seconds: float = 0.0
    """Above 0: a WAV file of so much silence is the form's field ``file``."""
    task: Task = "generate"
    """What is asked for by it."""
    proof: tuple[str, ...] = ()
    """Places in the JSON answer (``choices.0.token_ids``), of which one must hold something; empty: any content."""
    unless_false: tuple[str, str] | None = None
    """(path, key): a GET of this path is asked first. Where its JSON has the key, and it is false, this request is
    not sent: the server would not refuse it well."""
    otherwise: tuple[Request, ...] = ()
    """Asked in this order where the server says that it does not do this one."""


WaitsFor: TypeAlias = Literal[
    "peers",
    "communicator",
    "collective",
    "kernel",
    "lock",
    "download",
    "compile",
    "message",
    "work",
    "start-up",
]
"""What a wait site waits for: a peer in a rendezvous, a peer in the making of a communicator, a peer in a collective
operation, a kernel on the GPU, a lock file, a download, a compiler, a lock or message of the same launch, the next
piece of work (an idle worker), or the start of the workers (a front end)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitSite:
    """A function in which a thread waits, and for what.

    A stack is read from its innermost frame outwards; the first frame that matches tells.
    """

    function: str
    """A regular expression that must match the whole function name."""
    waits_for: WaitsFor
    file: str = ""
    """Part of the file's path that must occur too; empty: any file."""
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdlePlace:
    """A loop in which a worker takes its work, and where in it one without work stands.

    A stack is idle where every frame inside the loop is one of these: inside a request there are others.
    """

    loop: str
    """A regular expression that must match the whole name of the loop's function."""
    inside: str
    """The same for every function that the loop calls while it waits."""
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One counter or gauge of an engine's metrics, by its name there. ``since``, ``until``: versions, inclusive.

    Of several for one field the first that is there counts.
    """

    field: Literal["running", "waiting", "generated_tokens", "prompt_tokens", "awake"]
    """The field of :class:`Serving` that it fills; lines with labels are added up. ``awake``: 0 means asleep."""
    name: str
    labels: tuple[tuple[str, str], ...] = ()
    """Which lines count: (label, regular expression for its whole value; a label that is missing is empty)."""
    since: str | None = None
    until: str | None = None
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRoute:
    """A route that tells in JSON how many requests are there, in a list with one entry for each replica."""

    path: str
    under: str | None = None
    """The key of the list; ``None``: the answer is the list."""
    waiting: str
    """The key of each entry that counts the requests that wait."""
    running: str | None = None
    total: str | None = None
    """Where there is no key for those that run: the key of both together."""
    since: str | None = None
    until: str | None = None
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuietRoute:
    """A route that tells in JSON whether the server was put to sleep or paused on purpose."""

    path: str
    key: str
    variable: str
    """The route is there only where this environment variable is set to something else than 0."""
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuietLine:
    """Two lines of the log between which the server sleeps or is paused on purpose, where no route tells that."""

    begins: str
    """A regular expression; the line that it is found in says that it sleeps."""
    ends: str
    """The same for the line that takes this back."""
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timer:
    """A limit that the engine or one of its libraries has by itself, after which it ends and the evidence is gone."""

    name: str
    seconds: float
    """The default."""
    covers: tuple[Phase, ...]
    options: tuple[str, ...] = ()
    """Options that change it, seconds."""
    variable: str | None = None
    """The environment variable that changes it, seconds."""
    since: str | None = None
    until: str | None = None
    ends: bool = True
    """Whether the server ends when it fires; False: it only logs."""
    source: str = ""
