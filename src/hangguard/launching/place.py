"""Where the server will answer: as the caller says, as its flags say, else the engine's default."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from hangguard.changes import has_flag, value_of
from hangguard.delegates import Container
from hangguard.engines.base import Engine
from hangguard.errors import BadLaunch
from hangguard.redact import redact

_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "*": "127.0.0.1", "": "127.0.0.1"}  # noqa: S104
_LONGEST_SOCKET_PATH = 107
"""Bytes of sun_path without the closing zero, include/uapi/linux/un.h."""


class Place(NamedTuple):
    """The base URL without a trailing slash; with a unix socket its host is a name only."""

    url: str
    host: str
    port: int
    socket_path: str | None = None


def place_of_url(url: str) -> Place:
    """Read the URL that the caller gave."""
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
    return Place(url.rstrip("/"), parts.hostname, port or (443 if parts.scheme == "https" else 80))


def place_of_args(engine: Engine, args: tuple[str, ...], default_port: int | None, folder: str) -> Place | None:
    """Read host, port, socket and TLS; ``None``: they do not tell."""
    path = value_of(args, *engine.flags.socket)
    if path:
        return _place_of_socket(_scheme(engine, args), Path(folder, path))
    text = value_of(args, *engine.flags.port)
    port = _port(text) if text is not None else default_port
    if port is None:
        return None
    host = value_of(args, *engine.flags.host) or engine.default_host
    host = _EVERYWHERE.get(host.strip("[]"), host.strip("[]"))
    return _place(_scheme(engine, args), host, port)


def place_of_container(engine: Engine, args: tuple[str, ...], container: Container) -> Place | None:
    """Read where the port of a container's server can be reached on this machine."""
    if value_of(args, *engine.flags.socket):
        return None
    text = value_of(args, *engine.flags.port)
    inside = _port(text) if text is not None else engine.default_port
    if container.host_network and inside is not None:
        return _place(_scheme(engine, args), "127.0.0.1", inside)
    for address, here, there in container.ports:
        if there == str(inside):
            host = address.strip("[]")
            return _place(_scheme(engine, args), _EVERYWHERE.get(host, host), _port(here))
    return None


def _place(scheme: str, host: str, port: int) -> Place:
    shown = f"[{host}]" if ":" in host else host
    return Place(f"{scheme}://{shown}:{port}", host, port)


def _place_of_socket(scheme: str, path: Path) -> Place:
    if len(str(path).encode()) > _LONGEST_SOCKET_PATH:
        raise BadLaunch(
            f"The unix socket {str(path)!r} has a longer path than the {_LONGEST_SOCKET_PATH} bytes of the kernel",
            advice="Choose a shorter one, in /tmp or in XDG_RUNTIME_DIR",
        )
    if not path.parent.is_dir():
        raise BadLaunch(f"The unix socket {str(path)!r} would lie in a directory that does not exist")
    return Place(f"{scheme}://localhost", "localhost", 0, str(path))


def _scheme(engine: Engine, args: tuple[str, ...]) -> str:
    return "https" if has_flag(args, *engine.flags.certificate) else "http"


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
