"""The trainer sends tokens to the experts that the engine chose (`rollout.router_replay`)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from penstock.algorithms.graph.columns import ROUTED_EXPERTS
from penstock.algorithms.losses import sft_loss
from penstock.conf.errors import ConfigError, DataError
from penstock.conf.rollout import RolloutConfig
from penstock.store.data.rows import Rows
from penstock.workers.agents.trajectory import Trajectory, row_columns
from penstock.workers.models.routed_experts import RoutingShape
from penstock.workers.protocols import EngineSpec, Sampling
from penstock.workers.rollout.engine_hf import HfEngine
from penstock.workers.rollout.rollout_worker import response_columns
from penstock.workers.trainer.models.routing import Routers, check_weights
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from tests.mixtures import SIZES, build_mixture
from tests.workers.histories import turn
from tests.workers.trainer.conftest import assert_same

Make = Callable[..., Any]
PROMPTS = [[5, 6, 7, 20, 30], [40, 41]]
KINDS = ("qwen3_moe", "mixtral")


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> str:
    return getattr(request, "param", "fsdp")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {kind: build_mixture(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}


def engine_of(path: str, noise: float = 0.0) -> HfEngine:
    """An engine. `noise`: of its routers, a share of their weights' width."""
    engine = HfEngine(EngineSpec(RolloutConfig(engine="hf", max_model_len=64, router_replay=True), path))
    engine.open_model()
    torch.manual_seed(2)
    for layer in engine.model.model.layers:
        weight = layer.mlp.gate.weight
        weight.data += noise * weight.std() * torch.randn_like(weight)
    return engine


def sampled(path: str, noise: float = 0.0) -> Rows:
    """Rows of an engine, three of each prompt, of different lengths."""
    engine = engine_of(path, noise)
    columns: dict[str, list[Any]] = {}
    for number, prompt in enumerate(PROMPTS):
        for seed in range(3):
            sampling = Sampling(max_tokens=6 + 5 * seed, seed=9 * number + seed, ignore_eos=True)
            new = response_columns(engine.generate_group(prompt, 1, sampling)) | {"prompt_ids": [prompt]}
            for name, values in new.items():
                columns.setdefault(name, []).extend(values)
    return Rows.from_lists(columns, group_ids=[0, 0, 0, 1, 1, 1])


@pytest.fixture(scope="module")
def rows_of(paths: dict[str, str]) -> dict[str, Rows]:
    return {kind: sampled(paths[kind]) for kind in KINDS} | {"noisy": sampled(paths["qwen3_moe"], 0.02)}


def without_records(rows: Rows) -> Rows:
    return Rows(rows.row_ids, rows.group_ids, rows.table().drop_columns([ROUTED_EXPERTS]))


def sent(trainer: PolicyTrainer) -> list[list[Tensor]]:
    """What each layer's experts are called with from now on, `[tokens, K]` a call."""
    layers = [one for one in trainer.model.modules() if type(one).__name__.endswith("MoeExperts")]
    calls: list[list[Tensor]] = [[] for _ in layers]
    for layer, noted in zip(layers, calls, strict=True):
        layer.register_forward_pre_hook(lambda _, arguments, noted=noted: noted.append(arguments[1].clone()))
    return calls


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_records_the_experts_of_all_tokens_but_the_last(
    kind: str, paths: dict[str, str], rows_of: dict[str, Rows]
) -> None:
    lm, rows = AutoModelForCausalLM.from_pretrained(paths[kind]), rows_of[kind]
    columns = (rows.lists("prompt_ids"), rows.lists("response_ids"), rows.arrays(ROUTED_EXPERTS))
    for prompt, response, records in zip(*columns, strict=True):
        with torch.no_grad():
            logits = lm(torch.tensor([prompt + response]), output_router_logits=True).router_logits
        expected = torch.stack([one.topk(2, dim=-1).indices for one in logits], dim=1)[:-1]
        assert records.dtype == np.uint8
        assert records.reshape(-1, 2, 2).tolist() == expected.tolist()


