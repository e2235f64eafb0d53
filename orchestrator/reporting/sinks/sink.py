"""What takes a step's numbers: metrics.jsonl always, others by `tracking.sinks` or of one's own.

The controller calls `log_to` once a step. A sink of one's own is any object with the two methods of `Sink`. One that
cannot write (`OSError`: its disk, its connection) costs its own numbers; whatever else it raises ends the run. Those
that talk to a service are behind a `Sender`, which raises nothing.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from penstock.orchestrator.recording.losses import Losses


class Sink(Protocol):
    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def log_to(sinks: Iterable[Sink], step: int, metrics: Mapping[str, Any], losses: Losses) -> None:
    """One step to each of them."""
    for sink in sinks:
        with losses.tolerating(type(sink).__name__):
            sink.log(step, metrics)


def close_sinks(sinks: Iterable[Sink], losses: Losses) -> None:
    for sink in sinks:
        with losses.tolerating(type(sink).__name__):
            sink.close()


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The entries that can be plotted."""
    return {
        name: float(value) for name, value in metrics.items() if isinstance(value, int | float) and math.isfinite(value)
    }
