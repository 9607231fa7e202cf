"""The control socket of a run: who is answered, and that nobody can hold it up. Nothing is started."""

import json
import os
import socket
import stat
import subprocess
import sys
from contextlib import asynccontextmanager
from functools import partial

import anyio
import pytest
from faces import plain
from seen import until

from hangguard.store import CONTROL
from hangguard.supervision import control
from hangguard.supervision.control import answering
from hangguard.supervision.control_socket import listen_in
from hangguard.supervision.events import Notice
from hangguard.supervision.handle import AsyncServer
from hangguard.supervision.serve import Story

pytestmark = pytest.mark.anyio


class Answered:
    """A run that is noted and answers, and of which nothing was launched."""

    def __init__(self, story, face):
        self.story = story
        self.face = face
        self.folder = story.run.folder.path
        self.path = os.path.join(self.folder, CONTROL)
        self.told = story.run.announcer.subscribe()

    def connect(self):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(0.0)
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            connection.connect(f"/proc/self/fd/{folder}/{CONTROL}")
        except OSError:
            connection.close()
            raise
        finally:
            os.close(folder)
        return connection

    async def says(self, connection, lines=1, within=8.0):
        """Everything that is said until so many lines were, or it hangs up."""
        heard = b""
        with anyio.fail_after(within):
            while heard.count(b"\n") < lines:
                try:
                    more = connection.recv(1 << 16)
                except BlockingIOError:
                    await anyio.wait_readable(connection)
                    continue
                except ConnectionResetError:
                    break
                if not more:
                    break
                heard += more
        return [json.loads(line) for line in heard.splitlines()]

    async def ask(self, data, *, lines=1):
        """Send bytes, or a request; return the answers."""
        if isinstance(data, dict):
            data = json.dumps({"v": 1, **data}).encode() + b"\n"
        with self.connect() as connection:
            await send(connection, data)
            return await self.says(connection, lines)

    async def is_answering(self):
        (answer,) = await self.ask({"do": "status"})
        return answer["say"] == "status" and answer["status"]["state"]["run_id"] == self.story.run.folder.run_id


async def send(connection, data):
    while data:
        try:
            data = data[connection.send(data) :]
        except BlockingIOError:
            await anyio.wait_writable(connection)
        except (BrokenPipeError, ConnectionResetError):  # it was hung up before all was said
            return


@asynccontextmanager
async def answered(folder, *, before=lambda path: None):
    supervision = plain(folder)
    await supervision.make_folder()
    run = supervision._run
    story = Story(run)
    before(os.path.join(run.folder.path, CONTROL))
    await run.notes.begin(command=("server",))
    async with answering(story, AsyncServer(story)) as face:
        made = Answered(story, face)
        story.noted.set()
        try:
            await until(lambda: face.is_listening or made.told._queue)
            yield made
        finally:
            await run.notes.end("")


@pytest.fixture
def ours(tmp_path):
    return partial(answered, tmp_path)


# ------------------------------------------------------------------------------------------- the socket


async def test_it_is_the_users_alone_and_goes_with_the_run(ours):
    async with ours() as run:
        status = os.lstat(run.path)
        assert stat.S_ISSOCK(status.st_mode)
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert stat.S_IMODE(os.stat(run.folder).st_mode) == 0o700
        assert await run.is_answering()
    assert not os.path.lexists(run.path)


async def test_a_folder_whose_path_is_longer_than_a_socket_path_has_one_too(tmp_path):
    folder = tmp_path / ("x" * 100) / ("y" * 100)
    folder.mkdir(parents=True)
    async with answered(folder) as run:
        assert len(run.path) > 200
        assert await run.is_answering()
    assert not os.path.lexists(run.path)