def test_samples_of_a_group_share_what_was_read_of_the_prompt(paths: dict[str, str]) -> None:
    engine = engine_of(paths["mixtral"])
    sampling = Sampling(max_tokens=12, seed=1, stop=tuple("aeiou02468"))
    some = engine.generate_group(PROMPTS[0], 4, sampling)
    assert len({len(one.token_ids) for one in some}) > 1  # some end before others
    assert [len(one.routed_experts) for one in some] == [4 * (5 + len(one.token_ids) - 1) for one in some]
    assert len({one.routed_experts[: 4 * 5] for one in some}) == 1
    alone = engine.generate_group(PROMPTS[0], 1, sampling)
    assert alone[0].routed_experts == some[0].routed_experts


@pytest.mark.parametrize("kind", KINDS)
def test_with_the_same_weights_replay_changes_no_bit(
    make_trainer: Make, weights_of: Make, kind: str, paths: dict[str, str], rows_of: dict[str, Rows]
) -> None:
    rows = rows_of[kind]
    found = []
    for some in (rows, without_records(rows)):
        trainer = make_trainer(path=paths[kind], lr=1e-2)
        trainer.replay_experts()
        trainer.check_scores()
        found.append((trainer.update(some, sft_loss).metrics, weights_of(trainer)))
    assert found[0][0] == found[1][0]
    assert_same(found[0][1], found[1][1])


@pytest.mark.parametrize(
    "changes", [{}, {"packing": "always"}, {"activation_checkpointing": True}, {"max_tokens_per_microbatch": 30}]
)
def test_every_token_goes_where_the_engine_sent_it(
    make_trainer: Make, paths: dict[str, str], rows_of: dict[str, Rows], changes: dict[str, Any]
) -> None:
    rows = rows_of["noisy"]
    trainer = make_trainer(path=paths["qwen3_moe"], **changes)
    trainer.replay_experts()
    calls = sent(trainer)
    trainer.logprobs(rows)
    with_records = trainer.update(rows, sft_loss).metrics["mismatch/logprob_abs_mean"]
    times = 3 if "activation_checkpointing" in changes else 2  # forward, and forward, maybe again in backward
    records = np.concatenate([one.reshape(-1, 2, 2) for one in rows.arrays(ROUTED_EXPERTS)])
    for number, noted in enumerate(calls):
        found = torch.cat(noted).tolist()
        for pair in {tuple(pair) for pair in records[:, number].tolist()}:
            expected = times * (records[:, number] == pair).all(axis=1).sum()
            assert found.count(list(pair)) >= expected  # and some of last tokens and of padding
        assert len(found) >= times * len(records)
    plain = make_trainer(path=paths["qwen3_moe"], **changes)
    without = plain.update(without_records(rows), sft_loss).metrics["mismatch/logprob_abs_mean"]
    assert with_records < 0.7 * without


def test_turns_of_a_trajectory_are_read_with_the_experts_of_each(make_trainer: Make, paths: dict[str, str]) -> None:
    """Two turns as one sequence, against each as a row of its own, which both have the engine's experts."""
    engine, turns, prompt = engine_of(paths["qwen3_moe"], 0.1), [], PROMPTS[0]
    for number in range(2):
        (said,) = engine.generate_group(prompt, 1, Sampling(max_tokens=8, seed=number, ignore_eos=True))
        turns.append(
            replace(turn(number, prompt, said.token_ids), logprobs=said.logprobs, routed_experts=said.routed_experts)
        )
        prompt = [*prompt, *said.token_ids, 11, 12]
    together = Rows.from_lists(row_columns([Trajectory(turns)]))
    columns = {"prompt_ids": [one.prompt_ids for one in turns], "response_ids": [one.output_ids for one in turns]}
    alone = Rows.from_lists(columns | {ROUTED_EXPERTS: [np.frombuffer(one.routed_experts, np.uint8) for one in turns]})
    trainer = make_trainer(path=paths["qwen3_moe"])
    trainer.replay_experts()
    found = trainer.logprobs(together)[0]
    np.testing.assert_allclose(found, np.concatenate(trainer.logprobs(alone)), atol=2e-5)
    assert np.abs(np.concatenate(trainer.logprobs(without_records(alone))) - found).max() > 1e-2


