"""Loans: engines that work for another caller than their role for a while, and keep their version of the weights.

    take        out of the role ─▶ the store grants them nothing more ─▶ environments have the list without them
    drain       what they hold is done
    …           others load newer versions, and serve them
    give_back   they load the newest version ─▶ in the role, from where they are served the store again

No token gets too old by it (`store/ledger/admission.py`): no version is reported as served while engines are taken, so
all that a lent engine finishes was admitted under its own version or an older one. An engine loads an older version
(`evaluations.py`) once it is drained, and has the newest one when it serves again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection

from penstock.conf.errors import PenstockError
from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.fleet.member_table import LOOK_S
from penstock.orchestrator.cluster.ray_calls import Handles, is_recoverable, try_all
from penstock.orchestrator.recovery.restart import CatchUp

GRACE_S = 30.0
"""Seconds beyond the time of a group for an engine to say that it has finished."""


class EngineLoans:
    """Lifecycle: `take` engines, `drain` them, use them, `give_back` them; any number of times, also side by side.

        engines = await loans.take(["Rollout-1"])
        engines = await loans.drain(engines)
        ...
        await loans.give_back(engines)

    An engine that dies meanwhile is replaced (`recovery/restart.py`), and its loan is over.
    """

    def __init__(self, fleet: Fleet, config: RunConfig, catch_up: CatchUp, tell: Callable[[], Awaitable[bool]]) -> None:
        """`catch_up`: what engines do before they are in their role again. `tell`: tells the environments which engines
        are in the role; returns whether all know it."""
        self.serving = asyncio.Lock()
        """Lock of a caller that brings a version to the engines and reports it: none is taken meanwhile."""
        self._fleet, self._catch_up, self._tell = fleet, catch_up, tell
        self._timeout_s = config.weights.phase_timeout_s
        self._drain_s = config.rollout.generate_timeout_s

    async def take(self, names: Collection[str]) -> Handles:
        """Take engines of these names out of their role. Returns those that are lent; one that does not answer serves
        on, or is replaced. For callers that do not hold `serving`."""
        async with self.serving:
            return await self._take(names)

    async def _take(self, names: Collection[str]) -> Handles:
        wanted = [(name, handle) for name, handle in self._fleet.role("rollout") if name in names]
        self._fleet.lend([name for name, _ in wanted])
        heard = await try_all(wanted, "retire", phase="take no more groups", timeout_s=self._timeout_s)
        lent = [one for one, answer in zip(wanted, heard, strict=True) if not isinstance(answer, Exception)]
        if lent and not await self._all_know():
            lent = []
        await self.give_back([one for one in wanted if one not in lent])
        return lent

    async def drain(self, engines: Handles) -> Handles:
        """Wait until engines have done what they hold; what takes longer than a group may is given back to the store.
        Returns those that are there."""
        timeout_s = self._drain_s + GRACE_S
        heard = await try_all(engines, "drain", self._drain_s, phase="drain", timeout_s=timeout_s)
        lost = [one for one, answer in zip(engines, heard, strict=True) if isinstance(answer, Exception)]
        self.end(lost)
        return [one for one in engines if one not in lost]

    async def give_back(self, engines: Handles) -> None:
        """Have engines load the newest version, and put them into their role. One that cannot is ended, and
        replaced."""
        await asyncio.gather(*(self._give_back(name, handle) for name, handle in engines))

    async def catch_up(self, engines: Handles) -> Handles:
        """Have lent engines load the newest version. Returns those that have; one that cannot is ended, and
        replaced."""
        loaded = await asyncio.gather(*(self.has_loaded(one, self._catch_up) for one in engines))
        return [one for one, has_loaded in zip(engines, loaded, strict=True) if has_loaded]

    async def update(self, engines: Handles) -> None:
        """Have engines load the newest version one after the other, each once it has done what it holds, while all
        others work on. For a caller that holds `serving`. Where only one is not lent, nobody samples until its longest
        sequence has ended: it can neither load before that nor begin another."""
        for name, _ in engines:
            await self.give_back(await self.drain(await self._take([name])))

    def end(self, engines: Handles) -> None:
        """End lent engines that do not answer: others take their places."""
        self._fleet.remove([name for name, handle in engines if self._is_lent(name, handle)])

    async def _give_back(self, name: str, handle: object) -> None:
        if await self.has_loaded((name, handle), self._catch_up):  # nothing else is awaited after `catch_up`
            self._fleet.take_back([name])

    async def has_loaded(self, engine: tuple[str, object], load: CatchUp) -> bool:
        """Have a lent engine load a version, by `load`. False: it is lent no more, or could not, and is ended and
        replaced. Raises what would come again with another engine."""
        if not self._is_lent(*engine):
            return False
        try:
            await load([engine])
        except PenstockError as error:
            if not is_recoverable(error):
                raise
            self.end([engine])
        return self._is_lent(*engine)

    def _is_lent(self, name: str, handle: object) -> bool:
        return (name, handle) in self._fleet.lent()

    async def _all_know(self) -> bool:
        """Wait until all environments know the engines that are in the role. False: not in time."""
        try:
            async with asyncio.timeout(self._timeout_s):
                while not await self._tell():
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            return False
        return True
