"""What of vLLM's engine may be set: all but what Penstock sets, and what would break a promise."""

import pytest

from penstock.conf.errors import ConfigError
from penstock.conf.rollout import BROKEN, OWN_KEYS, QUANTIZED_ONLINE, RolloutConfig
from penstock.orchestrator.configuration.compose import load_config


def test_options_come_from_the_command_line_as_they_are() -> None:
    words = ["rollout.engine_options={kv_cache_dtype: fp8, max_num_batched_tokens: 8192}"]
    options = load_config(["recipe=arithmetic", *words]).rollout.engine_options
    assert options == {"kv_cache_dtype": "fp8", "max_num_batched_tokens": 8192}


@pytest.mark.parametrize("name", OWN_KEYS)
def test_what_a_key_sets_is_refused_with_that_key(name: str) -> None:
    with pytest.raises(ConfigError, match=f"rollout.engine_options.{name}=7: set {OWN_KEYS[name]} instead"):
        RolloutConfig(engine_options={name: 7})


@pytest.mark.parametrize("name", BROKEN)
def test_what_would_break_a_promise_is_refused_with_the_promise(name: str) -> None:
    with pytest.raises(ConfigError, match=f"rollout.engine_options.{name}=x: cannot be set: "):
        RolloutConfig(engine_options={name: "x"})


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
def test_engines_whose_weights_were_quantized_before_cannot_take_publications(method: str) -> None:
    with pytest.raises(ConfigError, match=f"quantization={method}: .* cannot take publications.*online quantization"):
        RolloutConfig(engine_options={"quantization": method})
    for online in (*QUANTIZED_ONLINE, None):
        RolloutConfig(engine_options={"quantization": online})


def test_what_an_engine_holds_has_the_bytes_of_its_precision() -> None:
    def sizes(dtype: str = "bfloat16", **options: str) -> tuple[float, ...]:
        found = RolloutConfig(dtype=dtype, engine_options=dict(options)).precision
        return found.computed, found.linear, found.experts, found.cache

    assert sizes() == (2, 2, 2, 2)
    assert sizes("float32") == (4, 4, 4, 4)
    assert sizes(quantization="fp8_per_channel") == (2, 1, 1, 2)
    assert sizes(quantization="fp8", kv_cache_dtype="fp8_e4m3") == (2, 1, 1, 1)
    assert sizes(quantization="int8_per_channel_weight_only") == (2, 2, 1, 2)
    assert sizes(quantization="nvfp4_per_token", kv_cache_dtype="nvfp4") == (2, 2, 9 / 16, 9 / 16)
    assert sizes(quantization="online") == (2, 2, 2, 2)


def test_chunked_prefill_is_for_gpus() -> None:
    options = {"enable_chunked_prefill": True}
    with pytest.raises(ConfigError, match="seeded"):
        RolloutConfig(engine_options=options)
    assert RolloutConfig(engine_options=options, num_gpus_per_worker=1).engine_options == options


def test_other_engines_have_none() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.engine=hf"):
        RolloutConfig(engine="hf", engine_options={"kv_cache_dtype": "fp8"})
