"""From a command to a :class:`~hangguard.facts.Launch`: what will run, as which engine, and where it will answer.

Nothing is started and no shell is asked: words are read as the server's own parser will read them, and what is
installed is read from files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hangguard.changes import has_flag, spelled_out, value_of
from hangguard.delegates import Container, advice_for, delegate_of, read_container
from hangguard.engines import ENGINES, engine_named
from hangguard.engines.base import Engine
from hangguard.engines.generic import GENERIC
from hangguard.errors import BadLaunch
from hangguard.facts import Launch
from hangguard.installed import Installed, find_installed
from hangguard.launching import reading
from hangguard.launching.config_files import config_of, without_config
from hangguard.launching.place import Place, place_of_args, place_of_container, place_of_url
from hangguard.launching.programs import check_exists, environment_of, folder_of
from hangguard.launching.words import Words, is_shell, split, without_shell
from hangguard.observe.ports import free_port
from hangguard.wrappers import Unwrapped, base_name, unwrap, variables_behind


def read_command(
    command: str | Sequence[str],
    *,
    engine: str | Engine | None = None,
    url: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    must_exist: bool = True,
    reads_files: bool = True,
) -> tuple[Launch, Engine]:
    """Return the launch, and the engine that it starts.

    ``env`` is the whole environment (``None``: this program's). ``must_exist``: False for what runs already: the
    program and the directory need not be found then. ``reads_files``: False for what runs among other mounts, where its
    paths mean files of somebody else: no configuration, model or package is looked at.

    Raises :class:`BadLaunch` for what cannot be understood, :class:`CommandNotFound` and
    :class:`CommandNotExecutable` for what cannot be started.
    """
    words = split(command)
    spare = _spare_port((*words.argv, url or ""))
    argv = tuple(_filled(word, spare) for word in words.argv)
    folder = folder_of(cwd) if must_exist else os.fspath(cwd or "/")
    given = os.environ if env is None else env
    named = None if engine is None else engine if isinstance(engine, Engine) else engine_named(engine)
    argv, notes = _unshelled(Words(argv, words.notes), given, named)
    variables = environment_of(given, argv)
    if must_exist:
        check_exists(argv, given, folder)

    seen = _look_at(argv, given, named, folder, reads_files=reads_files)
    installed = find_installed(seen.engine, argv, variables, folder) if reads_files else Installed()
    if seen.recognised:
        options = reading.options_known(seen.engine) | (installed.options or frozenset())
        seen = seen._replace(args=spelled_out(seen.args, options))
    place = _place(seen, folder, url=None if url is None else _filled(url, spare), spare=spare)
    flags, args = seen.engine.flags, seen.args
    positional = reading.positional_model(seen.engine, seen.own) if seen.recognised else None
    ranks, nodes = reading.ranks_and_nodes(flags, args)
    delegate = _delegate(seen, argv)
    model = reading.model_path(seen.engine, args, positional) if reads_files and not seen.container else None
    launch = Launch(
        argv=argv,
        env=tuple(sorted(variables.items())),
        cwd=folder,
        engine=seen.engine.name,
        version=installed.version,
        options=installed.options,
        url=place.url,
        host=place.host,
        port=place.port,
        chooses_port=place.port == spare and any("{port}" in word for word in words.argv),
        socket_path=place.socket_path,
        model=reading.model_name(seen.engine, args, positional),
        file_args=seen.file_args,
        task=reading.task_of(seen.engine, args, model, folder),
        tokenizes=not has_flag(args, *flags.no_tokenizer),
        answers=reading.answers(seen.engine, args),
        api_key=reading.api_key(flags, args, seen.variables),
        ranks=ranks,
        nodes=nodes,
        node_rank=reading.node_rank(flags, args),
        wrapped_by=tuple(layer.wrapper.shown for layer in seen.unwrapped.layers),
        delegates_to=delegate,
        notes=(*notes, *_notes(seen, argv, delegate), *installed.notes),
    )
    return launch, seen.engine


def _spare_port(words: Sequence[str]) -> int | None:
    """Return a free port for ``{port}``, whose number is no other word's: a later one must be able to replace it."""
    if not any("{port}" in word for word in words):
        return None
    taken = {int(number) for word in words for number in re.findall(r"\d{1,6}", word)}
    return next(port for port in iter(free_port, None) if port not in taken)


class _Seen(NamedTuple):
    """What a command shows of its server."""

    engine: Engine
    recognised: bool
    named: bool
    """The caller named the engine, so that the flags of a command that was not recognised are read too."""
    own: tuple[str, ...]
    """The server's own arguments."""
    args: tuple[str, ...]
    """Those that count, last ones first in force: the ``--config`` file's, then its own."""
    file_args: tuple[str, ...]
    variables: Mapping[str, str]
    """The server's environment."""
    unwrapped: Unwrapped
    container: Container | None
    notes: tuple[str, ...]
    words: tuple[str, ...]
    """The command behind the wrappers."""


def _look_at(
    argv: tuple[str, ...], given: Mapping[str, str], named: Engine | None, folder: str, *, reads_files: bool
) -> _Seen:
    unwrapped = unwrap(argv)
    container = read_container(argv)
    behind: Mapping[str, str] = variables_behind(argv, given)
    command = argv
    if container is not None:
        command = container.argv
        behind = dict(container.variables)
    known, own = _recognised(command, named)
    recognised = own is not None
    if own is None:
        own = argv[unwrapped.start + 1 :] if named is not None else ()
    file_args: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    option = known.flags.config
    if recognised and container is None and reads_files:
        file_args, notes = config_of(own, option, folder)
        own = without_config(own, option)
    elif option is not None and option in own:
        notes = (f"the file of {option} was not read: it is the container's own, or a script's",)
    return _Seen(
        engine=known,
        recognised=recognised,
        named=named is not None,
        own=own,
        args=(*file_args, *own),
        file_args=file_args,
        variables=behind,
        unwrapped=unwrapped,
        container=container if recognised else None,
        notes=notes,
        words=argv[unwrapped.start :],
    )


def _recognised(argv: tuple[str, ...], named: Engine | None) -> tuple[Engine, tuple[str, ...] | None]:
    """Return the engine and the server's own arguments; ``None``: the command does not show where they begin."""
    for candidate in ENGINES if named is None else (named,):
        start = candidate.recognise(argv)
        if start is not None:
            return candidate, argv[start:]
    return named or GENERIC, None


def _unshelled(words: Words, given: Mapping[str, str], named: Engine | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Leave the shell of ``sh -c`` out where what it would run is a server that is known."""
    inside = without_shell(words.argv, given)
    if inside is not None and (_recognised(inside.argv, named)[1] is not None or delegate_of(inside.argv)):
        return inside.argv, (*words.notes, *inside.notes)
    return words.argv, words.notes


def _filled(word: str, port: int | None) -> str:
    return word if port is None else word.replace("{port}", str(port))


def _delegate(seen: _Seen, argv: tuple[str, ...]) -> str | None:
    """Return the program that starts the server, or its workers, where they cannot be seen."""
    program = delegate_of(argv)
    if program is not None:
        return program
    others = [layer.wrapper.name for layer in seen.unwrapped.layers if layer.wrapper.other_user]
    if others and os.geteuid() != 0:
        return others[0]
    if reading.joins_a_cluster(seen.engine.flags, seen.args, seen.variables):
        return "ray"
    return None


# ------------------------------------------------------------------------------------ where it will answer


def _place(seen: _Seen, folder: str, *, url: str | None, spare: int | None) -> Place:
    """Return where it will answer: as the caller says, as its flags say, else the engine's default.

    The flags of a command that was not recognised count only where the caller named its engine; its default
    never does, for scripts hide flags.
    """
    if url is not None:
        return place_of_url(url)
    if seen.container is not None:
        place = place_of_container(seen.engine, seen.args, seen.container)
    elif delegate_of(seen.words) is not None:
        place = None
    else:
        default = seen.engine.default_port if seen.recognised and seen.engine.default_port is not None else spare
        place = place_of_args(seen.engine, seen.args, default, folder)
    if place is None:
        problem, advice = _why_nowhere(seen)
        raise BadLaunch(problem, advice=advice)
    return place


def _why_nowhere(seen: _Seen) -> tuple[str, str]:
    """Return what hides where the server answers, and what to do."""
    problem = "The command does not show where the server will answer"
    give = "Give url='http://127.0.0.1:8000', or put '{port}' where the port belongs in the command"
    program = base_name(seen.words[0]) if seen.words else ""
    delegate = delegate_of(seen.words)
    if delegate is not None:
        if seen.container is not None:
            return f"{problem}: {delegate} maps its port to none here", "Map it ('-p 8000:8000'), or give url="
        advice = advice_for(delegate)
        return f"{problem}: {delegate} starts it elsewhere", advice[:1].upper() + advice[1:]
    if seen.unwrapped.opaque:
        return f"{problem}: {program!r} cannot be looked through, for {seen.unwrapped.opaque}", give
    if seen.words and is_shell(seen.words[0]):
        return f"{problem}: {program!r} runs a text or a script, and scripts hide the flags", (
            f"{give}. One simple command after '{program} -c' is understood; several, variables, login shells are not"
        )
    if program.endswith((".sh", ".py", ".bash")) or any(word.endswith((".sh", ".py")) for word in seen.words[1:2]):
        script = next(word for word in seen.words if word.endswith((".sh", ".py", ".bash")))
        return f"{problem}: {script!r} is a script, and scripts hide the flags", (
            f"{give}. With engine='vllm' or 'sglang', flags that the script is given are read as that server's"
        )
    return problem, (
        f"{give}. "
        "Known without that: 'vllm serve …', 'python -m vllm.entrypoints.openai.api_server …', "
        "'sglang serve …', 'python -m sglang.launch_server …', also by path and behind wrappers such as "
        "'env A=B', 'numactl' and 'uv run'; scripts hide the flags"
    )


# --------------------------------------------------------------------------------------- what is to be said


def _notes(seen: _Seen, argv: tuple[str, ...], delegate: str | None) -> tuple[str, ...]:
    """Return what the caller should know of this command, in sentences."""
    notes = list(seen.notes)
    for layer in seen.unwrapped.layers:
        own = argv[layer.start : layer.stop]
        if layer.wrapper.note and not {"--no-capture-output", "--live-stream"} & set(own):
            notes.append(layer.wrapper.note)
    if seen.unwrapped.opaque:
        notes.append(f"{base_name(argv[seen.unwrapped.start])} was not looked through: {seen.unwrapped.opaque}")
    if delegate is not None:
        notes.append(f"with {delegate} {advice_for(delegate)}; until then no hang can be told, only whether it answers")
    if seen.container is not None and seen.container.detached:
        notes.append("a detached container's client ends at once, which looks like the server's end: leave -d out")
    if not reading.answers(seen.engine, seen.args):
        notes.append(
            "this node serves no requests of its own: no answer can prove it ready, only its log and its processes"
        )
    if value_of(seen.args, "--ssl-cert-reqs") in {"1", "2"}:  # ssl.CERT_OPTIONAL, ssl.CERT_REQUIRED
        notes.append("the server may want a certificate of its clients, which hangguard has not: give ready=")
    return tuple(notes)
