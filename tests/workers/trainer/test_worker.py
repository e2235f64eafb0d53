import asyncio
import json
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.algorithms.graph.stage import TrainedPolicy
from penstock.algorithms.losses import ppo_clip_loss, sft_loss
from penstock.conf.errors import PartnerGone
from penstock.conf.run import RunConfig
from penstock.conf.trainer import LoraConfig, PolicyConfig, TrainerConfig
from penstock.store.client.store_client import StoreClient
from penstock.store.client.sync import SyncStoreClient
from penstock.store.data.rows import Rows
from penstock.store.service.store import Store
from penstock.store.spec import StoreSpec
from penstock.workers.protocols import UpdateReport
from penstock.workers.runtime.serving import COMPUTING, UPDATING, WAITING, Phases
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.trainer.row_hashes import hash_of_norms
from penstock.workers.trainer.step_report import StepReport, TrainedRows
from penstock.workers.trainer.trainer_worker import Alone, ScorerWorker, TrainerWorker
from tests.workers.trainer.conftest import as_reference, assert_same, whole_state
from tests.workers.trainer.test_parallel import OneBatch

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


TWO = {
    "lora": LoraConfig(rank=4, publish="adapter"),
    "policies": {"solver": PolicyConfig(), "proposer": PolicyConfig(optimizer={"lr": 3e-2})},
}
POLICIES = (TrainedPolicy("solver", ppo_clip_loss), TrainedPolicy("proposer", sft_loss))
SPOKE = ["solver", "proposer", "proposer", "solver", "solver", "proposer"]


def test_each_policy_learns_from_its_own_rows(make_trainer: Make, make_rows: Callable[..., Rows]) -> None:
    rows = make_rows(6).with_column("policy", SPOKE)
    rows = rows.with_column("token_versions", [np.zeros(length, np.int32) for length in rows.lengths("response_ids")])
    trainer, alone = (make_trainer(lr=1e-2, **TWO) for _ in range(2))
    expected = {}
    for policy in POLICIES:
        own = rows.select([at for at, name in enumerate(SPOKE) if name == policy.name])
        with alone.using(policy.name):
            before = alone.logprobs(own)
            expected[policy.name] = (
                alone.update(own, policy.loss, version=0),
                dict(zip(own.row_ids, before, strict=True)),
            )
    worker = TrainerWorker(trainer, POLICIES)
    worker.attach(OneBatch(rows))  # type: ignore[arg-type]
    worker.probe_temperature = 1.0
    report = worker.step(1, records_tokens=True)
    assert report is not None
    assert_same(whole_state(trainer), whole_state(alone))
    metrics = {name: one.metrics for name, (one, _) in expected.items()}
    assert report.metrics["solver/pg_loss"] == metrics["solver"]["actor/pg_loss"]
    assert report.metrics["proposer/loss"] == metrics["proposer"]["actor/loss"]
    assert (report.metrics["solver/lr"], report.metrics["proposer/lr"]) == (1e-2, 3e-2)
    largest = max(one["mismatch/logprob_abs_max"] for one in metrics.values())
    assert report.metrics["mismatch/logprob_abs_max"] == largest
    assert report.metrics["solver/rows_left_out"] == report.metrics["proposer/rows_left_out"] == 0
    assert not any(name.startswith("actor/") for name in report.metrics)
    norms = [norm for one, _ in expected.values() for norm in one.norms]
    assert report.hashes["gradients"] == hash_of_norms([*norms, 0.0])
    assert report.row_ids.tolist() == rows.row_ids.tolist()
    assert [row.policy for row in report.probe] == ["solver", "proposer"]
    values = worker.token_values(1)
    assert values is not None
    assert sorted(values.row_ids.tolist()) == rows.row_ids.tolist()
    known = {row: one for _, before in expected.values() for row, one in before.items()}
    for row, one, mask in zip(values.row_ids.tolist(), values.trainer_logprobs, values.loss_mask, strict=True):
        assert mask.all()
        np.testing.assert_allclose(one, known[row], atol=1e-5)


class Noted:
    """A trainer that notes the rows of each update, by the policy in use."""

    def __init__(self) -> None:
        self.policy, self.updates = "", list[tuple[str, list[int]]]()

    @contextmanager
    def using(self, policy: str) -> Iterator["Noted"]:
        self.policy = policy
        yield self

    def update(self, rows: Rows, loss: Any, recorder: Any = None, version: int | None = None) -> UpdateReport:
        self.updates.append((self.policy, rows.row_ids.tolist()))
        return UpdateReport({"actor/loss": 1.0}, seconds={"update": 2.0}, norms=(1.0,))


@dataclass(frozen=True)
class BesideAnother(Alone):
    """A rank whose only peer has so many rows of each policy."""

    counts: tuple[int, ...] = ()

    def gather_ranks(self, value: Any) -> list[Any]:
        return [value, [*self.counts]] if isinstance(value, list) else [value]


def test_a_policy_learns_in_steps_that_its_number_divides(make_rows: Callable[..., Rows]) -> None:
    trainer, rows = Noted(), make_rows(6).with_column("policy", SPOKE)
    worker = TrainerWorker(trainer, POLICIES, BesideAnother(counts=(1, 2)))  # type: ignore[arg-type]
    worker.attach(OneBatch(rows))  # type: ignore[arg-type]
    worker.every = {"proposer": 2}
    first, second = worker.step(1), worker.step(2)
    assert trainer.updates == [("solver", [0, 3, 4]), ("solver", [0, 3, 4]), ("proposer", [1, 2, 5])]
    assert first is not None
    assert second is not None
    assert first.metrics == {"solver/loss": 1.0, "solver/rows_left_out": 0.0, "proposer/rows_left_out": 5.0}
    assert second.metrics["proposer/rows_left_out"] == 0.0
    assert (first.seconds["update"], second.seconds["update"]) == (2.0, 4.0)
    assert second.hashes["gradients"] == hash_of_norms([1.0, 1.0, 0.0])


@pytest.mark.parametrize(("of_peer", "updated"), [(0, ["solver"]), (2, ["solver", "proposer"])])
def test_a_policy_is_updated_where_any_rank_has_rows_of_it(
    make_rows: Callable[..., Rows], of_peer: int, updated: list[str]
) -> None:
    trainer = Noted()
    worker = TrainerWorker(trainer, POLICIES, BesideAnother(counts=(0, of_peer)))  # type: ignore[arg-type]
    worker.attach(OneBatch(make_rows(3).with_column("policy", ["solver"] * 3)))  # type: ignore[arg-type]
    worker.step(1)
    assert trainer.updates == [(name, [0, 1, 2] if name == "solver" else []) for name in updated]


def test_no_policy_is_updated_without_rows(make_trainer: Make, make_rows: Callable[..., Rows]) -> None:
    trainer = make_trainer(lr=1e-2, **TWO)
    before = whole_state(trainer)
    worker = TrainerWorker(trainer, POLICIES)
    worker.attach(OneBatch(make_rows(2).with_column("policy", ["solver"] * 2).select([])))  # type: ignore[arg-type]
    report = worker.step(1)
    assert report is not None
    assert report.metrics == {"solver/rows_left_out": 0.0, "proposer/rows_left_out": 0.0}
    assert_same(whole_state(trainer), before)


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
    assert [len(value) for value in vars(trained).values()] == [0] * 9
