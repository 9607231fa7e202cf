"""hangguard is installed beside an engine: that may add packages, and must not move one."""

import json
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def test_installing_into_the_environment_of_vllm_moves_no_other_package(vllm_env):
    """What pip would install there is hangguard and packages that were not there at all."""
    pip = [str(vllm_env / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    listed = subprocess.run([*pip, "list", "--format=json"], check=True, capture_output=True, text=True, timeout=120)
    present = {canonical(package["name"]): package["version"] for package in json.loads(listed.stdout)}
    plan = subprocess.run(
        [*pip, "install", "--dry-run", "--quiet", "--report", "-", f"{ROOT}[all]"],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    planned = {
        canonical(item["metadata"]["name"]): item["metadata"]["version"] for item in json.loads(plan.stdout)["install"]
    }
    assert planned.pop("hangguard", None) is not None
    moved = {name: (present[name], version) for name, version in planned.items() if name in present}
    assert moved == {}