@pytest.mark.parametrize("engine", ["zero3"], indirect=True)
def test_deepspeed_replays_experts_as_fsdp_does(
    make_trainer: Make, weights_of: Make, paths: dict[str, str], rows_of: dict[str, Rows]
) -> None:
    found = []
    for options in ({"activation_checkpointing": True}, {"engine": "fsdp"}):
        trainer = make_trainer(path=paths["qwen3_moe"], lr=1.0, eps=1.0, clip_norm=0.0, **options)
        trainer.replay_experts()
        trainer.check_scores()
        mismatch = trainer.update(rows_of["noisy"], sft_loss).metrics["mismatch/logprob_abs_mean"]
        found.append((mismatch, weights_of(trainer)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4)
    for name, weight in found[1][1].items():
        torch.testing.assert_close(found[0][1][name], weight, atol=1e-5, rtol=0, msg=name)


def test_a_row_alone_goes_token_by_token_where_the_engine_sent_it(
    make_trainer: Make, paths: dict[str, str], rows_of: dict[str, Rows]
) -> None:
    rows, others = rows_of["noisy"], 0
    trainer = make_trainer(path=paths["qwen3_moe"])
    trainer.replay_experts()
    for position, records in enumerate(rows.arrays(ROUTED_EXPERTS)):
        expected_LMK = records.reshape(-1, 2, 2)
        for replays in (True, False):
            calls = sent(trainer)
            row = rows.select([position])
            trainer.logprobs(row if replays else without_records(row))
            found_LMK = torch.stack([noted[0] for noted in calls], dim=1).numpy()[:-1]
            assert not replays or (found_LMK == expected_LMK).all()
        others += int((found_LMK != expected_LMK).any(axis=(1, 2)).sum())
    assert others > 3  # tokens that it would have sent elsewhere


def test_records_lie_at_the_places_of_their_tokens(
    make_trainer: Make, paths: dict[str, str], rows_of: dict[str, Rows]
) -> None:
    """By a model whose own routers would choose the other experts everywhere."""
    rows = rows_of["mixtral"]
    records = [3 - one for one in rows.arrays(ROUTED_EXPERTS)]
    found = []
    for packing in ("never", "always"):
        trainer = make_trainer(path=paths["mixtral"], packing=packing)
        trainer.replay_experts()
        found.append(trainer.logprobs(rows.with_column(ROUTED_EXPERTS, records)))
    for position in range(len(rows)):
        alone = trainer.logprobs(rows.with_column(ROUTED_EXPERTS, records).select([position]))[0]
        np.testing.assert_allclose(found[0][position], alone, atol=2e-5)
        np.testing.assert_allclose(found[1][position], alone, atol=2e-5)
        assert np.abs(trainer.logprobs(without_records(rows).select([position]))[0] - alone).max() > 0.1


def test_routers_get_the_gradient_of_the_experts_that_are_replayed() -> None:
    """One layer in float64 against its formula, for experts that its router would not choose."""
    torch.manual_seed(0)
    sizes = SIZES | {"dtype": "float64", "num_hidden_layers": 1}
    config = Qwen3MoeConfig(**sizes, num_experts=4, moe_intermediate_size=8, norm_topk_prob=True)
    config._experts_implementation = "eager"  # the grouped products of the others are not for float64
    lm = Qwen3MoeForCausalLM(config).double()
    layer, hidden_NH = lm.model.layers[0].mlp, torch.randn(6, 32, dtype=torch.float64)
    own = (hidden_NH @ layer.gate.weight.T).topk(2, dim=-1).indices
    experts_NK = (own + 1) % 4
    routers = Routers(lm)
    routers.follow(experts_NK.to(torch.int16))
    slopes_NH = torch.randn(6, 32, dtype=torch.float64)
    parameters = [layer.gate.weight, layer.experts.gate_up_proj, layer.experts.down_proj]
    output_NH = layer(hidden_NH.unsqueeze(0))[0]
    found = torch.autograd.grad((output_NH * slopes_NH).sum(), parameters)

    expected_NH = torch.zeros_like(hidden_NH)
    chances_NE = torch.softmax(hidden_NH @ layer.gate.weight.T, dim=-1)
    for token, experts in enumerate(experts_NK.tolist()):
        total = sum(chances_NE[token, expert] for expert in experts)
        for expert in experts:
            gate, up = (layer.experts.gate_up_proj[expert] @ hidden_NH[token]).chunk(2)
            said = layer.experts.down_proj[expert] @ (nn.functional.silu(gate) * up)
            expected_NH[token] += chances_NE[token, expert] / total * said
    expected = torch.autograd.grad((expected_NH * slopes_NH).sum(), parameters)
    # The model's softmax is in float32.
    torch.testing.assert_close(output_NH, expected_NH, atol=0, rtol=1e-5)
    for one, other in zip(found, expected, strict=True):
        assert other.abs().max() > 0.01
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert found[0].abs().max() > 0.01


def test_more_than_256_experts_take_two_bytes_each() -> None:
    config = Qwen3MoeConfig(
        **SIZES | {"num_hidden_layers": 3}, num_experts=300, moe_intermediate_size=2, mlp_only_layers=[1]
    )
    lm = Qwen3MoeForCausalLM(config)
    shape = RoutingShape.of(lm)
    assert (shape.layers, shape.num_experts, shape.record_bytes) == ((0, 2), 300, 8)
    experts_NMK = torch.randint(300, (5, 2, 2))
    experts_NMK[0, 0] = torch.tensor([299, 7])
    records = shape.records(experts_NMK.numpy())
    assert records[0, :4].tolist() == [299 - 256, 1, 7, 0]
    routers = Routers(lm)
    routers.follow(torch.from_numpy(records).to(torch.int16))
    for number, layer in enumerate(shape.layers):
        _, _, chosen = lm.model.layers[layer].mlp.gate(torch.randn(5, 32))
        assert chosen.equal(experts_NMK[:, number])


def test_tokens_that_no_engine_has_read_go_where_the_router_sends_them() -> None:
    lm = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=8))
    router, hidden = lm.model.layers[0].mlp.gate, torch.randn(3, 32)
    _, weights, own = router(hidden)
    routers = Routers(lm)
    records = torch.tensor([[0, 1, 2, 3], [-1] * 4, [2, 0, 1, 3]], dtype=torch.int16)
    routers.follow(records)
    _, replayed_weights, replayed = router(hidden)
    assert replayed.tolist() == [[0, 1], own[1].tolist(), [2, 0]]
    assert replayed_weights[1].equal(weights[1])
    routers.follow(None)
    assert router(hidden)[2].equal(own)


