"""Each thing that may be refused, alone and all together: no false "stuck", no end that is claimed and not proved."""

import json

import pytest
from lockdown import ALL, ALL_BUT_SHM, HIDDEN, LOCKS, PROGRAMS, run_locked, told_of

pytestmark = pytest.mark.timeout(300)

HANGS = {
    "engine": "sglang",
    "server": {"deadlock_at_capture": True},
    "limits": {"patience": 5.0, "unclear": 10.0, "stop_grace": 1.0},
}
SLOW = {"server": {"jit_seconds": 9.0}, "limits": {"patience": 5.0}}
"""Silent for longer than the patience, while it compiles."""

EACH = [(["hidden-pids", "no-ptrace"], "trio"), ([], "trio"), (ALL_BUT_SHM, "trio"), (ALL, "trio"), (ALL, "asyncio")]


@pytest.mark.parametrize(("locks", "backend"), [*(([lock], "asyncio") for lock in LOCKS), *EACH])
def test_a_server_answers_a_hang_is_found_and_a_slow_start_is_none(tmp_path, locks, backend):
    cases = ({"name": "healthy"}, {"name": "hangs", **HANGS}, {"name": "slow", **SLOW})
    told = told_of(tmp_path, locks, *cases, backend=backend)
    for name in ("healthy", "slow"):
        assert told[name]["answer"]
        assert told[name]["raised"] is None
        assert not told[name]["classes"] & {"stuck", "broken", "expired"}
    hung = told["hangs"]
    assert hung["raised"]["type"] == "GaveUp"
    assert (hung["verdict"]["verdict"], hung["verdict"]["kind"]) == ("stuck", "idle")
    has_log = "read-only-root" not in locks
    assert (hung["log_path"] is not None) == has_log
    assert any(line.startswith("log: ") for line in hung["verdict"]["unseen"]) == (not has_log)
    assert all(one["release"]["answer"] == "released" for one in told.values())


def test_a_hang_of_members_that_proc_hides_is_unclear_and_names_them_and_a_slow_start_goes_on(tmp_path):
    hidden_hang = {**HANGS, **HIDDEN, "server": {**HANGS["server"], **HIDDEN["server"]}}
    hidden_slow = {**SLOW, **HIDDEN, "server": {**SLOW["server"], **HIDDEN["server"]}}
    told = told_of(tmp_path, ["hidden-pids"], {"name": "hangs", **hidden_hang}, {"name": "slow", **hidden_slow})
    hung, slow = told["hangs"], told["slow"]
    assert (hung["verdict"]["verdict"], hung["verdict"]["kind"]) == ("expired", "unclear")
    assert "/proc hides members" in hung["verdict"]["why"]
    assert "stuck" not in hung["classes"] | slow["classes"]
    assert "a crash of a member" not in hung["raised"]["text"]  # which of them live was not seen
    assert slow["answer"]


def test_where_no_member_may_be_looked_into_a_hang_is_unclear_and_says_what_it_would_take(tmp_path):
    """As under Yama's scope 3, and worse: no memory, no descriptors, no maps, no bytes; only what everybody may see."""
    hang = {**HANGS, **HIDDEN, "server": {**HANGS["server"], **HIDDEN["server"]}}
    slow = {**SLOW, **HIDDEN, "server": {**SLOW["server"], **HIDDEN["server"]}}
    told = told_of(tmp_path, [], {"name": "hangs", **hang}, {"name": "slow", **slow})
    hung = told["hangs"]["verdict"]
    assert (hung["verdict"], hung["kind"]) == ("expired", "unclear")
    assert "cannot be seen" in hung["why"]
    assert any(line.startswith("stacks: ") for line in hung["unseen"])
    assert "stuck" not in told["hangs"]["classes"] | told["slow"]["classes"]
    assert told["slow"]["answer"]
    for one in told.values():
        assert one["release"]["items"]["processes"][0] == "released"
        answer, detail = one["release"]["items"]["files"]  # the bystander's are new, and nobody saw whose they are
        assert (answer, "Permission denied" in detail) == ("unknown", True)


