"""A fleet without processes: the real controller, store, clients and pull loops over scripted engines and trainers.

On a virtual clock (`tests/virtual_time.py`) a whole run takes milliseconds. What takes time takes a random time.
"""

import asyncio
import contextlib
import io
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console

from penstock.algorithms.catalogue import build_dataflow
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.errors import PartnerGone, WeightError
from penstock.conf.run import RunConfig
from penstock.metering.meters import Meters
from penstock.orchestrator.cluster.node_agents import StateNodes
from penstock.orchestrator.cluster.owners import Owner
from penstock.orchestrator.cluster.placement.actors import ActorPlan
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.control.controller import Controller
from penstock.orchestrator.observability.reporting.progress import ProgressDisplay
from penstock.orchestrator.observability.reporting.sinks import JsonLines, Sink
from penstock.orchestrator.recovery.takeover import TakeoverPoint
from penstock.orchestrator.run_context import RunContext
from penstock.orchestrator.run_directory.checkpoint import Checkpoint
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.store.client.lease import SharedLease
from penstock.store.client.store_client import StoreClient
from penstock.store.epoch import Epoch
from penstock.store.errors import StoreClosed
from penstock.store.service.store import Store
from penstock.store.spec import StoreSpec
from penstock.workers.prompts.order import PromptCursor
from penstock.workers.prompts.source import PromptStart
from penstock.workers.protocols import Publication, Sampling
from penstock.workers.rollout.engine_scripted import ScriptedEngine, TimeModel
from penstock.workers.rollout.rollout_worker import GroupIntake, RolloutWorker
from penstock.workers.runtime.serving import (
    IDLE,
    KEEPING,
    PUBLISHING,
    SERVING,
    UPDATING,
    WAITING,
    Phases,
    Progress,
    Serving,
)
from penstock.workers.trainer.step_report import StepReport, TrainedRows
from tests.fakes.actors import FakeHandle
from tests.orchestrator.one_machine import OneMachine
from tests.orchestrator.one_node import on_one_node
from tests.orchestrator.scripted_store import MortalStore, ScriptedStoreProcess

Pause = Callable[[float], Awaitable[None]]


class Member:
    """What every actor answers."""

    async def stats(self) -> dict[str, float]:
        return {"busy_s": 0.0}

    async def progress(self) -> Progress:
        return Progress(SERVING, 0.0)

    async def process(self, stacks: str) -> None:
        """Nothing: it has no process."""


class Agent(Member):
    async def run(self) -> None:
        await asyncio.Event().wait()

    async def take_end(self, names: list[str]) -> dict[str, list[str]]:
        return {}  # nobody has printed anything


class NodeMemory(Agent):
    """The agent of the node that all are on, with the versions of the weights that lie in its shared memory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.versions: set[int] = set()
        self.kept: int | None = None

    def has(self, publication: Publication) -> bool:
        """Whether a publication can be loaded: what lies elsewhere can."""
        return not Path(publication.directory).is_relative_to(self.root) or publication.version in self.versions

    async def keep_version(self, version: int | None) -> bool:
        self.kept = version if version in self.versions else None
        return self.kept is not None

    async def reclaim_versions(self) -> None:
        self.leave(2)

    def begin(self, version: int) -> None:
        """Take a version back that is published again, or write another into the file of one before the newest."""
        if version not in self.versions:
            self.leave(1)
        self.versions.discard(version)

    def leave(self, count: int) -> None:
        """Remove all but the newest versions, and the one that is kept."""
        newest = sorted(self.versions)[-count:]
        self.versions = {version for version in self.versions if version in (*newest, self.kept)}


class Prompts(Member):
    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._serving = Serving(self._put)

    async def run(self, store: Any) -> None:
        await self._serving.run(store)

    async def _put(self, client: StoreClient) -> None:
        number = await client.become_source()
        with contextlib.suppress(StoreClosed):
            while True:
                numbers = range(number, number + self._num_groups)
                number += self._num_groups
                await client.put_groups([{"prompt_ids": [1, n], "task": "{}"} for n in numbers])

    async def start_after(self, num_groups: int) -> PromptStart:
        return PromptStart(PromptCursor(0, num_groups), num_groups)


class Rollout(Member):
    """The real pull loop over a scripted engine, which like any engine starts with version 0."""

    def __init__(
        self, name: str, config: RunConfig, group_size: int, random: Random, pause: Pause, num_peers: int
    ) -> None:
        self._pause = pause
        self.engine = ScriptedEngine(TimeModel(tokens_per_s=10.0), length=lambda *_: int(random.paretovariate(1.2) * 3))
        sampling, most = Sampling.of(config.rollout.sampling), config.rollout.max_concurrent_samples
        self.worker = RolloutWorker(self.engine, GroupIntake(name, sampling, 0, group_size, most, num_peers))
        self._serving = Serving(self.worker.run)

    async def run(self, store: Any) -> None:
        await self._serving.run(store)

    async def version(self) -> int:
        return await self.engine.version()

    async def retire(self) -> None:
        await self._pause(0.5)
        await self._serving.retire()

    async def drain(self, timeout_s: float) -> None:
        await self._serving.drain(timeout_s)

    memory: NodeMemory | None = None

    async def load(self, publication: Publication, epoch: int) -> None:
        await self._pause(2.0)
        if self.memory is not None and not self.memory.has(publication):
            raise WeightError(f"version {publication.version} is not here")
        await self.engine.load(publication)
        self._has_loaded = True
        if self.has_device:
            await self.engine.wake()

    has_device = True
    _has_loaded = False

    async def sleep(self) -> None:
        await self._pause(1.0)
        self.has_device = False
        await self.engine.sleep()

    async def wake(self) -> None:
        """As vLLM's: it keeps no weights asleep, and waits for the next load."""
        self.has_device = True
        await self._pause(1.0)
        if not self._has_loaded:
            await self.engine.wake()

    async def stats(self) -> dict[str, float]:
        return self.worker.stats()


