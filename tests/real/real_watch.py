"""A real server under a watch that only reports: what it told, what one look says beside it, and what is left.

Everything that is done to a process is done by its identity (psutil compares start times), and only to those that
were seen below the launched one.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import anyio
import httpx
import psutil
import tenacity
from real_left import Belongings, Bystander, port_is_free, temporary_folder

from hangguard import HangguardError, Limits, Retry, supervise
from hangguard.facts import Broken, Exited

WITHIN = 500.0
"""Seconds that a start, or the way to a verdict, may take: some 30 s where nobody else uses the machine."""
LOOK_WITHIN = 120.0
FULL_LOOK = 10.5
"""Seconds of looking that a proof needs; the rest of a quarter of a minute goes into finding the server."""
NOTED_EVERY = 0.5
"""Seconds between two looks at what the members have in /dev/shm."""
LEFT_IN_TEMP = {"vllm": re.compile(r"vllm_dist_[0-9a-f]{32}|cc\w{6}\.\w+"), "sglang": re.compile(r"tmp\w{8}")}
"""Files that the engines make in the temporary folder and never remove: the rendezvous of gloo, and the empty files
by whose names SGLang calls its sockets (no process has them open, so that nobody is seen to have had them), and what
GCC had under way when it was killed in a compile."""
ONE_ATTEMPT = Retry(stop=tenacity.stop_after_attempt(1))


@dataclass(frozen=True)
class OneLook:
    """What ``hangguard diagnose --json`` said."""

    code: int
    document: dict
    seconds: float
    """From the start of the program to its end."""

    @property
    def verdict(self):
        return self.document["verdict"]

    def __str__(self):
        kind = f" ({self.verdict['kind']})" if self.verdict["kind"] else ""
        return f"{self.verdict['verdict']}{kind}, {self.seconds:.0f} s"


class Watched:
    """One launch, from its start to the end of the block."""

    def __init__(self, command, *, env, folder, limits, left_in_temp=None, **more):
        self.told = []
        self.temp = temporary_folder()
        self.folder, self.env = folder, env | {"TMPDIR": str(self.temp)}
        self.made = supervise(
            command,
            env=self.env,
            cwd=folder,
            run_dir=folder / "run",
            limits=limits or Limits(stop_grace=5),
            hooks=[self.told.append],
            **{"on_hang": "report", "retry": ONE_ATTEMPT, **more},
        )
        self.launch = self.made.launch
        self.may_leave_in_temp = left_in_temp or LEFT_IN_TEMP[self.launch.engine]
        self.server = None
        """The handle, from when it is ready."""
        self.bystander = None
        self.failure = None
        self.is_over = False
        self.looks = []
        self.fault_at = None
        self.belongings = Belongings(self.temp, log=self.made.log_path(1))
        self.left_in_temp = []
        self.left_unseen = 0
        """Shared memory and sockets that were made in the last moment before their owner was killed."""
        self.answers = []
        self._members = {}
        self._held = []
        self._group = None

    # ------------------------------------------------------------------------------------------ told

    def of(self, kind):
        return [event for event in tuple(self.told) if event.event == kind]

    def verdicts(self):
        """Every verdict that was told, in order: (when, verdict)."""
        return [(event.t, event.verdict) for event in self.of("verdict")]

    def names(self):
        return [verdict.verdict for _, verdict in self.verdicts()]

    @property
    def pid(self):
        return self.of("launched")[-1].pid

    @property
    def log(self):
        return Path(self.made.log_path(1)).read_text(errors="replace")

    async def until(self, found, what, within=WITHIN):
        """Return what ``found`` returns, once it returns something."""
        ends = time.monotonic() + within
        while not (value := found()):
            if self.is_over or time.monotonic() > ends:
                why = f"over: {self.failure!r}" if self.is_over else f"not within {within:.0f} s"
                said = "\n".join(f"{t:.1f} {v.verdict} {v.kind} {v.phase}: {v.why}" for t, v in self.verdicts())
                raise AssertionError(f"{what}: {why}\n{said}\n{self.log[-3000:]}")
            await anyio.sleep(0.1)
        return value

    async def until_phase(self, *phases):
        await self.until(lambda: [e for e in self.of("phase") if e.phase in phases], f"phase {phases}")

    async def until_ready(self):
        """Wait for the answer; until then nothing was called a hang."""
        await self.until(lambda: self.of("ready"), "ready")
        assert not {"stuck", "broken"} & set(self.names())

    async def until_verdict(self, name, kind=None, within=WITHIN):
        """Return the first verdict of that name since the fault, with when it fell."""
        after = self.fault_at or 0.0
        found = await self.until(
            lambda: [pair for pair in self.verdicts() if pair[0] >= after and _is(pair[1], name, kind)],
            f"{name} {kind or ''}",
            within,
        )
        return found[0][1]

    async def until_over(self):
        """Wait until the server has ended and was released; return the last verdict."""
        await self.until(lambda: self.is_over, "the end")
        ended = self.made.history[-1].verdict
        assert isinstance(ended, (Exited, Broken))
        return ended

    # --------------------------------------------------------------------------------------- members

    def members(self):
        """Every process below the launched one, and itself, that lives now; each is remembered."""
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.pid)
            for process in (root, *root.children(recursive=True)):
                self._members.setdefault((process.pid, process.create_time()), process)
        return [process for process in self._members.values() if _lives(process)]

    def member(self, title):
        """Return the one member with a title that begins so."""
        found = [process for process in self.members() if title_of(process).startswith(title)]
        assert len(found) == 1, [title_of(process) for process in self.members()]
        return found[0]

    def note_memory(self):
        """Remember which names of /dev/shm the members have."""
        self.belongings.note(self.members())

    async def keep_noting(self):
        while True:
            self.note_memory()
            await anyio.sleep(NOTED_EVERY)

    def hold(self, process):
        """Stop a member by SIGSTOP; it goes on at the end at the latest."""
        self.note_memory()
        self._held.append(process)
        process.suspend()
        self.fault_at = time.monotonic()

    def let_go_on(self):
        for process in self._held:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        self._held.clear()

    def kill(self, *processes):
        self.note_memory()
        for process in processes:
            process.kill()
        self.fault_at = time.monotonic()

    # ---------------------------------------------------------------------------------------- clients

    def ask(self, tokens=200):
        """Send one request and do not wait: its status, or what became of it, goes into ``answers``."""
        self._group.start_soon(self._ask, tokens)

    def keep_asking(self, clients, tokens=200):
        """Let so many clients ask on and on, until one of them gets no good answer."""
        for _ in range(clients):
            self._group.start_soon(self._keep_asking, tokens)

    async def _keep_asking(self, tokens):
        while not self.is_over and set(self.answers) <= {200}:
            await self._ask(tokens)

    async def _ask(self, tokens):
        request = {"model": "tiny", "prompt": "hello", "max_tokens": tokens, "ignore_eos": True}
        try:
            async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
                reply = await client.post(f"{self.launch.url}/v1/completions", json=request)
            self.answers.append(reply.status_code)
        except httpx.HTTPError as failure:
            self.answers.append(type(failure).__name__)

    # ------------------------------------------------------------------------------------------ a look

    async def look(self, *words, again=True):
        """Look with ``hangguard diagnose`` from hangguard's own environment; nothing of the server is changed by it.

        Where others keep the machine so busy that its time was over before a full look, it gets more of it.
        """
        look = await self._look(*words)
        if again and look.verdict["verdict"] == "unclear" and look.document["seconds"] < FULL_LOOK:
            look = await self._look("--within", "60")
        self.looks.append(look)
        return look

    async def _look(self, *words):
        self.note_memory()
        before = self._states()
        command = [sys.executable, "-m", "hangguard", "diagnose", str(self.pid), "--json", *words]
        began = time.monotonic()
        with anyio.fail_after(LOOK_WITHIN):
            done = await anyio.run_process(command, check=False, cwd="/")
        seconds = time.monotonic() - began
        after = self._states()
        assert done.stderr == b"", done.stderr.decode()
        document = json.loads(done.stdout)
        look = OneLook(done.returncode, document, seconds)
        (self.folder / f"look-{began:.0f}.json").write_bytes(done.stdout)
        assert {who: after.get(who) for who in before} == before
        assert document["exit_code"] == done.returncode
        assert document["server"]["pid"] == self.pid
        return look

    def _states(self):
        """Of every member that works: whether it is stopped, who traces it, which signals are pending."""
        found = {}
        for process in self.members():
            if process.pid == self.pid or "::" in title_of(process):
                lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
                stopped = [line[:8] for line in lines if line.startswith(("State:\tT", "State:\tt", "State:\tZ"))]
                kept = ("TracerPid", "SigPnd", "ShdPnd")
                found[process.pid, process.create_time()] = stopped + [s for s in lines if s.startswith(kept)]
        return found

    # ------------------------------------------------------------------------------------------- the end

    @property
    def release(self):
        return self.of("released")[-1].release

    async def _tell_the_story(self):
        try:
            async with self.made as self.server:
                self.launch = self.server.launch  # of the last attempt, which may have another port
                await self.server.wait()
        except HangguardError as failure:
            self.failure = failure
        finally:
            self.is_over = True


@contextlib.asynccontextmanager
async def watched(command, *, env, folder, limits=None, **more):
    """Start a server and watch it to the end of the block: then it is gone, with proof, and a bystander is not.

    ``more`` is told to ``supervise``: without it the watch only reports, and there is one attempt.
    """
    watch = Watched(command, env=env, folder=folder, limits=limits, **more)
    failed = None
    try:
        async with anyio.create_task_group() as group:  # it would wrap what the block raises
            watch._group = group
            group.start_soon(watch._tell_the_story)
            try:
                await watch.until(lambda: watch.of("launched"), "launched")
                watch.bystander = Bystander(watch.launch.engine, env=watch.env, folder=folder, temp=watch.temp)
                group.start_soon(watch.keep_noting)
                yield watch
                watch.note_memory()
            except Exception as problem:
                failed = problem
            watch.let_go_on()
            group.cancel_scope.cancel()
        if failed is not None:
            raise failed
        _must_be_gone(watch)
        watch.bystander.must_be_whole()
    finally:
        if watch.bystander is not None:
            watch.bystander.end()
        for process in watch.members() if watch.of("launched") else ():  # none, unless something above has failed
            process.kill()
        for path in watch.belongings.in_shm_left():  # a member had it, and no member lives
            path.unlink(missing_ok=True)
        shutil.rmtree(watch.temp)


def _must_be_gone(watch):
    """Nothing of the server is left, by the eyes of others than hangguard; the release says so, and is whole."""
    belongings, bystander = watch.belongings, watch.bystander
    assert [title_of(process) for process in watch.members()] == []
    assert belongings.processes_left(watch.pid, bystander) == []
    left = [*belongings.in_shm_left(), *belongings.sockets_left(bystander)]
    ended_at = time.monotonic() if watch.fault_at is None else watch.fault_at
    assert belongings.of_before(left, ended_at) == [], watch.release
    watch.left_unseen = len(left)
    assert port_is_free(watch.launch.port)
    _must_be_proved(watch.release)
    assert {str(path) for path in bystander.names}.isdisjoint(file.path for file in watch.release.files)
    watch.left_in_temp = belongings.files_left(bystander)
    pattern = watch.may_leave_in_temp
    assert all(pattern.fullmatch(name) for name in watch.left_in_temp), watch.left_in_temp
    meetings = {str(watch.temp / name) for name in watch.left_in_temp if name.startswith("vllm_dist_")}
    releases = [event.release for event in watch.of("released")]  # one an attempt
    listed = {path for release in releases for path in release.unattributed_files}
    assert any(release.unattributed_unseen for release in releases) or meetings <= listed, releases


def _must_be_proved(release):
    """All is released; where a machine that is too busy gave no answer, it is unknown, and never called free."""
    assert release.left_behind == ()
    for item in release.items:
        too_busy = item.answer == "unknown" and "no answer within" in item.detail
        assert item.answer == "released" or (too_busy and item.resource in {"gpu-memory", "files"}), item


def title_of(process):
    """Return the command line; empty: it has ended."""
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.Error:
        return ""


def _lives(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _is(verdict, name, kind):
    return verdict.verdict == name and kind in {None, verdict.kind}


def command_names(watch):
    """Return the kernel's names of all members that were ever seen and still live."""
    found = set()
    for process in watch.members():
        with contextlib.suppress(psutil.Error):
            found.add(process.name())
    return found


