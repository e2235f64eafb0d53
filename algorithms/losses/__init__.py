"""Losses. Pure functions of one micro-batch, differentiable in `logprobs` (or `values`), and in nothing else.

The trainer calls a loss once a micro-batch and finds its arguments by their names (`Dataflow.train`):

    loss, metrics = loss_fn(logprobs=…, mask=…, totals=…, advantage=…, behavior_logprobs=…)

`logprobs` (with gradient), `old_logprobs` (the same at the start of the batch, without), `entropy`, `mask` and `totals`
come from the trainer; every other parameter without a default, or with default None, is a column: `[B, T]` for token
columns, `[B]` for sample columns, None when it has the default None and no stage writes it. Settings are keywords with
a default that is not None and are bound by `functools.partial`. Returned are this micro-batch's *contribution* to the
batch's loss and to each metric (float32 `[]`, detached): the trainer adds them up and divides by nothing.

    policy.py      the one policy loss: checks, what the ratio is taken against, correction, surrogate, KL term,
                   aggregation, metrics; an entropy bonus on any loss; the critic's loss; the likelihood of
                   demonstrations
    surrogates.py  surrogates that bound the ratio of a token: ppo_clip, sapo; of a response: gspo, gspo_token, gmpo;
                   that weigh a log-probability: reinforce, gpg, cispo, dppo_tv; that treat a few tokens differently:
                   clip_cov, kl_cov
    preference.py  pairs of responses: dpo, ipo, simpo, orpo, bradley_terry; single ones, good or bad: kto
    summed.py      sums over tokens whose weights the caller chooses

Legend: B rows of the micro-batch, T response tokens, padded: what lies under `mask == 0` may be anything, NaN included.
"""

from penstock.algorithms.losses.policy import LossAndMetrics as LossAndMetrics
from penstock.algorithms.losses.policy import explained_variance as explained_variance
from penstock.algorithms.losses.policy import interpolated_policy_loss as interpolated_policy_loss
from penstock.algorithms.losses.policy import policy_loss as policy_loss
from penstock.algorithms.losses.policy import ppo_clip_loss as ppo_clip_loss
from penstock.algorithms.losses.policy import sft_loss as sft_loss
from penstock.algorithms.losses.policy import value_loss as value_loss
from penstock.algorithms.losses.policy import with_entropy_bonus as with_entropy_bonus
from penstock.algorithms.losses.surrogates import SURROGATES as SURROGATES
from penstock.algorithms.losses.surrogates import surrogate as surrogate
