"""The experts that the routers of a mixture chose for each token, on their way from an engine to the trainer
(`rollout.router_replay`; 2510.11370).

    engine   routers ─▶ RoutingRecorder ─▶ Completion.routed_experts ─▶ column routed_experts
    trainer  column ─▶ MicroBatch.experts_SLW ─▶ Routers (`trainer/models/routing.py`), which send the tokens there

A token's record has the numbers of its K experts in each of M layers, as W bytes: one byte a number, or two, the low
one first, in a mixture of more than 256. A sequence of L tokens has L - 1 records, since no engine reads the last token
that it samples.

Importing this module does not import torch.

Legend: L tokens, N tokens of one forward pass, M layers with a router, K experts of a token, W bytes of a record.
"""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.conf.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

KEY = "rollout.router_replay"
ONE_BYTE = 256
"""Most experts of a layer whose numbers fit into one byte."""


@dataclass(frozen=True)
class RoutingShape:
    """The routers of a mixture of experts."""

    layers: tuple[int, ...]
    """Numbers, from 0, of the decoder layers that have one."""
    num_experts: int
    num_chosen: int
    """Experts of a token, in each layer."""

    @property
    def dtype(self) -> "np.dtype[Any]":
        """Type of an expert's number in a record."""
        return np.dtype("u1" if self.num_experts <= ONE_BYTE else "<u2")

    @property
    def record_bytes(self) -> int:
        """Bytes of a token's record: W."""
        return len(self.layers) * self.num_chosen * self.dtype.itemsize

    def records(self, experts_NMK: Any) -> np.ndarray:
        """Numbers of experts as records, `[N, W]` uint8."""
        experts = np.ascontiguousarray(experts_NMK, self.dtype)
        return experts.view(np.uint8).reshape(len(experts), -1)

    @classmethod
    def of(cls, lm: Any, key: str = KEY) -> "RoutingShape":
        """Look at a model of transformers, with or without weights. Raises as `routers_of` does."""
        layers = [int(re.findall(r"\d+", name)[0]) for name in routers_of(lm, key)]
        experts = (getattr(lm.config, name, None) for name in ("num_experts", "num_local_experts"))
        return cls(tuple(layers), next(filter(None, experts), 0), lm.config.num_experts_per_tok)

    @classmethod
    def of_path(cls, path: str) -> "RoutingShape":
        """Look at a model on disk, without its weights. Raises as `routers_of` does."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.device("meta"):
            return cls.of(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)))


def routers_of(lm: Any, key: str) -> "dict[str, nn.Module]":
    """The routers of a model by their names, in the order of its layers. `key`: the configuration's, for messages.

    A router is the module that transformers records `router_logits` of, and its results are the logits `[N, experts]`,
    the weights `[N, K]` and the numbers of the experts `[N, K]`. Raises `ConfigError` for a model that has none, or
    chooses experts by something else than a softmax.
    """
    kind = router_kind(lm)
    routers = {name: module for name, module in lm.named_modules() if type(module) is kind}
    # Models that transformers has an auxiliary loss for have the setting, and route by a softmax.
    is_softmax = getattr(lm.config, "num_experts_per_tok", 0) and hasattr(lm.config, "router_aux_loss_coef")
    if not routers or not is_softmax:
        raise ConfigError(f"{key}: {type(lm).__name__} has no routers that choose experts by a softmax. Leave it out.")
    return routers


def router_kind(lm: Any) -> "type[nn.Module] | None":
    """The class of a model's routers, whose results begin with their logits; None for a model that has none."""
    recorder = (getattr(lm.base_model, "_can_record_outputs", None) or {}).get("router_logits")
    return recorder.target_class if recorder is not None and recorder.index == 0 else None


class RoutingRecorder:
    """Notes what the routers of an engine's model choose, by hooks.

    recorder = RoutingRecorder(lm)
    lm(input_ids=…)
    recorder.take()   # [N, W] uint8: the records of the tokens that it has read
    """

    def __init__(self, lm: Any) -> None:
        """Raises as `routers_of` does."""
        self._shape = RoutingShape.of(lm)
        self._chosen: list[Tensor] = []
        for router in routers_of(lm, KEY).values():
            router.register_forward_hook(self._note)

    def take(self) -> np.ndarray:
        """Records of the last forward pass, `[N, W]` uint8. Forgets them."""
        import torch

        chosen, self._chosen = self._chosen, []
        return self._shape.records(torch.stack(chosen, dim=1).cpu().numpy())

    def _note(self, module: "nn.Module", arguments: Any, output: Any) -> None:
        self._chosen.append(output[2])
