"""The interface of experiment trackers: what they are told of a run, and the three calls that tell it.

Each tracker is a file beside this one. It is called from a thread of its own: it may be slow, and raise anything.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from penstock.conf.errors import PenstockError, TakenOver
from penstock.conf.run import RunConfig
from penstock.orchestrator.observability.reporting.closing import cards_of
from penstock.orchestrator.run_directory.run_directory import RunDirectory

FINISHED, FAILED, INTERRUPTED, TAKEN_OVER = "finished", "failed", "interrupted", "taken_over"
DEFAULT_PROJECT = "penstock"


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
            name=directory.run_id,
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
        text = "" if error is None or is_interrupted else f"{type(error).__name__}: {error}"
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
