"""`import penstock` gives what an author needs: every name is there, and recipes and documents import no other."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock import conf
from tests.api_page import GROUPS, page

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*/*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_every_name_is_there() -> None:
    assert len(penstock.__all__) > 30
    for name in penstock.__all__:
        assert getattr(penstock, name).__doc__ or name == "Message"


def test_the_reference_is_what_signatures_and_docstrings_say() -> None:
    assert {name for names in GROUPS.values() for name in names} == set(penstock.__all__)
    assert (ROOT / "docs" / "api.md").read_text() == page(), "write it anew: python -m tests.api_page > docs/api.md"


def test_examples_of_the_reference_are_python() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "api.md").read_text(), re.DOTALL)
    assert len(blocks) > 3
    for block in blocks:
        ast.parse(block)


def test_every_section_of_a_configuration_is_there() -> None:
    classes = [
        name
        for file in (ROOT / "conf").rglob("*.py")
        for name in re.findall(r"^class (\w+Config)\b", file.read_text(), re.MULTILINE)
    ]
    told = re.findall(r"import (\w+Config) as", (ROOT / "conf" / "__init__.py").read_text())
    assert sorted(told) == sorted(classes)
    assert all(getattr(conf, name).__name__ == name for name in classes)
    with pytest.raises(AttributeError, match="NoSuchConfig"):
        conf.NoSuchConfig  # noqa: B018


def imported_from(code: str) -> list[str]:
    """Names that are imported from Penstock's own modules, as `module.name`, but for files beside another recipe's."""
    lines = re.findall(r"^from (penstock(?:\.\w+)*) import (.+)$", code, re.MULTILINE)
    found = [f"{module}.{name.split(' as ')[0].strip(' ()')}" for module, names in lines for name in names.split(",")]
    return [name for name in found if not name.startswith("penstock.recipes.")]


def public(name: str) -> bool:
    if name.startswith("penstock.conf"):
        return name == "penstock.conf" or hasattr(conf, name.removeprefix("penstock.conf."))
    return name.removeprefix("penstock.") in penstock.__all__


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_recipes_import_public_names_alone(path: Path) -> None:
    assert [name for name in imported_from(path.read_text()) if not public(name)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documents_import_public_names_alone(page: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    found = [name for block in blocks for name in imported_from(block)]
    assert [name for name in found if not public(name)] == []


@pytest.mark.real
def test_importing_penstock_imports_nothing_heavy() -> None:
    code = "import sys, penstock; print([name for name in ('torch', 'ray', 'transformers') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
