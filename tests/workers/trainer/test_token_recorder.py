"""The recorded values of each token are what the update's own metrics are made of, and noting it changes nothing."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.algorithms.graph.stage import ParameterAlias
from penstock.algorithms.losses import ppo_clip_loss
from penstock.algorithms.losses.policy import interpolated_policy_loss, policy_loss
from penstock.conf.trainer import LoraConfig
from penstock.store.client.store_client import StoreClient
from penstock.store.client.sync import SyncStoreClient
from penstock.store.data.rows import Rows
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.trainer.step_report import TokenValues
from penstock.workers.trainer.token_recorder import PLACES, TokenRecorder, with_places
from penstock.workers.trainer.trainer_worker import TrainerWorker
from penstock.workers.trainer.update.sequences import without_old_turns
from tests.workers.histories import turn
from tests.workers.trainer.test_worker import fill, flow, make_store
from tests.workers.trainer.update.test_sequences import TOKENS, rows_of

Make = Callable[..., PolicyTrainer]
MakeRows = Callable[..., Rows]


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> str:
    return str(getattr(request, "param", "fsdp"))


def recorded(trainer: PolicyTrainer, rows: Rows, loss: Any) -> tuple[TokenValues, dict[str, float]]:
    recorder = TokenRecorder()
    report = trainer.update(rows, loss, recorder)
    values = recorder.values(rows, rows.lengths("response_ids").tolist())
    assert values is not None
    return values, report.metrics


def differences(rows: Rows, values: TokenValues) -> np.ndarray:
    known = [one for one in values.trainer_logprobs if one is not None]
    assert len(known) == len(rows)
    return np.abs(np.concatenate(known) - np.concatenate(rows.arrays("behavior_logprobs")))


@pytest.mark.parametrize(
    ("engine", "options"), [("fsdp", {}), ("fsdp", {"lora": LoraConfig(rank=2)}), ("zero2", {})], indirect=["engine"]
)
def test_log_probabilities_are_those_of_mismatch_and_weights_keep_their_bits(
    make_trainer: Make,
    make_rows: MakeRows,
    weights_of: Callable[[PolicyTrainer], dict[str, Tensor]],
    options: dict[str, Any],
) -> None:
    rows = make_rows(9)
    plain, noting = (make_trainer(lr=1e-2, max_tokens_per_microbatch=60, **options) for _ in range(2))
    before = noting.logprobs(rows)
    values, metrics = recorded(noting, rows, ppo_clip_loss)
    assert plain.update(rows, ppo_clip_loss).metrics == metrics
    expected = weights_of(plain)
    assert all(torch.equal(found, expected[name]) for name, found in weights_of(noting).items())
    found = differences(rows, values)
    assert found.mean() == pytest.approx(metrics["mismatch/logprob_abs_mean"], rel=1e-5)
    assert found.max() == pytest.approx(metrics["mismatch/logprob_abs_max"], rel=1e-5)
    for one, other in zip(values.trainer_logprobs, before, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert all(mask.all() for mask in values.loss_mask)


def test_the_mask_is_what_a_correction_leaves(make_trainer: Make, make_rows: MakeRows) -> None:
    rows = make_rows(8)
    masked = partial(policy_loss, correction="masked", correction_options={"low": 0.95, "high": 1.05})
    values, metrics = recorded(make_trainer(max_tokens_per_microbatch=60), rows, masked)
    share = 1 - np.concatenate(values.loss_mask).mean()
    assert 0 < share < 1
    assert share == pytest.approx(metrics["actor/correction_masked_fraction"], rel=1e-6)
    ratio = [
        trainer - engine
        for trainer, engine in zip(values.trainer_logprobs, rows.arrays("behavior_logprobs"), strict=True)
    ]
    kept = [(np.exp(one) >= 0.95) & (np.exp(one) <= 1.05) for one in ratio]
    assert all((one == other).all() for one, other in zip(values.loss_mask, kept, strict=True))


def test_a_row_without_an_advantage_moves_nothing(make_trainer: Make, make_rows: MakeRows) -> None:
    rows = make_rows(4).with_column("advantage", [0.0, 1.0, -1.0, 0.0])
    values, _ = recorded(make_trainer(), rows, ppo_clip_loss)
    assert [bool(mask.any()) for mask in values.loss_mask] == [False, True, True, False]


def test_later_minibatches_know_earlier_log_probabilities_if_the_loss_asks(
    make_trainer: Make, make_rows: MakeRows
) -> None:
    rows = make_rows(8)
    trainer = make_trainer(lr=1e-1, num_minibatches=2)
    before = trainer.logprobs(rows)
    values, _ = recorded(trainer, rows, ppo_clip_loss)
    for one, other in zip(values.trainer_logprobs, before, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    aged = rows.with_column("staleness", [np.zeros(length) for length in rows.lengths("response_ids")])
    values, _ = recorded(make_trainer(lr=1e-1, num_minibatches=2), aged, interpolated_policy_loss)
    assert [one is not None for one in values.trainer_logprobs] == [True] * 4 + [False] * 4
    assert len(values.loss_mask) == 8


def test_tokens_of_several_segments_come_in_the_order_they_were_sampled_in(make_trainer: Make) -> None:
    rows = rows_of(
        [turn(0, [1, 2], [3]), turn(1, [1, 2, 3, 4], [5, 6]), turn(2, [9], [8, 7, 6])], [turn(0, [4], [5, 5])]
    ).with_column("advantage", [1.0, -1.0])
    values, metrics = recorded(make_trainer(), rows, ppo_clip_loss)
    assert [len(mask) for mask in values.loss_mask] == [6, 2]
    assert differences(rows, values).mean() == pytest.approx(metrics["mismatch/logprob_abs_mean"], rel=1e-5)


def test_credit_of_tokens_is_kept_where_they_were_sampled(make_trainer: Make) -> None:
    rows = rows_of([turn(0, [1, 2], [3]), turn(1, [1, 2, 3, 4], [5, 6], version=2)])
    cut = without_old_turns(with_places(rows), 1, {*TOKENS, PLACES}).with_column("token_advantage", [[0.5, -1.0]])
    recorder = TokenRecorder()
    make_trainer().update(cut, ParameterAlias(policy_loss, "advantage", "token_advantage"), recorder)
    values = recorder.values(cut, [3])
    assert values is not None
    np.testing.assert_array_equal(values.advantage[0], [np.nan, 0.5, -1.0])


def test_tokens_of_old_turns_have_a_place_and_no_value() -> None:
    rows = rows_of([turn(0, [1, 2], [3]), turn(1, [1, 2, 3, 4], [5, 6], version=2)])
    cut = without_old_turns(with_places(rows), 1, {*TOKENS, PLACES})
    assert cut.lists(PLACES) == [[1, 2]]


def test_a_worker_has_them_for_the_last_step_if_it_was_asked_to_note_them(make_trainer: Make) -> None:
    """The first token of row 3 is too old: it is cut, and keeps its place."""

    def young(rows: Rows, version: int) -> Rows:
        keep = [slice(1 if row == 3 else 0, None) for row in range(4)]
        by_token = {"response_ids", "behavior_logprobs", "reference_logprobs", "token_versions", PLACES}
        for name in by_token & set(rows.names):
            rows = rows.with_column(name, [one[kept] for one, kept in zip(rows.arrays(name), keep, strict=True)])
        return rows

    async def run(records: bool) -> list[TokenValues | None]:
        store = make_store()
        client = StoreClient(store)
        await fill(client)
        lease = await client.lease("reference", 4, "reference")
        assert lease
        await client.write(lease, lease.rows.row_ids, {"reference_logprobs": [[-4.0] * (row + 1) for row in range(4)]})
        worker = TrainerWorker(make_trainer(), flow().stage("train").policies, without_old=young)
        worker.attach(SyncStoreClient(store))
        await asyncio.to_thread(worker.step, 1, records)
        return [worker.token_values(step) for step in (0, 1, 2)]

    assert asyncio.run(run(records=False)) == [None] * 3
    before, values, after = asyncio.run(run(records=True))
    assert (before, after) == (None, None)
    assert values is not None
    assert values.row_ids.tolist() == [0, 1, 2, 3]
    assert [len(one) for one in values.loss_mask] == [1, 2, 3, 4]
    last = values.trainer_logprobs[3]
    assert last is not None
    assert np.isnan(last).tolist() == [True, False, False, False]
    assert values.loss_mask[3].tolist() == [False, True, True, True]
