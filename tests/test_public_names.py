"""`import penstock` gives what an author needs: every name is there, and recipes and documents import no other."""

import ast
import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, create_autospec

import numpy as np
import pytest
import torch

import penstock
from penstock import conf
from penstock.algorithms.advantages import ADVANTAGES, group_advantage
from penstock.algorithms.catalogue import ALGORITHMS
from penstock.algorithms.corrections import CORRECTIONS
from penstock.algorithms.losses import SURROGATES, ppo_clip_loss
from penstock.orchestrator import train as training
from penstock.orchestrator.configuration.resolved import resolve
from penstock.orchestrator.loops.session_policy import Policy
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


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What examples know: public names, with stand-ins for what would start processes, and of what a run gives."""
    sandbox = create_autospec(penstock.Sandbox, instance=True)
    for name in ("run", "session", "Client", "Sandbox"):
        monkeypatch.setattr(penstock, name, create_autospec(getattr(penstock, name)))
    penstock.Sandbox.return_value.__aenter__.return_value = sandbox  # type: ignore[attr-defined]
    monkeypatch.setattr(training, "run", lambda config, quiet: resolve(config) and MagicMock())
    context = create_autospec(penstock.Context, instance=True)
    context.sample.return_value = MagicMock(answer="4")
    registries: list[dict[str, Any]] = [ALGORITHMS, ADVANTAGES, SURROGATES, CORRECTIONS]
    before = [dict(one) for one in registries]
    yield {
        **{name: getattr(penstock, name) for name in penstock.__all__},
        "__name__": __name__, "penstock": penstock, "torch": torch, "Tensor": torch.Tensor, "np": np,
        "ctx": context, "data": [], "group_advantage": group_advantage,
        "run": MagicMock(policy=create_autospec(Policy, instance=True)), "ppo_clip_loss": ppo_clip_loss,
    }  # fmt: skip
    for registry, entries in zip(registries, before, strict=True):
        registry.clear()
        registry.update(entries)


def examples() -> list[Any]:
    found = [
        pytest.param(block, id=f"{page}-{number}")
        for page in ("README.md", "docs/api.md", "docs/algorithms.md")
        for number, block in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL))
    ]
    assert len(found) > 14
    return found


@pytest.mark.parametrize("example", examples())
def test_examples_run(names: dict[str, Any], example: str) -> None:
    code = compile(example, "example", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    coroutine = eval(code, names)
    if coroutine is not None:
        asyncio.run(coroutine)


def test_formulas_of_the_reference_return_what_is_said(names: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    for block in re.findall(r"```python\n(@(?:advantage|surrogate|correction).*?)```", page, re.DOTALL):
        exec(block, names)
    tokens, mask = -torch.rand(2, 3), torch.ones(2, 3, dtype=torch.bool)
    assert names["my_advantage"](torch.tensor([1.0, 0.0, 3.0]), scale=2.0).tolist() == [0.0, -0.5, 1.0]
    surrogate = names["my_surrogate"](tokens, tokens - 0.1, torch.ones(2, 3), mask)
    for values, metrics in (surrogate, names["my_correction"](tokens, tokens, mask)):
        assert values.shape == (2, 3)
        assert all(one.shape == (2, 3) for one in metrics.values())


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
    lines = re.findall(r"^from (penstock(?:\.\w+)*) import (\([^)]*\)|.+)$", code, re.MULTILINE)
    each = [(module, name.split(" as ")[0].strip(" ()\n")) for module, names in lines for name in names.split(",")]
    found = [f"{module}.{name}" for module, name in each if name]
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
