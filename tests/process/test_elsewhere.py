"""Build locks, rendezvous files and pools of host memory that a launch leaves outside /dev/shm, and those of others."""

import os
import secrets
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from seen import target, until, until_sync
from test_files import SERVES, answers, file_id, goes_on, holding, killed_guardian, program, said
from test_guardian import keep, serve  # noqa: F401 - fixtures
from test_locks import member

from hangguard import elsewhere as names
from hangguard import supervise
from hangguard.act import _lease
from hangguard.facts import Ask, HeldFiles, Launch, Tree
from hangguard.observe import Shared, held_files
from hangguard.observe.held_files import HeldFilesProbe
from hangguard.observe.left_elsewhere import Appeared, look_elsewhere, look_what_appeared
from hangguard.report.releases import file_notes

pytestmark = pytest.mark.anyio


GUARDIANS = pytest.mark.parametrize(("anyio_backend", "guardian"), [("asyncio", "lives"), ("trio", "is dead")])
ON_TRIO = pytest.mark.parametrize("anyio_backend", ["trio"])


class Place:
    """A home and a temp folder of a launch."""

    def __init__(self, folder: Path) -> None:
        self.home, self.temp = folder / "home", folder / "temp"
        self.temp.mkdir()
        self.env = {**os.environ, "HOME": str(self.home), "TMPDIR": str(self.temp)}
        for name in ("TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME", "FLASHINFER_WORKSPACE_BASE"):
            self.env.pop(name, None)

    def lock(self, extension="my_kernels", *, below=".cache/torch_extensions/py311_cu130"):
        folder = self.home / below / extension
        folder.mkdir(parents=True, exist_ok=True)
        return folder / "lock"

    def rendezvous(self):
        return self.temp / f"vllm_dist_{secrets.token_hex(16)}"

    def pool(self):
        return self.temp / f"sglang_host_pool_{secrets.token_hex(16)}.mmap"

    def launch(self, *argv):
        return Launch(
            argv=argv or ("x",), env=tuple(sorted(self.env.items())), cwd=str(self.home.parent),
            url="http://127.0.0.1:1", host="127.0.0.1", port=1,
        )  # fmt: skip

    async def look(self, *argv):
        return await look_elsewhere(self.launch(*argv))


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


@pytest.fixture
def litter():
    """Shared memory that the test removes at its end, whatever happens."""
    paths = []
    yield paths
    for path in map(Path, paths):
        path.unlink(missing_ok=True)


async def seen_of(pid, elsewhere):
    """What the members have: ``pid`` and its children."""
    pids = [pid, *(child.pid for child in psutil.Process(pid).children())]
    probe = HeldFilesProbe(target(elsewhere=elsewhere), Shared(tasks=None))
    probe._shared.tree = Tree(members=tuple(member(one) for one in pids))
    try:
        return await probe.look(Ask(files=True))
    finally:
        await probe.aclose()


def kinds(files):
    return {Path(file.path): (file.kind, file.held) for file in files}


# ------------------------------------------------------------------------------------------------ build locks


@GUARDIANS
async def test_the_lock_of_a_build_that_is_killed_with_the_launch_goes(serve, tmp_path, place, guardian):  # noqa: F811
    lock, elsewhere = place.lock(), await place.look()
    async with serve(argv=program(tmp_path, f"baton={lock}"), elsewhere=elsewhere) as server:
        said(tmp_path)
        if guardian == "is dead":
            await killed_guardian(server)
        stopped = await server.stop(grace=0.2)
    assert stopped.by == ("guardian" if guardian == "lives" else "supervisor")
    assert answers(stopped.files) == {lock: "removed"}
    assert stopped.files_unseen == ()
    assert not lock.exists()
    assert lock.parent.is_dir()


@GUARDIANS
async def test_the_lock_of_a_builder_that_was_killed_before_the_stop_goes_where_it_was_seen(
    serve,  # noqa: F811
    tmp_path,
    place,
    guardian,
):
    lock, elsewhere = place.lock(), await place.look()
    async with serve(argv=program(tmp_path, f"baton={lock}"), elsewhere=elsewhere) as server:
        said(tmp_path)
        seen = await seen_of(server.pid, elsewhere)
        assert kinds(seen.files) == {lock: ("lock", "open")}
        server.remember_files(seen.files)
        if guardian == "is dead":
            await killed_guardian(server)
        os.kill(server.pid, signal.SIGKILL)
        await server.wait_exit()
        assert lock.exists()
        stopped = await server.stop(grace=0.2)
    assert answers(stopped.files) == {lock: "removed"}
    assert not lock.exists()


