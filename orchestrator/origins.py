"""Whose measurements go to Ray, and under which name. Asked by whoever makes an actor, and for the driver itself."""

from penstock.conf.run import RunConfig
from penstock.metering.ray_export import Origin

DRIVER = "driver"


def origin_of(config: RunConfig, role: str, actor: str) -> Origin | None:
    """None where the run does not want them."""
    return Origin(config.name or "", role, actor) if "ray" in config.tracking.sinks else None
