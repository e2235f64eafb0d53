"""What `Meters` have, by the words of a series: `measured(meters).counts["penstock_reward_errors_total timeout"]`."""

from types import SimpleNamespace
from typing import Any

from penstock.metering.meters import Meters, Series


def measured(meters: Meters) -> Any:
    """Drained: `counts`, `values` and `observed`."""
    drained = meters.drain()
    return SimpleNamespace(
        **{
            kind: {_words(series): value for series, value in getattr(drained, kind).items()}
            for kind in ("counts", "values", "observed")
        }
    )


def _words(series: Series) -> str:
    metric, labels = series
    return " ".join([metric.name.removeprefix("penstock_"), *(value for _, value in labels)])
