"""Thins the points of a chart to fewer than there are steps, without hiding what stands out. Pure.

Points are put into as many buckets of equal width as the chart has pixels; of each bucket the mean is drawn, and its
least and largest values are a band around that. A spike of one step stays visible.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Thinned:
    steps: Values
    """Steps `[M]`; for a bucket, the step of its last point."""
    mean: Values
    low: Values | None = None
    """Least values `[M]`; None: no points were put together."""
    high: Values | None = None


def thinned(steps: Values, values: Values, most: int, first: float = -np.inf, last: float = np.inf) -> Thinned:
    """Thin a curve. `steps`: `[N]` ascending. `values`: `[N]`; those that are not finite are left out. `most`: most
    points of the result. `first`, `last`: only steps between these."""
    kept = np.isfinite(values) & (steps >= first) & (steps <= last)
    steps, values = steps[kept], values[kept]
    if len(steps) <= most:
        return Thinned(steps, values)
    width = (steps[-1] - steps[0]) / most
    bucket = np.minimum(((steps - steps[0]) / width).astype(np.int64), most - 1)
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    counts = np.diff(starts, append=len(steps))
    return Thinned(
        steps[starts + counts - 1],
        np.add.reduceat(values, starts) / counts,
        np.minimum.reduceat(values, starts),
        np.maximum.reduceat(values, starts),
    )
