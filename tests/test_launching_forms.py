"""Launches as people write them: config files, TLS, sockets, wrappers, containers, nodes; nothing is started."""

import json
import os
import sys

import pytest

from hangguard.changes import with_flag
from hangguard.engines import SGLANG, VLLM
from hangguard.errors import BadLaunch
from hangguard.launching import read_command
from test_launching import make_venv, read, write


@pytest.fixture
def venv(tmp_path):
    return make_venv(tmp_path / "venv", vllm="0.32.0+cpu", sglang="0.5.23")


# ------------------------------------------------------------------------------------------ --config FILE

CONFIG = """
# as in the documentation of vLLM
model: org/M
host: "::1"
port: 6379
served_model_name: [short, long]
tensor-parallel-size: 2
pipeline_parallel_size: 2
api-key: [k1, k2]
enforce-eager: true
enable-prefix-caching: false
ssl-certfile: cert.pem
compilation-config:
  pass_config: {fuse: true}
lora-modules: []
"""


def test_a_config_file_of_vllm(venv, tmp_path):
    write(tmp_path / "c.yaml", CONFIG)
    launch, _ = read("vllm serve --config c.yaml", venv, cwd=tmp_path)
    assert (launch.url, launch.model, launch.api_key) == ("https://[::1]:6379", "short", "k1")
    assert launch.ranks == 4
    assert launch.argv == ("vllm", "serve", "--config", "c.yaml")
    assert "--enable-prefix-caching" not in launch.file_args
    assert json.loads(launch.file_args[launch.file_args.index("--compilation-config") + 1]) == {
        "pass_config": {"fuse": True}
    }
    assert launch.notes == ()
    assert "k1" not in repr(launch)


def test_the_command_wins_over_its_config_file(venv, tmp_path):
    write(tmp_path / "c.yml", CONFIG)
    launch, _ = read("vllm serve N --port 1 --config c.yml --host h --served-model-name s -tp 1", venv, cwd=tmp_path)
    assert (launch.url, launch.model, launch.ranks) == ("https://h:1", "s", 2)
    changed = with_flag(launch, "--tensor-parallel-size", "4")
    assert changed.argv[-1] == "--tensor-parallel-size=4"
    assert changed.file_args == launch.file_args


def test_a_config_file_of_sglang(venv, tmp_path):
    write(tmp_path / "c.yaml", "model-path: M\nport: 7\ntp-size: 8\nis-embedding: true\ndisable-cuda-graph: true\n")
    launch, _ = read(["python", "-m", "sglang.launch_server", "--config", f"{tmp_path}/c.yaml"], venv)
    assert (launch.url, launch.model, launch.ranks, launch.task) == ("http://127.0.0.1:7", "M", 8, "embed")


def test_a_fallback_that_the_config_file_has_already_is_not_tried(venv, tmp_path):
    write(tmp_path / "c.yaml", "enforce-eager: true\n")
    eager = next(f for f in VLLM.fallbacks if f.name == "eager")
    launch, _ = read("vllm serve M --config c.yaml", venv, cwd=tmp_path)
    assert eager.change(launch) is None
    assert eager.change(read("vllm serve M", venv)[0]) is not None
    write(tmp_path / "s.yaml", "disable-cuda-graph: true\n")
    graphs = next(f for f in SGLANG.fallbacks if f.name == "no-cuda-graph")
    assert graphs.change(read("sglang serve M --config s.yaml", venv, cwd=tmp_path)[0]) is None


def test_an_empty_config_file_says_nothing(venv, tmp_path):
    write(tmp_path / "c.yaml", "# nothing\n")
    assert read("vllm serve M --config c.yaml", venv, cwd=tmp_path)[0].port == 8000


def test_a_config_file_that_the_server_ignores_is_said(venv, tmp_path):
    write(tmp_path / "c.yaml", "port: 1\n")
    launch, _ = read("vllm serve M --config=c.yaml", venv, cwd=tmp_path)
    assert launch.port == 8000
    assert any("ignores '--config=FILE'" in note for note in launch.notes)


