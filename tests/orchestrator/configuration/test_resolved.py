"""A run is resolved once, by one function, and nobody changes what it was given."""

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.conf.errors import ConfigError
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.configuration.resolved import resolve, resolve_first

ROOT = Path(__file__).parents[3]
ROOMS = (
    "algorithms", "cli", "conf", "metering", "network", "orchestrator", "planner", "recipes", "serve", "store", "ui",
    "workers",
)  # fmt: skip


def test_a_resolved_run_is_frozen_and_its_configuration_is_a_copy() -> None:
    config = load_config(["recipe=distill"])
    run = resolve(config)
    assert run.config == config
    assert run.config is not config
    assert {actor.role for actor in run.plan} >= {"trainer", "rollout", "scorer"}
    assert [first.recipe for first in run.first_runs] == ["sft", "sft"]
    assert resolve_first(run.first_runs[0]).config.algorithm.name == "sft"
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.config = config  # type: ignore[misc]


def test_a_scorer_that_the_dataflow_has_not_is_refused_by_name() -> None:
    words = ["recipe=gsm8k", "algorithm.kl_coef=0.01"]
    run = resolve(load_config([*words, "trainer.scorer_ranks={reference: 1}"]))
    assert sum(actor.role == "scorer" for actor in run.plan) == 1
    with pytest.raises(ConfigError, match=r"trainer\.scorer_ranks\.refrence: .* no such scorer.*reference"):
        resolve(load_config([*words, "trainer.scorer_ranks={refrence: 1}"]))


def rebound(function: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> bool:
    arguments = {one.arg for one in (*function.args.args, *function.args.kwonlyargs)}
    stored = (node for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    return name in arguments and any(node.id == name for node in stored)


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for room in ROOMS:
        for file in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield f"{file.relative_to(ROOT)}: {node.name}", node


def test_no_function_rebinds_the_configuration_that_it_was_given() -> None:
    assert [name for name, function in functions() if rebound(function, "config")] == []
