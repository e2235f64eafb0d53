"""Sums over tokens, by hand. Their gradients through a model: `tests/workers/trainer/adapters/test_slot_trainer.py`."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.algorithms.losses.summed import check_inputs, inputs_of, summed_loss
from penstock.conf.errors import DataError

LOG = [math.log(0.5), math.log(0.2), math.log(0.9), 0.0]
BEHAVIOR = [math.log(0.25), math.log(0.4), math.log(0.9), 0.0]
"""Ratios 2, 0.5 and 1; the last token is padding."""
ADVANTAGE = [3.0, 2.0, -1.0, math.nan]


def of(name: str, config: dict[str, Any] | None = None, **more: Any) -> tuple[float, list[float]]:
    """Value and gradient by log-probability of one sequence."""
    logprobs = torch.tensor([LOG], requires_grad=True)
    mask = torch.tensor([[True, True, True, False]])
    columns: dict[str, Tensor] = {key: torch.tensor([value]) for key, value in more.items()}
    if name != "cross_entropy":
        columns |= {"behavior_logprobs": torch.tensor([BEHAVIOR]), "advantages": torch.tensor([ADVANTAGE])}
    loss, metrics = summed_loss(name, config or {})(logprobs, mask, **columns)
    assert metrics["loss"].item() == loss.item()
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad[0, :3].tolist()


@pytest.mark.parametrize(
    ("name", "config", "more", "value", "gradient"),
    [
        ("cross_entropy", {}, {}, -sum(LOG), [-1.0, -1.0, -1.0]),
        ("cross_entropy", {}, {"weights": [0.0, 2.0, 0.5, 9.0]}, -2 * LOG[1] - 0.5 * LOG[2], [0.0, -2.0, -0.5]),
        ("importance_sampling", {}, {}, -(6.0 + 1.0 - 1.0), [-6.0, -1.0, 1.0]),
        ("ppo", {}, {}, -(1.2 * 3 + 1.0 - 1.0), [0.0, -1.0, 1.0]),
        ("ppo", {"clip_high_threshold": 3.0}, {}, -(6.0 + 1.0 - 1.0), [-6.0, -1.0, 1.0]),
        ("ppo", {}, {"clip_high_threshold": [1.5] * 4}, -(1.5 * 3 + 1.0 - 1.0), [0.0, -1.0, 1.0]),
        ("cispo", {}, {}, -(1.2 * 3 * LOG[0] + 0.8 * 2 * LOG[1] - LOG[2]), [-3.6, -1.6, 1.0]),
        (
            "dro", {"beta": 0.4}, {},
            -(3 * LOG[0] + 2 * LOG[1] - LOG[2]) + 0.2 * 2 * math.log(2) ** 2,
            [-3 + 0.4 * math.log(2), -2 - 0.4 * math.log(2), 1.0],
        ),
        # The ratio of the first two tokens, 2 and 0.5, is 1 in the mean; of the first alone 2, which is clipped.
        ("gspo", {}, {"sequence_ratio_mask": [1.0, 1.0, 0.0, 1.0]}, -(3.0 + 2.0 - 1.0), [-3.0, -2.0, 1.0]),
        ("gspo", {}, {"sequence_ratio_mask": [1.0, 0.0, 0.0, 1.0]}, -(3.6 + 2.4 - 2.0), [0.0, 0.0, 2.0]),
    ],
)  # fmt: skip
def test_values_and_gradients_are_those_worked_out_by_hand(
    name: str, config: dict[str, float], more: dict[str, Any], value: float, gradient: list[float]
) -> None:
    found, slopes = of(name, config, **more)
    assert found == pytest.approx(value, rel=1e-5)
    assert slopes == pytest.approx(gradient, rel=1e-5, abs=1e-6)


def test_a_token_without_advantage_counts_nothing_however_unlikely_it_was() -> None:
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    behavior, advantages = torch.tensor([[-500.0, -2.0]]), torch.tensor([[0.0, 1.0]])
    loss, _ = summed_loss("importance_sampling", {})(logprobs, torch.ones(1, 2).bool(), behavior, advantages)
    loss.backward()
    assert loss.item() == -1.0
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[0.0, -1.0]]


def test_each_loss_says_what_it_reads() -> None:
    assert inputs_of("cross_entropy") == ([], ["weights"])
    assert inputs_of("gspo")[0] == ["logprobs", "advantages", "sequence_ratio_mask"]
    check_inputs("ppo", ["advantages", "logprobs", "clip_low_threshold"])
    with pytest.raises(DataError, match="has no input 'mask'"):
        check_inputs("ppo", ["advantages", "logprobs", "mask"])
    with pytest.raises(DataError, match="needs the input 'advantages'"):
        check_inputs("cispo", ["logprobs"])


@pytest.mark.parametrize(
    ("name", "config", "text"),
    [
        ("stable_reinforce", {}, "no loss 'stable_reinforce'"),
        ("importance_sampling", {"clip_low_threshold": 0.1}, "no setting 'clip_low_threshold'"),
        ("dro", {"beta": "large"}, "beta='large' is no finite number"),
        ("dro", {"beta": math.inf}, "beta=inf is no finite number"),
        ("ppo", {"clip_high_threshold": 0.5}, "clip_low_threshold=0.8 is above clip_high_threshold=0.5"),
    ],
)
def test_names_and_numbers_that_a_loss_does_not_know_are_refused(name: str, config: dict[str, Any], text: str) -> None:
    with pytest.raises(DataError, match=text):
        summed_loss(name, config)