BOMB = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("missing.yaml", None, "no such file"),
        ("c.json", "{}", "must end in .yaml"),
        ("c.yaml", "a: [", "is no YAML"),
        ("c.yaml", "- a\n- b\n", "holds no mapping"),
        ("c.yaml", "8000\n", "holds no mapping"),
        ("c.yaml", "1: x\n", "1 is no name of an option"),
        ("c.yaml", "a: !!python/object/apply:os.system ['touch /tmp/owned']\n", "is no YAML"),
        ("c.yaml", BOMB, "too many values"),
        ("c.yaml", "a: &a [*a]\n", "too many values"),
        ("c.yaml", "port: 0\n", "Port 0"),
        ("c.yaml", "port: eight\n", "'eight'"),
        ("c.yaml", "[" * 5000, "is no YAML"),
        ("c.yaml", "#" * (1024 * 1024 + 1), "larger than"),
        ("c.yaml", "a: \udcff", "cannot be read"),
    ],
)
def test_a_config_file_that_cannot_be_read_is_refused_with_what_to_do(venv, tmp_path, name, text, says):
    if text is not None:
        (tmp_path / name).write_text(text, errors="surrogateescape")
    with pytest.raises(BadLaunch, match=says):
        read(f"vllm serve M --config {name}", venv, cwd=tmp_path)


@pytest.mark.parametrize("command", ["vllm serve M --config", "vllm serve M --config a.yaml --config b.yaml"])
def test_a_config_option_that_the_server_would_refuse(venv, tmp_path, command):
    with pytest.raises(BadLaunch, match="config"):
        read(command, venv, cwd=tmp_path)


def test_a_fifo_where_the_config_file_should_be_does_not_hang(venv, tmp_path):
    os.mkfifo(tmp_path / "c.yaml")
    with pytest.raises(BadLaunch, match="no such file"):
        read("vllm serve M --config c.yaml", venv, cwd=tmp_path)


def test_without_pyyaml_the_error_says_how_to_get_it(venv, tmp_path, monkeypatch):
    write(tmp_path / "c.yaml", "port: 1\n")
    monkeypatch.setitem(sys.modules, "yaml", None)  # how Python itself says that a module cannot be imported
    with pytest.raises(BadLaunch, match=r"hangguard\[config\]"):
        read("vllm serve M --config c.yaml", venv, cwd=tmp_path)


# --------------------------------------------------------------------------------- sockets, TLS, keys


def test_a_unix_socket(venv, tmp_path):
    launch, _ = read("vllm serve M --uds s.sock --port 9", venv, cwd=tmp_path)
    assert (launch.url, launch.socket_path) == ("http://localhost", f"{tmp_path}/s.sock")
    assert (launch.host, launch.port) == ("localhost", 0)
    launch, _ = read("vllm serve M --uds s.sock --ssl-certfile c", venv, cwd=tmp_path)
    assert launch.url == "https://localhost"
    launch, _ = read("vllm serve M --uds s.sock", venv, cwd=tmp_path, url="http://127.0.0.1:1")
    assert (launch.url, launch.socket_path) == ("http://127.0.0.1:1", None)


def test_tls_and_a_server_that_wants_certificates_of_its_clients(venv):
    launch, _ = read("sglang serve M --ssl-certfile c.pem --ssl-keyfile k.pem", venv)
    assert (launch.url, launch.notes) == ("https://127.0.0.1:30000", ())
    launch, _ = read("vllm serve M --ssl-certfile c.pem --ssl-cert-reqs 2", venv)
    assert any("certificate of its clients" in note for note in launch.notes)


# --------------------------------------------------------------------------------------------- tasks


@pytest.mark.parametrize(
    ("config", "task"),
    [
        ({"architectures": ["BertModel"]}, "embed"),
        ({"architectures": ["XLMRobertaForSequenceClassification"], "id2label": {"0": "LABEL_0"}}, "rerank"),
        ({"architectures": ["BertForSequenceClassification"], "id2label": {"0": "a", "1": "b"}}, "classify"),
        ({"architectures": ["WhisperForConditionalGeneration"]}, "transcribe"),
        ({"architectures": ["LlamaForCausalLM"]}, "generate"),
        ({"architectures": "BertModel"}, "generate"),
        ({}, "generate"),
        ([], "generate"),
    ],
)
@pytest.mark.parametrize("command", ["vllm serve m", "sglang serve --model-path m"])
def test_a_model_on_this_disk_tells_its_task(venv, tmp_path, command, config, task):
    write(tmp_path / "m" / "config.json", json.dumps(config))
    assert read(command, venv, cwd=tmp_path)[0].task == task