@GUARDIANS
async def test_locks_of_others_survive_beside_one_of_ours(serve, tmp_path, place, guardian):  # noqa: F811
    """By place, by age, by kind, by name, by what was written into it; and one that nobody of ours ever had."""
    ours, before, kernels, free = map(place.lock, ("ours", "before", "kernels", "free"))
    elsewhere_, other = place.lock(below=".cache/other"), place.lock("other").with_name("other.lock")
    written, strangers = place.lock("written"), place.lock("strangers")
    for path in (before, other):
        path.touch()
    elsewhere = await place.look()
    for path in (strangers, other):
        path.touch()
    written.write_bytes(b"pid 7")
    words = (f"baton={ours}", f"reads={before}", f"flock={kernels}", f"unlocked={free}")
    async with serve(argv=program(tmp_path, *words), elsewhere=elsewhere) as server:
        said(tmp_path)
        server.remember_files((await seen_of(server.pid, elsewhere)).files)
        if guardian == "is dead":
            await killed_guardian(server)
        stopped = await server.stop(grace=0.2)
    assert answers(stopped.files) == {ours: "removed"}
    async with serve(
        argv=program(tmp_path, f"baton={elsewhere_}"), elsewhere=elsewhere, **place_of(tmp_path)
    ) as server:
        await until(elsewhere_.exists)
        stopped = await server.stop(grace=0.2)
    async with serve(argv=program(tmp_path, f"reads={written}"), elsewhere=elsewhere, **place_of(tmp_path)) as server:
        await until(lambda: str(written) in opened_by(server.pid))
        assert (await server.stop(grace=0.2)).files == ()
    assert stopped.files == ()
    survive = (before, kernels, free, elsewhere_, other, written, strangers)
    assert [path for path in survive if not path.exists()] == []
    listed = await look_what_appeared(elsewhere)
    assert set(map(Path, listed.paths)) == {kernels, free, written, strangers}


def place_of(folder):
    """Another run: a log and a lock of its own."""
    number = secrets.token_hex(4)
    return {"log_path": str(folder / f"{number}.log"), "lock_path": str(folder / f"{number}.lock")}


def opened_by(pid):
    links = [f"/proc/{pid}/fd/{number}" for number in os.listdir(f"/proc/{pid}/fd")]
    return {os.readlink(link) for link in links if os.path.lexists(link)}


@ON_TRIO
async def test_a_lock_of_ours_that_somebody_has_open_survives_and_so_does_one_with_two_names(
    serve,  # noqa: F811
    tmp_path,
    place,
):
    busy, twice = place.lock("busy"), place.lock("twice")
    elsewhere = await place.look()
    async with serve(argv=program(tmp_path, f"baton={busy}"), elsewhere=elsewhere) as server:
        said(tmp_path)
        with holding(busy, "fd = os.open(path, os.O_RDONLY); kept = b'xxx'") as bystander:
            stopped = await server.stop(grace=0.2)
            assert goes_on(bystander)
    async with serve(argv=program(tmp_path, f"baton={twice}"), elsewhere=elsewhere, **place_of(tmp_path)) as server:
        await until(twice.exists)
        server.remember_files((await seen_of(server.pid, elsewhere)).files)
        os.link(twice, twice.with_name("kept"))
        again = await server.stop(grace=0.2)
    assert answers((*stopped.files, *again.files)) == {busy: "busy", twice: "refused"}
    assert busy.exists()
    assert twice.exists()


@ON_TRIO
async def test_a_lock_that_took_the_place_of_ours_survives_even_with_its_inode(serve, tmp_path, place):  # noqa: F811
    """A disk gives the inode of a file that is gone to the next one, so the time tells them apart."""
    lock, elsewhere = place.lock(), await place.look()
    async with serve(argv=program(tmp_path, f"baton={lock}"), elsewhere=elsewhere) as server:
        said(tmp_path)
        (file,) = (await seen_of(server.pid, elsewhere)).files
        plain = {"path": file.path, "device": file.device, "inode": file.inode, "kind": "lock", "held": "open"}
        plain |= {"pid": file.pid, "started": file.started, "made_ns": file.made_ns}
        await server.stop(grace=0.2)
    for _ in range(50):
        lock.touch()
        if file_id(lock) == (file.device, file.inode):
            break
        lock.unlink()
    lock.touch()  # other programs make files too: then it is another number, and all that is meant is told below
    os.utime(lock, ns=(1, file.made_ns + 1))
    device, inode = file_id(lock)
    (answer,) = _lease.Clearing([{**plain, "device": device, "inode": inode}]).run()
    assert answer["answer"] == "gone"
    assert lock.exists()
    os.utime(lock, ns=(1, file.made_ns))
    (answer,) = _lease.Clearing([{**plain, "device": device, "inode": inode}]).run()
    assert answer["answer"] == "removed"


