"""Bytes that come in over TCP, and who is connected: as the kernel tells, and without what we ourselves do."""

import os
import re
import socket
import subprocess
import sys
from contextlib import contextmanager

import anyio
import pytest
from seen import PROGRAMS, family, launch, target, until

from hangguard.facts import NOT_ASKED, Ask, Listener, Port, Process, Request, Tree, Unseen
from hangguard.observe import connections
from hangguard.observe.answers import ReadinessProbe
from hangguard.observe.ports import PortProbe
from hangguard.observe.processes import ProcessProbe
from hangguard.observe.target import Shared

pytestmark = pytest.mark.anyio

MIB = 1 << 20
SOCKETS = Ask(sockets=True)


@contextmanager
def program(*argv):
    """A process that is no member of anything."""
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
            process.stdin.close()


@contextmanager
def feeding(*before):
    with program(*before, sys.executable, str(PROGRAMS / "seen_feeder.py")) as feeder:
        port = int(feeder.stdout.readline())

        def feed():
            feeder.stdin.write("\n")
            feeder.stdin.flush()

        yield port, feed


@contextmanager
def receiving(tmp_path, *before, loopback=False, argv=()):
    """A family whose only program receives from the port that is written to its FIFO."""
    fifo = tmp_path / "port"
    os.mkfifo(fifo)
    command = [*before, sys.executable, str(PROGRAMS / "seen_receiver.py"), str(fifo)]
    with family(*command, *(["loopback"] if loopback else []), *argv) as made:
        assert made.line(1) == "up"
        yield made, lambda port: fifo.write_text(str(port))


@contextmanager
def server():
    """A process that listens and never accepts."""
    with program(sys.executable, str(PROGRAMS / "seen_listener.py"), "127.0.0.1", "0") as listener:
        yield int(listener.stdout.readline())


@contextmanager
def client(port):
    """A process with one connection to that port."""
    code = f"import socket, sys; s = socket.create_connection(('127.0.0.1', {port})); print('in', flush=True); input()"
    with program(sys.executable, "-c", code) as process:
        assert process.stdout.readline() == "in\n"
        yield process


def member(pid):
    return Process(
        pid=pid, started=1, parent=1, title="x", name="x", state="S", threads=1, cpu_seconds=0,
        reaped_cpu_seconds=0, minor_faults=0, major_faults=0, rss_bytes=0,
    )  # fmt: skip


async def _received(probe):
    (seen,) = (await probe.look(SOCKETS)).members
    return seen


