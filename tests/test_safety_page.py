"""Each line of the safety page has a test, which exists and is called what the page says."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "safety.md").read_text()
LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<target>[^)]+)\)")
PARAMETERS = re.compile(r" \([^()]*\)$")
"""Of a test that has some, the one that is meant may stand behind its name."""


@cache
def functions_of(path):
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, functions)}


def wrong_links(page):
    """Return every link whose text is not the name of a test in the file that it leads to."""
    wrong = []
    for link in LINK.finditer(page):
        path = DOCS / link["target"]
        name = "test_" + PARAMETERS.sub("", link["text"]).replace(" ", "_")
        if not path.is_file() or path.suffix != ".py" or name not in functions_of(path):
            wrong.append(link[0])
    return wrong


def rows(page):
    """Return the lines of all tables, without heads and rules."""
    lines = page.splitlines()
    rules = {number for number, line in enumerate(lines) if re.fullmatch(r"\|[ |:-]+\|", line)}
    left_out = rules | {number - 1 for number in rules}
    return [line for number, line in enumerate(lines) if line.startswith("|") and number not in left_out]


def rows_without_a_test(page):
    return [row for row in rows(page) if not LINK.search(row)]


def test_every_link_of_the_safety_page_names_a_test_that_exists():
    assert wrong_links(PAGE) == []


def test_every_line_in_the_tables_of_the_safety_page_has_a_test():
    assert len(rows(PAGE)) > 100
    assert rows_without_a_test(PAGE) == []


def test_only_what_no_test_shows_stands_outside_of_the_tables_of_the_safety_page():
    """Lists are for what no test shows, and say so."""
    listed = [number for number, line in enumerate(PAGE.splitlines()) if line.startswith(("- ", "* "))]
    assert listed[0] > PAGE[: PAGE.index("shown by **no test**")].count("\n")


@pytest.mark.parametrize(
    "broken",
    [
        "[whoever opens our log himself is a member](../tests/process/test_safety.py)",
        "[whoever opens our log himself is no member](../tests/process/test_stop.py)",
        "[whoever opens our log himself is no member](../tests/process/test_nowhere.py)",
        "[whoever opens our log himself](../tests/process/test_safety.py)",
        "[somewhere](https://example.org)",
    ],
)
def test_a_link_that_is_wrong_would_be_found(broken):
    right = "[whoever opens our log himself is no member](../tests/process/test_safety.py)"
    assert wrong_links(f"| a | {right} |\n") == []
    assert wrong_links(f"| a | {right.replace(' member]', ' member (is dead)]')} |\n") == []
    assert wrong_links(f"| a | {right}, {broken} |\n") == [broken]


def test_a_line_without_a_test_would_be_found():
    head = "| what | proved by |\n| --- | --- |\n"
    assert rows_without_a_test(f"{head}| it kills nobody | [a](b) |\n| it deletes nothing | |\n") == [
        "| it deletes nothing | |"
    ]
