"""The weight sync: brings versions of the weights from the trainer's ranks to the engines.

    shm:      begin: ranks have their copies ─▶ (training continues) ─▶ finish: it is sealed ─▶ engines load it
              (between nodes, `WeightRelays` bring it to the engines' while it is written)
    streams:  finish: ranks send ‖ engines receive, before the next update

Between nodes:

    ranks are new  every rank: plan_chunks ─▶ plan ─▶ every relay; a node that joins gets the plan later
    each version   begin on every relay ─▶ ranks publish ─▶ wait on those of nodes with engines ─▶ engines load
    a node joins   bring: its relay alone begins the newest version, which the other relays still have

A node's relay is in its agent (`workers/weights/chain/relay.py`). Where all ranks and engines see the same shared
memory none is needed. What the two sides do is in `workers/weights/`; here are the order of the calls, and their
deadlines.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, cast

from penstock.conf.errors import DeadlineExceeded, NotStarted, WeightError, WorkerDied
from penstock.conf.run import RunConfig
from penstock.conf.weights import STREAMS, SYNC_PHASES, choose_transport, replaces_members
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.fleet.member_table import LOOK_S
from penstock.orchestrator.cluster.node_agents import RelayNodes
from penstock.orchestrator.cluster.ray_calls import (
    Handles,
    Kind,
    answers,
    call_all,
    failed,
    kind_of,
    outcomes,
    translate,
    try_all,
)
from penstock.workers.protocols import Publication
from penstock.workers.weights.chain.plan import Broadcast, ChunkPlan
from penstock.workers.weights.engine_calls import ActorEngines, Delivery
from penstock.workers.weights.publication.publication_files import publication_directory

SOURCE_CHECK_S = 0.2
"""Seconds between two checks that the nodes a version comes from are alive."""
EPOCH_BITS = 32
"""Number of low bits in a broadcast's number that count; those above say which process has begun it."""
PASSED_ON_S = 3.0
"""Seconds within which all other nodes get what a node had sent before it was lost."""


