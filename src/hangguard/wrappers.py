"""Programs in front of the server that end up as it, or as its parent: ``nohup``, ``numactl``, ``uv run``.

What each takes before the command is data, so that the server's own words are found behind any number of them.
An option that is not in the table makes the rest unknown: where its value ends would be a guess.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=", re.ASCII)


class Wrapper(NamedTuple):
    """How one program takes the command that it runs."""

    name: str
    valued: str = ""
    """Options whose value is the next word, separated by spaces."""
    bare: str = ""
    """Options without a value."""
    command: str = ""
    """The subcommand that takes a command (``run`` of ``uv run``); empty: the program itself does."""
    own: str = ""
    """A pattern of one word of its own before the command (the seconds of ``timeout``); empty: none."""
    assignments: bool = False
    """Whether ``NAME=value`` may stand before the command."""
    greedy: bool = False
    """Every option without ``=`` takes the next word."""
    python: str = "path"
    """Where the interpreter behind it is found: on the ``path``, in the environment of this tool, or ``hidden``."""
    other_user: bool = False
    """Whether the server then belongs to another user, whose processes cannot be read or signalled."""
    note: str = ""
    """What the caller should know of it."""

    @property
    def shown(self) -> str:
        """Return what people call it."""
        return f"{self.name} {self.command}".strip()


_UV_GLOBAL = "--cache-dir --color --directory --project --config-file --allow-insecure-host"
_UV_VALUED = (
    f"{_UV_GLOBAL} -p --python --with --with-editable --with-requirements --extra --no-extra --group --no-group "
    "--only-group --env-file --package --index --default-index -i --index-url --extra-index-url -f --find-links "
    "-P --upgrade-package --refresh-package --reinstall-package --prerelease --resolution --index-strategy "
    "--keyring-provider --link-mode -C --config-setting --no-build-package --no-binary-package "
    "--no-build-isolation-package --exclude-newer --python-platform --fork-strategy"
)
_UV_BARE = (
    "--isolated --active --frozen --locked --no-sync --no-project --all-extras --all-groups --all-packages --dev "
    "--no-dev --only-dev --no-default-groups --offline -q --quiet -v --verbose -n --no-cache --refresh --exact "
    "--no-env-file --no-editable --managed-python --no-managed-python --no-python-downloads --no-config --no-progress "
    "--native-tls --system-certs --no-index --no-sources --no-build --no-binary --compile-bytecode -U --upgrade "
    "--reinstall --inexact"
)
_CONDA_VALUED = "-n --name -p --prefix --cwd"
_CONDA_BARE = "--no-capture-output --live-stream -v --verbose --debug-wrapper-scripts --dev -q --quiet"
_HELD_BACK = "conda run holds the server's output back until it ends, so that no log is seen: add --no-capture-output"
_SUDO = "-u -g -C -D -h -p -r -t -T -U -R --user --group --chdir --host --prompt --close-from"

WRAPPERS: tuple[Wrapper, ...] = (
    Wrapper(
        "env",
        valued="-u --unset -C --chdir",
        bare="-i - --ignore-environment -0 --null -v --debug --default-signal --ignore-signal --block-signal",
        assignments=True,
    ),
    Wrapper("nohup"),
    Wrapper("setsid", bare="-c --ctty -f --fork -w --wait"),
    Wrapper("nice", valued="-n --adjustment"),
    Wrapper("ionice", valued="-c --class -n --classdata", bare="-t --ignore"),
    Wrapper(
        "numactl",
        valued="-i --interleave -C --physcpubind -m --membind -N --cpunodebind -p --preferred --cpubind "
        "-P --preferred-many -w --weighted-interleave",
        bare="-l --localalloc -a --all -b --balancing",
    ),
    Wrapper("taskset", bare="-a --all-tasks -c --cpu-list", own=r"[0-9a-fA-Fx,:-]+"),
    Wrapper("stdbuf", valued="-i --input -o --output -e --error"),
    Wrapper(
        "timeout",
        valued="-k --kill-after -s --signal",
        bare="--foreground --preserve-status -v --verbose -f -p",
        own=r"\d+(?:\.\d+)?[smhd]?",
        note="timeout ends the server when its time is over, however well it works",
    ),
    Wrapper("chrt", valued="-T -P -D", bare="-a -b -d -f -i -o -r -R -v", own=r"\d+"),
    Wrapper("time", valued="-f --format -o --output", bare="-a --append -p --portability -v --verbose -q --quiet"),
    Wrapper("xvfb-run", valued="-e -f -n -p -s -w", bare="-a --auto-servernum -l --listen-tcp"),
    Wrapper("tini", valued="-p -e", bare="-s -v -w -g"),
    Wrapper("dumb-init", valued="-r --rewrite", bare="-c --single-child -v --verbose"),
    Wrapper("catatonit", bare="-g"),
    Wrapper("nsys", command="profile", greedy=True),
    Wrapper("uv", command="run", valued=_UV_VALUED, bare=_UV_BARE, python="uv"),
    Wrapper(
        "uvx",
        valued=f"{_UV_VALUED} --from",
        bare=_UV_BARE,
        python="hidden",
        note="uvx makes an environment of its own for the server: its version is not looked up",
    ),
    Wrapper("poetry", command="run", valued="-C --directory -P --project", bare="-q -n -v -vv -vvv", python="venv"),
    Wrapper("pdm", command="run", valued="-p --project --venv", bare="-s -q -v", python="venv"),
    Wrapper("pipenv", command="run", bare="-q -v", python="venv"),
    Wrapper(
        "pixi",
        command="run",
        valued="-e --environment -m --manifest-path --color",
        bare="--frozen --locked --no-install --as-is --clean-env -q -v --skip-deps -x --executable",
        python="pixi",
    ),
    Wrapper(
        "conda", command="run", valued=_CONDA_VALUED, bare=_CONDA_BARE, python="conda", note=_HELD_BACK
    ),
    Wrapper("mamba", command="run", valued=_CONDA_VALUED, bare=_CONDA_BARE, python="conda"),
    Wrapper(
        "micromamba",
        command="run",
        valued=f"{_CONDA_VALUED} -r --root-prefix -a --attach -e --env",
        bare="--clean-env -d --detach --no-capture-output --live-stream -q -v",
        python="conda",
    ),
    *(
        Wrapper(
            name,
            command="exec",
            valued="-B --bind --mount -W --workdir -H --home --pwd --env --env-file -o --overlay --security --cwd",
            bare="--nv --rocm --nvccli -c --contain -C --containall -e --cleanenv -i --ipc -w --writable "
            "--writable-tmpfs --no-home --userns -u",
            own=r"[^-].*",
            python="hidden",
            note=f"{name} runs the server from an image: its version is not looked up",
        )
        for name in ("apptainer", "singularity")
    ),
    Wrapper(
        "systemd-run",
        valued="-p --property -u --unit --slice -E --setenv --description --nice --working-directory --uid --gid",
        bare="--scope --user --collect -G --same-dir -d -q --quiet --system --slice-inherit",
    ),
    Wrapper("sudo", valued=_SUDO, bare="-E -H -n -k -S -b -A -P --preserve-env --non-interactive", assignments=True,
            other_user=True),
    Wrapper("doas", valued="-u -C", bare="-n", other_user=True),
    Wrapper("gosu", own=r"[^-].*", other_user=True),
    Wrapper("su-exec", own=r"[^-].*", other_user=True),
)  # fmt: skip
"""As documented by GNU coreutils 9, util-linux 2.41, numactl 2.0, uv 0.9, conda 25, nsys 2025 and the others' help."""

