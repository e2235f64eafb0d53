"""A stage, the node of a dataflow: what it reads, what it writes, and what becomes ready as a whole; the functions of
stages, with the columns that they read; and the conditions that the stages of a dataflow must meet to run.

The methods of `dataflow.py` make stages; actors, columns and pictures are made from them. Imports no torch, since the
graph of a dataflow is built without it.

Legend: G samples of one group, two here; T_i tokens of a response.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.algorithms.graph.columns import CANDIDATE_LOGPROBS, POLICY, Column
from penstock.conf.errors import DataflowError, suggest

T = TypeVar("T")
Function = Callable[..., Any]
UNITS = ("sample", "group", "batch")
GROUP_IDS = "group_ids"
"""A parameter that is no column: a function that has it gets the ids of groups."""
PROVIDED_BY_TRAINER = (
    "logprobs", "old_logprobs", "entropy", "mask", "totals", "group_ids", "values", "scores", CANDIDATE_LOGPROBS
)  # fmt: skip
"""Arguments of a loss that are no columns: see `workers/trainer/update/minibatches.py`."""


@dataclass(frozen=True)
class TrainedPolicy:
    """A policy of the train stage."""

    name: str
    loss: Function


@dataclass(frozen=True)
class Stage:
    """A node. `unit` is what becomes ready and is leased as a whole: a sample, a whole group, or the step's batch."""

    name: str
    kind: str
    """Kind: source, rollout, greedy_rollout, reward, logprobs, scores, values, staleness, compute, filter, critic,
    train."""
    unit: str
    reads: tuple[str, ...]
    writes: tuple[Column, ...]
    model: str | None = None
    function: Callable[..., Any] | None = None
    """Function of the stage. compute: the function. train: the loss. reward: the reward, or None for the one that
    `reward.function` names."""
    optional_reads: tuple[str, ...] = ()
    """Columns that are read if some stage writes them: arguments of the loss with a default."""
    candidates: int = 0
    """Tokens that a stage of log-probabilities tells of in each place, the likeliest ones; 0: the response's alone."""
    rows_of: tuple[str, str] | None = None
    """Field of the task, and its value in the rows that a stage of log-probabilities computes; the others get zeros.
    None: all rows."""
    reason: str = ""
    """Reason that a filter's dropped rows are counted under."""
    state: Any = None
    """Value of `state` at the first step, for a compute stage per batch; None for a function without."""
    rewarded: Any = None
    """Reward that a reward stage computes, of several (`WeightedRewardConfig`); None for the one that `reward.function`
    names."""
    in_environment: bool = False
    """True for a rollout in which an environment has the policy sample, in any number of turns (`catalogue.py`)."""
    policies: tuple[TrainedPolicy, ...] = ()
    """Policies that a train stage updates, in this order; `model` and `function` are those of the first."""

    @property
    def is_in_trainer(self) -> bool:
        """True for a stage that the trainers run on the step's whole batch, before the update: the store knows nothing
        of it."""
        return self.unit == "batch" and self.kind in ("compute", "values", "staleness", "critic")

    @property
    def is_scored(self) -> bool:
        """True for a model with a scalar head for whole responses, served or trained."""
        return self.kind == "scores" or self._has_loss_with("scores")

    @property
    def takes_groups(self) -> bool:
        """True if a loss compares the samples of a group, so that none is cut apart."""
        return self._has_loss_with(GROUP_IDS)

    @property
    def losses(self) -> list[Function]:
        """Losses of a train stage; else its function."""
        return [policy.loss for policy in self.policies] or [self.function]  # type: ignore[list-item]

    def _has_loss_with(self, parameter: str) -> bool:
        return self.kind == "train" and any(parameter in inspect.signature(loss).parameters for loss in self.losses)


Stages = Sequence[Stage]


def written_by(stages: Iterable[Stage]) -> dict[str, Column]:
    """Every column that one of these stages writes, by name."""
    return {column.name: column for stage in stages for column in stage.writes}


def reads_of(stage: Stage, stages: Iterable[Stage]) -> tuple[str, ...]:
    """All columns that a stage gets: those that it must have, and those that it may have and one of `stages` writes.
    Training waits for every filter."""
    stages = list(stages)
    written = written_by(stages)
    optional = (name for name in stage.optional_reads if name in written)
    verdicts = (one.writes[0].name for one in stages if one.kind == "filter") if stage.kind == "train" else ()
    return tuple(dict.fromkeys((*stage.reads, *optional, *verdicts)))


