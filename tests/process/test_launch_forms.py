"""Launches as people write them, through ``supervise()``: a real server on a real socket answers, and is ended."""

import json
import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

import anyio
import pytest
import trustme
from commands import small

from hangguard import GaveUp, Limits, NotReadyInTime, supervise
from hangguard.observe.ports import free_port


@pytest.fixture
def run(tmp_path):
    def start(command, **more):
        more.setdefault("limits", Limits(stop_grace=3.0, ready_within=60.0))
        return supervise(command, run_dir=tmp_path / "runs", **more)

    return start


@pytest.fixture
def short_folder():
    """The path of a unix socket has 107 bytes: the folders of pytest are too deep."""
    folder = tempfile.mkdtemp(prefix="hg")
    yield folder
    shutil.rmtree(folder)


def without_port(command):
    index = command.index("--port")
    return [*command[:index], *command[index + 2 :]]


def test_a_config_file_gives_what_the_command_does_not(run, tmp_path):
    file = tmp_path / "server.yaml"
    port = free_port()
    file.write_text(
        json.dumps({"port": port, "served-model-name": "from-file", "api-key": "sesame", "is-embedding": True})
    )
    with run([*without_port(small()), "--config", str(file)]) as server:
        assert server.url == f"http://127.0.0.1:{port}"
        assert (server.launch.model, server.launch.task) == ("from-file", "embed")
        assert server.attempt.was_ready


def test_a_fallback_wins_over_the_config_file(run, tmp_path):
    file = tmp_path / "server.yaml"
    file.write_text(json.dumps({"cuda-graph-backend-decode": "full", "tp": 1}))
    command = [*small(deadlock_at_capture=True), "--config", str(file)]
    limits = Limits(patience=3.0, stop_grace=3.0, ready_within=90.0)
    with run(command, fallbacks="auto", limits=limits) as server:
        assert [change.name for change in server.changes] == ["no-cuda-graph"]
        assert server.launch.argv[-4:-2] == ("--config", str(file)), "the file stays, and what was added comes after it"
        assert server.launch.argv[-2].startswith("--cuda-graph-backend-decode")


def test_a_server_that_speaks_tls_with_a_certificate_of_its_own(run, tmp_path):
    authority = trustme.CA()
    certificate = authority.issue_cert("somebody.example")  # not the name by which it is asked
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    for blob in certificate.cert_chain_pems:
        blob.write_to_path(tmp_path / "cert.pem", append=True)
    tls = ["--ssl-certfile", str(tmp_path / "cert.pem"), "--ssl-keyfile", str(tmp_path / "key.pem")]
    with run([*small(), *tls]) as server:
        assert server.url.startswith("https://127.0.0.1:")
        assert server.attempt.was_ready
        assert server.sample().health.state in {"good", "waiting", "not-asked"}


@pytest.mark.anyio
async def test_a_server_on_a_unix_socket(tmp_path, short_folder):
    path = f"{short_folder}/server.sock"
    command = [*without_port(small()), "--uds", path]
    with anyio.fail_after(60):
        async with supervise(command, run_dir=tmp_path, limits=Limits(stop_grace=3.0)) as server:
            assert (server.url, server.launch.socket_path) == ("http://localhost", path)
            port = (await server.sample()).port
            assert port.listener.ours
    assert server.attempt.release.answer == "released"


def test_an_embedding_server_whose_flags_do_not_show_it(run, tmp_path):
    script = tmp_path / "serve.sh"
    script.write_text(
        f"#!/bin/sh\nexec {' '.join(small(port=0, is_embedding=True)).replace('--port 0', '--port $1')}\n"
    )
    script.chmod(0o755)
    with run([str(script), "{port}"], engine="sglang") as server:
        assert server.launch.task == "generate"
        assert server.attempt.was_ready


def test_a_server_without_tokenizer(run):
    with run([*small(), "--skip-tokenizer-init"]) as server:
        assert not server.launch.tokenizes
        assert server.attempt.was_ready


def test_a_key_that_nobody_gave_is_asked_for_and_no_hang_is_told(run, tmp_path):
    script = tmp_path / "serve.sh"
    script.write_text(f"#!/bin/sh\nexec {' '.join(small(port=0, api_key='sesame')).replace('--port 0', '--port $1')}\n")
    script.chmod(0o755)
    limits = Limits(stop_grace=3.0, ready_within=8.0, patience=2.0)
    with pytest.raises(NotReadyInTime) as gave_up, run([str(script), "{port}"], engine="sglang", limits=limits):
        pass
    (attempt,) = gave_up.value.history
    assert attempt.verdict.verdict == "expired"
    assert "wants an API key, and its command shows none" in Path(attempt.evidence_path).read_text()
    with run([str(script), "{port}"], engine="sglang", ready="/health") as server:
        assert server.attempt.was_ready


WRAPPERS = [
    ["env", "HG_TEST=1"],
    ["nohup"],
    ["setsid", "-w"],
    ["nice", "-n", "1"],
    ["taskset", "-c", "0"],
    ["stdbuf", "-oL"],
    ["timeout", "-k", "5", "300"],
    ["env", "HG_TEST=1", "nohup", "nice", "timeout", "300"],
]


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=" ".join)
def test_a_server_behind_wrappers_that_every_system_has(run, wrapper):
    with run([*wrapper, *small(deadlock_at_capture=False)]) as server:
        assert server.launch.engine == "sglang"
        assert server.launch.wrapped_by[0] == wrapper[0]
        members = server.sample().tree.members
        assert any("scheduler" in member.title for member in members)
    assert server.attempt.release.answer == "released"


def test_a_server_in_a_shell_with_one_simple_command(run):
    with run(["bash", "-c", shlex.join(small())], env={**os.environ, "PATH": os.environ["PATH"]}) as server:
        assert server.launch.argv[0] == sys.executable
        assert any("without the shell" in note for note in server.launch.notes)


def test_a_node_of_a_higher_rank_is_ready_by_its_log_and_asked_for_no_answer(run):
    with run([*small(), "--nnodes", "2", "--node-rank", "1"]) as server:
        assert not server.launch.answers
        reply = server.sample().answer
        assert (reply.state, reply.detail.partition(":")[0]) == ("not-asked", "this node serves no requests of its own")


def test_a_node_of_a_higher_rank_that_hangs_is_not_ready(run):
    limits = Limits(stop_grace=3.0, ready_within=10.0)
    hangs = [*small(deadlock_at_capture=True), "--nnodes", "2", "--node-rank", "1"]
    with pytest.raises(GaveUp), run(hangs, limits=limits):
        pass
