"""Members of the simulated fleet, and their answers. Engines, rewards and computed columns have the pull loops and
clients of real ones; what takes a GPU takes time."""

import asyncio
import contextlib
import tempfile
from collections.abc import Callable, Iterable, Mapping
from random import Random
from types import SimpleNamespace
from typing import Any

from benchmarks.controller.scale import LOAD_S, PUBLISH_S, TOKENS, TOKENS_PER_S, UPDATE_S
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.errors import LeaseExpired
from penstock.conf.run import RunConfig
from penstock.network.connection import Address
from penstock.orchestrator.cluster.placement.actors import ActorPlan
from penstock.store.client.store_client import StoreClient
from penstock.store.data.rows import Rows
from penstock.store.errors import StoreClosed
from penstock.workers.node.node_actor import ActorDirectory
from penstock.workers.protocols import Publication, Sampling
from penstock.workers.rollout.engine_scripted import ScriptedEngine, TimeModel
from penstock.workers.rollout.rollout_worker import GroupIntake, RolloutWorker
from penstock.workers.runtime.processes import ProcessId
from penstock.workers.runtime.serving import (
    IDLE,
    LOADING,
    PUBLISHING,
    SERVING,
    UPDATING,
    WAITING,
    Phases,
    Progress,
    Serving,
)
from penstock.workers.trainer.step_report import StepReport, TrainedRows
from penstock.workers.weights.chain.plan import Broadcast, ChunkPlan

UPDATE_METRICS = ("loss", "pg_loss", "kl", "entropy", "grad_norm", "clip_fraction", "lr", "padding_share")
PARTS = ("plan", "forward", "backward", "optimizer", "keep")
PROCESS = ProcessId.own()


class Member:
    """A member that answers what every actor does."""

    def __init__(self) -> None:
        self._phases = Phases()
        self._phases.enter(SERVING)

    async def process(self, stacks: str) -> ProcessId:
        return PROCESS

    async def progress(self) -> Progress:
        return self._phases.progress()

    async def stats(self) -> dict[str, float]:
        return {"busy_s": 0.0}


class PlayedStoreActor(Member):
    """A member beside the store's process, which is called over its connections: it answers what the watch asks of the
    actor."""

    async def process(self, stacks: str) -> tuple[int, tuple[str, ...]]:  # type: ignore[override]
        return PROCESS.pid, PROCESS.proof


class PlayedOwner(Member):
    """A member that keeps what a command leaves for the next one."""

    async def keep(self, epoch: int, state: bytes) -> None: ...

    async def note(self, epoch: int, step: bytes) -> None: ...

    async def renew(self, epoch: int) -> None: ...

    async def leave(self, epoch: int) -> None: ...

    async def end(self, epoch: int, name: str) -> None: ...


class Here:
    """A stand-in for a handle, of a member of this process."""

    def __init__(self, member: Member) -> None:
        self._member = member

    def __getattr__(self, method: str) -> SimpleNamespace:
        return SimpleNamespace(remote=getattr(self._member, method))


class PlayedAgent(Member):
    """The agent of a node."""

    def __init__(self, members: Mapping[str, Member]) -> None:
        """Prepare an agent. `members`: all of this process."""
        super().__init__()
        self._members, self._node_actors = members, ActorDirectory()

    async def run(self) -> None:
        await asyncio.Event().wait()

    take_question = run

    async def ask_members(
        self, method: str, names: list[str], timeout_s: float, members: dict[str, Any] | None
    ) -> dict[str, Any]:
        if members is not None:
            self._node_actors.set({name: Here(self._members[name]) for name in members})
        return await self._node_actors.ask(method, names, timeout_s)

    async def take_output(self, processes: Mapping[str, ProcessId]) -> dict[str, list[tuple[str, str]]]:
        return {}

    async def plan_chunks(self, plan: ChunkPlan) -> None: ...

    async def begin_version(self, broadcast: Broadcast) -> None: ...

    async def wait_for_version(self, version: int, timeout_s: float) -> None:
        await asyncio.sleep(PUBLISH_S)

    async def keep_version(self, version: int | None) -> bool:
        return False

    async def reclaim_versions(self) -> None: ...

    async def measure_link(self, address: Address) -> float:
        return 1e9

    async def fetch_states(self, trainer: str, copies: Mapping[int, int], source: Any) -> None:
        await asyncio.sleep(PUBLISH_S)

    async def scratch(self) -> str:
        return tempfile.mkdtemp(prefix="penstock-scratch-")


class Serves(Member):
    """A member that pulls from the store until it closes."""

    def __init__(self, serve: Callable[[StoreClient], Any]) -> None:
        super().__init__()
        self._serving = Serving(serve)

    async def run(self, store: Any) -> None:
        await self._serving.run(store)