def test_flags_win_over_the_model(venv, tmp_path):
    write(tmp_path / "m" / "config.json", json.dumps({"architectures": ["LlamaForCausalLM"]}))
    assert read("vllm serve m --runner pooling", venv, cwd=tmp_path)[0].task == "embed"
    assert read("sglang serve m --is-embedding", venv, cwd=tmp_path)[0].task == "embed"


@pytest.mark.parametrize("text", ["{", "", "\udcff", "[" * 100_000])
def test_a_config_of_a_model_that_cannot_be_read_tells_nothing(venv, tmp_path, text):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(text, errors="surrogateescape")
    assert read("vllm serve m", venv, cwd=tmp_path)[0].task == "generate"


def test_servers_without_tokenizer(venv):
    assert not read("vllm serve M --skip-tokenizer-init", venv)[0].tokenizes
    assert not read("vllm serve M --tokens-only", venv)[0].tokenizes
    assert not read("sglang serve M --skip-tokenizer-init", venv)[0].tokenizes
    assert read("sglang serve M", venv)[0].tokenizes


# --------------------------------------------------------------------------------------------- nodes


@pytest.mark.parametrize(
    ("command", "answers", "rank", "ranks", "nodes"),
    [
        ("vllm serve M -tp 16 --nnodes 2", True, 0, 8, 2),
        ("vllm serve M -tp 16 --nnodes 2 --node-rank 1 --headless", False, 1, 8, 2),
        ("vllm serve M -tp 8 -dp 4 -dpl 2 --headless --data-parallel-start-rank 2", False, 0, 16, 2),
        ("vllm serve M -tp 2 -dp 4 --data-parallel-rank 3", True, 0, 2, 4),
        ("vllm serve M -tp 2 -dp 4 --data-parallel-size-local 0", True, 0, 1, 2),  # the front end alone
        ("vllm serve M -tp 2 -dp 4 -dpl=0 --nnodes 3", True, 0, 1, 3),
        ("vllm serve M --api-server-count 0", False, 0, 1, 1),
        ("vllm serve M --api-server-count 4", True, 0, 1, 1),
        ("sglang serve M --tp 16 --nnodes 2 --node-rank 0", True, 0, 8, 2),
        ("sglang serve M --tp 16 --nnodes 2 --node-rank 1", False, 1, 8, 2),
    ],
)
def test_nodes_of_a_launch_over_machines(venv, command, answers, rank, ranks, nodes):
    launch, engine = read(command, venv)
    assert (launch.answers, launch.node_rank, launch.ranks, launch.nodes) == (answers, rank, ranks, nodes)
    assert any("no answer can prove it ready" in note for note in launch.notes) is not answers
    assert (engine.ready(launch) is None) is not answers


# ------------------------------------------------------------------------------------------ wrappers


def fake(folder, *names):
    for name in names:
        write(folder / "tools" / name, "#!/bin/sh\n", executable=True)
    return {"PATH": f"{folder}/venv/bin:{folder}/tools:{os.defpath}"}


def test_wrappers_are_named_and_looked_through(venv, tmp_path):
    env = fake(tmp_path, "numactl")
    command = "env CUDA_VISIBLE_DEVICES=1 nohup nice -n 5 numactl -N 0 timeout -k 5 1h vllm serve M --port 9 -n 2"
    launch, engine = read(command, venv, env=env)
    assert launch.wrapped_by == ("env", "nohup", "nice", "numactl", "timeout")
    assert (engine, launch.port, launch.version, launch.model) == (VLLM, 9, "0.32.0+cpu", "M")
    assert launch.nodes == 2
    assert launch.delegates_to is None
    assert [note for note in launch.notes if "timeout ends the server" in note]
    eager = next(f for f in VLLM.fallbacks if f.name == "eager").change(launch)
    assert eager.argv == (*launch.argv, "--enforce-eager")


def test_a_wrapper_with_an_option_that_is_not_known_is_named(venv, tmp_path):
    env = fake(tmp_path, "numactl")
    with pytest.raises(BadLaunch, match="'numactl' cannot be looked through, for its option '--new' is not known"):
        read("numactl --new 1 vllm serve M", venv, env=env)
    launch, _ = read("numactl --new 1 vllm serve M", venv, env=env, url="http://127.0.0.1:1")
    assert any("was not looked through" in note for note in launch.notes)


