"""The actors of a run: started from the plan, named for the dashboard, ended without leaving a process behind.

`controller.py` drives a fleet over a store; `session.py` drives one without a store, for people who write their own
loop.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.algorithms.graph.stage import Stage
from penstock.conf.errors import NotStarted
from penstock.conf.run import RunConfig
from penstock.conf.transports import choose_transport
from penstock.orchestrator.checkpoint import Checkpoint
from penstock.orchestrator.node_agents import NodeAgents
from penstock.orchestrator.node_files import NodeFiles
from penstock.orchestrator.placement.actors import ActorPlan
from penstock.orchestrator.placement.nodes import Node
from penstock.orchestrator.placement.reservation import Reservation
from penstock.orchestrator.placement.threads import threads_of
from penstock.orchestrator.ray_calls import get_all
from penstock.orchestrator.weight_relays import RelayNodes
from penstock.store.service.actor import STORE, create_store_actor, end_store_actor
from penstock.store.spec import StoreSpec
from penstock.workers.compute.actor import Compute
from penstock.workers.node.agent import WEIGHTS
from penstock.workers.prompts.actor import Prompts
from penstock.workers.reward.actor import Reward, RewardPlan
from penstock.workers.rollout.actor import Rollout, RolloutSpec
from penstock.workers.trainer.actor import Scorer, Trainer
from penstock.workers.trainer.spec import ScorerSpec, TrainerSpec

READERS = ("rollout", "trainer", "scorer", "reward")
"""Roles that read files which the driver has."""
MANY_CALLS = 10_000
"""Concurrency of async actors: calls wait inside, they do not compute."""


@dataclass
class Fleet:
    """Lifecycle: `create` makes the actors, `start` loads models and engines side by side, `close` ends them.

    `actors` maps names to handles; `role(...)` picks those of one role, in rank order.
    """

    plan: list[ActorPlan]
    config: RunConfig
    flow: Dataflow
    model_path: str
    namespace: str
    agents: NodeAgents
    with_store: bool = True
    resumed: Checkpoint | None = None
    """What the run goes on from."""
    store: Any = None
    """The store's actor."""
    actors: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._reservation: Reservation | None = None
        self._files = NodeFiles(self.agents, self.config.cluster.files_timeout_s)
        self._cores: Mapping[str, int] = {}

    @property
    def reservation(self) -> Reservation:
        if self._reservation is None:
            raise NotStarted("No actor has its node before the fleet's `create`.")
        return self._reservation

    def create(self) -> None:
        """Create every actor; models are not loaded yet."""
        timeout_s = self.config.rollout.start_timeout_s
        self._reservation = Reservation.make(self.plan, self.config, self.namespace, timeout_s)
        nodes = self._reservation.assignment.nodes
        self.agents.create([(node.id, node.address) for node in nodes])
        self._cores = self._cores_of(nodes)
        if len(nodes) > 1:
            self._bring_files()
        if self.with_store:
            spec = StoreSpec.of(self.flow, self.config)
            snapshot = self.resumed.store if self.resumed is not None else None
            options, ports = self.reservation.options(self._plan_of(STORE)), self.config.cluster.ports
            rows = self.agents.rows_nodes(timeout_s) if len(nodes) > 1 else None
            self.store = create_store_actor(
                spec, self.namespace, restore=snapshot, ports=ports, nodes=rows, options=options
            )
        for actor in self.plan:
            if actor.role == "store" or (not self.with_store and actor.role in ("prompts", "compute")):
                continue
            self.actors[actor.name] = self._create(actor)

    def start(self) -> None:
        """Load models and start engines, all at the same time. Raises what the first failing actor raised."""
        timeout_s = self.config.rollout.start_timeout_s
        self.agents.facts(timeout_s)
        calls = []
        for role in ("trainer", "scorer"):
            ranks = self.role(role)
            for stage in dict.fromkeys(actor.stage for actor in self.plan if actor.role == role):
                members = [(name, handle) for name, handle in ranks if self._plan_of(name).stage == stage]
                address = _meeting(members, timeout_s)
                calls += [(name, handle.start.remote(address)) for name, handle in members]
        calls += [
            (name, handle.start.remote())
            for name, handle in self.actors.items()
            if self._plan_of(name).role not in ("trainer", "scorer")
        ]
        get_all(calls, phase="start", timeout_s=timeout_s)
        if self.resumed is not None:
            loads = [
                (name, handle.resume.remote(self._local(name, self.resumed.trainer), self.resumed.files))
                for name, handle in self.role("trainer")
            ]
            phase = f"resume {self.resumed.directory}"
            get_all(loads, phase=phase, timeout_s=self.config.checkpoint.timeout_s)

    @property
    def weights_root(self) -> Path:
        """Where publications lie on every node of the run."""
        return Path(self.agents.root) / WEIGHTS

    async def places(self, directory: str) -> dict[str, str]:
        """Where each of the trainer's ranks is to write what belongs into a directory of the driver's."""
        nodes = {name: self._node_of(name) for name, _ in self.role("trainer")}
        places = await self._files.places(directory, sorted(set(nodes.values())))
        return {name: places[node] for name, node in nodes.items()}

    async def collect(self, directory: str, places: Mapping[str, str]) -> None:
        """Bring what ranks have written there to the driver's machine. Raises `ResourceError`, `DeadlineExceeded`."""
        await self._files.collect(directory, {self._node_of(name): place for name, place in places.items()})

    async def discard(self, directory: str, places: Mapping[str, str]) -> None:
        """Leave what ranks have written there, and the driver's machine does not see, to nobody."""
        await self._files.discard(directory, {self._node_of(name): place for name, place in places.items()})

    @property
    def relay_nodes(self) -> RelayNodes:
        """Between which publications go."""
        node_of = {name: node.id for name, node in self.reservation.assignment.node_of.items()}
        return self.agents.relay_nodes(node_of, self.config.rollout.start_timeout_s)

    def role(self, role: str) -> list[tuple[str, Any]]:
        """Names and handles of one role; `agent`: those of the nodes."""
        if role == "agent":
            return list(self.agents.members.values())
        return [
            (actor.name, self.actors[actor.name])
            for actor in self.plan
            if actor.role == role and actor.name in self.actors
        ]

    def close(self) -> None:
        """End every actor: ask first, kill what does not answer in time. Never raises for an actor that is dead
        already."""
        grace_s = self.config.cluster.shutdown_timeout_s
        refs = []
        for handle in self.actors.values():
            with contextlib.suppress(RayError):
                refs.append(handle.close.remote())
        with contextlib.suppress(RayError):
            ray.wait(refs, num_returns=len(refs), timeout=grace_s) if refs else None
        for handle in self.actors.values():
            with contextlib.suppress(RayError):
                ray.kill(handle)
        if self.store is not None:  # nobody reads its files any more
            end_store_actor(self.store, self.config.store.spill_dir, grace_s)
        self.agents.close(grace_s)
        if self._reservation is not None:
            self._reservation.release()
        self.actors.clear()
        self.store = None

    def _plan_of(self, name: str) -> ActorPlan:
        return next(actor for actor in self.plan if actor.name == name)

    def _node_of(self, name: str) -> str:
        return self.reservation.assignment.node_of[name].id

    def _local(self, name: str, path: str) -> str:
        """A path of the driver's, as the actor of that name is to say it."""
        return self._files.local(self._node_of(name), path)

    def _bring_files(self) -> None:
        """What actors read from the driver's disk, to the nodes that they are on."""
        config = self.config
        nodes = {role: {self._node_of(actor.name) for actor in self.plan if actor.role == role} for role in READERS}
        self._files.provide(self.model_path, nodes["rollout"] | nodes["trainer"])
        for stage in dict.fromkeys(actor.stage for actor in self.plan if actor.role == "scorer"):
            self._files.provide(self._scored_by(self.flow.stage(str(stage))), nodes["scorer"])
        if self.resumed is not None:
            self._files.provide(self.resumed.trainer, nodes["trainer"])
        for file in filter(None, [*config.imports, _file_of(config.reward.function)]):
            self._files.provide(file, nodes["reward"], is_code=True)

    def _scored_by(self, stage: Stage) -> str:
        """The model of a scorer's stage."""
        return self.config.model.path_of(str(stage.model), self.model_path)

    def _create(self, actor: ActorPlan) -> Any:
        options = {
            "name": actor.name,
            "namespace": self.namespace,
            "num_cpus": actor.num_cpus,
            "num_gpus": actor.num_gpus,
            "max_concurrency": MANY_CALLS,
            **self.reservation.options(actor),
        }
        store = self.store
        if actor.role == "prompts":
            return _remote(Prompts, options).remote(
                self.config, self.model_path, self.flow.rows_are, store, self.resumed.prompts if self.resumed else None
            )
        if actor.role == "rollout":
            return _remote(Rollout, options).remote(self._rollout_spec(actor), store)
        if actor.role == "reward":
            return _remote(Reward, options).remote(self._reward_plan(actor), store)
        if actor.role == "compute":
            stage = self.flow.stage(str(actor.stage))
            return _remote(Compute, options).remote(actor.name, stage, self.flow.columns, store)
        # A rank computes in one thread; a second one answers `stats`, or waits for a checkpoint, meanwhile.
        options["max_concurrency"] = 2
        if actor.role == "scorer":
            return _remote(Scorer, options).remote(self._scorer_spec(actor), store)
        return _remote(Trainer, options).remote(self._trainer_spec(actor), store)

    def _rollout_spec(self, actor: ActorPlan) -> RolloutSpec:
        config = self.config
        return RolloutSpec(
            actor.name, config.rollout, self._local(actor.name, self.model_path), self._threads_of(actor), config.seed,
            self.flow.samples_per_prompt, bool(self.flow.of_kind("greedy_rollout")), choose_transport(config),
            config.trainer.lora if config.trainer.lora.publishes_adapter else None, config.weights.phase_timeout_s,
        )  # fmt: skip

    def _reward_plan(self, actor: ActorPlan) -> RewardPlan:
        imports = tuple(self._local(actor.name, file) for file in self.config.imports)
        config = self.config.reward
        if file := _file_of(config.function):
            local = config.function.replace(file, self._local(actor.name, file))
            config = replace(config, function=local)
        if not self.flow.of_kind("reward"):
            return RewardPlan(actor.name, config, imports)
        stage = self.flow.stage(str(actor.stage))
        return RewardPlan(actor.name, config, imports, stage.function, stage.name, stage.writes[0].name, stage.reads[1])

    def _trainer_spec(self, actor: ActorPlan) -> TrainerSpec:
        config, stage = self.config, self.flow.stage(str(actor.stage))
        assert stage.function is not None  # `Dataflow.check` has seen to it
        return TrainerSpec(
            model_path=self._local(actor.name, self.model_path),
            loss=stage.function,
            in_trainer=tuple(self.flow.in_trainer),
            columns=self.flow.columns,
            is_saved=bool(config.checkpoint.every_steps),
            checkpoint_timeout_s=config.checkpoint.timeout_s,
            phase_timeout_s=config.weights.phase_timeout_s,
            **self._of_rank(actor, stage),
        )

    def _scorer_spec(self, actor: ActorPlan) -> ScorerSpec:
        stage = self.flow.stage(str(actor.stage))
        path = self._local(actor.name, self._scored_by(stage))
        return ScorerSpec(model_path=path, column=stage.writes[0].name, **self._of_rank(actor, stage))

    def _of_rank(self, actor: ActorPlan, stage: Stage) -> dict[str, Any]:
        """What trainers and scorers are told alike."""
        config = self.config
        return {
            "name": actor.name,
            "config": config.trainer,
            "rank": actor.rank,
            "num_ranks": config.trainer.num_ranks,
            "num_threads": self._threads_of(actor),
            "stage": stage.name,
            "head": "scores" if stage.is_scored else "policy",
            "temperature": config.rollout.sampling.temperature if self.flow.of_kind("rollout") else 1.0,
            "attention": config.model.attention,
            "engine_dtype": config.rollout.dtype,
        }

    def _threads_of(self, actor: ActorPlan) -> int:
        return threads_of(actor, self.plan, self.reservation.assignment, self._cores, self.config)

    def _cores_of(self, nodes: Sequence[Node]) -> Mapping[str, int]:
        """By node id. Where there is but the driver's, this process knows them and no agent is waited for."""
        if len(nodes) == 1:
            return {nodes[0].id: len(os.sched_getaffinity(0))}
        facts = self.agents.facts(self.config.rollout.start_timeout_s)
        return {node: fact.cores for node, fact in facts.items()}


def _file_of(function: str) -> str:
    """Of `file.py:function`; nothing of another name."""
    file = function.rpartition(":")[0]
    return file if file.endswith(".py") else ""


def _meeting(ranks: list[tuple[str, Any]], timeout_s: float) -> str | None:
    """Where several ranks meet, which the first of them says."""
    if len(ranks) == 1:
        return None
    name, first = ranks[0]
    (address,) = get_all([(name, first.address.remote())], phase="start", timeout_s=timeout_s)
    return str(address)


def _remote(cls: type, options: dict[str, Any]) -> Any:
    return ray.remote(cls).options(**options)
