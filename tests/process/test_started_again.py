"""A container that is started again gets the numbers of the last one: of namespace, device and inode. All are real."""

import json
import subprocess
import sys

import pytest
from seen import PROGRAMS

OWN_SHM = 'mount -t tmpfs none /dev/shm && exec "$@"'
CONTAINERS = {
    "with a /dev/shm of its own": ("unshare", "--mount"),
    "with a pid namespace of its own too": ("unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"),
}
MOST_STARTS = 40
"""The kernel gives the numbers of namespaces and devices again within a few; other programs may take one meanwhile."""


def started(container, *words):
    """Start a container that has its own /dev/shm, and return what the program in it said."""
    inside = [*CONTAINERS[container], "sh", "-c", OWN_SHM, "sh"]
    program = [sys.executable, str(PROGRAMS / "shm_user.py"), *map(str, words)]
    done = subprocess.run([*inside, *program], check=True, capture_output=True, text=True, timeout=60)
    return json.loads(done.stdout)


@pytest.mark.parametrize("container", CONTAINERS)
def test_after_a_container_was_started_again_the_file_of_the_same_number_is_left(tmp_path, container):
    left = started(container, "leave", tmp_path / "runs")
    for _ in range(MOST_STARTS):
        now = started(container, "clean", tmp_path / "runs")
        assert now["exists"], now["items"]
        if all(now[name] == left[name] for name in ("device", "inode", "namespace")):
            break
    else:
        pytest.fail("the kernel has given no number again, so that nothing was shown")
    said = " ".join(map(str, now["items"]))
    assert "another pid namespace" in said or "another /dev/shm than the run had" in said


@pytest.mark.parametrize("container", CONTAINERS)
def test_in_the_same_container_the_file_of_the_run_is_removed(tmp_path, container):
    left = started(container, "leave", tmp_path / "runs", "at-once")
    assert not left["exists"], left["items"]
    assert ["file", "/dev/shm/psm_of_the_run", "ours", "gone"] in [item[:4] for item in left["items"]]
