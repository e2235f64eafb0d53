"""A bonus for entropy on top of any loss: `L - coef · mean H(π)`, 1707.06347 eq. 9.

The trainer computes what a loss asks for by the names of its parameters, and the entropy of every token costs time and
memory; only a loss that names `entropy` gets it. `with_entropy_bonus` adds that name, in a builder of dataflows.

    flow.train("policy", loss=with_entropy_bonus(partial(policy_loss, surrogate="gspo"), coef=0.001))
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.algorithms.aggregation import aggregate
from penstock.algorithms.checks import non_negative, positive
from penstock.algorithms.graph.stage import name_of
from penstock.algorithms.losses.policy import LossAndMetrics
from penstock.conf.algorithms.base import AGGREGATIONS
from penstock.conf.checks import one_of


@dataclass(frozen=True)
class EntropyBonus:
    """A loss that has one more parameter, `entropy` `[B, T]` with gradient, and the metric `entropy`, its token mean.

    It takes everything by keyword, as the trainer gives it. Pickles wherever the loss does.
    """

    loss: Callable[..., LossAndMetrics]
    coef: float
    aggregation: str = "token_mean"
    constant: float = 1.0

    def __post_init__(self) -> None:
        non_negative("algorithm.entropy_coef", self.coef)
        one_of("algorithm.aggregation", self.aggregation, AGGREGATIONS)
        positive("constant", self.constant)

    @property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(self.loss)
        if "entropy" in signature.parameters:
            return signature
        entropy = inspect.Parameter("entropy", inspect.Parameter.KEYWORD_ONLY)
        parameters = list(signature.parameters.values())
        ends_open = bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
        parameters.insert(len(parameters) - ends_open, entropy)
        return signature.replace(parameters=parameters)

    @property
    def __name__(self) -> str:
        return name_of(self.loss, "loss")

    def __call__(self, *, entropy: Any, mask: Any, totals: Any, **arguments: Any) -> LossAndMetrics:
        if "entropy" in inspect.signature(self.loss).parameters:
            arguments["entropy"] = entropy
        loss, metrics = self.loss(mask=mask, totals=totals, **arguments)
        bonus = aggregate(entropy, mask, totals, self.aggregation, constant=self.constant)
        mean = aggregate(entropy.detach(), mask, totals, "token_mean")
        return loss - self.coef * bonus, metrics | {"entropy": mean}


def with_entropy_bonus(
    loss: Callable[..., LossAndMetrics], coef: float, *, aggregation: str = "token_mean", constant: float = 1.0
) -> EntropyBonus:
    """Make the loss `loss - coef · mean(entropy)`, for the trainer to call like any loss. `aggregation`, `constant`:
    see `aggregate`; give those of the loss. Raises `ConfigError`."""
    return EntropyBonus(loss, coef, aggregation, constant)
