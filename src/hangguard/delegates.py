"""Programs that have somebody else start the server: what we would own is an idle client.

Its workers cannot be seen from here, so such a launch is never called stuck; what to give instead is said.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hangguard.wrappers import base_name, unwrap

_CONTAINER = (
    "its processes live in the container. Run hangguard inside it, as the container's command "
    "('hangguard run -- vllm serve …'), or keep this and give url='http://127.0.0.1:HOST_PORT'; "
    "from the host, look at the container's processes with their pids ('hangguard diagnose PID')"
)
_BATCH = (
    "its processes live on the nodes that are allotted. Run hangguard there, as the job's command "
    "('{name} … hangguard run -- vllm serve …'), or keep this and give url='http://NODE:PORT'"
)
_CLUSTER = (
    "its processes live in a pod on some node. Run hangguard as the pod's command, or keep this, forward the port "
    "and give url='http://127.0.0.1:PORT'"
)
_MACHINE = (
    "its processes live on another machine. Run hangguard over there ('{name} … hangguard run -- vllm serve …'), "
    "or keep this and give url='http://HOST:PORT'"
)
_SERVICE = (
    "the service manager starts it, not this program. Give the server's command itself, 'systemd-run --scope …', "
    "or the pid of what runs already ('hangguard diagnose PID')"
)
_RAY = (
    "its workers are started by the Ray cluster, which runs already. Keep the cluster's workers to the launch "
    "(no RAY_ADDRESS, '--distributed-executor-backend mp' on one machine), or read the logs of the cluster's "
    "workers and give their pids"
)
_OTHER_USER = (
    "its processes belong to another user, whom this program can neither read nor signal. Run hangguard itself "
    "as that user ('{name} … hangguard run -- vllm serve …')"
)

DELEGATES: dict[str, str] = {
    **dict.fromkeys(("docker", "podman", "nerdctl", "docker-compose", "podman-compose"), _CONTAINER),
    **dict.fromkeys(("toolbox", "distrobox", "distrobox-enter", "machinectl", "lxc", "incus", "enroot"), _CONTAINER),
    **dict.fromkeys(("srun", "salloc", "sbatch", "mpirun", "mpiexec", "qsub", "bsub"), _BATCH),
    **dict.fromkeys(("kubectl", "oc", "helm"), _CLUSTER),
    "ssh": _MACHINE,
    **dict.fromkeys(("systemd-run", "systemctl", "flatpak-spawn"), _SERVICE),
    "ray": _RAY,
    **dict.fromkeys(("sudo", "doas", "gosu", "su-exec", "su", "runuser"), _OTHER_USER),
}
"""By name: where the server lives then, and what to give instead. ``{name}`` is the program's own."""

HERE = frozenset(("ray", "sudo", "doas", "gosu", "su-exec", "su", "runuser"))
"""With these the front end still listens on a port of this launch's own."""

_CONTAINERS = frozenset(("docker", "podman", "nerdctl"))
_KNOWN_IMAGES = {"vllm-openai": ("vllm", "serve")}
"""Images whose entry point is the server: what follows the image are its arguments (docker.io/vllm/vllm-openai)."""
_RUN_BARE = frozenset(
    (
        *("-d", "--detach", "-i", "--interactive", "-t", "--tty", "-P", "--publish-all", "-q", "--quiet"),
        *("--rm", "--init", "--privileged", "--read-only", "--no-healthcheck", "--oom-kill-disable", "--sig-proxy"),
        *("--disable-content-trust", "--replace"),
    )
)
"""Options of ``docker run`` without a value; every other one takes the next word (docker 28, podman 5)."""


class Container(NamedTuple):
    """What ``docker run`` shows of the server inside."""

    argv: tuple[str, ...]
    """The server's command in the container."""
    ports: tuple[tuple[str, str, str], ...]
    """Mapped ports: address and port here (empty: any), port in the container."""
    host_network: bool
    variables: tuple[tuple[str, str], ...]
    detached: bool


def delegate_of(argv: Sequence[str]) -> str | None:
    """Return the program that starts the server elsewhere, also behind wrappers; ``None``: this machine does."""
    start = unwrap(argv).start
    name = base_name(argv[start]) if start < len(argv) else ""
    return name if name in DELEGATES else None


def advice_for(name: str) -> str:
    """Return what to do, as the end of a sentence that begins with the program's name."""
    return DELEGATES[name].replace("{name}", name)


def read_container(argv: Sequence[str]) -> Container | None:
    """Read ``docker run [options] IMAGE …``; ``None``: another command, or one that shows no server."""
    words = list(argv[unwrap(argv).start :])
    if len(words) < 3 or base_name(words[0]) not in _CONTAINERS or words[1] not in {"run", "container"}:
        return None
    words = words[3:] if words[1:3] == ["container", "run"] else words[2:]
    options = list(_options(words))
    taken = sum(length for _, _, length in options)
    if taken >= len(words):
        return None
    image, inside = words[taken], words[taken + 1 :]
    entry = next((value for name, value, _ in reversed(options) if name == "--entrypoint"), None)
    known = _KNOWN_IMAGES.get(base_name(image).partition("@")[0].partition(":")[0])
    command = [entry, *inside] if entry else [*(known or ()), *inside]
    mapped = [value for name, value, _ in options if name in {"-p", "--publish"}]
    return Container(
        argv=tuple(command),
        ports=tuple(place for text in mapped if (place := _mapping(text)) is not None),
        host_network=any(name in {"--net", "--network"} and value == "host" for name, value, _ in options),
        variables=tuple(
            (value.partition("=")[0], value.partition("=")[2])
            for name, value, _ in options
            if name in {"-e", "--env"} and "=" in value
        ),
        detached=any(name in {"-d", "--detach"} or re.fullmatch(r"-[it]*d[it]*", name) for name, _, _ in options),
    )


def _options(words: Sequence[str]) -> Iterator[tuple[str, str, int]]:
    """Yield (name, value, words taken) of the options before the image."""
    index = 0
    while index < len(words) and words[index].startswith("-") and words[index] != "--":
        word = words[index]
        name, equals, value = word.partition("=")
        if equals and word.startswith("--"):
            yield name, value, 1
            index += 1
        elif word in _RUN_BARE or re.fullmatch(r"-[ditPq]+", word):
            yield word, "", 1
            index += 1
        elif not word.startswith("--") and len(word) > 2:  # -p8000:8000, -eA=B
            yield word[:2], word[2:], 1
            index += 1
        else:
            yield word, words[index + 1] if index + 1 < len(words) else "", 2
            index += 2


def _mapping(text: str) -> tuple[str, str, str] | None:
    """Read ``[ADDRESS:]HOST:CONTAINER[/tcp]``; ``None`` for a port that docker chooses, or a range."""
    found = re.fullmatch(r"(?:(?P<address>\[[^\]]*\]|[^:]*):)?(?P<here>\d+):(?P<inside>\d+)(?:/tcp)?", text)
    return (found["address"] or "", found["here"], found["inside"]) if found else None
