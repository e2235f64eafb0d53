from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock.conf.errors import ModelError
from penstock.store.data.rows import Rows
from penstock.workers.trainer.models.language_model import PolicyModel, load_causal_lm
from penstock.workers.trainer.update import batching

TEMPERATURE = 0.7


@pytest.fixture
def batch(make_rows: Callable[..., Rows]) -> batching.MicroBatch:
    return batching.collate(make_rows(6), np.arange(6))


def plain(model: PolicyModel, batch: batching.MicroBatch) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies by whole logits."""
    logits = model.lm(input_ids=batch.input_ids_SL).logits / TEMPERATURE
    logprobs = torch.log_softmax(logits, dim=-1).flatten(0, 1)[batch.positions_N]
    return logprobs[torch.arange(len(batch.targets_N)), batch.targets_N], -(logprobs.exp() * logprobs).sum(-1)


def gradients(model: PolicyModel, value: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    value.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("chunk_mib", [1e-5, 0.002, 64])
def test_chunked_logprobs_equal_plain_ones_in_values_and_gradients(
    model_path: str, batch: batching.MicroBatch, chunk_mib: float
) -> None:
    model = PolicyModel(load_causal_lm(model_path), temperature=TEMPERATURE, chunk_mib=chunk_mib)
    expected, expected_entropy = plain(model, batch)
    weights = torch.linspace(-1, 1, len(expected))
    expected_gradients = gradients(model, (expected * weights + expected_entropy).sum())
    logprobs, entropy = model(batch.input_ids_SL, batch.positions_N, batch.targets_N, "gradient")
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-5, rtol=0)
    for name, gradient in gradients(model, (logprobs * weights + entropy).sum()).items():
        torch.testing.assert_close(gradient, expected_gradients[name], atol=1e-5, rtol=1e-5, msg=name)


def test_entropy_as_a_value_has_no_gradient(model_path: str, batch: batching.MicroBatch) -> None:
    model = PolicyModel(load_causal_lm(model_path), chunk_mib=0.001)
    logprobs, entropy = model(batch.input_ids_SL, batch.positions_N, batch.targets_N, "value")
    assert logprobs.requires_grad
    assert not entropy.requires_grad
    assert model(batch.input_ids_SL, batch.positions_N, batch.targets_N)[1] is None


def test_what_pads_on_the_right_changes_nothing(model_path: str, make_rows: Callable[..., Rows]) -> None:
    model = PolicyModel(load_causal_lm(model_path))
    rows = make_rows(6)
    together = batching.collate(rows, np.arange(6))
    together_rows = batching.split_rows(
        together, model(together.input_ids_SL, together.positions_N, together.targets_N)[0]
    )
    for position in range(6):
        alone = batching.collate(rows, np.array([position]))
        values, _ = model(alone.input_ids_SL, alone.positions_N, alone.targets_N)
        np.testing.assert_allclose(values.detach().numpy(), together_rows[position], atol=1e-5)


def test_no_tensor_of_all_tokens_and_the_vocabulary_is_kept(model_path: str, batch: batching.MicroBatch) -> None:
    model = PolicyModel(load_causal_lm(model_path), chunk_mib=0.001)
    kept: list[torch.Size] = []

    def record(tensor: Tensor) -> Tensor:
        kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        model(batch.input_ids_SL, batch.positions_N, batch.targets_N, "value")
    vocabulary = model.lm.config.vocab_size
    assert kept
    assert not [shape for shape in kept if shape[-1:] == (vocabulary,) and len(shape) == 2]


def test_the_models_own_logits_stay_what_they_were(model_path: str, batch: batching.MicroBatch) -> None:
    lm = load_causal_lm(model_path)
    names, expected = list(lm.state_dict()), lm(input_ids=batch.input_ids_SL).logits
    PolicyModel(lm)
    assert list(lm.state_dict()) == names
    assert torch.equal(lm(input_ids=batch.input_ids_SL).logits, expected)


def test_an_output_layer_that_is_more_than_linear_is_refused(model_path: str) -> None:
    lm = load_causal_lm(model_path)
    lm.set_output_embeddings(nn.Sequential(lm.get_output_embeddings()))
    with pytest.raises(ModelError, match="Sequential for an output layer"):
        PolicyModel(lm)


def test_dropout_is_off(tmp_path, model_path: str) -> None:
    lm = load_causal_lm(model_path)
    lm.config.attention_dropout = 0.5
    lm.save_pretrained(tmp_path)
    loaded = load_causal_lm(str(tmp_path))
    assert loaded.config.attention_dropout == 0.0
    assert loaded.model.layers[0].self_attn.attention_dropout == 0.0


def test_a_directory_without_a_model_is_a_model_error(tmp_path) -> None:
    with pytest.raises(ModelError, match=r"model\.path="):
        load_causal_lm(str(tmp_path))
