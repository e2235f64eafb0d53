"""Surrogates by name: the formula of a policy loss, and nothing around it.

    @surrogate("mine")
    def mine(new_BT, old_BT, advantage_BT, mask_BT, *, clip: NonNegative = 0.2):
        return -advantage_BT * ..., {"clip_fraction": ...}

`new`: log-probabilities of the policy, with gradient. `old`: what the ratio is taken against, without. `advantage`: a
token, without. All `[B, T]`, float32 (float64 stays), zero in padding already. `mask`: bool `[B, T]`. Returned are the
loss of each token `[B, T]`, to be minimised, and token values of metrics `[B, T]`, which are averaged over the batch's
tokens. What is returned under padding is ignored. Settings are keyword-only; `options.py` says how to limit them.

A surrogate sees one micro-batch. It must treat rows independently, or the result depends on how the batch is cut; the
two in `covariance.py` do not, and say so. `policy.py` calls them.
"""

from collections.abc import Callable

from torch import Tensor

from penstock.algorithms.named import Named

TokenLosses = tuple[Tensor, dict[str, Tensor]]
"""Losses `[B, T]`, and token values of metrics, `[B, T]` each."""
Surrogate = Callable[..., TokenLosses]

SURROGATES = Named("algorithm.surrogate")
surrogate = SURROGATES.register