@pytest.mark.parametrize("kind", ["file", "link", "socket"])
async def test_what_lies_in_its_place_stays_and_the_run_says_that_it_cannot_be_asked(ours, tmp_path, kind):
    target = tmp_path / "target"
    theirs = socket.socket(socket.AF_UNIX)

    def plant(path):
        if kind == "file":
            with open(path, "w") as out:
                out.write("mine")
        elif kind == "link":
            target.write_text("mine")
            os.symlink(target, path)
        else:
            folder = os.open(os.path.dirname(path), os.O_RDONLY)
            theirs.bind(f"/proc/self/fd/{folder}/{CONTROL}")
            os.close(folder)

    async with ours(before=plant) as run:
        before = os.lstat(run.path)
        notice = await run.told.next_or_none()
        assert "cannot be asked or stopped from outside" in notice.text
    assert os.lstat(run.path).st_ino == before.st_ino
    assert kind != "link" or target.read_text() == "mine"
    theirs.close()


async def test_a_file_that_was_put_in_its_place_meanwhile_stays(ours):
    async with ours() as run:
        os.unlink(run.path)
        with open(run.path, "w") as out:
            out.write("mine")
    with open(run.path) as file:
        assert file.read() == "mine"


async def test_a_folder_that_others_may_enter_gets_no_socket(tmp_path):
    folder = tmp_path / "open"
    folder.mkdir(mode=0o755)
    with pytest.raises(PermissionError):
        listen_in(str(folder))
    assert list(folder.iterdir()) == []


# ------------------------------------------------------------------------------------------ who may ask

AS_ANOTHER = (
    "import os, socket, sys\n"
    "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
    "s = socket.socket(socket.AF_UNIX); s.settimeout(10)\n"
    "s.connect(f'/proc/self/fd/{sys.argv[1]}')\n"
    'print(s.recv(4096).decode(), "|", s.recv(10))\n'
)


