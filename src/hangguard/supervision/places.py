"""Where a server that runs already answers, and whether that is on this machine."""

from __future__ import annotations

import ipaddress
import re
import socket
from contextlib import suppress
from dataclasses import replace
from urllib.parse import urlsplit

from hangguard.errors import BadLaunch
from hangguard.facts import Launch

LOOPBACK = "127.0.0.1"


def place_of(url: str) -> tuple[str, str, int]:
    """Return base URL, host and port. Raises :class:`BadLaunch` for what is none."""
    advice = "Give a base URL such as 'http://127.0.0.1:8000', or a pid"
    try:
        parts = urlsplit(url.strip())
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise BadLaunch(f"{url[:200]!r} is no URL: {error}", advice=advice) from None
    if parts.scheme not in {"http", "https"} or not host:
        raise BadLaunch(f"{url[:200]!r} is no URL of a server", advice=advice)
    port = port or (443 if parts.scheme == "https" else 80)
    shown = f"[{host}]" if ":" in host else host
    path = re.sub(r"(?:/v1)?(?:/(?:health\w*|models|completions|chat/completions|metrics))?/?$", "", parts.path)
    return f"{parts.scheme}://{shown}:{port}{path}", host, port


def is_here(host: str) -> bool:
    """Tell whether an address is this machine's. Blocks: a name is looked up."""
    return host in {"localhost", "localhost.localdomain"} or _own_address(host) is not None


def _own_address(host: str) -> str | None:
    """Return the first address of this machine that an address or a name stands for. Blocks."""
    try:
        found = [str(ipaddress.ip_address(host.strip("[]")))]
    except ValueError:
        try:
            entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):  # UnicodeError: no name that could be looked up
            return None
        found = [str(entry[4][0]).partition("%")[0] for entry in entries]
    return next((address for address in found if _is_own(ipaddress.ip_address(address))), None)


def _is_own(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """The kernel lets a socket have an address only where it is one of the machine's own."""
    if address.is_loopback or address.is_unspecified:
        return True
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((str(address), 0))
        return True
    return False


def here(launch: Launch) -> Launch:
    """A process of this machine is asked on this machine, whatever address its words name: they may be a trap.

    A name is looked up here only, and asked by its address: the next look-up could say something else. Blocks.
    """
    if not launch.port or launch.host == "localhost":
        return launch
    address = _own_address(launch.host)
    return launch if address == launch.host else _at(launch, address or LOOPBACK)


def on_loopback(launch: Launch) -> Launch:
    """The same where nothing may be looked up, or could be in time."""
    return _at(launch, LOOPBACK) if launch.port and launch.host not in {"localhost", "::1"} else launch


def _at(launch: Launch, address: str) -> Launch:
    parts = urlsplit(launch.url)
    shown = f"[{address}]" if ":" in address else address
    return replace(launch, url=f"{parts.scheme}://{shown}:{launch.port}{parts.path}", host=address)
