"""The commands and their options. What they do stands in ``run`` and ``demo``."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence

import click

from hangguard.cli.exits import INTERNAL, USAGE
from hangguard.cli.run import Options, run_command
from hangguard.cli.words import as_typed
from hangguard.errors import HangguardError

AFTER_DASHES = {"run", "preflight"}
"""Commands that are followed by the command of a server."""


class Seconds(click.FloatRange):
    """A duration; the help shows it as ``SECONDS``."""

    name = "seconds"


SECONDS = Seconds(min=0.0)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="hangguard", prog_name="hangguard")
def cli() -> None:
    """Start an LLM server, and get one that answers, or the reason why it does not."""


@cli.command(context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@click.option("--engine", metavar="NAME", help="sglang, vllm or generic; read from the command if not given.")
@click.option("--url", metavar="URL", help="Where the server will answer, for a command that does not tell.")
@click.option("--ready-path", metavar="PATH", help="Ready when GET PATH answers 2xx, instead of a real request.")
@click.option(
    "--on-hang",
    type=click.Choice(["act", "report"]),
    default="act",
    show_default=True,
    help="act: keep the evidence, stop, perhaps relaunch; report: say so and leave it running; --ready-within still "
    "ends a start.",
)
@click.option(
    "--fallbacks",
    type=click.Choice(["auto", "any", "none"]),
    default="auto",
    show_default=True,
    help="auto: relaunch with changes that alter speed at most; any: also those that may alter results.",
)
@click.option("--attempts", type=click.IntRange(min=1), default=4, show_default=True, help="How many launches.")
@click.option(
    "--ready-within", type=SECONDS, default=3600.0, show_default=True, help="Seconds until ready, over all attempts."
)
@click.option("--patience", type=SECONDS, help="Cap on the patience of every phase.")
@click.option("--drain", type=SECONDS, help="When asked to stop: seconds to let running requests finish.")
@click.option(
    "--stop-within", type=SECONDS, help="When asked to stop: seconds for drain, grace, kill and proof together."
)
@click.option("--run-dir", metavar="PATH", help="Where the run's folder is made.  [default: the user's state folder]")
@click.option(
    "--log-mib",
    type=click.IntRange(min=0),
    default=256,
    show_default=True,
    help="Disk that the log of one attempt may take; of more, start and newest part stay. 0: no bound.",
)
@click.option("--events", metavar="FILE", help="Write one JSON object a line to FILE; - is standard output.")
@click.option("--quiet", is_flag=True, help="Print only the last line.")
@click.option(
    "--on-death",
    type=click.Choice(["stop", "keep"]),
    default="stop",
    show_default=True,
    help="What becomes of the server if hangguard itself is killed. Ctrl-C stops it in any case.",
)
@click.option("--detach", is_flag=True, help="Go on in the background; print run id and URL once it is ready.")
@click.option("--json", "as_json", is_flag=True, help="With --detach: print one JSON document.")
@click.option("--told-at", type=int, hidden=True)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def run(command: tuple[str, ...], **options: object) -> int:
    """Start COMMAND, watch it, and relaunch it where it hangs.

    It serves until it is asked to stop. Ctrl-C, SIGTERM, SIGQUIT and a hang-up ask for the stop; a second one ends
    drain and grace, not the proof.

    Exit codes: 0 ended as asked; 2 usage; 10 attempts used up, or no fallback left; 11 permanent failure; 12 something
    is left behind; 13 refused before launch; 14 the server ended by itself; 124 not ready in time; 126, 127 the command
    cannot be executed, was not found; 1 internal error. With --attempts 1 and --fallbacks none a non-zero exit
    code of the server itself is passed through.

    With --detach: 0 it is ready; 14 somebody stopped it before; else as above, when it fails before it is ready.
    """
    given = Options(command=command, **options)  # type: ignore[arg-type]
    if given.as_json and not given.detach:
        raise click.UsageError("--json goes with --detach; --events writes JSON of every run.")
    if given.detach and given.told_at is None:
        from hangguard.cli.detach import run_detached  # noqa: PLC0415 - others need not load it

        return run_detached(given, click.get_current_context().find_root().obj)
    return run_command(given)


RUN_DIR = click.option("--run-dir", metavar="PATH", help="Where its folder was made.  [default: the state folder]")


@cli.command()
@click.argument("run_", required=False, metavar="[RUN]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@RUN_DIR
def status(run_: str | None, **options: object) -> int:
    """Say how a run stands. Takes under 20 seconds.

    RUN is its id, the beginning of it, or its folder; of several with that beginning, and without RUN of all, the only
    one that lives is meant.

    Exit codes: 0 its supervisor, or its guardian, lives; 14 it is over, or both are dead; 21 its supervisor lives and
    does not answer; 22 there is no such run, or several that live; 124 not in time; 2 usage; 1 internal error.
    """
    from hangguard.cli.status import StatusOptions, run_status  # noqa: PLC0415 - others need not load it

    return run_status(StatusOptions(run=run_, **options))  # type: ignore[arg-type]


@cli.command()
@click.argument("target", required=False, metavar="[RUN|URL]")
@click.option(
    "--for",
    "wanted",
    type=click.Choice(["ready", "stuck", "exit"]),
    default="ready",
    show_default=True,
    help="It has answered; it hangs or is broken; it is over.",
)
@click.option("--timeout", type=SECONDS, default=600.0, show_default=True, help="Seconds for all of it.")
@RUN_DIR
def wait(**options: object) -> int:
    """Wait for a run, or for a server by its URL.

    What was reached is printed: ready, stuck, exit or timeout.

    RUN is its id, the beginning of it, or its folder; of several with that beginning, and without RUN of all, the only
    one that lives is meant.

    Exit codes: 0 what was waited for; 14 it is over, and so that cannot come any more; 20 it hangs, and nobody acts on
    it; 124 timeout; 22 there is no such run, or nobody listens at URL; 12 nobody of it can be asked, and some of its
    processes live; 2 usage; 1 internal error.
    """
    from hangguard.cli.wait import WaitOptions, run_wait  # noqa: PLC0415 - others need not load it

    return run_wait(WaitOptions(**options))  # type: ignore[arg-type]


@cli.command()
@click.argument("run_", required=False, metavar="[RUN]")
@click.option("--drain", type=SECONDS, help="Seconds to let running requests finish.")
@click.option("--within", type=SECONDS, help="Seconds for drain, grace, kill and proof together.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@RUN_DIR
def stop(run_: str | None, **options: object) -> int:
    """Stop a run, and everything of it, with proof.

    RUN is its id, the beginning of it, or its folder; of several with that beginning, and without RUN of all, the only
    one that lives is meant.

    Its supervisor is asked; if that is dead, its guardian. Where both are, nothing is signalled: hangguard clean looks
    at what is left.

    Exit codes: 0 stopped, nothing is left; 12 something of it is left; 22 there is no such run, or it is over; 124 not
    over in time, or no answer; 2 usage; 1 internal error.
    """
    from hangguard.cli.stop import StopOptions, run_stop  # noqa: PLC0415 - others need not load it

    return run_stop(StopOptions(run=run_, **options))  # type: ignore[arg-type]


@cli.command(context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--engine", metavar="NAME", help="sglang, vllm or generic; read from the command if not given.")
@click.option("--url", metavar="URL", help="Where the server will answer, for a command that does not tell.")
@click.option("--run-dir", metavar="PATH", help="Where the run's folder will be.  [default: the user's state folder]")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def preflight(command: tuple[str, ...], **options: object) -> int:
    """Look around before COMMAND is started: what is in its way.

    It says too what cannot be seen here, and what would give it. Nothing is changed and nothing of COMMAND is
    started. It refuses only what is certain; takes under 10 seconds.

    Exit codes: 0 nothing stands in the way; 13 refused; 126, 127 the command cannot be executed, was not found;
    2 usage; 1 internal error.
    """
    from hangguard.cli.preflight import PreflightOptions, run_preflight  # noqa: PLC0415 - others need not load it

    return run_preflight(PreflightOptions(command=command, **options))  # type: ignore[arg-type]


@cli.command()
@click.argument("target", required=False, metavar="[PID|URL]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--issue", type=click.Choice(["sglang", "vllm"]), help="Print the form that this issue tracker asks for.")
@click.option("--share", is_flag=True, help="Take hosts, users, paths, addresses, models and prompts out.")
@click.option("--log", metavar="FILE", help="Its output, where that does not go to a file of its own.")
@click.option("--url", metavar="URL", help="Where it answers, for a pid whose command line does not tell.")
@click.option("--engine", metavar="NAME", help="sglang, vllm or generic; read from its command if not given.")
@click.option("--canary", is_flag=True, help="Ask it for a few tokens too; with --within 40 a proof while it serves.")
@click.option("--within", type=SECONDS, default=13.5, show_default=True, help="Seconds for all of it.")
def diagnose(**options: object) -> int:
    """Look once at a running server: whether it hangs, and where.

    What to do next is said too. Nothing of it is touched: no signal, no stop, no file. Without PID or URL the
    server of this machine is looked at; where there are several, they are listed.

    Exit codes: 0 it moves or is ready; 20 it hangs or is broken; 21 neither could be proved; 22 there is no such
    server, or several and none was named; 14 it ended meanwhile; 2 usage; 1 internal error.
    """
    from hangguard.cli.diagnose import DiagnoseOptions, run_diagnose  # noqa: PLC0415 - others need not load it

    return run_diagnose(DiagnoseOptions(**options))  # type: ignore[arg-type]


@cli.command()
@click.argument("target", required=False, metavar="[PID|URL]")
@click.option("--match", metavar="TEXT", help="A part of the command line of exactly one process tree; only reports.")
@click.option("--started", type=click.IntRange(min=0), metavar="TICKS", help="The start time of PID in clock ticks.")
@click.option("--url", metavar="URL", help="Where it answers, for a pid whose command line does not tell.")
@click.option("--engine", metavar="NAME", help="sglang, vllm or generic; read from its command if not given.")
@click.option("--log", metavar="FILE", help="Its output, where that does not go to a file of its own.")
@click.option(
    "--on-hang",
    type=click.Choice(["report", "act"]),
    default="report",
    show_default=True,
    help="report: say so, touch nothing; act: keep the evidence and stop it, which needs PID and --started.",
)
@click.option("--run-dir", metavar="PATH", help="Where the evidence of an act is kept.  [default: the state folder]")
@click.option("--events", metavar="FILE", help="Write one JSON object a line to FILE; - is standard output.")
@click.option("--quiet", is_flag=True, help="Print only the last line.")
def attach(**options: object) -> int:
    """Watch a server that somebody else started, until it ends. Ctrl-C stops watching and leaves it alone.

    Exit codes: 0 asked to stop watching; 14 the server ended; 20 it hung and was stopped; 12 something of it
    cannot be ended; 22 there is no such server, or not exactly one; 2 usage; 1 internal error.
    """
    from hangguard.cli.attach import AttachOptions, run_attach  # noqa: PLC0415 - others need not load it

    return run_attach(AttachOptions(**options))  # type: ignore[arg-type]


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def demo(*, as_json: bool) -> int:
    """A demonstration in under a minute, without GPU or model.

    A small server that really deadlocks comes up anyway.
    """
    from hangguard.cli.demo import run_demo  # noqa: PLC0415 - needs the testing extra's parts

    return run_demo(as_json=as_json)


@cli.command()
@click.option("--all", "all_runs", is_flag=True, help="Also those that are over, or of another machine.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option(
    "--run-dir", metavar="PATH", help="Where the runs have their folders.  [default: the user's state folder]"
)
def ps(**options: object) -> int:
    """List runs that go on, or are dead and have left something.

    What is listed is what the kernel shows, not what a state file says. Nothing is touched.

    Exit codes: 0 listed; 22 the runs cannot be looked at; 2 usage; 1 internal error.
    """
    from hangguard.cli.ps import PsOptions, run_ps  # noqa: PLC0415 - others need not load it

    return run_ps(PsOptions(**options))  # type: ignore[arg-type]


@cli.command()
@click.argument("run", required=False, metavar="[RUN]")
@click.option("--yes", is_flag=True, help="Do it. Without, only what would be done is said.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option(
    "--run-dir", metavar="PATH", help="Where the runs have their folders.  [default: the user's state folder]"
)
def clean(**options: object) -> int:
    """End and remove what a dead run has left.

    That is processes, shared memory and sockets; without --yes it is only shown. RUN is the id of a run, the
    beginning of one, or the path of its folder; without it all that left something are meant. Only what is proved
    to be of the run is touched; a run that goes on is not (hangguard stop RUN ends that). The folder of the run
    stays, with its logs.

    Exit codes: 0 nothing is left, or would be; 12 something of ours is left and cannot be ended; 13 RUN goes on;
    21 something could not be seen; 22 there is no such run, or several; 2 usage; 1 internal error.
    """
    from hangguard.cli.clean import CleanOptions, run_clean  # noqa: PLC0415 - others need not load it

    return run_clean(CleanOptions(**options))  # type: ignore[arg-type]


def invoke(arguments: Sequence[str]) -> int:
    """Run one command line; return its exit code. The named edge: nothing escapes as a traceback but a bug."""
    try:
        return int(cli.main(list(arguments), prog_name="hangguard", standalone_mode=False, obj=list(arguments)) or 0)
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.ClickException as wrong:
        wrong.show()
        if isinstance(wrong, click.NoSuchOption) and wrong.ctx is not None and wrong.ctx.info_name in AFTER_DASHES:
            example = f"hangguard {wrong.ctx.info_name} [OPTIONS] -- vllm serve M --port 8000"
            print(f"Options of the server go after --, for example: {example}", file=sys.stderr)
        return USAGE
    except click.Abort:
        return 130
    except HangguardError as failure:
        print(f"hangguard: {as_typed(str(failure))}", file=sys.stderr)
        return INTERNAL
    except Exception:  # noqa: BLE001 - the edge of the program
        traceback.print_exc()
        print(
            "hangguard: this is a fault of hangguard's own; a server that it started was stopped, another left alone.",
            file=sys.stderr,
        )
        return INTERNAL