class Stage(Member):
    """Any stage that computes columns: `values(rows)` is what it writes."""

    def __init__(self, name: str, stage: str, values: Callable[[Any], dict[str, Any]], pause: Pause) -> None:
        self._name, self._stage, self._values, self._pause = name, stage, values, pause
        self._serving = Serving(self._serve)

    async def run(self, store: Any) -> None:
        await self._serving.run(store)

    async def drain(self, timeout_s: float) -> None:
        await self._serving.drain(timeout_s)

    async def _serve(self, client: StoreClient) -> None:
        async with client.leases(self._stage, 4, self._name) as leases:
            async for lease in leases:
                await self._pause(0.5)
                await client.write(lease, lease.rows.row_ids, self._values(lease.rows))


class Trainer(Member):
    memory: NodeMemory | None = None

    def __init__(self, store: Any, rank: int, num_ranks: int, pause: Pause, after: int = 0) -> None:
        self._client, self._rank, self._num_ranks, self._pause = StoreClient(store), rank, num_ranks, pause
        self.restored: int | None = None
        self._after: int | None = after
        self._epoch = Epoch()
        self._phases = Phases()
        self._phases.enter(IDLE)
        self._leasing: asyncio.Task[SharedLease | None] | None = None
        self._publishing: asyncio.Task[None] | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._kept = 0
        """The step whose copy was begun last."""

    async def progress(self) -> Progress:
        said = self._phases.progress()
        if said.phase not in (IDLE, WAITING):
            return said
        for phase, task in ((PUBLISHING, self._publishing), (KEEPING, self._keeping)):
            if task is not None and not task.done():
                return replace(said, phase=phase)
        return said

    async def step(self, step: int, records_tokens: bool, epoch: int) -> StepReport | None:
        self._epoch.check(epoch)
        self._check(step - 1)
        with self._phases.within(WAITING):
            leasing = self._client.lease_shared("train", step - 1, self._rank, self._num_ranks, 0)
            self._leasing = asyncio.create_task(leasing)
            try:
                lease = await self._leasing
            except asyncio.CancelledError:
                raise PartnerGone("attached to another store") from None
        if lease is None:
            return None
        with self._phases.within(UPDATING):
            assert self.has_device
            self._after = None
            await self._pause(3.0)
            if self._keeping is not None:
                await asyncio.shield(self._keeping)  # weights do not change before the copy is there
            self._after = step
        return StepReport(
            step, lease.version, {}, TrainedRows.of(lease.rows, lease.version), 0.0, 0.0, {}, lease.rows.row_ids,
            lease.share,
        )  # fmt: skip

    def _check(self, step: int) -> None:
        if self._after != step:
            raise PartnerGone(f"has the state after step {self._after}, not {step}")

    async def begin_keeping(self, step: int, epoch: int) -> None:
        self._epoch.check(epoch)
        self._check(step)
        with self._phases.within(KEEPING):
            await self._pause(0.2)
        self._kept, self._keeping = step, asyncio.create_task(self._pause(2.0))  # type: ignore[arg-type]

    async def finish_keeping(self, step: int, epoch: int) -> None:
        self._epoch.check(epoch)
        if self._keeping is None or self._kept != step:
            raise PartnerGone(f"has not begun to copy the state after step {step}")
        await asyncio.shield(self._keeping)

    async def token_values(self, step: int) -> None:
        return None

    has_device = True

    async def leave_device(self) -> None:
        await self._pause(1.0)
        self.has_device = False

    async def take_device(self) -> None:
        self.has_device = True
        await self._pause(1.0)

    async def attach(self, store: Any, epoch: int) -> None:
        self._epoch.check(epoch)
        self._client = StoreClient(store)
        if self._leasing is not None:
            self._leasing.cancel()

    async def restore(self, step: int, epoch: int) -> None:
        self._epoch.check(epoch)
        assert self._phases.progress().phase == IDLE
        self.restored = self._after = step

    async def after_step(self) -> int | None:
        return self._after

    async def begin_publishing(self, root: str, version: int, epoch: int) -> None:
        """The writing goes on though nobody asks for it, as a thread's does."""
        self._epoch.check(epoch)
        self._check(version)
        assert self._publishing is None or self._publishing.done()
        if self.memory is not None:
            self.memory.begin(version)
        with self._phases.within(PUBLISHING):
            await self._pause(0.5)
        self._publishing = asyncio.create_task(self._pause(4.0))  # type: ignore[arg-type]
        self._published = Publication(root, version)

    async def finish_publishing(self, version: int, epoch: int) -> Publication:
        self._epoch.check(epoch)
        assert self._publishing is not None
        assert self._published.version == version
        await asyncio.shield(self._publishing)
        if self.memory is not None:
            self.memory.versions.add(version)
        return self._published

    async def begin_saving(self, place: str, epoch: int) -> bool:
        self._epoch.check(epoch)
        Path(place).mkdir(parents=True, exist_ok=True)
        return True

    async def finish_saving(self) -> list[Any]:
        await self._pause(4.0)
        return []


