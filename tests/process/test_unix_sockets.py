"""A server on a unix socket: whose it is, is known from the kernel; asked over it like over a port."""

import dataclasses
import inspect
import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from socketserver import ThreadingUnixStreamServer
from threading import Thread

import anyio
import pytest
from seen import launch, target, until
from test_answers import COMPLETION, GOOD, Handler, answering

from hangguard.facts import Ask, Process, Tree, Unseen
from hangguard.observe import Shared
from hangguard.observe.answers import ReadinessProbe
from hangguard.observe.ports import PortProbe
from hangguard.observe.unix_sockets import UnixSocketProbe, port_probe, who_listens_at

pytestmark = pytest.mark.anyio

LISTEN = (
    "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); print('bound', flush=True); "
    "sys.stdin.readline(); s.listen(); print('listening', flush=True); sys.stdin.readline()"
)


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "a server's.sock")


@pytest.fixture
def listener(path, tmp_path):
    """Another process that binds the path, listens after a line, and ends after another."""
    process = subprocess.Popen(
        [sys.executable, "-c", LISTEN, os.path.basename(path)],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "bound\n"
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def on(path):
    return launch(0, url="http://localhost", socket_path=path)


async def test_the_listener_is_found_and_whose_it_is(path, listener):
    given = on(path)
    async with anyio.create_task_group() as tasks:
        shared = Shared(tasks=tasks)
        probe = UnixSocketProbe(target(given=given), shared)
        try:
            # Bound by its bare name, in another folder than the launch's: only the whole path is ours.
            assert (await probe.look(Ask())).listener is None
            probe = UnixSocketProbe(target(given=launch_in(os.path.dirname(path), path)), shared)
            assert (await probe.look(Ask())).listener is None, "bound, but nobody listens"
            listener.stdin.write("\n")
            listener.stdin.flush()
            assert listener.stdout.readline() == "listening\n"
            found = await probe.look(Ask())
            assert (found.port, found.listener.pid, found.listener.ours) == (0, listener.pid, None)
            assert isinstance(found.clients, Unseen)
            shared.tree = Tree(members=())
            assert (await probe.look(Ask())).listener.ours is False
            shared.tree = Tree(members=(member(listener.pid),))
            found = await probe.look(Ask())
            assert (found.listener.ours, found.listener.title) == (True, "the server")
            listener.kill()
            listener.wait()
            assert (await probe.look(Ask())).listener is None, "the file is still there"
            assert os.path.exists(path)
        finally:
            await probe.aclose()


def launch_in(cwd, path):
    return dataclasses.replace(on(path), cwd=cwd)


def member(pid):
    needed = {
        name: Unseen("x")
        for name, parameter in inspect.signature(Process).parameters.items()
        if parameter.default is inspect.Parameter.empty
    }
    return Process(**{**needed, "pid": pid, "title": "the server"})


async def test_a_table_that_cannot_be_read_is_unseen(path, tmp_path):
    async with anyio.create_task_group() as tasks:
        probe = UnixSocketProbe(target(given=on(path)), Shared(tasks=tasks), net=str(tmp_path))
        assert "No such file" in (await probe.look(Ask())).reason
        await probe.aclose()


async def test_the_probe_is_chosen_by_the_launch(path):
    async with anyio.create_task_group() as tasks:
        shared = Shared(tasks=tasks)
        for given, kind in ((on(path), UnixSocketProbe), (launch(1), PortProbe)):
            probe = port_probe(target(given=given), shared)
            assert type(probe) is kind
            await probe.aclose()


def test_who_listens_now(path):
    assert who_listens_at(path) is None
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        assert who_listens_at(path) is None
        server.listen()
        found = who_listens_at(path, [os.getpid()])
        assert (found.pid, found.ours) == (os.getpid(), True)
        assert "python" in found.title or "pytest" in found.title
        assert who_listens_at(path, [1]).ours is False
    assert who_listens_at(path) is None


@contextmanager
def unix_server(path, answer):
    server = ThreadingUnixStreamServer(path, Handler)
    server.daemon_threads, server.block_on_close = True, False
    server.answer, server.asked = answer, []
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def test_readiness_is_asked_over_the_socket(path):
    with unix_server(path, answering(200, GOOD[0])) as server:
        given = on(path)
        async with anyio.create_task_group() as tasks:
            shared = Shared(tasks=tasks, tree=Tree(members=(member(os.getpid()),)))
            place = UnixSocketProbe(target(given=given), shared)
            probe = ReadinessProbe(target(given=given, request=COMPLETION), shared)

            async def settled():
                shared.port = await place.look(Ask())
                reply = await probe.look(Ask())
                return reply if reply.state not in {"waiting", "not-asked"} else None

            assert (await until(settled)).state == "bad"  # this server does not name its model: it is asked for it
            given = dataclasses.replace(given, model="M")
            ready = ReadinessProbe(target(given=given, request=COMPLETION), shared)
            reply = await until(lambda: answered(ready))
            assert reply.state == "good"
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                for each in (probe, ready, place):
                    await each.aclose()
        assert {one.headers["Host"] for one in server.asked} == {"localhost"}
        assert server.asked[-1].path == "/v1/completions"


async def answered(probe):
    reply = await probe.look(Ask())
    return reply if reply.state not in {"waiting", "not-asked"} else None


async def test_a_socket_that_nobody_listens_on_or_a_stranger_is_not_asked(path):
    given = on(path)
    with unix_server(path, answering(200, GOOD[0])) as server:
        async with anyio.create_task_group() as tasks:
            shared = Shared(tasks=tasks, tree=Tree(members=()))
            place = UnixSocketProbe(target(given=given), shared)
            probe = ReadinessProbe(target(given=given, request=COMPLETION), shared)
            shared.port = await place.look(Ask())
            reply = await probe.look(Ask())
            assert (reply.state, reply.detail.partition(" is held")[0]) == ("not-asked", f"socket {path}")
            for each in (place, probe):
                await each.aclose()
        assert server.asked == []
