"""Engines that follow the cluster: as soon as there is room, and seldom where they do not start. On a virtual clock."""

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.orchestrator.membership.following import FOLLOW_S, LONGEST_S, Following, next_look_s
from penstock.orchestrator.membership.wishes import Done, Wish
from tests.virtual_time import run_virtually


class Cluster:
    """Has room for so many more at each look, of which so many start."""

    def __init__(self, *looks: tuple[int, int]) -> None:
        self._looks = list(looks)
        self.wishes: list[tuple[float, Wish]] = []

    def num_engines_more(self) -> int:
        self._present = self._looks.pop(0) if self._looks else (0, 0)
        return self._present[0]

    async def change(self, wishes: list[Wish]) -> list[Done]:
        self.wishes += [(asyncio.get_running_loop().time(), wish) for wish in wishes]
        return [Done("rollout", 1, joined=["Rollout-1 on node"] * self._present[1])]


def test_room_is_taken_when_there_and_asked_for_less_often_while_nothing_starts() -> None:
    cluster: Any = Cluster((0, 0), (2, 2), (1, 0), (1, 0), (1, 1), (1, 1))

    async def main() -> None:
        following = asyncio.ensure_future(Following(cluster, cluster).run())
        await asyncio.sleep(100)
        following.cancel()

    run_virtually(main())
    one, two = Wish("rollout", 1, is_change=True), Wish("rollout", 2, is_change=True)
    assert cluster.wishes == [(10.0, two), (15.0, one), (25.0, one), (45.0, one), (50.0, one)]


@given(st.lists(st.booleans(), max_size=20))
def test_looks_are_never_too_often_nor_too_seldom(came: list[bool]) -> None:
    pause_s = FOLLOW_S
    for one in came:
        pause_s = next_look_s(pause_s, 1, int(one))
        assert FOLLOW_S <= pause_s <= LONGEST_S
        assert not one or pause_s == FOLLOW_S
    assert next_look_s(pause_s, 0, 0) == FOLLOW_S
