"""Rows of earlier steps that are trained again: which, for how long, and the same over any number of ranks."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.algorithms.catalogue import dataflow_of
from penstock.conf.algorithms import PolicyGradientConfig
from penstock.conf.errors import ConfigError
from penstock.conf.run import RunConfig
from penstock.conf.trainer import ReplayConfig, TrainerConfig
from penstock.orchestrator.configuration.compose import load_config
from penstock.store.data.rows import Rows
from penstock.workers.trainer.checkpointing.plain_data import decode, encode
from penstock.workers.trainer.preparation import Preparation, Replay, rarest, rarities
from penstock.workers.trainer.token_recorder import PLACES, with_places
from tests.amounts import amount

GROUP = 4


def batch(step: int, rewards: Sequence[Sequence[float]], age: int = 0) -> Rows:
    """The rows of a step, a list of rewards a group, whose tokens are `age` versions old."""
    flat = [reward for group in rewards for reward in group]
    first = 1000 * step
    rows = Rows.from_lists(
        {
            "response_ids": [[step, index] for index in range(len(flat))],
            "reward": flat,
            "token_versions": [[step - age, step] for _ in flat],
        }
    )
    groups = [first + number for number, group in enumerate(rewards) for _ in group]
    return Rows(first + np.arange(len(flat)), np.array(groups), rows.table())


def alone(share: float = 0.5, rare: float = 0.25, max_staleness: int = 2) -> Replay:
    return Replay(ReplayConfig(share, rare), max_staleness, lambda mine: [mine])


NOTHING = Rows(np.zeros(0), np.zeros(0), pa.table({}))
"""The rows of a rank that has none."""


def ids_of(rows: Rows | None) -> list[int]:
    return rows.row_ids.tolist() if rows is not None else []


def test_a_success_is_as_rare_as_few_of_its_group_are_above_the_mean() -> None:
    rewards = np.array([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.2, 0.1, 0.9, 0.1])
    found = rarities(rewards, np.repeat([4, 2, 9, 1], 4))
    assert found.tolist() == [0.25, *[np.inf] * 3, 0.5, 0.5, *[np.inf] * 6, np.inf, np.inf, 0.25, np.inf]


def test_the_rarest_are_chosen_then_the_newest_in_the_order_of_ids() -> None:
    ids = np.array([30, 10, 20, 40])
    assert ids[rarest(np.array([0.25, 0.125, 0.25, 0.25]), ids, 3)].tolist() == [10, 30, 40]


def test_rare_successes_are_trained_again_until_they_are_too_stale() -> None:
    replay = alone()
    easy = [[1.0, 1.0, 1.0, 0.0]] * 2
    again, metrics = replay.exchange(batch(0, [[0.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]]), 0)
    assert again is None
    assert metrics == {"replay/rows": 0, "replay/staleness_max": 0}
    for step in (1, 2):
        again, metrics = replay.exchange(batch(step, easy), step)
        assert ids_of(again) == [1]
        assert metrics == {"replay/rows": 1, "replay/staleness_max": step}
    assert ids_of(replay.exchange(batch(3, easy), 3)[0]) == []
    assert replay.state["ids"][0].tolist() == []


def test_a_row_comes_again_with_all_of_its_columns() -> None:
    replay, first = alone(), batch(0, [[0.0, 1.0, 0.0, 0.0]] * 2)
    replay.exchange(with_places(first.with_column("advantage", np.arange(8.0))), 0)
    later = batch(1, [[0.0] * 4] * 2).with_column("advantage", np.zeros(8))
    again, _ = replay.exchange(later, 1)
    assert again is not None
    assert ids_of(again) == [1, 5]
    assert again.values("advantage").tolist() == [1.0, 5.0]
    assert [tokens.tolist() for tokens in again.arrays("response_ids")] == [[0, 1], [0, 5]]
    assert PLACES not in again
    recorded, _ = replay.exchange(with_places(batch(2, [[0.0] * 4]).with_column("advantage", np.zeros(4))), 2)
    assert recorded is not None
    assert [places.tolist() for places in recorded.arrays(PLACES)] == [[0, 1], [0, 1]]


def test_a_row_without_a_token_is_never_trained_again() -> None:
    replay, rows = alone(), batch(0, [[0.0, 1.0, 0.0, 0.0]] * 2)
    replay.exchange(rows.with_column("token_versions", [[0], [], [0], [0], [0], [0, 0], [0], [0]]), 0)
    assert ids_of(replay.exchange(batch(1, [[0.0] * 4]), 1)[0]) == [5]


def test_no_more_are_kept_than_the_share_of_a_step() -> None:
    replay = alone(share=0.25)
    replay.exchange(batch(0, [[0.0, 1.0, 0.0, 0.0]] * 4), 0)
    again, _ = replay.exchange(batch(1, [[0.0] * 4]), 1)
    assert ids_of(again) == [1, 5, 9, 13]
    replay.exchange(batch(2, [[1.0, 0.0, 0.0, 0.0]]), 2)
    again, _ = replay.exchange(batch(3, [[0.0] * 4]), 3)
    assert ids_of(again) == [2000]


steps = st.lists(
    st.tuples(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=GROUP, max_size=GROUP), max_size=4),
              st.integers(0, 2)),
    min_size=1, max_size=6,
)  # fmt: skip


@settings(deadline=None)
@given(steps, st.sampled_from([0.25, 0.5, 1.0]), st.integers(1, 3))
def test_no_row_is_too_stale_and_all_are_rare_successes(history: Any, share: float, max_staleness: int) -> None:
    replay, seen = alone(share, 0.5, max_staleness), {}
    for step, (rewards, age) in enumerate(history):
        rows = batch(step, rewards, age)
        for row, rarity in zip(rows.row_ids.tolist(), rarities(rows.values("reward"), rows.group_ids), strict=True):
            seen[row] = rarity
        again, _ = replay.exchange(rows, step)
        if again is not None:
            assert min(versions.min() for versions in again.arrays("token_versions")) >= step - max_staleness
            assert all(seen[row] <= 0.5 for row in again.row_ids.tolist())
            assert not set(again.row_ids.tolist()) & set(rows.row_ids.tolist())


def on_ranks(count: int, work: Callable[[int, Callable[[Any], list[Any]]], Any]) -> list[Any]:
    """Run `work` on so many ranks, which are threads."""
    barrier, shared = threading.Barrier(count, timeout=60), [None] * count

    def gather_of(rank: int) -> Callable[[Any], list[Any]]:
        def gather(value: Any) -> list[Any]:
            shared[rank] = value
            barrier.wait()
            found = list(shared)
            barrier.wait()
            return found

        return gather

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda rank: work(rank, gather_of(rank)), range(count)))


@settings(deadline=None, max_examples=amount(25))
@given(steps, st.integers(2, 3), st.integers(0, 5))
def test_several_ranks_train_again_what_one_would_whatever_the_split(history: Any, count: int, resumed: int) -> None:
    """Each rank goes on from what another has kept, before the step `resumed`."""
    one = alone()
    expected = [ids_of(one.exchange(batch(step, rewards, age), step)[0]) for step, (rewards, age) in enumerate(history)]

    def work(rank: int, gather: Callable[[Any], list[Any]]) -> list[list[int]]:
        def made() -> Replay:
            return Replay(ReplayConfig(0.5, 0.25), 2, gather, rank, count)

        replay, found = made(), []
        for step, (rewards, age) in enumerate(history):
            if step == resumed:
                state = gather(encode(replay.state))[(rank + 1) % count]
                replay = made()
                replay.state = decode(state)
            rows = batch(step, rewards, age)
            mine = rows.select([position for position in range(len(rows)) if position * 7 % count == rank])
            mine = mine if len(mine) else NOTHING
            found.append(ids_of(replay.exchange(mine, step)[0]))
        return found

    together = on_ranks(count, work)
    for step, ids in enumerate(expected):
        assert sorted(row for found in together for row in found[step]) == ids
        lengths = [len(found[step]) for found in together]
        assert max(lengths) - min(lengths) <= 1


def test_ages_are_those_of_the_step_that_trains_a_row_again() -> None:
    config = RunConfig(algorithm=PolicyGradientConfig(proximal="interpolated"), max_staleness=2)
    flow = dataflow_of(config)
    preparation = Preparation(flow.in_trainer, flow.columns, lambda mine: [mine], replay=alone())
    preparation.apply(batch(0, [[0.0, 1.0, 0.0, 0.0]] * 2), 0)
    resumed = Preparation(flow.in_trainer, flow.columns, lambda mine: [mine], replay=alone())
    resumed.resume(preparation.carried())
    rows, metrics = resumed.apply(batch(2, [[0.0] * 4]), 2)
    assert rows.row_ids.tolist() == [2000, 2001, 2002, 2003, 1, 5]
    assert [ages.tolist() for ages in rows.arrays("staleness")] == [[0.0, 0.0]] * 4 + [[2.0, 2.0]] * 2
    assert metrics["replay/rows"] == 2


REFUSED = {
    "no row is young enough": (["max_staleness=1", "trainer.replay.steps=2"], r"steps=2: with max_staleness=1 no row"),
    "the window": (["max_staleness=1", "store.window=2"], r"steps=1: .* beside the 1 of store.window=2. .*=2 or more"),
    "pictures": (["max_staleness=2", "rollout.max_pictures=1"], "rows with pictures"),
    "pairs": (["max_staleness=2", "algorithm=online_dpo"], "compares the samples of a group"),
    "a critic": (["max_staleness=2", "algorithm=ppo"], "critic's values"),
    "no rewards": (["max_staleness=2", "algorithm=distill"], "samples and rewards nothing"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_again_is_refused_by_name(name: str) -> None:
    words, message = REFUSED[name]
    with pytest.raises(ConfigError, match=rf"trainer\.replay\..*{message}"):
        dataflow_of(load_config(["recipe=arithmetic", "trainer.replay.share=0.5", *words]))


def test_shares_lie_within_bounds() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.replay\.share"):
        TrainerConfig(replay=ReplayConfig(share=1.5))
