"""The log-probabilities of models of all kinds are those by the logits of their own forward, or the models are refused:
none is computed wrongly without a word."""

from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from penstock.conf.errors import ConfigError, ModelError
from penstock.workers.trainer.models import packed_attention
from penstock.workers.trainer.models.language_model import PolicyModel, check_scores, logit_change, without_dropout
from penstock.workers.trainer.models.token_scores import LogitChange
from penstock.workers.trainer.ranks import Ranks

PLAIN = (
    "biogpt", "deepseek_v3", "falcon", "gemma", "gpt2", "gpt_neox", "gpt_oss", "llama", "mamba", "mistral", "mixtral",
    "olmo2", "opt", "phi3", "qwen2", "qwen3", "qwen3_moe",
)  # fmt: skip
CHANGED = ("cohere", "falcon_h1", "gemma2", "granite", "inkling_text", "nanochat", "recurrent_gemma", "xlstm")
REFUSED = {
    "bert": "nats a token away",  # a layer before the output layer
    "llama4_text": "does not tell its layers",
    "modernbert-decoder": "nats a token away",
    "prophetnet": "nats a token away",  # its layers' states are of two streams
    "rembert": "an output layer for 1664",
}
SIZES: dict[str, Any] = {
    "hidden_size": 32, "n_embd": 32, "d_model": 32, "dim": 32, "embedding_size": 32, "word_embed_proj_dim": 32,
    "lru_width": 32, "attn_hidden_size": 32,
    "intermediate_size": 48, "n_inner": 48, "ffn_dim": 48, "decoder_ffn_dim": 48, "encoder_ffn_dim": 48,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "decoder_layers": 2, "encoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_attention_heads": 4, "num_key_value_heads": 2,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_num_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    "mamba_d_state": 8, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "state_size": 8,
    "rotary_dim": 4, "attention_window": 8, "max_position_embeddings": 64, "n_positions": 64,
    "vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "is_decoder": True,
    "lm_head_multiplier": 0.3, "logits_scaling": 4.0, "logits_mup_width_multiplier": 4.0,
}  # fmt: skip
"""Sizes by the names that configurations have for them."""
HEADS = ({"head_dim": 8}, {"num_key_value_heads": 4})
"""Further sizes; the second, of models whose heads share latent keys and values (DeepSeek)."""
MOST_PARAMETERS = 3_000_000
NOT_BUILT = (
    ArithmeticError, AttributeError, ImportError, LookupError, RuntimeError, StrictDataclassError, TypeError,
    ValueError,
)  # fmt: skip
"""Errors of transformers where sizes do not go together."""


def tiny(kind: str, **others: Any) -> Any:
    """A model of a kind, with random weights whose logits are some units large."""
    known = CONFIG_MAPPING[kind]().to_dict()
    config = CONFIG_MAPPING[kind](**{name: size for name, size in (SIZES | others).items() if name in known})
    config._attn_implementation = "eager"
    config = without_dropout(config)
    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if num_parameters > MOST_PARAMETERS:
        raise ValueError(f"{num_parameters} parameters")
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in lm.parameters():
            if parameter.ndim > 1:
                parameter.mul_(10)
    return lm.train()


IDS = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def own_logprobs(lm: Any) -> Tensor:
    """Log-probabilities of all tokens but the rows' first, from the logits that `lm` returns."""
    logprobs = torch.log_softmax(lm(input_ids=IDS, use_cache=False).logits[:, :-1].float(), dim=-1)
    return logprobs.gather(2, IDS[:, 1:, None]).flatten()


def assert_same_or_refused(lm: Any, ranks: Ranks) -> PolicyModel:
    """Raises `ModelError` if the model is refused."""
    expected = own_logprobs(lm)
    model = PolicyModel(lm, chunk_mib=0.001)
    check_scores(model, model, torch.float32, ranks)
    positions = torch.arange(IDS.numel()).view(IDS.shape)[:, :-1].flatten()
    with torch.no_grad():
        logprobs, _ = model(IDS, positions, IDS[:, 1:].flatten())
    torch.testing.assert_close(logprobs, expected, atol=1e-3, rtol=1e-4)
    return model


@pytest.mark.parametrize("kind", [*PLAIN, pytest.param("rwkv", marks=pytest.mark.real)])  # it asks for a compiler
def test_logprobs_are_those_of_the_models_own_logits(kind: str, ranks: Ranks) -> None:
    lm = tiny(kind, **HEADS[kind == "deepseek_v3"])
    assert logit_change(lm.config) == LogitChange()
    assert_same_or_refused(lm, ranks)


