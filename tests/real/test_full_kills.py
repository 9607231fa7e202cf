"""SIGKILL of each process of the real engines in each phase of a start: told as what it was, and nothing is left.

Serving stands in test_full_vllm.py (V10 to V13) and test_full_sglang.py (S2 and S3). A phase that is over in a moment
is made longer by an injected wait in it, which is real work to whoever looks: it only sleeps.
"""

import psutil
import pytest
from real_engines import sglang_command, sglang_environment, vllm_command, vllm_environment
from real_watch import title_of, watched

from hangguard.facts import Tree

pytestmark = [pytest.mark.full, pytest.mark.anyio, pytest.mark.timeout(1500, func_only=True)]

TRACKER = "multiprocessing.resource_tracker"
SPAWNED = "multiprocessing.spawn"
"""What a child says until it has given itself its title."""
SLOW = {"HG_SECONDS": "30"}
KILLED = "ended by signal 9"


@pytest.fixture
def anyio_backend():
    return "asyncio"


# --------------------------------------------------------------------------------------------------- vLLM

VLLM_PHASES = {
    "import": (("--enforce-eager",), "init-slow"),
    "weights-load": (("--enforce-eager",), "load-slow"),
    "jit-compile": ((), None),  # the real compile: half a minute, with caches of its own
}


@pytest.fixture
def vllm(vllm_env, tiny_llama, tmp_path):
    """Start the real vLLM in a way that it can be met in this phase; a hang is acted on."""

    def start(phase="import"):
        options, fault = VLLM_PHASES[phase]
        env = vllm_environment(cache_dir=tmp_path / "cache", fault=fault, fault_env=SLOW)
        command = vllm_command(vllm_env, tiny_llama, "{port}", *options)
        return watched(command, env=env, folder=tmp_path, on_hang="act")

    return start


def vllm_member(watch, role):
    """Return the process of that role by its place in the tree, ``None`` while there is none."""
    cores = children(watch.pid, "VLLM::EngineCore", SPAWNED)
    workers = children(cores[0].pid, "VLLM::Worker", SPAWNED) if cores else []
    if not workers:
        return None  # no sooner: those that have no child yet leave nobody
    return {"API server": psutil.Process(watch.pid), "EngineCore": cores[0], "Worker": workers[0]}[role]


@pytest.mark.parametrize("phase", VLLM_PHASES)
async def test_v16_the_front_end_killed_while_it_starts_leaves_orphans_that_are_ended(vllm, table, phase):
    async with vllm(phase) as watch:
        await in_phase(watch, phase)
        victim = await until_seen(watch, lambda: vllm_member(watch, "API server"))
        watch.kill(victim)
        ended = await watch.until_over()
    assert (ended.verdict, ended.kind, ended.exit_code, ended.phase) == ("exited", "signal", -9, phase), ended
    table.add(f"V16 API server, {phase}", f"SIGKILL of the API server in {phase}", watch, ended)


@pytest.mark.parametrize("phase", VLLM_PHASES)
@pytest.mark.parametrize("role", ["EngineCore", "Worker"])
async def test_v16_a_member_killed_while_it_starts_is_named(vllm, table, phase, role):
    async with vllm(phase) as watch:
        await in_phase(watch, phase)
        victim = await until_seen(watch, lambda: vllm_member(watch, role))
        watch.kill(victim)
        ended = await watch.until_over()
    assert (ended.verdict, ended.kind, ended.exit_code) == ("exited", "crash", 1), ended
    assert ended.phase == phase, ended
    assert f"(pid {victim.pid}) {KILLED}" in ended.why, ended
    table.add(f"V16 {role}, {phase}", f"SIGKILL of {role} in {phase}", watch, ended)


async def test_v16_the_resource_tracker_killed_is_missed_by_nobody(vllm, table):
    """Killed in each phase, as often as there is one: Python starts it anew. The server serves, and goes wholly."""
    async with vllm() as watch:
        await killing_trackers(watch)
    table.add("V16 resource tracker", "SIGKILL of the resource tracker, in every phase", watch, None, healthy="ready")


# ------------------------------------------------------------------------------------------------- SGLang

SGLANG_PHASES = {"import": None, "weights-load": "load-slow", "graph-capture": "graph-slow"}
SGLANG_ROLES = ("scheduler", "detokenizer")