def test_without_the_guardian_and_everything_refused_the_supervisor_ends_the_server(tmp_path):
    told = told_of(tmp_path, ALL, {"name": "it", "kill_guardian": True})["it"]
    assert told["answer"]
    assert told["release"]["answer"] == "released"


@pytest.mark.parametrize("hidden", [{}, HIDDEN], ids=["seen", "hidden"])
def test_when_the_program_is_killed_where_everything_is_refused_the_guardian_ends_the_server(tmp_path, hidden):
    case = {"name": "it", **hidden, "die": True}
    said = run_locked(tmp_path, ALL, [PROGRAMS / "locked.py", "asyncio", json.dumps(case)])
    assert said.code == -9
    assert not said.left
    assert said.bystander_lives
    assert not said.shm


def test_without_the_guardian_hidden_members_are_held_and_not_said_to_be_gone(tmp_path):
    """Only their parent could tell that they ended: it is dead, and whose pid it is now cannot be seen."""
    case = {"name": "it", **HIDDEN, "kill_guardian": True, "limits": {"release_within": 1.0}}
    said = run_locked(tmp_path, ["hidden-pids"], [PROGRAMS / "locked.py", "asyncio", json.dumps(case)])
    told = json.loads(said.out.splitlines()[-1])["it"]
    assert not told["said_to_have_ended"]
    assert told["raised"]["type"] == "LeftBehind"
    answer, detail = told["release"]["items"]["processes"]
    assert (answer, "hidden by /proc" in detail) == ("held", True)
    assert all(pid in said.left for pid in detail.split()[1:2])
    assert said.bystander_lives
    assert not said.bystander_files_gone


def test_what_nobody_can_be_asked_about_is_kept_and_its_release_is_unknown(tmp_path):
    """No leases: whether somebody has a file cannot be asked, so the server's own is not removed either."""
    left = {"name": "it", "server": {"leave": ["mapped", "semaphore"]}}
    told = told_of(tmp_path, ALL_BUT_SHM, left, leaves=2)["it"]
    answer, detail = told["release"]["items"]["files"]
    assert (answer, told["release"]["answer"]) == ("unknown", "unknown")
    assert [answer for _, answer, _ in told["release"]["files"]] == ["unknown", "unknown"]
    assert "does not tell who has it" in detail


def test_leftovers_go_where_leases_are_granted_and_nothing_else_does(tmp_path):
    case = {"name": "it", "server": {"leave": ["mapped", "semaphore", "socket"]}}
    told = told_of(tmp_path, ["hidden-pids", "no-ptrace", "no-pidfd", "no-home", "small-shm"], case)["it"]
    assert [answer for _, answer, _ in told["release"]["files"]] == ["removed"] * 3
    assert told["release"]["answer"] == "released"


def test_a_look_at_a_server_where_everything_is_refused_gives_its_table(tmp_path):
    code, out, err = told_of(tmp_path, ALL, {"name": "it", "diagnose": True})["it"]["diagnosed"]
    assert (code in {0, 21}, err) == (True, "")  # 21: too little time on a busy machine; never 20, a hang
    assert ", sglang, pid " in out.splitlines()[0]
    assert "Could not be seen\n" in out
    assert "  log: its output goes to /dev/null" in out


def test_a_look_at_a_server_that_may_not_be_looked_into_says_so_for_each_member(tmp_path):
    code, out, err = told_of(tmp_path, [], {"name": "it", **HIDDEN, "diagnose": True})["it"]["diagnosed"]
    assert (code in {0, 21}, err) == (True, "")
    unseen = out[out.index("Could not be seen") :]
    assert all(f"  {what}: " in unseen for what in ("log", "stacks", "bytes read"))
    assert "a member listens" not in out


@pytest.mark.parametrize("words", [[], ["1"], ["--json"]])
def test_a_look_at_a_machine_that_shows_nothing_ends_with_a_sentence(tmp_path, words):
    said = run_locked(tmp_path, ALL, ["-m", "hangguard", "diagnose", *words])
    assert "Traceback" not in said.err
    assert said.code in {2, 22}
    assert "server" in said.err + said.out
