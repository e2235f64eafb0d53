"""A chart: the metrics that it shows, and how. `static/chart.js` and `pngs.py` draw it."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Curve:
    key: str
    """Name of the metric."""
    label: str
    low: str | None = None
    """Metric that a band around the curve reaches from; `high`: the one that it reaches to."""
    high: str | None = None


@dataclass(frozen=True)
class Chart:
    name: str
    """Name of the chart's PNG, and in addresses."""
    title: str
    theme: str
    curves: tuple[Curve, ...]
    unit: str = ""
    about: str = ""
    """Text on what the chart tells, and when to look closer."""
    stacked: bool = False
    log: bool = False
    percent: bool = False
    dots: bool = False
    """True if values are measured now and then, not at each step."""
    bound: float | None = None
    """Value of a dashed line that must not be passed."""
    bottom: float | None = None
    top: float | None = None

    @property
    def keys(self) -> list[str]:
        """All metrics in the chart."""
        every = [key for curve in self.curves for key in (curve.key, curve.low, curve.high) if key is not None]
        return list(dict.fromkeys(every))

    def plain(self) -> dict[str, Any]:
        """The chart as plain data."""
        return asdict(self)
