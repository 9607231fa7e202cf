"""What every test may use."""

import pytest
from hypothesis import settings

# How long an example took says on shared cores what else ran; the limit of pytest-timeout stays.
settings.register_profile("hangguard", deadline=None)
settings.load_profile("hangguard")


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    return request.param
