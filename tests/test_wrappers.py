"""Programs in front of the server: each read with its own options, any number of them; nothing is guessed."""

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hangguard.delegates import DELEGATES, advice_for, delegate_of, read_container
from hangguard.wrappers import WRAPPERS, unwrap, variables_behind, with_assignment

THROUGH = [
    "env",
    "env A=B",
    "/usr/bin/env A=B C=D",
    "env -u A -i B=C",
    "env -C /tmp A=B",
    "env --unset=A B=C",
    "env - A=B",
    "env -- A=B",
    "nohup",
    "setsid",
    "setsid -w",
    "setsid --fork --wait",
    "nice",
    "nice -n 5",
    "nice -n5",
    "nice -10",
    "nice --adjustment=3",
    "ionice -c 2 -n 0",
    "ionice -c2 -n0 -t",
    "numactl --cpunodebind=0 --membind=0",
    "numactl -N 0 -m 0",
    "numactl --interleave all -l",
    "numactl -C0-15 -l",
    "taskset -c 0-15,32",
    "taskset -ac 0-3",
    "taskset 0xff",
    "stdbuf -oL -eL",
    "stdbuf --output=L",
    "stdbuf -o L",
    "timeout 3600",
    "timeout -k 5 1.5h",
    "timeout --signal=INT --foreground 10m",
    "timeout -s INT -- 9",
    "chrt -f 10",
    "chrt -b 0",
    "xvfb-run -a -s '-screen 0 1x1x8'",
    "tini --",
    "tini -g -s --",
    "dumb-init --single-child --",
    "uv run",
    "uv run --python 3.12 --with flashinfer --frozen",
    "uv --directory /srv run --no-sync --",
    "uv run -p3.12",
    "uvx",
    "uvx --from vllm==0.32.0",
    "poetry run",
    "poetry -C /srv run",
    "pdm run",
    "pixi run -e gpu",
    "conda run -n serve --no-capture-output",
    "conda run --prefix /opt/e --live-stream",
    "mamba run -n e",
    "micromamba run -n e -r /opt/mamba",
    "nsys profile -o report --trace=cuda,nvtx -t cuda --capture-range=cudaProfilerApi",
    "apptainer exec --nv -B /data:/data image.sif",
    "systemd-run --user --scope -p MemoryMax=9G",
    "sudo -E -u vllm",
    "sudo A=B",
    "env A=B nohup nice -n 5 numactl -N 0 uv run conda run -n e setsid",
]


@pytest.mark.parametrize("front", THROUGH)
def test_what_stands_behind_it_is_found(front):
    words = shlex.split(front)
    argv = [*words, "vllm", "serve", "M", "--port", "1"]
    found = unwrap(argv)
    assert found.opaque == ""
    assert argv[found.start :] == ["vllm", "serve", "M", "--port", "1"]
    assert argv[found.layers[0].start] == words[0]


OPAQUE = [
    ("numactl --new-option 1 vllm", "'--new-option' is not known"),
    ("env -S 'vllm serve'", "'-S' is not known"),
    ("taskset -p 1234", "'-p' is not known"),
    ("timeout vllm serve", "missing"),
    ("uv pip install vllm", "does not start a server"),
    ("conda activate e", "does not start a server"),
    ("uv run script.py --port 1", None),  # a program of that name: nothing in front of it is unknown
    ("uv run -m vllm.entrypoints", "'-m' is not known"),
    ("poetry install", "does not start a server"),
    ("nohup", "no command behind it"),
    ("env A=B", "no command behind it"),
    ("stdbuf -o", "no command behind it"),
    ("sudo -s", "'-s' is not known"),
]


@pytest.mark.parametrize(("command", "why"), OPAQUE)
def test_what_is_not_understood_is_said_and_nothing_behind_it_is_read(command, why):
    argv = shlex.split(command)
    found = unwrap(argv)
    assert (why in found.opaque) if why else found.opaque == ""
    assert not why or found.start == 0


def test_without_scope_the_service_manager_starts_it():
    assert unwrap(["systemd-run", "--user", "vllm", "serve"]).start == 0
    assert delegate_of(["systemd-run", "--user", "vllm", "serve"]) == "systemd-run"
    assert delegate_of(["systemd-run", "--scope", "vllm", "serve"]) is None


@pytest.mark.parametrize(
    ("argv", "before", "behind"),
    [
        (["env", "A=2", "s"], {"A": "1", "B": "1"}, {"A": "2", "B": "1"}),
        (["env", "-i", "A=2", "s"], {"A": "1", "B": "1"}, {"A": "2"}),
        (["env", "-u", "B", "s"], {"A": "1", "B": "1"}, {"A": "1"}),
        (["env", "-uB", "nohup", "env", "C=3", "s"], {"A": "1", "B": "1"}, {"A": "1", "C": "3"}),
        (["s", "A=2"], {"A": "1"}, {"A": "1"}),
    ],
)
def test_the_environment_behind_it(argv, before, behind):
    assert variables_behind(argv, before) == behind


words = st.lists(
    st.sampled_from(["env", "nohup", "nice", "-n", "5", "uv", "run", "--", "-", "A=1", "taskset", "-c", "vllm", ""]),
    max_size=9,
)


@given(words)
def test_any_words_can_be_looked_at(argv):
    found = unwrap(argv)
    assert 0 <= found.start <= len(argv)
    once = with_assignment(argv, "A", "2")
    assert with_assignment(once, "A", "2") == once
    assert variables_behind(once, {"A": "2"}).get("A", "2") == "2"
    assert delegate_of(argv) is None
    assert read_container(argv) is None


def test_names_are_there_once():
    names = [wrapper.name for wrapper in WRAPPERS]
    assert len(set(names)) == len(names)
    assert all(advice_for(name) and "{" not in advice_for(name) for name in DELEGATES)


@pytest.mark.parametrize(
    ("command", "argv", "ports"),
    [
        ("docker run --gpus all -p 8000:8000 vllm/vllm-openai:latest --model M", "vllm serve --model M", "8000:8000"),
        ("podman run --rm -it -p 127.0.0.1:9000:8000/tcp img vllm serve M", "vllm serve M", "9000:8000"),
        (
            "docker run --ipc=host -v /m:/m -e A=B -p8001:30000 lmsysorg/sglang sglang serve M",
            "sglang serve M",
            "8001:30000",
        ),
        ("docker run --entrypoint vllm img serve M", "vllm serve M", ""),
        ("docker container run -P reg.io:5000/vllm/vllm-openai@sha256:ab M", "vllm serve M", ""),
        ("docker run -p 8000 img vllm serve M", "vllm serve M", ""),
        ("env A=B nohup docker run -p 1:2 img vllm serve M", "vllm serve M", "1:2"),
    ],
)
def test_what_docker_run_shows(command, argv, ports):
    found = read_container(shlex.split(command))
    assert " ".join(found.argv) == argv
    assert ",".join(f"{here}:{inside}" for _, here, inside in found.ports) == ports


@pytest.mark.parametrize(
    "command", ["docker ps -a", "docker run", "docker run --rm", "docker exec c vllm serve", "vllm"]
)
def test_what_docker_does_not_show(command):
    assert read_container(shlex.split(command)) is None


def test_a_container_in_the_background_and_on_the_network_of_the_host():
    found = read_container(["docker", "run", "-d", "--network", "host", "-e", "VLLM_API_KEY=k", "img", "vllm"])
    assert (found.detached, found.host_network, found.variables) == (True, True, (("VLLM_API_KEY", "k"),))
    assert not read_container(["docker", "run", "-it", "img", "vllm"]).detached