# ------------------------------------------------------------------------------------------- what must hold


def must_hang(stuck, *, kind, phase, suspect, at="", rank=None):
    """The verdict has this kind and phase, and its first suspect this title, stands there, has this rank."""
    assert (stuck.verdict, stuck.kind, stuck.phase) == ("stuck", kind, phase), stuck
    first = stuck.suspects[0]
    assert first.title.startswith(suspect), stuck.suspects
    assert not at or at in first.at[0], stuck.suspects
    assert rank is None or first.rank == rank, stuck.suspects


def must_agree(look, verdict):
    """One look came to the same as the watch: class, kind, phase, first suspect and where it stands."""
    said = look.verdict
    assert (said["verdict"], said["kind"], said["phase"]) == (verdict.verdict, verdict.kind, verdict.phase), said
    assert look.code == 20
    first, own = said["suspects"][0], verdict.suspects[0]
    assert (first["pid"], first["rank"]) == (own.pid, own.rank), said["suspects"]
    assert not (first["at"] and own.at) or _function(first["at"][0]) == _function(own.at[0])


def must_be_healthy(look, *verdicts):
    """One look at a server that does not hang: that is what it says, and its exit code is no hang's."""
    said = look.verdict
    assert said["verdict"] in verdicts, said
    assert look.code == (21 if said["verdict"] in {"unclear", "waiting"} else 0)


def _function(frame):
    return frame.partition(" (")[0].rpartition(".")[2]
