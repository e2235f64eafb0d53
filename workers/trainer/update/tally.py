"""Metrics of one update: contributions that add up over micro-batches, minibatches and ranks, and maxima. A metric that
is no sum is made of sums when they are complete.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.algorithms.losses import explained_variance
from penstock.store.data.rows import Rows
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.trainer.update.batching import MicroBatch
from penstock.workers.trainer.update.minibatches import Minibatch
from penstock.workers.trainer.update.sequences import oldest_versions

SQUARES = ("return_square_mean", "value_error_square_mean")
"""Metrics of `value_loss` that are there for the explained variance alone."""


PLACES, FILLED, SHARED = "padding/places", "padding/tokens", "padding/shared"
"""Sums over all micro-batches: tokens that there was room for, tokens that there were, and tokens of sequences that
others of them have computed."""
VERSIONS, TOKENS = "token_versions", "tokens"
"""Column of the version that each token was sampled under, and the name of the counts of `add_mismatch`."""


class Tally:
    """Collects on this rank, without waiting for the device; `reduced` at the end is the same on every rank.

    tally = Tally(num_minibatches=2)
    tally.add("actor/pg_loss", loss)         # a share of that optimizer step's value
    tally.reduced(ranks)["actor/pg_loss"]    # the mean over both optimizer steps
    """

    def __init__(self, num_minibatches: int = 1) -> None:
        self._num_minibatches = num_minibatches
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, name: str, contribution: Tensor) -> None:
        """Add a contribution. `contribution`: `[]`, of one micro-batch to its optimizer step's value. Reported is the
        mean over optimizer steps.
        """
        self.add_once(name, contribution.detach().double() / self._num_minibatches)

    def of(self, batch: MicroBatch) -> "Tally":
        """Where contributions of this micro-batch go: nowhere, if another rank adds them."""
        return self if batch.is_counted else Tally()

    def add_once(self, name: str, contribution: Tensor) -> None:
        """Add a contribution to what is measured in one optimizer step only."""
        value = contribution.detach().double()
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def add_maximum(self, name: str, value: Tensor) -> None:
        value = value.detach().double()
        self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value

    def add_padding(self, minibatches: Sequence[Minibatch]) -> None:
        """Add how much of the micro-batches is padding, and how much is shared: `with_shares` makes shares of it."""
        every = [batch for minibatch in minibatches for batch in minibatch.batches]
        batches = [batch for batch in every if batch.is_counted and not batch.is_dummy]
        self._sums[PLACES] = torch.tensor(float(sum(batch.input_ids_SL.numel() for batch in batches)))
        self._sums[FILLED] = torch.tensor(float(sum(batch.num_tokens for batch in batches)))
        self._sums[SHARED] = torch.tensor(float(sum(batch.num_shared for batch in batches)))

    def reduced(self, ranks: Ranks) -> dict[str, float]:
        """Metrics over all ranks. A rank that had no rows knows no names, so names are sent too. Collective."""
        sums: dict[str, float] = {}
        maxima: dict[str, float] = {}
        for other_sums, other_maxima in ranks.gather_ranks((_floats(self._sums), _floats(self._maxima))):
            for name, value in other_sums.items():
                sums[name] = sums.get(name, 0.0) + value
            for name, value in other_maxima.items():
                maxima[name] = max(maxima.get(name, value), value)
        return sums | maxima


@dataclass(frozen=True)
class TokenAges:
    """The staleness of the weights that sampled tokens were computed by, in versions."""

    of_rows: list[np.ndarray]
    """`[T_i]` int64 for each row."""
    known: tuple[int, ...]
    """Every staleness that a token of this rank has."""

    @classmethod
    def of(cls, rows: Rows, version: int | None, *, keeps_caches: bool = False) -> "TokenAges | None":
        """Those of rows. `version`: the trainer's. `keeps_caches`: engines sample on from keys and values of older
        weights, so that a token is as old as the oldest that it was computed with. None: one of the versions is not
        known."""
        if version is None or VERSIONS not in rows:
            return None
        versions = oldest_versions(rows) if keeps_caches else rows.arrays(VERSIONS)
        of_rows = [version - of_row.astype(np.int64) for of_row in versions]
        return cls(of_rows, tuple(np.unique(np.concatenate([np.zeros(0, np.int64), *of_rows])).tolist()))

    def of_batch(self, batch: MicroBatch) -> Tensor:
        """Those of a micro-batch's tokens, `[N]`."""
        return torch.from_numpy(np.concatenate([self.of_rows[row] for row in batch.rows])).to(batch.mask_BT.device)


