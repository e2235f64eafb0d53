"""Compute stages: functions get whole units as tensors, and what they return is checked before it is written."""

import asyncio
import threading

import numpy as np
import pytest
import torch

from penstock.algorithms.builtin.policy_gradient import policy_gradient
from penstock.algorithms.builtin.ppo import ppo
from penstock.algorithms.catalogue import in_environment
from penstock.algorithms.graph.columns import STANDARD_COLUMNS, Column
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.algorithms import GrpoConfig, PolicyGradientConfig, PpoConfig
from penstock.conf.errors import DataflowError
from penstock.conf.run import RunConfig
from penstock.conf.trainer import TrainerConfig
from penstock.store.client.store_client import StoreClient
from penstock.store.data.rows import Rows
from penstock.store.service.store import Store
from penstock.store.spec import StoreSpec
from penstock.workers.agents.attempts import AttemptColumns
from penstock.workers.agents.trajectory import Trajectory
from penstock.workers.compute import ComputeWorker
from penstock.workers.runtime.serving import COMPUTING, Phases
from tests.workers.histories import turn

ROWS = {
    "reward": [1.0, 0.0, 3.0, 5.0],
    "response_ids": [[1, 2], [3], [4, 5, 6], [7]],
    "behavior_logprobs": [[-1.0, -2.0], [-3.0], [-4.0, -5.0, -6.0], [-7.0]],
    "response_text": ["a", "b", "c", "d"],
}


def apply(function, *, reads=("reward",), writes=("advantage",), per="group", group_ids=(0, 0, 1, 1)):
    flow = Dataflow().compute(function, reads=list(reads), writes=list(writes), per=per)
    columns = {**STANDARD_COLUMNS, **flow.columns}
    return ComputeWorker(flow.stages[0], columns).apply(Rows.from_lists(ROWS, group_ids=list(group_ids)))


def centred(reward):
    assert reward.dtype == torch.float32
    return reward - reward.mean()


def test_a_group_comes_as_one_tensor():
    assert apply(centred) == {"advantage": [0.5, -0.5, -1.0, 1.0]}


def test_groups_may_be_of_unequal_size():
    assert apply(centred, group_ids=(0, 0, 0, 1))["advantage"] == pytest.approx([-1 / 3, -4 / 3, 5 / 3, 0.0])


def test_per_sample_the_unit_is_one_row():
    assert apply(lambda reward: reward * len(reward), per="sample") == {"advantage": [1.0, 0.0, 3.0, 5.0]}


def test_token_columns_come_as_lists_and_go_as_lists():
    def scaled(reward, behavior_logprobs):
        return [r * x for r, x in zip(reward, behavior_logprobs, strict=True)]

    result = apply(scaled, reads=("reward", "behavior_logprobs"), writes=("reference_logprobs",))["reference_logprobs"]
    assert [values.tolist() for values in result] == [[-1.0, -2.0], [0.0], [-12.0, -15.0, -18.0], [-35.0]]
    assert all(values.dtype == np.float32 for values in result)


def test_strings_come_as_strings_and_several_columns_go_as_a_tuple():
    def both(reward, response_text):
        return [text.upper() for text in response_text], reward.int()

    writes = (Column("shout", "string"), Column("whole", "int32"))
    assert apply(both, reads=("reward", "response_text"), writes=writes) == {
        "shout": ["A", "B", "C", "D"],
        "whole": [1, 0, 3, 5],
    }


def short(reward):
    return reward[:1]


def scalar(reward):
    return reward.mean()


def pair(reward):
    return reward, reward


def nothing(reward):
    return None


def infinite(reward):
    return reward / 0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            short,
            r"stage 'short': short returned a tensor of shape \[1\] for 'advantage'; a tensor of shape \[2\] is due",
        ),
        (scalar, r"returned a tensor of shape \[\] for 'advantage'"),
        (pair, r"returned a tuple of 2; 1 value\(s\) in a tuple \(advantage\) are due"),
        (nothing, "returned NoneType None for 'advantage'"),
        (infinite, r"not finite.*nan_ok"),
    ],
)
def test_a_wrong_result_names_the_function_what_was_due_and_what_came(function, message):
    with pytest.raises(DataflowError, match=message):
        apply(function)


def test_token_results_must_have_as_many_tokens_as_the_row():
    def shorter(behavior_logprobs):
        return [values[:1] for values in behavior_logprobs]

    with pytest.raises(
        DataflowError, match=r"returned a tensor of shape \[1\] for 'reference_logprobs'; for row 0 .* \[2\]"
    ):
        apply(shorter, reads=("behavior_logprobs",), writes=("reference_logprobs",))


