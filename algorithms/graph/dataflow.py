"""An algorithm is a dataflow of columns: stages that read some columns of a row and write others.

    source ─ prompt_ids, task ─▶ rollout ─ response_ids, … ─▶ reward ─ reward ─▶ compute ─ advantage ─▶ train

The controller turns each stage into workers, the store turns each column into readiness, and neither knows the
algorithm. `algorithms/builtin/grpo.py` and its like (or a user) build it, `Dataflow.check` checks it,
`orchestrator/control/controller.py` runs it.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.algorithms.graph.columns import (
    CANDIDATE_LOGPROBS,
    CANDIDATES,
    HINTED,
    PROMPT_COLUMNS,
    ROLLOUT_COLUMNS,
    STANDARD_COLUMNS,
    Column,
    as_column,
)
from penstock.algorithms.graph.stage import (
    PROVIDED_BY_TRAINER,
    ByPolicy,
    Stage,
    TrainedPolicy,
    check_stages,
    name_of,
    pair_responses,
    reads_of,
    written_by,
)
from penstock.conf.errors import DataflowError, suggest


@dataclass
class Dataflow:
    """A graph under construction.

    Each method adds a stage and returns the graph, so that calls chain:

        flow = Dataflow()
        flow.rollout("policy", samples_per_prompt=8)
        flow.reward()
        flow.compute(group_advantage, per="group", reads=["reward"], writes=["advantage"])
        flow.train("policy", loss=ppo_clip_loss)
        flow.check()
    """

    stages: list[Stage] = field(default_factory=list)
    samples_per_prompt: int = 1

    def demonstrations(self) -> "Dataflow":
        """Bring rows with their response, `response_ids` and `response_text`: supervised training, or feedback on
        single responses, which `reward` can score. Replaces the rollout."""
        writes = _columns((*PROMPT_COLUMNS, "response_ids", "response_text"), "source")
        return self._add(Stage("source", "source", "group", (), writes))

    def preferences(self) -> "Dataflow":
        """Bring rows in pairs, a chosen and a rejected response to the same prompt: writes `response_ids` and
        `preferred`, +1 or -1. Replaces the rollout."""
        self.samples_per_prompt = 2
        pair = (Column("chosen_ids", "int32", "prompt", per_group=True),
                Column("rejected_ids", "int32", "prompt", per_group=True))  # fmt: skip
        self._add(Stage("source", "source", "group", (), _columns((*PROMPT_COLUMNS, *pair), "source")))
        return self.compute(
            pair_responses, per="group", reads=["chosen_ids", "rejected_ids"], writes=["response_ids", "preferred"]
        )

    def rollout(self, model: str = "policy", *, samples_per_prompt: int) -> "Dataflow":
        """Sample `samples_per_prompt` responses to each prompt: they form a group."""
        if samples_per_prompt < 1:
            raise DataflowError(
                f"rollout: samples_per_prompt={samples_per_prompt} must be at least 1 (algorithm.group_size)."
            )
        self.samples_per_prompt = samples_per_prompt
        self._add(Stage("source", "source", "group", (), _columns(PROMPT_COLUMNS, "source")))
        writes = _columns(ROLLOUT_COLUMNS, "rollout")
        return self._add(Stage("rollout", "rollout", "group", ("prompt_ids",), writes, model=model))

    def greedy_rollout(self, model: str = "policy") -> "Dataflow":
        """Sample one response to each prompt with temperature 0, for baselines: writes its text as `greedy_text`, the
        same for all samples of the group. Comes after `rollout`."""
        writes = _columns(("greedy_text",), "greedy_rollout")
        return self._add(Stage("greedy_rollout", "greedy_rollout", "group", ("prompt_ids",), writes, model=model))

    def reward(
        self,
        function: Callable[..., Any] | None = None,
        *,
        writes: str | Column = "reward",
        text: str = "response_text",
        name: str = "reward",
    ) -> "Dataflow":
        """Score each response. `function=None`: the one that `reward.function` names. `text`: the column to score."""
        tokens = ("response_ids",) if text == "response_text" and "response_ids" in self.columns else ()
        reads = ("task", text, *tokens)
        return self._add(Stage(name, "reward", "sample", reads, _columns((writes,), name), function=function))

    def logprobs(
        self,
        model: str = "reference",
        *,
        candidates: int = 0,
        prompt: str = "prompt_ids",
        rows_of: tuple[str, str] | None = None,
    ) -> "Dataflow":
        """Compute log-probabilities of the responses under a model that is not trained: writes `<model>_logprobs`.

        `candidates`: a number of tokens, the likeliest in the place of each response token; `candidate_ids` and
        `teacher_candidates` have them, for a loss that takes `candidate_logprobs`. `prompt`: what the model reads
        before the response; `hinted_ids`: the prompt with a hint, which the source makes. `rows_of`: a field of the
        task, and its value in the rows that are the model's, of several (`choose_teacher_columns`); the columns of
        candidates are then `<model>_candidate_ids` and `<model>_candidates`.
        """
        name = f"{model}_logprobs"
        columns = [STANDARD_COLUMNS.get(name, Column(name, "float32", "token"))]
        if candidates:
            names = (CANDIDATES, "teacher_candidates")
            if rows_of is not None:
                names = (f"{model}_candidate_ids", f"{model}_candidates")
            kinds = zip(names, ("int32", "float32"), strict=True)
            columns += [STANDARD_COLUMNS.get(name, Column(name, dtype, "list")) for name, dtype in kinds]
        if prompt == HINTED:
            self.stages = [
                replace(one, writes=(*one.writes, STANDARD_COLUMNS[HINTED])) if one.kind == "source" else one
                for one in self.stages
            ]
        reads = (prompt, "response_ids") if rows_of is None else (prompt, "response_ids", "task")
        stage = Stage(model, "logprobs", "sample", reads, tuple(columns), model=model, candidates=candidates)
        return self._add(replace(stage, rows_of=rows_of))

    def scores(self, model: str = "reward_model", *, writes: str | Column = "reward") -> "Dataflow":
        """Score each response by a reward model (model.paths.<model>), one number a response, in place of `reward`."""
        reads = ("prompt_ids", "response_ids")
        return self._add(Stage(model, "scores", "sample", reads, _columns((writes,), model), model=model))

    def values(self, model: str = "critic") -> "Dataflow":
        """Estimate values: what the critic expects before each token of the step's batch. Writes `old_values`, in the
        trainers. The critic starts from the policy's weights with a new head, and lives with the policy's ranks."""
        reads = ("prompt_ids", "response_ids")
        writes = _columns((Column("old_values", "float32", "token"),), model)
        return self._add(Stage(f"{model}_values", "values", "batch", reads, writes, model=model))

    def staleness(self) -> "Dataflow":
        """Count how many versions ago each token of the step's batch was sampled: writes `staleness`, in the trainers,
        which know the version that they update."""
        writes = _columns((Column("staleness", "float32", "token"),), "staleness")
        return self._add(Stage("staleness", "staleness", "batch", ("token_versions",), writes))

    def train_critic(self, model: str = "critic", *, loss: Callable[..., Any]) -> "Dataflow":
        """Update the critic on the step's batch, before the policy. The loss takes `values` `[B, T]`, with gradient."""
        required, optional = _loss_columns(loss)
        reads = tuple(dict.fromkeys(("prompt_ids", "response_ids", *required)))
        name = f"train_{model}"
        return self._add(Stage(name, "critic", "batch", reads, (), model=model, function=loss, optional_reads=optional))

    def compute(
        self,
        function: Callable[..., Any] | Mapping[str, Callable[..., Any]],
        *,
        reads: Sequence[str],
        writes: Sequence[str | Column],
        per: str = "group",
        name: str | None = None,
        state: Any = None,
    ) -> "Dataflow":
        """Call a pure function of columns, with a keyword a column read.

        Sample columns come as `[G]` tensors over the unit's rows, token columns as lists of `[T_i]` tensors; the result
        is one such value, or a tuple of them in the order of `writes`. A parameter `group_ids` gets int64 `[G]`. Where
        several policies are trained it is called on the rows of each; a mapping gives each policy a function.

        `per`: "sample", "group", or "batch": then the trainers call it on the rows of the whole step, before the
        update, and only a loss or another "batch" stage can read what it writes.

        `state`, with per="batch": a value that is carried from step to step. The function gets it by the keyword
        `state`, and returns `(result, state of the next step)`. It must be a function of nothing but the batches: every
        rank computes its own. Checkpoints hold it, so it is plain data (numbers, strings, bytes, containers and arrays
        of them) or a dataclass of it. Its `metrics`, if it has any, are reported.
        """
        function = ByPolicy(function) if isinstance(function, Mapping) else function
        stage_name = name or name_of(function, "compute")
        columns = _columns(tuple(writes), stage_name)
        return self._add(Stage(stage_name, "compute", per, tuple(reads), columns, function=function, state=state))

    def filter(
        self,
        function: Callable[..., Any],
        *,
        reads: Sequence[str],
        reason: str,
        per: str = "group",
        name: str | None = None,
    ) -> "Dataflow":
        """Drop what is not worth training, counted as dropped/`reason`. `function`: True, or `[G]` bools, for what is
        kept; called like that of `compute`. Groups that end give their place to new ones at once, whatever else the
        step waits for."""
        stage_name = name or name_of(function, "compute")
        kept = Column(f"{stage_name}_kept", "bool")
        return self._add(Stage(stage_name, "filter", per, tuple(reads), (kept,), function=function, reason=reason))

    def train(self, model: str = "policy", *, loss: Callable[..., Any], aggregation: str = "token_mean") -> "Dataflow":
        """Update `model` on the step's batch and end the rows' life. What the loss reads is what its parameters are
        named: columns, what the trainer provides (`PROVIDED_BY_TRAINER` in `stage.py`), or `inputs`, a `LossInputs`.
        `aggregation`: of a loss that returns a value for each token; see `aggregate`.

        Called again with another name it trains one more policy in the same step, on the rows that this one has
        sampled (`ctx.sample(..., policy=model)`)."""
        from penstock.algorithms.graph.loss import wrap_loss  # late: it imports torch, and the store reads graphs

        loss = wrap_loss(loss, aggregation)
        required, optional = _loss_columns(loss)
        reads = tuple(dict.fromkeys(("prompt_ids", "response_ids", *required)))
        earlier = self.of_kind("train")
        policies = (*(policy for stage in earlier for policy in stage.policies), TrainedPolicy(model, loss))
        if len({policy.name for policy in policies}) < len(policies):
            raise DataflowError(
                f"policy {model!r} is there twice; add up the two losses in one function, and call flow.train once "
                "with it, or train another model with the second."
            )
        if not earlier:
            stage = Stage("train", "train", "batch", reads, (), model=model, function=loss, optional_reads=optional)
            return self._add(replace(stage, policies=policies))
        (stage,) = earlier
        reads = tuple(dict.fromkeys((*stage.reads, *reads)))
        optional = tuple(dict.fromkeys((*stage.optional_reads, *optional)))
        both = replace(stage, reads=reads, optional_reads=optional, policies=policies)
        self.stages = [both if one is stage else one for one in self.stages]
        return self

    def _add(self, stage: Stage) -> "Dataflow":
        if any(stage.name == other.name for other in self.stages):
            raise DataflowError(f"stage {stage.name!r} is there twice; {_INSTEAD_OF_TWO.get(stage.kind, _RENAME)}.")
        self.stages.append(stage)
        return self

    @property
    def columns(self) -> dict[str, Column]:
        """Every column that some stage writes, by name."""
        return written_by(self.stages)

    @property
    def stored_columns(self) -> dict[str, Column]:
        """Columns that are in the store: all but what the trainers compute for themselves."""
        return written_by(stage for stage in self.stages if not stage.is_in_trainer)

    @property
    def in_trainer(self) -> list[Stage]:
        """Stages that the trainers compute on the step's batch before the update, in order."""
        return [stage for stage in self.stages if stage.is_in_trainer]

    @property
    def rows_are(self) -> str:
        """Kind of the source's rows: "prompts", "tasks", "demonstrations" or "preferences"."""
        if self.of_kind("rollout"):
            return "tasks" if self.has_environment else "prompts"
        return "preferences" if "chosen_ids" in self.columns else "demonstrations"

    @property
    def has_environment(self) -> bool:
        """True if the rows are trajectories."""
        return any(stage.in_environment for stage in self.stages)

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of the policies that are trained."""
        return tuple(policy.name for stage in self.of_kind("train") for policy in stage.policies)

    @property
    def rows_per_group(self) -> int:
        """Rows of a group: a row a sample; where several policies are trained, one of each in an attempt."""
        return self.samples_per_prompt * max(1, len(self.policies))

    def stage(self, name: str) -> Stage:
        return next(stage for stage in self.stages if stage.name == name)

    def of_kind(self, kind: str) -> list[Stage]:
        return [stage for stage in self.stages if stage.kind == kind]

    @property
    def scorers(self) -> list[Stage]:
        """Stages that a model of their own computes: first those of log-probabilities, then those of scores."""
        return [*self.of_kind("logprobs"), *self.of_kind("scores")]

    def check(self) -> "Dataflow":
        """Raise `DataflowError` (stage, column, and what would mend it) unless the graph can run; return it.

        Every column read has exactly one writer, units are possible, no stage waits for itself, there is one train
        stage.
        """
        check_stages(self.stages)
        return self

    def reads_of(self, stage: Stage) -> tuple[str, ...]:
        """All columns that a stage gets: those that it must have, and those that it may have and some stage writes.
        Training waits for every filter."""
        return reads_of(stage, self.stages)

    def batch_reads(self) -> tuple[str, ...]:
        """Columns that the trainers get of each row of a step: those that the loss reads, and those that they compute
        from."""
        stages = [*self.of_kind("train"), *self.in_trainer]
        stored = self.stored_columns
        return tuple(dict.fromkeys(name for stage in stages for name in self.reads_of(stage) if name in stored))


_RENAME = "give the second one another name: name=..."
_INSTEAD_OF_TWO = {
    "source": "rows have one source: call one of flow.rollout, flow.demonstrations and flow.preferences, once",
    "greedy_rollout": "call flow.greedy_rollout once: any number of stages may read greedy_text",
    "logprobs": "give the second one another model, which model.paths names",
    "scores": "give the second one another model, which model.paths names, and another column to write",
    "values": "call flow.values once: any number of losses may read old_values",
    "staleness": "call flow.staleness once: any number of stages may read the column",
    "critic": "add up the two losses in one function, and call flow.train_critic once with it",
}
"""What a graph can have instead of a second stage, by the stage's kind."""


def _columns(names: tuple[str | Column, ...], stage: str) -> tuple[Column, ...]:
    try:
        return tuple(as_column(name) for name in names)
    except KeyError as error:
        unknown = str(error.args[0])
        raise DataflowError(
            f"stage {stage!r} writes column {unknown!r}, which is not standard{suggest(unknown, STANDARD_COLUMNS)} "
            f'Declare a new one with its type: Column("{unknown}", "float32").'
        ) from None


def _loss_columns(loss: Callable[..., Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Parameters of a loss that are columns: those without a default, and those whose default is None."""
    required, optional = [], []
    for name, parameter in inspect.signature(loss).parameters.items():
        if name == CANDIDATE_LOGPROBS:
            required.append(CANDIDATES)
        if name in PROVIDED_BY_TRAINER or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if parameter.default is parameter.empty:
            required.append(name)
        elif parameter.default is None:
            optional.append(name)
    return tuple(required), tuple(optional)