class WeightRelays:
    """Lifecycle: `plan` whenever the trainer's ranks are new; then `begin`, `wait` and `reclaim` for each version.
    While all ranks and engines see the same shared memory, all but the last do nothing.

    Engines may come and go: a version goes to the nodes that have engines, or are to have, when it begins, and is
    brought to those that come later. A node is known by its agent: what lay there is gone with it.
    """

    def __init__(self, look: Callable[[], RelayNodes], timeout_s: float) -> None:
        """`look`: the present nodes. `timeout_s`: deadline of each phase."""
        self._look, self._timeout_s = look, timeout_s
        self._nodes = look()
        """Nodes as they were when the newest version began."""
        self._sources: list[str] = []
        self._receivers: list[str] = []
        """Receivers of the newest version that has begun."""
        self._reached: dict[str, Any] = {}
        """Agent of each node that has the newest version that was waited for."""
        self._plan: ChunkPlan | None = None
        self._crosses_nodes = False
        """True once ranks and engines were on several nodes: then there is a plan; it stays so."""
        self._told: dict[str, Any] = {}
        """Agent of each node that knows the plan."""
        self._number = 0
        self._begun: Broadcast | None = None
        """The newest broadcast."""
        self._whole: Broadcast | None = None
        """The newest broadcast that was waited for, and that nodes still send."""
        self._is_outdated = False
        """True if the newest version was cut by another plan than the present one."""
        self._bringing = asyncio.Lock()
        self._sending: dict[str, Any] = {}
        """Agent of each node that the newest version comes from."""

    async def plan(self, trainers: Handles, engines: Handles) -> None:
        """Have new ranks plan their chunks, if several nodes take part. Raises `WeightError`, `DeadlineExceeded`.

        The version that nodes still send stays theirs, unless these ranks plan otherwise: an engine whose node was away
        may need it before there can be another."""
        whole, planned = self._whole, self._plan
        self._crosses_nodes, self._whole = False, None
        self._update_nodes(trainers, engines)
        await self._plan_if_needed(trainers)
        if self._plan == planned:
            self._whole = whole
        self._is_outdated = whole is not None and self._whole is None

    async def begin(self, version: int, trainers: Handles, engines: Handles) -> None:
        """Begin a version, before the ranks publish it. Raises `WeightError`, e.g. where a node has no room."""
        self._update_nodes(trainers, engines)
        await self._plan_if_needed(trainers)
        self._whole, self._is_outdated = None, False
        if not self._crosses_nodes:
            return
        self._number = max(self._number, self._nodes.epoch << EPOCH_BITS) + 1
        self._begun = self._broadcast(self._nodes, version, self._receivers)
        self._sending = self._nodes.agents_of(self._sources)
        await self._tell(self._nodes, self._used, "begin_version", self._begun, phase=f"begin version {version}")

    async def wait(self, version: int) -> None:
        """Wait until every node with engines has all of a version. Raises `WeightError`, `DeadlineExceeded`, and
        `WorkerDied` where that cannot be, as a node that it comes from is gone."""
        if self._crosses_nodes:
            phase = f"bring version {version} to nodes"
            await self._while_sources_stay(
                self._tell(self._nodes, self._receivers, "wait_for_version", version, self._timeout_s, phase=phase)
            )
            self._whole = self._begun
        self._reached = self._nodes.agents_of(self._receivers if self._crosses_nodes else self._used)

    @property
    def needs_republication(self) -> bool:
        """True if the newest version cannot be brought to where it is not yet: a node that it comes from has left, or
        the ranks that are there now have another plan."""
        return self._is_outdated or bool(self.lost_sources)

    @property
    def lost_sources(self) -> list[str]:
        """Nodes that the newest version has come from, or was to come from, and that are gone."""
        now = self._look()
        there = now.agents_of(self._sending)
        return [node for node, agent in self._sending.items() if there.get(node) is not agent]

    async def _while_sources_stay(self, telling: Awaitable[None]) -> None:
        """Wait while the sources are there. Once one is lost, the other relays pass on what it had sent; the rest
        is lost."""
        waiting, lost_at = asyncio.ensure_future(telling), None
        try:
            while not waiting.done():
                await asyncio.wait({waiting}, timeout=SOURCE_CHECK_S)
                if not (lost := self.lost_sources):
                    lost_at = None
                    continue
                lost_at = lost_at or time.monotonic()
                if time.monotonic() > lost_at + PASSED_ON_S and not waiting.done():
                    raise WorkerDied(f"{', '.join(lost)}: gone before the others had the weights from there.")
            await waiting
        finally:
            waiting.cancel()

    async def reclaim(self) -> None:
        """Remove old publications once engines have loaded a newer one."""
        await self._tell(self._nodes, self._used, "reclaim_versions", phase="reclaim publications", needed=())

    async def keep(self, version: int | None) -> bool:
        """Have nodes that have a version keep it beside those that take turns; None: no other. Returns whether one
        has it. A node that does not answer keeps none."""
        phase = "keep a publication"
        nodes = list(self._look().agents.values())
        heard = await try_all(nodes, "keep_version", version, phase=phase, timeout_s=self._timeout_s)
        return any(answer is True for answer in heard)

    async def bring(self, engines: Handles) -> bool:
        """Bring the newest version to the nodes of engines that have come since it began. False: it cannot be brought
        there, as a newer one is under way, none has been between nodes so far, or part of it is lost with a node; the
        next one will be there by itself. Raises `WeightError`, `DeadlineExceeded`."""
        async with self._bringing:
            now, whole = self._look(), self._whole
            late = sorted({now.node_of[name] for name, _ in self._late(now, engines)})
            if not late or whole is None or self.lost_sources:
                return not late
            broadcast = self._broadcast(now, whole.version, sorted({*whole.receivers, *late}))
            phase = f"bring version {whole.version} to nodes"
            try:
                await self._tell_plan(now, late)
                await self._tell(now, late, "begin_version", broadcast, phase=phase)
                await self._tell(now, late, "wait_for_version", whole.version, self._timeout_s, phase=phase)
            except WeightError:
                if self._whole is whole:
                    raise
            if self._whole is not whole:
                return False
            self._reached |= now.agents_of(late)
            return True

    def late(self, engines: Handles) -> Handles:
        """Those of the engines on whose nodes the newest version that was waited for is not."""
        return self._late(self._look(), engines)

    def _late(self, now: RelayNodes, engines: Handles) -> Handles:
        """As `late`, without engines whose node has left."""
        there = now.agents_of(now.node_of[name] for name, _ in engines if name in now.node_of)
        nodes = {node for node, agent in there.items() if self._reached.get(node) is not agent}
        return [(name, handle) for name, handle in engines if now.node_of.get(name) in nodes]

    @property
    def _used(self) -> list[str]:
        return list(dict.fromkeys([*self._sources, *self._receivers]))

    def _update_nodes(self, trainers: Handles, engines: Handles) -> None:
        self._nodes = self._look()
        node_of = self._nodes.node_of
        if gone := [name for name, _ in trainers if name not in node_of]:
            raise WorkerDied(f"{', '.join(gone)}: gone with the node.")
        self._sources = [node_of[name] for name, _ in trainers]
        names = {*(name for name, _ in engines), *self._nodes.engines}
        self._receivers = sorted({node_of[name] for name in names if name in node_of})

    async def _plan_if_needed(self, trainers: Handles) -> None:
        """Have the ranks plan once, and tell the plan to nodes that do not know it."""
        if not self._crosses_nodes:
            if len(self._used) == 1:
                return
            num_receivers = len(self._receivers)
            calls = [
                (name, handle.plan_chunks.remote(node, num_receivers))
                for (name, handle), node in zip(trainers, self._sources, strict=True)
            ]
            self._plan = (await answers(calls, phase="plan publications", timeout_s=self._timeout_s))[0]
            self._crosses_nodes, self._told = True, {}
        await self._tell_plan(self._nodes, self._used)

    async def _tell_plan(self, now: RelayNodes, nodes: Sequence[str]) -> None:
        """Tell the plan to those of the nodes that do not know it."""
        if new := [node for node, agent in now.agents_of(nodes).items() if self._told.get(node) is not agent]:
            await self._tell(now, new, "plan_chunks", self._plan, phase="plan publications")
            self._told |= now.agents_of(new)

    def _broadcast(self, now: RelayNodes, version: int, receivers: Sequence[str]) -> Broadcast:
        """A broadcast of the newest number, between nodes that are there."""
        used = [node for node in dict.fromkeys([*self._sources, *receivers]) if node in now.addresses]
        there = [node for node in receivers if node in used]
        return Broadcast(self._number, version, there, {node: now.addresses[node] for node in used})

    async def _tell(
        self,
        now: RelayNodes,
        nodes: Sequence[str],
        method: str,
        *arguments: Any,
        phase: str,
        needed: Collection[str] | None = None,
    ) -> None:
        """Call a method on the relays of nodes. The failure of a node that is gone is ignored unless it is `needed`:
        its engines are gone with it, and no other node needs it. `needed` None: nodes with ranks."""
        needed = self._sources if needed is None else needed
        calls = []
        for node in nodes:
            name, handle = now.agents[node]
            call = getattr(handle, method).remote(*arguments)
            calls.append((name, call if node in needed else _unless_gone(name, call)))
        # A relay's own deadline comes first: it can say what is missing.
        await answers(calls, phase=phase, timeout_s=2 * self._timeout_s)


