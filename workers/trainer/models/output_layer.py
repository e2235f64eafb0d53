"""A causal language model's output layer, which scores tokens (`token_scores.py`), and one with an adapter.

Legend: N tokens, H hidden size, V vocabulary, K rank of an adapter.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from penstock.workers.trainer.models.linear import AdoptedLinear
from penstock.workers.trainer.models.token_scores import Addend, likeliest_tokens, token_scores

BANNED = -1e30
"""Logit of a token without probability: finite, as 0 times infinity is no number."""


@dataclass(frozen=True)
class LogitChange:
    """Logits that a model makes of its output layer's product z: scale * z, or cap * tanh(scale * z / cap)."""

    scale: float = 1.0
    cap: float | None = None
    """Soft cap of the scaled product (Gemma 2, 2408.00118, section 2). None: there is none."""

    @property
    def product_cap(self) -> float | None:
        """Soft cap of the product itself, where the scale follows the cap."""
        return self.cap / self.scale if self.cap else None


class OutputLayer(AdoptedLinear):
    """A causal language model's output layer, which also scores tokens.

        layer = OutputLayer.of(lm.get_output_embeddings())
        layer(hidden)                                     # its product, as before, which the model makes logits of
        layer(hidden_NH, targets_N, temperature=0.7)      # (logprobs_N, None)

    Scoring happens within the module's own forward, so that an engine that gathers a sharded weight by hooks on modules
    has it whole there, and in backward.
    """

    change = LogitChange()
    """What the model makes of the product, for scores."""
    banned_V: Tensor | None = None
    """A bias that leaves tokens no probability; None: all have some."""

    def ban(self, ids: Sequence[int]) -> None:
        """Leave tokens no probability, in scores and in the product, as engines do that never sample them."""
        bias_V = torch.zeros(self.out_features, device=self.weight.device)
        bias_V[list(ids)] = BANNED
        self.banned_V = bias_V

    @property
    def _bias(self) -> Tensor | None:
        if self.banned_V is None:
            return self.bias
        banned_V = self.banned_V.to(self.weight.dtype)
        return banned_V if self.bias is None else self.bias + banned_V

    def forward(
        self,
        hidden: Tensor,
        targets_N: Tensor | None = None,
        *,
        temperature: float | Tensor = 1.0,
        entropy: str = "none",
        budget_bytes: int = 0,
        likeliest: int = 0,
    ) -> Any:
        """Return the product without targets, and what `token_scores` returns with them, or `likeliest_tokens` for so
        many of them."""
        if targets_N is None:
            product = super().forward(hidden)
            addend = self._addend(hidden)
            if addend is not None:
                product = product + nn.functional.linear(*addend)
            return product if self.banned_V is None else product + self.banned_V.to(product.dtype)
        ways: dict[str, Any] = {
            "temperature": temperature / self.change.scale, "budget_bytes": budget_bytes,
            "cap": self.change.product_cap, "addend": self._addend(hidden),
        }  # fmt: skip
        if likeliest:
            return likeliest_tokens(hidden, self.weight, self._bias, targets_N, likeliest, **ways)
        return token_scores(hidden, self.weight, self._bias, targets_N, entropy=entropy, **ways)

    def _addend(self, hidden: Tensor) -> Addend | None:
        """What an adapter adds to the product."""
        return None


class AdaptedOutputLayer(OutputLayer):
    """An output layer with LoRA's A and B beside its weight, which stays as it is, so that an embedding that is tied to
    it does, too. It names them as PEFT's layers do, by which `engines/lora.py` finds them.

        layer = AdaptedOutputLayer.around(layer, "default", rank=8)
        layer.scaling["default"] = 32 / 8
        layer.is_adapted = False    # as if B were zero, at no cost
    """

    is_adapted = True
    scaling: dict[str, float]
    """Factor of B A, by the adapter's name."""

    @classmethod
    def around(cls, layer: OutputLayer, adapter: str, rank: int) -> Self:
        """The layer with an adapter, whose A and B have no values yet."""
        adapted = cls.of(layer)
        adapted.change, adapted.banned_V = layer.change, layer.banned_V
        dtype = layer.weight.dtype
        a = nn.Linear(layer.in_features, rank, bias=False, device="meta", dtype=dtype)
        b = nn.Linear(rank, layer.out_features, bias=False, device="meta", dtype=dtype)
        adapted.lora_A, adapted.lora_B = nn.ModuleDict({adapter: a}), nn.ModuleDict({adapter: b})
        adapted.scaling = {adapter: 1.0}
        return adapted.train(layer.training)

    def _addend(self, hidden: Tensor) -> Addend | None:
        if not self.is_adapted:
            return None
        ((adapter, scale),) = self.scaling.items()
        a, b = (getattr(self, name)[adapter].weight for name in ("lora_A", "lora_B"))
        return nn.functional.linear(hidden, a) * scale, b
