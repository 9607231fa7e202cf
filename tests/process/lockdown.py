"""Runs a program under hangguard where little is allowed: each lock alone, or all of them.

As root, because only root can take its rights away: where it cannot, the test fails. What a lock means is in
``programs/locked_room.py``. Everything is as a plain user without an entry in /etc/passwd, and without a driver.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

PROGRAMS = Path(__file__).with_name("programs")
UID = 12345

LOCKS = (
    "no-ptrace",  # seccomp: EPERM for ptrace and process_vm_readv
    "read-only-root",  # nothing can be written anywhere but in /dev/shm: no state folder, no /tmp
    "small-shm",  # /dev/shm of 64 MB, as docker's
    "read-only-shm",
    "no-home",  # and no HOME
    "hidden-pids",  # /proc with hidepid=2
    "no-leases",  # fcntl(F_SETLEASE): EINVAL
    "no-pidfd",  # ENOSYS, as before Linux 5.3
)
ALL = frozenset(LOCKS) - {"small-shm"}
ALL_BUT_SHM = frozenset(LOCKS) - {"read-only-shm"}
"""With a /dev/shm in which something can be left."""

HIDDEN = {"server": {"python": "/opt/unreadable/python3"}, "env": {"PYTHONHOME": sys.base_prefix}}
"""A server of a Python that a plain user may execute and not read: of its processes the kernel shows him nothing."""


def package():
    """The folder of hangguard that these tests import."""
    return Path(importlib.util.find_spec("hangguard").origin).parent


def visible():
    """What a Python with hangguard in it is made of, as paths; the outer ones first."""
    return sorted({sys.base_prefix, sys.prefix, str(package().parent), str(PROGRAMS)}, key=len)


def told_of(folder, locks, *cases, backend="asyncio", leaves=0):
    """Run ``programs/locked.py`` with these cases; return what each was told, when nobody else was touched.

    ``leaves``: how many files in /dev/shm it may leave.
    """
    said = run_locked(folder, locks, [PROGRAMS / "locked.py", backend, *map(json.dumps, cases)])
    assert said.code == 0, said.err
    assert "Traceback" not in said.err
    assert not said.left
    assert said.bystander_lives
    assert "psm_bystander_before" in said.bystander_files
    assert not said.bystander_files_gone
    assert len(said.shm) == leaves, said.shm
    ours = {Path(path).parts[2] for path in visible() if Path(path).parts[:2] == ("/", "tmp")}  # a clone in /tmp
    assert not [name for name in said.tmp if not name.startswith("hangguard-") and name not in ours], said.tmp
    told = json.loads(said.out.splitlines()[-1])
    for one in told.values():
        events = one.pop("events")
        one["notices"] = [event["text"] for event in events if event["event"] == "notice"]
        one["classes"] = {event["verdict"] for event in events if event["event"] == "verdict"}
    return told


def run_locked(folder, locks, words, *, within=120.0, **env):
    """Run this Python with these words; return what it wrote, and what of it was left."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "room").mkdir()
    out, err, told = (folder / name for name in ("out", "err", "told"))
    asked = {
        "locks": sorted(locks),
        "root": str(folder / "room"),
        "uid": UID,
        "visible": visible(),
        "python": os.path.realpath(sys.executable),
        "command": [sys.executable, "-B", *map(str, words)],
        "env": {"PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": str(package().parent), **env},
        "output": [str(out), str(err)],
        "told": str(told),
    }
    room = [sys.executable, "-I", "-S", str(PROGRAMS / "locked_room.py"), json.dumps(asked)]
    try:
        done = subprocess.run(room, capture_output=True, text=True, timeout=within, check=False)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"no end within {within} s: {out.read_text()}{err.read_text()}") from None
    assert done.returncode == 0, f"the locks do not hold here: {done.stderr}"
    said = SimpleNamespace(**json.loads(told.read_text()), out=out.read_text(), err=err.read_text())
    assert said.code != 125, said.err
    return said
