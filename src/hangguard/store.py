"""Where a run keeps its files: log, evidence, events. Private to the user, links never followed."""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import tempfile
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import platformdirs

from hangguard.redact import clean_text, redact

RUN_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}", re.ASCII)
TEMPORARY = "hangguard-"
"""How the name of a run's folder begins that could be made in a temporary place only."""
MARKER = ".hangguard-run"
"""The file by which a run's folder is known as one. Locked for as long as its run can still be asked for anything."""
CONTROL = "control.sock"
"""The socket at which the supervisor of a run can be asked and told."""
SUPERVISOR_LOG = "supervisor.log"
"""What a supervisor in the background (``run --detach``) would print on a terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """The folder of one run; ``path`` is ``None`` where none could be made."""

    run_id: str
    path: str | None
    lost: tuple[str, ...] = ()
    """What could not be had, each with its consequence, in sentences."""
    known_secrets: frozenset[str] = field(default=frozenset(), repr=False)
    home: str | None = None
    """The state folder with the runs of this user, where old ones are deleted; ``None``: it lies elsewhere."""
    in_use: InUse | None = field(default=None, repr=False, compare=False)

    def file(self, name: str) -> str | None:
        """Return the path of a file in the folder."""
        return os.path.join(self.path, name) if self.path else None  # noqa: PTH118 - plain strings travel

    def write_json(self, name: str, document: Any, *, known: frozenset[str] = frozenset()) -> str | None:
        """Write a document, secrets out, mode 0600; return its path, or ``None`` where there is no folder.

        Raises :class:`OSError` when the folder cannot be written any more.
        """
        path = self.file(name)
        if path is None:
            return None
        text = json.dumps(redact(document, known=self.known_secrets | known), indent=1, ensure_ascii=True, default=str)
        write_private(path, text.encode())
        return path


def new_run_id() -> str:
    """Return the id of a new run: when it begins, and what nobody else has."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def open_run_folder(
    run_dir: str | os.PathLike[str] | None = None, known: frozenset[str] = frozenset(), run_id: str = ""
) -> RunFolder:
    """Make the folder of a new run: below ``run_dir``, else the user's state folder, else a temporary one.

    Never raises: a machine without a writable place gives a run without files, and says what is lost.
    """
    run_id = run_id or new_run_id()
    bases = _bases(run_dir)
    lost = [] if bases else ["this user has no home folder, so no state folder: what this run teaches is not kept"]
    for base in bases:
        try:
            if run_dir is None and (problem := why_not_for_root(base)):
                raise PermissionError(0, problem)
            path = _make(base, run_id)
            home = str(base.absolute()) if run_dir is None else None
            return RunFolder(
                run_id=run_id, path=path, lost=tuple(lost), known_secrets=known, home=home, in_use=_mark(path, run_id)
            )
        except OSError as problem:
            lost.append(f"{base} cannot be used ({problem.strerror or problem})")
    try:
        strange = why_not_for_root(Path(tempfile.gettempdir()).absolute())
        path = tempfile.mkdtemp(prefix=TEMPORARY, dir="/tmp" if strange else None)  # noqa: S108 - made private
        lost.append(f"the files of this run are in {path}, which may not outlive the machine's next start")
        return RunFolder(run_id=run_id, path=path, lost=tuple(lost), known_secrets=known)
    except OSError as problem:
        lost.append(f"there is no temporary folder either ({problem.strerror or problem}): this run has no log")
    return RunFolder(run_id=run_id, path=None, lost=tuple(lost), known_secrets=known)


def state_folder() -> str | None:
    """Return what of hangguard's stays in this user's home; ``None``: this user has no home."""
    try:
        path = platformdirs.user_state_dir("hangguard", appauthor=False)
    except (OSError, RuntimeError):
        return None
    # An older platformdirs gives "~/…" where there is no home: a folder of that name in the working directory.
    return path if Path(path).is_absolute() else None


