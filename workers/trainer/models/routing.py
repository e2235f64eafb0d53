"""The routers of a mixture of experts, reached from outside: what each says of the tokens that the trainer scores, the
loss that keeps experts in even use, and the experts that the engine chose, in the place of its own (2510.11370).

    routers = Routers(lm)
    routers.follow(batch.experts_SLW)
    with routers.recording():
        logprobs_N, _ = engine.forward(…)
    loss = loss + coefficient * routers.balance(positions_N, rows_N, num_rows) / all_rows

A router (`workers/models/routed_experts.py`) has a hook, which may replace what it returns: so a model's forward stays
as it is, and a layer that is computed again in backward sends its tokens where it sent them first.

Legend: B rows, L padded tokens, N places of all rows, E experts, K experts of a token, W bytes of a token's record.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.conf.errors import ConfigError, DataError
from penstock.workers.models.routed_experts import KEY as REPLAY_KEY
from penstock.workers.models.routed_experts import RoutingShape, routers_of

KEY = "trainer.router_aux_loss_coef"


class Routers:
    """The routers of a model, in the order of its layers."""

    def __init__(self, lm: Any, key: str = KEY) -> None:
        """`lm`: with its adapters, if any, and not yet sharded. `key`: the one that asks for it. Raises `ConfigError`
        for a model that has no routers that choose by a softmax."""
        self.modules = list(routers_of(lm, key).values())
        self._shape = RoutingShape.of(lm, key)
        self._logits: list[Tensor] = []
        self._is_recording = False
        self._experts_LW: Tensor | None = None
        self._unchecked: set[int] = set()
        for number, module in enumerate(self.modules):
            module.register_forward_hook(partial(self._passed, number))

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
        num_chosen = self._shape.num_chosen
        layers = [
            row_balance(some.flatten(0, -2).index_select(0, positions_N), rows_N, num_rows, num_chosen).sum()
            for some in logits
        ]
        return torch.stack(layers).mean()

    def check_weights(self) -> None:
        """Compare what each router makes of its logits with `weights_of` in the next forward pass, which raises
        `ConfigError` where they differ."""
        self._unchecked = set(range(len(self.modules)))

    def follow(self, experts_LW: Tensor | None) -> None:
        """Send tokens to these experts from now on, in forward passes and when layers are computed again. None: to the
        routers' own. `experts_LW`: a record for each place of the flattened `[B * L]`, int16; negative: the router's
        own. Raises `DataError` for records of another model."""
        if experts_LW is not None and experts_LW.shape[1] != self._shape.record_bytes:
            raise DataError(
                f"{REPLAY_KEY}: a token's record has {experts_LW.shape[1]} bytes, and the trainer's model has "
                f"{len(self.modules)} layers of {self._shape.num_chosen} experts, {self._shape.record_bytes} bytes. "
                "Engines and trainer must have the same model."
            )
        self._experts_LW = experts_LW

    def _passed(self, number: int, module: nn.Module, arguments: Any, output: Any) -> Any:
        """Hook of router `number`: the results to use; None: its own."""
        if self._is_recording:
            self._logits.append(output[0] if isinstance(output, tuple) else output)
        if number in self._unchecked:
            self._unchecked.discard(number)
            check_weights(module, output)
        if self._experts_LW is None:
            return None
        logits, own_weights, own = output
        experts = torch.where(self._experts_LW[:, :1] >= 0, self._chosen(number), own)
        return logits, weights_of(module, logits, experts).to(own_weights.dtype), experts

    def _chosen(self, number: int) -> Tensor:
        """Experts of layer `number` by the records, `[B * L, K]` int64; without meaning where they are negative."""
        assert self._experts_LW is not None
        num_bytes = self._shape.dtype.itemsize
        width = self._shape.num_chosen * num_bytes
        layer = self._experts_LW[:, number * width : (number + 1) * width].long()
        return layer if num_bytes == 1 else layer[:, ::2] + 256 * layer[:, 1::2]


def weights_of(router: nn.Module, logits_NE: Tensor, experts_NK: Tensor) -> Tensor:
    """How much each of these experts counts, `[N, K]` float32 with gradient: the softmax over all experts, and where
    the model has it so (`norm_topk_prob`; those without a choice do) divided by their sum."""
    weights_NK = torch.softmax(logits_NE, dim=-1, dtype=torch.float32).gather(1, experts_NK)
    if getattr(router, "norm_topk_prob", True):
        weights_NK = weights_NK / weights_NK.sum(dim=-1, keepdim=True)
    return weights_NK


def check_weights(router: nn.Module, output: Any) -> None:
    """Raise `ConfigError` where `weights_of` the experts that a router chose are not the weights that it gave them."""
    is_known = isinstance(output, tuple) and len(output) == 3
    if is_known:
        logits_NE, weights_NK, experts_NK = output
        ours_NK = weights_of(router, logits_NE, experts_NK).to(weights_NK.dtype)
        is_known = torch.allclose(ours_NK, weights_NK, rtol=4 * torch.finfo(weights_NK.dtype).eps, atol=1e-6)
    if not is_known:
        raise ConfigError(
            f"{REPLAY_KEY}: {type(router).__name__} does not weigh its experts by the softmax of its logits, so that "
            "the trainer cannot weigh others. Leave it out."
        )


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
