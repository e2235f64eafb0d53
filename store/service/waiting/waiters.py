"""All callers that wait in a store: for leases and rounds by stage, and for credits."""

from functools import partial
from typing import Any

from penstock.store.ledger.ledger import Ledger
from penstock.store.service.clients import Clients
from penstock.store.service.waiting.answered import Answered
from penstock.store.service.waiting.consumers import Consumers
from penstock.store.service.waiting.nearness import Nearness
from penstock.store.service.waiting.pump import Pump
from penstock.store.service.waiting.puts import Puts
from penstock.store.service.waiting.ranks import Ranks
from penstock.store.service.waiting.slow import Slow


class Waiters:
    """The waiting callers of a store. Lifecycle: made before the first call, then told which clients leave, `close`."""

    def __init__(
        self, ledger: Ledger, clients: Clients, puts: Puts, pump: Pump, nearness: Nearness, slow: Slow
    ) -> None:
        self._clients, self._puts, self._pump = clients, puts, pump
        self.answered = Answered(clients)
        self.consumers: dict[str, Consumers] = {}
        self.ranks: dict[str, Ranks] = {}
        for index, stage in enumerate(ledger.spec.stages):
            schedule = partial(pump.wake_stage, index)
            self.consumers[stage.name] = Consumers(stage.name, ledger, clients, schedule, nearness, slow)
            self.ranks[stage.name] = Ranks(stage.name, ledger, schedule)
        self._queues: list[Consumers | Ranks] = [*self.consumers.values(), *self.ranks.values()]

    def __len__(self) -> int:
        """Number of calls that wait for leases and rounds."""
        return sum(map(len, self._queues))

    def left(self, client: str) -> None:
        """Remove a client that has left: it waits for nothing, and the others share without it."""
        self._puts.left(client)
        self.answered.left(client)
        self.retire(client)

    def retire(self, client: str) -> None:
        """Remove a client from those that wait for leases: it will not ask for any again."""
        for consumers in self.consumers.values():
            consumers.left(client)
            consumers.withdraw(client)
        self._pump.wake_all_stages()

    def describe(self) -> dict[str, Any]:
        """Return how many calls wait for what, and whose they are."""
        waiting = {name: len(self.consumers[name]) + len(self.ranks[name]) for name in self.consumers}
        owners = self._clients.owners()
        who = {name: [owners.get(one, "?") for one in some.waiting] for name, some in self.consumers.items()}
        return {"waiting": waiting | {"put": len(self._puts)}, "waiters": who}

    def close(self, reason: str) -> None:
        self._puts.close(reason)
        self.answered.close()
        for queue in self._queues:
            queue.close()
