"""What a fleet says of files where every rank sees the driver's disk. For fleets of tests."""

from collections.abc import Callable
from typing import Any


class OneMachine:
    """`places` and `collect` of a `Fleet`. `role`: its own."""

    def __init__(self, role: Callable[[str], Any]) -> None:
        self._role = role

    async def places(self, directory: str) -> dict[str, str]:
        return {name: directory for name, _ in self._role("trainer")}

    async def collect(self, directory: str, places: dict[str, str]) -> None:
        assert set(places.values()) == {directory}
