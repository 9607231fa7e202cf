"""A report that can be shown to strangers: hosts, users, folders, paths, addresses, prompts and models out.

What is taken out leaves a stable placeholder, so that two lines about the same host still show that. It is best
effort, as every such thing: names that stand nowhere but in a log line's free text cannot be told from words.
"""

from __future__ import annotations

import ipaddress
import os
import pwd
import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from hangguard.changes import value_of, words_of
from hangguard.supervision.found import FoundServer

_QUOTED = r"""(?:'(?:[^'\\]|\\.)*(?:'|\Z)|"(?:[^"\\]|\\.)*(?:"|\Z))"""
_PROMPT = re.compile(
    r"(?P<name>(?<![\w-])['\"]?(?:prompt|prompts|text|content|messages|input_text|inputs?|query|documents?|output_text"
    r"|generated_text|prompt_token_ids|input_ids|output_ids|token_ids|origin_input_text|input_embeds)['\"]?)"
    rf"(?P<between>\s{{0,2}}[:=]\s{{0,2}})(?P<value>{_QUOTED}|[\[{{(].*?(?:[\]}})](?=\s*(?:,|$|[)\]}}]))|\Z))",
    re.IGNORECASE,
)
_ADDRESS = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.]*\w)(?!\.\d)")
_ADDRESS_6 = re.compile(r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{0,4}(?![\w:])")
_HARDWARE = re.compile(
    r"(?<![\w:])(?:[0-9a-fA-F]{2}:){5,7}[0-9a-fA-F]{2}(?![\w:])|\b(?:GPU|MIG)-[0-9a-f]{8}-[0-9a-f-]{20,}"
)
_URL_HOST = re.compile(
    r"(?P<scheme>\b[a-z][a-z0-9+.-]{1,15}://)(?P<user>[^/\s@'\"]*@)?(?P<host>\[[^\]]*\]|[^\s/:'\",)\]]+)"
)
_MAIL = re.compile(r"(?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)+\b")
_PATH = re.compile(r"(?<![\w.<>)/-])~?/(?:[^\s/:;,'\"()\[\]<>|=]+/)*[^\s/:;,'\"()\[\]<>|=]*")
_PACKAGES = re.compile(r".*/(?P<rest>(?:site-packages|dist-packages)/.*|python3\.\d+/[\w./-]+\.py)")
_TRACKERS = ("github.com/sgl-project/", "github.com/vllm-project/", "docs.vllm.ai/")
_ROUTES = ("/v1/", "/health", "/metrics", "/generate", "/server_info", "/get_server_info", "/model_info", "/ping")
_PLAIN = ("/proc", "/sys", "/dev/null", "/dev/nvidia", "/dev/shm")  # noqa: S108 - names only
_EVERYBODYS = frozenset(("root", "nobody", "user", "python", "vllm", "sglang", "localhost", "admin", "ubuntu"))
_HOST_FLAGS = (
    "--host",
    "--dist-init-addr",
    "--nccl-init-addr",
    "--master-addr",
    "--data-parallel-address",
    "--node-ip",
)
_HOST_VARIABLES = ("MASTER_ADDR", "VLLM_HOST_IP", "SGLANG_HOST_IP", "HOST_IP", "HOSTNAME", "RAY_ADDRESS")


def without_prompts(text: str) -> str:
    """Return a line of a log without what users asked and were answered."""
    return _PROMPT.sub(lambda found: f"{found['name']}{found['between']}<removed>", text)


class Placeholders:
    """Replaces what identifies somebody, the same by the same, over any number of texts."""

    def __init__(self, server: FoundServer | None = None) -> None:
        self._given: dict[tuple[str, str], str] = {}
        self._words: list[tuple[re.Pattern[str], str, str]] = []
        self._learn(server)

    def text(self, text: str) -> str:
        """Return the text without hosts, users, paths, addresses, prompts, models."""
        text = without_prompts(text)
        for pattern, kind, word in self._words:
            if pattern.search(text):  # a placeholder is only numbered once it is used
                text = pattern.sub(self._name(kind, word), text)
        text = _MAIL.sub(lambda found: self._name("mail", found[0]), text)
        text = _URL_HOST.sub(self._url, text)
        text = _HARDWARE.sub(lambda found: self._name("device", found[0]), text)
        text = _ADDRESS.sub(lambda found: self._address(found[0]), text)
        text = _ADDRESS_6.sub(lambda found: self._address(found[0]), text)
        return _PATH.sub(lambda found: self._path(found[0]), text)

    def value(self, value: Any) -> Any:
        """Return JSON-like values, every text in them changed; keys are names of ours."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {key: self.value(member) for key, member in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.value(member) for member in value]
        return value

    # -------------------------------------------------------------------------------------- what is known

    def _learn(self, server: FoundServer | None) -> None:
        """Collect names that can be told from words only because they are known: longest first."""
        known: dict[str, str] = dict.fromkeys(_hosts(), "host")
        known |= dict.fromkeys(_users(server), "user")
        if server is not None:
            launch = server.launch
            env, words = launch.environment(), words_of(launch)
            addresses = [value_of(words, flag) for flag in _HOST_FLAGS]
            addresses += [env.get(name) for name in _HOST_VARIABLES]
            known |= {address.rpartition("://")[2].rsplit(":", 1)[0]: "host" for address in addresses if address}
            known |= dict.fromkeys(_folders(launch.cwd, *launch.argv), "path")
            known |= dict.fromkeys(_models(server), "model")
        for word in sorted(known, key=len, reverse=True):
            if len(word) >= 2 and word not in _EVERYBODYS and not _is_address(word):
                edge = r"(?<![A-Za-z0-9])", r"(?![A-Za-z0-9])"
                pattern = re.compile(edge[0] + re.escape(word) + edge[1])
                self._words.append((pattern, known[word], word))

    def _name(self, kind: str, word: str) -> str:
        if kind == "model":
            return "<model>"
        number = sum(known == kind for known, _ in self._given) + 1
        return self._given.setdefault((kind, word), f"<{kind}-{number}>")

    def _url(self, found: re.Match[str]) -> str:
        if found.string[found.start("host") :].startswith(_TRACKERS):
            return found[0]
        return found["scheme"] + self._host(found["host"])

    def _host(self, host: str) -> str:
        if host.startswith("<") or host == "localhost":
            return host
        return self._address(host.strip("[]")) if _is_address(host.strip("[]")) else self._name("host", host)

    def _address(self, text: str) -> str:
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            return text
        if address.is_loopback:
            return "<loopback>"
        return "<any-address>" if address.is_unspecified else self._name("address", text)

    def _path(self, path: str) -> str:
        if path in {"/", "~/", "//"} or path.startswith(_ROUTES) or path.rstrip("/") in {"/v1", "/proc"}:
            return path
        if packages := _PACKAGES.match(path):
            return packages["rest"]
        if path.startswith(_PLAIN) and not path.startswith("/dev/shm/"):  # noqa: S108
            return path
        ending = next((end for end in (".py", ".log", ".json", ".yaml", ".so") if path.endswith(end)), "")
        return self._name("path", path) + ending


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _hosts() -> Iterable[str]:
    name = socket.gethostname()
    return {name, name.partition(".")[0]}


def _users(server: FoundServer | None) -> set[str]:
    users = {server.user} if server is not None else set()
    users |= {os.environ[name] for name in ("USER", "LOGNAME", "SUDO_USER") if name in os.environ}
    with suppress(KeyError):
        users.add(pwd.getpwuid(os.geteuid()).pw_name)
    return {user for user in users if not user.isdigit()}


def _folders(*words: str) -> set[str]:
    """Words, or values of ``--flag=value``, that hold a slash and are no URL."""
    values = {word.partition("=")[2] if word.startswith("-") and "=" in word else word for word in words}
    return {value for value in values if "/" in value and "://" not in value and value != "/" and "{" not in value}


def _models(server: FoundServer) -> set[str]:
    """The model as it is given, as it is served, and by the last part of its path."""
    launch, flags, words = server.launch, server.engine.flags, words_of(server.launch)
    given = {launch.model, value_of(words, *flags.model), value_of(words, *flags.served_name)}
    names = {name for name in given if name}
    names |= {name.replace("/", "--") for name in names} | {name.rstrip("/").rpartition("/")[2] for name in names}
    return {name for name in names if len(name) >= 3}
