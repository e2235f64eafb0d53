"""`rollout.num_workers=auto`: looks every few seconds whether the cluster has room for more engines.

Nodes that leave take their engines with them (`members.py`); engines are added here when there is room again, or for
the first time.
"""

import asyncio

from penstock.orchestrator.cluster.fleet.growth import Growth
from penstock.orchestrator.membership.members import Members
from penstock.orchestrator.membership.wishes import Wish

FOLLOW_S = 5.0
"""Seconds between two looks: nodes come and go by minutes, and a look costs milliseconds."""
LONGEST_S = 300.0
"""Longest pause in seconds after engines that did not start: what keeps them from it is not gone soon."""


def next_look_s(pause_s: float, wanted: int, came: int) -> float:
    """Seconds to wait until the next look: more each time that none of the wanted engines came.

    >>> next_look_s(5.0, 2, 0), next_look_s(40.0, 2, 1), next_look_s(200.0, 1, 0)
    (10.0, 5.0, 300.0)
    """
    return min(2 * pause_s, LONGEST_S) if wanted and not came else FOLLOW_S


class Following:
    """Lifecycle: `run` until it is cancelled."""

    def __init__(self, growth: Growth, members: Members) -> None:
        self._growth, self._members = growth, members

    async def run(self) -> None:
        pause_s = FOLLOW_S
        while True:
            await asyncio.sleep(pause_s)
            wanted = await asyncio.to_thread(self._growth.num_engines_more)
            came = 0
            if wanted:
                (done,) = await self._members.change([Wish("rollout", wanted, is_change=True)])
                came = len(done.joined)
            pause_s = next_look_s(pause_s, wanted, came)
