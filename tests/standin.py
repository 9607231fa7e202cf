"""Stand-in GPUs: a libnvidia-ml.so.1 of our own, which the real nvidia-ml-py loads, and its switches.

library = build_standin(tmp_path)
gpus = StandInGpus(library, count=2)
gpus.set(0, utilization=0, memory_used=76_017 << 20, power=88_000, compute={pid: 76_017 << 20})
env = {**os.environ, **gpus.environment()}      # for the supervising program, from its start on
"""

import os
import subprocess
from pathlib import Path

SOURCE = Path(__file__).parent / "nvml" / "fake_nvml.c"
MIB = 1 << 20
XID_EVENT, DOUBLE_BIT_EVENT = 8, 2  # nvml.h
NO_INSTANCE = 0xFFFFFFFF


def build_standin(folder, *, old_driver=False):
    """Build the library in ``folder`` with gcc; return its path. ``old_driver``: without the calls of 510 on."""
    library = Path(folder) / "libnvidia-ml.so.1"
    options = ["-DOLD_DRIVER"] if old_driver else []
    command = ["gcc", "-Wall", "-Werror", "-O1", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", *options]
    subprocess.run([*command, "-o", str(library), str(SOURCE)], check=True)
    return library


class StandInGpus:
    """What the stand-in says. Every change is seen at the library's next call."""

    def __init__(self, library, *, count=1, state=None):
        self.library = Path(library)
        self.state = Path(state) if state is not None else self.library.with_name("nvml-state")
        self._figures = {index: self._idle(index) for index in range(count)}
        self._switches = []
        self._events = []
        self._driver = ("580.159.03", 13000)
        self._write()

    @staticmethod
    def uuid(index):
        return f"GPU-{index:08x}-1111-2222-3333-444444444444"

    def environment(self):
        """Variables for the program that loads the library, from its start on."""
        folders = [str(self.library.parent), os.environ.get("LD_LIBRARY_PATH", "")]
        return {
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, folders)),
            "STANDIN_NVML_STATE": str(self.state),
        }

    def set(self, index, **figures):
        """Set memory_used, memory_total (bytes), utilization (%), power (mW), name, uuid, mig (UUIDs),
        compute and graphics (pid → bytes, or None), events (types that can be waited for), ecc (uncorrected errors),
        rows (corrected, uncorrected, pending, failed), fabric (state, status, health mask).
        A figure of ``None``: the board does not support it."""
        unknown = figures.keys() - self._figures[index].keys()
        assert not unknown, unknown
        self._figures[index].update(figures)
        self._write()

    def xid(self, index, code, instance=NO_INSTANCE):
        """Let the driver tell of an Xid, to those who wait for it from before."""
        self._events.append(f"event {index} {XID_EVENT} {code} {instance}")
        self._write()

    def double_bit_error(self, index):
        """Let the driver tell of a double-bit ECC error."""
        self._events.append(f"event {index} {DOUBLE_BIT_EVENT} 0 {NO_INSTANCE}")
        self._write()

    def hang(self, function, gpu=None):
        """Let this NVML function never return from now on."""
        self._switches.append(f"hang {function} {gpu if gpu is not None else ''}")
        self._write()

    def fail(self, function, code, gpu=None):
        """Let this NVML function return an error code."""
        self._switches.append(f"fail {function} {code} {gpu if gpu is not None else ''}")
        self._write()

    def drive(self, version, cuda):
        """Let the driver be another version; ``cuda`` is 1000 times the major and 10 times the minor number."""
        self._driver = (version, cuda)
        self._write()

    def heal(self):
        """Take back every hang and failure; calls that hang already stay so."""
        self._switches = []
        self._write()

    @property
    def opened_by(self):
        """The pids that have opened the stand-in, in order."""
        log = Path(f"{self.state}.opened")
        return [int(line) for line in log.read_text().split()] if log.exists() else []

    def _idle(self, index):
        return {
            "uuid": self.uuid(index),
            "name": "Stand-in GPU",
            "memory_used": 0,
            "memory_total": 98_304 * MIB,
            "utilization": 0,
            "power": 70_000,
            "compute": {},
            "graphics": {},
            "mig": (),
            "events": XID_EVENT | DOUBLE_BIT_EVENT,
            "ecc": 0,
            "rows": (0, 0, 0, 0),
            "fabric": None,
        }

    def _write(self):
        lines = [f"gpus {len(self._figures)}", f"driver {self._driver[0]} {self._driver[1]}"]
        for index, figures in self._figures.items():
            plain = ("uuid", "name", "utilization", "power", "events", "ecc")
            lines += [f"{key} {index} {figures[key]}" for key in plain]
            lines.append(f"memory {index} {figures['memory_used']} {figures['memory_total']}")
            for key in ("compute", "graphics"):
                holders = [f"{pid}:{used if used is not None else '-'}" for pid, used in figures[key].items()]
                lines += [f"{key} {index} {' '.join(holders)}"] if holders else []
            lines += [f"mig {index} {' '.join(figures['mig'])}"] if figures["mig"] else []
            lines += [f"{key} {index} {' '.join(map(str, figures[key]))}" for key in ("rows", "fabric") if figures[key]]
        lines = [line for line in lines if " None" not in line] + self._switches + self._events
        draft = Path(f"{self.state}.new")
        draft.write_text("\n".join(lines) + "\n")
        draft.replace(self.state)  # the library never reads half a file