async def _unless_gone(name: str, call: Awaitable[Any]) -> None:
    try:
        await call
    except Exception as error:
        if kind_of(translate(error, name)) is not Kind.DEATH:
            raise


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
        self.publishes_beside = self.has_engines and not self._streams
        """True if weights may change, and ranks compute, between `begin` and `finish`."""
        self.can_reconnect = replaces_members(config) or not self.has_engines
        """True if new ranks can take the place of lost ones. Streams connect ranks and engines at the start alone."""
        self._relays: WeightRelays | None = None
        self.update: Callable[[Handles], Awaitable[None]] | None = None
        """Function by which engines take the newest version, where they finish their sequences first
        (`rollout.on_update=finish`); None: they load it at once."""
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
        (address,) = await self._all([(name, first)], "free_address", (), "connect")
        engines = ActorEngines(self._engines, self._config.rollout.tensor_parallel_size)
        arguments = self._transport, engines, address, self._config.weights
        await self._all(self._trainers, "connect", arguments, "connect trainers and engines")

    @property
    def needs_republication(self) -> bool:
        """True if the newest version cannot be brought to where it is not yet, unless it is published again."""
        return self._relays is not None and self._relays.needs_republication

    @property
    def has_lost_source(self) -> bool:
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
            checksum = sum(publication.checksum for publication in publications) % 2**128
            return replace(cast(Publication, publications[0]), checksum=checksum)
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
            if self.update is not None:
                await self.update(engines)
                engines = []
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
        began. Where that cannot be they are ended, and their replacements wait for the next one."""
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
        """Have engines that have just started load the version that all other engines serve. It is brought to their
        node first, if it is not there. The caller may await nothing between this and adding them to the fleet. Raises
        `WeightError`, `DeadlineExceeded`, `WorkerDied`."""
        loaded: Delivery | None = None
        while self._newest is not None and loaded is not self._newest:
            await self._wait_until_reached(members)
            loaded = self._newest
            try:
                phase = f"load version {loaded.version}"
                await self._all(members, "load", (loaded, self._epoch), phase, SYNC_PHASES)
                self.serving |= dict.fromkeys((name for name, _ in members), loaded.version)
                self.loaded |= dict.fromkeys((name for name, _ in members), time.time())
            except WeightError:
                if loaded is self._newest:
                    raise  # else its file has been used again meanwhile

    async def keep(self, version: int | None) -> bool:
        """Have nodes keep a version beside those that take turns, until the next call; None: no other. Returns whether
        it is there to be kept."""
        return await self._between_nodes.keep(version)

    async def load_kept(self, version: int, members: Handles) -> None:
        """Have lent engines load a version that their nodes keep. Raises `WeightError` where one has it no more."""
        await self.load_older(Publication(str(publication_directory(self._root, version)), version), members)

    async def load_older(self, publication: Publication, members: Handles) -> None:
        """Have lent engines load an older version, until they `catch_up`. Raises as that does."""
        phase = f"load version {publication.version}"
        await self._all(members, "load", (publication, self._epoch), phase, SYNC_PHASES)
        self.serving |= dict.fromkeys((name for name, _ in members), publication.version)

    async def _wait_until_reached(self, members: Handles) -> None:
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
        return await call_all(members, method, *arguments, phase=phase, timeout_s=phases * self._timeout_s)
