"""The specification of a store: the columns and stages of one dataflow and the bounds of one run. Plain data, made
once."""

from dataclasses import dataclass

from penstock.algorithms.graph.columns import Column
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.run import RunConfig

REPORTED_COLUMNS = ("reward", "finish_reason", "token_versions", "behavior_logprobs", "turn_tokens")
"""Columns handed to the train stage where they exist, for the metrics of the step, whatever the loss reads."""


def environment_rewards(flow: Dataflow) -> tuple[str, ...]:
    """Names of the rewards that an environment gives."""
    rollouts = flow.of_kind("rollout")
    return tuple(column.name for stage in rollouts for column in stage.writes if column.name.startswith("reward"))


@dataclass(frozen=True)
class StageSpec:
    """A consumer of rows. It may start on a unit once every row of the unit has all its `reads`."""

    name: str
    unit: str  # sample, group, batch
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    whole_groups: bool = False
    """True for a batch of which all samples of a group go to the same rank."""


@dataclass(frozen=True)
class StoreSpec:
    columns: tuple[Column, ...]
    source_columns: tuple[str, ...]
    stages: tuple[StageSpec, ...]
    group_size: int
    groups_per_step: int
    max_active_groups: int
    """The most groups between admission and publication: `(S + 1) P`."""
    max_staleness: int
    window: int = 1
    max_bytes: int = 4 * 2**30
    lease_timeout_s: float = 60.0
    inline_bytes: int = 2**16
    shared_bytes: int = 2**30
    spill_dir: str | None = None
    straggler_factor: float = 0.0
    """A factor of the median time: a group that an engine has for longer is offered to another; 0: never."""
    shares_prefixes: bool = False
    """True if ranks compute the prompt of a group once, so that its rows go to one of them."""
    old_turns_are_context: bool = False
    """True if a row may have tokens that are too old as long as it has others: the trainer leaves them out."""
    keeps_outcomes: bool = False
    """True if the source of groups asks how they ended (`data.curriculum`)."""
    strict: bool = True
    """True if a staleness violation raises (tests), False if it evicts the group (production)."""

    @classmethod
    def of(cls, flow: Dataflow, config: RunConfig, *, strict: bool = False) -> "StoreSpec":
        columns = flow.stored_columns
        stages = []
        for stage in flow.stages:
            if stage.kind == "source" or stage.is_in_trainer:
                continue
            reads = flow.reads_of(stage)
            if stage.kind == "train":
                rewards = (column.name for stage in flow.stages if stage.kind == "reward" for column in stage.writes)
                reported = (
                    name for name in (*REPORTED_COLUMNS, *rewards, *environment_rewards(flow)) if name in columns
                )
                reads = tuple(dict.fromkeys((*flow.batch_reads(), *reported)))
            writes = tuple(column.name for column in stage.writes)
            stages.append(StageSpec(stage.name, stage.unit, reads, writes, stage.takes_groups))
        return cls(
            columns=tuple(columns.values()),
            source_columns=tuple(column.name for column in flow.stage("source").writes),
            stages=tuple(stages),
            group_size=flow.rows_per_group,
            groups_per_step=config.trainer.groups_per_step,
            max_active_groups=config.max_active_groups,
            max_staleness=config.max_staleness,
            window=config.store.window,
            max_bytes=config.store.max_bytes,
            lease_timeout_s=config.store.lease_timeout_s,
            inline_bytes=config.store.inline_bytes,
            shared_bytes=config.store.shared_memory_mib * 2**20,
            spill_dir=config.store.spill_dir,
            straggler_factor=config.faults.straggler_factor,
            shares_prefixes=config.shares_prefixes,
            old_turns_are_context=config.old_turns_are_context,
            keeps_outcomes=config.data.curriculum.by is not None,
            strict=strict,
        )