class PlayedPrompts(Serves):
    def __init__(self, num_groups: int) -> None:
        super().__init__(self._put)
        self._num_groups = num_groups

    async def _put(self, client: StoreClient) -> None:
        number = await client.become_source()
        with contextlib.suppress(StoreClosed):
            while True:
                groups = [{"prompt_ids": [1, number + n], "task": "{}"} for n in range(self._num_groups)]
                number += len(await client.put_groups(groups))


class PlayedEngine(Serves):
    """An engine: the real worker over the scripted engine."""

    def __init__(self, name: str, config: RunConfig, seed: int) -> None:
        random = Random(seed)
        time_model = TimeModel(tokens_per_s=TOKENS_PER_S, load_s=LOAD_S)
        self._engine = ScriptedEngine(time_model, length=lambda *_: random.randint(*TOKENS))
        intake = GroupIntake(
            name, Sampling.of(config.rollout.sampling), config.seed, config.algorithm.group_size,
            config.rollout.max_concurrent_samples, config.rollout.least_workers,
        )  # fmt: skip
        self._worker = RolloutWorker(self._engine, intake)
        super().__init__(self._worker.run)

    async def load(self, publication: Publication, epoch: int) -> None:
        with self._phases.within(LOADING):
            await self._engine.load(publication)

    async def progress(self) -> Progress:
        sampled = self._engine.sampled()
        return self._phases.progress(sampled.num_tokens, sampled.num_in_flight, sampled.tokens_in_flight)

    async def stats(self) -> dict[str, float]:
        return self._worker.stats()


class PlayedStage(Serves):
    """A member of any stage that computes columns."""

    def __init__(self, name: str, stage: str, column: str) -> None:
        super().__init__(self._pull)
        self._name, self._stage, self._column = name, stage, column

    async def _pull(self, client: StoreClient) -> None:
        async with client.leases(self._stage, 64, self._name, ahead=0) as leases:
            async for lease in leases:
                with contextlib.suppress(LeaseExpired):
                    await client.write(lease, lease.rows.row_ids, {self._column: _values(lease.rows)})


class PlayedRank(Member):
    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__()
        self._phases.enter(IDLE)
        self._rank, self._num_ranks = rank, num_ranks
        self._client: StoreClient | None = None

    async def attach(self, store: Any, epoch: int) -> None:
        self._client = StoreClient(store)

    async def plan_chunks(self, node: str, num_receivers: int) -> ChunkPlan:
        return ChunkPlan([], [], [], 1)

    async def begin_publishing(self, root: str, version: int, epoch: int) -> None:
        self._publication = Publication(f"{root}/{version}", version)

    async def finish_publishing(self, version: int, epoch: int) -> Publication:
        with self._phases.within(PUBLISHING):
            await asyncio.sleep(PUBLISH_S)
        return self._publication

    async def token_values(self, step: int) -> None:
        return None

    async def step(self, step: int, records_tokens: bool, epoch: int) -> StepReport | None:
        assert self._client is not None
        loop = asyncio.get_running_loop()
        began = loop.time()
        with self._phases.within(WAITING):
            lease = await self._client.lease_shared("train", step - 1, self._rank, self._num_ranks)
        if lease is None:
            return None
        waited_s = loop.time() - began
        with self._phases.within(UPDATING):
            await asyncio.sleep(UPDATE_S)
        return StepReport(
            step, lease.version, {f"actor/{name}": 0.1 for name in UPDATE_METRICS},
            TrainedRows.of(lease.rows, lease.version), waited_s, UPDATE_S,
            dict.fromkeys(PARTS, UPDATE_S / len(PARTS)), lease.rows.row_ids, lease.share,
        )  # fmt: skip


def play(plan: Iterable[ActorPlan], agents: Iterable[str], config: RunConfig, flow: Dataflow) -> dict[str, Member]:
    """Make the members, by name."""
    found: dict[str, Member] = {}
    found |= {name: PlayedAgent(found) for name in agents}
    for actor in plan:
        if actor.role == "store":
            found[actor.name] = PlayedStoreActor()
        elif actor.role == "prompts":
            found[actor.name] = PlayedPrompts(config.trainer.groups_per_step)
        elif actor.role == "rollout":
            found[actor.name] = PlayedEngine(actor.name, config, actor.rank)
        elif actor.role == "trainer":
            found[actor.name] = PlayedRank(actor.rank, config.trainer.num_ranks)
        else:
            column = flow.stage(str(actor.stage)).writes[0].name
            found[actor.name] = PlayedStage(actor.name, str(actor.stage), column)
    return found


def _values(rows: Rows) -> list[float]:
    return [float(row % 5) for row in rows.row_ids]
