"""Selects the metrics that a tracker has not had yet. Pure."""

from collections.abc import Mapping


class NewSteps:
    """Selects new steps: a run that goes on from a checkpoint takes some steps again. Trackers keep what they had
    first: a curve that goes back is drawn as a zigzag, and W&B refuses it.

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
