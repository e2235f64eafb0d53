"""Sinks, which take a step's metrics: metrics.jsonl always, others by `tracking.sinks` or of the user's own.

The controller calls `log_to` once a step. A user's sink is any object with the two methods of `Sink`. One that cannot
write (`OSError`: its disk, its connection) loses its own metrics only; any other error ends the run. Sinks that talk to
a service are behind a `Sender`, which raises nothing.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from penstock.orchestrator.run_directory.losses import Losses


class Sink(Protocol):
    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def log_to(sinks: Iterable[Sink], step: int, metrics: Mapping[str, Any], losses: Losses) -> None:
    """Give one step to each sink."""
    for sink in sinks:
        with losses.tolerating(type(sink).__name__):
            sink.log(step, metrics)


def close_sinks(sinks: Iterable[Sink], losses: Losses) -> None:
    for sink in sinks:
        with losses.tolerating(type(sink).__name__):
            sink.close()


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that can be plotted."""
    return {
        name: float(value) for name, value in metrics.items() if isinstance(value, int | float) and math.isfinite(value)
    }
