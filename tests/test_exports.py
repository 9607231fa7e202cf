"""The public face: every name is there, typed, documented and frozen, and the import costs next to nothing."""

import ast
import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hangguard
import hangguard.testing

HEAVY = ("anyio", "httpx", "psutil", "tenacity", "pynvml", "click", "rich", "platformdirs", "asyncio", "trio")
INIT = Path(hangguard.__file__)
REFERENCE = Path(__file__).parent.parent / "docs" / "reference.md"


def names_for_type_checkers():
    tree = ast.parse(INIT.read_text())
    (block,) = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    return {alias.asname: node.module for node in block.body for alias in node.names}


def documents_itself(thing):
    text = inspect.getdoc(thing) or ""
    return bool(text) and not text.startswith(f"{getattr(thing, '__name__', '')}(")  # what dataclass makes up


@pytest.mark.parametrize("name", hangguard.__all__)
def test_a_public_name_is_importable_and_documented(name):
    thing = getattr(hangguard, name)
    if inspect.isclass(thing) or inspect.isfunction(thing):
        assert documents_itself(thing), f"{name} has no docstring"


@pytest.mark.parametrize("name", hangguard.__all__)
def test_a_public_name_stands_in_the_reference(name):
    assert re.search(rf"hangguard\.{name}\b", REFERENCE.read_text())


@pytest.mark.parametrize("name", hangguard.testing.__all__)
def test_a_public_name_for_tests_stands_in_the_reference(name):
    (members,) = re.findall(r"hangguard\.testing\n   :members: (.*)", REFERENCE.read_text())
    assert name in members.split(", ")


def test_type_checkers_see_the_same_names_from_the_same_places():
    seen = names_for_type_checkers()
    assert seen.keys() == set(hangguard.__all__)
    at_run_time = {name: f"hangguard.{home}" for name, home in hangguard._HOME_OF.items()}
    assert seen == at_run_time


@pytest.mark.parametrize("name", hangguard.__all__)
def test_a_public_dataclass_is_frozen(name):
    thing = getattr(hangguard, name)
    if inspect.isclass(thing) and dataclasses.is_dataclass(thing) and not issubclass(thing, Exception):
        assert thing.__dataclass_params__.frozen
        assert "__slots__" in vars(thing)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'supervize'"):
        hangguard.supervize  # noqa: B018


def test_dir_lists_every_public_name():
    assert set(hangguard.__all__) <= set(dir(hangguard))


def test_importing_hangguard_loads_the_nouns_only():
    program = "import sys; before = set(sys.modules); import hangguard; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(done.stdout.split())
    assert "hangguard" in loaded
    assert not {name for name in loaded if name.partition(".")[0] in HEAVY}


def public_members(kind):
    return {name: member for name, member in inspect.getmembers(kind) if not name.startswith("_")}


def test_the_blocking_and_the_asynchronous_server_have_the_same_names():
    assert public_members(hangguard.Server).keys() == public_members(hangguard.AsyncServer).keys()


@pytest.mark.parametrize("name", sorted(public_members(hangguard.AsyncServer)))
def test_the_two_servers_have_the_same_signatures(name):
    blocking, asynchronous = (public_members(kind)[name] for kind in (hangguard.Server, hangguard.AsyncServer))
    assert isinstance(blocking, property) == isinstance(asynchronous, property)
    of = [member.fget if isinstance(member, property) else member for member in (blocking, asynchronous)]
    signatures = [inspect.signature(member) for member in of]
    assert signatures[0].parameters == signatures[1].parameters
    if name not in {"events", "log"}:  # an iterator here, an asynchronous one there
        assert signatures[0] == signatures[1]
