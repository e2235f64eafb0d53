"""Brings versions of the weights from the trainer's ranks to the engines, and tells the store, also where ranks are
lost on the way: the step that a version came from is trained, so others publish it again.

    publish ─▶ the ranks may go on      seal ─▶ the next step counts, once it is made
                                        load ─▶ every engine serves it      tell ─▶ the store may admit prompts

With `max_staleness=0`, and where weights are streamed, `publish` waits for the seal, too. A step is not noted before
the version of the step before is sealed. So ranks that take the place of lost ones have the step of the version that is
not sealed, and publish it again before they make another; or they have the step before, where that one did not count
yet: then it is published once they have made it again (`steps.py`).

The calls of the transfer are in `cluster/weight_sync.py`; ranks are replaced by `membership/trainer_recovery.py`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from penstock.conf.errors import PenstockError
from penstock.orchestrator.cluster.failures import Kind, kind_of
from penstock.orchestrator.cluster.weight_sync import WeightSync
from penstock.orchestrator.control.colocation import DeviceTurns
from penstock.orchestrator.membership.store_recovery import StoreRecovery
from penstock.orchestrator.membership.trainer_recovery import TrainerRecovery
from penstock.orchestrator.run_directory.timeline import Timeline
from penstock.workers.weights.transport import Delivery


class Versions:
    """Lifecycle: `publish`, `seal`, `load` and `tell` for each version, one after the other; the ranks may make the
    next step once it is published, and whoever counts that step waits for `sealed` first."""

    def __init__(
        self,
        weights: WeightSync,
        ranks: TrainerRecovery,
        turns: DeviceTurns,
        stores: StoreRecovery,
        timeline: Timeline,
        before: int,
        beside: bool = False,
    ) -> None:
        """`before`: the last step before this process. `beside`: the ranks need not wait until a version is sealed."""
        self._weights, self._ranks, self._turns = weights, ranks, turns
        self._stores, self._timeline = stores, timeline
        ranks.republish = self._republish
        self._present: Callable[[], Awaitable[None]] = ranks.when_back
        self._counts_not_yet: Callable[[int], bool] = lambda step: False
        self._goes_on = beside and weights.goes_on_beside
        self._unsealed: int | None = None
        """The version that ranks have begun to publish."""
        self._delivery: Delivery | None = None
        """The delivery of the version that was sealed last."""
        self._is_sealed = asyncio.Event()
        self._told = before
        """The newest version that the store was told of, which every engine serves."""
        self._on_its_way: Delivery | None = None
        """The delivery that engines are about to load."""

    def state(self) -> dict[str, Any]:
        """The version that was told, and the one that each engine serves, for people."""
        on_its_way = self._on_its_way.version if self._on_its_way is not None else None
        return {"told": self._told, "loading": on_its_way, "serving": dict(self._weights.serving)}

    def follow(self, present: Callable[[], Awaitable[None]], counts_not_yet: Callable[[int], bool]) -> None:
        """Publish what ranks make whose steps may count later. `present`: waits until they have the state after the
        newest. `counts_not_yet`: returns whether that is so of a step."""
        self._present, self._counts_not_yet = present, counts_not_yet

    async def publish(self, version: int) -> float:
        """Publish the ranks' weights as a version. Returns the seconds for which the ranks could not go on to the next
        step."""
        start = time.time()

        async def begin() -> None:
            await self._present()
            await self._weights.begin(version)

        await self._ranks.with_ranks(begin)
        self._unsealed = version
        self._is_sealed.clear()
        if not self._goes_on:
            await self._seal(version)
        self._timeline.span("trainer", "publish", start, time.time(), version=version)
        return time.time() - start

    async def seal(self) -> Delivery:
        """Wait until the version that was published last is sealed. Returns its delivery."""
        if (version := self._unsealed) is not None:
            start = time.time()
            await self._seal(version)
            self._timeline.span("weights", "publish", start, time.time(), version=version)
        assert self._delivery is not None
        return self._delivery

    async def begin_again(self, version: int) -> None:
        """Publish a version again whose step was made again, if it had begun; `seal` waits for the rest."""
        if version == self._unsealed:
            await self._weights.begin(version)

    async def sealed(self, before: int) -> None:
        """Wait until `seal`, which another task waits for, has come to its end for the versions before that one. At
        once where none is under way."""
        if (version := self._unsealed) is not None and version < before:
            start = time.time()
            await self._is_sealed.wait()
            self._timeline.span("trainer", "wait for the version before", start, time.time(), version=version)

    async def load(self, delivery: Delivery) -> float:
        """Have every engine load the version. Returns the seconds."""
        await self._turns.generation()
        start, self._on_its_way = time.time(), delivery
        while True:
            await self._turns.generation()  # again after a restart of the ranks
            incarnation, delivery = self._ranks.incarnation, self._on_its_way
            try:
                seconds = await self._weights.load(delivery)
                break
            except PenstockError as failure:
                if kind_of(failure) is Kind.DEATH:  # of a node with ranks, before all of the version was elsewhere
                    await self._ranks.recovered(failure, incarnation)
                await self._ranks.when_back()  # ranks that come at this moment give up what is under way
                if self._on_its_way is delivery:
                    raise
        self._on_its_way = None
        for name, end in self._weights.loaded.items():
            self._timeline.span(name, "load weights", start, end, version=delivery.version)
        return seconds

    async def tell(self, version: int, max_active: int | None = None) -> None:
        """Tell the store of a version, once every engine serves it. `max_active`: see `StoreClient.served`."""
        await self._stores.served(version, max_active)
        self._told = version

    async def _seal(self, version: int) -> None:
        self._delivery = await self._ranks.with_ranks(lambda: self._weights.finish(version))
        self._unsealed = None
        self._is_sealed.set()

    async def _republish(self, trained: int, failure: PenstockError) -> None:
        """Publish the version of that step again, if it is not sealed, or part of the newest one is gone. Raises the
        failure where the newest is another version, which no rank has any more."""
        if self._unsealed is not None and not self._counts_not_yet(self._unsealed):
            if trained != self._unsealed:
                raise failure
            await self._weights.begin(trained)  # `seal` waits for the rest
        elif not self._weights.is_cut_off:
            return
        elif self._on_its_way is None:
            if trained == self._told:  # else the next one comes at once
                await self._weights.load(await self._again(trained))
        elif trained == self._on_its_way.version:
            self._on_its_way = await self._again(trained)
        elif self._weights.has_lost_a_source:
            raise failure

    async def _again(self, version: int) -> Delivery:
        await self._weights.begin(version)
        return await self._weights.finish(version)
