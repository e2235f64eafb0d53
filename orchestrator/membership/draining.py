"""Lets members finish what they have before they leave."""

from penstock.orchestrator.cluster.fleet.roster import Members
from penstock.orchestrator.cluster.ray_calls import outcomes

GRACE_S = 30.0
"""Seconds beyond its drain time for a member to say that it has finished."""


async def drain(members: Members, drain_s: float) -> None:
    """Drain members. One that is dead, or does not say in time that it has finished, is left as it is."""
    calls = [(name, handle.drain.remote(drain_s)) for name, handle in members]
    await outcomes(calls, phase="drain", timeout_s=drain_s + GRACE_S)
