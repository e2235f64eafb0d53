"""`penstock translate FILE`: a configuration of verl or TRL as a recipe, what is not in it, and whether it starts."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from penstock.algorithms.catalogue import dataflow_of
from penstock.conf.errors import ConfigError, PenstockError
from penstock.orchestrator.cluster.placement.actors import needed, plan_actors
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.configuration.translation.view import as_yaml, keys_of, read, translated
from penstock.workers.user_code import RECIPE_FILE


def show(path: str, console: Console, target: str | None = None, words: Sequence[str] = ()) -> int:
    """Print the recipe, or write it to the file `target`, and say what was not translated and whether the recipe can
    start. `words`: more of their keys. Returns the exit code. Raises `ConfigError`."""
    framework, found = translated(read(path) | keys_of(words))
    recipe = as_yaml(framework, found)
    if target is None:
        console.print(recipe, markup=False, highlight=False, soft_wrap=True, end="")
    else:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        Path(target).write_text(recipe, encoding="utf-8")
        console.print(f"{len(found.became)} keys of {framework.name} are in {target}", highlight=False)
    if found.assumed:
        said = ", ".join(f"{key}={value}" for key, value in found.assumed.items())
        console.print(f"\nnot said there, and taken: {said}", markup=False, highlight=False, soft_wrap=True)
    if found.lost:
        console.print(f"\n[yellow]not translated[/], {len(found.lost)} keys:", highlight=False)
    for key, why in found.lost:
        console.print(f"  [bold]{key}[/]: ", end="", highlight=False)
        console.print(why, markup=False, highlight=False, soft_wrap=True)
    console.print()
    try:
        said = check(recipe)
    except PenstockError as error:
        console.print("[red]the recipe does not start yet[/]: ", end="", highlight=False)
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        return error.exit_code
    where = "DIRECTORY" if target is None else Path(target).parent
    console.print(
        f"checked: {said}. `penstock validate recipe={where}` looks at its model, data and machine.",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
    return 0


def check(recipe: str) -> str:
    """What the run of a recipe would reserve. Raises `PenstockError` for one that cannot start anywhere."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / RECIPE_FILE).write_text(recipe, encoding="utf-8")
        try:
            config = load_config([f"recipe={directory}"])
        except ConfigError as error:
            raise ConfigError(str(error).replace(f"{directory}/", "")) from None
    if config.data.path is None and not config.data.mixture:
        raise ConfigError("data.path: the recipe names no data. Set it to the rows that are trained on.")
    cpus, gpus = needed(plan := plan_actors(dataflow_of(config), config))
    return f"the recipe's keys fit together, and its {len(plan)} actors reserve {cpus:g} CPU(s) and {gpus:g} GPU(s)"