def check_stages(stages: Stages) -> None:
    """Raise `DataflowError`, which names the stage and the column, unless every column read has exactly one writer,
    units are possible, no stage waits for itself, and there is one train stage."""
    _check_ends(stages)
    _check_units(stages)
    writers = _writers(stages)
    for stage in stages:
        for column in stage.reads:
            if column not in writers:
                raise DataflowError(
                    f"stage {stage.name!r} reads column {column!r}, which no stage writes"
                    f"{suggest(column, writers)} {_mend(stage)}"
                )
    _check_cycles(stages, writers)
    _check_trainers_own(stages, writers)


def _of_kind(stages: Stages, kind: str) -> list[Stage]:
    return [stage for stage in stages if stage.kind == kind]


def _mend(stage: Stage) -> str:
    if stage.kind == "train":
        return "Add a stage that writes it, mend the parameter's name, or bind a setting: partial(loss, setting=...)."
    return "Add a stage that writes it, or mend the name."


def _check_ends(stages: Stages) -> None:
    if not _of_kind(stages, "source"):
        raise DataflowError("the dataflow has no rows: call flow.rollout(...) or flow.demonstrations() first.")
    ends = len(_of_kind(stages, "train"))
    if ends != 1:
        raise DataflowError(
            f"the dataflow has {ends} train stages; it needs exactly one flow.train(...), which ends the rows' life."
        )


def _check_units(stages: Stages) -> None:
    for stage in stages:
        if stage.unit not in UNITS:
            raise DataflowError(f"stage {stage.name!r}: per={stage.unit!r} is unknown{suggest(stage.unit, UNITS)}")
        if stage.kind == "filter" and stage.unit == "batch":
            raise DataflowError(f"stage {stage.name!r}: a filter is per='group' or per='sample'; a batch is trained.")
        if stage.kind in ("compute", "filter") and not (stage.reads and stage.writes):
            raise DataflowError(f"stage {stage.name!r}: a compute stage reads and writes at least one column each.")
        if stage.state is not None and stage.unit != "batch":
            raise DataflowError(f"stage {stage.name!r}: a state is carried from batch to batch; set per='batch'.")
        if stage.kind == "compute" and any(column.per_group for column in stage.writes):
            raise DataflowError(f"stage {stage.name!r}: only the source writes columns that a group shares.")


def _writers(stages: Stages) -> dict[str, Stage]:
    writers: dict[str, Stage] = {}
    for stage in stages:
        for column in stage.writes:
            if column.name in PROVIDED_BY_TRAINER:
                raise DataflowError(
                    f"stage {stage.name!r} writes column {column.name!r}, a name that the trainer gives to a loss "
                    f"itself ({', '.join(PROVIDED_BY_TRAINER)}). Write it under another name."
                )
            if column.name in writers:
                raise DataflowError(
                    f"column {column.name!r} is written by stage {writers[column.name].name!r} and by {stage.name!r}; "
                    "a column has one writer. Write one of them under another name."
                )
            writers[column.name] = stage
    return writers


def _check_trainers_own(stages: Stages, writers: dict[str, Stage]) -> None:
    """Check that what is computed in the trainers does not leave them."""
    for stage in stages:
        for column in reads_of(stage, stages):
            writer = writers[column]
            if writer.is_in_trainer and not (stage.is_in_trainer or stage.kind == "train"):
                raise DataflowError(
                    f"stage {stage.name!r} reads column {column!r}, which stage {writer.name!r} writes per='batch', "
                    "when the batch is formed; only the loss and other per='batch' stages can read it. Make the writer "
                    "per='group', or the reader per='batch'."
                )


def _check_cycles(stages: Stages, writers: dict[str, Stage]) -> None:
    done: set[str] = set()

    def visit(stage: Stage, path: tuple[str, ...]) -> None:
        if stage.name in path:
            raise DataflowError(f"stages wait for each other in a circle: {' → '.join((*path, stage.name))}.")
        if stage.name in done:
            return
        for column in reads_of(stage, stages):
            visit(writers[column], (*path, stage.name))
        done.add(stage.name)

    for stage in stages:
        visit(stage, ())