def test_floats_do_not_pass_for_integers():
    with pytest.raises(DataflowError, match="float32 for 'count', which is int64"):
        apply(centred, writes=(Column("count", "int64"),))


def test_nan_passes_where_the_column_allows_it():
    assert apply(infinite, writes=(Column("ratio", "float32", nan_ok=True),))["ratio"][0] == float("inf")


def loss(logprobs, mask, totals, advantage):
    raise NotImplementedError


def test_run_serves_the_store_until_it_closes():
    async def run():
        flow = Dataflow().rollout(samples_per_prompt=2).reward()
        flow.compute(centred, reads=["reward"], writes=["advantage"]).train(loss=loss).check()
        config = RunConfig(algorithm=GrpoConfig(group_size=2), trainer=TrainerConfig(groups_per_step=2))
        store = Store(StoreSpec.of(flow, config, strict=True))
        client, worker = StoreClient(store), ComputeWorker(flow.stage("centred"), flow.columns)
        running = asyncio.create_task(worker.run(client))
        await client.put_groups([{"prompt_ids": [1], "task": "{}"}] * 2)
        rolled = await client.lease("rollout", 2, "rollout-0")
        values = {"response_ids": [[1]] * 4, "response_text": ["x"] * 4, "finish_reason": ["stop"] * 4}
        values |= {"behavior_logprobs": [[-1.0]] * 4, "token_versions": [[0]] * 4}
        await client.write(rolled, rolled.rows.row_ids, values)
        judged = await client.lease("reward", 4, "reward-0")
        await client.write(judged, judged.rows.row_ids, {"reward": [1.0, 0.0, 3.0, 5.0]})
        lease = await client.lease_shared("train", 0, 0, 1)
        await client.close("done")
        await asyncio.wait_for(running, 2)
        return lease.rows.values("advantage").tolist(), worker.stats()

    advantages, stats = asyncio.run(run())
    assert advantages == [0.5, -0.5, -1.0, 1.0]
    assert stats["units"] == 2


def played_twice(flow, algorithm, stage=None):
    """The step's rows of two attempts that read the same; the first has a second turn, and wins. `stage`: of a worker
    beside the store."""
    won = [turn(0, [1, 2], [3, 4]), turn(1, [1, 2, 3, 4, 5], [6])]
    attempts = [Trajectory(won, reward=1.0), Trajectory([turn(0, [1, 2], [7])])]

    async def run():
        config = RunConfig(algorithm=algorithm, trainer=TrainerConfig(groups_per_step=1))
        client = StoreClient(Store(StoreSpec.of(flow, config, strict=True)))
        running = asyncio.create_task(ComputeWorker(flow.stage(stage), flow.columns).run(client)) if stage else None
        await client.put_groups([{"task": "{}"}])
        rolled = await client.lease("rollout", 1, "rollout-0")
        names = [column.name for column in flow.stage("rollout").writes]
        await client.write(rolled, rolled.rows.row_ids, AttemptColumns(names).of(attempts))
        lease = await client.lease_shared("train", 0, 0, 1)
        await client.close("done")
        if running:
            await asyncio.wait_for(running, 10)
        return lease.rows

    return asyncio.run(run())


def test_states_of_turns_go_through_the_store_to_the_advantage_that_reads_them():
    algorithm = PolicyGradientConfig(advantage="gigpo", group_size=2)
    algorithm.advantage_options = {"gamma": 0.5, "normalize_std": False}
    rows = played_twice(in_environment(policy_gradient(algorithm)).check(), algorithm, stage="advantage")
    # attempts ±0.5; both first turns read the same: 0.5 and 0, less their mean; the second turn is alone
    assert rows.lists("token_advantage") == [[0.75, 0.75, 0.5], [-0.75]]


def test_the_trainers_take_turns_for_steps_of_the_rows_that_the_store_has():
    algorithm = PpoConfig(advantage="turn_gae", group_size=2, lam=1.0)
    flow = in_environment(ppo(algorithm)).check()
    rows = played_twice(flow, algorithm).with_column("old_values", [[0.5, 9.0, 0.75], [0.25]])
    found = ComputeWorker(flow.stage("ppo_advantages"), {**STANDARD_COLUMNS, **flow.columns}).apply(rows)
    assert [values.tolist() for values in found["returns"]] == [[1.0, 1.0, 1.0], [0.0]]
    assert np.concatenate(found["token_advantage"]).argsort(kind="stable").tolist() == [3, 2, 0, 1]  # -0.25, 0.25, 0.5


