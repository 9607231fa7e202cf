"""What is left of a port when nobody listens there: TIME_WAIT, a holder, and nothing are told apart."""

import socket
import subprocess
import sys

import pytest
import tenacity
from faces import plain
from seen import launch

from hangguard import Limits, PortInUse, Retry
from hangguard.observe import port_left
from hangguard.observe.port_left import PortLeft, look_at_port, read_port_left
from hangguard.observe.ports import free_port

HERE = "127.0.0.1"


def served_once(*, reuse, closes_first):
    """Serve one connection on a new port and end it; return (the port, the client's end, a held server's end)."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
        listener.bind((HERE, 0))
        listener.listen()
        port = listener.getsockname()[1]
        client = socket.create_connection((HERE, port))
        server, _ = listener.accept()
    if closes_first:
        server.close()
        assert client.recv(1) == b""
        client.close()
    return port, client, server


def test_a_port_of_which_nothing_is_left_can_be_bound():
    port = free_port()
    left = read_port_left(port, HERE)
    assert left == PortLeft(port=port, can_be_bound=True)
    assert str(left) == ""
    with socket.socket() as probe:
        probe.bind((HERE, port))  # the look itself left nothing


@pytest.mark.parametrize("reuse", [True, False])
def test_time_wait_is_named_and_is_in_the_way_only_of_a_server_that_did_not_share(reuse):
    port, _, _ = served_once(reuse=reuse, closes_first=True)
    left = read_port_left(port, HERE)
    assert left.time_wait == 1
    assert left.held_by == ()
    assert left.can_be_bound is reuse
    assert str(left) == "1 in TIME_WAIT, which the kernel keeps for 60 s"


def test_a_connection_that_a_child_of_the_server_kept_is_held_by_that_child():
    port, client, server = served_once(reuse=False, closes_first=False)
    child = subprocess.Popen(["/bin/sleep", "100"], stdin=server)
    try:
        server.close()
        left = read_port_left(port, HERE)
        assert left.held_by == ((child.pid, "sleep"),)
        assert left.can_be_bound is False
        assert f"held by pid {child.pid} (sleep)" in str(left)
        assert child.poll() is None
    finally:
        client.close()
        child.kill()
        child.wait()


def test_a_port_that_is_bound_and_not_listened_on_is_not_free():
    with socket.socket() as holder:
        holder.bind((HERE, 0))
        left = read_port_left(holder.getsockname()[1], HERE)
    assert left.can_be_bound is False
    assert str(left) == "somebody has bound it and does not listen"


@pytest.mark.parametrize("host", ["127.0.0.9", "::1"])
def test_another_address_is_not_in_the_way(host):
    port, _, _ = served_once(reuse=False, closes_first=True)
    left = read_port_left(port, host)
    assert left.time_wait == 0
    assert left.can_be_bound is not False


def test_a_name_is_not_looked_up():
    assert read_port_left(free_port(), "some-host.example").can_be_bound is None


@pytest.mark.anyio
async def test_a_table_that_cannot_be_read_is_said(monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied", "/proc/net/tcp")

    monkeypatch.setattr(port_left, "_rows", refuse)
    seen = await look_at_port(launch(free_port()))
    assert seen.reason == "/proc/net/tcp: Permission denied"


# ------------------------------------------------------------------------------------------- launches


def test_a_launch_waits_for_a_port_that_only_the_kernel_keeps(tmp_path):
    """The wait ends as soon as it can be bound: here because the last holder of a connection ends."""
    port, client, server = served_once(reuse=False, closes_first=False)
    holder = subprocess.Popen(["/bin/sleep", "100"], stdin=server)
    server.close()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, 0, 0, 0, 0, 0, 0, 0]))  # ends without TIME_WAIT
    told = []

    def note(event):
        told.append(event.as_json())
        if event.event == "notice" and "cannot be bound yet" in event.text:
            client.close()
            holder.kill()

    command = [sys.executable, "-m", "http.server", str(port), "--bind", HERE]
    try:
        with plain(tmp_path, command, url=f"http://{HERE}:{port}", hooks=[note], limits=Limits(ready_within=30)):
            pass
        (notice,) = [event for event in told if event["event"] == "notice" and "bound" in event["text"]]
        assert f"held by pid {holder.pid} (sleep)" in notice["text"]
    finally:
        holder.kill()
        holder.wait()


def test_a_port_that_stays_bound_is_refused_with_the_reason_and_nothing_is_started(tmp_path, monkeypatch):
    monkeypatch.setattr("hangguard.supervision.usable_port.PORT_WITHIN", 0.2)
    told = []
    with socket.socket() as holder:
        holder.bind((HERE, 0))
        port = holder.getsockname()[1]
        command = [sys.executable, "-m", "http.server", str(port), "--bind", HERE]
        with (
            pytest.raises(PortInUse) as refused,
            plain(tmp_path, command, url=f"http://{HERE}:{port}", hooks=[told.append]),
        ):
            pass
    assert refused.value.listener is None
    assert "somebody has bound it and does not listen" in str(refused.value)
    assert "launched" not in {event.event for event in told}


def test_each_attempt_gets_a_fresh_port_where_it_is_ours_to_choose_and_a_restart_keeps_it(tmp_path):
    """The first start says that the port is taken, which is worth an unchanged retry."""
    told = []
    limits = Limits(ready_within=60, stop_grace=2)
    once = f'[ -e {tmp_path}/again ] || {{ touch {tmp_path}/again; echo "OSError: [Errno 98] Address already in use"; '
    script = once + 'exit 1; }; exec "$0" "$@"'
    command = ["sh", "-c", script, sys.executable, "-m", "http.server", "{port}", "--bind", HERE]
    with plain(tmp_path, command, hooks=[told.append], limits=limits, retry=Retry(wait=tenacity.wait_none())) as server:
        first, second = server.history[0].launch, server.launch
        assert first.port != second.port
        assert str(second.port) in second.argv
        assert str(first.port) not in second.argv
        assert server.url == f"http://{HERE}:{second.port}"
        server.restart()
        assert server.launch.port == second.port
    assert [event.argv[-3] for event in told if event.event == "launched"] == [
        str(first.port), str(second.port), str(second.port),
    ]  # fmt: skip


def test_a_chosen_port_that_somebody_took_meanwhile_is_replaced_and_the_stranger_stays(tmp_path):
    supervision = plain(tmp_path)
    taken = supervision.launch.port
    with socket.socket() as stranger:
        stranger.bind((HERE, taken))
        stranger.listen()
        with supervision as server:
            assert server.launch.port != taken
            assert server.url.endswith(f":{server.launch.port}")
        with socket.create_connection((HERE, taken)):
            pass
