"""The daemons that people keep servers under: supervisord and circus, at their defaults, in one folder each."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

SUPERVISORD = """[supervisord]
nodaemon=true
directory={folder}
logfile={folder}/supervisord.log
pidfile={folder}/supervisord.pid
childlogdir={folder}

[program:server]
command={command}
"""

CONTROLLED = """
[unix_http_server]
file={folder}/supervisor.sock

[rpcinterface:supervisor]
supervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface

[supervisorctl]
serverurl=unix://{folder}/supervisor.sock
"""
"""What supervisorctl needs."""

CIRCUS = """[circus]
endpoint = ipc://{folder}/endpoint
pubsub_endpoint = ipc://{folder}/pubsub

[watcher:server]
cmd = {command}
copy_env = True
"""


def supervisord(folder: Path, command: list[str], *, is_controlled: bool = False) -> list[str]:
    """Write its configuration; return the command that starts it."""
    text = SUPERVISORD + CONTROLLED if is_controlled else SUPERVISORD
    config = _write(folder / "supervisord.conf", text, command)
    return [sys.executable, "-m", "supervisor.supervisord", "-c", config]


def supervisorctl(folder: Path, *words: str) -> list[str]:
    """Return the command that tells it something."""
    return [sys.executable, "-m", "supervisor.supervisorctl", "-c", str(folder / "supervisord.conf"), *words]


def circusd(folder: Path, command: list[str]) -> list[str]:
    """Write its configuration; return the command that starts it."""
    return [sys.executable, "-m", "circus.circusd", _write(folder / "circus.ini", CIRCUS, command)]


def circusctl(folder: Path, *words: str) -> list[str]:
    """Return the command that tells it something."""
    return [sys.executable, "-m", "circus.circusctl", "--endpoint", f"ipc://{folder}/endpoint", *words]


def _write(path: Path, text: str, command: list[str]) -> str:
    path.write_text(text.format(folder=path.parent, command=shlex.join(command)))
    return str(path)