def places_of_runs(run_dir: str | os.PathLike[str] | None = None) -> tuple[str, ...]:
    """Return where the folder of a run may be made, the best place first; the temporary ones come last.

    Nothing is tried: :func:`tempfile.gettempdir` would write a file into each.
    """
    named = (os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))  # as tempfile looks for them
    temporary = (*filter(None, named), "/tmp", "/var/tmp")  # noqa: S108 - looked at
    return (*(str(base.absolute()) for base in _bases(run_dir)), *dict.fromkeys(map(os.path.abspath, temporary)))


def why_not_for_root(path: Path) -> str:
    """Return why root makes nothing there: ``sudo`` may keep HOME or TMPDIR. Empty: it may, or this is not root.

    Files of root's in another user's folder are in his way, and what root does there he could lead elsewhere by a link.
    """
    if os.geteuid() != 0 or not _sees_every_user():
        return ""
    for folder in reversed([path, *path.parents]):
        with suppress(FileNotFoundError):
            owner = folder.lstat().st_uid
            if owner != 0:
                return f"{folder} belongs to user {owner}, and this is root"
    return ""


def _sees_every_user() -> bool:
    """Whether no user is shown as nobody, as those are that a container does not know: user_namespaces(7)."""
    with suppress(OSError):
        return Path("/proc/self/uid_map").read_text(encoding="ascii").split() == ["0", "0", "4294967295"]
    return True


def _bases(run_dir: str | os.PathLike[str] | None) -> tuple[Path, ...]:
    if run_dir is not None:
        return (Path(run_dir),)
    state = state_folder()
    return (Path(state) / "runs",) if state is not None else ()


def _make(base: Path, run_id: str) -> str:
    """A folder of ours that others cannot enter; a planted link is refused by mkdir."""
    for folder in reversed([base, *base.parents]):  # mkdir(parents=True) would make those in between for everybody
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)
    path = base / run_id
    path.mkdir(mode=0o700)
    return str(path.absolute())


class InUse:
    """A shared lock on the marker of a run: nobody deletes the folder while this is there, or a forked child of it."""

    def __init__(self, marker: int) -> None:
        weakref.finalize(self, os.close, marker).atexit = False
        fcntl.flock(marker, fcntl.LOCK_SH | fcntl.LOCK_NB)


def _mark(path: str, run_id: str) -> InUse | None:
    """Say whose folder this is. Where that cannot be written or locked, the folder is left alone for ever."""
    with suppress(OSError):
        marker = os.open(
            os.path.join(path, MARKER),  # noqa: PTH118 - plain strings travel
            os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
            0o600,
        )
        in_use = InUse(marker)
        os.write(marker, json.dumps(mark_of(run_id)).encode())  # only now is it known as a run
        return in_use
    return None


def mark_of(run_id: str) -> dict[str, str]:
    """Return what the marker of a run says that begins now, here."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return {"run": run_id, "boot": boot, "host": os.uname().nodename}


def write_private(path: str, content: bytes) -> None:
    """Write a file whole, mode 0600, in place of an older one; a link in its place is replaced, not followed."""
    folder, name = os.path.split(path)
    part = os.path.join(folder, f".{name}.part-{os.getpid()}-{secrets.token_hex(4)}")  # noqa: PTH118
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as out:
            out.write(content)
        os.replace(part, path)  # noqa: PTH105
    except BaseException:
        os.unlink(part)  # noqa: PTH108 - the part file that we made ourselves a moment ago
        raise


def tail_of(path: str, *, lines: int = 60, at_most: int = 65536) -> tuple[str, ...]:
    """Return the last lines of a log, control characters out. Raises :class:`OSError` when it cannot be read."""
    with open(path, "rb") as log:  # noqa: PTH123
        log.seek(0, os.SEEK_END)
        log.seek(max(0, log.tell() - at_most))
        is_inside = log.tell() > 0
        text = log.read(at_most).decode(errors="replace").replace("\r", "\n")
        if is_inside:  # what is left of the first line could be half of a secret, and nobody could tell
            text = text.partition("\n")[2] or text
        return tuple(clean_text(line) for line in text.split("\n")[-lines:] if line)
