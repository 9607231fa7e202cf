"""GPUs for the tests of this folder: the real nvidia-ml-py on a stand-in driver library."""

import pytest

from standin import StandInGpus, build_standin


@pytest.fixture(scope="session")
def standin_library(tmp_path_factory):
    return build_standin(tmp_path_factory.mktemp("standin"))


@pytest.fixture(scope="session")
def old_standin_library(tmp_path_factory):
    return build_standin(tmp_path_factory.mktemp("old-standin"), old_driver=True)


@pytest.fixture
def use_gpus(tmp_path, monkeypatch):
    """Put stand-in GPUs into the environment of this program, which the readers inherit."""

    def use(library, count):
        gpus = StandInGpus(library, count=count, state=tmp_path / "nvml-state")
        for name, value in gpus.environment().items():
            monkeypatch.setenv(name, value)
        return gpus

    return use


@pytest.fixture
def gpus(use_gpus, standin_library):
    return use_gpus(standin_library, 4)
