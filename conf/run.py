"""The whole configuration of a run, as one dataclass."""

import math
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from penstock.conf.algorithms import AlgorithmConfig, PolicyGradientConfig
from penstock.conf.checks import POSITIVE, at_least, check_bounds, check_numbers, one_of
from penstock.conf.cluster import ClusterConfig
from penstock.conf.data import ENVIRONMENT, DataConfig, EvaluationConfig
from penstock.conf.diagnosis import DiagnosisConfig
from penstock.conf.environment import EnvironmentConfig
from penstock.conf.errors import ConfigError
from penstock.conf.faults import CheckpointConfig, FaultsConfig
from penstock.conf.model import ModelConfig
from penstock.conf.reward import ENVIRONMENT_REWARD, RewardConfig, WeightedRewardConfig
from penstock.conf.rollout import DRAFT, RolloutConfig
from penstock.conf.secret import hide_secrets
from penstock.conf.serve import ServeConfig
from penstock.conf.tracking import TrackingConfig
from penstock.conf.trainer import TrainerConfig
from penstock.conf.weights import (
    WeightsConfig,
    choose_transport,
    replaces_members,
    scorers_share_gpus,
    shares_gpus,
    takes_newcomers,
)


@dataclass
class StoreConfig:
    window: int = 1
    """Window of groups within which they may be trained out of order. 1: strict FIFO. A larger window lets later groups
    overtake a straggler, at the price of `ceil((window - 1) / groups_per_step)` of the staleness bound."""
    max_bytes: int = 4 * 2**30
    """Bytes of resident columns; producers wait above it."""
    lease_timeout_s: float = 60.0
    """Seconds after which a worker whose process gives no sign of life loses its rows to another. A thread of each
    client renews what it holds three times in it, however long the work takes and whatever blocks the worker's event
    loop. Raise it where one call holds Python's lock for longer."""
    inline_bytes: int = 2**16
    """Largest size of a write that travels in the call itself, in bytes; a larger one goes through a file in shared
    memory. Below a megabyte the copy is cheaper than the file."""
    shared_memory_mib: int = 1024
    """Shared memory for large writes, in MiB, on each node that writes some. What exceeds it is moved to that node's
    disk and read from there. Up to an eighth of it, and 128 MiB, is taken at the start, so that the first large batches
    find pages that are there already."""
    spill_dir: str | None = None
    """Disk that the excess is moved to, into a directory of the run's own that goes with it. null: the system's
    temporary directory."""

    def __post_init__(self) -> None:
        check_bounds(
            self, "store",
            window=1, max_bytes=1, shared_memory_mib=1, inline_bytes=0, lease_timeout_s=POSITIVE,
        )  # fmt: skip


@dataclass
class WarmStartConfig:
    """A run before the run, whose model this one starts from."""

    recipe: str | None = None
    """Recipe of the first run, e.g. arithmetic_sft. `null`: none. Ignored when model.path is set."""
    overrides: list[str] = field(default_factory=list)
    """Further overrides of it, as on the command line."""


PLANNED = (
    "placement", "rollout.num_workers", "rollout.tensor_parallel_size", "rollout.num_gpus_per_worker",
    "trainer.num_ranks", "trainer.num_gpus_per_rank", "trainer.tensor_parallel_size", "trainer.sequence_parallel_size",
    "trainer.shard_size", "trainer.offload", "trainer.activation_checkpointing", "trainer.scorer_ranks",
    "cluster.labels", "cluster.gpu_memory_gib", "plan",
)  # fmt: skip
"""Keys that plan=auto sets: placement and memory."""


