"""One chart: which metrics it shows, and how. Made by `themes.py`; drawn by `static/chart.js` and `pngs.py`."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Curve:
    key: str
    """The metric."""
    label: str
    low: str | None = None
    """Metrics that a band around it reaches from and to."""
    high: str | None = None


@dataclass(frozen=True)
class Chart:
    name: str
    """Of the PNG, and in addresses."""
    title: str
    theme: str
    curves: tuple[Curve, ...]
    unit: str = ""
    about: str = ""
    """What it tells, and when to look closer."""
    stacked: bool = False
    log: bool = False
    percent: bool = False
    dots: bool = False
    """Measured now and then, not at each step."""
    bound: float | None = None
    """A dashed line: what must not be passed."""
    bottom: float | None = None
    top: float | None = None

    @property
    def keys(self) -> list[str]:
        """Every metric in it."""
        every = [key for curve in self.curves for key in (curve.key, curve.low, curve.high) if key is not None]
        return list(dict.fromkeys(every))

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)
