"""Rows that engines score again are the first of a step, with the trainer's log-probabilities before the update."""

from collections.abc import Callable

import numpy as np

from penstock.algorithms.losses import ppo_clip_loss
from penstock.store.data.rows import Rows
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.trainer.probe import SHARE, ProbeRecorder
from penstock.workers.trainer.token_recorder import TokenRecorder

Make = Callable[..., PolicyTrainer]
MakeRows = Callable[..., Rows]


def test_the_first_rows_come_with_what_the_trainer_had_before_the_update(
    make_trainer: Make, make_rows: MakeRows
) -> None:
    rows, trainer = make_rows(200), make_trainer(lr=1e-1, num_minibatches=2)
    before = trainer.logprobs(rows)
    recorder = ProbeRecorder(rows)
    trainer.update(rows, ppo_clip_loss, recorder)
    found = recorder.rows(rows)
    sequences = {
        tuple(np.concatenate([prompt, response]).tolist()): row
        for row, (prompt, response) in enumerate(
            zip(rows.arrays("prompt_ids"), rows.arrays("response_ids"), strict=True)
        )
    }
    total = rows.lengths("prompt_ids").sum() + rows.lengths("response_ids").sum()
    assert 0 < sum(len(one.token_ids) for one in found) <= SHARE * total
    for one in found:
        np.testing.assert_allclose(one.logprobs, before[sequences[tuple(one.token_ids.tolist())]], atol=1e-5)


def test_a_step_of_few_tokens_has_one_row(make_trainer: Make, make_rows: MakeRows) -> None:
    rows = make_rows(4)
    tokens = TokenRecorder()
    probe = ProbeRecorder(rows, tokens)
    make_trainer().update(rows, ppo_clip_loss, probe)
    assert len(probe.rows(rows)) == 1
    assert tokens.values(rows, rows.lengths("response_ids").tolist()) is not None


def test_a_row_says_the_temperature_that_its_log_probabilities_are_for(make_trainer: Make, make_rows: MakeRows) -> None:
    rows, trainer = make_rows(4), make_trainer()
    recorder = ProbeRecorder(rows, temperature=0.7)
    trainer.update(rows, ppo_clip_loss, recorder)
    assert [one.temperature for one in recorder.rows(rows)] == [0.7]


def test_of_a_trajectory_the_first_turn_at_one_temperature_is_scored(make_trainer: Make) -> None:
    columns = {
        "context_ids": [[5, 6, 7, 20], [8, 9]],
        "response_ids": [[10, 11, 12], [13, 14]],
        "spans": [[0, 3, 2, 0, 1, 1], [0, 2, 2]],
        "behavior_logprobs": [[-4.0] * 3, [-4.0] * 2],
        "advantage": [1.0, -1.0],
    }
    trainer = make_trainer()
    scored = [[5, 6, 7, 10, 11]]
    for temperatures, expected in (
        ([1.0, 1.0, 0.5], scored), ([0.5, 0.5, 1.0], scored), ([0.5, 1.0, 1.0], []), ([0.0, 0.0, 1.0], []),
    ):  # fmt: skip
        rows = Rows.from_lists({**columns, "token_temperatures": [temperatures, [1.0, 1.0]]}, group_ids=[0, 0])
        recorder = ProbeRecorder(rows)
        trainer.update(rows, ppo_clip_loss, recorder)
        found = recorder.rows(rows)
        assert [one.token_ids.tolist() for one in found] == expected
        assert all(len(one.logprobs) == 2 and one.temperature == temperatures[0] for one in found)
