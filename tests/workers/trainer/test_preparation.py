"""Trainers' functions on the step's batch: the same values over any number of ranks."""

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
import torch

from penstock.algorithms.advantages import reinforce_plus_plus_baseline
from penstock.algorithms.catalogue import build_dataflow
from penstock.algorithms.graph.columns import Column
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.algorithms.losses import policy_loss, value_loss
from penstock.conf.algorithms import PolicyGradientConfig, PpoConfig, ReinforcePpConfig
from penstock.conf.errors import CheckpointError, DataflowError
from penstock.store.data.rows import Rows
from penstock.store.spec import StoreSpec
from penstock.workers.protocols import UpdateReport
from penstock.workers.trainer.preparation import Preparation

REWARDS = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0]


def rows_of(positions) -> Rows:
    everything = Rows.from_lists({"reward": REWARDS, "response_ids": [[1]] * 8}, group_ids=[0, 0, 1, 1, 2, 2, 3, 3])
    return everything.select(positions)


def prepare(positions, others=()):
    flow = build_dataflow(ReinforcePpConfig(group_size=2))
    parts = [rows_of(positions), *(rows_of(other) for other in others)]

    def gather(mine):
        names = list(mine.names)
        return [Rows(part.row_ids, part.group_ids, part.table().select(names)) for part in parts]

    rows, metrics = Preparation(flow.in_trainer, flow.columns, gather).apply(parts[0], 0)
    assert metrics == {}
    return rows


def test_statistics_are_those_of_the_whole_batch():
    expected = reinforce_plus_plus_baseline(torch.tensor(REWARDS), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]))
    np.testing.assert_allclose(prepare(range(8)).values("advantage"), expected)


@pytest.mark.parametrize("split", [([0, 3, 5], [1, 2, 4, 6, 7]), ([6, 1], [0, 2, 3, 4, 5, 7]), ([], list(range(8)))])
def test_every_rank_gets_its_rows_values_whatever_the_split(split):
    whole = prepare(range(8)).values("advantage")
    for mine, other in (split, split[::-1]):
        rows = prepare(mine, [other])
        np.testing.assert_allclose(rows.values("advantage") if mine else [], whole[mine])


def test_the_store_knows_nothing_of_what_trainers_compute(tmp_path):
    flow = build_dataflow(PpoConfig(kl_coef=0.1))
    stored = flow.stored_columns
    assert not {"token_advantage", "returns", "old_values"} & stored.keys()
    reads = flow.batch_reads()
    assert {"reward", "behavior_logprobs", "reference_logprobs", "response_ids", "prompt_ids"} <= set(reads)
    assert set(reads) <= stored.keys()
    from penstock.conf.run import RunConfig

    spec = StoreSpec.of(flow, RunConfig())
    assert [stage.name for stage in spec.stages] == ["rollout", "reward", "reference", "train"]


class Critic:
    def __init__(self) -> None:
        self.seen: list[Rows] = []

    def values(self, rows):
        return [np.full(length, 0.5, np.float32) for length in rows.lengths("response_ids")]

    def update(self, rows, loss):
        self.seen.append(rows)
        return UpdateReport({"critic/value_loss": 1.0})


def test_the_critic_speaks_before_advantages_and_learns_before_the_policy():
    flow = build_dataflow(PpoConfig())
    columns = {"reward": [1.0, 0.0], "response_ids": [[1, 2], [3]], "prompt_ids": [[4], [5]]}
    rows = Rows.from_lists(columns | {"behavior_logprobs": [[-1.0, -1.0], [-1.0]]})
    critic = Critic()
    prepared, metrics = Preparation(flow.in_trainer, flow.columns, lambda mine: [mine], critic).apply(rows, 0)
    assert metrics == {"critic/value_loss": 1.0}
    assert critic.seen[0].names == prepared.names
    # gamma = 1, lam = 0.95, V = 0.5: row 1 has A = 0 - 0.5 = -0.5; row 0 ends with 1 - 0.5 = 0.5, and before that
    # 0 + 0.5 - 0.5 + 0.95 * 0.5 = 0.475. Returns are A + V.
    np.testing.assert_allclose(np.concatenate(prepared.arrays("returns")), [0.975, 1.0, 0.0], rtol=1e-6)
    whitened = np.concatenate(prepared.arrays("token_advantage"))
    assert abs(whitened.mean()) < 1e-6
    assert whitened.std(ddof=1) == pytest.approx(1.0, rel=1e-5)


def test_a_graph_with_a_critic_reads_as_it_runs():
    flow = Dataflow().rollout(samples_per_prompt=1).reward().values()
    flow.compute(
        lambda reward, old_values: old_values, per="batch", reads=["reward", "old_values"],
        writes=[Column("returns", "float32", "token")], name="returns",
    )  # fmt: skip
    flow.train_critic(loss=partial(value_loss, clip=1.0))
    flow.compute(lambda reward: reward, reads=["reward"], writes=["advantage"], name="advantage")
    flow.train(loss=policy_loss).check()
    assert [stage.name for stage in flow.in_trainer] == ["critic_values", "returns", "train_critic"]
    assert flow.stage("train_critic").reads == ("prompt_ids", "response_ids", "returns", "old_values")


def with_logprobs(behavior, reference):
    columns = {"reward": [1.0, 0.0], "response_ids": [[1, 2], [3]], "prompt_ids": [[4], [5]]}
    return Rows.from_lists(columns | {"behavior_logprobs": behavior, "reference_logprobs": reference}, group_ids=[0, 0])


