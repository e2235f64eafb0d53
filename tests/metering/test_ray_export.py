"""Exporting disturbs nobody, whether or not Ray is there. What a real Prometheus gets of it is in
`tests/ui/grafana/`."""

import pytest

from penstock.metering.meters import Meters
from penstock.metering.ray_export import Origin, RayExport, exporting
from penstock.metering.table import REWARD_LATENCY, REWARD_SAMPLES, ROLLOUT_RUNNING
from tests.metering.measured import Recording

WHO = Origin("sums", "0123abcd", "rollout", "Rollout-0")


def test_without_ray_nothing_breaks() -> None:
    meters = Meters()
    meters.add(REWARD_SAMPLES, 0)
    meters.put(ROLLOUT_RUNNING, 1.0)
    meters.observe(REWARD_LATENCY, 0.5)
    RayExport(meters, WHO).flush()


def test_what_ray_keeps_of_ended_processes_is_never_made(monkeypatch: pytest.MonkeyPatch) -> None:
    recording, meters = Recording(monkeypatch), Meters()
    export = RayExport(meters, WHO)
    for _ in range(2):
        meters.add(REWARD_SAMPLES, 3)
        meters.observe(REWARD_LATENCY, 0.5)
        export.flush()
    assert {name: value for (name, _), value in recording.values.items()} == {
        "penstock_reward_samples_total": 6, "penstock_reward_latency_seconds_sum": 1.0,
        "penstock_reward_latency_seconds_count": 2,
    }  # fmt: skip


def test_two_runs_of_one_name_are_two_series(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = Recording(monkeypatch)
    for run_id in ("0123abcd", "4567abcd"):
        with exporting(Origin("sums", run_id, "driver", "driver")) as meters:
            meters.put(ROLLOUT_RUNNING, 1.0)
    assert len(recording.values) == 2


def test_what_was_measured_last_is_handed_over_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = Recording(monkeypatch)
    with exporting(WHO) as meters:
        meters.add(REWARD_SAMPLES)
    assert list(recording.values.values()) == [1]


def test_without_an_origin_it_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = Recording(monkeypatch)
    with exporting(None) as meters:
        meters.add(REWARD_SAMPLES)
    assert not recording.values
