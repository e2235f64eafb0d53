"""The weight sync: brings versions of the weights from the trainer's ranks to the engines.

    shm:      begin: ranks have their copies ─▶ (training may go on) ─▶ finish: it is sealed ─▶ engines load it
              (between nodes, relays bring it to the engines' while it is written: `nodes/weight_relays.py`)
    streams:  finish: ranks send ‖ engines receive, before the next update

What the two sides do is in `workers/weights/`; here are the order of the calls, and their deadlines.
"""

import asyncio
import time
from collections.abc import Awaitable
from typing import Any, cast

from penstock.conf.errors import DeadlineExceeded, NotStarted, WeightError, WorkerDied
from penstock.conf.run import RunConfig
from penstock.conf.weights import STREAMS, SYNC_PHASES, choose_transport
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.fleet.member_table import LOOK_S
from penstock.orchestrator.cluster.nodes.weight_relays import WeightRelays
from penstock.orchestrator.cluster.ray_calls import Handles, answers, failed, outcomes
from penstock.workers.protocols import Publication
from penstock.workers.weights.streaming.engine_calls import ActorEngines
from penstock.workers.weights.transport import Delivery


class WeightSync:
    """Lifecycle: `connect` once the fleet is started; then `begin`, `finish` and `load` for each version."""

    def __init__(self, fleet: Fleet, config: RunConfig) -> None:
        self._fleet, self._config, self._epoch = fleet, config, fleet.owner.epoch
        self._root = fleet.weights_root
        # Planned ones count: at a takeover all of them may be about to be replaced.
        self.has_engines = bool(fleet.role("rollout")) or any(actor.role == "rollout" for actor in fleet.plan)
        self._transport = choose_transport(config) if self.has_engines else "shm"
        self._streams = self._transport in STREAMS
        self._timeout_s = config.weights.phase_timeout_s
        self.goes_on_beside = self.has_engines and not self._streams
        """True if weights may change, and ranks compute, between `begin` and `finish`."""
        self._relays: WeightRelays | None = None
        self._newest: Delivery | None = None
        """The delivery that engines load, or have loaded, last."""
        self.loaded: dict[str, float] = {}
        """Time at which each engine had loaded it, in seconds since the epoch, by name."""
        self.serving: dict[str, int] = {}
        """The version that each engine has loaded last, by name."""

    async def connect(self) -> None:
        """Connect trainers and engines, where they need it: once they are started, and when the trainer's ranks are
        new. Raises `DeadlineExceeded`, `WeightError`."""
        if not self.has_engines:
            return
        if not self._streams:
            if self._relays is None:
                self._relays = WeightRelays(lambda: self._fleet.relay_nodes, self._timeout_s)
            await self._relays.plan(self._trainers, self._engines)
            return
        name, first = self._trainers[0]
        (address,) = await answers([(name, first.free_address.remote())], phase="connect", timeout_s=self._timeout_s)
        engines = ActorEngines(self._engines, self._config.rollout.tensor_parallel_size)
        arguments = self._transport, engines, address, str(self._root), self._config.weights
        await self._all(self._trainers, "connect", arguments, "connect trainers and engines")

    @property
    def is_cut_off(self) -> bool:
        """True if the newest version cannot be brought to where it is not yet, unless it is published again."""
        return self._relays is not None and self._relays.is_cut_off

    @property
    def has_lost_a_source(self) -> bool:
        """True if a node that the newest version comes from has left."""
        return self._relays is not None and bool(self._relays.lost_sources)

    async def begin(self, version: int) -> None:
        """Have the ranks take what a publication consists of, and write it. Nothing where there are no engines: a
        version that none loads is not written."""
        if not self.has_engines or self._streams:
            return
        await self._between_nodes.begin(version, self._trainers, self._engines)
        arguments, phase = (str(self._root), version, self._epoch), f"begin to publish version {version}"
        await self._all(self._trainers, "begin_publishing", arguments, phase, SYNC_PHASES)

    async def finish(self, version: int) -> Delivery:
        """Wait until the version that was begun is published. A stream is the whole transfer."""
        if not self.has_engines:
            return Publication("", version)
        phase = f"publish version {version}"
        if not self._streams:
            arguments = version, self._epoch
            publications = await self._all(self._trainers, "finish_publishing", arguments, phase, SYNC_PHASES)
            return cast(Delivery, publications[0])
        delivery = cast(Delivery, (await self._all(self._trainers, "prepare", (version,), phase))[0])
        calls = [(name, handle.send.remote(version)) for name, handle in self._trainers]
        calls += [(name, handle.load.remote(delivery)) for name, handle in self._engines]
        await answers(calls, phase=f"send version {version}", timeout_s=SYNC_PHASES * self._timeout_s)
        self.loaded = {name: time.time() for name, _ in self._engines}
        self.serving |= dict.fromkeys(self.loaded, version)
        return delivery

    async def load(self, delivery: Delivery) -> float:
        """Have every engine that is there load and serve the version. Returns the seconds. An engine that dies
        meanwhile, or does not load it in time, is ended: the supervisor makes another."""
        start = time.time()
        if self.has_engines and not self._streams:
            await self._between_nodes.wait(delivery.version)
            engines = await self._engines_with_it()
            self._newest = delivery
            phase = f"load version {delivery.version}"
            self.loaded = {}
            calls = [
                (name, self._timed(name, delivery.version, handle.load.remote(delivery, self._epoch)))
                for name, handle in engines
            ]
            results = await outcomes(calls, phase=phase, timeout_s=SYNC_PHASES * self._timeout_s)
            self._fleet.remove(failed(dict(zip([name for name, _ in calls], results, strict=True))))
            await self._between_nodes.reclaim()
        return time.time() - start

    async def reload(self) -> None:
        """Have every engine load the version again that was loaded last, if any: those that slept may have kept
        none."""
        if self._newest is not None:
            await self.load(self._newest)

    async def _engines_with_it(self) -> Handles:
        """The engines on whose nodes the version is that was waited for. It is brought to those that have come since it
        began. Where that cannot be they are ended, and who takes their places waits for the next one."""
        while late := self._between_nodes.late(self._engines):
            if not await self._between_nodes.bring(late):
                self._fleet.remove([name for name, _ in late])
                break
        without = {name for name, _ in late}
        return [(name, handle) for name, handle in self._engines if name not in without]

    async def _timed(self, name: str, version: int, call: Awaitable[Any]) -> Any:
        result = await call
        self.loaded[name], self.serving[name] = time.time(), version
        return result

    async def catch_up(self, members: Handles) -> None:
        """Have engines that have just started load the version that the others serve. It is brought to their node
        first, if it is not there. The caller may await nothing between this and adding them to the fleet. Raises
        `WeightError`, `DeadlineExceeded`, `WorkerDied`."""
        loaded: Delivery | None = None
        while self._newest is not None and loaded is not self._newest:
            await self._reached(members)
            loaded = self._newest
            try:
                phase = f"load version {loaded.version}"
                await self._all(members, "load", (loaded, self._epoch), phase, SYNC_PHASES)
                self.serving |= dict.fromkeys((name for name, _ in members), loaded.version)
            except WeightError:
                if loaded is self._newest:
                    raise  # else its file has been used again meanwhile

    async def _reached(self, members: Handles) -> None:
        """Wait until the newest version lies where these engines are. Raises `DeadlineExceeded`."""
        longest_s = self._config.trainer.step_timeout_s + SYNC_PHASES * self._timeout_s
        give_up = time.monotonic() + longest_s
        while not await self._between_nodes.bring(members):
            if time.monotonic() > give_up:
                names = ", ".join(name for name, _ in members)
                raise DeadlineExceeded(f"no version of the weights came to the node of {names} within {longest_s:g} s.")
            await asyncio.sleep(LOOK_S)

    @property
    def _trainers(self) -> Handles:
        """The ranks. Raises `WorkerDied` where there are none: the process that drove the run before died when it had
        just lost them."""
        if not (ranks := self._fleet.role("trainer")):
            raise WorkerDied("no rank of the trainer is there.")
        return ranks

    @property
    def _engines(self) -> Handles:
        return self._fleet.role("rollout")

    @property
    def _between_nodes(self) -> WeightRelays:
        if self._relays is None:
            raise NotStarted("A version of the weights before trainers and engines have met: `connect` first.")
        return self._relays

    async def _all(
        self, members: Handles, method: str, arguments: tuple[Any, ...], phase: str, phases: int = 1
    ) -> list[Any]:
        calls = [(name, getattr(handle, method).remote(*arguments)) for name, handle in members]
        return await answers(calls, phase=phase, timeout_s=phases * self._timeout_s)
