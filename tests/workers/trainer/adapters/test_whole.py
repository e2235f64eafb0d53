"""Whole models that take turns, on one rank. On two: `test_two_ranks.py`."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.conf.errors import DataError
from penstock.workers.protocols import WHOLE, AdamParams, AdapterSpec, AdapterState, LossCall
from penstock.workers.trainer.slot_trainer import SlotTrainer
from tests.workers.trainer.adapters.conftest import assert_equal, data_of

Make = Callable[..., SlotTrainer]
SPEC = AdapterSpec(WHOLE)
LOSS = LossCall("cross_entropy")
PARAMS = AdamParams(learning_rate=1e-3, eps=1e-3, weight_decay=0.1, grad_clip_norm=0.5)


def train(trainer: SlotTrainer, name: str, seeds: range) -> None:
    for seed in seeds:
        trainer.forward(name, data_of(seed), LOSS, backward=True)
        trainer.step(name, PARAMS)


def state_of(trainer: SlotTrainer, name: str) -> AdapterState:
    state = trainer.state(name)
    assert state is not None
    return state


@pytest.mark.parametrize("is_tied", [True, False])
def test_its_steps_are_those_of_a_plain_loop(make_slot: Make, model_path: str, tmp_path: Path, is_tied: bool) -> None:
    lm = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    if not is_tied:
        lm.config.tie_word_embeddings = False
        lm.lm_head.weight = torch.nn.Parameter(lm.lm_head.weight.detach() * 1.1)
    path = str(tmp_path / "model")
    lm.save_pretrained(path)
    trainer = make_slot(rank=WHOLE, path=path)
    trainer.create("mine", SPEC)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1)
    for seed in range(3):
        optimizer.zero_grad()
        for datum in data_of(seed):
            logits = lm(torch.from_numpy(datum.token_ids.astype(np.int64))[None]).logits[0]
            logprobs = logits.log_softmax(-1).gather(1, torch.from_numpy(datum.targets)[:, None])[:, 0]
            (-(torch.from_numpy(datum.columns["weights"]) * logprobs).sum()).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(lm.parameters(), 0.5))
        optimizer.step()
        trainer.forward("mine", data_of(seed), LOSS, backward=True)
        assert trainer.step("mine", PARAMS)["grad_norm"] == pytest.approx(norm, rel=1e-5)
    weights = state_of(trainer, "mine").weights()
    plain = dict(lm.named_parameters())
    assert weights.keys() == plain.keys()
    assert ("lm_head.weight" in weights) != is_tied
    for name, values in weights.items():
        np.testing.assert_allclose(values, plain[name].detach().numpy(), atol=2e-6, err_msg=name)


def test_it_goes_on_from_its_state_bit_for_bit_beside_another(make_slot: Make) -> None:
    first = make_slot(rank=WHOLE)
    first.create("a", SPEC)
    train(first, "a", range(2))
    first.forward("a", data_of(2), LOSS, backward=True)
    state = state_of(first, "a")
    second = make_slot(rank=WHOLE)
    second.create("other", SPEC)
    train(second, "other", range(50, 52))
    second.create("a", SPEC, state)
    for trainer in (first, second):
        trainer.step("a", PARAMS)
    second.forward("other", data_of(60), LOSS, backward=True)
    for trainer in (first, second):
        train(trainer, "a", range(4, 6))
    assert_equal(state_of(second, "a"), state_of(first, "a"))


def test_one_that_begins_has_the_base_models_weights(make_slot: Make, model_path: str) -> None:
    trainer = make_slot(rank=WHOLE)
    trainer.create("a", SPEC)
    train(trainer, "a", range(2))
    trainer.create("b", SPEC)
    base = dict(AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).named_parameters())
    state = state_of(trainer, "b")
    for name, values in state.weights().items():
        assert np.array_equal(values, base[name].detach().numpy()), name
    assert not any(values.any() for name, values in state.tensors.items() if not name.startswith("weights/"))
    assert state.num_steps == 0
    assert any(not np.array_equal(state_of(trainer, "a").weights()[name], base[name].detach()) for name in base)


def test_an_adapter_has_no_place_there(make_slot: Make) -> None:
    with pytest.raises(DataError, match="ranks from 0 to 0 are served"):
        make_slot(rank=WHOLE).create("a", AdapterSpec(4))
    with pytest.raises(DataError, match="rank 0: ranks from 1 to 8"):
        make_slot().create("a", SPEC)
