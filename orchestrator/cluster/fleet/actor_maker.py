"""Makes the actors of a run, one at a time, also in place of those that died: the arguments of each, and where it
runs."""

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.algorithms.graph.columns import HINTED
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.algorithms.graph.stage import Stage
from penstock.conf.reward import JUDGE, has_own_judge
from penstock.conf.rollout import DRAFT
from penstock.conf.run import RunConfig
from penstock.conf.weights import choose_transport, replaces_members
from penstock.metering.ray_export import Origin
from penstock.orchestrator.cluster.fleet.member_table import MemberTable
from penstock.orchestrator.cluster.node_agents import POLICY, NodeFiles
from penstock.orchestrator.cluster.placement.actors import ActorPlan, answers_are_needed, origin_of, reward_of
from penstock.orchestrator.cluster.placement.assignment import bytes_published
from penstock.orchestrator.cluster.placement.reservation import Reservation
from penstock.orchestrator.run_directory.checkpoint import Checkpoint
from penstock.store.spec import environment_rewards
from penstock.workers.agents.attempts import AttemptColumns
from penstock.workers.agents.attempts_actor import Environments, EnvironmentSpec
from penstock.workers.compute import Compute
from penstock.workers.judge_pool import JudgeSpec
from penstock.workers.node.node_agent import STACKS, STATES
from penstock.workers.node.node_transfers import FileSet
from penstock.workers.pictures.processor import PictureProcessor
from penstock.workers.prompts.prompts_actor import Prompts
from penstock.workers.protocols import AdapterLimits, EngineSpec
from penstock.workers.reward.reward_actor import Reward, RewardPlan
from penstock.workers.reward.reward_worker import RewardStage
from penstock.workers.rollout.rollout_actor import Rollout, RolloutSpec
from penstock.workers.trainer.rank_spec import ScorerSpec, TrainerSpec
from penstock.workers.trainer.trainer_actor import Scorer, Trainer
from penstock.workers.user_code import file_of, with_file

FilesOf = Callable[[Path], FileSet]
MANY_CALLS = 10_000
"""Concurrency of async actors: calls wait inside, they do not compute."""


@dataclass(frozen=True)
class Sources:
    """What all actors of a run are made from."""

    config: RunConfig
    flow: Dataflow
    model_path: str
    namespace: str
    resumed: Checkpoint | None = None
    """The checkpoint that they start from."""

    @cached_property
    def published_bytes(self) -> int:
        """Bytes of a publication of the weights, as far as they are known."""
        return bytes_published(self.config, self.model_path)

    @cached_property
    def picture_digest(self) -> str | None:
        """Digest of the processor that all actors must read pictures by; None: the run is one of text."""
        return PictureProcessor.of(self.model_path).digest if self.config.rollout.max_pictures else None


