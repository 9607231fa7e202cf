"""Launches as people write them, with the real engines: their own reader of config files, and what they answer."""

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from real_engines import vllm_command, vllm_environment

from hangguard import Limits, read_command, supervise
from hangguard.engines import VLLM

CONFIG = """
model: M
port: 6379
host: "::1"
served_model_name: [short, long]
tensor-parallel-size: 2
seed: 1.5
enforce-eager: true
disable-log-stats: false
compilation-config:
  pass_config: {fuse: true}
lora-modules: []
"""

READERS = {
    "vllm": (
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "read = FlexibleArgumentParser().load_config_file(sys.argv[1])"
    ),
    "sglang": (
        "import yaml\nfrom sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger as M\n"
        "read = M(boolean_actions=['enforce_eager', 'disable_log_stats'])"
        "._convert_config_to_args(yaml.safe_load(open(sys.argv[1])))"
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_a_config_file_is_read_as_the_engine_reads_it(name, tmp_path, request):
    env = request.getfixturevalue(f"{name}_env")
    file = tmp_path / "c.yaml"
    file.write_text(CONFIG)
    program = f"import json, sys\n{READERS[name]}\nprint('READ', json.dumps(read))"
    done = subprocess.run(
        [str(env / "bin" / "python"), "-c", program, str(file)], capture_output=True, text=True, timeout=300, check=True
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("READ ")]
    launch, _ = read_command([str(env / "bin" / name), "serve", "--config", str(file)], env={"PATH": "/usr/bin:/bin"})
    assert list(launch.file_args) == json.loads(line.removeprefix("READ "))


@pytest.mark.parametrize(
    ("more", "asked"),
    [(["--convert", "embed"], ["completions 404", "embeddings 200"]), (["--skip-tokenizer-init"], ["completions 200"])],
    ids=["embed", "token-ids"],
)
def test_what_vllm_answers_over_a_unix_socket(vllm_env, tiny_llama, tmp_path, more, asked):
    path = tmp_path / "s"
    config = tmp_path / "c.yaml"
    config.write_text(f"uds: {path}\nenforce-eager: true\n")
    command = [*vllm_command(vllm_env, tiny_llama, 1, *more), "--config", str(config)]
    made = supervise(
        command,
        engine=replace(VLLM, task=None),  # the flags tell nothing: it has to be asked
        env=vllm_environment(cache_dir=tmp_path / "cache"),
        run_dir=tmp_path / "runs",
        limits=Limits(ready_within=350),
    )
    with made as server:
        assert server.launch.socket_path == str(path)
        assert server.launch.task == "generate"
    log = Path(server.attempt.log_path).read_text(errors="replace")
    answers = re.findall(r'"POST /v1/(\w+) HTTP/1.1" (\d+)', log)
    assert [f"{route} {status}" for route, status in answers] == asked
