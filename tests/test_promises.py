"""Each promise of the architecture document and each row of README.md has a test with real parts, in the first tier."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
NO_CLAIMS = {"What it does", "Compared with others", "Documentation"}
"""Sections of README.md without a claim beside those of their rows."""


def promises() -> set[str]:
    """`"4"` for a promise, `"4 resumed"` for a row of the table below it."""
    text = (ROOT / "docs" / "internals" / "architecture.md").read_text().partition("## What Penstock promises")[2]
    text, found, number = text.partition("\n## ")[0], set(), ""
    for line in text.splitlines():
        if match := re.match(r"(\d+)\. \*\*", line):
            number = match[1]
            found.add(number)
        elif (match := re.match(r"   \| ([a-z ]+) \|", line)) and match[1] != "name":
            found.add(f"{number} {match[1]}")
    return found


def rows() -> set[str]:
    """The problems in the first table of README.md, and its sections."""
    text = (ROOT / "README.md").read_text()
    return {
        *re.findall(r"^\| \*\*(.+?)\*\* \|", text, re.MULTILINE),
        *re.findall(r"^## (.+)$", text, re.MULTILINE),
    } - NO_CLAIMS


def marked(file: Path) -> Iterator[str]:
    """Names that tests of a file are marked with."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.promise":
            yield from (ast.literal_eval(name) for name in node.args)


def test_each_promise_and_each_row_has_a_real_test_and_no_test_has_another_name() -> None:
    found = {name for file in (ROOT / "tests").rglob("test_*.py") for name in marked(file)}
    assert found == promises() | rows()


def test_the_names_are_read_from_the_documents() -> None:
    assert {"1", "4", "8", "4 resumed", "4 machine lost"} <= promises()
    assert {"The run dies", "What is supported", "Loops of your own"} <= rows()