@dataclass
class RunConfig:
    """The configuration of a run, in sections. It can be made in Python, or of words by `load_config`; docs/keys.md has
    every key."""

    recipe: str | None = None
    """Source of this run's defaults: set by `recipe=NAME` or `recipe=DIRECTORY`."""
    name: str | None = None
    """Name of the run and of its directory. `null`: the recipe's name and the time."""
    description: str = ""
    """Description of the recipe in one line, for `penstock recipes` and the report."""
    output_dir: str = "runs"
    """Place of the run directories: a directory of the driver's machine, or an fsspec URL such as s3://bucket/runs.
    With a URL checkpoints go there directly, and the run works in ~/.cache/penstock/runs (XDG_CACHE_HOME), from where
    everything else is uploaded during the run. resume=auto then works on another machine. A URL cannot be locked: two
    machines must not run one name at once."""
    seed: int = 0
    """Seed of everything that is random."""
    max_staleness: int = 0
    """Versions that a trained token's weights may be behind. 0: synchronous, 1: one step off, k: asynchronous."""
    plan: str = "auto"
    """Split of GPUs between engines and ranks. auto: placement and memory of a run on GPUs, or of a session, are chosen
    for the present ones, as `penstock plan` does; max_staleness stays, and so do keys of the command line, of a recipe
    of one's own and of a Python program. never: those of packaged recipes and model presets hold, too."""
    placement: str = "disaggregated"
    """Placement of engines and trainers. disaggregated: they have devices of their own. colocated: they share them in
    turns: engines sleep while the policy is trained, trainers make room while it generates. Needs max_staleness=0;
    changes no result."""
    imports: list[str] = field(default_factory=list)
    """Python files (relative to the recipe) that register algorithms, rewards or losses."""
    resume: str = "never"
    """Checkpoint to resume from. never: none; auto: the newest of the run called `name`, if there is one; or the
    directory of a checkpoint, or of a run: a new run starts from it."""
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    other_models: dict[str, WarmStartConfig] = field(default_factory=dict)
    """Runs before the run that make further models of the dataflow, by the models' names: {teacher: {recipe: sft}}.
    They start from the model that this run starts from, unless their overrides name another model.path. Those that
    model.paths names are not made."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rewards: list[WeightedRewardConfig] = field(default_factory=list)
    """Several rewards in the place of reward.function: [{function: math_verify}, {function: brevity.py:short, weight:
    0.1}]. Each is a metric, reward/NAME, and their weighted sum is the reward. Held-out accuracy goes by the first."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    diagnosis: DiagnosisConfig = field(default_factory=DiagnosisConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)

    def __post_init__(self) -> None:
        at_least("max_staleness", self.max_staleness, 0)
        one_of("plan", self.plan, ("auto", "never"))
        one_of("placement", self.placement, ("disaggregated", "colocated"))
        if not self.output_dir.strip():
            raise ConfigError("output_dir=: names no place. Set it to a directory, such as runs, or a URL.")
        hide_secrets(self)

    @property
    def algorithm_of_run(self) -> AlgorithmConfig:
        """The algorithm's configuration, with what it takes from the rest of the run."""
        if isinstance(self.algorithm, PolicyGradientConfig) and not self.algorithm.constant_tokens:
            return replace(self.algorithm, constant_tokens=self.longest_response)
        return self.algorithm

    @property
    def diagnosis_of_run(self) -> DiagnosisConfig:
        """The limits of the diagnosis, with what they take from the rest of the run."""
        is_exact = self.rollout.dtype == self.trainer.dtype == "float32"
        return replace(self.diagnosis, mismatch=self.diagnosis.largest_mismatch(is_exact=is_exact))

    @property
    def longest_response(self) -> int:
        """Most tokens that the policy may sample for a row."""
        return self.rollout.sampling.max_tokens if self.environment.name is None else self.environment.max_tokens

    @property
    def recipe_name(self) -> str:
        """The recipe's bare name, or `run` without one."""
        return PurePath(self.recipe).name if self.recipe else "run"

    @property
    def keeps_beside(self) -> bool:
        """True if ranks copy their state beside the next step, and not within their own (faults.keep_beside)."""
        if not self.faults.keep_state or self.max_staleness == 0 or not replaces_members(self):
            return False
        wanted = self.faults.keep_beside
        return self.trainer.num_gpus_per_rank > 0 if wanted == "auto" else wanted == "always"

    @property
    def shares_prefixes(self) -> bool:
        """True if ranks may compute once what the rows of a group begin with, so that they go to one rank. Whether they
        do depends on the model, too."""
        sharing, rollout = self.trainer.share_prefixes, self.rollout
        if sharing == "never" or self.model.attention != "sdpa" or rollout.max_pictures or rollout.router_replay:
            return False
        return sharing == "always" or not self.trainer.compile

    @property
    def finishes_sequences(self) -> bool:
        """True if an engine finishes its sequences before it loads new weights."""
        return self.rollout.update_mode == "finish" and self.max_staleness > 0

    @property
    def old_turns_are_context(self) -> bool:
        return self.environment.name is not None and self.environment.old_turns == "context"

    @property
    def window_staleness(self) -> int:
        """Part of the staleness bound that the order window takes: `ceil((w - 1) / P)`, in versions. Nothing where
        turns that are too old are not trained."""
        if self.old_turns_are_context:
            return 0
        return math.ceil((self.store.window - 1) / self.trainer.groups_per_step)

    @property
    def replay_staleness(self) -> int:
        """Part of the staleness bound that is left for rows that are trained again, in versions."""
        return self.trainer.replay.steps if self.trainer.replay.share else 0

    def evaluates(self, step: int) -> bool:
        """Return whether the policy is evaluated after this step."""
        every = self.evaluation.every_steps
        return every > 0 and (step % every == 0 or step == self.trainer.max_steps)

    @property
    def evaluates_beside(self) -> bool:
        """True if training goes on while a version is evaluated: engines keep it that are not needed for the next, and
        a checkpoint does where the run may end with it."""
        can_end = self.evaluation.stop_at_accuracy is None or self.checkpoint.every_steps > 0
        may_lend = takes_newcomers(self) and not self.trainer.own_models  # of which each would have to lend one
        return (self.max_staleness > 0 or self.evaluation.num_workers > 0) and may_lend and can_end

    def own_models(self, model_path: str) -> dict[str, str]:
        """Path of the model that each policy starts from, of several that are whole models; empty for all others.
        `model_path`: of those that `model.paths` does not name."""
        return {name: self.model.paths.get(name, model_path) for name in self.trainer.own_models}

    @property
    def num_publications(self) -> int:
        """Number of publications that a node with engines has room for: two take turns, and one stays while engines
        that are lent evaluate it."""
        can_lend = self.num_engines > 1 or self.rollout.follows_cluster
        return 3 if self.evaluation.every_steps and self.evaluates_beside and can_lend else 2

    @property
    def num_engines(self) -> int:
        """Number of engines that the run starts with, those of evaluations included."""
        return self.rollout.least_workers + self.evaluation.num_workers

    @property
    def saves_evaluated(self) -> bool:
        """True if each evaluated step is saved: its score, which may come later, decides what becomes of it."""
        may_end = self.evaluates_beside and self.evaluation.stop_at_accuracy is not None
        return self.checkpoint.every_steps > 0 and (self.checkpoint.keep_best > 0 or may_end)

    def with_held_out(self, name: str | None = None) -> "RunConfig":
        """Return the configuration as if the held-out problems of a set were those of evaluation itself, and all tasks
        were the environment's held-out ones. `name`: the set's; None: evaluation's own."""
        data, evaluation = self.data, self.evaluation
        if name is not None:
            data, evaluation = evaluation.of_set(name, data)
        options = self.environment.options | self.environment_changes(name)
        return replace(self, data=data, evaluation=evaluation, environment=replace(self.environment, options=options))

    def environment_changes(self, name: str | None = None) -> dict[str, Any]:
        """What evaluation, or a set of it, changes of the environment's options: its own are those of the data where
        these are no tasks of the environment."""
        held_out = self.evaluation if name is None else self.evaluation.sets[name]
        return (held_out.options or {}) if self.data.source == ENVIRONMENT else {}

    @property
    def max_active_groups(self) -> int:
        """Most groups between admission and publication, `(S + 1) P`. S: `max_staleness` without what the window takes,
        and replay."""
        left = self.max_staleness - self.window_staleness - self.replay_staleness
        return (left + 1) * self.trainer.groups_per_step

    @property
    def max_engines(self) -> int:
        """Most engines with `rollout.num_workers=auto`: one more than groups are under way would have nothing to do."""
        return min(self.max_active_groups, self.rollout.max_workers or self.max_active_groups)