_BY_NAME = {wrapper.name: wrapper for wrapper in WRAPPERS}


class Layer(NamedTuple):
    """One wrapper of a command: ``argv[start:stop]`` is its own, the rest is what it runs."""

    wrapper: Wrapper
    start: int
    stop: int


class Unwrapped(NamedTuple):
    """A command without what stands in front of it."""

    start: int
    """Index of the first word that is no wrapper's: the server's own program, or one that nobody knows."""
    layers: tuple[Layer, ...] = ()
    opaque: str = ""
    """Why the wrapper at ``start`` could not be looked through; empty: there is none."""


def unwrap(argv: Sequence[str]) -> Unwrapped:
    """Look through any nesting of wrappers."""
    layers: list[Layer] = []
    start = 0
    while start < len(argv):
        wrapper = _BY_NAME.get(base_name(argv[start]))
        if wrapper is None:
            break
        stop = _after(wrapper, argv, start + 1)
        if isinstance(stop, str):
            return Unwrapped(start, tuple(layers), stop)
        if wrapper.name == "systemd-run" and "--scope" not in argv[start:stop]:
            break  # without --scope the service manager starts it
        layers.append(Layer(wrapper, start, stop))
        start = stop
    return Unwrapped(start, tuple(layers))


def base_name(word: str) -> str:
    """Return the last part of a path."""
    return word.rsplit("/", 1)[-1]


