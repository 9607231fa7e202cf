"""What the little server can be asked for, read from its command line."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from hangguard.testing._leftovers import KINDS as LEFTOVERS

PHASES = (
    "import", "dist-init", "weights-load", "kv-cache", "jit-compile", "graph-capture", "warm-up", "serving",
)  # fmt: skip
KINDS = ("deadlock", "spin", "sleep", "exit", "raise", "segv", "oom", "kill-self", "stop-self")
NO_GRAPHS = "disabled"
"""The value of ``--cuda-graph-backend-*`` that means no graphs (SGLang 0.5.14 and later)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong, and when: ``amount`` are the seconds of a sleep or the code of an exit."""

    phase: str
    kind: str
    amount: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line of one launch; workers get the same, with their role."""

    model_path: str
    served_model_name: str
    host: str
    port: int
    uds: str | None
    ssl_certfile: str | None
    ssl_keyfile: str | None
    skip_tokenizer_init: bool
    node_rank: int
    tp: int
    api_key: str | None
    is_embedding: bool
    enable_metrics: bool
    disable_cuda_graph: bool
    hold_mb: int
    phase_seconds: float
    jit_seconds: float
    token_seconds: float
    faults: tuple[Fault, ...]
    fault_rank: int | None
    fault_after: int
    cured_by: str | None
    once: str | None
    crash_exit: int | None
    ignore_crash: bool
    shallow_health: bool
    ignore_term: bool
    orphans: bool
    fork_and_exit: bool
    exit_early: int | None
    leave_shm: bool
    leave: tuple[str, ...]
    banner_bytes: int
    long_line: int
    flood: bool
    garbage: bool
    role: str
    rank: int
    channel: int
    lifeline: int


def read_options(argv: list[str]) -> Options:
    """Read the command line; leave with code 2 and SGLang's own words where it cannot be understood."""
    given = _parser().parse_args(_with_config(argv))
    faults = list(given.fault)
    if given.deadlock_at_capture:
        faults.append(Fault(phase="graph-capture", kind="deadlock"))
    no_graphs = (
        given.disable_cuda_graph or given.disable_decode_cuda_graph or given.cuda_graph_backend_decode == NO_GRAPHS
    )
    return Options(
        model_path=given.model_path,
        served_model_name=given.served_model_name or given.model_path,
        host=given.host,
        port=given.port,
        uds=given.uds,
        ssl_certfile=given.ssl_certfile,
        ssl_keyfile=given.ssl_keyfile,
        skip_tokenizer_init=given.skip_tokenizer_init,
        node_rank=given.node_rank,
        tp=given.tp,
        api_key=given.api_key,
        is_embedding=given.is_embedding,
        enable_metrics=given.enable_metrics,
        disable_cuda_graph=no_graphs,
        hold_mb=given.hold_mb,
        phase_seconds=given.phase_seconds,
        jit_seconds=given.jit_seconds,
        token_seconds=given.token_seconds,
        faults=tuple(faults),
        fault_rank=given.fault_rank,
        fault_after=given.fault_after,
        cured_by=given.cured_by,
        once=given.once,
        crash_exit=given.crash_exit,
        ignore_crash=given.ignore_crash,
        shallow_health=given.shallow_health,
        ignore_term=given.ignore_term,
        orphans=given.orphans,
        fork_and_exit=given.fork_and_exit,
        exit_early=given.exit_early,
        leave_shm=given.leave_shm,
        leave=tuple(given.leave),
        banner_bytes=given.banner_bytes,
        long_line=given.long_line,
        flood=given.flood,
        garbage=given.garbage,
        role=given.role,
        rank=given.rank,
        channel=given.channel,
        lifeline=given.lifeline,
    )


def _with_config(argv: list[str]) -> list[str]:
    """Put the options of ``--config FILE`` before the others, as SGLang does; of YAML, JSON is understood."""
    if "--config" not in argv:
        return argv
    index = argv.index("--config")
    words: list[str] = []
    for key, value in json.loads(Path(argv[index + 1]).read_text("utf-8")).items():
        words += [f"--{key}"] if value is True else [f"--{key}", str(value)]
    return [*words, *argv[:index], *argv[index + 2 :]]