def validate(config: RunConfig) -> None:
    """Check numbers, and across sections. Raises `ConfigError` naming the keys."""
    check_numbers(config)
    at_least("algorithm.group_size", config.algorithm.group_size, 1)
    at_least("algorithm.epochs_per_batch", config.algorithm.epochs_per_batch, 1)
    if config.window_staleness > config.max_staleness:
        raise ConfigError(
            f"store.window={config.store.window} lets groups be overtaken by {config.window_staleness} version(s), "
            f"more than max_staleness={config.max_staleness}. Set store.window=1 or raise max_staleness to "
            f"{config.window_staleness}."
        )
    _check_replay(config)
    _check_keep_best(config)
    _check_evaluation_engines(config)
    sampling = config.rollout.sampling
    if sampling.max_tokens >= config.rollout.max_model_len:
        raise ConfigError(
            f"rollout.sampling.max_tokens={sampling.max_tokens} leaves no room for a prompt in "
            f"rollout.max_model_len={config.rollout.max_model_len}. Lower the first or raise the second."
        )
    if config.data.kind in ("reasoning_gym", "python", ENVIRONMENT) and config.evaluation.seed == config.data.seed:
        raise ConfigError(
            f"evaluation.seed={config.evaluation.seed} equals data.seed: the held-out problems would be the trained "
            "ones. Choose another evaluation.seed."
        )
    if config.placement == "colocated":
        _check_colocated(config)
    if config.rollout.follows_cluster and not (config.cluster.cpus_per_worker or config.rollout.num_gpus_per_worker):
        raise ConfigError(
            "rollout.num_workers=auto counts what engines reserve, and with cluster.cpus_per_worker=0 and "
            "rollout.num_gpus_per_worker=0 that is nothing. Raise one of them, or name a number of engines."
        )
    if config.data.source == ENVIRONMENT and config.data.system_prompt:
        raise ConfigError(
            f"data.system_prompt={config.data.system_prompt!r:.60}: with data.source=environment nobody reads it, as "
            "the environment writes its own messages. Say it there, or take the tasks from a dataset."
        )
    if config.environment.name is None and any(reward.function == ENVIRONMENT_REWARD for reward in config.rewards):
        raise ConfigError(
            "rewards: function: environment is what the environment gives, and there is none. Set environment.name."
        )
    if config.resume == "auto" and config.name is None:
        raise ConfigError(
            "resume=auto looks for checkpoints of the run called `name`, which is not set. Add name=RUN, or give "
            "resume= the directory of a checkpoint."
        )
    if config.trainer.num_minibatches > config.trainer.groups_per_step:
        raise ConfigError(
            f"trainer.num_minibatches={config.trainer.num_minibatches} exceeds trainer.groups_per_step="
            f"{config.trainer.groups_per_step}: a minibatch needs at least one group."
        )
    if config.rollout.router_replay and (config.trainer.compile or config.trainer.sequence_ranks > 1):
        raise ConfigError(
            f"rollout.router_replay=true: experts are replayed where routers run, on whole rows, and trainer.compile="
            f"{str(config.trainer.compile).lower()} with trainer.sequence_parallel_size="
            f"{config.trainer.sequence_parallel_size}. Set trainer.compile=false and trainer.sequence_parallel_size=1."
        )
    for check in (choose_transport, _check_speculation, _check_finishes, _check_gpus):
        check(config)