def test_the_event_loop_answers_while_the_function_runs_in_a_thread_of_its_own():
    threads, begun, go_on = set(), threading.Event(), threading.Event()

    def slow(reward):
        threads.add(threading.get_ident())
        begun.set()
        assert go_on.wait(10)
        return reward

    async def run():
        flow = Dataflow().rollout(samples_per_prompt=2).reward()
        flow.compute(slow, reads=["reward"], writes=["advantage"]).train(loss=lambda logprobs, advantage: None)
        client = StoreClient(Store(StoreSpec.of(flow.check(), RunConfig(trainer=TrainerConfig(groups_per_step=2)))))
        await client.put_groups([{"prompt_ids": [1], "task": "{}"}] * 2)
        lease = await client.lease("rollout", 2, "engine")
        tokens = [np.ones(1, np.int32)] * 4
        await client.write(lease, range(4), {
            "response_ids": tokens, "response_text": ["x"] * 4, "finish_reason": ["stop"] * 4,
            "behavior_logprobs": [np.zeros(1, np.float32)] * 4, "token_versions": [np.zeros(1, np.int32)] * 4,
        })  # fmt: skip
        phases = Phases()
        worker = ComputeWorker(flow.stage("slow"), flow.columns, phases=phases, max_units=1)
        running = asyncio.ensure_future(worker.run(client))
        seen = []
        for group in range(2):
            lease = await client.lease("reward", 2, "judge")
            begun.clear()
            go_on.clear()
            await client.write(lease, lease.rows.row_ids, {"reward": [1.0, 2.0]})
            while not begun.is_set():
                await asyncio.sleep(0.001)
            seen.append((phases.progress().phase, worker.num_rows, worker.num_in_flight))
            go_on.set()
            while worker.num_rows < 2 * (group + 1):
                await asyncio.sleep(0.001)
        await client.close("done")
        await running
        return seen

    assert asyncio.run(asyncio.wait_for(run(), 20)) == [(COMPUTING, 0, 2), (COMPUTING, 2, 2)]
    assert len(threads) == 1
    assert threads != {threading.get_ident()}


def test_a_function_that_takes_group_ids_gets_them():
    def named(reward, group_ids):
        assert group_ids.dtype == torch.int64
        return reward + 10 * group_ids

    assert apply(named) == {"advantage": [1.0, 0.0, 13.0, 15.0]}
    assert apply(named, per="batch") == {"advantage": [1.0, 0.0, 13.0, 15.0]}


@pytest.mark.parametrize(
    ("keeps", "trained", "dropped"),
    [
        (lambda reward: bool(reward.max() > 1), [2, 3], 2),
        (lambda reward: reward > 0, [0, 2, 3], 1),
        (lambda reward: False, [], 4),
    ],
)
def test_a_filter_drops_what_it_does_not_keep_and_counts_it(keeps, trained, dropped):
    async def body():
        flow = Dataflow().rollout(samples_per_prompt=2).reward()
        flow.filter(keeps, reads=["reward"], reason="no_signal", name="keeps")
        flow.compute(centred, reads=["reward"], writes=["advantage"]).train(loss=lambda logprobs, advantage: None)
        config = RunConfig(trainer=TrainerConfig(groups_per_step=2))
        store = Store(StoreSpec.of(flow.check(), config))
        client = StoreClient(store)
        await client.put_groups([{"prompt_ids": [1], "task": "{}"}] * 2)
        lease = await client.lease("rollout", 2, "engine")
        tokens = [np.ones(1, np.int32)] * 4
        await client.write(lease, range(4), {
            "response_ids": tokens, "response_text": ["x"] * 4, "finish_reason": ["stop"] * 4,
            "behavior_logprobs": [np.zeros(1, np.float32)] * 4, "token_versions": [np.zeros(1, np.int32)] * 4,
        })  # fmt: skip
        lease = await client.lease("reward", 4, "judge")
        await client.write(lease, range(4), {"reward": ROWS["reward"]})
        worker = ComputeWorker(flow.stage("keeps"), flow.columns)
        running = asyncio.ensure_future(worker.run(client))
        while (await client.stats()).get("dropped/no_signal", 0) < dropped:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
        alive = store.ledger.residents.groups
        assert [
            row for group in alive.values() for row in range(4) if group.id == row // 2 and group.live >> row % 2 & 1
        ] == trained
        await client.close("done")
        await running

    asyncio.run(asyncio.wait_for(body(), 10))