@pytest.mark.parametrize(
    "command",
    [
        ["bash", "-c", "vllm serve M --port 9"],
        ["sh", "-ec", "exec vllm serve M --port 9"],
        ["nohup", "/bin/bash", "-c", "nice vllm serve 'M' --port 9"],
        ["bash", "-c", "vllm serve M --port 9 -cc '{\"mode\": 0}'"],
    ],
)
def test_a_shell_with_one_simple_command_is_left_out_and_that_is_said(venv, command):
    launch, engine = read(command, venv)
    assert (engine, launch.port, launch.model) == (VLLM, 9, "M")
    assert not any("bash" in word or word == "sh" for word in launch.argv)
    assert any("is started without the shell" in note for note in launch.notes)


def test_variables_in_a_shells_command_are_set_by_env(venv):
    launch, _ = read(["bash", "-c", "A=B vllm serve M"], venv)
    assert launch.argv == ("env", "A=B", "vllm", "serve", "M")
    assert launch.environment()["A"] == "B"


@pytest.mark.parametrize(
    "text",
    [
        "cd /x && vllm serve M",
        "vllm serve $MODEL",
        "vllm serve M > log",
        'vllm serve "$M"',
        "vllm serve M &",
        "vllm serve ~/m",
        "vllm serve m*",
        "source e; vllm serve M",
        "vllm serve M\nsleep 1",
        "vllm serve `cat m`",
        "ulimit -n 9",
        "vllm serve 'M",
    ],
)
def test_a_shell_that_is_needed_hides_the_flags(venv, text):
    with pytest.raises(BadLaunch, match="scripts hide the flags"):
        read(["bash", "-c", text], venv)
    launch, _ = read(["bash", "-c", text], venv, url="http://127.0.0.1:1")
    assert launch.argv == ("bash", "-c", text)


@pytest.mark.parametrize(
    ("words", "env"),
    [
        (["bash", "-lc"], {}),
        (["bash", "-i", "-c"], {}),
        (["bash", "-c"], {"BASH_ENV": "/x"}),
        (["bash", "-c"], {"BASH_FUNC_vllm%%": "() { x; }"}),
    ],
)
def test_a_shell_that_reads_files_first_hides_the_flags(venv, words, env):
    with pytest.raises(BadLaunch, match="scripts hide the flags"):
        read([*words, "vllm serve M"], venv, env=env)


# ----------------------------------------------------------------------------- versions behind wrappers


def test_conda_run_finds_the_version_of_its_environment(venv, tmp_path):
    root = tmp_path / "conda"
    write(root / "bin" / "conda", "#!/bin/sh\nexit 1\n", executable=True)
    make_venv(root / "envs" / "serve", vllm="0.31.0").joinpath("pyvenv.cfg").unlink()
    make_venv(tmp_path / "elsewhere" / "far", vllm="0.30.0").joinpath("pyvenv.cfg").unlink()
    write(tmp_path / "home" / ".conda" / "environments.txt", f"{tmp_path}/elsewhere/far\n")
    env = {"PATH": f"{root}/bin:{venv}/bin:{os.defpath}", "HOME": str(tmp_path / "home"), "PYTHONNOUSERSITE": "1"}
    assert read("conda run -n serve --no-capture-output vllm serve M", venv, env=env)[0].version == "0.31.0"
    assert read("conda run -n far --live-stream vllm serve M", venv, env=env)[0].version == "0.30.0"
    assert read(f"conda run -p {root}/envs/serve vllm serve M", venv, env=env)[0].version == "0.31.0"
    launch, _ = read("conda run -n nowhere vllm serve M", venv, env=env)
    assert launch.version is None
    assert any("environment of conda run was not found" in note for note in launch.notes)
    assert any("holds the server's output back" in note for note in launch.notes)


def test_uv_run_finds_the_version_of_its_project(venv, tmp_path):
    env = fake(tmp_path, "uv", "pixi", "poetry")
    project = tmp_path / "project"
    write(project / "pyproject.toml")
    make_venv(project / ".venv", vllm="0.29.0")
    make_venv(project / ".pixi" / "envs" / "gpu", vllm="0.28.0")
    (project / "deep").mkdir()
    assert read("uv run vllm serve M", venv, env=env, cwd=project / "deep")[0].version == "0.29.0"
    assert read(f"uv --directory {project} run vllm serve M", venv, env=env)[0].version == "0.29.0"
    assert read("poetry run vllm serve M", venv, env=env, cwd=project)[0].version == "0.29.0"
    assert read("pixi run -e gpu vllm serve M", venv, env=env, cwd=project)[0].version == "0.28.0"
    assert (
        read("uv run --no-project vllm serve M", venv, env={**env, "VIRTUAL_ENV": str(venv)})[0].version == "0.32.0+cpu"
    )
    assert read("uv run vllm serve M", venv, env=env, cwd="/")[0].version is None