@pytest.fixture
def sglang(sglang_env, tiny_gpt2, tmp_path):
    """Start the real SGLang in a way that it can be met in this phase; a hang is acted on."""

    def start(phase="import"):
        env = sglang_environment(cache_dir=tmp_path / "cache", fault=SGLANG_PHASES[phase], fault_env=SLOW)
        return watched(sglang_command(sglang_env, tiny_gpt2, "{port}"), env=env, folder=tmp_path, on_hang="act")

    return start


def sglang_member(watch, role):
    """Return the process of that role, ``None`` while there is none: the scheduler is started first."""
    titled = [f"sglang::{name}" for name in SGLANG_ROLES]
    found = sorted(children(watch.pid, *titled, SPAWNED), key=lambda child: child.create_time())
    if role == "main process":
        return psutil.Process(watch.pid) if found else None
    return found[SGLANG_ROLES.index(role)] if len(found) == len(titled) else None


@pytest.mark.parametrize("phase", SGLANG_PHASES)
async def test_s7_the_main_process_killed_while_it_starts(sglang, table, phase):
    async with sglang(phase) as watch:
        await in_phase(watch, phase)
        victim = await until_seen(watch, lambda: sglang_member(watch, "main process"))
        watch.kill(victim)
        ended = await watch.until_over()
    assert (ended.verdict, ended.kind, ended.exit_code, ended.phase) == ("exited", "signal", -9, phase)
    table.add(f"S7 main process, {phase}", f"SIGKILL of the main process in {phase}", watch, ended)


@pytest.mark.parametrize("phase", [*SGLANG_PHASES, "serving"])
@pytest.mark.parametrize("role", SGLANG_ROLES)
async def test_s7_a_member_killed_is_named(sglang, table, phase, role):
    if (role, phase) == ("scheduler", "serving"):
        return  # S3
    async with sglang("import" if phase == "serving" else phase) as watch:
        await in_phase(watch, phase)
        victim = await until_seen(watch, lambda: sglang_member(watch, role))
        watch.kill(victim)
        ended = await watch.until_over()
    # While it starts, the main process waits for the scheduler only: it finds another one dead when it serves.
    untold = (role, phase) == ("detokenizer", "import")  # no title yet: a helper, as far as anybody can see
    assert ended.phase == phase or (untold and ended.phase == "warm-up"), ended
    assert f"{victim.pid}" in ended.why, ended
    table.add(f"S7 {role}, {phase}", f"SIGKILL of the {role} in {phase}", watch, ended)


async def test_s7_the_resource_tracker_killed_is_missed_by_nobody(sglang, table):
    async with sglang() as watch:
        await killing_trackers(watch)
    table.add("S7 resource tracker", "SIGKILL of the resource tracker, in every phase", watch, None, healthy="ready")


# -------------------------------------------------------------------------------------------------- below


def children(pid, *titles):
    """Return the children of that process with one of these words in their command line."""
    try:
        found = psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []
    return [child for child in found if any(title in title_of(child) for title in titles)]


async def in_phase(watch, phase):
    """Wait until it is there; the first phase is that of every start, and is not told."""
    if phase == "serving":
        await watch.until_ready()
    elif phase != "import":
        await watch.until_phase(phase)


async def until_seen(watch, find):
    """Return the process once it is there, and hangguard has seen it: it can tell of no other."""

    def seen():
        process = find()
        now = watch.made.now
        tree = now.samples[-1].tree if now is not None and now.samples else None
        is_seen = isinstance(tree, Tree) and process is not None and process.pid in {m.pid for m in tree.members}
        return process if is_seen else None

    return await watch.until(seen, "the member, seen")


async def killing_trackers(watch):
    """Kill every resource tracker of the server until it is ready, and once more then; it goes on all the same."""
    killed = set()

    def kill():
        for process in watch.members():
            if TRACKER in title_of(process):
                killed.add(process.pid)
                watch.kill(process)
        return watch.of("ready")

    await watch.until(kill, "ready")
    kill()
    assert killed
    watch.ask(4)
    await watch.until(lambda: watch.answers, "an answer")
    assert watch.answers == [200]
    assert not {"stuck", "broken", "exited"} & set(watch.names()), watch.names()
