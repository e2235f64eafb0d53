"""The reward worker against a real store: rewards are written, failures dropped and counted, too many end the run."""

import asyncio
import json

import pytest

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.algorithms import GrpoConfig
from penstock.conf.errors import RewardFailure
from penstock.conf.reward import RewardConfig
from penstock.conf.run import RunConfig
from penstock.conf.trainer import TrainerConfig
from penstock.metering.meters import Meters
from penstock.store.client.store_client import StoreClient
from penstock.store.service.store import Store
from penstock.store.spec import StoreSpec
from penstock.workers.reward.reward_pool import RewardPool
from penstock.workers.reward.reward_registry import RewardSpec
from penstock.workers.reward.reward_result import RewardError
from penstock.workers.reward.reward_worker import RewardWorker
from penstock.workers.runtime.serving import ErrorShare
from tests.metering.measured import measured

GROUP = 4


def loss(logprobs, mask, totals, reward):
    raise NotImplementedError


def length_reward(response, answer):
    if response == "raise":
        raise RuntimeError("no judge")
    if response == "hang":
        import time

        time.sleep(600)
    return float(len(response))


def make_store(groups_per_step=2):
    flow = Dataflow().rollout(samples_per_prompt=GROUP).reward().train(loss=loss).check()
    config = RunConfig(algorithm=GrpoConfig(group_size=GROUP), trainer=TrainerConfig(groups_per_step=groups_per_step))
    return Store(StoreSpec.of(flow, config, strict=True))


async def roll(client, groups):
    """Put groups and play the rollout: `groups` has the texts of each."""
    task = json.dumps({"prompt": "p", "answer": "a"})
    await client.put_groups([{"prompt_ids": [1, 2], "task": task} for _ in groups])
    lease = await client.lease("rollout", len(groups), "rollout-0")
    texts = [text for group in groups for text in group]
    tokens = [[1] * max(1, len(text)) for text in texts]
    await client.write(
        lease,
        lease.rows.row_ids,
        {
            "response_ids": tokens,
            "response_text": texts,
            "finish_reason": ["stop"] * len(texts),
            "behavior_logprobs": [[-1.0] * len(t) for t in tokens],
            "token_versions": [[0] * len(t) for t in tokens],
        },
    )


def worker_for(**config):
    settings = RewardConfig(**{"timeout_s": 0.5, **config})
    return RewardWorker(RewardPool.of(settings, RewardSpec.of(length_reward)), settings)


@pytest.mark.real
def test_rewards_are_written_and_failed_samples_dropped_with_their_reason():
    async def run():
        store = make_store()
        client, worker = StoreClient(store), worker_for(max_error_share=0.9)
        await worker.start()
        running = asyncio.create_task(worker.run(client))
        await roll(client, [["a", "bb", "raise", "dddd"], ["a", "hang", "ccc", "d"]])
        lease = await client.lease_shared("train", 0, 0, 1)
        stats, store_stats, errors = worker.stats(), await client.stats(), (await client.describe())["last_drops"]
        await client.close("done")
        await asyncio.wait_for(running, 5)
        await worker.close()
        return lease.rows.values("reward").tolist(), stats, store_stats, errors, worker.last_error

    rewards, stats, store_stats, errors, last_error = asyncio.run(run())
    assert rewards == [1.0, 2.0, 4.0, 1.0, 3.0, 1.0]
    assert (stats["rewarded"], stats["failed"]) == (6, 2)
    assert stats["busy_s"] > 0.5
    assert store_stats["dropped/reward_error"] == 2
    assert any("RuntimeError: no judge" in error for error in errors)
    assert any("reward.timeout_s=0.5" in error for error in errors)
    assert last_error.startswith("timeout")


@pytest.mark.real
def test_a_run_whose_rewards_all_fail_ends_with_the_last_error():
    async def run():
        store = make_store(groups_per_step=8)
        client, worker = StoreClient(store), worker_for()
        await worker.start()
        running = asyncio.create_task(worker.run(client))
        await roll(client, [["raise"] * GROUP] * 8)
        try:
            await asyncio.wait_for(running, 10)
        finally:
            await worker.close()

    with pytest.raises(RewardFailure, match=r"RuntimeError: no judge.*reward\.max_error_share"):
        asyncio.run(run())


@pytest.mark.real
def test_a_group_whose_rewards_all_fail_gives_its_place_to_another():
    async def run():
        store = make_store(groups_per_step=2)
        client, worker = StoreClient(store), worker_for(max_error_share=1.0)
        await worker.start()
        running = asyncio.create_task(worker.run(client))
        await roll(client, [["raise"] * GROUP, ["a"] * GROUP])
        await asyncio.wait_for(roll(client, [["bb"] * GROUP]), 5)  # waits for the credit of the dropped group
        lease = await asyncio.wait_for(client.lease_shared("train", 0, 0, 1), 5)
        await client.close("done")
        await running
        await worker.close()
        return lease.rows.values("reward").tolist()

    assert asyncio.run(run()) == [1.0] * GROUP + [2.0] * GROUP


