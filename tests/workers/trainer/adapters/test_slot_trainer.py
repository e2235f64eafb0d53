"""Adapters that take turns, on one rank. On two: `test_two_ranks.py`."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock.conf.errors import ConfigError, DataError
from penstock.conf.trainer import TrainerConfig
from penstock.workers.protocols import AdamParams, AdapterSpec, AdapterState, Datum, LossCall
from penstock.workers.trainer.slot_trainer import SlotTrainer, initial_a, with_slot
from tests.workers.trainer.adapters.conftest import MAX_RANK, assert_equal, data_of

Make = Callable[..., SlotTrainer]
SPEC = AdapterSpec(rank=4, seed=7, alpha=12)
LOSS = LossCall("cross_entropy")
PARAMS = AdamParams(learning_rate=1e-2, eps=1e-8, weight_decay=0.1, grad_clip_norm=0.5)
INPUTS = ("weights", "logprobs", "advantages", "sequence_ratio_mask", "clip_low_threshold", "clip_high_threshold")


def train(trainer: SlotTrainer, name: str, seeds: range) -> None:
    for seed in seeds:
        trainer.forward(name, data_of(seed), LOSS, backward=True)
        trainer.step(name, PARAMS)


def plain_model(path: str, state: AdapterState) -> Any:
    """PEFT's own model with an adapter of that state."""
    spec = state.spec
    names = {name.split(".lora_")[0].removeprefix("base_model.model.") for name in state.weights()}
    lm = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = get_peft_model(lm, PeftConfig(r=spec.rank, lora_alpha=spec.alpha, target_modules=sorted(names)))
    values = {
        name.replace(".lora_A.", ".lora_A.default.").replace(".lora_B.", ".lora_B.default."): torch.from_numpy(value)
        for name, value in state.weights().items()
    }
    own = dict(model.named_parameters())
    assert values.keys() == {name for name, parameter in own.items() if parameter.requires_grad}
    with torch.no_grad():
        for name, value in values.items():
            own[name].copy_(value)
    return model


def plain_logprobs(model: Any, datum: Datum) -> Tensor:
    """Log-probabilities `[T, K]` by whole logits."""
    logits = model(torch.from_numpy(datum.token_ids.astype(np.int64))[None]).logits[0]
    targets = torch.from_numpy(datum.targets).reshape(len(datum.token_ids), -1)
    return logits.log_softmax(-1).gather(1, targets)


def plain_loss(name: str, config: dict[str, float], logprobs: Tensor, datum: Datum) -> Tensor:
    """The formulas of the documentation, a datum at a time."""
    columns = {key: torch.from_numpy(value).reshape(logprobs.shape) for key, value in datum.columns.items()}
    weights = columns.get("weights", torch.ones_like(logprobs))
    if name == "cross_entropy":
        return -(weights * logprobs).sum()
    q, advantages = columns["logprobs"], columns["advantages"]
    low = columns.get("clip_low_threshold", torch.tensor(config.get("clip_low_threshold", 0.8)))
    high = columns.get("clip_high_threshold", torch.tensor(config.get("clip_high_threshold", 1.2)))
    ratio = (logprobs - q).exp()
    if name == "gspo":
        chosen = columns["sequence_ratio_mask"] != 0
        mean = (logprobs.detach() - q)[chosen].mean() if chosen.any() else torch.zeros(())
        ratio = (mean + logprobs - logprobs.detach()).exp()
    clipped = torch.clamp(ratio, low.expand(ratio.shape), high.expand(ratio.shape))
    objective = {
        "importance_sampling": ratio * advantages,
        "ppo": torch.minimum(ratio * advantages, clipped * advantages),
        "gspo": torch.minimum(ratio * advantages, clipped * advantages),
        "cispo": clipped.detach() * logprobs * advantages,
        "dro": logprobs * advantages - 0.5 * config.get("beta", 0.05) * (logprobs - q) ** 2,
    }[name]
    return -(weights * objective).sum()