@pytest.mark.parametrize("kind", CHANGED)
def test_logits_that_the_model_scales_or_caps_are_so_here_and_refused_if_not(kind: str, ranks: Ranks) -> None:
    model = assert_same_or_refused(tiny(kind, head_dim=8), ranks)
    assert model.lm.get_output_embeddings().change != LogitChange()
    model.lm.get_output_embeddings().change = LogitChange()
    with pytest.raises(ModelError, match=rf"of {type(model.lm).__name__} are .* nats a token away"):
        check_scores(model, model, torch.float32, ranks)


@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_do_something_else_are_refused_by_name(kind: str, ranks: Ranks) -> None:
    with pytest.raises(ModelError, match=rf"(?s)(ForCausalLM|LMHeadModel).*{REFUSED[kind]}"):
        assert_same_or_refused(tiny(kind, head_dim=8), ranks)


@pytest.mark.parametrize("kind", ["afmoe", "cohere2", "deepseek_v3", "gemma2", "phi3"])
def test_packed_rows_have_the_logprobs_of_rows_as_the_model_takes_them(kind: str, ranks: Ranks) -> None:
    assert packed_and_checked(kind, ranks)


def test_a_model_that_would_compute_packed_rows_otherwise_is_refused(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for what a kind of model may do of its own: it counts positions through the whole row."""
    taken = packed_attention.keywords
    monkeypatch.setattr(packed_attention, "keywords", lambda *these: taken(*these) | {"position_ids": None})
    with pytest.raises(ModelError, match=r"set trainer\.packing=never, if it is packed rows that differ"):
        packed_and_checked("gpt2", ranks)


@pytest.mark.parametrize("kind", ["doge", "nemotron"])
def test_a_model_that_makes_masks_of_its_own_is_refused_by_name(kind: str, ranks: Ranks) -> None:
    with pytest.raises(ConfigError, match=r"Attention does not hand on .* Set trainer\.packing=never"):
        packed_and_checked(kind, ranks)


def packed_and_checked(kind: str, ranks: Ranks) -> bool:
    lm = tiny(kind, **HEADS[kind == "deepseek_v3"])
    lm.set_attn_implementation("sdpa")
    model = PolicyModel(lm)
    packs = packed_attention.choose(lm, "always")
    check_scores(model, model, torch.float32, ranks, packs)
    return packs


def test_a_model_that_draws_at_random_while_it_trains_is_refused(ranks: Ranks) -> None:
    lm = tiny("gpt2")
    lm.transformer.drop.p = 0.1
    model = PolicyModel(lm)
    with pytest.raises(ModelError, match="GPT2LMHeadModel draws at random while it trains"):
        check_scores(model, model, torch.float32, ranks)


def test_a_router_that_draws_experts_is_refused_and_its_noise_is_off(ranks: Ranks) -> None:
    """Where no token is sent elsewhere by chance its values show nothing."""
    with pytest.raises(ModelError, match="PhimoeForCausalLM draws at random while it trains"):
        assert_same_or_refused(tiny("phimoe"), ranks)
    assert without_dropout(CONFIG_MAPPING["mixtral"](router_jitter_noise=0.1)).router_jitter_noise == 0.0
    assert without_dropout(CONFIG_MAPPING["opt"](layerdrop=0.1)).layerdrop == 0.0


@pytest.mark.real  # transformers asks for `ninja --version`
@pytest.mark.soak
def test_every_kind_that_can_be_built_tiny_is_computed_rightly_or_refused(ranks: Ranks) -> None:
    found: dict[str, dict[str, str]] = {"same": {}, "refused": {}, "not built": {}, "wrong": {}}
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        is_, why = outcome(kind, ranks)
        found[is_][kind] = why
    for name, kinds in found.items():
        print(f"{name}, {len(kinds)}: {', '.join(kinds)}" if name == "same" else f"{name}, {len(kinds)}:")
        print("".join(f"  {kind}: {why}\n" for kind, why in kinds.items() if why))
    assert not found["wrong"]
    assert len(found["same"]) > 110
    assert len(found["refused"]) > 10


def outcome(kind: str, ranks: Ranks) -> tuple[str, str]:
    """Whether a kind is computed as its own forward does, and if not, why not."""
    why = ""
    for others in (*HEADS, {}):
        try:
            lm = tiny(kind, **others)
            own_logprobs(lm)
        except NOT_BUILT as error:
            why = why or f"{type(error).__name__}: {' '.join(str(error).split())}"[:150]
            continue
        try:
            assert_same_or_refused(lm, ranks)
        except ModelError as refusal:
            return "refused", str(refusal)[:150]
        except AssertionError as error:
            return "wrong", str(error)
        return "same", ""
    return "not built", why
