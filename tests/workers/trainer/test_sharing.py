"""Updates of groups whose beginnings are computed once are those of rows alone, whatever the loss, engine and model."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from penstock.algorithms.losses import policy_loss, value_loss
from penstock.algorithms.losses.preference import bradley_terry_loss
from penstock.conf.errors import ConfigError
from penstock.conf.trainer import LoraConfig, OptimizerConfig, TrainerConfig
from penstock.store.data.rows import Rows
from penstock.workers.agents.trajectory import Trajectory, row_columns
from penstock.workers.trainer.models import packed_attention
from penstock.workers.trainer.models.language_model import PolicyModel, hidden_states
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.trainer.scalar import CriticTrainer, ScalarTrainer
from penstock.workers.trainer.update import batching
from penstock.workers.trainer.update.minibatches import find_trees, pack_trees
from tests.workers.histories import turn
from tests.workers.trainer.conftest import ENGINES, copy_of_weights
from tests.workers.trainer.models.test_own_logits import HEADS, tiny
from tests.workers.trainer.models.test_packed_attention import MODELS, make
from tests.workers.trainer.test_packing import LINEAR, LOSSES, assert_near, rows_of

Make = Callable[..., PolicyTrainer]
SIDES: tuple[dict[str, Any], ...] = ({"share_prefixes": "never"}, {"share_prefixes": "always"})
PROMPT = 20
OF_ENGINES: list[tuple[str, dict[str, Any]]] = [(engine, {}) for engine in ENGINES] + [
    ("fsdp", {"activation_checkpointing": True}),
    ("fsdp", {"lora": LoraConfig(rank=4)}),
    ("fsdp", {"packing": "always"}),
    ("fsdp", {"compile": True}),
    ("zero3", {"activation_checkpointing": True}),
]


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> str:
    return getattr(request, "param", "fsdp")


@pytest.fixture
def group_rows(make_rows: Callable[..., Rows]) -> Rows:
    """Four pairs of a prompt of 20 tokens, with what every loss reads."""
    rows, random = rows_of(make_rows), np.random.default_rng(5)
    prompts = [random.integers(3, 90, PROMPT) for _ in range(4)]
    return rows.with_column(
        "prompt_ids", [prompts[group] for group in np.unique(rows.group_ids, return_inverse=True)[1]]
    )


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_has_the_gradient_of_rows_alone(make_trainer: Make, group_rows: Rows, loss: str) -> None:
    weights, metrics = [], []
    for side in SIDES:
        trainer = make_trainer(**side, **LINEAR)
        metrics.append(trainer.update(group_rows, LOSSES[loss]).metrics)
        weights.append(copy_of_weights(trainer))
    assert_near(weights[1], weights[0])
    saved = 4 * PROMPT / group_rows.lengths("response_ids").sum()
    assert 0 < metrics[1].pop("actor/shared_share") < saved
    assert metrics[0].pop("actor/padding_share") > metrics[1].pop("actor/padding_share") == 0
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-4, abs=1e-6)


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize(("engine", "options"), OF_ENGINES, indirect=["engine"])
def test_every_engine_has_the_answers_of_rows_alone(
    make_trainer: Make, group_rows: Rows, options: dict[str, Any]
) -> None:
    """In several micro-batches and optimizer steps, with the log-probabilities of before the update."""
    weights, logprobs = [], []
    for side in SIDES:
        ways = LINEAR | {"lr": 1e-2, "max_tokens_per_microbatch": 60, "num_minibatches": 2} | options
        trainer = make_trainer(**side, **ways)
        trainer.update(group_rows, policy_loss)
        weights.append(copy_of_weights(trainer))
        logprobs.append(np.concatenate(trainer.logprobs(group_rows)))
    assert_near(weights[1], weights[0])
    np.testing.assert_allclose(logprobs[1], logprobs[0], atol=1e-5)


@pytest.mark.parametrize(("kind", "loss"), [(CriticTrainer, value_loss), (ScalarTrainer, bradley_terry_loss)])
def test_critics_and_scorers_have_the_answers_of_rows_alone(
    model_path: str, group_rows: Rows, kind: type[ScalarTrainer], loss: Any
) -> None:
    answers = []
    for side in SIDES:
        trainer = kind(TrainerConfig(**side, optimizer=OptimizerConfig(lr=1e-2)), model_path)
        returns = [np.linspace(-1, 1, length, dtype=np.float32) for length in group_rows.lengths("response_ids")]
        for _ in range(2):  # a new head says nothing
            rows = group_rows.with_column("returns", returns).with_column("old_values", trainer.values(group_rows))
            trainer.update(rows, loss)
        answers.append(np.concatenate([*trainer.values(group_rows), trainer.scores(group_rows)]))
        trainer.close()
    assert np.ptp(answers[0]) > 1e-3
    np.testing.assert_allclose(answers[1], answers[0], atol=1e-5)


def test_turns_and_rewritten_histories_of_attempts_are_shared(make_trainer: Make) -> None:
    first = list(range(30, 50))
    histories = [
        [turn(0, first, [3, 4]), turn(1, [*first, 3, 4, 5, 6], [8]), turn(2, [*first, 9, 9], [7, 2])],
        [turn(0, first, [2]), turn(1, [*first, 2, 3, 3], [4, 5])],
    ]
    rows = Rows.from_lists(row_columns([Trajectory(turns) for turns in histories]), group_ids=[0, 0])
    alone, shared = (make_trainer(**side).logprobs(rows) for side in SIDES)
    for ours, expected in zip(shared, alone, strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-5)
    batch = batching.collate(rows, np.array([0, 1]), shared=True)
    assert batch.num_tokens == 20 + (2 + 2 + 1) + (2 + 2) + (1 + 2 + 2)
    assert batch.num_shared == rows.lengths("response_ids").sum() + rows.lengths("context_ids").sum() - batch.num_tokens
    moved = batch.to(torch.device("meta"))
    assert (moved.num_tokens, moved.num_shared) == (batch.num_tokens, batch.num_shared)
    assert moved.blocks.position_ids_1T.is_meta


FULL = [name for name, options in MODELS.items() if "sliding_window" not in options]
IN_FLOAT32 = ("Qwen3Moe",)
"""Models whose routers compute in float32, whatever the dtype."""


def exactly(kind: str) -> PolicyModel:
    """A tiny model in float64, whose norms compute so, too. Theirs round to float32, by token: what is summed over
    samples before it is rounded once is not what is rounded for each."""
    lm = make(kind, MODELS[kind])
    for module in list(lm.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                norm = torch.nn.RMSNorm(child.weight.shape, eps=1e-6, dtype=torch.float64)
                norm.load_state_dict(child.state_dict())
                setattr(module, name, norm)
    return PolicyModel(lm)


@pytest.mark.parametrize("kind", FULL)
def test_models_with_full_attention_compute_trees_to_rounding(kind: str) -> None:
    """Scores and gradients in float64, of a tree with two branches in one of its branches."""
    alone, shared, tolerance = exactly(kind), exactly(kind), 1e-5 if kind in IN_FLOAT32 else 1e-9
    assert packed_attention.choose_trees(shared.lm, "always", is_compiled=False) == "always"
    random = np.random.default_rng(2)
    prompt, answer = random.integers(3, 40, 18).tolist(), random.integers(3, 40, 5).tolist()
    rows = Rows.from_lists(
        {
            "prompt_ids": [prompt] * 4,
            "response_ids": [[*answer, 4], [*answer, 5, 6], [7, 8, 9], [*answer]],
        },
        group_ids=[0] * 4,
    )
    scores, gradients = [], []
    for model, ways in ((alone, {}), (shared, {"shared": True})):
        batch = batching.collate(rows, np.arange(4), **ways)
        logprobs_N, entropy_N = model(
            batch.input_ids_SL, batch.positions_N, batch.targets_N, "gradient", None, batch.blocks
        )
        assert entropy_N is not None
        scores.append(torch.cat([logprobs_N, entropy_N]).detach())
        weight_N = torch.arange(1, len(logprobs_N) + 1)
        ((logprobs_N + 0.3 * entropy_N) * weight_N).sum().backward()
        gradients.append({name: one.grad for name, one in model.named_parameters() if one.grad is not None})
    torch.testing.assert_close(scores[1], scores[0], atol=tolerance, rtol=0)
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=tolerance, rtol=tolerance, msg=name)


@pytest.mark.parametrize("kind", sorted(packed_attention.SHARING))
def test_kinds_that_may_share_score_trees_as_rows_alone(kind: str) -> None:
    lm = tiny(kind, **(HEADS[0] if kind.startswith(("hunyuan", "ministral3", "glm4_moe")) else {})).eval()
    lm.set_attn_implementation("sdpa")
    model, prompt = PolicyModel(lm), np.random.default_rng(4).integers(3, 60, 18).tolist()
    responses = [[5, 6, 7], [5, 8], [9, 9, 4, 3]]
    rows = Rows.from_lists({"prompt_ids": [prompt] * 3, "response_ids": responses}, group_ids=[0] * 3)
    alone, tree = (batching.collate(rows, np.arange(3), shared=shared) for shared in (False, True))
    scores = []
    for batch in (alone, None, tree):
        if batch is None:
            assert packed_attention.choose_trees(lm, "always", is_compiled=False) == "always"
            batch = alone
        with torch.no_grad():
            read = batch.input_ids_SL, batch.positions_N, batch.targets_N, "none", None, batch.blocks
            scores.append(model(*read)[0])
    assert torch.equal(scores[1], scores[0])
    torch.testing.assert_close(scores[2], scores[0], atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(("kind", "why"), [("roberta", "none of the models"), ("nemotron", "none of the models")])
def test_kinds_that_were_not_compared_are_refused_by_name(kind: str, why: str) -> None:
    lm = tiny(kind)
    lm.set_attn_implementation("sdpa")
    with pytest.raises(ConfigError, match=rf"share_prefixes=always: {kind} is {why}"):
        packed_attention.choose_trees(lm, "always", is_compiled=False)


@pytest.mark.parametrize("kind", ["Mistral", "Gemma3", "Phi3"])
def test_sliding_attention_is_refused_by_name(kind: str) -> None:
    lm = make(kind, MODELS[kind])
    with pytest.raises(ConfigError, match=r"trainer\.share_prefixes=always: .*=never"):
        packed_attention.choose_trees(lm, "always", is_compiled=False)
    assert packed_attention.choose_trees(lm, "auto", is_compiled=False) == "never"


def test_padded_rows_of_a_model_that_may_share_keep_their_bits(
    make_trainer: Make, make_rows: Callable[..., Rows]
) -> None:
    rows = rows_of(make_rows)
    never, auto = (make_trainer(share_prefixes=name, **LINEAR) for name in ("never", "auto"))
    for trainer in (never, auto):
        trainer.update(rows, policy_loss)
    assert auto.sharing == "auto"
    for name, weight in copy_of_weights(never).items():
        assert torch.equal(copy_of_weights(auto)[name], weight), name


def of_lengths(prompt: int, responses: list[int], groups: int) -> Rows:
    random = np.random.default_rng(1)
    prompts = [random.integers(3, 90, prompt).tolist() for _ in range(groups)]
    return Rows.from_lists(
        {
            "prompt_ids": [prompts[group] for group in range(groups) for _ in responses],
            "response_ids": [random.integers(3, 90, length).tolist() for _ in range(groups) for length in responses],
        },
        group_ids=[group for group in range(groups) for _ in responses],
    )


def test_auto_shares_where_enough_is_saved() -> None:
    much, little, small = of_lengths(100, [50] * 4, 3), of_lengths(100, [2000] * 4, 3), of_lengths(9, [5] * 4, 3)
    for rows, shares in ((much, True), (little, False), (small, False)):
        trees, _, alone = find_trees(rows, np.arange(12), 10_000)
        assert sorted(np.concatenate([*trees, alone]).tolist()) == list(range(12))
        assert (len(alone) == 0) == shares


def test_a_group_beyond_the_budget_is_cut_into_trees_unless_it_must_stay_whole() -> None:
    rows = of_lengths(100, [50] * 8, 2)
    trees, sizes, _ = find_trees(rows, np.arange(16), 260)
    assert sorted(np.concatenate(trees).tolist()) == list(range(16))
    assert [batching.collate(rows, tree, shared=True).num_tokens for tree in trees] == sizes.tolist()
    assert all(batching.collate(rows, cut, shared=True).num_tokens <= 260 for cut in pack_trees(trees, sizes, 260))
    assert all(len(np.unique(rows.group_ids[cut])) == 1 for cut in trees)
    whole, *_ = find_trees(rows, np.arange(16), 260, whole_groups=True)
    assert [cut.tolist() for cut in whole] == [list(range(8)), list(range(8, 16))]


def test_hidden_states_of_padding_after_trees_are_finite(model_path: str, group_rows: Rows) -> None:
    """Ranks that split the tokens of a row pad it to a multiple of their number."""
    from penstock.workers.trainer.models.language_model import load_causal_lm

    lm = load_causal_lm(model_path)
    packed_attention.choose_trees(lm, "always", is_compiled=False)
    batch = batching.collate(group_rows, np.arange(8), shared=True)
    places = torch.arange(batch.num_tokens)
    hidden = hidden_states(lm, batch.input_ids_SL, places, batch.blocks)
    assert batch.blocks is not None
    padded = torch.nn.functional.pad(batch.input_ids_SL, (0, 3))
    positions = torch.nn.functional.pad(batch.blocks.position_ids_1T, (0, 3))
    ways = packed_attention.keywords(lm, batch.blocks) | {"position_ids": positions}
    longer = lm.base_model(padded, use_cache=False, **ways).last_hidden_state[0]
    torch.testing.assert_close(longer[:-3], hidden, atol=1e-6, rtol=0)
    assert torch.isfinite(longer).all()
