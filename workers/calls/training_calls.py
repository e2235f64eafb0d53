"""The arguments and results of calls that train an adapter step by step: plain data, the same for the server, a session
and the ranks.

    forward_backward(data, loss) ─▶ gradients add up ─▶ optim_step(params) ─▶ weights change, gradients are cleared

Legend: T tokens that the model reads for a datum, K targets at each of them (1 for most losses).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from penstock.workers.pictures.placeholders import PromptPictures


@dataclass(frozen=True)
class Datum:
    """A sequence, and what its tokens are to be scored for."""

    token_ids: np.ndarray
    """Tokens that the model reads, `[T]` int32."""
    targets: np.ndarray
    """Tokens whose log-probability is asked for after each of them, `[T]` or `[T, K]` int64. Mostly the next tokens."""
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Further inputs of the loss by name, float32, each of the shape of `targets`: `weights`, `advantages`, `logprobs`
    (those at sampling), `clip_low_threshold`, `clip_high_threshold`, `sequence_ratio_mask`."""
    pictures: PromptPictures | None = None


@dataclass(frozen=True)
class LossCall:
    """A loss by its name (`algorithms/losses/summed.py`), with its numbers."""

    name: str
    """`cross_entropy`, `importance_sampling`, `ppo`, `cispo`, `dro` or `gspo`."""
    config: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the loss by name, such as `clip_low_threshold`; its defaults count for the rest."""


@dataclass(frozen=True)
class ForwardOutput:
    """The result of a forward pass, with or without gradients."""

    logprobs: list[np.ndarray]
    """Log-probabilities of the targets of each datum, float32, of the shape of its `targets`, natural log."""
    metrics: dict[str, float]
    """Sums over all data: `loss` and what else the loss counts."""


@dataclass(frozen=True)
class AdamParams:
    """The numbers of one optimizer step of AdamW (1711.05101)."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """Norm that larger gradients are scaled down to; 0: never."""


WHOLE = 0
"""The rank of what is no adapter but a whole model."""


@dataclass(frozen=True)
class AdapterSpec:
    """The shape of a LoRA adapter (2106.09685), and the seed of its A. B starts at zero. Or `WHOLE`: all weights of the
    model in the place of an adapter, which start as the base model's."""

    rank: int
    """Rank of A and B; `WHOLE`: there are none, and the model's weights themselves are trained."""
    seed: int = 0
    alpha: int = 32
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    """True if the output layer has an adapter, too."""

    @property
    def is_whole(self) -> bool:
        """True if it is of a whole model, and of no adapter."""
        return self.rank == WHOLE


@dataclass(frozen=True)
class AdapterState:
    """Everything that training an adapter goes on from, bit for bit, whole and independent of the number of ranks."""

    spec: AdapterSpec
    tensors: dict[str, np.ndarray]
    """Float32, by `weights/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME` and, where gradients wait for their step,
    `gradients/NAME`. NAME is PEFT's in an adapter's file (`publication/adapter.py`), shapes are of the adapter's own
    rank: `[rank, in]` for A, `[out, rank]` for B. Of a whole model they are its parameters by the names of its
    checkpoint, tied ones once. Without optimizer there are weights alone."""
    num_steps: int = 0
    """Optimizer steps so far, which AdamW's bias correction counts."""

    def weights(self) -> dict[str, np.ndarray]:
        """The weights alone, by their own names."""
        return {name.removeprefix("weights/"): value for name, value in self.tensors.items() if _is_weight(name)}

    def for_sampling(self) -> "AdapterState":
        """The state without optimizer and gradients."""
        return AdapterState(self.spec, {name: value for name, value in self.tensors.items() if _is_weight(name)})


def _is_weight(name: str) -> bool:
    return name.startswith("weights/")