def test_records_of_another_model_are_refused(
    make_trainer: Make, paths: dict[str, str], rows_of: dict[str, Rows]
) -> None:
    rows = rows_of["mixtral"]
    trainer = make_trainer(path=paths["mixtral"])
    trainer.replay_experts()
    doubled = [np.repeat(one, 2) for one in rows.arrays(ROUTED_EXPERTS)]
    with pytest.raises(DataError, match=r"record has 8 bytes.* 2 layers of 2 experts, 4 bytes"):
        trainer.logprobs(rows.with_column(ROUTED_EXPERTS, doubled))
    cut = [one[:-1] for one in rows.arrays(ROUTED_EXPERTS)]
    with pytest.raises(DataError, match=r"column 'routed_experts' has .* bytes for"):
        trainer.logprobs(rows.with_column(ROUTED_EXPERTS, cut))


def test_a_dense_model_is_refused_by_the_key(make_trainer: Make, model_path: str) -> None:
    message = r"rollout\.router_replay: Qwen2ForCausalLM has no routers"
    with pytest.raises(ConfigError, match=message):
        make_trainer().replay_experts()
    engine = HfEngine(EngineSpec(RolloutConfig(engine="hf", router_replay=True), model_path))
    with pytest.raises(ConfigError, match=message):
        engine.open_model()


def test_routers_that_weigh_in_another_way_are_refused(make_trainer: Make, paths: dict[str, str]) -> None:
    trainer = make_trainer(path=paths["mixtral"])
    trainer.replay_experts()
    trainer.check_scores()
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    for output in (logits, (logits, torch.tensor([[0.7, 0.2]]), torch.tensor([[2, 1]]))):
        with pytest.raises(ConfigError, match=r"router_replay: Identity does not weigh its experts by the softmax"):
            check_weights(nn.Identity(), output)


def test_a_configuration_on_disk_tells_the_routers(paths: dict[str, str]) -> None:
    shape = RoutingShape.of_path(paths["qwen3_moe"])
    assert (shape.layers, shape.num_experts, shape.num_chosen, shape.record_bytes) == ((0, 1), 4, 2, 4)