@pytest.mark.parametrize(
    ("name", "config", "inputs", "width"),
    [
        ("cross_entropy", {}, (), None),
        ("cross_entropy", {}, ("weights",), 3),
        ("importance_sampling", {}, INPUTS[:3], None),
        ("ppo", {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1}, INPUTS[1:3], None),
        ("ppo", {}, (*INPUTS[1:3], *INPUTS[4:]), 2),
        ("cispo", {"clip_high_threshold": 2.0}, INPUTS[1:3], None),
        ("dro", {"beta": 0.3}, INPUTS[:3], None),
        ("gspo", {"clip_low_threshold": 0.9}, INPUTS[1:4], None),
    ],
)
@pytest.mark.parametrize("chunk_mib", [128.0, 0.002])
def test_scores_and_gradients_of_each_loss_are_those_of_a_plain_loop(
    make_slot: Make, model_path: str, name: str, config: dict[str, float], inputs: tuple[str, ...], width: Any,
    chunk_mib: float,
) -> None:  # fmt: skip
    """Logits whole and in tiles; the output layer has an adapter, and the rank is smaller than the slot's."""
    trainer = make_slot(logprob_chunk_mib=chunk_mib, max_tokens_per_microbatch=60)
    trainer.create("mine", SPEC)
    train(trainer, "mine", range(2))
    start = trainer.state("mine")
    assert start is not None
    data = data_of(9, names=inputs, width=width)
    output = trainer.forward("mine", data, LossCall(name, config), backward=True)
    found = trainer.state("mine")
    assert found is not None

    model = plain_model(model_path, start)
    total = torch.zeros(())
    for datum, logprobs in zip(data, output.logprobs, strict=True):
        expected = plain_logprobs(model, datum)
        assert logprobs.shape == datum.targets.shape
        np.testing.assert_allclose(logprobs.reshape(expected.shape), expected.detach().numpy(), atol=2e-6)
        total = total + plain_loss(name, config, expected, datum)
    total.backward()
    assert output.metrics["loss"] == pytest.approx(total.item(), rel=1e-5)
    gradients = {
        key.replace(".default", ""): value.grad for key, value in model.named_parameters() if value.grad is not None
    }
    assert any("lm_head" in key for key in gradients)
    for key, gradient in gradients.items():
        bound = 1e-6 * max(1.0, float(gradient.abs().max()))
        ours = torch.from_numpy(found.tensors[f"gradients/{key}"])
        torch.testing.assert_close(ours, gradient, atol=bound, rtol=0, msg=key)


def test_an_adapter_beside_others_gets_the_bits_that_it_gets_alone(make_slot: Make) -> None:
    alone = make_slot()
    alone.create("a", SPEC)
    train(alone, "a", range(3))
    alone.forward("a", data_of(3), LOSS, backward=True)
    together = make_slot()
    other = AdapterSpec(rank=MAX_RANK, seed=1, train_mlp=False)
    together.create("b", other)
    together.create("a", SPEC)
    for seed in range(3):
        together.forward("a", data_of(seed), LOSS, backward=True)
        together.forward("b", data_of(seed + 50), LOSS, backward=True)
        together.forward("b", data_of(seed + 60), LOSS, backward=False)
        together.step("a", PARAMS)
        together.step("b", replace(PARAMS, learning_rate=1e-1, beta1=0.5))
    together.forward("a", data_of(3), LOSS, backward=True)
    together.forward("b", data_of(70), LOSS, backward=True)
    assert_equal(together.state("a"), alone.state("a"))


def test_an_adapter_goes_on_from_its_state_bit_for_bit(make_slot: Make) -> None:
    first = make_slot()
    first.create("a", SPEC)
    train(first, "a", range(2))
    first.forward("a", data_of(2), LOSS, backward=True)
    state = first.state("a")
    second = make_slot()
    second.create("other", AdapterSpec(rank=1))
    second.create("a", SPEC, state)
    second.create("more", AdapterSpec(rank=2))
    assert_equal(second.state("a"), state)
    for trainer in (first, second):
        trainer.forward("a", data_of(3), LOSS, backward=True)
        trainer.step("a", PARAMS)
        train(trainer, "a", range(4, 6))
    assert_equal(second.state("a"), first.state("a"))


def test_a_state_for_sampling_starts_a_new_optimizer(make_slot: Make) -> None:
    trainer = make_slot()
    trainer.create("a", SPEC)
    train(trainer, "a", range(2))
    state = trainer.state("a")
    assert state is not None
    trainer.create("b", SPEC, state.for_sampling())
    fresh = trainer.state("b")
    assert fresh is not None
    assert fresh.num_steps == 0
    assert_equal(fresh.for_sampling(), state.for_sampling())
    assert all(not value.any() for key, value in fresh.tensors.items() if key.startswith("exp_avg"))


def test_first_values_depend_on_seed_and_rank_alone(make_slot: Make) -> None:
    one, other = make_slot(), make_slot(rank=5)
    one.create("first", replace(SPEC, seed=1))
    one.create("a", SPEC)
    other.create("a", SPEC)
    expected = one.state("a")
    assert_equal(other.state("a"), expected)
    assert expected is not None
    for name, values in expected.weights().items():
        if ".lora_A." in name:
            assert np.array_equal(values, initial_a(name, values.shape, SPEC.seed))
            assert 0.5 / np.sqrt(values.shape[1]) < np.abs(values).max() <= 1 / np.sqrt(values.shape[1])
        else:
            assert not values.any()


