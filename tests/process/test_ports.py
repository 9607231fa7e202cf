"""Who listens is found out without a connection, and a stranger is never taken for ours."""

import os
import socket
import sys
import time
from contextlib import contextmanager

import anyio
import psutil
import pytest
from seen import PROGRAMS, family, launch, target, until

from hangguard.facts import Ask, Listener, Port, Process, Tree, Unseen
from hangguard.observe import ports
from hangguard.observe.ports import PortProbe, free_port, who_listens
from hangguard.observe.target import Shared

pytestmark = pytest.mark.anyio


@contextmanager
def listening(host="127.0.0.1"):
    with family(sys.executable, str(PROGRAMS / "seen_listener.py"), host, "0") as made:
        yield made.root_pid, int(made.line(1))


def member(pid, title="our server"):
    return Process(
        pid=pid, started=1, parent=1, title=title, name="x", state="S", threads=1, cpu_seconds=0,
        reaped_cpu_seconds=0, minor_faults=0, major_faults=0, rss_bytes=0,
    )  # fmt: skip


async def look(port, tree, *, host="127.0.0.1", net="/proc/net", within=5.0):
    asked = target(given=launch(port, url="http://x") if host == "127.0.0.1" else _on(host, port), probe_within=within)
    async with anyio.create_task_group() as tasks:
        probe = PortProbe(asked, Shared(tasks=tasks, tree=tree), net=net)
        try:
            return await probe.look(Ask())
        finally:
            await probe.aclose()


def _on(host, port):
    from dataclasses import replace

    return replace(launch(port), host=host)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::", "127.0.0.9"])
async def test_the_listener_is_the_one_that_psutil_finds(host):
    with listening(host) as (pid, port):
        found = who_listens(port)
        told = [one for one in psutil.net_connections("tcp") if one.status == "LISTEN" and one.laddr.port == port]
        assert {one.pid for one in told} - {None} == {pid}, "psutil shows one that ended meanwhile without its pid"
        assert found == Listener(pid=pid, title=" ".join(psutil.Process(pid).cmdline()), ours=False)
        assert who_listens(port, [pid]).ours is True


async def test_nobody_listens_on_a_free_port_and_an_open_connection_is_no_listener():
    assert who_listens(free_port()) is None
    with listening() as (_, port), socket.create_connection(("127.0.0.1", port)) as connection:
        assert who_listens(connection.getsockname()[1]) is None


async def test_free_port_can_be_bound():
    for host in ("127.0.0.1", "::1"):
        port = free_port(host)
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, port))


async def test_only_addresses_count_that_are_in_the_way():
    with listening("127.0.0.9") as (pid, port):
        assert who_listens(port, host="127.0.0.1") is None
        assert who_listens(port, host="127.0.0.9").pid == pid
        assert who_listens(port, host="0.0.0.0").pid == pid
        assert who_listens(port, host="localhost").pid == pid
    with listening("::") as (pid, port):
        assert who_listens(port, host="127.0.0.1").pid == pid
        assert who_listens(port, host="[::1]").pid == pid


async def test_the_probe_says_whose_it_is_with_the_title_that_the_tree_has():
    with listening() as (pid, port):
        ours = await look(port, Tree(members=(member(pid),)))
        assert ours == Port(port=port, listener=Listener(pid=pid, title="our server", ours=True))
        strangers = await look(port, Tree(members=(member(os.getpid()),)))
        assert strangers.listener.pid == pid
        assert strangers.listener.ours is False
        unknown = await look(port, Unseen("wedged"))
        assert unknown.listener.pid == pid
        assert unknown.listener.ours is None
    assert await look(port, Tree(members=())) == Port(port=port, listener=None)


async def test_a_holder_whose_descriptors_cannot_be_read_is_neither_ours_nor_anothers(monkeypatch):
    with listening() as (pid, port):
        real = os.listdir

        def refuse(path):
            if str(path) == f"/proc/{pid}/fd":
                raise PermissionError(13, "Permission denied", path)
            return real(path)

        monkeypatch.setattr(ports.os, "listdir", refuse)
        assert who_listens(port) == Listener(pid=None, title="", ours=None)
        assert who_listens(port, [pid]).ours is None


async def test_a_member_that_inherited_a_strangers_socket_comes_first():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        listener.set_inheritable(True)
        import subprocess

        child = subprocess.Popen(["/bin/sleep", "1000"], close_fds=False)
        try:
            assert who_listens(port, [child.pid]).pid == child.pid
            assert who_listens(port, [child.pid]).ours is True
            assert who_listens(port, [os.getpid()]).pid == os.getpid()
        finally:
            child.kill()
            child.wait()


async def test_the_next_looks_are_cheap_and_notice_another_holder():
    with listening() as (pid, port):
        async with anyio.create_task_group() as tasks:
            shared = Shared(tasks=tasks, tree=Tree(members=(member(pid),)))
            probe = PortProbe(target(port=port), shared)
            assert (await probe.look(Ask())).listener.ours is True
            began = time.process_time()
            for _ in range(20):
                assert (await probe.look(Ask())).listener.pid == pid
            assert (time.process_time() - began) / 20 < 0.01
            os.kill(pid, 9)
            await until(lambda: who_listens(port) is None)
            assert (await probe.look(Ask())).listener is None
            with socket.socket() as other:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                other.bind(("127.0.0.1", port))
                other.listen()
                seen = await probe.look(Ask())
                assert seen.listener.pid == os.getpid()
                assert seen.listener.ours is False
            await probe.aclose()


async def test_without_ipv6_the_other_table_is_enough(tmp_path):
    with listening() as (pid, port):
        (tmp_path / "tcp").write_text(_read("/proc/net/tcp"))
        assert (await look(port, Tree(members=()), net=str(tmp_path))).listener.pid == pid


def _read(path):
    with open(path) as file:
        return file.read()


async def test_port_missing_says_why(tmp_path):
    seen = await look(1, Tree(members=()), net=str(tmp_path))
    assert seen == Unseen(f"{tmp_path}/tcp: No such file or directory")


async def test_port_hanging_is_unseen_within_its_deadline(tmp_path):
    os.mkfifo(tmp_path / "tcp")
    began = time.monotonic()
    assert await look(1, Tree(members=()), net=str(tmp_path), within=0.2) == Unseen("no answer within 0.2 s")
    assert time.monotonic() - began < 2
    with (tmp_path / "tcp").open("w"):
        pass