class ScriptedFleet(OneMachine):
    """Stands where a `Fleet` does."""

    def __init__(
        self, store: Any, config: RunConfig, flow: Dataflow, random: Random, resumed: Checkpoint | None = None
    ) -> None:
        async def pause(longest_s: float) -> None:
            await asyncio.sleep(random.uniform(0.0, longest_s))

        def told(store: Store) -> None:
            self.store = store

        self.store_process = ScriptedStoreProcess(config, partial(store_of, config, flow), told, pause)
        self.config, self.flow, self.store, self.resumed, self.model_path = config, flow, store, resumed, "/"
        self.weights_root = Path(config.output_dir)
        self.memory = NodeMemory(self.weights_root)
        self.relay_nodes = on_one_node(FakeHandle(self.memory, "Agent"))
        super().__init__(self.role)
        self._pause, self._joined, self.trials = pause, 0, {}
        self._lent: dict[str, Any] = {}
        """Handles of members that are lent, by name."""
        self._reserved: set[str] = set()
        self._num_loans: Counter[str] = Counter()
        self._later: dict[str, tuple[FakeHandle, list[str]]] = {}
        """Agents of nodes that joined, and the members on them."""
        size, num_ranks = flow.samples_per_prompt, config.trainer.num_ranks
        self._makers: dict[str, tuple[str, Callable[[], Member]]] = {}
        """Role, and what makes one, by name."""
        self._is("prompts", "Prompts", lambda _: Prompts(config.trainer.groups_per_step))
        num_engines = config.rollout.least_workers
        self._more: dict[str, Callable[[str], Member]] = {
            "rollout": lambda name: Rollout(name, config, size, random, pause, 1),
            "reward": lambda name: Stage(name, "reward", rewards_of, pause),
        }
        """What makes one more of a role."""
        for index in range(config.num_engines):
            name = f"Rollout-{index}"
            self._is("rollout", name, lambda name: Rollout(name, config, size, random, pause, num_engines))
        for rank in range(num_ranks):
            after = 0 if resumed is None else resumed.step
            rank_of = partial(self._rank, rank, num_ranks, pause, after)
            self._is("trainer", f"Trainer-{rank}", rank_of)
        self._is("reward", "Reward-0", self._more["reward"])
        for stage in flow.stages:
            if stage.kind == "compute" and not stage.is_in_trainer:
                values = column_of(stage.writes[0].name)
                make = partial(_stage, stage.name, values, pause)
                self._is("compute", f"Compute-{stage.name}", make)
        self._handles = {name: FakeHandle(make(), name) for name, (_, make) in self._makers.items()}

    def _rank(self, rank: int, num_ranks: int, pause: Pause, after: int, _: str) -> Member:
        return Trainer(self.store, rank, num_ranks, pause, after)

    def _is(self, role: str, name: str, make: Callable[[str], Member]) -> None:
        def made() -> Member:
            member: Any = make(name)
            member.memory = self.memory
            return member  # type: ignore[no-any-return]

        self._makers[name] = role, made

    def role(self, role: str, stage: str | None = None) -> list[tuple[str, Any]]:
        lent = dict(self.lent())
        return [
            (name, handle) for name, handle in self._handles.items()
            if self._makers[name][0] == role and name not in lent
        ]  # fmt: skip

    def lend(self, names: Collection[str]) -> None:
        self._lent |= {name: self._handles[name] for name in names}
        self._num_loans.update(names)

    def reserve(self, names: Collection[str]) -> None:
        self._reserved.update(names)

    def take_back(self, names: Collection[str]) -> None:
        for name in names:
            del self._lent[name]

    def lent(self) -> list[tuple[str, Any]]:
        return [(name, handle) for name, handle in self._lent.items() if self._handles.get(name) is handle]

    def is_lent(self, name: str) -> bool:
        return name in dict(self.lent())

    def num_loans(self, name: str) -> int:
        return self._num_loans[name]

    @property
    def plan(self) -> list[ActorPlan]:
        return [ActorPlan(name, role, stage=role) for name, (role, _) in self._makers.items()]

    @property
    def actors(self) -> dict[str, Any]:
        return self._handles

    def handle_of(self, name: str) -> Any:
        return self._handles.get(name)

    @property
    def watched(self) -> list[tuple[str, str, Any]]:
        return [(self._makers[name][0], name, handle) for name, handle in self._handles.items()]

    async def present(self, role: str, stage: str | None = None) -> list[tuple[str, Any]]:
        while not (members := self.role(role)):
            await asyncio.sleep(0.1)
        return members

    def teams(self, *roles: str) -> list[list[str]]:
        """The ranks of the trainer are one."""
        alone = [[name] for name, (role, _) in self._makers.items() if role in roles and role != "trainer"]
        ranks = [name for name, (role, _) in self._makers.items() if role == "trainer"]
        return [*alone, *([ranks] if "trainer" in roles else [])]

    async def attach_trainers(self) -> None:
        attaching = [handle.attach.remote(self.store, self.owner.epoch) for _, handle in self.role("trainer")]
        await asyncio.gather(*attaching, return_exceptions=True)

    state_nodes = StateNodes({}, {}, {})
    owner: Owner = Owner()

    async def resume(self, trainers: list[tuple[str, Any]]) -> None:
        pass

    stacks_root = ""
    machines: Sequence[Any] = ()

    def node_of(self, name: str) -> str | None:
        return None

    def agent_of(self, name: str) -> tuple[str, Any] | None:
        return None

    def strike(self, name: str) -> bool:
        """End a member as a broken machine does: only its callers hear of it. False: it was dead already."""
        if name not in self._handles:
            return False
        self._handles[name].kill()
        return True

    def kill(self, names: Collection[str]) -> None:
        for name in names:
            self.strike(name)

    def remove(self, names: Collection[str]) -> None:
        for name in names:
            if self.strike(name):
                del self._handles[name]

    async def start_members(self, names: Sequence[str]) -> list[tuple[str, Any]]:
        await self._pause(20.0)
        return [(name, FakeHandle(self._makers[name][1](), name)) for name in names]

    def add(self, members: list[tuple[str, Any]]) -> None:
        self._handles |= dict(members)
        self._lent |= {name: handle for name, handle in members if name in self._reserved}

    # Members that join and leave: what a fleet's `capacity` does.

    @property
    def capacity(self) -> "ScriptedFleet":
        return self

    @property
    def later_nodes(self) -> list[tuple[str, str, Any]]:
        return [(node, f"Agent-{node}", agent) for node, (agent, _) in self._later.items()]

    def names_on(self, node: str) -> list[str]:
        return [name for name in self._later[node][1] if name in self._makers]

    @property
    def nodes(self) -> list[tuple[str, str, Any]]:
        return self.later_nodes

    def can_lose(self, node: str) -> bool:
        return node in self._later

    def can_leave(self, actor: ActorPlan) -> bool:
        return True

    def forget_node(self, node: str) -> None:
        del self._later[node]

    def power_off(self, node: str) -> None:
        """A node that joined, with all that is on it."""
        agent, names = self._later[node]
        for name in names:
            self.strike(name)
        agent.kill()

    @staticmethod
    def on_node() -> None:
        """Told in its place by who watches nodes."""

    def first_stage(self, role: str) -> str:
        return role

    def place_of(self, name: str) -> str:
        return "node"

    async def enlarge(self, role: str, stage: str | None) -> str:
        await self._pause(2.0)
        self._joined += 1
        name, node = f"{role.title()}-{100 + self._joined}", f"late-{self._joined // 2}"
        self._is(role, name, self._more[role])
        while node in self._later and self._later[node][0].is_dead:
            node += "-again"
        if node not in self._later:
            self._later[node] = FakeHandle(Agent(), f"Agent-{node}"), []
        self._later[node][1].append(name)
        self.on_node()
        return name

    def take_out(self, name: str) -> tuple[ActorPlan, Any]:
        role, _ = self._makers.pop(name)
        return ActorPlan(name, role, joins=True), self._handles.pop(name, None)

    async def end(self, actor: ActorPlan, handle: Any) -> None:
        await self._pause(1.0)
        if handle is not None:
            handle.kill()


