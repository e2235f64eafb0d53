"""The output layer of a language model, which scores given tokens: log-probabilities and entropies from hidden states,
without the logits of all tokens at once.

    hidden [N, H] ─┐
                   ├─▶ logits of one tile of tokens x vocabulary ─▶ running log-sum-exp ─▶ logprobs [N], entropy [N]
    weight [V, H] ─┘          (backward makes each tile anew and turns it into its own gradient, in place)

Logits that fit the budget whole are kept for backward by the plain operations, bitwise those of a straightforward loop;
that saves the second multiplication.

An adapter of the output layer adds a second product to each tile: of A's, `[N, K]`, with B, `[V, K]`. The weight is not
copied, and not changed, since it may be the embedding's, too.

Legend: N tokens, J targets of each (mostly one), H hidden size, V vocabulary, K rank of an adapter, R x C tokens and
words of one tile.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from penstock.workers.trainer.models.linear import AdoptedLinear

ENTROPY = ("none", "value", "gradient")
Addend = tuple[Tensor, Tensor]
"""Factors of a second product that logits get: `[N, K]` and `[V, K]`, of one dtype with the first ones."""
BYTES_PER_LOGIT = 8
"""Bytes for a tile of float32 logits, and one more of the same size that is made of it."""
BYTES_PER_WHOLE_LOGIT = 16
"""Bytes for logits, log-probabilities, and both of their gradients."""
CPU_TILE_BYTES = 8 * 2**20
"""Bytes of a tile on a CPU, whatever the budget: tiles that stay in the cores' caches are the fastest. Measured at
150,000 words: 1 to 16 MiB are equal, tiles of few tokens and the whole vocabulary take 1.7 times as long.
"""
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


def token_scores(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    entropy: str = "none",
    budget_bytes: int = 0,
    cap: float | None = None,
    addend: Addend | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of `targets_N` (int64, `[N]`, or `[N, J]` for J candidates of each token) in their shape, and
    entropies `[N]`, float32, in nats, of softmax((hidden weight^T + bias) / temperature), which is one number or `[N]`.

    `entropy`: "none" (None is returned); "value", without gradient; "gradient". `budget_bytes`: of logits and
    what is made of them, at once; changes no result but for rounding. `cap`: logits z become cap * tanh(z / cap)
    before the temperature. `addend`: of an adapter, whose product is added to the first one. Logits are rounded to the
    dtype of `hidden_NH`, as the model's own are, and float32 from then on. Gradients, once differentiable, flow to
    `hidden_NH`, `weight_VH`, `bias_V` and both factors of `addend`.
    """
    if len(hidden_NH) * len(weight_VH) * BYTES_PER_WHOLE_LOGIT <= budget_bytes:
        logits_NV = nn.functional.linear(hidden_NH, weight_VH, bias_V)
        if addend is not None:
            logits_NV = logits_NV + nn.functional.linear(*addend)
        return whole_scores(logits_NV, targets_N, temperature, entropy, cap)
    logprobs_N, entropy_N = _TokenScores.apply(
        hidden_NH, weight_VH, bias_V, targets_N, 1.0 / temperature, entropy, budget_bytes, cap,
        *(addend or (None, None)),
    )  # fmt: skip
    return logprobs_N, None if entropy == "none" else entropy_N


def whole_scores(
    logits_NV: Tensor, targets_N: Tensor, temperature: float | Tensor, entropy: str, cap: float | None = None
) -> tuple[Tensor, Tensor | None]:
    """Compute the same as `token_scores`, from logits that are there."""
    if cap is not None:
        logits_NV = (logits_NV.float() / cap).tanh() * cap
    if isinstance(temperature, Tensor):
        logits_NV = logits_NV.float() / temperature.unsqueeze(1)
    elif temperature != 1.0:
        logits_NV = logits_NV.float() / temperature
    all_logprobs_NV = torch.log_softmax(logits_NV, dim=-1, dtype=torch.float32)
    # A clone and no view: in-place operations on a view would bypass FSDP's backward hook on what forward returns.
    logprobs_N = all_logprobs_NV.gather(1, _by_token(targets_N)).view(targets_N.shape).clone()
    if entropy == "none":
        return logprobs_N, None
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy == "gradient"):
        return logprobs_N, -(all_logprobs_NV.exp() * all_logprobs_NV).sum(dim=-1)


