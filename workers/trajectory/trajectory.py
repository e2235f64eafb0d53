"""An attempt at a task, from its first turn to its outcome, and the columns of its row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from penstock.workers.trajectory.segments import segments_of, spans_of
from penstock.workers.trajectory.transcript import as_json
from penstock.workers.trajectory.turn import Turn

COMPLETED, TRUNCATED, REJECTED, FAILED = "completed", "truncated", "rejected", "failed"
"""Outcomes of attempts. The first two are trained; the others are dropped with their reason, and never count as a
reward of zero."""


@dataclass(frozen=True)
class Outcome:
    """The way an attempt ended, and why."""

    kind: str = COMPLETED
    reason: str = ""
    """Reason. truncated: the limit (turns, tokens, context, time, length). rejected, failed: the reason for dropping
    the row."""
    detail: str = ""
    """Text for people: the error, say."""

    @property
    def is_trained(self) -> bool:
        return self.kind in (COMPLETED, TRUNCATED)


@dataclass(frozen=True)
class Trajectory:
    """The result of an attempt."""

    turns: Sequence[Turn]
    """Turns in the order of their ids."""
    outcome: Outcome = Outcome()
    reward: float = 0.0
    """Reward of the whole, those of its turns included."""
    turn_rewards: Mapping[int, float] = field(default_factory=dict)
    """Rewards by the turn's id."""
    said: Sequence[Mapping[str, Any]] = ()
    """Messages in the order in which they were said, for people."""

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens."""
        return sum(len(turn.output_ids) for turn in self.turns)

    @property
    def text(self) -> str:
        """Text of the last answer, for reward functions: without thinking and calls."""
        return self.turns[-1].answer

    def with_reward(self, reward: float) -> "Trajectory":
        """The same trajectory, with another reward for the whole."""
        return replace(self, reward=reward)

    def ended(self, outcome: Outcome) -> "Trajectory":
        """The same trajectory, with another outcome."""
        return replace(self, outcome=outcome)


def row_columns(trajectories: Sequence[Trajectory], reward_column: str = "reward") -> dict[str, list[Any]]:
    """The columns that an environment writes, an entry for each trajectory; each has at least one turn. Token columns
    have one value for each sampled token, in the order of segments: a turn's sampled tokens are in one of them."""
    columns: dict[str, list[Any]] = {}
    for trajectory in trajectories:
        for name, value in (_row(trajectory) | {reward_column: float(trajectory.reward)}).items():
            columns.setdefault(name, []).append(value)
    return columns


def _row(trajectory: Trajectory) -> dict[str, Any]:
    segments = segments_of(trajectory.turns)
    runs = [run for segment in segments for run in segment.runs]
    turns = [run.turn for run in runs]
    outcome = trajectory.outcome
    return {
        "response_ids": _joined([turn.output_ids for turn in turns], np.int32),
        "response_text": trajectory.text,
        "finish_reason": outcome.reason if outcome.kind == TRUNCATED else "stop",
        "behavior_logprobs": _joined([turn.logprobs for turn in turns], np.float32),
        "token_versions": _joined([turn.versions for turn in turns], np.int32),
        "context_ids": _joined([run.context for run in runs], np.int32),
        "spans": np.asarray(spans_of(segments), np.int32),
        "token_temperatures": _joined([[turn.temperature] * len(turn.output_ids) for turn in turns], np.float32),
        "turn_tokens": np.asarray([len(turn.output_ids) for turn in turns], np.int32),
        "turn_rewards": np.asarray([trajectory.turn_rewards.get(turn.id, 0.0) for turn in turns], np.float32),
        "turn_ids": np.asarray([turn.id for turn in turns], np.int32),
        "transcript": as_json(trajectory.said),
    }


def _joined(parts: Sequence[Sequence[Any]], dtype: Any) -> np.ndarray:
    return np.concatenate([np.asarray(part, dtype=dtype) for part in parts])