def _stage(stage: str, values: Callable[[Any], dict[str, Any]], pause: Pause, name: str) -> Stage:
    return Stage(name, stage, values, pause)


def rewards_of(rows: Any) -> dict[str, Any]:
    return {"reward": [float(row % 3) for row in rows.row_ids]}


def column_of(name: str) -> Callable[[Any], dict[str, Any]]:
    return lambda rows: {name: [float(row % 5) for row in rows.row_ids]}


def scripted_config(tmp_path: Path, *words: str) -> RunConfig:
    words = (
        f"output_dir={tmp_path}",
        "name=run",
        "resume=auto",
        "algorithm.group_size=2",
        "trainer.groups_per_step=4",
        "tracking.export_model=false",
        "tracking.samples_every_steps=0",
        "rollout.max_concurrent_samples=8",
        "rollout.sampling.max_tokens=64",
        *words,
    )
    return load_config(words)


NUM_STEPS, GROUPS, SIZE = 30, 4, 2
"""Steps of a long run, groups of a step, samples of a group."""


def long_config(tmp_path: Path, *words: str) -> RunConfig:
    """The configuration of a run that is long enough for members to come, go and die, any number of times."""
    return scripted_config(
        tmp_path,
        f"trainer.max_steps={NUM_STEPS}",
        f"trainer.groups_per_step={GROUPS}",
        f"algorithm.group_size={SIZE}",
        "checkpoint.every_steps=0",
        "faults.max_restarts=1000",
        "faults.pause_s=0.1",
        *words,
    )


def controller_over(
    fleet: ScriptedFleet,
    config: RunConfig,
    directory: RunDirectory,
    sinks: Sequence[Sink] = (),
    wanted: dict[str, int] | None = None,
    taken: TakeoverPoint | None = None,
    meters: Meters | None = None,
    evaluator: Any = None,
) -> Controller:
    """`sinks`: hear of each step before metrics.jsonl does. `wanted`: before this controller."""
    progress = ProgressDisplay(config, "run", console=Console(file=io.StringIO(), quiet=True))
    directory.failed_writes.set_printer(progress.note)
    sinks = [*sinks, JsonLines(directory)]
    more = {"wanted": wanted, "taken": taken, "meters": meters, "evaluator": evaluator}
    context = RunContext.of(config, fleet, directory, progress)  # type: ignore[arg-type]
    return Controller(context, sinks, **more)


def flow_of(config: RunConfig) -> Dataflow:
    return build_dataflow(config.algorithm)


def store_of(config: RunConfig, flow: Dataflow, restore: Any = None) -> Store:
    spec = StoreSpec.of(flow, config, strict=True)
    return MortalStore(spec, lambda: asyncio.get_running_loop().time(), restore=restore)