def told_by_ss(local_port):
    """What ss(8) says that this socket has received."""
    text = subprocess.run(["ss", "-tinH", f"sport = {local_port}"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"bytes_received:(\d+)", text)
    return int(found[1]) if found else 0


async def test_a_download_shows_in_the_bytes_of_sockets_and_not_in_the_bytes_read(tmp_path):
    with receiving(tmp_path) as (made, connect), feeding() as (port, feed):
        connect(port)
        own_port = int(made.line(2).split()[1])
        probe = ProcessProbe(target(made.guardian, made.root))
        before = await _received(probe)
        assert before.socket_bytes == 0
        for step in (1, 2):
            feed()

            async def arrived(step=step):
                seen = await _received(probe)
                return seen if seen.socket_bytes == step * MIB else None

            after = await until(arrived)
            assert after.socket_bytes == told_by_ss(own_port)
        assert after.read_chars - before.read_chars < MIB
        assert (await probe.look(Ask())).members[0].socket_bytes is None
        await probe.aclose()


async def test_what_members_and_this_program_send_does_not_count(tmp_path):
    """Neither the chatter between ranks, nor a probe's own request, nor a request to the server's own port."""
    with receiving(tmp_path) as (made, connect), feeding() as (port, feed):
        connect(port)
        own_port = int(made.line(2).split()[1])
        feed()
        await until(lambda: told_by_ss(own_port) == MIB)
        feeder = next(c.inode for c in connections.read_connections() if c.local.port == port)
        holder = next(pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if pid_has(pid, feeder))
        assert connections.received_by([made.root_pid], port=1) == {made.root_pid: MIB}
        assert connections.received_by([made.root_pid, holder], port=1)[made.root_pid] == 0
        assert connections.received_by([made.root_pid], port=1, own=holder) == {made.root_pid: 0}
        assert connections.received_by([made.root_pid], port=own_port) == {made.root_pid: 0}


def pid_has(pid, inode):
    return inode in connections.socket_inodes(pid)


async def test_a_member_in_another_network_namespace_is_seen_there(tmp_path):
    with receiving(tmp_path, "unshare", "--net", loopback=True) as (made, connect):
        with feeding("nsenter", "--net", "--target", str(made.root_pid)) as (port, feed):
            connect(port)
            assert made.line(2).startswith("connected")
            feed()
            assert made.line(3) == f"received {MIB}"
            probe = ProcessProbe(target(made.guardian, made.root))
            home = os.readlink("/proc/self/ns/net")
            assert (await _received(probe)).socket_bytes == MIB
            assert {os.readlink(f"/proc/self/task/{task}/ns/net") for task in os.listdir("/proc/self/task")} == {home}
            await probe.aclose()


async def test_sockets_missing_says_why(tmp_path, monkeypatch):
    def refuse(_namespace=None):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(connections, "open_diag", refuse)
    with receiving(tmp_path) as (made, _):
        probe = ProcessProbe(target(made.guardian, made.root))
        seen = await probe.look(SOCKETS)
        assert seen.sockets_unseen == "Operation not permitted"
        assert seen.members[0].socket_bytes is None
        assert (await probe.look(Ask())).sockets_unseen == ""
        await probe.aclose()


async def test_sockets_hanging_is_unseen_and_the_tree_is_not(tmp_path, monkeypatch):
    import threading

    gate = threading.Event()
    monkeypatch.setattr(connections, "received_by", lambda _pids, **_: gate.wait(10) and {})
    with receiving(tmp_path) as (made, _):
        probe = ProcessProbe(target(made.guardian, made.root, probe_within=0.4))
        seen = await probe.look(SOCKETS)
        assert seen.sockets_unseen == "no answer within 0.2 s"
        assert [one.pid for one in seen.members] == [made.root_pid]
        gate.set()
        await probe.aclose()


class Looking:
    def __init__(self, port, members=(), *, net="/proc/net", **more):
        tree = Tree(members=tuple(map(member, members)))
        self.target = target(given=launch(port), **more)
        self.make = lambda tasks: PortProbe(self.target, Shared(tasks=tasks, tree=tree), net=net)

    async def __aenter__(self):
        self.tasks = anyio.create_task_group()
        await self.tasks.__aenter__()
        self.probe = self.make(self.tasks)
        return self

    async def __aexit__(self, *_):
        self.tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await self.probe.aclose()
        await self.tasks.__aexit__(None, None, None)

    async def clients(self):
        return (await self.probe.look(SOCKETS)).clients


def connected_by_ss(port):
    command = ["ss", "-tnH", "state", "established", f"sport = {port}"]
    return len(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines())


async def test_a_connection_of_somebody_else_is_a_client_until_it_closes():
    with server() as port:
        async with Looking(port) as looking:
            assert await looking.clients() == 0
            with client(port) as process:
                assert await looking.clients() == 1 == connected_by_ss(port)
                with client(port):
                    assert await looking.clients() == 2 == connected_by_ss(port)
                process.kill()
                process.wait()
                await until(lambda: connected_by_ss(port) == 0)
            assert await looking.clients() == 0
            assert (await looking.probe.look(Ask())).clients == NOT_ASKED


async def test_a_member_that_asks_its_own_server_is_no_client():
    with server() as port, client(port) as process:
        async with Looking(port, members=[process.pid]) as looking:
            assert await looking.clients() == 0
        async with Looking(port) as looking:
            assert await looking.clients() == 1


async def test_a_request_of_our_own_probes_is_no_client_however_long_it_waits():
    with server() as port:
        async with Looking(port, request=Request(method="GET", path="/x")) as looking:
            listener = Listener(pid=1, title="x", ours=True)
            shared = Shared(tasks=looking.tasks, port=Port(port=port, listener=listener))
            probe = ReadinessProbe(looking.target, shared)
            assert (await probe.look(Ask())).state == "waiting"
            await until(lambda: connected_by_ss(port) == 1)
            assert [await looking.clients() for _ in range(5)] == [0] * 5
            looking.tasks.cancel_scope.cancel()
        await probe.aclose()
        assert not connections.own_requests()


async def test_a_request_of_the_program_around_us_is_a_client():
    """It is our user's: the one that waits for an answer. A probe's may just not be known yet, so it is seen twice."""
    with server() as port, socket.create_connection(("127.0.0.1", port)):
        async with Looking(port) as looking:
            assert await looking.clients() == 0
            assert await looking.clients() == 1
            assert await looking.clients() == 1


async def test_without_netlink_the_tables_of_proc_say_the_same(monkeypatch):
    def refuse(_namespace=None):
        raise PermissionError(1, "Operation not permitted")

    with server() as port, client(port) as process:
        told = connections.read_connections()
        monkeypatch.setattr(connections, "open_diag", refuse)
        plain = connections.read_connections()
        mine = [c for c in plain if port in {c.local.port, c.remote.port}]
        assert {c._replace(received=None) for c in told if port in {c.local.port, c.remote.port}} == set(mine)
        async with Looking(port) as looking:
            assert await looking.clients() == 1
        async with Looking(port, members=[process.pid]) as looking:
            assert await looking.clients() == 0


async def test_clients_missing_says_why(tmp_path, monkeypatch):
    def refuse(_namespace=None):
        raise PermissionError(1, "Operation not permitted")

    (tmp_path / "tcp").write_text("a line of headings\n")
    monkeypatch.setattr(connections, "open_diag", refuse)
    async with Looking(1, net=str(tmp_path)) as looking:
        assert await looking.clients() == 0
        monkeypatch.setattr(connections, "_from_tables", _missing)
        assert await looking.clients() == Unseen(f"{tmp_path}/tcp: No such file or directory")
    async with Looking(1) as looking:
        looking.probe._shared.tree = Unseen("wedged")
        assert await looking.clients() == Unseen("the members are unseen")


def _missing(net):
    raise FileNotFoundError(2, "No such file or directory", f"{net}/tcp")
