"""Losses that an author writes: what they read, as one typed value, and what they may return.

    def loss(inputs: LossInputs, novelty: Tensor, *, weight: float = 0.5) -> Tensor:   # novelty: a column
        return -weight * inputs.advantage * novelty * inputs.logprobs                  # [B, T]: a value for each token

A parameter `inputs` gets what most losses read. Anything else has a parameter of its own name, as in losses without
`inputs` (`Dataflow.train`). Values of tokens are aggregated here, over the whole batch of the optimizer step. A loss
that aggregates by itself returns this micro-batch's contribution, and `check_loss` tries whether it is one.

Legend: B rows of the micro-batch, T response tokens, padded.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from penstock.algorithms.aggregation import BatchTotals, aggregate, masked, per_token
from penstock.algorithms.checks import as_mask, describe
from penstock.algorithms.graph.columns import CANDIDATE_LOGPROBS, Column
from penstock.algorithms.graph.stage import name_of
from penstock.conf.algorithms import AGGREGATIONS
from penstock.conf.checks import one_of
from penstock.conf.errors import DataflowError, PenstockError, ShapeError

INPUTS = "inputs"
"""The parameter of a loss that gets `LossInputs`."""
IF_WRITTEN = ("advantage", "behavior_logprobs", "reference_logprobs")
"""Columns that `LossInputs` has where a stage writes them."""
FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What an author's function may raise for numbers that are made up."""


@dataclass(frozen=True)
class LossInputs:
    """What most losses read of a micro-batch, by a parameter `inputs`: tensors `[B, T]`, float32, zero in padding. What
    else a loss reads has a parameter of its name: a column, or `old_logprobs`, `entropy`, `group_ids` of the trainer.

        def loss(inputs: LossInputs, *, floor: float = -10.0) -> Tensor:  # [B, T]: a value for each token
            return -inputs.advantage * inputs.logprobs.clamp(min=floor)

        flow = Dataflow().rollout(samples_per_prompt=8).reward()
        flow.compute(lambda reward: reward - reward.mean(), reads=["reward"], writes=["advantage"], name="centred")
        flow.train(loss=loss, aggregation="sequence_mean").check()

    `penstock validate` refuses a loss that depends on how a batch is cut, such as `loss.mean()`.
    """

    logprobs: Tensor
    """Log-probabilities of the response tokens under the policy, with gradient."""
    mask: Tensor
    """True for response tokens, False for padding."""
    columns: Mapping[str, Tensor] = field(repr=False)
    """Columns that stages write, by name."""

    @property
    def advantage(self) -> Tensor:
        """Advantage of each token; that of a whole response stands at each of its tokens."""
        return self._column("advantage")

    @property
    def behavior_logprobs(self) -> Tensor:
        """Log-probabilities under the policy that sampled, as the engine gave them."""
        return self._column("behavior_logprobs")

    @property
    def reference_logprobs(self) -> Tensor:
        """Log-probabilities under the reference model (`flow.logprobs("reference")`)."""
        return self._column("reference_logprobs")

    def _column(self, name: str) -> Tensor:
        if name not in self.columns:
            raise DataflowError(f"the loss reads inputs.{name}, which no stage writes. Add one before flow.train.")
        return self.columns[name]


class LossOutput(NamedTuple):
    """What a loss may return: values of tokens, and metrics.

    def loss(inputs: LossInputs) -> LossOutput:
        ratio = (inputs.logprobs - inputs.behavior_logprobs).exp()
        return LossOutput(-inputs.advantage * ratio, {"ratio": ratio})
    """

    loss: Tensor
    """Value of each token, `[B, T]`; what stands under padding is ignored."""
    metrics: Mapping[str, Tensor] = {}
    """Values of each token by metric, `[B, T]`. Their means are reported as `actor/NAME`."""