GUARDS = """
import os, sys, anyio
from hangguard.act.spawn import guarded
from hangguard.facts import Launch
from hangguard.observe.left_elsewhere import note

async def main(folder, *argv):
    env = dict(os.environ)
    launch = Launch(argv=argv, env=tuple(env.items()), cwd=folder, url="http://x", host="x", port=1)
    async with guarded(
        argv=argv, env=env, cwd=folder, log_path=f"{folder}/log", lock_path=f"{folder}/run.lock",
        death_grace=0.5, on_death="stop", pristine=False, elsewhere=note(launch),
    ):
        await anyio.sleep_forever()

anyio.run(main, *sys.argv[1:])
"""


def test_a_lock_goes_when_the_supervising_program_is_killed(tmp_path):
    place = Place(tmp_path)
    lock, bystander = place.lock(), place.lock("before")
    bystander.touch()
    command = [sys.executable, "-c", GUARDS, str(tmp_path), *program(tmp_path, f"baton={lock}")]
    with subprocess.Popen(command, env=place.env) as user:
        try:
            until_sync((tmp_path / "made").exists, within=60.0)
            assert lock.exists()
        finally:
            user.kill()
    until_sync(lambda: not lock.exists(), within=10.0)
    assert bystander.exists()


# ---------------------------------------------------------------------------------------- rendezvous and pools


@GUARDIANS
async def test_rendezvous_files_and_pools_of_ours_go_and_those_that_nobody_was_seen_to_have_survive(
    serve,  # noqa: F811
    tmp_path,
    place,
    litter,
    guardian,
):
    given, before = place.rendezvous(), place.rendezvous()
    before.write_bytes(b"rank 0")
    place.env["INIT"] = f"file://{given}"
    elsewhere = await place.look("serve", "--x")
    ours = {kind: place.rendezvous() for kind in ("operation", "inherited", "named")} | {"pool": place.pool()}
    others = {"store": place.rendezvous()}
    strangers = (place.rendezvous(), place.pool())
    for path in strangers:
        path.write_bytes(b"somebody's")
    chosen = place.temp / "rendezvous"  # by a person, and told to whoever shall come there
    words = [f"{kind}={path}" for kind, path in (ours | others).items()]
    async with serve(argv=program(tmp_path, *words), elsewhere=elsewhere) as server:
        made = said(tmp_path)
        litter.append(made["memory"])
        seen = await seen_of(server.pid, elsewhere)
        has = {path: kind for path, kind in kinds(seen.files).items() if path != made["memory"]}
        assert has == {
            ours["operation"]: ("rendezvous", "open"), ours["inherited"]: ("rendezvous", "named"),
            ours["named"]: ("rendezvous", "named"), ours["pool"]: ("pool", "shared"),
        }  # fmt: skip
        if guardian == "is dead":
            await killed_guardian(server)
        stopped = await server.stop(grace=0.2)
    assert answers(stopped.files) == dict.fromkeys((*ours.values(), made["memory"]), "removed")
    assert not any(path.exists() for path in ours.values())
    words = [f"operation={given}", f"reads={before}", f"unlocked={chosen}"]
    async with serve(argv=program(tmp_path, *words), elsewhere=elsewhere, **place_of(tmp_path)) as server:
        await until(chosen.exists)
        assert (await seen_of(server.pid, elsewhere)).files == ()
        assert (await server.stop(grace=0.2)).files == ()
    survive = (others["store"], *strangers, given, before, chosen)
    assert [path for path in survive if not path.exists()] == []
    listed = await look_what_appeared(elsewhere)
    assert set(map(Path, listed.paths)) == {others["store"], *strangers, given}
    assert listed.unseen == ()


@ON_TRIO
async def test_a_rendezvous_that_somebody_has_open_survives(serve, tmp_path, place):  # noqa: F811
    path, elsewhere = place.rendezvous(), await place.look()
    async with serve(argv=program(tmp_path, f"inherited={path}"), elsewhere=elsewhere) as server:
        said(tmp_path)
        with holding(path, "fd = os.open(path, os.O_RDONLY); kept = b'xxx'") as bystander:
            stopped = await server.stop(grace=0.2)
            assert goes_on(bystander)
    assert answers(stopped.files) == {path: "busy"}
    assert path.exists()


# ------------------------------------------------------------------------------------------------ the whole of it


