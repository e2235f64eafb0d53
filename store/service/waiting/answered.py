"""Engines that sample a group which another has answered meanwhile: they wait to be told, and stop. See
`ledger/stragglers.py`."""

from penstock.store.service.clients import Clients
from penstock.store.service.waiting.wait_queue import WaitQueue

Answer = tuple[int, int]
"""A lease and a group of it."""


class Answered:
    """The answers that clients wait for. Lifecycle: `wait` and `tell` in any order, `left` for each client,
    `close`."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._queue = WaitQueue(lambda: None)
        self._due: dict[str, list[Answer]] = {}
        """Answers that a client has not been told yet, by client."""

    def tell(self, answers: list[Answer]) -> None:
        for lease_id, group in answers:
            if (client := self._clients.of_lease(lease_id)) is not None:
                self._due.setdefault(client, []).append((lease_id, group))
        if answers:
            self._queue.wake_all()

    async def wait(self, client: str) -> list[Answer] | None:
        """Wait for what has been answered since the last time. None once closed."""
        return await self._queue.wait(lambda: self._due.pop(client, None), client, at_once=True)

    def left(self, client: str) -> None:
        self._due.pop(client, None)
        self._queue.withdraw(client)

    def close(self) -> None:
        self._queue.close()
