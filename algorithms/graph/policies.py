"""Several policies that learn in one run: one batch, one step and one version for all, and a row of each in every
attempt.

    rollout ─ policy, response_ids, reward, … ─▶ compute (by policy) ─ advantage ─▶ train (solver, proposer)

Two calls of `flow.train` name two policies of one train stage, each with its loss. A row belongs to the policy that has
sampled it. Functions per group or batch compare the rows of one policy; those per sample have no need to.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from penstock.algorithms.graph.columns import POLICY, STANDARD_COLUMNS
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.algorithms.graph.stage import ByPolicy, Stage
from penstock.conf.errors import DataflowError, suggest

NAME = re.compile("[a-z][a-z0-9_]*")
PREFIXES = (
    "accuracy", "actor", "critic", "dropped", "environment", "evaluation", "hash", "idle", "lag", "mismatch", "probe",
    "ranks", "reward", "rollout", "staleness", "store", "timing_s", "turns",
)  # fmt: skip
"""Prefixes of metrics that are no policy's."""


def with_policies(flow: Dataflow) -> Dataflow:
    """The graph of `flow` with a column that says which policy has sampled a row, where it trains several. Raises
    `DataflowError` for names that metrics cannot have, and for what cannot be done by policy."""
    names = flow.policies
    if len(names) < 2 or POLICY in flow.columns:
        return flow
    _check_names(names)
    if not flow.has_environment:
        raise DataflowError(
            f"the dataflow trains {' and '.join(names)}, and nothing says which of them speaks. Set environment.name "
            "to an environment that calls ctx.sample(..., policy=...)."
        )
    return Dataflow([_by_policy(stage, names) for stage in flow.stages], flow.samples_per_prompt)


def _by_policy(stage: Stage, names: Sequence[str]) -> Stage:
    if stage.kind == "rollout":
        if stage.model not in names:
            raise DataflowError(
                f"flow.rollout({stage.model!r}): it names the policy that answers a ctx.sample without policy=, and "
                f"none of {' and '.join(names)} has this name{suggest(str(stage.model), names)}"
            )
        return replace(stage, writes=(*stage.writes, STANDARD_COLUMNS[POLICY]))
    if stage.kind == "train":
        if stage.is_scored:
            raise DataflowError("a loss of scores trains a model with a head of its own, not one of several policies.")
        return replace(stage, reads=(*stage.reads, POLICY))
    if stage.kind not in ("compute", "filter") or (stage.unit == "sample" and not isinstance(stage.function, ByPolicy)):
        return stage
    if stage.state is not None:
        raise DataflowError(
            f"stage {stage.name!r} carries a state from batch to batch, which the rows of {' and '.join(names)} would "
            "share. Give it none, or train one policy."
        )
    assert stage.function is not None
    function = stage.function if isinstance(stage.function, ByPolicy) else ByPolicy(stage.function)
    if unknown := next((name for name in function.names if name not in names), None):
        raise DataflowError(f"stage {stage.name!r} has a function for policy {unknown!r}{suggest(unknown, names)}")
    if missing := [name for name in names if function.names and name not in function.names]:
        raise DataflowError(f"stage {stage.name!r} has no function for policy {missing[0]!r}.")
    return replace(stage, function=function, reads=tuple(dict.fromkeys((*stage.reads, POLICY))))


def _check_names(names: Sequence[str]) -> None:
    for name in names:
        if not NAME.fullmatch(name) or name in PREFIXES:
            raise DataflowError(
                f"flow.train({name!r}): the metrics of a policy begin with its name, which is lower-case letters, "
                f"digits and _, and none of {', '.join(PREFIXES)}."
            )
