"""Recipes of tinker-cookbook, unmodified and without a network, against a served model. `make soak` runs them all."""

import math
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import pytest

from tests.amounts import IS_MANY
from tests.serve.cookbook.directory import BASE, make_directory
from tests.serve.cookbook.recipes import RECIPES
from tests.serve.cookbook.running import run_recipe
from tests.serve.served import Served, served

pytestmark = pytest.mark.real

FALLS = {"sl_loop": 0.7, "sl_basic": 0.7, "warm": 0.7, "prompt_distillation": 0.7, "dpo": 0.85}
"""Recipes that learn from any start, and the share of the first loss that the last ones are below."""
RISES = {"rl_loop": 0.1, "math_rl": 0.1}
"""Recipes that learn from answers that are sometimes right, and by how much their reward rises."""
LAST = 3
"""Steps at the start and at the end whose rewards are compared; a step has four questions."""
QUICK = ("sl_loop", "rl_loop", "sdft")
"""Recipes of every run of the tests: supervised, by samples, by targets `[N, K]`."""
CHOSEN = tuple(RECIPES) if IS_MANY else QUICK


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_directory(tmp_path_factory.mktemp("cookbook") / "here")


@pytest.fixture(scope="module")
def server(
    place: Path, warm_python: list[str], ray_address: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    words = [f"model.path={place / BASE}", "rollout.engine=hf", "rollout.max_model_len=4096", "rollout.num_threads=1"]
    words.append("trainer.num_threads=1")
    with served(tmp_path_factory.mktemp("served"), words, warm_python, ray_address) as found:
        yield found


@pytest.fixture(scope="module")
def start(place: Path, server: Served) -> str:
    """Weights that answer in the form that is asked for, and are sometimes right."""
    return run_recipe("warm", server.url, place).saved


@pytest.mark.parametrize("name", CHOSEN)
def test_a_recipe_runs_unmodified(name: str, place: Path, server: Served, request: pytest.FixtureRequest) -> None:
    begin = request.getfixturevalue("start") if name in RISES else None
    values = run_recipe(name, server.url, place, begin).values(RECIPES[name].metric)
    assert values
    assert all(math.isfinite(value) for value in values)
    if name in FALLS:
        assert mean(values[-LAST:]) < FALLS[name] * values[0], values
    if name in RISES:
        assert mean(values[-LAST:]) > mean(values[:LAST]) + RISES[name], values