def columns_read(function: Function) -> list[str]:
    """Parameters without a default: the columns that a `compute` or `filter` stage must read for the function."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.name != GROUP_IDS]


class ParameterAlias:
    """The function, with one parameter under the name of another column. Pickles where the function does.

    >>> columns_read(ParameterAlias(lambda reward: reward, "reward", "shaped_reward"))
    ['shaped_reward']
    """

    def __init__(self, function: Function, parameter: str, column: str) -> None:
        self.function, self.parameter, self.column = function, parameter, column
        self.__name__ = name_of(function, "compute")

    @property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(self.function)
        parameters = signature.parameters.values()
        return signature.replace(
            parameters=[p.replace(name=self.column) if p.name == self.parameter else p for p in parameters]
        )

    def __call__(self, **arguments: Any) -> Any:
        arguments[self.parameter] = arguments.pop(self.column)
        return self.function(**arguments)


class ByPolicy:
    """A function of columns that is called on the rows of each policy by themselves, or one function a policy. Pickles
    where they do.

    >>> import torch
    >>> mean = ByPolicy(lambda reward: reward - reward.mean())
    >>> mean(policy=["solver", "proposer", "solver"], reward=torch.tensor([1.0, 5.0, 3.0]))
    tensor([-1.,  0.,  1.])
    """

    def __init__(self, functions: Function | Mapping[str, Function]) -> None:
        """`functions`: by policy, or one for all. A column goes to those that have a parameter of its name."""
        self._functions = functions
        self.names = tuple(functions) if isinstance(functions, Mapping) else ()
        """Policies that have a function of their own; empty if all have the same."""
        self.__name__ = name_of(self.each[0], "compute")

    @property
    def each(self) -> list[Function]:
        """The functions that it calls."""
        return list(self._functions.values()) if isinstance(self._functions, Mapping) else [self._functions]

    @property
    def __signature__(self) -> inspect.Signature:
        parameters = {POLICY: inspect.Parameter(POLICY, inspect.Parameter.KEYWORD_ONLY)}
        for function in self.each:
            for name, parameter in inspect.signature(function).parameters.items():
                parameters.setdefault(name, parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        return inspect.Signature(list(parameters.values()))

    def __call__(self, *, policy: Sequence[str], **columns: Any) -> Any:
        places = {name: [at for at, one in enumerate(policy) if one == name] for name in dict.fromkeys(policy)}
        found = {name: self._call(name, columns, rows) for name, rows in places.items()}
        first = next(iter(found.values()))
        if not isinstance(first, tuple):
            return _joined(found, places)
        return tuple(
            _joined({name: values[number] for name, values in found.items()}, places) for number in range(len(first))
        )

    def _call(self, name: str, columns: Mapping[str, Any], rows: list[int]) -> Any:
        function = self._functions[name] if isinstance(self._functions, Mapping) else self._functions
        parameters = inspect.signature(function).parameters
        takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        own = {key: values for key, values in columns.items() if takes_all or key in parameters}
        return function(**{
            key: [values[row] for row in rows] if isinstance(values, list) else values[rows]
            for key, values in own.items()
        })  # fmt: skip


def _joined(found: Mapping[str, Any], places: Mapping[str, list[int]]) -> Any:
    """Values of all rows in their order, from those of each policy: lists, tensors, or a bool for all of its rows."""
    import torch  # late: nothing else here needs it

    rows = {row: (name, number) for name, own in places.items() for number, row in enumerate(own)}
    values = [
        found[name] if isinstance(found[name], bool) else found[name][number]
        for name, number in (rows[row] for row in range(len(rows)))
    ]
    if any(isinstance(each, list) for each in found.values()):
        return values
    return torch.stack([torch.as_tensor(one) for one in values])


def name_of(function: object, otherwise: str) -> str:
    """The name of a function, in graphs and in messages: its own, or that of the function that a `functools.partial`
    binds."""
    return str(getattr(getattr(function, "func", function), "__name__", otherwise))


def pair_responses(chosen_ids: Sequence[T], rejected_ids: Sequence[T]) -> tuple[list[T], list[float]]:
    """Convert a dataset's pair of responses to two samples of one group, the first stage of `Dataflow.preferences`: the
    chosen response is sample 0, the rejected one sample 1. Returns `response_ids`, two `[T_i]`, and `preferred` `[G]`,
    +1 and -1. Each of the arguments has the same tokens G times, since the source writes them for the group."""
    return [chosen_ids[0], rejected_ids[0]], [1.0, -1.0]
