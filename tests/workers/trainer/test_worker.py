import asyncio
import json
import pickle
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.algorithms.losses import ppo_clip_loss
from penstock.conf.errors import PartnerGone
from penstock.conf.run import RunConfig
from penstock.conf.trainer import TrainerConfig
from penstock.store.client.store_client import StoreClient
from penstock.store.client.sync import SyncStoreClient
from penstock.store.data.rows import Rows
from penstock.store.service.store import Store
from penstock.store.spec import StoreSpec
from penstock.workers.protocols import UpdateReport
from penstock.workers.runtime.serving import COMPUTING, UPDATING, WAITING, Phases
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.trainer.step_report import StepReport, TrainedRows
from penstock.workers.trainer.trainer_worker import ScorerWorker, TrainerWorker
from tests.workers.trainer.conftest import as_reference

Make = Callable[..., PolicyTrainer]


def advantage_of(reward: Any) -> Any:
    return reward - reward.mean()


def flow() -> Dataflow:
    graph = Dataflow().rollout("policy", samples_per_prompt=2).reward()
    graph.logprobs("reference")
    graph.compute(advantage_of, reads=["reward"], writes=["advantage"])
    return graph.train("policy", loss=partial(ppo_clip_loss, kl_coef=0.1)).check()


def make_store() -> Store:
    config = RunConfig(max_staleness=1, trainer=TrainerConfig(groups_per_step=2))
    return Store(StoreSpec.of(flow(), config, strict=True))


async def fill(client: StoreClient) -> None:
    """Two groups of two, as rollout, reward and advantage leave them; the last group was cut short by its length."""
    await client.put_groups([{"prompt_ids": [5, 6, group + 7], "task": json.dumps({})} for group in range(2)])
    lease = await client.lease("rollout", 2, "rollout")
    assert lease
    ids = lease.rows.row_ids
    columns = {
        "response_ids": [[10 + row] * (row + 1) for row in range(4)],
        "response_text": ["x"] * 4,
        "finish_reason": ["stop", "stop", "length", "length"],
        "behavior_logprobs": [[-4.0] * (row + 1) for row in range(4)],
        "token_versions": [[0] * (row + 1) for row in range(4)],
    }
    await client.write(lease, ids, columns)
    for stage, column, values in (
        ("reward", "reward", [0.0, 1.0, 1.0, 2.0]),
        ("advantage_of", "advantage", [-0.5, 0.5, -0.5, 0.5]),
    ):
        lease = await client.lease(stage, 4, stage)
        assert lease
        await client.write(lease, lease.rows.row_ids, {column: values})


def test_reference_and_trainer_take_a_batch_through_the_store(make_trainer: Make) -> None:
    policy, reference = make_trainer(lr=1e-2), make_trainer(trainable=False)

    async def run() -> tuple[StepReport | None, StepReport | None, dict[str, float], Rows]:
        store = make_store()
        client = StoreClient(store)
        await fill(client)
        helper = ScorerWorker(as_reference(reference.logprobs), "reference")
        trainer = TrainerWorker(policy, flow().stage("train").policies)
        trainer.attach(SyncStoreClient(store))
        serving = asyncio.create_task(asyncio.to_thread(helper.run, SyncStoreClient(store)))
        report = await asyncio.to_thread(trainer.step, 1)
        assert report is not None
        assert report.share is not None
        await client.complete_shared(report.share)  # as the controller does
        waiting = asyncio.create_task(asyncio.to_thread(trainer.step, 2))
        await asyncio.sleep(0.05)
        batch = await client.last_batch(["reference_logprobs", "response_ids"])
        await client.close("done")
        await serving
        return report, await waiting, helper.stats(), batch

    report, after_close, stats, batch = asyncio.run(run())
    assert after_close is None
    assert report is not None
    assert (report.step, report.version, stats["rows"]) == (1, 0, 4)
    assert report.metrics["actor/kl"] == pytest.approx(0.0, abs=1e-5)
    assert report.rows.reward_N.tolist() == [0.0, 1.0, 1.0, 2.0]
    assert report.rows.response_tokens_N.tolist() == [1, 2, 3, 4]
    assert report.rows.prompt_tokens_N.tolist() == [3] * 4
    assert report.rows.clipped_N.tolist() == [False, False, True, True]
    assert report.wait_s >= 0 < report.train_s
    assert [len(values) for values in batch.arrays("reference_logprobs")] == [1, 2, 3, 4]
    assert pickle.loads(pickle.dumps(report)).metrics == report.metrics


def test_a_trainer_and_a_scorer_go_on_with_another_store(make_trainer: Make) -> None:
    """What waits at the one before ends at once: a step by `PartnerGone`, a scorer's `run` by returning."""

    async def run() -> tuple[StepReport | None, dict[str, float]]:
        first, second = make_store(), make_store()
        await StoreClient(first).spec()
        client = StoreClient(second)
        await fill(client)
        helper = ScorerWorker(as_reference(make_trainer(trainable=False).logprobs), "reference")
        trainer = TrainerWorker(make_trainer(lr=1e-2), flow().stage("train").policies)
        trainer.attach(SyncStoreClient(first))
        serving = asyncio.create_task(asyncio.to_thread(helper.run, SyncStoreClient(first)))
        waiting = asyncio.create_task(asyncio.to_thread(trainer.step, 1))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(trainer.attach, SyncStoreClient(second))
        serving_next = asyncio.create_task(asyncio.to_thread(helper.run, SyncStoreClient(second)))
        with pytest.raises(PartnerGone):
            await waiting
        await serving
        report = await asyncio.to_thread(trainer.step, 1)
        await client.close("done")
        await serving_next
        return report, helper.stats()

    report, stats = asyncio.run(asyncio.wait_for(run(), 60))
    assert report is not None
    assert report.rows.reward_N.tolist() == [0.0, 1.0, 1.0, 2.0]
    assert stats["rows"] == 4