def add_mismatch(tally: Tally, trainer_BT: Tensor, batch: MicroBatch, ages: TokenAges | None) -> None:
    """Add how far the trainer's log-probabilities are from those that the tokens were sampled under: with `d = trainer
    - behavior`, the means of |d| and of `exp(d) - 1 - d` (k3 of KL(behavior || trainer), Schulman 2020), and max |d|.

    Tokens of the trainer's own version are `mismatch/…`: what differs there is the engine. Those that are k versions
    older, or were computed from a cache that is, are `lag/…@k`: the policy has moved since. Without ages all are
    `mismatch/…`. They are those of the step's first minibatch, before any update of it; `with_means` divides the sums.
    """
    mask_BT = batch.mask_BT
    difference_N = trainer_BT.detach()[mask_BT] - batch.columns["behavior_logprobs"][mask_BT]
    if difference_N.numel() == 0:
        return
    age_N = ages.of_batch(batch) if ages else torch.zeros_like(difference_N)
    values = {"logprob_abs_mean": difference_N.abs(), "kl": torch.expm1(difference_N) - difference_N}
    for age in ages.known if ages else (0,):
        chosen_N = age_N == age
        prefix, suffix = ("lag/", f"@{age}") if age else ("mismatch/", "")
        tally.add_once(f"{prefix}{TOKENS}{suffix}", chosen_N.sum())
        for name, value_N in values.items():
            tally.add_once(f"{prefix}{name}{suffix}", torch.where(chosen_N, value_N, 0.0).sum())
        largest = torch.where(chosen_N, values["logprob_abs_mean"], 0.0).max()
        tally.add_maximum(f"{prefix}logprob_abs_max{suffix}", largest)


def with_means(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics with means in the place of the sums of `add_mismatch`, without those that no token counts for."""
    result = dict(metrics)
    for counter in [name for name in metrics if name.startswith(("mismatch/", "lag/")) and TOKENS in name]:
        count, names = result.pop(counter), [counter.replace(TOKENS, name) for name in ("logprob_abs_mean", "kl")]
        for name in names:
            result[name] /= max(1.0, count)
        if not count:
            for name in (*names, counter.replace(TOKENS, "logprob_abs_max")):
                del result[name]
    return result


def with_shares(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """The metrics with shares in the place of the sums that they are made of: `<prefix>/padding_share` of places, and
    `<prefix>/shared_share` of the sequences' tokens, where some are shared."""
    result = with_means(metrics)
    places, tokens, shared = (result.pop(name, 0.0) for name in (PLACES, FILLED, SHARED))
    if shared:
        result[f"{prefix}/shared_share"] = shared / (tokens + shared)
    return result | {f"{prefix}/padding_share": 1.0 - tokens / places} if places else result


def with_explained_variance(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """A critic's metrics with `<prefix>/explained_variance` in the place of the squares that it is made of.

    It is over all tokens of the update, as each optimizer step saw them. It is left out where every return is the same,
    and for a loss of one's own that does not report what `value_loss` does.
    """
    result = dict(metrics)
    own = {name.removeprefix(f"{prefix}/"): value for name, value in metrics.items() if name.startswith(f"{prefix}/")}
    if not own.keys() >= {"return_mean", "value_error_mean", *SQUARES}:
        return result
    for name in SQUARES:
        del result[f"{prefix}/{name}"]
    explained = explained_variance(own)
    return result if math.isnan(explained) else result | {f"{prefix}/explained_variance": explained}


def _floats(values: dict[str, Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}
