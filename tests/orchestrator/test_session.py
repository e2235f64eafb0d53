"""The rows that each rank of a session's trainer gets, and what its verbs do with rewards that fail."""

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.conf.errors import DataError, RewardFailure
from penstock.conf.reward import RewardConfig
from penstock.conf.run import RunConfig
from penstock.conf.trainer import TrainerConfig
from penstock.orchestrator import session
from penstock.orchestrator.loops.session_policy import Model, finite_rows
from penstock.orchestrator.session import Reward
from penstock.store.data.rows import Rows
from penstock.workers.reward.reward_result import RewardError


class Asked(Model):
    """Ranks that answer with the sum of each row's response, and note what they were given."""

    def _all(self, method: str, arguments: Any, timeout_s: float) -> list[Any]:
        self.given = [rows.lists("response_ids") for (rows,) in arguments]
        return [[np.asarray([sum(row)], np.float32) for row in rows] for rows in self.given]


@pytest.mark.parametrize(("tensor", "sequence"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_ranks_that_split_the_work_on_a_row_get_the_same_rows(tensor: int, sequence: int) -> None:
    trainer = TrainerConfig(num_ranks=4, tensor_parallel_size=tensor, sequence_parallel_size=sequence)
    ranks = Asked([(f"Trainer-{rank}", None) for rank in range(4)], RunConfig(trainer=trainer))
    responses = [[number + 1] * (number % 3 + 1) for number in range(9)]
    rows = Rows.from_lists({"prompt_ids": [[1]] * 9, "response_ids": responses}, group_ids=list(range(9)))
    sums = [float(values[0]) for values in ranks.logprobs(rows)]
    assert sums == [sum(response) for response in responses]
    peers = tensor * sequence
    for first in range(0, 4, peers):
        assert all(ranks.given[first] == ranks.given[first + more] for more in range(peers))
    assert sorted(row for first in range(0, 4, peers) for row in ranks.given[first]) == sorted(responses)


def loss(logprobs: Any, mask: Any, advantage: Any, behavior_logprobs: Any) -> Any:
    """A loss, by whose parameters columns are chosen."""


def test_rows_with_numbers_that_are_not_finite_are_left_out_of_an_update() -> None:
    columns: dict[str, list[Any]] = {
        "prompt_ids": [[1]] * 4,
        "advantage": [0.5, np.nan, 1.0, -0.5],
        "behavior_logprobs": [[-1.0, -2.0], [-1.0], [-1.0, np.nan], [-3.0]],
        "note": [np.nan] * 4,
    }
    rows = Rows.from_lists(columns, group_ids=[0, 0, 1, 1])
    kept = finite_rows(rows, inspect.signature(loss).parameters)
    assert kept.row_ids.tolist() == [0, 3]
    assert finite_rows(kept, ["advantage"]) is kept


def test_an_update_on_nothing_but_nan_says_where_it_comes_from() -> None:
    rows = Rows.from_lists({"prompt_ids": [[1]] * 2, "advantage": [np.nan] * 2})
    with pytest.raises(DataError, match=r"'advantage': none of 2 rows.*rows\.group_mean\(reward\)"):
        finite_rows(rows, ["advantage"])


class Rewards:
    """A fleet with one reward actor that gives these results."""

    def __init__(self, results: list[Any]) -> None:
        self.results = results

    def first_stage(self, role: str) -> str:
        return role

    def role(self, role: str, stage: str | None = None) -> list[tuple[str, Any]]:
        return [("Reward-0", self)]


def rewarded(monkeypatch: pytest.MonkeyPatch, results: list[Any], **config: Any) -> np.ndarray:
    reward = Reward(Rewards(results), RunConfig(reward=RewardConfig(**config)))  # type: ignore[arg-type]
    monkeypatch.setattr(session, "get_all", lambda calls, **_: [results])
    fake = SimpleNamespace(remote=lambda tasks, responses: None)
    monkeypatch.setattr(Rewards, "score", fake, raising=False)
    return reward(Rows.from_lists({"task": ["{}"] * len(results), "response_text": ["x"] * len(results)}))


def test_a_failed_reward_is_nan_and_costs_its_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    found = rewarded(monkeypatch, [1.0, RewardError("raised", "no judge"), None, 0.0])
    assert np.isnan(found).tolist() == [False, True, True, False]


def test_a_loop_whose_rewards_fail_ends_as_a_run_does(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = [RewardError("raised", "no judge")] * 30
    with pytest.raises(RewardFailure, match=r"30 of the last 30 rewards failed.*no judge"):
        rewarded(monkeypatch, [*failed])
    assert np.isnan(rewarded(monkeypatch, [*failed], max_error_share=1.0)).all()
