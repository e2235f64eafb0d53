"""The report of a rank on a step: numbers small enough to send to the controller. The step's metrics are made of it
(`orchestrator/observability/reporting/metrics.py`). The values of each token are larger, and asked for where samples
are written; `token_recorder.py` makes them and says what they mean. Without torch.

Legend: _N rows (samples) of this rank, T_i sampled tokens of row i.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.algorithms.graph.columns import POLICY
from penstock.store.client.lease import Share
from penstock.store.data.rows import Rows
from penstock.workers.probing import ProbeRow
from penstock.workers.trainer.update.sequences import context_column

REWARD_PREFIX = "reward_"
"""Prefix of the columns of several rewards (`algorithms/catalogue.py`)."""


@dataclass(frozen=True)
class TrainedRows:
    """Values of each row of this rank that the step's metrics need; small enough to send to the controller."""

    reward_N: np.ndarray
    """Reward (float64), NaN where the dataflow has no reward."""
    response_tokens_N: np.ndarray
    """Number of response tokens (int64)."""
    prompt_tokens_N: np.ndarray
    """Number of prompt tokens (int64); for a trajectory, of all tokens that were not sampled."""
    clipped_N: np.ndarray
    """True (bool) if the response ended at a limit, not by itself."""
    staleness_max_N: np.ndarray
    """Staleness (int64) of the row's oldest token, in versions; 0 where nothing was sampled."""
    staleness_sum_N: np.ndarray
    """Staleness (float64) summed over the row's tokens."""
    turns_N: np.ndarray
    """Number of the policy's turns (int64); 1 without an environment."""
    rewards_N: dict[str, np.ndarray] = field(default_factory=dict)
    """Rewards (float64) by name, where there are several."""
    policies_N: np.ndarray = field(default_factory=lambda: np.zeros(0, np.str_))
    """Policy (text) that sampled it; empty where one is trained."""

    @classmethod
    def of(cls, rows: Rows, version: int) -> "TrainedRows":
        """`version`: of the policy that was updated. A token sampled under version u has staleness `version - u`."""
        count = len(rows)
        reward_N = rows.values("reward").astype(np.float64) if "reward" in rows else np.full(count, np.nan)
        clipped_N = np.zeros(count, dtype=np.bool_)
        if "finish_reason" in rows:
            clipped_N = np.array([reason != "stop" for reason in rows.strings("finish_reason")], dtype=np.bool_)
        oldest_N, sum_N = np.zeros(count, np.int64), np.zeros(count)
        if "token_versions" in rows:
            for index, versions in enumerate(rows.arrays("token_versions")):
                if len(versions):
                    staleness = version - versions.astype(np.int64)
                    oldest_N[index], sum_N[index] = staleness.max(), staleness.sum()
        turns_N = rows.lengths("turn_tokens") if "turn_tokens" in rows else np.ones(count, np.int64)
        names = [name for name in rows.names if name.startswith(REWARD_PREFIX)]
        rewards_N = {name.removeprefix(REWARD_PREFIX): rows.values(name).astype(np.float64) for name in names}
        num_read_N, num_sampled_N = rows.lengths(context_column(rows)), rows.lengths("response_ids")
        policies_N = np.array(rows.strings(POLICY) if POLICY in rows else [], np.str_)
        return cls(reward_N, num_sampled_N, num_read_N, clipped_N, oldest_N, sum_N, turns_N, rewards_N, policies_N)


@dataclass(frozen=True)
class StepReport:
    """A step, as one rank saw it."""

    step: int
    """Number of the step, counted from 1."""
    version: int
    """Version of the policy before the update; the update made `version + 1`."""
    metrics: dict[str, float]
    """Metrics from `UpdateReport.metrics`: the same on every rank."""
    rows: TrainedRows
    """Values of this rank's rows."""
    wait_s: float
    """Seconds of waiting for the store to have a batch."""
    train_s: float
    seconds: dict[str, float]
    """Parts of `train_s`: plan, forward, backward, optimizer; keep, the copy of this rank's state."""
    row_ids: np.ndarray
    """Ids (int64) of the rows that this rank reports."""
    share: Share | None = None
    """Share of the batch that the store counts as trained. None: another rank reports these rows."""
    no_memory_checkpoint: str | None = None
    """The reason why this rank makes no in-memory checkpoints from this step on, reported once. None: it makes them, or
    an earlier report has said why not."""
    probe: tuple[ProbeRow, ...] = ()
    """Rows for engines to score again (`probe.py`); of one rank, in runs that ask for them."""
    hashes: dict[str, int] = field(default_factory=dict)
    """Hashes of this rank's share of the step, by quantity; added over ranks they are the step's (`row_hashes.py`)."""


@dataclass(frozen=True)
class TokenValues:
    """The values of each sampled token in this rank's update."""

    row_ids: np.ndarray
    """Ids (int64) of the rows."""
    trainer_logprobs: list[np.ndarray | None]
    """Log-probabilities, `[T_i]` float32, NaN for a token of an old turn. None: the row came after an optimizer step of
    its own update, and the loss asked for no log-probabilities of before."""
    loss_mask: list[np.ndarray]
    """Loss masks, `[T_i]` bool."""
    advantage: list[np.ndarray | None]
    """Advantages, `[T_i]`, NaN for a token of an old turn. None: of responses, which the store has, or of none."""

    @classmethod
    def joined(cls, parts: Sequence["TokenValues"]) -> "TokenValues":
        """The values of the rows of several updates."""
        return cls(
            np.concatenate([one.row_ids for one in parts]),
            [values for one in parts for values in one.trainer_logprobs],
            [mask for one in parts for mask in one.loss_mask],
            [values for one in parts for values in one.advantage],
        )