@pytest.mark.parametrize(
    ("left_out", "word"), [("train_attn", "self_attn"), ("train_mlp", ".mlp."), ("train_unembed", "lm_head")]
)
def test_layers_that_an_adapter_leaves_out_stay_as_they_are(make_slot: Make, left_out: str, word: str) -> None:
    trainer = make_slot()
    spec = replace(SPEC, **{left_out: False})
    trainer.create("before", replace(SPEC, rank=MAX_RANK))
    train(trainer, "before", range(2))
    trainer.create("a", spec)
    train(trainer, "a", range(2))
    state = trainer.state("a")
    assert state is not None
    assert not any(word in name for name in state.tensors)
    for part in trainer.slot.parts:
        if word in part.name:
            assert not part.parameter.full_tensor().any(), part.name
            assert not trainer.engine.optimizer.state[part.parameter]["exp_avg_sq"].full_tensor().any()


def test_a_smaller_adapter_leaves_the_rest_of_the_slot_zero(make_slot: Make) -> None:
    trainer = make_slot()
    trainer.create("before", replace(SPEC, rank=MAX_RANK))
    train(trainer, "before", range(2))
    trainer.create("a", SPEC)
    train(trainer, "a", range(3))
    for part in trainer.slot.parts:
        whole = part.parameter.full_tensor()
        rest = whole[SPEC.rank :] if part.is_a else whole[:, SPEC.rank :]
        assert rest.numel()
        assert not rest.any(), part.name


@pytest.mark.parametrize("is_tied", [True, False])
def test_tied_embeddings_are_adapted_at_the_head_alone(
    make_slot: Make, model_path: str, tmp_path: Path, is_tied: bool
) -> None:
    lm = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    assert lm.lm_head.weight is lm.model.embed_tokens.weight
    if not is_tied:
        lm.config.tie_word_embeddings = False
        lm.lm_head.weight = torch.nn.Parameter(lm.lm_head.weight.detach() * 1.1)
    path = str(tmp_path / "model")
    lm.save_pretrained(path)
    trainer = make_slot(path=path)
    trainer.create("a", SPEC)
    train(trainer, "a", range(3))
    trainer.check_scores()
    state, data = trainer.state("a"), data_of(9)
    assert state is not None
    assert state.tensors["weights/base_model.model.lm_head.lora_B.weight"].any()
    model = plain_model(path, state)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == is_tied
    for datum, ours in zip(data, trainer.forward("a", data, None, backward=False).logprobs, strict=True):
        np.testing.assert_allclose(ours, plain_logprobs(model, datum).detach().numpy()[:, 0], atol=2e-6)


def test_gradients_add_up_over_calls_and_a_step_clears_them(make_slot: Make) -> None:
    trainer = make_slot()
    trainer.create("a", SPEC)
    data = data_of(0, count=6)
    trainer.forward("a", data, LOSS, backward=True)
    whole = trainer.state("a")
    trainer.create("b", SPEC)
    trainer.forward("b", data[:2], LOSS, backward=True)
    trainer.forward("b", data[2:], LOSS, backward=True)
    parts = trainer.state("b")
    assert whole is not None
    assert parts is not None
    for name, values in whole.tensors.items():
        np.testing.assert_allclose(parts.tensors[name], values, atol=1e-5, err_msg=name)
    norm = np.sqrt(sum(np.square(v).sum() for name, v in whole.tensors.items() if name.startswith("gradients/")))
    assert trainer.step("a", PARAMS) == {"grad_norm": pytest.approx(norm, rel=1e-5), "skipped_nonfinite": 0.0}
    stepped = trainer.state("a")
    assert stepped is not None
    assert not any(name.startswith("gradients/") for name in stepped.tensors)


def test_a_step_is_that_of_torch_with_the_numbers_of_the_call(make_slot: Make) -> None:
    """The second one has no gradients: those of 0, as torch takes them."""
    trainer = make_slot()
    trainer.create("a", SPEC)
    trainer.forward("a", data_of(0), LOSS, backward=True)
    start = trainer.state("a")
    assert start is not None
    parameters = {name: torch.nn.Parameter(torch.from_numpy(value)) for name, value in start.weights().items()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=3e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2)
    for name, parameter in parameters.items():
        parameter.grad = torch.from_numpy(start.tensors[f"gradients/{name}"])
    torch.nn.utils.clip_grad_norm_(parameters.values(), 0.1)
    params = AdamParams(3e-2, 0.8, 0.9, 1e-6, 0.2, 0.1)
    for number in range(2):
        optimizer.step()
        trainer.step("a", params)
        found = trainer.state("a")
        assert found is not None
        assert found.num_steps == number + 1
        for name, parameter in parameters.items():
            assert parameter.grad is not None
            parameter.grad.zero_()
            np.testing.assert_allclose(found.weights()[name], parameter.detach().numpy(), atol=1e-6, err_msg=name)