def _fault(text: str) -> Fault:
    phase, _, kind = text.partition(":")
    kind, _, amount = kind.partition(":")
    if phase not in PHASES or kind not in KINDS:
        msg = f"{text!r} is not PHASE:KIND with a phase of {PHASES} and a kind of {KINDS}"
        raise argparse.ArgumentTypeError(msg)
    if kind in {"sleep", "exit"} and not amount:
        msg = f"{kind} needs an amount: {phase}:{kind}:1"
        raise argparse.ArgumentTypeError(msg)
    return Fault(phase=phase, kind=kind, amount=float(amount or 0.0))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="launch_server.py",
        description="A small real server that starts, answers and fails like SGLang.",
        allow_abbrev=False,
    )
    _add_flags_of_sglang(parser)
    _add_faults(parser)
    _add_habits(parser)
    for name, default in (("--rank", 0), ("--channel", -1), ("--lifeline", -1)):
        parser.add_argument(name, type=int, default=default, help=argparse.SUPPRESS)
    parser.add_argument("--role", default="main", help=argparse.SUPPRESS)
    return parser


def _add_flags_of_sglang(parser: argparse.ArgumentParser) -> None:
    sglang = parser.add_argument_group("spelled as SGLang's")
    add = sglang.add_argument
    add("--model-path", "--model", default="tiny", help="a path that begins with / must exist")
    add("--served-model-name", help="the name in /v1/models (default: the model path)")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=30000)
    add("--tp", "--tp-size", "--tensor-parallel-size", type=int, default=2, help="number of workers")
    add("--config", help="a file of options before those of the command line: a .yaml that holds JSON")
    add("--ssl-certfile", help="speak TLS")
    add("--ssl-keyfile", help="the key of the certificate")
    add("--skip-tokenizer-init", action="store_true", help="take and give token ids only: POST /generate")
    add("--nnodes", type=int, default=1, help="accepted, without effect")
    add("--node-rank", type=int, default=0, help="above 0: serve nothing but a /health that is always 200")
    add("--api-key")
    add("--is-embedding", action="store_true", help="answer /v1/embeddings instead of /v1/completions")
    add("--enable-metrics", action="store_true", help="answer /metrics")
    add("--disable-cuda-graph", action="store_true", help="skip the graph-capture step")
    add("--disable-decode-cuda-graph", action="store_true", help="the same, newer form")
    add("--cuda-graph-backend-decode", help="'disabled' is the same, newest form")
    add("--disable-prefill-cuda-graph", action="store_true", help="accepted, without effect")
    add("--cuda-graph-backend-prefill", help="accepted, without effect")
    add("--disable-custom-all-reduce", action="store_true", help="accepted; see --cured-by")


def _add_faults(parser: argparse.ArgumentParser) -> None:
    faults = parser.add_argument_group("faults")
    add = faults.add_argument
    add("--fault", action="append", type=_fault, default=[], metavar="PHASE:KIND", help=", ".join(KINDS))
    add("--deadlock-at-capture", action="store_true", help="short for --fault graph-capture:deadlock")
    add("--fault-rank", type=int, help="the one rank in which faults happen (default: every rank)")
    add("--fault-after", type=int, default=1, help="a fault at serving happens from this request on")
    add("--cured-by", metavar="FLAG|NAME=VALUE", help="no fault where this flag or variable is given")
    add("--once", metavar="FILE", help="faults only in the first launch; FILE remembers it")
    add("--crash-exit", type=int, help="exit code when a worker dies (default: the worker's own, else 1)")
    add("--ignore-crash", action="store_true", help="live on when a worker dies")
    add("--exit-early", type=int, metavar="CODE", help="leave with CODE while starting")


def _add_habits(parser: argparse.ArgumentParser) -> None:
    habits = parser.add_argument_group("habits")
    add = habits.add_argument
    add("--uds", metavar="PATH", help="listen on a unix socket instead of a port, as vLLM does")
    add("--hold-mb", type=int, default=32, help="memory held by each worker, really touched")
    add("--phase-seconds", type=float, default=0.4, help="duration of each phase of the start")
    add("--jit-seconds", type=float, default=0.0, help="compile silently in a child for so long")
    add("--token-seconds", type=float, default=0.01, help="duration of each token of a stream")
    add("--shallow-health", action="store_true", help="/health is 200 without asking a worker, as in vLLM")
    add("--ignore-term", action="store_true", help="no process of the server minds SIGTERM")
    add("--orphans", action="store_true", help="workers outlive the main process")
    add("--fork-and-exit", action="store_true", help="become a daemon: fork, setsid, the first process exits 0")
    add("--leave-shm", action="store_true", help="hold shared memory with a resource tracker")
    add("--leave", action="append", default=[], choices=LEFTOVERS, help="have this, and leave it at the end")
    add("--banner-bytes", type=int, default=0, metavar="N", help="print N bytes before listening")
    add("--long-line", type=int, default=0, metavar="N", help="print one line of N bytes")
    add("--flood", action="store_true", help="print some 20 MB/s from the start on")
    add("--garbage", action="store_true", help="print binary rubbish and terminal escapes")
