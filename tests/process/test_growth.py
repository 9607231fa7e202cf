"""Folders that grow: which they are, and what is in them; a part is never taken for the whole."""

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from seen import launch, target, until

from hangguard.facts import NOT_ASKED, Ask, Growth, Unseen
from hangguard.observe import growth as growth_module
from hangguard.observe.folders import cache_folders, download_folders
from hangguard.observe.growth import GrowthProbe
from hangguard.observe.rights import Rights

pytestmark = pytest.mark.anyio

GROWTH = Ask(growth=True)
MIB = 1 << 20


def launched(*argv, cwd="/w", **env):
    return replace(launch(), argv=("vllm", "serve", *argv), env=tuple(sorted(env.items())), cwd=cwd)


def paths(folders):
    return [folder.path for folder in folders]


def test_downloads_go_where_the_launchs_own_environment_says():
    def where(*argv, **env):
        return paths(download_folders(launched(*argv, **env), home="/home/u"))

    assert where() == ["/home/u/.cache/huggingface/hub", "/home/u/.cache/modelscope"]
    assert where(HOME="/h")[0] == "/h/.cache/huggingface/hub"
    assert where(XDG_CACHE_HOME="/x") == ["/x/huggingface/hub", "/x/modelscope"]
    assert where(HF_HOME="~/hf")[0] == "/home/u/hf/hub"
    assert where(HF_HOME="/hf", HF_HUB_CACHE="/hub")[0] == "/hub"
    assert where(HUGGINGFACE_HUB_CACHE="/old")[0] == "/old"
    assert where(MODELSCOPE_CACHE="/ms")[1] == "/ms"
    assert where("--download-dir", "models")[0] == "/w/models"
    assert where("--download-dir=/d")[0] == "/d"


def test_of_a_hub_only_the_models_that_the_command_names_are_meant():
    folders = download_folders(launched("org/model", "--draft=a/b-1", "/local/path", "./x/y"), home="/h")
    assert folders[0].only == ("models--a--b-1", "models--org--model")
    assert folders[1].only == ()


def test_caches_lie_where_the_launchs_own_environment_says():
    def where(**env):
        return paths(cache_folders(launched(**env), home="/h", user="me", temp="/tmp"))

    plain = where()
    assert plain == [
        "/tmp/torchinductor_me", "/h/.cache/torch_extensions", "/h/.triton/cache", "/h/.cache/flashinfer",
        "/h/.deep_gemm", "/h/.cache/deep_gemm", "/h/.cache/sglang", "/h/.cache/tvm-ffi", "/h/.cache/vllm",
        "/h/.nv/ComputeCache",
    ]  # fmt: skip
    assert where(TMPDIR="/scratch", USER="a/b")[0] == "/scratch/torchinductor_a_b"
    assert where(TORCHINDUCTOR_CACHE_DIR="/i", TRITON_CACHE_DIR="/t")[:3] == ["/i", "/h/.cache/torch_extensions", "/t"]
    assert "/v" in where(VLLM_CACHE_ROOT="/v")


def test_a_folder_inside_another_is_not_counted_twice():
    folders = cache_folders(
        launched(TORCHINDUCTOR_CACHE_DIR="/c/vllm/x", VLLM_CACHE_ROOT="/c/vllm", TRITON_CACHE_DIR="/c/vllm/"),
        home="/h", user="u", temp="/t",
    )  # fmt: skip
    assert [path for path in paths(folders) if path.startswith("/c")] == ["/c/vllm"]


class Probing:
    def __init__(self, tmp_path, *argv, rights=None, within=5.0, **more):
        self.home = tmp_path / "home"
        self.hub = self.home / ".cache" / "huggingface" / "hub"
        self.triton = self.home / ".triton" / "cache"
        self.hub.mkdir(parents=True, exist_ok=True)
        self.jumped = 0.0
        given = launched(*argv, cwd=str(tmp_path), HOME=str(self.home), TMPDIR=str(tmp_path / "temp"), USER="u")
        clock = lambda: time.monotonic() + self.jumped  # noqa: E731
        self.probe = GrowthProbe(target(given=given, clock=clock, rights=rights, probe_within=within), **more)

    async def look(self, after=10.0):
        self.jumped += after
        return await self.probe.look(GROWTH)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.probe.aclose()


def blob(hub, name="models--org--model", file="abc.incomplete", size=MIB):
    path = hub / name / "blobs" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(os.urandom(size))
    return path


def told_by_du(path):
    text = subprocess.run(["du", "-sb", "--apparent-size", path], capture_output=True, text=True, check=True).stdout
    folders = sum(1 for _, names, _ in os.walk(path) for _ in names) + 1
    return int(text.split()[0]), folders


async def test_a_real_download_grows_and_its_end_changes_nothing(tmp_path):
    async with Probing(tmp_path, "org/model") as probing:
        empty = await probing.look()
        assert empty == Growth(download_bytes=0, cache_bytes=None, folders=(str(probing.hub),), at=empty.at)
        path = blob(probing.hub)
        code = f"f = open({str(path)!r}, 'ab', buffering=0)\nfor _ in range(8): f.write(bytes({MIB}))"
        subprocess.run([sys.executable, "-c", code], check=True)
        assert (await probing.look()).download_bytes == 9 * MIB
        done = path.rename(path.with_suffix(""))
        (probing.hub / "models--org--model" / "snapshots").mkdir()
        (probing.hub / "models--org--model" / "snapshots" / "model.safetensors").symlink_to(done)
        assert (await probing.look()).download_bytes == 9 * MIB


