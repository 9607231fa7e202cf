"""What every test may use."""

import tempfile

import pytest
from hypothesis import settings

# How long an example took says on shared cores what else ran; the limit of pytest-timeout stays.
settings.register_profile("hangguard", deadline=None)
settings.load_profile("hangguard")


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