def adaptive():
    config = PolicyGradientConfig(
        group_size=2, advantage="dr_grpo", advantage_per="batch", kl_coef=0.1, kl_in="reward", kl_target=1.0
    )
    flow = build_dataflow(config)
    return Preparation(flow.in_trainer, flow.columns, lambda mine: [mine])


def test_an_adaptive_coefficient_is_carried_from_step_to_step_and_resumes():
    # log-ratios of the responses: 3 and 1, mean 2: over the target, so the next coefficient is 0.1 · 1.02
    rows = with_logprobs([[-1.0, -1.0], [-1.0]], [[-2.0, -3.0], [-2.0]])
    preparation = adaptive()
    first, metrics = preparation.apply(rows, 0)
    # rewards 1 - 0.3 and 0 - 0.1, mean 0.3
    np.testing.assert_allclose(first.values("advantage"), [0.4, -0.4], rtol=1e-6)
    assert metrics == {"actor/kl_coef": pytest.approx(0.102), "actor/response_kl": pytest.approx(2.0)}
    carried = preparation.carried()
    second, _ = preparation.apply(rows, 1)
    # 1 - 3 · 0.102 and 0 - 0.102: half their difference
    np.testing.assert_allclose(second.values("advantage"), [0.398, -0.398], rtol=1e-6)
    resumed = adaptive()
    resumed.resume(carried)
    again, _ = resumed.apply(rows, 1)
    assert again.values("advantage").tolist() == second.values("advantage").tolist()
    assert resumed.carried() == preparation.carried() != carried


def test_a_function_that_forgets_its_state_is_named():
    flow = Dataflow().rollout(samples_per_prompt=1).reward()
    flow.compute(
        lambda reward, state: reward, per="batch", reads=["reward"], writes=["advantage"], name="mine", state=1.0
    )
    preparation = Preparation(flow.in_trainer, flow.columns, lambda mine: [mine])
    with pytest.raises(DataflowError, match=r"stage 'mine': .* \(result, state of the next batch\) is due"):
        preparation.apply(rows_of(range(8)), 0)


def carrying(start, after=lambda state: state, **options):
    """A stage that turns its state into another at each step."""
    flow = Dataflow().rollout(samples_per_prompt=1).reward()
    flow.compute(
        lambda reward, state: (reward, after(state)), per="batch", reads=["reward"], writes=["advantage"], name="mine",
        state=start,
    )  # fmt: skip
    return Preparation(flow.in_trainer, flow.columns, lambda mine: [mine], **options)


@dataclass(frozen=True)
class Mean:
    value: float
    seen: tuple[int, ...] = ()


@dataclass
class Cached:
    value: float
    square: float = field(init=False, default=0.0)


@pytest.mark.parametrize(
    "state", [{"mean": torch.ones(3), "seen": np.arange(2)}, 0.1, [float("inf"), (1, None)], Mean(0.3, (1, 2))]
)
def test_plain_data_and_dataclasses_of_it_are_carried(state):
    resumed = carrying(Mean(9.0) if isinstance(state, Mean) else 0)
    resumed.resume(carrying(state).carried())
    found = resumed.workers["mine"].state
    assert type(found) is type(state)
    assert str(found) == str(state)


NOT_KEPT = {
    "a function": (len, r"of its state, the value is of type builtin_function_or_method"),
    "within": ({"rows": [{1}]}, r"of its state, \['rows'\]\[0\] is of type set; plain data is None, bool"),
    "a field": (Mean(0.1, len), r"of its state, \['seen'\] is of type"),
    "a derived field": (Cached(0.1), r"its state's field 'square'"),
}


@pytest.mark.parametrize("name", NOT_KEPT)
def test_a_state_that_cannot_be_kept_is_refused_by_its_stage(name):
    start, message = NOT_KEPT[name]
    with pytest.raises(DataflowError, match=f"stage 'mine': {message}.*checkpoint.every_steps=0"):
        carrying(start).carried()


def test_a_state_that_becomes_another_class_is_refused():
    preparation = carrying(0.0, lambda state: Mean(state))
    preparation.apply(rows_of(range(2)), 0)
    with pytest.raises(DataflowError, match="its state is a Mean now and started as float"):
        preparation.carried()


def test_with_checkpoints_the_first_step_tells_of_a_state_that_cannot_be_kept():
    carrying(0.0, lambda state: {1}).apply(rows_of(range(2)), 0)
    with pytest.raises(DataflowError, match="stage 'mine'"):
        carrying(0.0, lambda state: {1}, is_saved=True).apply(rows_of(range(2)), 0)


@pytest.mark.parametrize(
    ("carried", "message"),
    [
        ('{"dict": []}', r"states of \[\], and this dataflow's stages with a state are \['mine'\]"),
        ('{"dict": [["mine", {"dict": [["value", 1.0], ["other", 2]]}]]}', "stage 'mine' makes no Mean"),
        ('{"dict": [["mine", 3]]}', "stage 'mine' makes no Mean"),
        ("nonsense", "cannot be read"),
    ],
)
def test_what_others_carried_is_refused(carried, message):
    with pytest.raises(CheckpointError, match=message):
        carrying(Mean(0.0)).resume(carried)


def test_staleness_counts_from_the_version_that_is_updated():
    flow = Dataflow().rollout(samples_per_prompt=1).staleness()
    rows = Rows.from_lists({"token_versions": [[3, 4, 5], [5]]})
    prepared, metrics = Preparation(flow.in_trainer, flow.columns, lambda mine: [mine]).apply(rows, 5)
    assert [ages.tolist() for ages in prepared.arrays("staleness")] == [[2.0, 1.0, 0.0], [0.0]]
    assert metrics == {}
