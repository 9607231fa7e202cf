"""What every test may use."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

# How long an example took says on shared cores what else ran; the limit of pytest-timeout stays.
settings.register_profile("hangguard", deadline=None)
settings.load_profile("hangguard")


LONG = frozenset(
    {
        # Timelines judged sample by sample, in hundreds.
        "test_cases.py", "test_disturbed.py", "test_followers.py", "test_more_properties.py", "test_paused.py",
        "test_trace_replays.py",
        # Programs that hang, each watched for as long as its verdict takes, and looks of a quarter of a minute.
        "test_attach.py", "test_diagnose.py", "test_hostile.py", "test_states_broken.py", "test_states_busy.py",
        "test_states_idle.py", "test_states_serving.py", "test_states_unseen.py", "test_states_waiting.py",
        # Every Python that is found here, read thousands of times.
        "test_last_words.py", "test_pystacks.py",
        # Dozens of whole launches: as somebody uses it, interrupts it, writes it down wrongly.
        "test_bad_input.py", "test_interrupts.py", "test_launch_forms.py", "test_preflight.py", "test_use.py",
        # Whole launches as a plain user who may do little, one after the other.
        "test_locked_down_each.py",
        # Calls into the driver that never return, each until its deadline.
        "test_faults.py", "test_preflight_gpus.py",
        # Other namespaces, pids and inodes that are given away.
        "test_attacks_long.py", "test_started_again.py",
        # A gigabyte, really written; requests that are let finish, for as long as they take.
        "test_log_gigabyte.py", "test_drain.py", "test_leaving.py",
        # Runs in the background, and such whose supervisor is killed: a dozen commands each.
        "test_damaged_state.py", "test_detach.py", "test_kept.py",
        # Runs whose supervisor and guardian are killed, and everything that could look like a part of one.
        "test_both_died.py", "test_cleanup.py",
    }
)  # fmt: skip
"""Files of the long suite (``nox -s long``): five minutes on two cores, and for a machine without other servers."""


@pytest.hookimpl(tryfirst=True)  # before -m looks at the markers
def pytest_collection_modifyitems(items):
    for item in items:
        if Path(item.path).name in LONG:
            item.add_marker(pytest.mark.long)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    return request.param


@pytest.fixture(scope="session", autouse=True)
def private_folders(tmp_path_factory):
    """Runs without a run_dir of their own, and engines, leave files: in a folder of pytest's, not in the user's."""
    folder = tmp_path_factory.mktemp("t")  # short: sockets of engines are made in it, and 107 bytes is their end
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        patch.setattr(tempfile, "tempdir", None)
        yield