def _check_speculation(config: RunConfig) -> None:
    """Refuse drafts where vLLM cannot check them, or an engine cannot begin again without them."""
    rollout, speculation = config.rollout, config.rollout.speculation
    if not speculation.is_on:
        return
    refusals = {
        f"only vLLM checks drafted tokens, and rollout.engine={rollout.engine}": not rollout.capabilities.speculates,
        f"model.paths.{DRAFT} is not set, to a smaller model with the vocabulary of model.path": (
            speculation.method == DRAFT and DRAFT not in config.model.paths
        ),
        f"vLLM cannot check drafts with rollout.sampling.min_p={rollout.sampling.min_p}": rollout.sampling.min_p > 0,
        f"on a CPU vLLM cannot check drafts with rollout.sampling.top_k={rollout.sampling.top_k}": (
            rollout.sampling.top_k > 0 and not rollout.num_gpus_per_worker
        ),
        "vLLM cannot check drafts where some tokens are never sampled, as with rollout.max_pictures="
        f"{rollout.max_pictures}": rollout.max_pictures > 0,
        "experts of drafted tokens are not compared with the trainer's, and rollout.router_replay=true": (
            rollout.router_replay
        ),
        "rollout.engine_options.speculative_config is set as well": "speculative_config" in rollout.engine_options,
        f"an engine cannot begin again on a part of a GPU, and rollout.num_gpus_per_worker="
        f"{rollout.num_gpus_per_worker:g}": 0 < rollout.num_gpus_per_worker < 1,
        "an engine cannot begin again once it has met the ranks, and weights.transport="
        f"{config.weights.transport}": not replaces_members(config),
        "an engine that begins again forgets the adapters of a server's clients": config.serve.slot_rank is not None,
    }
    for why, is_refused in refusals.items():
        if is_refused:
            raise ConfigError(
                f"rollout.speculation.method={speculation.method}: {why}. Change that, or set "
                "rollout.speculation.method=none."
            )