@pytest.mark.real
def test_evaluation_scores_go_past_the_store_and_the_counts():
    async def run():
        settings = RewardConfig()
        worker = RewardWorker(RewardPool.of(settings, RewardSpec.of(length_reward)), settings)
        await worker.start()
        scores = await worker.score([{"answer": 1}, '{"answer": 2}', "{}"], ["abc", "raise", "a"])
        await worker.close()
        return scores, worker.stats()

    scores, stats = asyncio.run(run())
    assert (scores[0], scores[2]) == (3.0, 1.0)
    assert isinstance(scores[1], RewardError)
    assert (stats["rewarded"], stats["failed"]) == (0, 0)


def counted(results, max_share=0.2, window=100):
    share = ErrorShare(max_share, window)
    for result in results:
        share.add(str(result) if isinstance(result, RewardError) else None)
    share.check()


BAD = RewardError("raised", "no judge")


def test_errors_up_to_the_share_are_borne():
    counted(([BAD] + [1.0] * 4) * 50)


def test_errors_above_the_share_of_the_window_end_the_run():
    with pytest.raises(RewardFailure, match=r"21 of the last 100 rewards failed.*0\.2 of 100.*raised: no judge"):
        counted([1.0] * 200 + [BAD] * 21)


def test_a_few_early_errors_do_not_end_a_run():
    counted([BAD] * 15 + [1.0])


def test_nothing_but_errors_ends_a_run_after_twenty():
    counted([BAD] * 19, max_share=0.9)
    with pytest.raises(RewardFailure):
        counted([BAD] * 20, max_share=0.9)


def test_a_share_of_one_bears_everything_and_a_share_of_zero_nothing():
    counted([BAD] * 500, max_share=1.0)
    with pytest.raises(RewardFailure):
        counted([1.0, BAD], max_share=0.0)


@pytest.mark.real
def test_rewards_and_errors_are_measured():
    async def body():
        meters = Meters()
        client = StoreClient(make_store())
        await roll(client, [["yes", "raise", "no", "hang"]])
        pool = RewardPool(RewardSpec.of(length_reward), timeout_s=0.5)
        worker = RewardWorker(pool, RewardConfig(max_error_share=1.0), meters=meters)
        await worker.start()
        running = asyncio.ensure_future(worker.run(client))
        while worker.num_scored < 4:
            await asyncio.sleep(0.01)
        await client.close("over")
        await running
        await worker.close()
        found = measured(meters)
        assert found.pop("reward_latency_seconds_sum") >= 0.5
        assert found == {
            "reward_samples_total": 2, "reward_errors_total raised": 1, "reward_errors_total timeout": 1,
            "reward_latency_seconds_count": 4,
        }  # fmt: skip

    asyncio.run(asyncio.wait_for(body(), 60))


def trl_reward(completions, completion_ids, trainer_state, log_metric, **columns):
    log_metric("tokens", sum(map(len, completion_ids)))
    return [
        None if text == "none" else len(ids) + trainer_state.global_step
        for text, ids in zip(completions, completion_ids, strict=True)
    ]


async def scored_by_trl(groups, **options):
    store = make_store(groups_per_step=len(groups))
    client, settings = StoreClient(store), RewardConfig(error_window=8)
    worker = RewardWorker(RewardPool.of(settings, RewardSpec.of(trl_reward)), settings, **options)
    await worker.start()
    running = asyncio.create_task(worker.run(client))
    try:
        await roll(client, groups)
        leasing = asyncio.create_task(client.lease_shared("train", 0, 0, 1))
        await asyncio.wait([leasing, running], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        lease = await leasing
        stats, store_stats = worker.stats(), await client.stats()
        await client.close("done")
        await running
        return lease.rows.values("reward").tolist(), stats, store_stats
    finally:
        await worker.close()


@pytest.mark.real
def test_a_sample_that_does_not_count_is_dropped_and_no_failure():
    rewards, stats, store_stats = asyncio.run(scored_by_trl([["a", "none", "bb", "ccc"]]))
    assert rewards == [1.0, 2.0, 3.0]
    assert store_stats["dropped/no_reward"] == 1
    assert (stats["failed"], stats["logged_sum/tokens"], stats["logged_count/tokens"]) == (0, 10.0, 1)


@pytest.mark.real
def test_a_run_in_which_no_sample_counts_ends():
    with pytest.raises(RewardFailure, match=r"the first \d+ rewards were all None"):
        asyncio.run(scored_by_trl([["none"] * GROUP] * 2))
