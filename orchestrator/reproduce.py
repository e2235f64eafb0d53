"""Makes a run again and compares it with the first while it goes on (`penstock reproduce`), and compares two runs
(`penstock diff`).

    manifest.json of the run ─▶ its configuration, with what it has chosen ─▶ run ─▶ Comparison: a step's line each
                                                                                     └─ a difference ends the run
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.algorithms.catalogue import dataflow_of
from penstock.conf.errors import ConfigError
from penstock.conf.run import RunConfig
from penstock.orchestrator.configuration.compose import restore_config
from penstock.orchestrator.observability.comparison import (
    Difference,
    Line,
    compare,
    difference_in,
    differences_text,
    hashed_lines,
    loose_ends,
    verdict,
)
from penstock.orchestrator.observability.manifest import FILE, read_manifest
from penstock.orchestrator.run import run
from penstock.orchestrator.run_directory.fetching import open_at
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.workers.user_code import GIVEN

OWN_KEYS = (
    "config.resume", "config.plan", "config.checkpoint.directory", "config.tracking", "config.model.path",
    "config.rollout.num_threads", "config.rollout.num_workers", "config.trainer.num_threads", "chosen.nodes",
)  # fmt: skip
"""Keys of the manifest that a reproduction sets itself; `models` says whether models are the same."""
Tell = Callable[[str], None]


class Comparison:
    """A sink that compares each step with that of a run before; `is_over` ends the run after a difference, or after
    the last step that is to be compared."""

    def __init__(self, before: Mapping[int, Line], last: int, tell: Tell) -> None:
        self._before, self._last, self._tell = before, last, tell
        self.same, self.is_over = 0, False
        self.difference: Difference | None = None

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self.is_over or step not in self._before:
            return
        self.difference = difference_in(self._before[step], {"step": step, **metrics})
        if self.difference is None:
            self.same = step
        self.is_over = self.difference is not None or step >= self._last
        self._tell(f"step {step}: {'the same bits' if self.difference is None else f'other {self.difference.name}'}")

    def close(self) -> None: ...


def reproduce(place: str, tell: Tell, *, steps: int | None = None, directory: str | None = None) -> int:
    """Make a run again. `steps`: number of steps at most; None: all that the run has. `directory`: of the new run;
    None: beside the first, or below `runs` for one at a URL. Returns the exit code: 0 for the same bits, 1 for others.

    Raises `ConfigError` for a run that cannot be made again, and what `run` raises."""
    if steps is not None and steps < 1:
        raise ConfigError(f"--steps {steps}: at least one step is compared.")
    with open_at(place, more=_wanted) as before:
        manifest, lines = read_manifest(before.path), hashed_lines(before)
        if not manifest:
            raise ConfigError(
                f"{place}: no {FILE}, which says what the run has chosen. It is of a version of Penstock that wrote "
                f"none, or was killed before its first step."
            )
        config = again_config(manifest, before, directory)
        last = sorted(lines)[min(steps or len(lines), len(lines)) - 1]
        reasons = list(loose_ends(manifest["config"]))
        for reason in reasons:
            tell(f"not promised to be the same: {reason}")
        comparison = Comparison(lines, last, tell)
        result = run(config, sinks=[comparison])
        tell(f"{place} and {result.directory}: {verdict(comparison.same, comparison.difference)}")
        tell(differences_text(before.path, result.directory, OWN_KEYS))
        if comparison.difference is not None and reasons:
            tell(f"such a difference is expected: {' '.join(reasons)}")
    return 0 if comparison.difference is None and comparison.same == last else 1


def again_config(manifest: Mapping[str, Any], before: RunDirectory, directory: str | None) -> RunConfig:
    """The configuration of a run that makes another again, with what that one has chosen. Raises `ConfigError`."""
    if GIVEN in str(manifest["config"]):
        raise ConfigError(
            f"{before.place}: it was given functions or rows in Python, which no file has. Call penstock.train again, "
            "and compare the runs with penstock diff."
        )
    config, chosen = restore_config(manifest["config"]), manifest["chosen"]
    if [stage.name for stage in dataflow_of(config, None).stages] != chosen["dataflow"]:
        raise ConfigError(
            f"{before.place}: its dataflow was given in Python, or algorithm={config.algorithm.name} has another one "
            "now. Call penstock.run again, and compare the runs with penstock diff."
        )
    beside = before.path.parent if before.url is None else Path("runs")
    place = Path(directory) if directory is not None else beside / _new_name(before)
    config.output_dir, config.name = str(place.expanduser().resolve().parent), place.name
    config.resume, config.plan = ("never" if config.resume == "auto" else config.resume), "never"
    config.checkpoint.directory = None
    config.tracking.sinks, config.tracking.export_model = [], False
    _take_threads(config, chosen["threads"])
    for name in ("warm_start", *config.other_models):
        model = before.path / name / "model"
        if model.is_dir() and name == "warm_start" and config.model.path is None:
            config.model.path = str(model)
        elif model.is_dir() and name not in config.model.paths:
            config.model.paths[name] = str(model)
    return config


def diff(first: str, second: str, tell: Tell) -> int:
    """Say up to which step two runs have the same bits, and what differs in their manifests. Returns the exit code: 0
    for the same bits, 1 for others. Raises `ConfigError` for what is no run, or has no hashes."""
    with open_at(first, more=_wanted) as one, open_at(second, more=_wanted) as other:
        same, difference = compare(hashed_lines(one), hashed_lines(other))
        tell(verdict(same, difference))
        tell(differences_text(one.path, other.path))
        if difference is not None:
            for reason in loose_ends(one.read_config()):
                tell(f"such a difference is expected: {reason}")
    return 0 if difference is None else 1


def _wanted(names: Sequence[str]) -> list[str]:
    """The files that are read of a run at a URL, besides its records."""
    return [name for name in names if name == FILE]


def _new_name(before: RunDirectory) -> str:
    return f"{before.path.name}-again-{datetime.now(UTC):%Y%m%d-%H%M%S}"


def _take_threads(config: RunConfig, threads: Mapping[str, int]) -> None:
    """Give engines and ranks the numbers of threads that a run has chosen, where all of a kind have the same one.
    Others follow from cores, as before."""
    kinds = (("Rollout-", config.rollout), ("Trainer-", config.trainer))
    for beginning, section in kinds:
        found = {number for name, number in threads.items() if name.startswith(beginning)}
        others = {number for name, number in threads.items() if name.startswith("Scorer-")}
        if len(found) == 1 and (section is config.rollout or others <= found):
            section.num_threads = found.pop()
    if config.rollout.num_workers == "auto":
        config.rollout.num_workers = sum(name.startswith("Rollout-") for name in threads)
