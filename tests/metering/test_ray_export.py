"""Exporting disturbs nobody, whether or not Ray is there. What a real Prometheus gets of it is in
`tests/orchestrator/observability/grafana/`."""

from penstock.metering.meters import Meters
from penstock.metering.ray_export import Origin, RayExport, exporting
from penstock.metering.table import REWARD_LATENCY, REWARD_SAMPLES, ROLLOUT_RUNNING

ORIGIN = Origin("sums", "rollout", "Rollout-0")


def test_without_ray_nothing_breaks_and_nothing_piles_up() -> None:
    meters = Meters()
    export = RayExport(meters, ORIGIN)
    meters.add(REWARD_SAMPLES, 0)
    meters.put(ROLLOUT_RUNNING, 1.0)
    meters.observe(REWARD_LATENCY, 0.5)
    export.flush()
    assert not meters.drain().counts


def test_what_was_measured_last_is_handed_over_at_the_end() -> None:
    with exporting(ORIGIN) as meters:
        meters.add(REWARD_SAMPLES)
    assert not meters.drain().counts


def test_without_an_origin_it_stays_where_it_is() -> None:
    with exporting(None) as meters:
        meters.add(REWARD_SAMPLES)
    assert meters.drain().counts
