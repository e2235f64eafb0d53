"""Origins of measurements that go to Ray, by which their metrics are named: those of actors, and of the driver."""

from penstock.conf.run import RunConfig
from penstock.metering.ray_export import Origin

DRIVER = "driver"


def origin_of(config: RunConfig, role: str, actor: str) -> Origin | None:
    """The origin of an actor's measurements; None where the run exports none."""
    return Origin(config.name or "", role, actor) if "ray" in config.tracking.sinks else None