async def test_the_sum_is_that_of_du(tmp_path):
    async with Probing(tmp_path) as probing:
        for number in range(20):
            folder = probing.triton / f"{number:02x}" / "deep" / "er"
            folder.mkdir(parents=True)
            (folder / "kernel.cubin").write_bytes(os.urandom(1000 * number))
        size, folders = told_by_du(probing.triton)
        seen = await probing.look()
        plain = sum(path.stat().st_size for path in probing.triton.rglob("*") if path.is_file())
        assert seen.cache_bytes == plain
        assert plain <= size <= plain + folders * 8192
        assert seen.folders == (str(probing.hub), str(probing.triton))


async def test_a_download_that_made_its_file_long_first_still_grows(tmp_path):
    async with Probing(tmp_path) as probing:
        path = probing.hub / "file.incomplete"
        with path.open("wb") as file:
            file.truncate(64 * MIB)
            assert (await probing.look()).download_bytes == 0
            file.seek(32 * MIB)
            file.write(os.urandom(MIB))
            file.flush()
            assert (await probing.look()).download_bytes == MIB


async def test_what_others_download_does_not_count_unless_nothing_of_ours_is_there(tmp_path):
    async with Probing(tmp_path, "org/model") as probing:
        blob(probing.hub, name="models--other--thing")
        assert (await probing.look()).download_bytes == MIB
        blob(probing.hub, size=2 * MIB)
        assert (await probing.look()).download_bytes == 2 * MIB


async def test_links_are_not_followed_out(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "big").write_bytes(bytes(MIB))
    async with Probing(tmp_path) as probing:
        (probing.hub / "out").symlink_to(outside)
        (probing.hub / "loop").symlink_to(probing.hub)
        os.mkfifo(probing.hub / "fifo")
        (probing.hub / "plain").write_bytes(b"12345")
        assert (await probing.look()).download_bytes == 5


async def test_it_is_walked_only_when_asked_and_at_most_every_five_seconds(tmp_path):
    async with Probing(tmp_path) as probing:
        assert await probing.probe.look(Ask()) == NOT_ASKED
        first = await probing.look()
        blob(probing.hub)
        assert await probing.look(after=4) == first
        assert (await probing.look(after=1.1)).download_bytes == MIB


async def test_a_folder_that_is_too_large_is_left_out_and_named(tmp_path):
    async with Probing(tmp_path, entries=50) as probing:
        probing.triton.mkdir(parents=True)
        for number in range(60):
            (probing.triton / str(number)).write_bytes(b"x")
        blob(probing.hub)
        seen = await probing.look()
        assert seen.cache_bytes is None
        assert seen.download_bytes == MIB
        assert seen.left_out == (f"{probing.triton}: more entries than are walked",)


async def test_a_walk_that_takes_too_long_is_left_out_and_named(tmp_path):
    async with Probing(tmp_path, seconds=0.0) as probing:
        blob(probing.hub)
        seen = await probing.look()
        assert seen.download_bytes is None
        assert seen.left_out == (f"{probing.hub}: it could not be walked in time",)


async def test_growth_missing_says_why(tmp_path):
    async with Probing(tmp_path) as probing:
        probing.hub.rmdir()
        assert (await probing.look()).folders == ()
        assert (await probing.look()).left_out == ()
        probing.hub.write_text("a file, where a folder should be")
        assert (await probing.look()).download_bytes is None
        probing.hub.unlink()
        probing.hub.mkdir()
    tmp_path.chmod(0o700)
    async with Probing(tmp_path, rights=Rights(65534, 65534)) as of_a_stranger:
        seen = await of_a_stranger.look()
        assert seen.download_bytes is None
        assert f"{of_a_stranger.hub}: Permission denied" in seen.left_out


async def test_a_disk_that_hangs_hides_the_downloads_and_not_the_caches(tmp_path, monkeypatch):
    gate, real = threading.Event(), os.scandir

    def scandir(path):
        if "hub" in str(path):
            gate.wait(20)
        return real(path)

    async with Probing(tmp_path, within=0.6) as probing:
        probing.triton.mkdir(parents=True)
        (probing.triton / "kernel").write_bytes(b"123")
        monkeypatch.setattr(growth_module.os, "scandir", scandir)
        began = time.monotonic()
        seen = await probing.look()
        assert time.monotonic() - began < 2
        assert (seen.download_bytes, seen.cache_bytes) == (None, 3)
        assert seen.left_out == ("downloads: no answer within 0.3 s",)
        again = await probing.look()
        assert again.left_out[0].startswith("downloads: still busy with an earlier look")
        gate.set()
        await until(lambda: _walked(probing))


async def _walked(probing):
    return (await probing.look()).download_bytes == 0


async def test_without_any_answer_it_is_unseen(tmp_path, monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(growth_module.os, "scandir", lambda _path: gate.wait(20) and iter(()))
    async with Probing(tmp_path, within=0.4) as probing:
        seen = await probing.look()
        assert isinstance(seen, Unseen)
        assert seen.reason == "downloads: no answer within 0.2 s; caches: no answer within 0.2 s"
        gate.set()
