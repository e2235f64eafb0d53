"""What the documents point to is there, and their commands can be given: links, anchors, options, keys."""

import ast
import re
import shlex
from pathlib import Path

import pytest

from penstock.cli.main import make_parser
from penstock.conf.errors import ConfigError
from penstock.orchestrator.configuration.compose import load_config

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "recipes").glob("*/README.md")),
]  # fmt: skip
LINK = re.compile(r"\]\(([^)\s]+)\)")
COMMAND = re.compile(r"^(?:    |\s*)(?:[A-Z_]+=\S+ )*(penstock (?:[a-z]+)(?: .*)?)$", re.MULTILINE)
MEANT = re.compile(r"…|\.\.\.|\bNAME\b|\bDIRECTORY\b|\bFILE\b|\bWORD\b|\bRUN\b|\bmine\b|\bmy_\w+")
"""What stands for something else, or is a file that the page has its reader write."""
OF_A_RUN = ("run", "validate", "plan", "simulate")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors_of(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", head) for head in heads]
    names = [re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in plain]
    return {*names, *(f"{name}-{names[:number].count(name)}" for number, name in enumerate(names))}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for link in LINK.findall(page.read_text()):
        path, _, anchor = link.partition("#")
        if path.startswith(("http://", "https://")):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors_of(target)):
            wrong.append(link)
    assert wrong == []


def test_readme_names_every_document() -> None:
    named = (ROOT / "README.md").read_text()
    pages = [name_of(page) for page in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if f"({page})" not in named] == []


def commands_of(page: Path) -> list[str]:
    text = page.read_text().replace("\\\n", " ")
    found = [line.split("  #")[0].strip() for line in COMMAND.findall(text)]
    return [line for line in found if not MEANT.search(line) and not re.search(r"[.:,;]$", line)]


@pytest.mark.parametrize("page", [page for page in PAGES if commands_of(page)], ids=name_of)
def test_commands_can_be_given(page: Path) -> None:
    for command in commands_of(page):
        words = shlex.split(command, comments=True)[1:]
        arguments = make_parser().parse_args(words)
        if words[0] in OF_A_RUN and arguments.overrides:
            overrides = arguments.overrides
            try:
                load_config(overrides)
            except ConfigError as error:
                pytest.fail(f"{command}: {error}")


def said_in_code() -> str:
    """Every text that the product may print, one after the other."""
    found = []
    for folder in ("algorithms", "cli", "conf", "orchestrator", "planner", "serve", "store", "ui", "workers"):
        for file in (ROOT / folder).rglob("*.py"):
            constants = (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant))
            found += [node.value for node in constants if isinstance(node.value, str)]
    return "\n".join(found)


def test_pages_that_code_and_its_messages_name_are_there() -> None:
    named = set(re.findall(r"docs/[\w/]+\.md", said_in_code()))
    assert len(named) > 5
    assert [page for page in sorted(named) if not (ROOT / page).is_file()] == []


def test_messages_that_are_explained_are_those_that_are_printed() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    rows = [row.split(" | ")[0].removeprefix("| ") for row in page.splitlines() if row.startswith("| `")]
    assert len(rows) > 25
    said, wrong = said_in_code(), []
    for row in rows:
        for message in re.split(r"`, `", row.strip("`")):
            pieces = [piece for piece in message.split("…") if len(piece.strip(" :,.(")) > 2]
            wrong += [piece for piece in pieces if piece not in said and piece.strip() not in said]
    assert wrong == []
