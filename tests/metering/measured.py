"""What `Meters` have, by the words of a series: `measured(meters)["reward_errors_total timeout"]`; what Ray gets."""

from typing import Any

import pytest
import ray.util.metrics

from penstock.metering.meters import ORIGIN, Meters, Series


def measured(meters: Meters) -> dict[str, float]:
    return {_words(series): value for series, value in meters.read().items()}


def _words(series: Series) -> str:
    return " ".join([series.name.removeprefix("penstock_"), *(value for _, value in series.labels)])


class Recording:
    """Ray's gauges, by what they are set to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        """By name and labels."""
        values = self.values

        class Gauge:
            def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
                self._name, self._keys = name, set(tag_keys)

            def set(self, value: float, tags: dict[str, str]) -> None:
                assert tags.keys() == self._keys >= set(ORIGIN)
                values[self._name, tuple(sorted(tags.items()))] = value

        def refused(*_: Any) -> None:
            raise AssertionError("Ray keeps its series when the process has ended")

        monkeypatch.setattr(ray.util.metrics, "Gauge", Gauge)
        for kind in ("Counter", "Histogram"):
            monkeypatch.setattr(ray.util.metrics, kind, refused)

    def series(self) -> set[str]:
        """Names of the series, with the values of labels that not all have."""
        return {
            " ".join([name, *(value for key, value in labels if key not in ORIGIN)]) for name, labels in self.values
        }