def variables_behind(argv: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment as ``env`` and its like in front of the server leave it."""
    variables = dict(given)
    for layer in unwrap(argv).layers:
        if not layer.wrapper.assignments:
            continue
        words = list(argv[layer.start + 1 : layer.stop])
        if layer.wrapper.name == "env" and {"-i", "-", "--ignore-environment"} & set(words):
            variables = {}
        for name in _values_of(words, "-u", "--unset") if layer.wrapper.name == "env" else ():
            variables.pop(name, None)
        for word in words:
            if _ASSIGNMENT.match(word):
                name, _, value = word.partition("=")
                variables[name] = value
    return variables


def option_of(argv: Sequence[str], layer: Layer, *names: str) -> str | None:
    """Return the value of an option of the wrapper itself; ``None``: not given."""
    return next(iter(_values_of(argv[layer.start + 1 : layer.stop], *names)), None)


def with_assignment(argv: Sequence[str], name: str, value: str) -> tuple[str, ...]:
    """Return argv so that every ``env`` in it that would hide the variable sets it instead."""
    words = list(argv)
    for layer in reversed(unwrap(argv).layers):
        if layer.wrapper.name != "env":
            continue
        inside = range(layer.start + 1, layer.stop)
        set_here = [index for index in inside if words[index].startswith(f"{name}=")]
        own = words[layer.start + 1 : layer.stop]
        for index in set_here:
            words[index] = f"{name}={value}"
        hides = bool({"-i", "-", "--ignore-environment"} & set(own)) or name in _values_of(own, "-u", "--unset")
        if hides and not set_here:
            words.insert(layer.stop, f"{name}={value}")
    return tuple(words)


def _values_of(words: Sequence[str], *names: str) -> Iterator[str]:
    for index, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option in names and equals:
            yield value
        elif word in names and index + 1 < len(words):
            yield words[index + 1]
        elif len(word) > 2 and word[:2] in names and not word.startswith("--"):
            yield word[2:]


def _after(wrapper: Wrapper, argv: Sequence[str], index: int) -> int | str:
    """Return the index of the first word of the command that it runs, or why that cannot be told."""
    valued, bare = frozenset(wrapper.valued.split()), frozenset(wrapper.bare.split())
    command = wrapper.command
    while index < len(argv):
        word = argv[index]
        if word == "--" and not command:
            index += 1
            break
        if word.startswith("-"):
            length = 2 if wrapper.greedy and "=" not in word else _length(wrapper, word, valued, bare)
            if length == 0:
                return f"its option {word!r} is not known"
            index += length
        elif wrapper.assignments and _ASSIGNMENT.match(word):
            index += 1
        elif command:
            if word != command:
                return f"'{wrapper.name} {word}' does not start a server"
            command = ""
            index += 1
        else:
            break
    while wrapper.assignments and index < len(argv) and _ASSIGNMENT.match(argv[index]):
        index += 1  # after a bare --
    if wrapper.own:
        if index < len(argv) and re.fullmatch(wrapper.own, argv[index]):
            index += 1
        elif wrapper.name != "chrt":  # a policy without priorities needs none
            return f"the word that it takes before the command is missing"  # noqa: F541
    return index if index < len(argv) else "there is no command behind it"


def _length(wrapper: Wrapper, word: str, valued: frozenset[str], bare: frozenset[str]) -> int:
    """Return how many words this option takes; 0: it is not known."""
    option, equals, _ = word.partition("=")
    if option in valued:
        return 1 if equals else 2
    if option in bare or (equals and word.startswith("--")):
        return 1
    if wrapper.name == "nice" and re.fullmatch(r"-\d+", word):
        return 1
    if word.startswith("--"):
        return 0
    return _length_of_cluster(word[1:], valued, bare)


def _length_of_cluster(letters: str, valued: frozenset[str], bare: frozenset[str]) -> int:
    """Read ``-oL`` (a value in the same word) and ``-ac`` (several options in one)."""
    for place, letter in enumerate(letters):
        if f"-{letter}" in valued:
            return 1 if place + 1 < len(letters) else 2
        if f"-{letter}" not in bare:
            return 0
    return 1
