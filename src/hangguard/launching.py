"""From a command to a :class:`~hangguard.facts.Launch`: what will run, as which engine, and where it will answer.

Nothing is started and no shell is asked: words are read as the server's own parser will read them, and what is
installed is read from files.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from hangguard.changes import env_prefix, has_flag, value_of
from hangguard.engines import ENGINES, engine_named
from hangguard.engines.base import Engine, Flags
from hangguard.engines.common import base_name
from hangguard.engines.generic import GENERIC
from hangguard.errors import BadLaunch, CommandNotExecutable, CommandNotFound
from hangguard.facts import Launch
from hangguard.installed import find_installed
from hangguard.observe.ports import free_port
from hangguard.redact import redact

DELEGATING = frozenset(
    ("docker", "podman", "nerdctl", "srun", "salloc", "kubectl", "ssh", "systemd-run", "ray", "flatpak-spawn")
)
"""Programs that have somebody else start the server: what we would own is an idle client."""

_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "*": "127.0.0.1", "": "127.0.0.1"}  # noqa: S104
_OPERATOR = re.compile(r"(?:\d*|&)[<>]+.*|[|&;()]+", re.ASCII)
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.ASCII | re.DOTALL)


def read_command(
    command: str | Sequence[str],
    *,
    engine: str | Engine | None = None,
    url: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> tuple[Launch, Engine]:
    """Return the launch, and the engine that it starts.

    ``env`` is the whole environment (``None``: this program's). Raises :class:`BadLaunch` for what cannot be
    understood, :class:`CommandNotFound` and :class:`CommandNotExecutable` for what cannot be started.
    """
    words = _split(command)
    spare = free_port() if any("{port}" in word for word in (*words.argv, url or "")) else None
    argv = tuple(_filled(word, spare) for word in words.argv)
    folder = _folder(cwd)
    given = os.environ if env is None else env
    variables = _environment(given, argv)
    _check_exists(argv[0], given, folder)
    _check_exists(argv[env_prefix(argv)], variables, folder)

    known, args = _recognised(argv, engine)
    place = _place(
        known,
        argv[1:] if args is None else args,
        recognised=args is not None,
        named=engine is not None,
        url=None if url is None else _filled(url, spare),
        spare=spare,
    )
    installed = find_installed(known, argv, variables, folder)
    launch = Launch(
        argv=argv,
        env=tuple(sorted(variables.items())),
        cwd=folder,
        engine=known.name,
        version=installed.version,
        options=installed.options,
        url=place.url,
        host=place.host,
        port=place.port,
        model=_model(known, args or ()),
        task=known.task(args) if known.task and args else "generate",
        api_key=_api_key(known.flags, args or (), variables),
        ranks=_ranks(known.flags, args or ()),
        nodes=_number(args or (), known.flags.nodes),
        delegates_to=_delegate(argv),
        notes=(*words.notes, *_unread(args or ()), *installed.notes),
    )
    return launch, known


# ------------------------------------------------------------------------------------------- the words


@dataclass(frozen=True, slots=True)
class _Words:
    argv: tuple[str, ...]
    notes: tuple[str, ...] = field(default=())


def _split(command: str | Sequence[str]) -> _Words:
    words = _split_text(command) if isinstance(command, str) else _Words(_checked(command))
    if not words.argv or not words.argv[0]:
        raise BadLaunch("The command is empty", advice="Give the server's command line, as text or as words")
    if any("\0" in word for word in words.argv):
        raise BadLaunch("The command contains a NUL character")
    return words


def _checked(command: Sequence[str]) -> tuple[str, ...]:
    words: list[str] = []
    for word in command:
        given: object = os.fspath(word) if isinstance(word, os.PathLike) else word
        if not isinstance(given, str):
            raise BadLaunch(f"The command holds {given!r}, which is not text", advice="Every word must be a str")
        words.append(given)
    return tuple(words)


def _split_text(command: str) -> _Words:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise BadLaunch(
            f"The command cannot be split into words: {error}",
            advice="Check its quotes, or give a list of words",
        ) from None
    operator = _shell_operator(command)
    if operator is not None:
        raise BadLaunch(
            f"The command holds the shell operator {operator!r}, and no shell is asked to run it",
            advice="Give the server's command alone; quote the word if it belongs to the server. "
            "What the server prints is kept in the run folder",
        )
    settings = 0
    while settings < len(words) and _ASSIGNMENT.fullmatch(words[settings]):
        settings += 1
    if 0 < settings < len(words):  # A=B command: what a shell would do, env does
        words = ["env", *words]
    unexpanded = [word for word in words if re.search(r"\$[A-Za-z_{(]|`", word) or word.startswith("~")]
    notes = [f"{word!r} reaches the server as it stands: no shell expands it" for word in unexpanded]
    return _Words(tuple(words), tuple(notes))


def _shell_operator(command: str) -> str | None:
    """Return the first unquoted shell operator that stands as a word of its own, or ends one (``cd x;``)."""
    lexer = shlex.shlex(command, posix=False)  # this mode keeps the quotes: '"|"' is not '|'
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        for word in lexer:
            if _OPERATOR.fullmatch(word):
                return word
            if word.endswith(";") and not word.endswith("\\;"):
                return ";"
    except ValueError:
        return None  # an escaped quote, which this mode cannot read: the words were split well already
    return None


def _filled(word: str, port: int | None) -> str:
    return word if port is None else word.replace("{port}", str(port))


# ------------------------------------------------------------------------------- where it will be started


def _folder(cwd: str | os.PathLike[str] | None) -> str:
    folder = os.path.abspath(os.getcwd() if cwd is None else os.fspath(cwd))  # noqa: PTH100, PTH109
    if not Path(folder).is_dir():
        raise CommandNotFound(folder, what="directory")
    return folder


def _environment(given: Mapping[str, str], argv: tuple[str, ...]) -> dict[str, str]:
    variables = dict(given)
    for name, value in variables.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise BadLaunch(f"The environment holds {name!r}, whose value is not text")
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise BadLaunch(f"The environment holds {name!r}, which no program can be given")
    for word in argv[1 : env_prefix(argv)]:
        name, _, value = word.partition("=")
        variables[name] = value
    return variables


def _check_exists(word: str, variables: Mapping[str, str], folder: str) -> None:
    if _find_program(word, variables, folder) is None:
        raise CommandNotFound(word)


def _find_program(word: str, variables: Mapping[str, str], folder: str) -> Path | None:
    """Return the file that the word will run, ``None`` where there is none.

    Raises :class:`CommandNotExecutable` for one that is there and cannot be run.
    """
    path = variables.get("PATH", os.defpath)
    if "/" in word:
        candidates = [Path(folder, word)]
    else:
        found = shutil.which(word, path=path)
        if found is not None:
            return Path(folder, found)
        candidates = [Path(folder, part or ".", word) for part in path.split(os.pathsep)]
        candidates = [candidate for candidate in candidates if candidate.is_file()]
    for candidate in candidates:
        if candidate.is_dir():
            raise CommandNotExecutable(word, problem="it is a directory")
        if candidate.exists():
            if not os.access(candidate, os.X_OK):
                raise CommandNotExecutable(word)
            return candidate
    return None


# ---------------------------------------------------------------------------------------- which engine


def _recognised(argv: tuple[str, ...], engine: str | Engine | None) -> tuple[Engine, tuple[str, ...] | None]:
    """Return the engine and the server's own arguments; ``None``: the command does not show where they begin."""
    candidates = ENGINES
    if engine is not None:
        candidates = (engine if isinstance(engine, Engine) else engine_named(engine),)
    for candidate in candidates:
        start = candidate.recognise(argv)
        if start is not None:
            return candidate, argv[start:]
    if engine is not None:  # the caller says so: flags are read wherever they stand
        return candidates[0], None
    return GENERIC, None


def _delegate(argv: tuple[str, ...]) -> str | None:
    program = base_name(argv[env_prefix(argv)])
    return program if program in DELEGATING else None


# ------------------------------------------------------------------------------------ where it will answer


@dataclass(frozen=True, slots=True)
class _Place:
    url: str
    host: str
    port: int


def _place(
    engine: Engine,
    words: tuple[str, ...],
    *,
    recognised: bool,
    named: bool,
    url: str | None,
    spare: int | None,
) -> _Place:
    """Return where it will answer: as the caller says, as its flags say, else the engine's default.

    The flags of a command that was not recognised count only where the caller named its engine; its default
    never does, for scripts hide flags.
    """
    if url is not None:
        return _place_of_url(url)
    if recognised and has_flag(words, "--uds"):
        raise BadLaunch("The server would answer on a unix socket only", advice="Leave --uds out, give --port")
    port = value_of(words, *engine.flags.port) if recognised or named else None
    if port is not None:
        return _place_of_flags(words, engine, _port(port))
    if recognised and engine.default_port is not None:
        return _place_of_flags(words, engine, engine.default_port)
    if spare is not None:
        return _place_of_flags(words, engine, spare)
    raise BadLaunch(
        "The command does not show where the server will answer",
        advice="Give url='http://127.0.0.1:8000', or put '{port}' where the port belongs in the command. "
        "Known without that: 'vllm serve …', 'python -m vllm.entrypoints.openai.api_server …', "
        "'sglang serve …', 'python -m sglang.launch_server …', also by path and after 'env A=B'; "
        "other wrappers and scripts hide the flags",
    )


def _place_of_flags(words: tuple[str, ...], engine: Engine, port: int) -> _Place:
    host = value_of(words, *engine.flags.host) or engine.default_host
    host = _EVERYWHERE.get(host.strip("[]"), host.strip("[]"))
    scheme = "https" if has_flag(words, "--ssl-certfile") else "http"
    shown = f"[{host}]" if ":" in host else host
    return _Place(f"{scheme}://{shown}:{port}", host, port)


def _place_of_url(url: str) -> _Place:
    advice = "Give a base URL such as 'http://127.0.0.1:8000'"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise BadLaunch(f"url={redact(url)!r} cannot be understood: {error}", advice=advice) from None
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.fragment:
        raise BadLaunch(f"url={redact(url)!r} is no base URL", advice=advice)
    if port == 0:
        raise BadLaunch(f"url={redact(url)!r} names port 0", advice=advice)
    return _Place(url.rstrip("/"), parts.hostname, port or (443 if parts.scheme == "https" else 80))


def _port(text: str) -> int:
    port = int(text) if text.isascii() and text.isdigit() else -1
    if port == 0:
        raise BadLaunch(
            "Port 0 lets the server choose, and nobody would know where it answers",
            advice="'--port {port}' is filled with a free one",
        )
    if not 0 < port < 65536:
        raise BadLaunch(f"The port {text!r} is no number from 1 to 65535")
    return port


# ----------------------------------------------------------------------------------- what the flags tell


def _model(engine: Engine, args: tuple[str, ...]) -> str | None:
    """Return the name under which the server will know its model; ``None``: it must be asked."""
    served = value_of(args, *engine.flags.served_name)
    if served:
        return served
    if engine.positional_model and args and not args[0].startswith("-"):
        return args[0]
    return value_of(args, *engine.flags.model)


def _api_key(flags: Flags, args: tuple[str, ...], variables: Mapping[str, str]) -> str | None:
    key = value_of(args, *flags.api_key)
    if key is None and flags.api_key_variable is not None:
        key = variables.get(flags.api_key_variable)
    return key or None


def _ranks(flags: Flags, args: tuple[str, ...]) -> int:
    ranks = _number(args, flags.tensor_parallel) * _number(args, flags.pipeline_parallel)
    if not has_flag(args, *flags.shares_ranks):
        ranks *= _number(args, flags.data_parallel)
    return max(1, ranks // _number(args, flags.nodes))


def _number(args: tuple[str, ...], names: tuple[str, ...]) -> int:
    text = value_of(args, *names)
    # What is no number is the server's to refuse; it then ends with a usage error.
    return max(1, int(text)) if text and text.isascii() and text.isdigit() else 1


def _unread(args: tuple[str, ...]) -> tuple[str, ...]:
    notes = []
    if has_flag(args, "--config"):
        notes.append("the options in the --config file were not read: host, port and model are taken from the flags")
    if has_flag(args, "--headless") or _number(args, ("--node-rank",)) > 1 or value_of(args, "--node-rank") == "1":
        notes.append("this is a node that serves no requests of its own: it may never answer")
    return tuple(notes)