def test_what_stands_behind_uvx_is_not_taken_for_what_is_on_the_path(venv, tmp_path):
    launch, _ = read("uvx vllm serve M", venv, env=fake(tmp_path, "uvx"))
    assert launch.version is None
    assert any("version is not looked up" in note for note in launch.notes)


def test_nothing_that_a_command_names_is_executed(venv, tmp_path):
    for name in ("uv", "conda", "vllm", "python", "docker"):
        write(tmp_path / "bin" / name, f"#!/bin/sh\necho {name} >> {tmp_path}/ran\n", executable=True)
    env = {"PATH": f"{tmp_path}/bin:{os.defpath}"}
    for command in (
        "uv run vllm serve M",
        "conda run -n e vllm serve M",
        "python -m sglang.launch_server",
        "docker run -p 1:8000 vllm/vllm-openai M",
        ["bash", "-c", "vllm serve M"],
    ):
        read_command(command, env=env)
    assert not (tmp_path / "ran").exists()


# ------------------------------------------------------------------------------------------- scripts


def test_a_script_whose_engine_is_named_is_read_as_far_as_it_shows(tmp_path):
    script = str(write(tmp_path / "wrapper.sh", "#!/bin/sh\n", executable=True))
    words = ["--host", "::", "--port", "8000", "--api-key", "K", "--model-path", "M", "--tp", "2", "--is-embedding"]
    launch, engine = read_command([script, *words], engine="sglang")
    assert (engine, launch.url, launch.api_key) == (SGLANG, "http://[::1]:8000", "K")
    assert (launch.model, launch.ranks, launch.task) == ("M", 2, "embed")
    with pytest.raises(BadLaunch, match="does not show"):  # its default port would be a guess
        read_command([script, "--model-path", "M"], engine="sglang")


def test_a_script_is_named_as_what_hides_the_flags(tmp_path):
    script = str(write(tmp_path / "serve.sh", "#!/bin/sh\n", executable=True))
    with pytest.raises(BadLaunch, match=r"serve\.sh' is a script, and scripts hide the flags.*engine='vllm'"):
        read_command([script, "--port", "1"])
    with pytest.raises(BadLaunch, match=r"my_server\.py' is a script"):
        read_command([sys.executable, "my_server.py", "--port", "1"])


# ---------------------------------------------------------------------------- launchers that delegate


@pytest.mark.parametrize(
    ("command", "url", "engine", "delegate"),
    [
        ("docker run -p 9000:8000 vllm/vllm-openai:v0.32.0 --model M", "http://127.0.0.1:9000", "vllm", "docker"),
        ("docker run -p 127.0.0.1:9000:7 vllm/vllm-openai M --port 7", "http://127.0.0.1:9000", "vllm", "docker"),
        ("docker run --network=host vllm/vllm-openai M", "http://127.0.0.1:8000", "vllm", "docker"),
        ("podman run -p 1:30000 lmsysorg/sglang python3 -m sglang.launch_server --model-path M", "http://127.0.0.1:1",
         "sglang", "podman"),
        ("env A=B nohup docker run -p 9:8000 img vllm serve M", "http://127.0.0.1:9", "vllm", "docker"),
    ],
)  # fmt: skip
def test_a_container_whose_image_and_ports_show_the_server(tmp_path, command, url, engine, delegate):
    env = fake(tmp_path, "docker", "podman")
    launch, known = read_command(command, env=env)
    assert (launch.url, known.name, launch.delegates_to, launch.model) == (url, engine, delegate, "M")
    assert launch.version is None
    assert any("Run hangguard inside it" in note for note in launch.notes)
    assert all(fallback.change(launch) is None for fallback in known.fallbacks)


