"""The form that an engine's issue tracker asks for, filled from one look. Paste it; read it before you do.

Headings are those of the engines' own forms: vllm-project/vllm ``.github/ISSUE_TEMPLATE/400-bug-report.yml`` (2026) and
sgl-project/sglang ``.github/ISSUE_TEMPLATE/1-bug-report.yml`` (2026). What their environment scripts would print
is not here: hangguard runs nothing of the server's own environment.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Iterable

from hangguard.changes import as_shell
from hangguard.facts import Gpu, Host, Sample, Suspect, Unseen
from hangguard.redact import clean_text
from hangguard.report.share import without_prompts
from hangguard.report.text import headline, how_long, lines_of, stack_lines
from hangguard.supervision.look import Look

LONGEST = 60_000
"""GitHub takes 65,536 characters; what a person adds needs room too."""
_ROOM_FOR_LOG = 10_000
_ROOM_FOR_REST = 14_000
_LONGEST_LINE = 600
_STEERING = ("CUDA_", "NCCL_", "VLLM_", "SGLANG_", "SGL_", "TORCH_", "PYTORCH_", "GLOO_", "TRITON_")
_GIB = 1024**3


def issue_for(look: Look, tracker: str) -> str:
    """Return the filled form of a tracker (``"vllm"`` or ``"sglang"``), under :data:`LONGEST` characters."""
    return "\n".join(map(clean_text, _FORMS[tracker](look).split("\n")))[:LONGEST]


def _vllm(look: Look) -> str:
    return _joined(
        f"<!-- title: [Bug]: {_title(look)} -->",
        "### Your current environment",
        "<details>\n<summary>Read from files and the kernel by hangguard; add the output of "
        "<code>python collect_env.py</code> here</summary>\n\n" + _fenced(_environment(look)) + "\n\n</details>",
        "### 🐛 Describe the bug",
        *_story(look),
        "The command:\n\n" + _fenced(_command(look), "sh"),
        *_evidence(look),
        "### Before submitting a new issue...",
        "- [ ] Make sure you already searched for relevant issues, and asked the chatbot living at the bottom right "
        "corner of the [documentation page](https://docs.vllm.ai/en/latest/), which can answer lots of frequently "
        "asked questions.",
    )


def _sglang(look: Look) -> str:
    return _joined(
        f"<!-- title: [Bug] {_title(look)} -->",
        "### Checklist",
        "- [ ] I searched related issues but found no solution.\n"
        "- [ ] The bug persists in the latest version.\n"
        "- [ ] Issues without environment info and a minimal reproducible demo are hard to resolve and may receive no "
        "feedback.\n"
        "- [ ] If this is not a bug report but a general question, please start a discussion at "
        "https://github.com/sgl-project/sglang/discussions. Otherwise, it will be closed.\n"
        "- [ ] Please use English. Otherwise, it will be closed.",
        "### Describe the bug",
        *_story(look),
        *_evidence(look),
        "### Reproduction",
        _fenced(_command(look), "sh"),
        f"Model: `{clean_text(look.server.launch.model or 'not known').replace('`', '')}`",
        "### Environment",
        "Read from files and the kernel by hangguard. **Add the output of `python3 -m sglang.check_env`**, which was "
        "not run: issues without it are closed.",
        _fenced(_environment(look)),
    )


_FORMS: dict[str, Callable[[Look], str]] = {"vllm": _vllm, "sglang": _sglang}
TRACKERS = tuple(_FORMS)


# ------------------------------------------------------------------------------------------ the parts


def _title(look: Look) -> str:
    launch = look.server.launch
    verdict = look.verdict
    where = {"ready": "while serving"}.get(verdict.verdict, f"in {verdict.phase}")
    kind = f" ({verdict.kind})" if verdict.kind else ""
    engine = f"{launch.engine} {launch.version}" if launch.version else launch.engine
    return _plain(f"{verdict.verdict}{kind} {where}, {engine}, {launch.ranks} rank{'s' * (launch.ranks > 1)}")


def _story(look: Look) -> Iterable[str]:
    yield clean_text(f"{headline(look)}: {how_long(look)}. {look.verdict.why}").strip()  # a title may hold line breaks
    for heading in ("Suspects", "Supported", "Ruled out", "Could not be seen"):
        found = _of_section(look, heading)
        if found:
            yield f"**{heading}**\n\n" + _fenced(_start_of("\n".join(found), 2500))


def _of_section(look: Look, heading: str) -> list[str]:
    found: list[str] = []
    is_inside = False
    for line in lines_of(look):
        if line.indent == 0:
            is_inside = line.text == heading
        elif is_inside:
            found.append(" " * (line.indent - 2) + line.text)
    return found


def _evidence(look: Look) -> Iterable[str]:
    log = "\n".join(without_prompts(line)[:_LONGEST_LINE] for line in look.log_tail)
    if log:
        yield "The end of the log:\n\n" + _fenced(_end_of(log, _ROOM_FOR_LOG))
    stacks = [clean_text(line) for line in stack_lines(look.stacks, frames=60, first=_suspects(look), whole=True)]
    if stacks:
        room = LONGEST - _ROOM_FOR_LOG - _ROOM_FOR_REST
        text = _start_of("\n".join(stacks), room)
        summary = "Python stacks of all processes (py-spy; processes at the same place stand together)"
        yield f"<details>\n<summary>{summary}</summary>\n\n{_fenced(text)}\n\n</details>"


def _suspects(look: Look) -> frozenset[int]:
    suspects: tuple[Suspect, ...] = getattr(look.verdict, "suspects", ())
    return frozenset(suspect.pid for suspect in suspects)


def _command(look: Look) -> str:
    launch = look.server.launch
    variables = [f"{name}={value}" for name, value in launch.env if name.startswith(_STEERING)]
    words = as_shell(launch) if launch.argv else "(not seen)"
    return _start_of("\n".join([*(f"export {variable}" for variable in variables[:40]), words]), 4000)


def _environment(look: Look) -> str:
    newest = look.samples[-1] if look.samples else None
    lines = [f"{name}: {version}" for name, version in look.server.versions]
    if not lines:
        lines.append(f"{look.server.launch.engine}: {look.server.launch.version or 'version not found'}")
    lines += [f"OS: {_os_name()}", f"Kernel: {platform.system()} {platform.release()} ({platform.machine()})"]
    lines.append(f"CPUs: {os.cpu_count()}")
    lines += _host(newest) + _gpus(newest)
    return "\n".join(lines)[:6000]


def _host(newest: Sample | None) -> list[str]:
    host = newest.host if newest is not None else Unseen("")
    if not isinstance(host, Host):
        return []
    lines = [f"Memory: {host.memory_available_bytes / _GIB:.1f} of {host.memory_total_bytes / _GIB:.1f} GiB available"]
    if isinstance(host.shm_free_bytes, int) and isinstance(host.shm_total_bytes, int):
        lines.append(f"Shared memory: {host.shm_free_bytes / _GIB:.1f} of {host.shm_total_bytes / _GIB:.1f} GiB free")
    return lines


def _gpus(newest: Sample | None) -> list[str]:
    gpus = newest.gpus if newest is not None else Unseen("not looked at")
    if isinstance(gpus, Unseen):
        return [f"GPUs: not seen ({gpus.reason})"]
    return [_gpu(gpu) for gpu in gpus] or ["GPUs: none"]


def _gpu(gpu: Gpu) -> str:
    figures = [gpu.name]
    if isinstance(gpu.memory_used_bytes, int) and isinstance(gpu.memory_total_bytes, int):
        figures.append(f"{gpu.memory_used_bytes >> 20} of {gpu.memory_total_bytes >> 20} MiB used")
    if not isinstance(gpu.utilization_percent, Unseen):
        figures.append(f"{gpu.utilization_percent:.0f} %")
    if not isinstance(gpu.power_watts, Unseen):
        figures.append(f"{gpu.power_watts:.0f} W")
    return f"GPU {gpu.index}: {', '.join(figures)}"


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        return platform.system()


# ------------------------------------------------------------------------------------------- the text


def _joined(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"


def _fenced(text: str, language: str = "text") -> str:
    """Return a block of code; its fence is longer than any in it."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _plain(text: str) -> str:
    return re.sub(r"[<>`@#\s]+", " ", text).replace("--", "-")[:200]


def _start_of(text: str, room: int) -> str:
    if len(text) <= room:
        return text
    kept = text[: room - 40].rpartition("\n")[0] or text[: room - 40]
    return f"{kept}\n... {text.count(chr(10)) - kept.count(chr(10))} more lines"


def _end_of(text: str, room: int) -> str:
    return text if len(text) <= room else "...\n" + text[-(room - 10) :].partition("\n")[2]