@dataclass(frozen=True)
class AggregatedLoss:
    """An author's loss as the trainer calls it: by the names of its columns, for a contribution to the batch's loss."""

    function: Callable[..., Any]
    aggregation: str = "token_mean"

    def __post_init__(self) -> None:
        one_of("aggregation", self.aggregation, AGGREGATIONS)

    @property
    def __name__(self) -> str:
        return name_of(self.function, "loss")

    @property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(self.function)
        own = [one for one in signature.parameters.values() if one.name != INPUTS]
        takes_inputs = len(own) < len(signature.parameters)
        defaults: dict[str, Any] = dict.fromkeys(("mask", "totals"), inspect.Parameter.empty)
        if takes_inputs:
            defaults |= {"logprobs": inspect.Parameter.empty, **dict.fromkeys(IF_WRITTEN)}
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
            for name, default in defaults.items()
            if name not in signature.parameters
        ]
        ends_open = bool(own) and own[-1].kind is inspect.Parameter.VAR_KEYWORD
        own[len(own) - ends_open : len(own) - ends_open] = added
        return signature.replace(parameters=own)

    def __call__(self, **arguments: Any) -> tuple[Tensor, dict[str, Tensor]]:
        parameters, totals = inspect.signature(self.function).parameters, arguments["totals"]
        is_open = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        own = {name: value for name, value in arguments.items() if is_open or name in parameters}
        mask = as_mask(arguments["mask"])
        if INPUTS in parameters:
            columns = {
                name: per_token(value, mask).detach()
                for name in IF_WRITTEN
                if (value := arguments.get(name)) is not None
            }
            own[INPUTS] = LossInputs(masked(arguments["logprobs"], mask), mask, columns)
        returned = self.function(**own)
        loss, metrics = returned if isinstance(returned, tuple) else (returned, {})

        def total(value: Any, how: str) -> Tensor:
            if isinstance(value, Tensor) and value.shape == mask.shape:
                return aggregate(value, mask, totals, how)
            if INPUTS in parameters or not isinstance(value, Tensor) or value.dim():
                raise ShapeError(
                    f"the loss {self.__name__} returned {describe(value)}; expected {list(mask.shape)}, a value for "
                    "each token. Do not take its mean: that is over the batch of the whole step."
                )
            return value

        means = {name: total(value, "token_mean").detach() for name, value in metrics.items()}
        return total(loss, self.aggregation), means


def wrap_loss(loss: Callable[..., Any], aggregation: str = "token_mean") -> Callable[..., Any]:
    """The loss as the trainer calls it: an author's is aggregated where it returns a value for each token. Penstock's
    own return contributions."""
    inner = loss.func if isinstance(loss, partial) else loss
    home = getattr(inner, "__module__", None) or type(inner).__module__
    return loss if home.startswith("penstock.algorithms.") else AggregatedLoss(loss, aggregation)


def check_loss(loss: Callable[..., Any] | None, columns: Mapping[str, Column]) -> str:
    """Try an author's loss on made-up rows: whole, in two halves, and with more padding. Returns what was found. Raises
    `DataflowError` where the sums differ, `ShapeError` for values of another shape.

    A loss that fails for what was made up, or gives another number each time, cannot be judged.
    """
    if not isinstance(loss, AggregatedLoss) or (made := _random_arguments(loss, columns)) is None:
        return ""
    totals = BatchTotals.of(made["mask"]) + BatchTotals(0, 0, 2)

    def total(*parts: Mapping[str, Tensor]) -> float:
        return sum(float(loss(**part, totals=totals)[0]) for part in parts)

    try:
        whole, again = total(made), total(made)
        halves = total(*({name: value[half] for name, value in made.items()} for half in (slice(2), slice(2, None))))
        padded = total({name: _padded(value) for name, value in made.items()})
    except PenstockError:
        raise
    except FAILURES:
        return ""
    if not math.isfinite(whole) or not _are_close(whole, again):
        return ""
    if _are_close(whole, halves) and _are_close(whole, padded):
        return "the same for a batch, for its halves, and with more padding"
    raise DataflowError(
        f"the loss {name_of(loss, 'loss')} gives {whole:.4g} for a batch, {halves:.4g} for its two halves together and "
        f"{padded:.4g} with more padding, so it would depend on how batches are cut. Return a value for each token, or "
        "divide by `totals`, as penstock.aggregate does. What needs the whole batch belongs into "
        "flow.compute(per='batch')."
    )


def _are_close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-6)


def _padded(value: Tensor) -> Tensor:
    """Three more places of padding, where the tensor has tokens."""
    return value if value.dim() == 1 else pad(value, (0, 3) if value.dim() == 2 else (0, 0, 0, 3))


def _random_arguments(loss: Callable[..., Any], columns: Mapping[str, Column]) -> dict[str, Tensor] | None:
    """Arguments of a loss but for the totals: four rows of two groups. None: it reads what cannot be made up."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(5) < torch.tensor([[5], [3], [4], [2]])
    made = {"group_ids": torch.tensor([0, 0, 1, 1]), "mask": mask}
    preferred = torch.tensor([1.0, -1.0, 1.0, -1.0])
    for name, parameter in inspect.signature(loss).parameters.items():
        column = columns.get(name)
        is_model_s = name in ("logprobs", "old_logprobs", "entropy", "values", "scores", CANDIDATE_LOGPROBS)
        if name in (*made, "totals") or not (column or is_model_s):
            continue
        if column is not None and (column.shape not in ("sample", "token") or column.dtype in ("string", "binary")):
            if parameter.default is None:
                continue
            return None
        shape = (4,) if name == "scores" or (column is not None and column.shape == "sample") else (4, 5)
        random = torch.rand(*shape, *((3,) if name == CANDIDATE_LOGPROBS else ()), generator=generator)
        if name in ("preferred", "desirable"):
            made[name] = preferred
        elif column is not None and column.dtype != "float32":
            made[name] = torch.zeros(shape, dtype=getattr(torch, column.dtype))
        else:
            made[name] = -random if name.endswith("logprobs") else random
    return made