class ActorMaker:
    """Lifecycle: `bring_files` where there are several nodes, then `make` for any actor of the plan, at any time."""

    def __init__(
        self,
        sources: Sources,
        table: MemberTable,
        reservation: Reservation,
        files: NodeFiles,
        threads_of: Callable[[ActorPlan], int],
        root: str,
    ) -> None:
        """`threads_of`: returns the number of CPU threads of an engine or a rank. `root`: the run's directory in shared
        memory, on each node."""
        self._table, self._owner = table, table.owner
        self._config, self._flow, self._model_path = sources.config, sources.flow, sources.model_path
        self._namespace, self._resumed = sources.namespace, sources.resumed
        self.sources = sources
        self._reservation, self._files = reservation, files
        self._threads_of, self._root = threads_of, root

    def bring_files(self) -> None:
        """Bring what actors read from the driver's disk to the nodes that they are on. Raises `ResourceError`,
        `DeadlineExceeded`."""
        nodes: dict[tuple[str, FilesOf], set[str]] = defaultdict(set)
        for actor in self._table.plan:
            for files in self._files_of(actor):
                nodes[files].add(self._node_of(actor.name))
        for (path, files_of), readers in nodes.items():
            self._files.provide(path, readers, files_of)

    def bring_files_of(self, actor: ActorPlan, node: str) -> None:
        """Bring the files of an actor that joins or moves to its node, which may be new."""
        for path, files_of in self._files_of(actor):
            self._files.provide(path, {node}, files_of)

    def _files_of(self, actor: ActorPlan) -> Iterator[tuple[str, FilesOf]]:
        """Paths that an actor reads, each with the way to find what belongs to it."""
        if actor.role == "rollout":
            yield self._sampled_by(actor), FileSet.of_model
            if self._draft_path:
                yield self._draft_path, FileSet.of_model
        if actor.role in ("trainer", "environment"):
            others = self._own_models.values() if actor.role == "trainer" else ()
            yield from ((path, FileSet.of_model) for path in dict.fromkeys([self._model_path, *others]))
        if actor.role == "scorer":
            yield self._scored_by(self._flow.stage(str(actor.stage))), FileSet.of_model
        if actor.role == "trainer" and self._resumed is not None:
            yield self._resumed.trainer, FileSet.of_directory
        if self._judges(actor):
            yield self._judge_path, FileSet.of_model
        if actor.role in ("reward", "environment"):
            named = [self._config.reward.function, self._config.environment.name or ""]
            named += [reward.function for reward in self._config.rewards]
            named += [value for value in self._config.environment.options.values() if _is_code(value)]
            for file in filter(None, [*self._config.imports, *map(file_of, named)]):
                yield file, FileSet.of_code

    def local(self, name: str, path: str) -> str:
        """The path under which the actor of that name finds a file of the driver."""
        return self._files.local(self._node_of(name), path)

    def make(self, actor: ActorPlan, name: str) -> Any:
        """Make an actor. Returns its handle. `name`: its name in Ray."""
        options = {
            "name": name,
            "namespace": self._namespace,
            "num_cpus": actor.num_cpus,
            "num_gpus": actor.num_gpus,
            "memory": actor.memory or None,
            "max_concurrency": MANY_CALLS,
            **self._reservation.options(actor),
        }
        if actor.role == "prompts":
            start = self._resumed.prompts if self._resumed else None
            told = self._config, self._model_path, self._flow.rows_are, start, self.sources.picture_digest
            return self._owner.make(Prompts, options, *told, answers_are_needed(self._flow, self._config))
        if actor.role == "rollout":
            return self._owner.make(Rollout, options, self._rollout_spec(actor))
        if actor.role == "environment":
            return self._owner.make(Environments, options, self._environment_spec(actor))
        if actor.role == "reward":
            return self._owner.make(Reward, options, self._reward_plan(actor))
        if actor.role == "compute":
            stage = self._flow.stage(str(actor.stage))
            return self._owner.make(Compute, options, actor.name, stage, self._flow.columns)
        # A rank computes in one thread; the rest wait for a checkpoint, a publication and a copy of the state, and
        # answer heartbeats.
        options["max_concurrency"] = 5
        if actor.role == "scorer":
            return self._owner.make(Scorer, options, self._scorer_spec(actor))
        return self._owner.make(Trainer, options, self._trainer_spec(actor))

    def _rollout_spec(self, actor: ActorPlan) -> RolloutSpec:
        config = self._config
        serves, largest = config.serve, config.serve.slot_rank
        engine = EngineSpec(
            config.rollout, self.local(actor.name, self._sampled_by(actor)), self._threads_of(actor),
            transport=choose_transport(config), phase_timeout_s=config.weights.phase_timeout_s,
            adapter=config.trainer.lora if config.trainer.lora.publishes_adapter and largest is None else None,
            policies=(actor.policy,) if actor.policy else tuple(config.trainer.policies),
            picture_digest=self.sources.picture_digest, tower_is_frozen=config.trainer.freezes_tower,
            adapters=None if largest is None else AdapterLimits(largest, serves.max_loaded),
            is_probed=probes_engines(config, self._flow),
            draft_path=self.local(actor.name, self._draft_path) if self._draft_path else "",
        )  # fmt: skip
        return RolloutSpec(
            actor.name, engine, config.seed, self._flow.samples_per_prompt, bool(self._flow.of_kind("greedy_rollout")),
            1 if actor.joins else self._num_samplers(),
            pulls=not self._flow.has_environment,
            origin=self._origin_of(actor),
        )  # fmt: skip

    def _num_samplers(self) -> int:
        """Number of engines that share the groups from the start: all but those of evaluations alone."""
        engines = sum(actor.role == "rollout" and not actor.joins for actor in self._table.plan)
        return max(1, engines - self._config.evaluation.num_workers)

    def _code_of(self, actor: ActorPlan, function: str) -> str:
        """The name of a function, where the actor finds it: `file.py:function` with a local path; another name as it
        is."""
        return with_file(function, lambda file: self.local(actor.name, file))

    def _environment_spec(self, actor: ActorPlan) -> EnvironmentSpec:
        config, environment = self._config, self._config.environment
        imports = tuple(self.local(actor.name, file) for file in config.imports)
        named = {key: self._code_of(actor, value) for key, value in environment.options.items() if _is_code(value)}
        options = environment.options | named
        environment = replace(environment, name=self._code_of(actor, str(environment.name)), options=options)
        stage = self._flow.stage(str(actor.stage))
        names = tuple(column.name for column in stage.writes)
        return EnvironmentSpec(
            actor.name, actor.rank, environment, config.rollout, self.local(actor.name, self._model_path), config.seed,
            self._flow.samples_per_prompt, AttemptColumns(names, environment_rewards(self._flow)[0]), imports,
            sum(other.role == "environment" for other in self._table.plan),
            self._config.model.chat_template_kwargs, self.sources.picture_digest, self._origin_of(actor),
            self._flow.policies, str(stage.model) if len(self._flow.policies) > 1 else "",
            {other.name: other.policy for other in self._table.plan if other.policy},
        )  # fmt: skip

    def _reward_plan(self, actor: ActorPlan) -> RewardPlan:
        imports = tuple(self.local(actor.name, file) for file in self._config.imports)
        function, options = reward_of(self._flow, str(actor.stage), self._config)
        config = replace(self._config.reward, function=self._code_of(actor, function), options=dict(options))
        steps = self._config.trainer.max_steps
        plan = RewardPlan(actor.name, config, imports, max_steps=steps, origin=self._origin_of(actor))
        if self._judges(actor):
            plan = replace(plan, make_pool=self._judge_spec(actor, options).make)
        if not self._flow.of_kind("reward"):
            return plan
        stage = self._flow.stage(str(actor.stage))
        (column,) = stage.writes
        served = RewardStage(stage.name, column.name, stage.reads[1], column.nan_ok)
        return replace(plan, function=stage.function, stage=served)

    def _judges(self, actor: ActorPlan) -> bool:
        """Return whether the actor scores by an engine of its own."""
        if actor.role != "reward":
            return False
        return has_own_judge(*reward_of(self._flow, str(actor.stage), self._config))

    def _judge_spec(self, actor: ActorPlan, options: Mapping[str, Any]) -> JudgeSpec:
        config = self._config.reward
        path, threads = self.local(actor.name, self._judge_path), max(1, int(config.cpus_per_worker))
        return JudgeSpec(path, config.judge, options, threads, config.timeout_s, config.with_thinking)

    @property
    def _judge_path(self) -> str:
        return self._config.model.paths.get(JUDGE, self._model_path)

    def _trainer_spec(self, actor: ActorPlan) -> TrainerSpec:
        config, stage = self._config, self._flow.stage(str(actor.stage))
        states = f"{self._root}/{STATES}/{POLICY}"
        has_engines = any(other.role == "rollout" for other in self._table.plan)
        are_replaced = replaces_members(config) or not has_engines
        return TrainerSpec(
            model_path=self.local(actor.name, self._model_path),
            policies=stage.policies,
            own_models={name: self.local(actor.name, path) for name, path in self._own_models.items()},
            in_trainer=tuple(self._flow.in_trainer),
            columns=self._flow.columns,
            epochs_per_batch=config.algorithm.epochs_per_batch,
            is_saved=bool(config.checkpoint.every_steps),
            checkpoint_timeout_s=config.checkpoint.timeout_s,
            phase_timeout_s=config.weights.phase_timeout_s,
            memory_checkpoint_root=states if config.faults.keep_state and are_replaced else None,
            keeps_beside=config.keeps_beside,
            after_step=self._resumed.step if self._resumed is not None else 0,
            slot_rank=config.serve.slot_rank,
            max_staleness=config.max_staleness,
            leaves_out_old=config.old_turns_are_context,
            keeps_caches=config.rollout.keeps_caches,
            publishes=has_engines and replaces_members(config),
            probes=probes_engines(config, self._flow),
            **self._of_rank(actor, stage),
        )

    def _scorer_spec(self, actor: ActorPlan) -> ScorerSpec:
        stage = self._flow.stage(str(actor.stage))
        path = self.local(actor.name, self._scored_by(stage))
        rows_alone = is_exact(self._config, self._flow)
        return ScorerSpec(
            model_path=path,
            columns=tuple(column.name for column in stage.writes),
            candidates=stage.candidates,
            rows_of=stage.rows_of,
            prompt=HINTED if HINTED in stage.reads else "prompt_ids",
            rows_alone=rows_alone,
            **self._of_rank(actor, stage),
        )

    def _of_rank(self, actor: ActorPlan, stage: Stage) -> dict[str, Any]:
        """Arguments that trainers and scorers have in common."""
        config = self._config
        trainer = config.trainer.of_scorer(stage.name) if actor.role == "scorer" else config.trainer
        return {
            "name": actor.name,
            "config": trainer,
            "rank": actor.rank,
            "num_ranks": trainer.num_ranks,
            "num_threads": self._threads_of(actor),
            "stage": stage.name,
            "head": "scores" if stage.is_scored else "policy",
            "temperature": config.rollout.sampling.temperature if self._flow.of_kind("rollout") else 1.0,
            "attention": config.model.attention,
            "engine_dtype": config.rollout.dtype,
            "expands_segments": choose_transport(config) != "ipc",
            "picture_digest": self.sources.picture_digest,
            "origin": self._origin_of(actor),
            "records_root": records_of(self._root, stage.name),
        }

    def _origin_of(self, actor: ActorPlan) -> Origin | None:
        """The origin of what the actor measures."""
        return origin_of(self._config, self._namespace, actor.role, actor.name)

    @property
    def _own_models(self) -> Mapping[str, str]:
        """Models that policies start from which are whole models, by name."""
        return self._config.own_models(self._model_path)

    @property
    def _draft_path(self) -> str:
        """The model that drafts tokens for engines; empty: none does."""
        is_used = self._config.rollout.speculation.method == DRAFT
        return self._config.model.paths[DRAFT] if is_used else ""

    def _sampled_by(self, engine: ActorPlan) -> str:
        """The model of an engine."""
        return self._own_models.get(engine.policy, self._model_path)

    def _scored_by(self, stage: Stage) -> str:
        """The model of a scorer's stage."""
        return self._config.model.path_of(str(stage.model), self._model_path)

    def _node_of(self, name: str) -> str:
        return self._reservation.assignment.node_of[name].id


