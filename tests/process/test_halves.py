"""One half of a disaggregated SGLang becomes ready without its router, and is asked nothing that it would refuse."""

import json
import sys
from pathlib import Path

import pytest

from hangguard import Limits, supervise

PROGRAM = Path(__file__).with_name("programs") / "half_server.py"


@pytest.mark.parametrize(
    "mode", [["--disaggregation-mode", "prefill"], ["--disaggregation-mode=decode"], ["--disaggregation-mode", "null"]]
)
def test_a_half_becomes_ready_by_the_request_of_its_own_warm_up_and_is_asked_no_other(tmp_path, mode):
    script = tmp_path / "sglang"
    script.write_text(f"#!{sys.executable}\n{PROGRAM.read_text()}")
    script.chmod(0o755)
    command = [str(script), "serve", "--model-path", "m", "--port", "{port}", *mode]
    with supervise(command, run_dir=tmp_path / "run", limits=Limits(ready_within=30, stop_grace=1)) as server:
        assert server.launch.engine == "sglang"
    asked = [json.loads(line) for line in (tmp_path / "asked.jsonl").read_text().splitlines()]
    if "null" in mode:
        assert {one["path"] for one in asked} == {"/v1/completions"}
        assert "bootstrap_room" not in asked[0]
    else:
        assert {(one["path"], one.get("bootstrap_host"), one.get("bootstrap_room")) for one in asked} == {
            ("/generate", "2.2.2.2", 0)
        }
