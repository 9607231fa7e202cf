"""What is checked, and how: ``nox -l`` lists it. ``.ci/run`` calls nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import nox

nox.needs_version = ">=2024.10"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "docs", "package", "unit", "tests"]

HERE = Path(__file__).parent
AT_ONCE = ("-n", "4", "--dist", "worksteal")
"""Most tests wait for real processes more than they compute."""
PURE_AT_ONCE = ("-n", "2", "--dist", "worksteal")
"""Those of the unit part only compute."""
SUPPORTED = ("3.10", "3.11", "3.12", "3.13")
LOWEST = SUPPORTED[0]
TESTED = "3.11"
ANYWHERE = "not real and not gpu and not gpu2 and not engines_on_gpus and not long"
NEEDS_THE_REPOSITORY = {"test_layers.py", "test_docs.py"}
"""Unit tests that are about the repository, not about the dependencies: they run in ``tests`` only."""


TIMELINES = (
    *("boards", "busy", "checks", "h200", "h200x2", "look_alikes", "properties", "replay", "serving", "shapes"),
    *("story", "waiting"),
)
"""Timelines judged sample by sample: pure, and the same on every Python, so they run in ``tests`` only."""


def find_python(version: str) -> str | None:
    """Return an interpreter of this version that starts: from pyenv, else from PATH."""
    found = [shutil.which(f"python{version}")]
    pyenv = shutil.which("pyenv")
    if pyenv is not None:
        root = subprocess.run([pyenv, "root"], capture_output=True, text=True, check=False).stdout.strip()
        found[:0] = [str(path) for path in sorted(Path(root).glob(f"versions/{version}.*/bin/python{version}"))]
    return next((path for path in found if path is not None and _starts(path, version)), None)


def _starts(path: str, version: str) -> bool:
    # A pyenv shim of a version that is not switched on exists, and fails.
    print_version = "import sys; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([path, "-c", print_version], capture_output=True, text=True, check=False)
    return done.returncode == 0 and done.stdout.strip() == version


PYTHONS = {version: find_python(version) for version in SUPPORTED}
UNIT = [
    nox.param(PYTHONS[LOWEST] or False, LOWEST, "lowest-direct", id=f"{LOWEST}-lowest"),
    *(
        nox.param(PYTHONS[version] or False, version, "highest", id=version)
        for version in SUPPORTED
        if version not in {LOWEST, TESTED}
    ),
]


def install(session: nox.Session, *groups: str, resolution: str = "highest") -> None:
    """Install the project with everything, and these dependency groups."""
    words = [word for group in groups for word in ("--group", group)]
    if session.venv_backend == "uv":  # pip takes the newest only
        words += ["--resolution", resolution]
    session.install("-e", ".[all]", *words)


@nox.session(python=PYTHONS[TESTED])
def lint(session: nox.Session) -> None:
    """Style, types, layers."""
    install(session, "lint", "test", "docs")
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("mypy")
    session.run("lint-imports")


@nox.session(python=PYTHONS[TESTED])
def tests(session: nox.Session) -> None:
    """Everything that needs neither an engine nor a GPU, with the newest dependencies."""
    install(session, "test", "lint")
    session.run("pytest", "tests", "-m", ANYWHERE, *AT_ONCE, *session.posargs)


@nox.session(python=PYTHONS[TESTED])
def long(session: nox.Session) -> None:
    """What takes minutes: every state as a real program, hundreds of timelines, all Pythons. Not in CI."""
    install(session, "test", "lint")
    session.run("pytest", "tests", "-m", "long", "-n", "3", "--dist", "loadfile", *session.posargs)


@nox.session
@nox.parametrize(("python", "version", "resolution"), UNIT)
def unit(session: nox.Session, version: str, resolution: str) -> None:
    """The unit part: with the lowest dependencies that are allowed, and on the other Pythons."""
    if session.python is False:
        session.skip(f"NOT RUN: no Python {version} was found here")
    if resolution != "highest" and session.venv_backend != "uv":
        session.skip("NOT RUN: only uv installs the lowest dependencies")
    install(session, "test", resolution=resolution)
    top = [str(p.relative_to(HERE)) for p in sorted(HERE.glob("tests/test_*.py")) if p.name not in NEEDS_THE_REPOSITORY]
    without = [f"--ignore=tests/judge/test_{name}.py" for name in TIMELINES]
    words = (*without, "-m", "not long", "-q", *PURE_AT_ONCE, *session.posargs)
    session.run("pytest", "tests/judge", "tests/engines", *top, *words)


@nox.session(python=PYTHONS[TESTED])
def docs(session: nox.Session) -> None:
    """The documentation, every warning an error; its examples; the news of the next release."""
    install(session, "docs", "release")
    session.run("sphinx-build", "-n", "-W", "--keep-going", "-q", "-b", "html", "docs", "docs/_build/html")
    session.run("sphinx-build", "-n", "-W", "-q", "-b", "doctest", "docs", "docs/_build/doctest")
    session.run("towncrier", "build", "--draft", "--version", "next", silent=True)


@nox.session(python=PYTHONS[TESTED])
def package(session: nox.Session) -> None:
    """Wheel and sdist, installed as a user does; the console script with and without its extra."""
    session.install("build[uv]")
    dist = Path(session.create_tmp()) / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    session.run("pyproject-build", "--installer", "uv", "--outdir", str(dist), str(HERE), silent=True)
    (wheel,) = dist.glob("*.whl")
    clean = dist.parent / "clean"
    session.run("python", "-m", "venv", "--clear", str(clean))
    pip = [str(clean / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    script = str(clean / "bin" / "hangguard")
    session.run(*pip, str(wheel), external=True)
    session.run(str(clean / "bin" / "python"), "-c", "import hangguard; hangguard.supervise", external=True)
    said = session.run(script, "--help", success_codes=[1], silent=True, external=True)
    if not isinstance(said, str) or "pip install 'hangguard[cli]'" not in said:
        session.error(f"without its extra the console script must say what installs it, not: {said}")
    session.run(*pip, f"{wheel}[all]", external=True)
    session.run(script, "--help", silent=True, external=True)
    session.run(script, "--version", external=True)


@nox.session(python=PYTHONS[TESTED])
def real(session: nox.Session) -> None:
    """The real vLLM on CPU: installed once into a cache, under a quarter of an hour after that."""
    _run_real(session, "real and not full", "-k", "not sglang")


@nox.session(name="real-sglang", python=PYTHONS[TESTED])
def real_sglang(session: nox.Session) -> None:
    """The real SGLang on CPU. Not in CI."""
    _run_real(session, "real and not full", "-k", "sglang")


@nox.session(name="real-full", python=PYTHONS[TESTED])
def real_full(session: nox.Session) -> None:
    """Write docs/real-engines.md: every fault on both real engines. Not in CI; an hour and a half."""
    table = str(HERE / "docs" / "real-engines.md")
    _run_real(session, "full", env={"HANGGUARD_TABLE": table})


def _run_real(session: nox.Session, which: str, *words: str, env: dict[str, str] | None = None) -> None:
    install(session, "test")
    cache = os.environ.get("HANGGUARD_REAL_CACHE", "~/.cache/hangguard-real")
    session.log(f"the engines are installed below {cache} (HANGGUARD_REAL_CACHE)")
    session.run("pytest", "tests/real", "-m", which, *words, *session.posargs, env=env)


@nox.session(python=PYTHONS[TESTED])
def scoreboard(session: nox.Session) -> None:
    """Write docs/scoreboard.md: hangguard beside what people use today. Not in CI; half an hour on two free cores."""
    install(session, "scoreboard")
    session.run("python", "benchmarks/scoreboard.py", *session.posargs)


@nox.session(python=PYTHONS[TESTED])
def soak(session: nox.Session) -> None:
    """Start and stop 200 servers with random kills among strangers; docs/soak.md tells how. Not in CI; six minutes."""
    install(session, "test")
    session.run("python", "benchmarks/soak.py", *session.posargs)


@nox.session(python=PYTHONS[TESTED])
def stops(session: nox.Session) -> None:
    """Write docs/stops.md: one tree of processes, stopped by hangguard and by what people use today. Not in CI."""
    install(session, "scoreboard")
    session.run("python", "benchmarks/stops.py", *session.posargs)


@nox.session(python=PYTHONS[TESTED])
def overhead(session: nox.Session) -> None:
    """What watching costs: CPU and memory of hangguard itself, a minute beside the little server. Not in CI."""
    install(session)
    session.run("python", "benchmarks/overhead.py", *session.posargs)