async def as_another_user(path):
    """Connect as nobody, through a descriptor of the socket's file that we hand him."""
    file = os.open(path, os.O_PATH)
    command = [sys.executable, "-I", "-S", "-c", AS_ANOTHER, str(file)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        with anyio.fail_after(30):
            done = await anyio.run_process(command, check=False, pass_fds=[file], **pipes)
        return done.stdout.decode()
    finally:
        os.close(file)


async def test_another_user_cannot_connect_and_is_not_answered_where_he_can(ours):
    async with ours() as run:
        assert "PermissionError" in await as_another_user(run.path)
        os.chmod(run.path, 0o666)
        said = await as_another_user(run.path)
        assert "user 65534 is not answered here" in said
        assert said.strip().endswith("| b''")
        assert await run.is_answering()
        assert not run.story.wishes.stop_because


# ------------------------------------------------------------------------------------ nobody holds it up

BAD = {
    "10,000 bytes of rubbish": b"\xff\x00rubbish " * 1000 + b"\n",
    "more than a line may have": b"x" * 200_000,
    "no object": b"[1]\n",
    "an empty line": b"\n",
    "deeply nested": b"[" * 20_000 + b"\n",
    "another version": b'{"v": 99, "do": "stop"}\n',
    "no version": b'{"do": "stop"}\n',
    "an unknown request": {"do": "launch"},
    "a request that is no text": {"do": ["stop"]},
    "a drain below zero": {"do": "stop", "drain": -1},
    "a drain without end": b'{"v": 1, "do": "stop", "drain": 1e999}\n',
    "a drain that is no number": b'{"v": 1, "do": "stop", "drain": NaN}\n',
    "a drain that is a boolean": {"do": "stop", "drain": True},
    "a grace that is text": {"do": "stop", "grace": "x"},
    "a wait for nothing": {"do": "wait"},
    "a wait for a list": {"do": "wait", "for": ["exit"]},
}


@pytest.mark.parametrize("what", BAD)
async def test_what_is_no_request_is_answered_with_an_error_and_hung_up(ours, what):
    async with ours() as run:
        answers = await run.ask(BAD[what], lines=2)
        assert [answer["say"] for answer in answers] == ["error"]
        assert answers[0]["problem"]
        assert not run.story.wishes.stop_because
        assert await run.is_answering()


async def test_one_who_connects_and_says_nothing_is_hung_up_in_time(ours, monkeypatch):
    monkeypatch.setattr(control, "ASK_WITHIN", 0.3)
    async with ours() as run:
        with run.connect() as silent, run.connect() as slow:
            slow.send(b'{"v": 1, "do"')
            assert await run.is_answering()
            assert await run.says(silent) == []
            assert await run.says(slow) == []


async def test_a_hundred_who_say_nothing_keep_nobody_out(ours):
    async with ours() as run:
        silent, answers = [], False
        with anyio.fail_after(30):
            while len(silent) < 100 or not answers:
                try:
                    if len(silent) < 100:
                        silent.append(run.connect())
                    else:
                        answers = await run.is_answering()
                except BlockingIOError:  # the queue is full for a moment
                    await anyio.sleep(0.01)
        assert run.face._connections <= control.MOST_CONNECTIONS + 1
        for connection in silent:
            connection.close()
        await until(lambda: run.face._connections == 0)


async def test_of_those_who_have_asked_there_is_a_greatest_number(ours):
    async with ours() as run:
        listening = [run.connect() for _ in range(control.MOST_CONNECTIONS)]
        for connection in listening:
            connection.send(b'{"v": 1, "do": "events"}\n')
            assert (await run.says(connection))[0]["say"] == "begin"
        with run.connect() as late:
            assert "others are being answered" in (await run.says(late))[0]["problem"]
        listening.pop().close()
        await until(lambda: run.face._connections < control.MOST_CONNECTIONS)
        assert await run.is_answering()
        for connection in listening:
            connection.close()


async def test_one_who_never_reads_is_hung_up_and_costs_nobody_anything(ours, monkeypatch):
    monkeypatch.setattr(control, "TAKE_WITHIN", 1.0)
    async with ours() as run:
        with run.connect() as never, run.connect() as reads:
            never.send(b'{"v": 1, "do": "events"}\n')
            reads.send(b'{"v": 1, "do": "events"}\n')
            assert (await run.says(reads))[0]["say"] == "begin"
            await until(lambda: len(run.face._subscriptions) == 2)
            for _ in range(60):  # more than a socket takes that nobody reads
                run.story.run.announcer.tell(Notice(t=0.0, attempt=1, text="x" * 10_000))
                assert len(await run.says(reads)) == 1
            assert await run.is_answering()
            await until(lambda: run.face._connections == 1)
            assert await run.is_answering()


# ------------------------------------------------------------------------------------------ what is asked


async def test_a_stop_is_a_wish_of_the_story_and_told_when_it_is_over(ours):
    async with ours() as run:
        with run.connect() as one, run.connect() as waits:
            waits.send(b'{"v": 1, "do": "wait", "for": "exit"}\n')
            one.send(b'{"v": 1, "do": "stop", "grace": 0.5, "within": 20}\n')
            assert [answer["say"] for answer in await run.says(one)] == ["stopping"]
            wishes = run.story.wishes
            assert wishes.stop_because == "asked from outside"
            assert wishes.grace == 0.5
            assert wishes.within.seconds == 20
            await until(lambda: run.face._subscriptions)
            await run.face.say_goodbye("stopped as asked from outside")
            (stopped,) = await run.says(one)
            assert (stopped["say"], stopped["outcome"]) == ("stopped", "stopped as asked from outside")
            (reached,) = await run.says(waits)
            assert (reached["say"], reached["what"]) == ("reached", "exit")
        (refused,) = await run.ask({"do": "restart"})
        assert refused["say"] == "error"


async def test_a_shorter_limit_of_two_stops_holds_and_a_hung_up_one_goes_on(ours):
    async with ours() as run:
        for within in (5, 60, 30):
            (answer,) = await run.ask({"do": "stop", "within": within})
            assert answer["say"] == "stopping"
        await until(lambda: run.face._connections == 0)
        assert run.story.wishes.within.seconds == 5
        assert run.story.wishes.stop_because