def records_of(root: str, stage: str) -> str:
    """The directory on each node for what NCCL's watchdog writes of the ranks of a stage. `root`: the run's."""
    return f"{root}/{STACKS}/{stage}"


def probes_engines(config: RunConfig, flow: Dataflow) -> bool:
    """Return whether engines score rows of each step again (`workers/trainer/probe.py`): where tokens may be older than
    the trainer's weights, by an engine that is awake, scores prompts beside its samples, and has the model of any
    row."""
    rollout = config.rollout
    is_plain = rollout.sampling.temperature > 0 and not (rollout.max_pictures or rollout.router_replay)
    can = rollout.capabilities.scores_beside and config.placement != "colocated" and bool(flow.of_kind("rollout"))
    return config.max_staleness > 0 and is_plain and can and not config.trainer.own_models


def is_exact(config: RunConfig, flow: Dataflow) -> bool:
    """Return whether the weights that a run ends with are to depend on nothing but its settings: without staleness, and
    if responses are sampled by an engine that does not batch groups."""
    return config.max_staleness == 0 and (config.rollout.capabilities.is_exact or not flow.of_kind("rollout"))


def cores_here() -> int:
    """Number of cores of the driver's machine that this process may use."""
    return len(os.sched_getaffinity(0))


def _is_code(value: Any) -> bool:
    return isinstance(value, str) and bool(file_of(value))
