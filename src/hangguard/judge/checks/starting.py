"""Whether the launch can start at all, and what of it would go wrong later: command, port, model, flags, variables."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping

from hangguard.engines.base import Engine
from hangguard.errors import CommandNotFound, GuardianFailed, PortInUse
from hangguard.facts import Check, Launch, ModelFiles, Unseen
from hangguard.judge.checks.ground import Ground, unseen
from hangguard.judge.patience import early_timers
from hangguard.redact import redact, redact_argv


def command(ground: Ground) -> Iterator[Check]:
    """Whether the program is there and may be executed."""
    obstacle, launch = ground.seen.obstacle, ground.launch
    if isinstance(obstacle, Unseen):
        yield unseen("command", obstacle, means="whether the program is there is not known")
    elif obstacle is not None:
        is_absent = isinstance(obstacle, CommandNotFound)
        yield Check(
            what="command",
            answer="missing" if is_absent else "poor",
            found=_sentence(obstacle, 0),
            means="nothing can be started",
            helps=_sentence(obstacle, 1),
            error=obstacle,
        )
    else:
        version = f": {launch.engine} {launch.version}" if launch.version else ""
        yield Check(what="command", answer="good", found=f"it is there, and may be executed{version}")


def _sentence(error: Exception, number: int) -> str:
    """Our errors say what happened in the first sentence, and what to do in the others."""
    first, _, rest = str(error).partition(". ")
    return (first, rest)[number].rstrip(".")


def port(ground: Ground) -> Iterator[Check]:
    """Whether somebody has the address already."""
    launch, listener = ground.launch, ground.seen.listener
    path = launch.socket_path
    place = f"the socket {path}" if path else f"port {launch.port}"
    if isinstance(listener, Unseen):
        yield unseen("port", listener, means=f"whether {place} is free is not known")
    elif listener is None:
        yield Check(what="port", answer="good", found=f"nobody listens on {place}")
    else:
        error = PortInUse(launch.port, listener, socket_path=path)
        who = f"process {listener.pid} ({listener.title})" if listener.pid else "somebody who cannot be seen from here"
        yield Check(
            what="port",
            answer="missing",
            found=f"{who} listens on {place}",
            means="its answers would pass for those of your server; hangguard does not end it, for it is not ours",
            helps="another path" if path else "--port {port} takes a free one",
            error=error,
        )


def guardian(ground: Ground) -> Iterator[Check]:
    """Whether the process that guards the server works here."""
    trial = ground.seen.guardian
    if isinstance(trial, Unseen):
        yield unseen("guardian", trial, means="whether it works here is not known")
    elif trial.problem:
        yield Check(
            what="guardian",
            answer="missing",
            found=trial.problem,
            means="nothing is started without it: it ends the server when your program dies",
            error=GuardianFailed(trial.problem),
        )
    else:
        yield Check(what="guardian", answer="good", found="it starts and answers")


def model(ground: Ground) -> Iterator[Check]:
    """Whether the model is on this disk."""
    files = ground.seen.model
    if isinstance(files, Unseen):
        yield unseen("model", files, means="a load from there may stand still in the same way")
    elif files is not None:
        yield _model(files, ground.launch.environment())


def _model(files: ModelFiles, env: Mapping[str, str]) -> Check:
    if files.exists and not files.has_config:
        return Check(
            what="model",
            answer="poor",
            found=f"{files.name} has no config.json",
            means="an engine reads that first, and ends without it",
            helps=f"ls {shlex.quote(files.name)}",
        )
    if files.exists:
        where = f" ({files.filesystem})" if files.filesystem else ""
        return Check(what="model", answer="good", found=f"{files.name} is on this machine{where}")
    if files.is_path:
        return Check(
            what="model",
            answer="missing",
            found=f"{files.name} does not exist",
            means="the server will end, or ask a hub for it by that name",
            helps="the path of a folder with config.json",
        )
    offline = next((name for name in _OFFLINE if env.get(name, "0").lower() in {"1", "true", "yes", "on"}), "")
    found = f"{files.name} is not in the hub's cache" + (f", and {offline} is set" if offline else "")
    return Check(
        what="model",
        answer="missing" if offline else "poor",
        found=found,
        means="the server will end" if offline else "it is downloaded first: a download that stalls is waited for",
        helps=f"hf download {shlex.quote(files.name)}",
    )


_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def flags(ground: Ground) -> Iterator[Check]:
    """Whether the installed engine knows every flag, as far as its source tells: a hint, for others add flags too."""
    launch = ground.launch
    if launch.options is None or not ground.is_known:
        return
    unknown = [flag for flag in _own_flags(ground.engine, launch) if not _is_known(flag, launch.options)]
    if unknown:
        yield Check(
            what="flags",
            answer="poor",
            found=f"{', '.join(unknown[:5])}: not in the source of {launch.engine} {launch.version}",
            means="it may refuse to start; a flag that a plugin adds is not seen either",
            helps=f"{shlex.join(redact_argv(_program(ground.engine, launch)))} --help",
        )
    else:
        yield Check(what="flags", answer="good", found=f"{launch.engine} {launch.version} knows all of them")


def _program(engine: Engine, launch: Launch) -> tuple[str, ...]:
    return launch.argv[: engine.recognise(launch.argv) or 1]


def _own_flags(engine: Engine, launch: Launch) -> Iterator[str]:
    start = engine.recognise(launch.argv)
    for word in (*launch.file_args, *(launch.argv[start:] if start is not None else ())):
        if re.match(r"--[A-Za-z]", word):
            yield word.partition("=")[0]


def _is_known(flag: str, options: frozenset[str]) -> bool:
    """Python's argparse takes an unambiguous beginning; vLLM's takes ``--x.y`` for a key of JSON, and ``--no-x``."""
    name = flag.partition(".")[0].replace("_", "-").lower()
    plain = name.replace("--no-", "--", 1)
    return name == "--help" or any(option.startswith((name, plain)) for option in options)


def timers(ground: Ground) -> Iterator[Check]:
    """Time limits of others that would end the server before ours are over."""
    early = early_timers(ground.engine, ground.launch, ground.rules.limits)
    for timer in early:
        yield Check(
            what="time limits",
            answer="poor",
            found=f"{timer.name} ends the server after {timer.seconds:.0f} s",
            means=f"that is before {timer.limit} ({timer.limit_seconds:.0f} s) is over",
            loses="the evidence of a hang: who stood where",
            helps=f"raise it with {timer.raised_by}" if timer.raised_by else "lower the limit of hangguard's",
        )
    if ground.engine.timers and not early:
        yield Check(what="time limits", answer="good", found="none of the engine's own fires before ours")


def proxy(ground: Ground) -> Iterator[Check]:
    """Whether the server's own warm-up request would be sent to a proxy."""
    name = ground.rules.proxy
    if name:
        yield Check(
            what="proxy",
            answer="poor",
            found=f"{name} is set, and loopback is not exempt from it",
            means="the server's own warm-up request goes to the proxy, which refuses it (sglang#9155); "
            "hangguard's questions use none",
            helps=f"NO_PROXY=localhost,127.0.0.1,{ground.launch.host}"
            if ground.launch.host not in {"localhost", "127.0.0.1"}
            else "NO_PROXY=localhost,127.0.0.1",
        )
    elif any(variable.lower() in {"http_proxy", "all_proxy"} for variable, _ in ground.launch.env):
        yield Check(what="proxy", answer="good", found="loopback is exempt from it")