def test_a_norm_that_is_not_finite_changes_nothing(make_slot: Make) -> None:
    trainer = make_slot()
    trainer.create("a", SPEC)
    train(trainer, "a", range(2))
    before = trainer.state("a")
    data = data_of(3, names=("logprobs", "advantages"))
    data = [replace(one, columns=one.columns | {"logprobs": one.columns["logprobs"] - 200}) for one in data]
    trainer.forward("a", data, LossCall("importance_sampling"), backward=True)
    metrics = trainer.step("a", PARAMS)
    assert not np.isfinite(metrics["grad_norm"])
    assert metrics["skipped_nonfinite"] == 1.0
    assert_equal(trainer.state("a"), before)


def test_what_others_ask_changes_no_score(make_slot: Make) -> None:
    """Micro-batches are cut by request alone, and a pass without gradients gives the bits of one with them."""
    trainer = make_slot(max_tokens_per_microbatch=40)
    trainer.create("a", SPEC)
    train(trainer, "a", range(2))
    first = trainer.forward("a", data_of(5), None, backward=False).logprobs
    trainer.create("b", replace(SPEC, rank=1))
    train(trainer, "b", range(2))
    again = trainer.forward("a", data_of(5), LOSS, backward=True).logprobs
    assert all(map(np.array_equal, first, again))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (LossCall("stable_reinforce"), "no loss 'stable_reinforce'"),
        (LossCall("cross_entropy", {"beta": 1.0}), "no setting 'beta'"),
        (LossCall("ppo", {"clip_low_threshold": 2.0}), "is above clip_high_threshold"),
        (LossCall("dro"), "datum 0: loss 'dro' needs the input 'logprobs'"),
        (LossCall("gspo"), "needs the input"),
    ],
)
def test_what_a_loss_does_not_know_is_refused_by_name(make_slot: Make, call: LossCall, text: str) -> None:
    trainer = make_slot()
    trainer.create("a", SPEC)
    with pytest.raises(DataError, match=text):
        trainer.forward("a", data_of(0), call, backward=True)
    before = trainer.state("a")
    assert before is not None
    assert not any(name.startswith("gradients/") for name in before.tensors)


def test_arguments_that_cannot_work_are_refused(make_slot: Make) -> None:
    trainer = make_slot()
    trainer.create("mine", SPEC)
    with pytest.raises(DataError, match=r"no adapter 'mime'; did you mean 'mine'"):
        trainer.step("mime", PARAMS)
    with pytest.raises(DataError, match=r"rank 9: ranks from 1 to 8 .* serve\.max_rank"):
        trainer.create("large", AdapterSpec(rank=9))
    with pytest.raises(DataError, match="eps above 0"):
        trainer.step("mine", replace(PARAMS, eps=0.0))
    state = trainer.state("mine")
    with pytest.raises(DataError, match=r"of another model or rank"):
        trainer.create("other", replace(SPEC, rank=3), state)
    with pytest.raises(ConfigError, match=r"trainer\.engine=deepspeed"):
        with_slot(TrainerConfig(engine="deepspeed"), 4)
    trainer.drop("mine")
    trainer.drop("mine")
    with pytest.raises(DataError, match="no adapter 'mine'"):
        trainer.state("mine")


@pytest.mark.parametrize(
    ("tokens", "targets", "text"),
    [
        ([], [], "Give at least one"),
        ([5, 6], [7], "for 2 tokens"),
        ([5, 600], [7, 8], "token ids from 5 to 600"),
        ([5, 6], [7, -1], "targets from -1 to 7"),
        ([5] * 65, [5] * 65, "more than the model's 64 positions"),
    ],
)
def test_a_datum_that_does_not_fit_the_model_is_refused(
    make_slot: Make, tokens: list[int], targets: list[int], text: str
) -> None:
    trainer = make_slot()
    trainer.create("a", SPEC)
    datum = Datum(np.asarray(tokens, np.int32), np.asarray(targets, np.int64))
    with pytest.raises(DataError, match=f"datum 1.*{text}"):
        trainer.forward("a", [*data_of(0, count=1), datum], LOSS, backward=True)
