"""The interface of experiment trackers: what they are told of a run, the three calls that tell it, and what a tracker
has of it already.

`trackers.py` has the trackers. Each is called from a thread of its own: it may be slow, and raise anything.
"""

import asyncio
import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from penstock.conf.errors import PenstockError, TakenOver
from penstock.conf.run import RunConfig
from penstock.conf.secret import hide_in
from penstock.orchestrator.observability.reporting.closing import cards_of
from penstock.orchestrator.run_directory.run_directory import RunDirectory

FINISHED, FAILED, INTERRUPTED, TAKEN_OVER = "finished", "failed", "interrupted", "taken_over"
DEFAULT_PROJECT = "penstock"
FOLDER = "trackers"


@dataclass(frozen=True)
class About:
    """Facts that a tracker is told of a run at its start."""

    name: str
    group: str
    project: str | None
    """Name of the project; None: as the tracker's environment says, else `DEFAULT_PROJECT`."""
    tags: Mapping[str, str]
    config: Mapping[str, Any]
    """The resolved configuration."""
    directory: Path
    """The run's directory."""

    @classmethod
    def of(cls, config: RunConfig, directory: RunDirectory) -> "About":
        recipe = config.recipe_name
        return cls(
            name=directory.full_name,
            group=config.tracking.group or recipe,
            project=config.tracking.project,
            tags={"recipe": recipe, "algorithm": config.algorithm.name, **config.tracking.tags},
            config=directory.read_config(),
            directory=directory.path,
        )


@dataclass(frozen=True)
class End:
    """The end of a run."""

    state: str
    error: str = ""
    cards: Mapping[str, str] = field(default_factory=dict)
    """Cards of the report: label to value, with its detail."""

    @classmethod
    def of(cls, error: BaseException | None, directory: RunDirectory) -> "End":
        """The end of a run. `error`: the one that ended it, if any."""
        if isinstance(error, TakenOver):  # it goes on elsewhere
            return cls(TAKEN_OVER)
        is_interrupted = isinstance(error, KeyboardInterrupt | asyncio.CancelledError)
        state = FINISHED if error is None else INTERRUPTED if is_interrupted else FAILED
        text = "" if error is None or is_interrupted else hide_in(f"{type(error).__name__}: {error}")
        return cls(state, text, _cards(directory))

    def facts(self) -> dict[str, str]:
        """The end as texts by name, for trackers that keep such."""
        found = {"state": self.state, "error": self.error}  # empty, too: a run that was resumed may have had one
        return found | {f"summary/{label}": value for label, value in self.cards.items()}


def _cards(directory: RunDirectory) -> dict[str, str]:
    try:
        found = cards_of(directory)
    except (OSError, PenstockError):  # a lost mount
        return {}
    return {card.label: f"{card.value} ({card.detail})" if card.detail else card.value for card in found}


class Opened(NamedTuple):
    """A run as the tracker has it."""

    id: str
    """The tracker's id of the run, to go on with it in another process."""
    place: str
    """The place where people find the run."""


class Tracker(Protocol):
    """Lifecycle: `open` until it succeeds, then `log` once a step, then `finish`."""

    def open(self, about: About, id: str | None) -> Opened:
        """Open a run. `id`: that of the run, if an earlier process has opened it, to go on with it."""
        ...

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log a step. Steps grow; a step comes again only with other names."""
        ...

    def finish(self, end: End) -> None: ...


class TrackerState:
    """The facts that a tracker needs to go on with a run in another process: `trackers/NAME.json` and `NAME.step`, in
    the run's directory. There are two files since the id is written once: so it is at the URL of a run long before its
    machine may be lost.

    Lifecycle: read when made, `keep` once the tracker knows the run, `keep_step` with each step that it has.

    Raises no `OSError`: what cannot be written is told as a loss of the tracker.
    """

    def __init__(self, directory: RunDirectory, name: str) -> None:
        self._directory, self._name = directory, name
        self.id: str | None = None
        """The run's id in the tracker, of an earlier process."""
        self.step: int | None = None
        """The last step that an earlier process gave to the tracker."""
        folder = directory.path / FOLDER
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            self.id = str(json.loads((folder / f"{name}.json").read_text())["id"])
            self.step = int((folder / f"{name}.step").read_text())

    def keep(self, id: str) -> None:
        self.id = id
        self._write(f"{self._name}.json", json.dumps({"id": id}))

    def keep_step(self, step: int) -> None:
        self._write(f"{self._name}.step", str(step))

    def _write(self, file: str, text: str) -> None:
        with self._directory.failed_writes.tolerating(FOLDER):
            (self._directory.path / FOLDER).mkdir(exist_ok=True)
            self._directory.write_text(f"{FOLDER}/{file}", text)


class NewSteps:
    """Selects the metrics that a tracker has not had yet. Pure. A run that goes on from a checkpoint takes some steps
    again. Trackers keep what they had first: a curve that goes back is drawn as a zigzag, and W&B refuses it.

    >>> new = NewSteps(after=None)
    >>> new.of(1, {"loss": 0.5}), new.of(1, {"loss": 0.4, "accuracy": 0.9}), new.of(0, {"loss": 0.1})
    ({'loss': 0.5}, {'accuracy': 0.9}, {})
    """

    def __init__(self, after: int | None) -> None:
        """`after`: the last step of an earlier process."""
        self._last = after
        self._names: set[str] | None = None if after is not None else set()
        """Names of the last step's metrics that the tracker has; None: all."""

    def of(self, step: int, numbers: Mapping[str, float]) -> dict[str, float]:
        if self._last is not None and step < self._last:
            return {}
        if self._last is None or step > self._last:
            self._last, self._names = step, set()
        if self._names is None:
            return {}
        new = {name: value for name, value in numbers.items() if name not in self._names}
        self._names |= new.keys()
        return new


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that can be plotted."""
    return {
        name: float(value) for name, value in metrics.items() if isinstance(value, int | float) and math.isfinite(value)
    }
