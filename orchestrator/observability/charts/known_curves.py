"""Curves that a recipe is known to have: measured by several seeds, shipped beside it, and drawn behind a run's own.

    runs of several seeds ─ penstock report --band ─▶ recipes/NAME/curves.json ─▶ a band in report and page,
                                                                                  a warning for a run below it

A band is shown for runs of the same settings alone: another seed, name, place, tracker or cluster makes no difference,
anything else does.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from penstock.conf.errors import ConfigError
from penstock.orchestrator.observability.charts.chart import Chart
from penstock.orchestrator.observability.differences import differences_of, flat
from penstock.orchestrator.run_directory.json_lines import json_of
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.workers.runtime.processes import cpu_entry
from penstock.workers.user_code import packaged_recipes

FILE = "curves.json"
KNOWN = ("accuracy/heldout", "reward/mean")
"""Metrics that have a band, where runs have them."""
ANY = (
    "seed", "name", "recipe", "description", "output_dir", "resume", "imports", "tracking.", "checkpoint.", "faults.",
    "cluster.", "diagnosis.", "evaluation.every_steps",
)  # fmt: skip
"""Keys whose values make no other curve; those that end with a dot are sections."""


@dataclass(frozen=True)
class KnownCurve:
    """One metric of several seeds: the least, mean and largest value at each step that all of them have."""

    steps: tuple[int, ...]
    low: tuple[float, ...]
    mean: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True)
class KnownCurves:
    """What a recipe's file says."""

    seeds: tuple[int, ...]
    cpu: str
    settings: Mapping[str, Any]
    """What differs from the defaults, by key."""
    curves: Mapping[str, KnownCurve]

    @classmethod
    def of_runs(cls, runs: Sequence[RunDirectory]) -> "KnownCurves":
        """Curves of finished runs of the same settings. Raises `ConfigError` for others, and for fewer than two."""
        if len(runs) < 2:
            raise ConfigError("a band is made of two runs at least, of different seeds.")
        configs = [run.read_config() for run in runs]
        settings = settings_of(configs[0])
        for run, config in zip(runs, configs, strict=True):
            if differing := sorted(key for key in settings | settings_of(config)
                                   if settings.get(key) != settings_of(config).get(key)):  # fmt: skip
                raise ConfigError(f"{run.path}: {', '.join(differing)} differ from {runs[0].path}: no band of both.")
        lines = [run.read_metrics() for run in runs]
        curves = {key: curve for key in KNOWN if (curve := _curve(lines, key)) is not None}
        return cls(tuple(int(config["seed"]) for config in configs), cpu_entry("model name"), settings, curves)

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> "KnownCurves | None":
        """The curves of a run's recipe; None where it has none, or the run has other settings."""
        try:
            values = json.loads(_file(config).read_text(encoding="utf-8"))
            known = cls(
                tuple(values["seeds"]), values["cpu"], values["settings"],
                {key: KnownCurve(*(tuple(curve[part]) for part in ("steps", "low", "mean", "high")))
                 for key, curve in values["curves"].items()},
            )  # fmt: skip
        except (ConfigError, OSError, ValueError, KeyError, TypeError):
            return None
        return known if known.settings == settings_of(config) else None

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self), indent=None, separators=(",", ":")) + "\n", encoding="utf-8")

    def behind(self, chart: Chart) -> dict[str, Any] | None:
        """The curve behind those of a chart; None: there is none."""
        key = next((curve.key for curve in chart.curves if curve.key in self.curves), None)
        label = f"the recipe's {len(self.seeds)} seeds"
        return None if key is None else {"label": label, **asdict(self.curves[key])}


def write_known(runs: Sequence[str]) -> str:
    """Write the curves of finished runs beside their recipe. Returns the file's path. Raises `ConfigError`."""
    directories = [RunDirectory.open(run) for run in runs]
    file = _file(directories[0].read_config())
    KnownCurves.of_runs(directories).write(file)
    return str(file)


def with_known(charts: Sequence[Chart], config: Mapping[str, Any]) -> list[Chart]:
    """The charts of a run, with what its recipe is known to do behind them."""
    known = KnownCurves.of_config(config)
    return list(charts) if known is None else [replace(chart, known=known.behind(chart)) for chart in charts]


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run that its curves depend on: what differs from the defaults, by key, as JSON has it. Files
    beside the recipe are named as from there, wherever it is installed."""
    text = json_of({key: value for key, value in flat(differences_of(config)) if not key.startswith(ANY)})
    if config.get("recipe"):
        recipe = _file(config).parent.resolve()
        for directory in (recipe, recipe.parent):  # the base of a recipe lies beside it
            text = text.replace(f'"{directory}/', '"')
    values: dict[str, Any] = json.loads(text)
    return values


def _file(config: Mapping[str, Any]) -> Path:
    """The file of the curves of a run's recipe. Raises `ConfigError` for a run without one."""
    if not config.get("recipe"):
        raise ConfigError("the run is none of a recipe: there is no directory that its curves would belong to.")
    name = str(config["recipe"])
    directory = packaged_recipes().get(name) or Path(name).expanduser()
    return (directory if directory.is_dir() else directory.parent) / FILE


def _curve(runs: Sequence[Sequence[Mapping[str, Any]]], key: str) -> KnownCurve | None:
    values = [{int(line["step"]): float(line[key]) for line in lines if line.get(key) is not None} for lines in runs]
    steps = sorted(set.intersection(*(set(one) for one in values)))
    if not steps:
        return None
    at = [[one[step] for one in values] for step in steps]
    parts = ([function(some) for some in at] for function in (min, statistics.fmean, max))
    rounded = (tuple(float(f"{value:.4g}") for value in part) for part in parts)
    return KnownCurve(tuple(steps), *rounded)