RISKY: Mapping[str, str] = {
    "LD_PRELOAD": "every process of the server gets that library, and a fault in it looks like the server's own",
    "LD_AUDIT": "every process of the server gets that library, and a fault in it looks like the server's own",
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for, which is slow: for a search for a fault only",
    "CUDA_INJECTION64_PATH": "a profiler or debugger is loaded into every CUDA process",
    "TORCH_NCCL_BLOCKING_WAIT": "ranks wait for collectives on the CPU: in another place than is known of them",
    "PYTHONHOME": "another Python's library is used by every Python that is started, the guardian's apart",
}
"""Variables that have been the cause of a hang, or make one hard to tell from work, and what each does."""


def variables(ground: Ground) -> Iterator[Check]:
    """Variables that are known to bring trouble, as they are set in the launch's own environment."""
    env = ground.launch.environment()
    found = [name for name in RISKY if env.get(name, "") not in {"", "0"}]
    for name in found:
        shown = redact(f"{name}={env[name]}")
        yield Check(
            what="variables",
            answer="poor",
            found=shown if len(shown) <= 200 else f"{shown[:197]}...",
            means=RISKY[name],
            helps=f"env -u {name}",
        )
    if not found:
        yield Check(what="variables", answer="good", found="none that is known to bring trouble")