def _check_replay(config: RunConfig) -> None:
    """Check that rows are young enough to be trained again."""
    replay, taken = config.replay_staleness, config.window_staleness
    if replay + taken > config.max_staleness:
        beside = f" beside the {taken} of store.window={config.store.window}" if taken else ""
        raise ConfigError(
            f"trainer.replay.steps={replay}: with max_staleness={config.max_staleness} no row is young enough to be "
            f"trained again{beside}. Set max_staleness={replay + taken} or more, or trainer.replay.share=0."
        )
    if replay and config.rollout.max_pictures:
        raise ConfigError(
            f"trainer.replay.share={config.trainer.replay.share:g}: rows with pictures are not kept to be trained "
            "again. Set it to 0."
        )


def _check_keep_best(config: RunConfig) -> None:
    """Check that checkpoints have scores, where the best are kept."""
    checkpoint, evaluation = config.checkpoint, config.evaluation
    if not checkpoint.keep_best:
        return
    key = f"checkpoint.keep_best={checkpoint.keep_best}"
    if not evaluation.every_steps:
        raise ConfigError(
            f"{key}: nothing is evaluated, so no checkpoint has a score. Set evaluation.every_steps, or "
            "checkpoint.keep_best=0."
        )
    if not checkpoint.every_steps:
        raise ConfigError(
            f"{key}: checkpoint.every_steps=0 takes no checkpoints. Set it to {evaluation.every_steps} or more, or "
            "checkpoint.keep_best=0."
        )
    metric, in_environment = checkpoint.best_metric, config.environment.name is not None
    named = [metric.partition("/")[0]] if "/heldout_reward/" in metric else []  # of a policy, which the dataflow names
    metrics = evaluation.metrics(in_environment=in_environment)
    if metric not in evaluation.metrics(in_environment=in_environment, policies=named):
        raise ConfigError(
            f"checkpoint.best_metric={metric}: evaluation measures {', '.join(metrics)}. Name one of "
            "them; evaluation.sets and evaluation.num_samples add more."
        )


def _check_finishes(config: RunConfig) -> None:
    """Check that engines can load new weights one after the other."""
    if not config.finishes_sequences:
        return
    key = "rollout.on_update=finish: engines take new weights one after the other, and"
    if config.rollout.num_workers == 1:
        raise ConfigError(
            f"{key} rollout.num_workers=1 would stand still until its longest sequence has ended. Set "
            "rollout.num_workers=2 or more, or rollout.on_update=recompute."
        )
    if not replaces_members(config):
        raise ConfigError(
            f"{key} weights.transport={config.weights.transport} streams them to all at once. Use "
            "weights.transport=shm, or rollout.on_update=recompute."
        )


def _check_evaluation_engines(config: RunConfig) -> None:
    """Check that evaluations can have engines of their own, where they are to."""
    key = f"evaluation.num_workers={config.evaluation.num_workers}"
    if not config.evaluation.num_workers:
        return
    if not config.evaluation.every_steps:
        raise ConfigError(f"{key}: nothing is evaluated. Set evaluation.every_steps, or evaluation.num_workers=0.")
    if config.rollout.follows_cluster:
        raise ConfigError(
            f"{key}: rollout.num_workers=auto would take their room. Set rollout.num_workers to a number."
        )
    if not takes_newcomers(config):
        raise ConfigError(
            f"{key}: engines with placement={config.placement} and weights.transport={config.weights.transport} load "
            "each version with the others. Set evaluation.num_workers=0, or placement=disaggregated with "
            "weights.transport=shm."
        )
    if not config.evaluates_beside:
        raise ConfigError(
            f"{key}: with evaluation.stop_at_accuracy and checkpoint.every_steps=0 no step is taken while a version is "
            "measured. Set checkpoint.every_steps, or evaluation.num_workers=0."
        )