def test_the_key_of_a_container_is_the_one_that_it_is_given(tmp_path):
    env = {**fake(tmp_path, "docker"), "VLLM_API_KEY": "outside"}
    command = "docker run -p 1:8000 {} vllm/vllm-openai M"
    assert read_command(command.format("-e VLLM_API_KEY=inside"), env=env)[0].api_key == "inside"
    assert read_command(command.format("--rm"), env=env)[0].api_key is None
    detached = read_command(command.format("-d"), env=env)[0]
    assert any("leave -d out" in note for note in detached.notes)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("docker run vllm/vllm-openai M", "-p 8000:8000"),
        ("docker run -p 8000 vllm/vllm-openai M", "-p 8000:8000"),
        ("docker run -p 1:2 vllm/vllm-openai M", "-p 8000:8000"),
        ("docker start c", "Run hangguard inside it"),
        ("docker compose up", "Run hangguard inside it"),
        ("srun -N 2 vllm serve M --port 8000", "srun … hangguard run"),
        ("nohup salloc vllm serve M", "salloc … hangguard run"),
        ("sbatch job.sh", "Run hangguard there"),
        ("kubectl exec pod -- vllm serve M", "forward the port"),
        ("ssh host vllm serve M", "ssh … hangguard run"),
        ("systemd-run --user vllm serve M", "systemd-run --scope"),
        ("ray job submit -- vllm serve M", "Ray cluster"),
        ("distrobox enter b -- vllm serve M", "Run hangguard inside it"),
    ],
)
def test_a_launcher_that_delegates_is_told_what_to_give_instead(tmp_path, command, says):
    names = ("docker", "srun", "salloc", "sbatch", "kubectl", "ssh", "systemd-run", "ray", "distrobox")
    env = fake(tmp_path, *names)
    with pytest.raises(BadLaunch, match="where the server will answer") as refused:
        read_command(command, env=env)
    assert says in str(refused.value)
    assert "url=" in str(refused.value) or "diagnose" in str(refused.value) or "RAY_ADDRESS" in str(refused.value)
    launch, _ = read_command(command, env=env, url="http://127.0.0.1:1")
    assert launch.delegates_to in names
    assert any("no hang can be told" in note for note in launch.notes)


def test_a_service_manager_that_only_makes_a_scope_does_not_delegate(venv, tmp_path):
    env = fake(tmp_path, "systemd-run")
    launch, engine = read("systemd-run --user --scope vllm serve M", venv, env=env)
    assert (launch.delegates_to, engine, launch.wrapped_by) == (None, VLLM, ("systemd-run",))


@pytest.mark.parametrize(("uid", "delegate"), [(0, None), (1000, "sudo")])
def test_another_users_processes_are_out_of_reach_but_for_root(venv, tmp_path, monkeypatch, uid, delegate):
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    launch, engine = read("sudo -u serve vllm serve M", venv, env=fake(tmp_path, "sudo"))
    assert (launch.delegates_to, engine, launch.port) == (delegate, VLLM, 8000)


@pytest.mark.parametrize(
    ("command", "env", "delegate"),
    [
        ("vllm serve M --distributed-executor-backend ray", {"RAY_ADDRESS": "10.0.0.1:6379"}, "ray"),
        ("vllm serve M --distributed-executor-backend ray", {"RAY_ADDRESS": "local"}, None),
        ("vllm serve M --distributed-executor-backend mp", {"RAY_ADDRESS": "auto"}, None),
        ("sglang serve M --use-ray", {"RAY_ADDRESS": "auto"}, "ray"),
        ("env RAY_ADDRESS=auto vllm serve M --distributed_executor_backend=ray", {}, "ray"),
        ("env -u RAY_ADDRESS vllm serve M", {"RAY_ADDRESS": "auto"}, None),
    ],
)
def test_a_ray_cluster_that_runs_already_starts_the_workers(venv, command, env, delegate):
    env = {"PATH": f"{venv}/bin:{os.defpath}", "HOME": "/nonexistent", **env}
    launch, _ = read_command(command, env=env)
    assert launch.delegates_to == delegate
    assert launch.port in {8000, 30000}  # the front end is here all the same


def test_what_runs_already_need_not_be_found(tmp_path):
    launch, engine = read_command(
        ["/gone/bin/vllm", "serve", "M"], env={"PATH": "/gone"}, cwd=tmp_path / "gone", must_exist=False
    )
    assert (engine, launch.url) == (VLLM, "http://127.0.0.1:8000")
