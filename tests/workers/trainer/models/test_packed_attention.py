"""Rows one after the other are computed as each alone, by every kind of model that is not refused."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import modeling_flash_attention_utils
from transformers.modeling_flash_attention_utils import _lazy_define_process_function

from penstock.conf.errors import ConfigError
from penstock.workers.trainer.models import packed_attention
from penstock.workers.trainer.models.language_model import hidden_states
from penstock.workers.trainer.update.token_layout import Blocks, mask_of

SIZES = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
WINDOW = {"sliding_window": 3}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen2": {"use_sliding_window": True, "max_window_layers": 1} | WINDOW,
    "Qwen3": {},
    "Qwen3Moe": EXPERTS,
    "Llama": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
    "Mistral": WINDOW,
    "Mixtral": EXPERTS | WINDOW,
    "Gemma3": {"query_pre_attn_scalar": 4} | WINDOW,
    "Phi3": WINDOW,
    "Olmo2": {},
    "Olmo3": WINDOW,
    "Granite": {},
    "SmolLM3": {"no_rope_layer_interval": 2},
    "Starcoder2": WINDOW,
    "GPTNeoX": {},
    "Qwen2Moe": {"use_sliding_window": True, "max_window_layers": 1} | EXPERTS | WINDOW,
    "GPTBigCode": {"n_embd": 16, "n_layer": 2, "n_head": 4},
    "OPT": {"ffn_dim": 24, "word_embed_proj_dim": 16},
}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3Next": ("linear_attention", {}),
    "FalconH1": ("hybrid", {}),
    "Lfm2": ("conv", {"layer_types": ["conv", "full_attention"]}),
    "Llama4": ("chunked_attention", {}),
    "RecurrentGemma": ("recurrent", {}),
}
TOLERANCE = {"Gemma3": 1e-5}
"""Its norms compute in float32, whatever the dtype."""
LENGTHS = [9, 5, 5, 1]


def make(kind: str, options: dict[str, Any]) -> Any:
    """A tiny model of random weights, in float64."""
    named = {"Gemma3": "Gemma3TextConfig", "Llama4": "Llama4TextConfig"}
    config = getattr(transformers, named.get(kind, f"{kind}Config"))(**(SIZES | options))
    torch.manual_seed(1)
    model = getattr(transformers, f"{kind}ForCausalLM")
    return model._from_config(
        config, dtype=torch.float64, attn_implementation="sdpa", experts_implementation="eager"
    ).eval()


def answers(lm: Any, ids: Tensor, blocks: Blocks | None = None) -> tuple[Tensor, Tensor]:
    """Log-probabilities `[T]` of each place's own token's successor in the vocabulary, and entropies `[T]`."""
    hidden_TH = hidden_states(lm, ids, torch.arange(ids.numel()), blocks)
    logprobs_TV = lm.get_output_embeddings()(hidden_TH).log_softmax(-1)
    targets_T1 = (ids.view(-1, 1) + 1) % logprobs_TV.shape[1]
    return logprobs_TV.gather(1, targets_T1).squeeze(1), -(logprobs_TV.exp() * logprobs_TV).sum(-1)


def gradients(lm: Any, logprobs: Tensor, entropy: Tensor) -> dict[str, Tensor]:
    lm.zero_grad()
    (logprobs * torch.linspace(-1, 1, len(logprobs), dtype=torch.float64) + entropy).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in lm.named_parameters() if parameter.grad is not None}


def rows() -> list[Tensor]:
    random = torch.Generator().manual_seed(2)
    return [torch.randint(3, 39, (1, length), generator=random) for length in LENGTHS]


@pytest.mark.parametrize("kind", MODELS)
def test_packed_rows_have_the_answers_and_gradients_of_rows_alone(kind: str) -> None:
    lm, tolerance = make(kind, MODELS[kind]), TOLERANCE.get(kind, 1e-9)
    alone = [torch.cat(parts) for parts in zip(*(answers(lm, ids) for ids in rows()), strict=True)]
    expected = gradients(lm, *alone)
    assert packed_attention.choose(lm, "always")
    packed = answers(lm, torch.cat(rows(), dim=1), Blocks.of(LENGTHS))
    for ours, theirs in zip(packed, alone, strict=True):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0)
    found = gradients(lm, *packed)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=tolerance, rtol=0, msg=name)


@pytest.mark.parametrize("kind", REFUSED)
def test_layers_that_would_see_the_row_before_are_refused_by_name(kind: str) -> None:
    layers, options = REFUSED[kind]
    lm = make(kind, options)
    with pytest.raises(ConfigError, match=rf"packing=always: .* has layers \({layers}.* Set trainer\.packing=never"):
        packed_attention.choose(lm, "always")


def test_eager_attention_is_refused_and_says_what_is_not() -> None:
    lm = make("Qwen2", {})
    lm.set_attn_implementation("eager")
    with pytest.raises(ConfigError, match=r"packed for sdpa and flash_attention_2, and model\.attention=eager"):
        packed_attention.choose(lm, "always")
    assert not packed_attention.choose(lm, "auto")


def test_sdpa_stays_padded_unless_packing_is_asked_for() -> None:
    lm = make("Qwen2", {})
    assert not packed_attention.choose(lm, "auto")
    assert not packed_attention.choose(lm, "never")
    assert lm.config._attn_implementation == "sdpa"


def test_a_model_that_keeps_the_blocks_to_itself_is_refused() -> None:
    lm = make("Qwen2", {})
    packed_attention.choose(lm, "always")
    with pytest.raises(ConfigError, match="Qwen2Attention does not hand on"):
        lm(torch.ones(1, 3, dtype=torch.int64))


@pytest.mark.parametrize("kind", ["Qwen2", "Mistral"])
def test_flash_attention_is_told_where_rows_begin(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own way to the kernel, with a stand-in for the kernel."""
    lm = make(kind, MODELS[kind])
    alone = [torch.cat(parts) for parts in zip(*(answers(lm, ids) for ids in rows()), strict=True)]
    functions = (None, varlen, None, None, None), (_lazy_define_process_function(varlen), dict)
    monkeypatch.setattr(modeling_flash_attention_utils, "lazy_import_flash_attention", lambda *_, **__: functions)
    lm.config._attn_implementation_internal = "flash_attention_2"
    assert packed_attention.choose(lm, "auto")
    packed = answers(lm, torch.cat(rows(), dim=1), Blocks.of(LENGTHS))
    for ours, theirs in zip(packed, alone, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=0)


def varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), deterministic: bool = False,
) -> Tensor:  # fmt: skip
    """What `flash_attn_varlen_func` computes, `[T, heads, D]` each, on a CPU."""
    assert causal
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    bounds = cu_seqlens_q.tolist()
    assert max_seqlen_q == max_seqlen_k == max(end - start for start, end in pairwise(bounds))
    outputs = []
    for start, end in pairwise(bounds):
        queries, keys, values = (one[start:end].transpose(0, 1) for one in (q, k, v))
        mask = mask_of(end - start, window_size[0] + 1 or None, q.device)
        output = torch.nn.functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=softmax_scale, enable_gqa=True
        )
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs)