def _check_gpus(config: RunConfig) -> None:
    """Check that every process of an engine can have the GPU that it is promised: Ray gives an actor whole ones, or a
    part of one."""
    gpus, size = config.rollout.num_gpus_per_worker, config.rollout.tensor_parallel_size
    key = f"rollout.num_gpus_per_worker={gpus:g}"
    if gpus > 1:
        raise ConfigError(
            f"{key}: each of an engine's processes computes on one GPU, and rollout.tensor_parallel_size={size} of "
            f"them would use {size}. For engines of {math.ceil(gpus)} GPUs set rollout.num_gpus_per_worker=1 and "
            f"rollout.tensor_parallel_size={math.ceil(gpus)}."
        )
    if 0 < gpus < 1 and size > 1 and config.placement != "colocated":
        raise ConfigError(
            f"{key} with rollout.tensor_parallel_size={size}: an engine can have parts of several GPUs only where "
            "these are its ranks'; it would have all its processes on one. Set rollout.num_gpus_per_worker=1, "
            "rollout.tensor_parallel_size=1 or placement=colocated."
        )
    trainer = config.trainer
    numbers = {f"scorer_ranks.{name}": ranks for name, ranks in trainer.scorer_ranks.items()}
    numbers["num_scorer_ranks"] = trainer.num_scorer_ranks or trainer.num_ranks
    other = next((key for key, ranks in numbers.items() if ranks != trainer.num_ranks), None)
    if scorers_share_gpus(config) and other is not None:
        raise ConfigError(
            f"trainer.{other}={numbers[other]}: a scorer's rank has the GPU of a rank and "
            f"its engine, and trainer.num_ranks={config.trainer.num_ranks}. Leave it out, or give each kind its GPUs: "
            "placement=disaggregated, rollout.num_gpus_per_worker=1 and trainer.num_gpus_per_rank=1."
        )


def _check_colocated(config: RunConfig) -> None:
    """Check that engines and trainers can share devices in turns: they never overlap, and each engine has the device of
    one rank."""
    if config.max_staleness:
        raise ConfigError(
            f"placement=colocated takes turns, generation and training, and max_staleness={config.max_staleness} lets "
            "them overlap. Set max_staleness=0, or placement=disaggregated."
        )
    on_gpus = config.trainer.num_gpus_per_rank or config.rollout.num_gpus_per_worker
    if on_gpus and not shares_gpus(config):
        raise ConfigError(
            f"placement=colocated: trainer.num_gpus_per_rank={config.trainer.num_gpus_per_rank:g} and "
            f"rollout.num_gpus_per_worker={config.rollout.num_gpus_per_worker:g} do not share a GPU. Give each a part, "
            "such as 0.5 and 0.5."
        )
    engines, size, ranks = config.rollout.least_workers, config.rollout.tensor_parallel_size, config.trainer.num_ranks
    if on_gpus and size > 1 and engines * size > ranks:
        raise ConfigError(
            f"placement=colocated: rollout.num_workers={engines} engines of rollout.tensor_parallel_size={size} have "
            f"the GPUs of {engines * size} ranks, and there are {ranks}. Lower one of them, or set trainer.num_ranks="
            f"{engines * size}."
        )
    trainer = config.trainer
    if on_gpus and trainer.zero_stage == 1 and trainer.dtype == "bfloat16" and not trainer.offload:
        raise ConfigError(
            "placement=colocated: trainer.deepspeed.zero_stage=1 with trainer.dtype=bfloat16 stays on the GPU, since "
            "DeepSpeed has no way to move that optimizer. Set trainer.deepspeed.zero_stage=2 or trainer.engine=fsdp."
        )
    if config.rollout.follows_cluster:
        raise ConfigError(
            "rollout.num_workers=auto: with placement=colocated each engine has the device of a rank. Use as many "
            "engines as ranks, or placement=disaggregated."
        )