async def test_a_supervised_server_leaves_no_lock_and_lists_what_it_cannot_prove(tmp_path, place):
    lock, alone = place.lock(), place.rendezvous()
    words = program(tmp_path, f"baton={lock}", "inherited", f"store={alone}")
    argv = [sys.executable, "-c", SERVES.format(program=words), "{port}"]
    async with supervise(argv, url="http://127.0.0.1:{port}", run_dir=tmp_path / "runs", env=place.env) as server:
        named = said(tmp_path)["inherited"]
        stranger = place.lock("strangers")
        stranger.touch()
    release = server.attempt.release
    assert answers(release.files) == {lock: "removed", named: "removed"}
    assert set(release.unattributed_files) >= {str(alone), str(stranger)}
    assert not {str(lock), str(named)} & set(release.unattributed_files)
    assert [path.exists() for path in (lock, named, alone, stranger)] == [False, False, True, True]
    assert release.unattributed_unseen == ()
    note = next(note for note in file_notes(release) if "perhaps somebody else's" in note)
    assert f"{alone}" in note
    assert "rm -- " in note


@ON_TRIO
async def test_a_crowded_temp_folder_is_not_read_to_its_end_and_that_is_said(place, monkeypatch):
    monkeypatch.setattr("hangguard.observe.left_elsewhere.MOST_NAMES", 20)
    elsewhere = await place.look()
    assert elsewhere.unseen == ()
    for _ in range(30):
        place.rendezvous().touch()
    listed = await look_what_appeared(elsewhere)
    assert len(listed.paths) == 20
    assert "holds more than 20 names" in listed.unseen[0]
    crowded = await place.look()
    assert await look_what_appeared(crowded) == Appeared(unseen=crowded.unseen)


@ON_TRIO
async def test_where_the_folders_cannot_be_looked_at_nothing_there_is_ours_and_that_is_said(place, monkeypatch):
    def broken(_launch):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("hangguard.observe.left_elsewhere.note", broken)
        elsewhere = await place.look()
    assert elsewhere.kind_of(str(place.lock())) == ""
    assert elsewhere.kind_of(str(place.rendezvous())) == ""
    assert (await look_what_appeared(elsewhere)).unseen == ("what lay there before the launch: Input/output error",)
    monkeypatch.setattr("hangguard.held.file_system_of", lambda *_: "nfs4")
    assert (await place.look()).builds == ()


async def test_a_build_is_looked_at_while_its_compilers_run(place, tmp_path, monkeypatch):
    """A lock is there only while it is built, and nothing else says that it is worth a look."""
    monkeypatch.setattr(held_files, "_named_sockets", list)  # anybody's new socket is worth one too
    lock, elsewhere = place.lock(), await place.look()
    builder = subprocess.Popen(program(tmp_path, f"baton={lock}"))
    probe = HeldFilesProbe(target(elsewhere=elsewhere), Shared(tasks=None), folder=str(tmp_path / "none"))
    try:
        said(tmp_path)
        probe._shared.tree = Tree(members=())
        await probe.look(Ask(files=True))
        probe._looked_at = 0.0
        one = member(builder.pid)
        probe._shared.tree = Tree(members=(one,))
        assert not isinstance(await probe.look(Ask()), HeldFiles)
        probe._shared.tree = Tree(members=(one, replace(one, pid=1, name="ninja")))
        assert kinds((await probe.look(Ask())).files) == {lock: ("lock", "open")}
        probe._looked_at -= 5.0
        assert not isinstance(await probe.look(Ask()), HeldFiles)
        probe._looked_at -= 10.0
        assert isinstance(await probe.look(Ask()), HeldFiles)
    finally:
        builder.kill()
        builder.wait()
        await probe.aclose()


def test_what_is_told_to_the_guardian_arrives_as_it_is():
    odd = os.fsdecode(b"/t\xff")
    told = names.Elsewhere(builds=(odd,), temp=odd, since_ns=7, locks=[(1, 2, 3)], names={"vllm_dist_" + "0" * 32})
    heard = names.received(told.carried())
    assert (heard.builds, heard.temp, heard.since_ns, heard.locks) == ((odd,), odd, 7, {(1, 2, 3)})
    assert heard.names == told.names
    assert heard.kind_of(f"{odd}/a/b/lock") == "lock"
    others = ("a/b/c/d/e/f/lock", "a/x.lock", "vllm_dist_" + "0" * 32, "vllm_dist_" + "0" * 31)
    assert {heard.kind_of(f"{odd}/{name}") for name in others} == {""}
    assert heard.kind_of(f"{odd}/vllm_dist_" + "1" * 32) == "rendezvous"
    assert heard.kind_of(f"{odd}/below/vllm_dist_" + "1" * 32) == ""