def test_what_a_trainer_and_a_scorer_are_at_is_told_from_another_thread() -> None:
    """Both wait for a batch, then compute on it until they are let go."""
    computing, go_on = threading.Semaphore(0), threading.Semaphore(0)

    class Slow:
        def update(self, rows: Rows, loss: Any, recorder: Any = None, version: int | None = None) -> UpdateReport:
            self.logprobs(rows)
            return UpdateReport()

        def logprobs(self, rows: Rows) -> list[np.ndarray]:
            computing.release()
            assert go_on.acquire(timeout=20)
            return [np.zeros(length, np.float32) for length in rows.lengths("response_ids")]

    async def run() -> list[tuple[Any, int]]:
        store, phases, of_scorer = make_store(), Phases(), Phases()
        client, seen = StoreClient(store), []
        await store.spec()  # from here on it lives in this loop
        scorer = ScorerWorker(as_reference(Slow().logprobs), "reference", phases=of_scorer)
        trainer = TrainerWorker(Slow(), flow().stage("train").policies, phases=phases)  # type: ignore[arg-type]
        trainer.attach(SyncStoreClient(store))
        serving = asyncio.create_task(asyncio.to_thread(scorer.run, SyncStoreClient(store)))
        stepping = asyncio.create_task(asyncio.to_thread(trainer.step, 1))
        while phases.progress().phase != WAITING:
            await asyncio.sleep(0.001)
        await fill(client)
        for phases_of, worker in ((of_scorer, scorer), (phases, trainer)):
            await asyncio.to_thread(computing.acquire)
            seen.append((phases_of.progress().phase, worker.num_in_flight))
            assert trainer.tokens_in_flight == (1 + 2 + 3 + 4 if worker is trainer else 0)
            go_on.release()
        await stepping
        await client.close("done")
        await serving
        assert trainer.tokens_in_flight == 0
        return [*seen, (trainer.num_rows, trainer.num_in_flight), (scorer.num_computed, scorer.num_in_flight)]

    assert asyncio.run(asyncio.wait_for(run(), 60)) == [(COMPUTING, 4), (UPDATING, 4), (4, 0), (4, 0)]


@pytest.mark.parametrize("answer", [None, "no room"])
def test_the_state_is_copied_after_the_update_and_before_the_report_of_it(
    make_trainer: Make, answer: str | None
) -> None:
    """With that report the round can end."""
    policy, reference, noted = make_trainer(lr=1e-2), make_trainer(trainable=False), []

    def checkpoint(step: int) -> str | None:
        noted.append(f"copied {step} after update {policy.num_updates}")
        return answer

    async def run() -> StepReport | None:
        store = make_store()
        client = StoreClient(store)
        await fill(client)
        helper = ScorerWorker(as_reference(reference.logprobs), "reference")
        trainer = TrainerWorker(policy, flow().stage("train").policies, checkpoint=checkpoint)
        trainer.attach(SyncStoreClient(store))
        serving = asyncio.create_task(asyncio.to_thread(helper.run, SyncStoreClient(store)))
        report = await asyncio.to_thread(trainer.step, 1)
        assert await client.settle("train") == 0  # nobody has said that it is trained
        await client.close("done")
        await serving
        return report

    report = asyncio.run(run())
    assert report is not None
    assert noted == ["copied 1 after update 1"]
    assert report.no_memory_checkpoint == answer
    assert 0 < report.seconds["keep"] < report.train_s


def test_staleness_is_counted_from_the_version_before_the_update() -> None:
    rows = Rows.from_lists(
        {"prompt_ids": [[1], [1]], "response_ids": [[1, 2, 3], [4]], "token_versions": [[2, 3, 4], [4]]}
    )
    trained = TrainedRows.of(rows, version=5)
    assert trained.staleness_max_N.tolist() == [3, 1]
    assert trained.staleness_sum_N.tolist() == [6.0, 1.0]


def test_rows_without_reward_or_versions_are_no_error() -> None:
    trained = TrainedRows.of(Rows.from_lists({"prompt_ids": [[1]], "response_ids": [[1, 2]]}), version=5)
    assert np.isnan(trained.reward_N).all()
    assert trained.staleness_max_N.tolist() == [0]
    assert trained.clipped_N.tolist() == [False]


def test_a_rank_without_rows_reports_none() -> None:
    empty = Rows.from_lists({"prompt_ids": [[1]], "response_ids": [[1]], "reward": [1.0]}).select([])
    trained = TrainedRows.of(empty, version=1)
    assert [len(value) for value in vars(trained).values()] == [0] * 8