def likeliest_tokens(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    count: int,
    *,
    temperature: float | Tensor = 1.0,
    budget_bytes: int = 0,
    cap: float | None = None,
    addend: Addend | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities `[N, 1 + J]` of `targets_N` and of the `count` = J likeliest tokens, and the ids `[N, J]` of
    these (int64), the likeliest first. Without gradient; arguments as of `token_scores`. Of equal logits any come."""
    running, best = RunningSoftmax(targets_N, with_entropy=False), BestLogits(len(targets_N), count, hidden_NH.device)
    with torch.no_grad():
        for rows, words, logits_RC in Tiles(
            hidden_NH, weight_VH, bias_V, 1.0 / temperature, budget_bytes or BYTES_PER_LOGIT, cap, addend
        ):
            best.add(rows, words, logits_RC)
            running.add(rows, words, logits_RC)
    best_NJ = best.logits_NJ - running.logsumexp().unsqueeze(1)
    return torch.cat([running.logprobs().unsqueeze(1), best_NJ], dim=1), best.ids_NJ


class BestLogits:
    """The largest logits of each token and whose they are, tile by tile."""

    def __init__(self, num_tokens: int, count: int, device: torch.device) -> None:
        self.logits_NJ = torch.full((num_tokens, count), -torch.inf, device=device)
        self.ids_NJ = torch.zeros(num_tokens, count, dtype=torch.int64, device=device)

    def add(self, rows: slice, words: slice, logits_RC: Tensor) -> None:
        """Add a tile, which stays as it is."""
        count = self.ids_NJ.shape[1]
        here_RJ, places_RJ = logits_RC.topk(min(count, logits_RC.shape[1]), dim=1)
        logits_RJ = torch.cat([self.logits_NJ[rows], here_RJ], dim=1)
        ids_RJ = torch.cat([self.ids_NJ[rows], places_RJ + words.start], dim=1)
        self.logits_NJ[rows], best_RJ = logits_RJ.topk(count, dim=1)
        self.ids_NJ[rows] = ids_RJ.gather(1, best_RJ)


class _TokenScores(torch.autograd.Function):
    """Scores with their gradients. With z the logits over the temperature, p their softmax, t the target and H the
    entropy:

    logprob = z_t - logsumexp(z),        d logprob / d z_j = [j = t] - p_j
    H = logsumexp(z) - sum_j p_j z_j,    d H / d z_j = -p_j (log p_j + H)
    z = cap * tanh(y / cap),             d z / d y = 1 - (z / cap)^2
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        scale: float | Tensor,
        entropy: str,
        budget_bytes: int,
        cap: float | None,
        low_NK: Tensor | None,
        up_VK: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        addend = None if low_NK is None or up_VK is None else (low_NK, up_VK)
        tiles = Tiles(hidden_NH, weight_VH, bias_V, scale, budget_bytes, cap, addend)
        running = RunningSoftmax(targets_N, with_entropy=entropy != "none")
        for rows, words, logits_RC in tiles:
            running.add(rows, words, logits_RC)
        logprobs_N, entropy_N = running.logprobs(), running.entropy()
        ctx.save_for_backward(
            hidden_NH, weight_VH, bias_V, targets_N, running.logsumexp(), entropy_N, low_NK, up_VK
        )  # fmt: skip
        ctx.scale, ctx.budget_bytes, ctx.entropy_has_gradient = scale, budget_bytes, entropy == "gradient"
        ctx.cap = cap
        if not ctx.entropy_has_gradient:
            ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs_N: Tensor, grad_entropy_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, targets_N, logsumexp_N, entropy_N, low_NK, up_VK = ctx.saved_tensors
        addend = None if low_NK is None else (low_NK, up_VK)
        tiles = Tiles(hidden_NH, weight_VH, bias_V, ctx.scale, ctx.budget_bytes, ctx.cap, addend)
        sums = GradientSums(ctx.needs_input_grad[:3], hidden_NH, weight_VH, bias_V)
        low_sums = None if addend is None else GradientSums((*ctx.needs_input_grad[-2:], False), *addend, None)
        # The logits' gradient is wanted before the temperature.
        scale = _by_token(ctx.scale) if isinstance(ctx.scale, Tensor) else ctx.scale
        grad_logprobs_NJ, grad_entropy_N1 = _by_token(grad_logprobs_N) * scale, _by_token(grad_entropy_N) * scale
        grad_sum_N1, targets_NJ = grad_logprobs_NJ.sum(dim=1, keepdim=True), _by_token(targets_N)
        for rows, words, logits_RC in tiles:
            slope_RC = tiles.slope(rows, logits_RC)
            all_logprobs_RC = logits_RC.sub_(logsumexp_N[rows, None])
            factor: Tensor = grad_sum_N1[rows]
            if ctx.entropy_has_gradient:
                factor = (all_logprobs_RC + entropy_N[rows, None]).mul_(grad_entropy_N1[rows]).add_(factor)
            grad_RC = all_logprobs_RC.exp_().mul_(factor).neg_()
            index_RJ, is_inside_RJ = places(targets_NJ[rows], words)
            grad_RC.scatter_add_(1, index_RJ, grad_logprobs_NJ[rows] * is_inside_RJ)
            grad_RC = grad_RC if slope_RC is None else grad_RC.mul_(slope_RC)
            sums.add(rows, words, grad_RC)
            if low_sums is not None:
                low_sums.add(rows, words, grad_RC)
        of_addend = (None, None) if low_sums is None else low_sums.result()[:2]
        return (*sums.result(), None, None, None, None, None, *of_addend)


class Tiles:
    """Logits over the temperature, tile by tile: `for rows, words, logits_RC in tiles`. A tile is float32 and the
    caller's to change, until the next one, which has the same memory.

    Slices of the vocabulary outside, blocks of tokens inside: a slice of the weight is done with before the next one.
    """

    def __init__(
        self, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, scale: float | Tensor, budget_bytes: int,
        cap: float | None = None, addend: Addend | None = None,
    ) -> None:  # fmt: skip
        """`scale`: one over the temperature, of all tokens or of each, `[N]`. `cap`, `addend`: see `token_scores`."""
        self._hidden_NH, self._weight_VH, self._bias_V, self._scale = hidden_NH, weight_VH, bias_V, scale
        self._cap, self._addend = cap, addend
        self._size = len(hidden_NH), len(weight_VH)
        self._shape = tile_shape(*self._size, budget_bytes, is_cpu=hidden_NH.device.type == "cpu")

    def __iter__(self) -> Iterator[tuple[slice, slice, Tensor]]:
        (num_tokens, vocabulary), (num_rows, num_words) = self._size, self._shape
        memory = self._hidden_NH.new_empty(num_rows * num_words, dtype=torch.float32)
        for words in _slices(vocabulary, num_words):
            for rows in _slices(num_tokens, num_rows):
                shape = rows.stop - rows.start, words.stop - words.start
                tile_RC = memory[: shape[0] * shape[1]].view(shape)
                self._fill(tile_RC, rows, words)
                yield rows, words, tile_RC

    def slope(self, rows: slice, tile_RC: Tensor) -> Tensor | None:
        """Derivative of a tile's logits, which are not changed yet, before the temperature, by the product; None where
        it is 1."""
        if self._cap is None:
            return None
        scale = self._scale[rows, None] if isinstance(self._scale, Tensor) else self._scale
        return (tile_RC / (scale * self._cap)).square_().neg_().add_(1.0)

    def _fill(self, tile_RC: Tensor, rows: slice, words: slice) -> None:
        hidden_RH, weight_HC = self._hidden_NH[rows], self._weight_VH[words].t()
        is_plain = hidden_RH.dtype == torch.float32 and self._bias_V is None and self._cap is None
        if is_plain and not isinstance(self._scale, Tensor):
            tile_RC.addmm_(hidden_RH, weight_HC, beta=0, alpha=self._scale)
            if self._addend is not None:
                low_NK, up_VK = self._addend
                tile_RC.addmm_(low_NK[rows], up_VK[words].t(), alpha=self._scale)
            return
        logits_RC = hidden_RH @ weight_HC
        if self._addend is not None:
            low_NK, up_VK = self._addend
            logits_RC.add_(low_NK[rows] @ up_VK[words].t())
        tile_RC.copy_(logits_RC if self._bias_V is None else logits_RC.add_(self._bias_V[words]))
        if self._cap is not None:
            tile_RC.div_(self._cap).tanh_().mul_(self._cap)
        if isinstance(self._scale, Tensor):
            tile_RC.mul_(self._scale[rows, None])
        elif self._scale != 1.0:
            tile_RC.mul_(self._scale)


class RunningSoftmax:
    """Sums over the vocabulary, added up tile by tile. Exponents are relative to the largest logit so far, and sums are
    rescaled when a larger one comes (1805.02867, algorithm 3).
    """

    def __init__(self, targets_N: Tensor, *, with_entropy: bool) -> None:
        self._targets_NJ, self._with_entropy, self._shape = _by_token(targets_N), with_entropy, targets_N.shape
        zeros_N = torch.zeros(len(targets_N), dtype=torch.float32, device=targets_N.device)
        self._target_logits_NJ = torch.zeros_like(self._targets_NJ, dtype=torch.float32)
        self._largest_N = torch.full_like(zeros_N, torch.finfo(torch.float32).min)
        self._sum_N = torch.zeros_like(zeros_N)
        """Sum of exp(z - largest)."""
        self._weighted_N = torch.zeros_like(zeros_N)
        """Sum of exp(z - largest) * (z - largest)."""

    def add(self, rows: slice, words: slice, logits_RC: Tensor) -> None:
        """Add a tile, which is changed."""
        index_RJ, is_inside_RJ = places(self._targets_NJ[rows], words)
        self._target_logits_NJ[rows] += logits_RC.gather(1, index_RJ) * is_inside_RJ
        largest_R = torch.maximum(self._largest_N[rows], logits_RC.amax(dim=1))
        # Before the first tile the sum is 0 and the rise the largest of numbers, and finite: their product is 0.
        fall_R = self._largest_N[rows] - largest_R
        shrink_R = fall_R.exp()
        exp_RC = logits_RC.sub_(largest_R.unsqueeze(1)).exp()
        sum_R = self._sum_N[rows]
        if self._with_entropy:
            weighted_R = self._weighted_N[rows]
            weighted_R.addcmul_(sum_R, fall_R).mul_(shrink_R).add_(torch.linalg.vecdot(exp_RC, logits_RC))
        sum_R.mul_(shrink_R).add_(exp_RC.sum(dim=1))
        self._largest_N[rows] = largest_R

    def logsumexp(self) -> Tensor:
        return self._largest_N + self._sum_N.log()

    def logprobs(self) -> Tensor:
        """Log-probabilities of the targets, in their shape, and no view of others."""
        logits = self._target_logits_NJ.view(self._shape)
        largest, log_sum = self._largest_N, self._sum_N.log()
        if logits.dim() > 1:
            largest, log_sum = largest.unsqueeze(1), log_sum.unsqueeze(1)
        return (logits - largest).sub_(log_sum)

    def entropy(self) -> Tensor:
        """Entropies, `[N]`; without meaning where they were not asked for."""
        return self._sum_N.log().sub_(self._weighted_N / self._sum_N)


class GradientSums:
    """Gradients of hidden states, weight and bias, from tiles of the logits' gradient in the order of `Tiles`. Sums are
    float32, whatever the dtype of the result.
    """

    def __init__(
        self, is_needed: tuple[bool, ...], hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None
    ) -> None:
        """`is_needed`: whether the gradients of hidden states, weight, bias are needed."""
        self._hidden_NH, self._weight_VH, self._bias_V = hidden_NH, weight_VH, bias_V
        self._grad_hidden_NH = torch.zeros_like(hidden_NH, dtype=torch.float32) if is_needed[0] else None
        self._grad_weight_VH = torch.zeros_like(weight_VH) if is_needed[1] else None
        self._grad_bias_V = (
            torch.zeros_like(bias_V, dtype=torch.float32) if is_needed[2] and bias_V is not None else None
        )
        self._slice_CH = hidden_NH.new_empty(0, dtype=torch.float32)
        """The weight's gradient in the present slice of the vocabulary."""

    def add(self, rows: slice, words: slice, grad_RC: Tensor) -> None:
        if self._grad_bias_V is not None:
            self._grad_bias_V[words] += grad_RC.sum(dim=0)
        grad_RC = grad_RC.to(self._hidden_NH.dtype)
        if self._grad_hidden_NH is not None:
            _add_product(self._grad_hidden_NH[rows], grad_RC, self._weight_VH[words])
        if self._grad_weight_VH is None:
            return
        if self._grad_weight_VH.dtype == torch.float32:
            _add_product(self._grad_weight_VH[words], grad_RC.t(), self._hidden_NH[rows])
            return
        if rows.start == 0:
            self._slice_CH = torch.zeros_like(self._weight_VH[words], dtype=torch.float32)
        _add_product(self._slice_CH, grad_RC.t(), self._hidden_NH[rows])
        if rows.stop == len(self._hidden_NH):
            self._grad_weight_VH[words] = self._slice_CH

    def result(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients, in the dtypes of what they are gradients of; None: not needed."""
        dtype = self._hidden_NH.dtype
        hidden_NH, bias_V = self._grad_hidden_NH, self._grad_bias_V
        return (
            None if hidden_NH is None else hidden_NH.to(dtype),
            self._grad_weight_VH,
            None if bias_V is None or self._bias_V is None else bias_V.to(self._bias_V.dtype),
        )


def tile_shape(num_tokens: int, vocabulary: int, budget_bytes: int, *, is_cpu: bool) -> tuple[int, int]:
    """Tokens and words of one tile: about square, or with all tokens and more words if there are few, or all words and
    more tokens. Matrix products want neither side short.
    """
    num_bytes = min(budget_bytes, CPU_TILE_BYTES) if is_cpu else budget_bytes
    num_logits = max(1, num_bytes // BYTES_PER_LOGIT)
    num_rows = min(max(1, num_tokens), math.isqrt(num_logits))
    num_words = min(vocabulary, num_logits // num_rows)
    return min(max(1, num_tokens), num_logits // num_words), num_words


def places(targets_RJ: Tensor, words: slice) -> tuple[Tensor, Tensor]:
    """Places, `[R, J]` each: where in the slice of the vocabulary each target is, and whether it is there; elsewhere
    some place within. No mask selects anything, so that a GPU need not wait for a count.
    """
    index_RJ = targets_RJ - words.start
    is_inside_RJ = (index_RJ >= 0) & (index_RJ < words.stop - words.start)
    return index_RJ.clamp(0, words.stop - words.start - 1), is_inside_RJ


def _by_token(values: Tensor) -> Tensor:
    """The values of each token, `[N, J]`, of `[N]` or `[N, J]`."""
    return values.unsqueeze(1) if values.dim() == 1 else values


def _add_product(sum_: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the product in place: `sum_ += left @ right`. `sum_` is float32, the factors of one dtype."""
    if left.dtype == torch.float32:
        sum_.addmm_(left, right)
    else:
        sum_.add_(left @ right)


def _slices(size: int, step: int) -> Iterator[slice]:
    for start in range(0, size, step):
        yield slice(start, min(size, start + step))
