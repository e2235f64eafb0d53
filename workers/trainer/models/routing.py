"""The routers of a mixture of experts, watched from outside: what each said of the tokens that the trainer scores, and
the loss that keeps experts in even use.

    routers = Routers(lm)
    with routers.recording():
        logprobs_N, _ = engine.forward(…)
    loss = loss + coefficient * routers.balance(positions_N, rows_N, num_rows) / all_rows

A router is the module that transformers records `router_logits` of, and the first of its results are the logits
`[places, experts]`. It is watched by hooks, so that a model's forward and its results stay as they are.

Legend: B rows, L padded tokens, N places of all rows, E experts, K experts of a token.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.conf.errors import ConfigError

KEY = "trainer.router_aux_loss_coef"


class Routers:
    """The routers of a model, in the order of its layers."""

    def __init__(self, lm: Any) -> None:
        """`lm`: with its adapters, if any, and not yet sharded. Raises `ConfigError` for a model that has no routers,
        or whose experts are kept in even use in another way."""
        config = lm.config
        recorder = (getattr(lm.base_model, "_can_record_outputs", None) or {}).get("router_logits")
        kind = recorder.target_class if recorder is not None and recorder.index == 0 else None
        self.modules = [module for module in lm.modules() if type(module) is kind]
        self._num_chosen = getattr(config, "num_experts_per_tok", 0)
        # Models that transformers has this loss for have the setting, and route by a softmax.
        if not self.modules or not self._num_chosen or not hasattr(config, "router_aux_loss_coef"):
            raise ConfigError(
                f"{KEY}: {type(lm).__name__} has no softmax routers whose choices could be evened. Set {KEY}=0."
            )
        self._logits: list[Tensor] = []
        self._is_recording = False
        for module in self.modules:
            module.register_forward_hook(self._record)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep what the routers say in the block, for `balance`. Not what they say again in backward."""
        self._logits, self._is_recording = [], True
        try:
            yield
        finally:
            self._is_recording = False

    def balance(self, positions_N: Tensor, rows_N: Tensor, num_rows: int) -> Tensor:
        """Sum over rows of `row_balance`, `[]` with gradient; the mean over layers. `positions_N`: places in the
        flattened `[B * L]` that count; `rows_N`: the row of each, int64. Forgets what was recorded."""
        logits, self._logits = self._logits, []
        layers = [
            row_balance(some.flatten(0, -2).index_select(0, positions_N), rows_N, num_rows, self._num_chosen).sum()
            for some in logits
        ]
        return torch.stack(layers).mean()

    def _record(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if self._is_recording:
            self._logits.append(output[0] if isinstance(output, tuple) else output)


def row_balance(logits_NE: Tensor, rows_N: Tensor, num_rows: int, num_chosen: int) -> Tensor:
    """How unevenly the tokens of each row are spread over the experts, `[num_rows]` float32; 0 for a row without tokens
    (DeepSeek-V3, 2412.19437, equations 17 to 20, whose sequence is a row's response):

    sum over experts of f p, where f = E / (K T) x tokens that are sent to the expert, p = mean of the softmax over the
    row's T tokens. 1: all experts are in even use; E / K: the same K serve every token. The gradient flows through p.
    """
    num_experts = logits_NE.shape[1]
    chance_NE = torch.softmax(logits_NE.float(), dim=-1)
    is_chosen_NE = torch.zeros_like(chance_NE).scatter(1, chance_NE.topk(num_chosen, dim=1).indices, 1.0)
    zeros_BE = chance_NE.new_zeros(num_rows, num_experts)
    chosen_BE, chances_BE = (zeros_BE.index_add(0, rows_N, one) for one in (is_chosen_NE, chance_NE))
    num_tokens_B = rows_N.bincount(minlength=num_rows).clamp(min=1)
    return num_experts / num_chosen * (chosen_BE * chances_BE).sum(dim=1) / num_tokens_B.square()
