"""Advantages by name, for recipes: `algorithm.advantage=rloo` finds what `@advantage("rloo")` has put here.

    @advantage("mine")
    def mine(reward: Tensor, novelty: Tensor, *, weight: float = 1.0) -> Tensor: ...

Parameters without a default are columns, as of a loss: `reward` `[G]`, `response_ids` a list of `[T_i]`. Settings are
keyword-only.
"""

from penstock.algorithms.named import Named

ADVANTAGES = Named("algorithm.advantage")
advantage = ADVANTAGES.register
