"""Engines that sample from many adapters by their names, against plain transformers; each test holds for both."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.conf.errors import ConfigError, DataError, PromptRefused, UnknownAdapter
from penstock.conf.model import FreshModelConfig
from penstock.workers.fresh_model import character_tokenizer
from penstock.workers.protocols import AdapterLimits, AdapterState, SampleCall, SampleOutput, Sampling
from penstock.workers.rollout.engine_vllm_adapters import servable_layers
from tests.mixtures import build_mixture
from tests.workers.rollout.adapter_states import adapter_state, logprobs_after, model_with, said_of
from tests.workers.rollout.conftest import VLLM, EngineUnderTest

PROMPT = [20, 14, 21, 32, 50, 7, 7, 61]
SAMPLING = Sampling(temperature=0.8, max_tokens=12, seed=5, ignore_eos=True)
CALL = SampleCall(PROMPT, 3, SAMPLING)
LIMITS = AdapterLimits(max_rank=8, max_loaded=2)
HF_NEAR = {"atol": 1e-6, "rtol": 1e-6}
NEAR = {"hf": HF_NEAR, "vllm": {"atol": 1e-4}}


class Adapting(EngineUnderTest):
    """One with the adapters a (rank 4) and b (rank 8), and what transformers makes of them."""

    limits = LIMITS

    def __init__(self, name: str, model_path: Path, root: Path) -> None:
        super().__init__(name, model_path, root)
        self.near = NEAR[name]
        self.states = {"a": adapter_state(model_path, 1), "b": adapter_state(model_path, 2, rank=8, alpha=8)}
        self.models = {key: model_with(model_path, state) for key, state in (("base", None), *self.states.items())}
        for key, state in self.states.items():
            self.call(self.engine.add_adapter(key, state))

    def sample(self, adapter: str | None, call: SampleCall) -> SampleOutput:
        output: SampleOutput = self.call(self.engine.sample(adapter, call))
        return output

    def model_of(self, adapter: str | None) -> Any:
        return self.models[adapter or "base"]


@pytest.fixture(scope="module", params=["hf", pytest.param("vllm", marks=VLLM)])
def served(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if request.param == "vllm":
        pytest.importorskip("vllm", reason="vLLM is not installed: its engine is not tested")
        request.getfixturevalue("warm_spawn")
    subject = Adapting(request.param, tiny_model, tmp_path_factory.mktemp("adapting"))
    yield subject
    subject.close()


def bits(output: SampleOutput) -> list[Any]:
    prompt = None if output.prompt_logprobs is None else output.prompt_logprobs.tobytes()
    return [prompt, *((sample.token_ids, sample.logprobs, sample.finish_reason) for sample in output.samples)]


@pytest.mark.real
def test_samples_have_the_logprobs_of_their_adapter_and_of_no_other(served: Adapting) -> None:
    for adapter, other in ((None, "a"), ("a", "b"), ("b", "a")):
        for sample in served.sample(adapter, CALL).samples:
            said = said_of(served.model_of(adapter), PROMPT, sample.token_ids, 0.8)
            wrong = said_of(served.model_of(other), PROMPT, sample.token_ids, 0.8)
            np.testing.assert_allclose(sample.logprobs, said, **served.near)
            assert np.abs(sample.logprobs - wrong).max() > 0.1


@pytest.mark.real
def test_adapters_are_served_side_by_side(served: Adapting) -> None:
    async def together() -> list[SampleOutput]:
        return await asyncio.gather(*(served.engine.sample(adapter, CALL) for adapter in (None, "a", "b", "a", None)))

    for adapter, output in zip((None, "a", "b", "a", None), served.call(together()), strict=True):
        for sample in output.samples:
            said = said_of(served.model_of(adapter), PROMPT, sample.token_ids, 0.8)
            np.testing.assert_allclose(sample.logprobs, said, **served.near)


@pytest.mark.real
def test_a_prompt_is_scored_at_temperature_one(served: Adapting) -> None:
    targets = np.array([[3, -1], [4, 5], [-1, -1], [6, 7], [8, 9], [1, 1], [2, 98]])
    call = replace(CALL, prompt_logprobs=True, topk_prompt_logprobs=4, target_prompt_ids=targets)
    for adapter in (None, "a", "b"):
        for _ in range(2):  # again where vLLM has the prefix in its cache
            output = served.sample(adapter, call)
            rows = logprobs_after(served.model_of(adapter), PROMPT)
            assert output.prompt_logprobs is not None
            assert output.prompt_logprobs.dtype == np.float32
            assert np.isnan(output.prompt_logprobs[0])
            said = rows[:-1].gather(-1, torch.tensor(PROMPT[1:])[:, None])[:, 0].numpy()
            np.testing.assert_allclose(output.prompt_logprobs[1:], said, **served.near)
            assert output.top_prompt is not None
            best = rows[:-1].topk(4, -1)
            np.testing.assert_allclose(output.top_prompt.logprobs[1:], best.values.numpy(), **served.near)
            np.testing.assert_array_equal(output.top_prompt.token_ids[1:], best.indices.numpy())
            chosen = rows[:-1].gather(-1, torch.tensor(targets).clamp_min(0)).numpy()
            assert output.target_logprobs is not None
            expected = np.where(targets < 0, 0, chosen)
            np.testing.assert_allclose(output.target_logprobs, expected, **served.near)
            assert len(output.samples) == 3
            whole = served.sample(adapter, replace(CALL, vocabulary_positions=3)).vocabulary_logprobs
            np.testing.assert_allclose(whole, rows[-4:-1].numpy(), **served.near)


@pytest.mark.real
def test_prompts_of_several_adapters_are_scored_together(served: Adapting) -> None:
    prompts = [PROMPT, PROMPT[:3], PROMPT[::-1] * 2, [9, 9, 9]]
    pairs = [(adapter, prompt) for prompt in prompts for adapter in (None, "a", "b")]
    one = Sampling(max_tokens=1, seed=1)

    async def together() -> list[SampleOutput]:
        calls = (served.engine.sample(adapter, SampleCall(ids, 1, one, prompt_logprobs=True)) for adapter, ids in pairs)
        return await asyncio.gather(*calls)

    for (adapter, prompt), output in zip(pairs, served.call(together()), strict=True):
        rows = logprobs_after(served.model_of(adapter), prompt)[:-1]
        said = rows.gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0].numpy()
        assert output.prompt_logprobs is not None
        np.testing.assert_allclose(output.prompt_logprobs[1:], said, **served.near)


@pytest.mark.real
def test_the_likeliest_tokens_are_told_at_each_sampled_position(served: Adapting) -> None:
    output = served.sample("a", replace(CALL, topk_logprobs=3))
    for sample in output.samples:
        rows = logprobs_after(served.model_of("a"), PROMPT + sample.token_ids, 0.8)[len(PROMPT) - 1 : -1]
        best = rows.topk(3, -1)
        assert sample.top is not None
        assert sample.top.token_ids.shape == (12, 3)
        np.testing.assert_allclose(sample.top.logprobs, best.values.numpy(), **served.near)
        np.testing.assert_array_equal(sample.top.token_ids, best.indices.numpy())


@pytest.mark.real
def test_a_stop_token_ends_a_sample_and_is_its_last(served: Adapting) -> None:
    (whole,) = served.sample("b", replace(CALL, num_samples=1)).samples
    stop = whole.token_ids[4]
    (cut,) = served.sample("b", replace(CALL, num_samples=1, stop_ids=(stop,))).samples
    length = whole.token_ids.index(stop) + 1
    assert cut.token_ids == whole.token_ids[:length]
    assert cut.finish_reason == "stop"


@pytest.mark.real
def test_a_sample_is_cut_to_the_room_of_the_engine(served: Adapting) -> None:
    call = SampleCall([7] * 500, 1, replace(SAMPLING, max_tokens=10_000))
    (sample,) = served.sample("a", call).samples
    assert (len(sample.token_ids), sample.finish_reason) == (12, "length")
    with pytest.raises(PromptRefused, match="max_model_len"):
        served.sample("a", SampleCall([7] * 512, 1, SAMPLING))


@pytest.mark.real
def test_more_adapters_than_are_loaded_take_turns(served: Adapting) -> None:
    states = {f"c{index}": adapter_state(served.model_path, 10 + index) for index in range(5)}
    for name, state in states.items():
        served.call(served.engine.add_adapter(name, state))

    async def together() -> list[SampleOutput]:
        return await asyncio.gather(*(served.engine.sample(name, CALL) for name in (*states, "a", "b")))

    for _ in range(2):
        for name, output in zip((*states, "a", "b"), served.call(together()), strict=True):
            model = served.models.get(name) or model_with(served.model_path, states[name])
            for sample in output.samples:
                said = said_of(model, PROMPT, sample.token_ids, 0.8)
                np.testing.assert_allclose(sample.logprobs, said, **served.near)
    assert served.engine.adapters() == ["a", "b", *states]
    for name in states:
        served.call(served.engine.drop_adapter(name))


@pytest.mark.real
def test_a_dropped_adapter_is_unknown_and_its_samples_in_flight_end(served: Adapting) -> None:
    state = adapter_state(served.model_path, 30)
    served.call(served.engine.add_adapter("gone", state))

    async def scenario() -> SampleOutput:
        sampling = asyncio.create_task(served.engine.sample("gone", replace(CALL, prompt_logprobs=True)))
        await asyncio.sleep(0)
        await served.engine.drop_adapter("gone")
        await served.engine.drop_adapter("gone")
        with pytest.raises(UnknownAdapter, match="'gone': the engine does not have it"):
            await served.engine.sample("gone", CALL)
        return await sampling

    output = served.call(scenario())
    assert served.engine.adapters() == ["a", "b"]
    said = said_of(model_with(served.model_path, state), PROMPT, output.samples[0].token_ids, 0.8)
    np.testing.assert_allclose(output.samples[0].logprobs, said, **served.near)


@pytest.mark.real
def test_a_name_may_come_back_with_other_weights(served: Adapting) -> None:
    for seed in (40, 41):
        state = adapter_state(served.model_path, seed)
        served.call(served.engine.add_adapter("again", state))
        output = served.sample("again", CALL)
        said = said_of(model_with(served.model_path, state), PROMPT, output.samples[0].token_ids, 0.8)
        np.testing.assert_allclose(output.samples[0].logprobs, said, **served.near)
        served.call(served.engine.drop_adapter("again"))


@pytest.mark.real
def test_a_cancelled_call_costs_nothing_any_more(served: Adapting) -> None:
    async def scenario() -> int:
        call = SampleCall(PROMPT, 2, replace(SAMPLING, max_tokens=450))
        sampling = asyncio.create_task(served.engine.sample("a", call))
        while not served.engine.sampled().num_in_flight:
            await asyncio.sleep(0.001)
        sampling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sampling
        await served.engine.sample("b", replace(CALL, num_samples=1))  # waits for what the engine still does
        return int(served.engine.sampled().num_in_flight)

    assert served.call(scenario()) == 0


@pytest.mark.real
def test_generate_serves_the_published_weights_beside_adapters(served: Adapting) -> None:
    before = served.sample("a", CALL)
    (completion, *_) = served.call(served.engine.generate(PROMPT, 2, SAMPLING))
    said = said_of(served.model_of(None), PROMPT, completion.token_ids, 0.8)
    np.testing.assert_allclose(completion.logprobs, said, **served.near)
    assert [sample.token_ids for sample in served.sample("a", CALL).samples] == [
        sample.token_ids for sample in before.samples
    ]


def foreign(state: AdapterState) -> AdapterState:
    tensors = {name.replace("q_proj", "z_proj"): value for name, value in state.tensors.items()}
    return replace(state, tensors=tensors)


def halved(state: AdapterState) -> AdapterState:
    return replace(state, tensors={name: value[..., ::2] for name, value in state.tensors.items()})


def without_b(state: AdapterState) -> AdapterState:
    return replace(state, tensors={name: value for name, value in state.tensors.items() if "lora_B" not in name})


@pytest.mark.real
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (foreign, r"no adapter of '.*z_proj'"),
        (halved, r"do not fit its weights .* at rank 4"),
        (without_b, r"has no tensor .*lora_B.*needs A and B"),
    ],
)
def test_an_adapter_of_another_model_is_refused(served: Adapting, change: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        served.call(served.engine.add_adapter("strange", change(served.states["a"])))
    assert "strange" not in served.engine.adapters()


@pytest.mark.real
def test_a_rank_beyond_the_limit_is_refused(served: Adapting) -> None:
    with pytest.raises(DataError, match=r"rank 9 is more than serve\.max_rank=8"):
        served.call(served.engine.add_adapter("large", adapter_state(served.model_path, 3, rank=9)))


@pytest.mark.real
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_ids": [5, 9999]}, "prompt_ids: has tokens outside"),
        ({"stop_ids": [-1]}, "stop_ids: has tokens outside"),
        ({"num_samples": 0}, "num_samples=0"),
        ({"sampling": Sampling()}, "needs a sample and a seed"),
        ({"target_prompt_ids": np.zeros((3, 2), np.int64)}, r"of shape \[3, 2\], must be \[7, K\]"),
        ({"target_prompt_ids": np.full((7, 2), 9999)}, "target_prompt_ids: has tokens outside"),
        ({"topk_logprobs": -1}, "topk=0, -1"),
        ({"vocabulary_positions": 8}, "vocabulary_positions=8: must be 0, or less than the prompt's 8 tokens"),
    ],
)
def test_a_call_that_no_engine_can_answer_is_refused(served: Adapting, changes: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        served.sample("a", replace(CALL, **changes))
    assert served.sample("a", CALL).samples


def test_hf_gives_the_same_bits_whatever_was_served_in_between(tiny_model: Path, tmp_path: Path) -> None:
    served, call = Adapting("hf", tiny_model, tmp_path), replace(CALL, prompt_logprobs=True)
    alone = {adapter: bits(served.sample(adapter, call)) for adapter in (None, "a", "b")}
    for index in np.random.default_rng(3).integers(0, 4, 24):
        if index == 3:
            served.call(served.engine.generate(PROMPT, 1, SAMPLING))
        else:
            adapter = (None, "a", "b")[index]
            assert bits(served.sample(adapter, call)) == alone[adapter]
    served.close()
    again = Adapting("hf", tiny_model, tmp_path)
    assert bits(again.sample("b", call)) == alone["b"]
    again.close()


def test_hf_adds_adapters_to_the_newest_weights(tiny_model: Path, tmp_path: Path) -> None:
    served = Adapting("hf", tiny_model, tmp_path)
    served.sample("a", CALL)
    served.call(served.engine.load(served.change_weights(9)))
    served.model.save_pretrained(tmp_path / "changed")
    for adapter in (None, "a"):
        (sample, *_) = served.sample(adapter, CALL).samples
        model = model_with(tmp_path / "changed", served.states.get(adapter or ""))
        np.testing.assert_allclose(sample.logprobs, said_of(model, PROMPT, sample.token_ids, 0.8), **HF_NEAR)
    served.close()


@pytest.mark.real
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_vllm_serves_adapters_of_the_heads_of_other_families(kind: str, tmp_path: Path, warm_spawn: None) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed: its engine is not tested")
    served = Adapting("vllm", build_family(kind, tmp_path / "model"), tmp_path)
    head = {name: value for name, value in served.states["b"].tensors.items() if "lm_head" in name}
    served.states["head"] = replace(served.states["b"], tensors=head)
    served.models["head"] = model_with(served.model_path, served.states["head"])
    served.call(served.engine.add_adapter("head", served.states["head"]))
    test_samples_have_the_logprobs_of_their_adapter_and_of_no_other(served)
    test_prompts_of_several_adapters_are_scored_together(served)
    for sample in served.sample("head", CALL).samples:
        said = said_of(served.models["head"], PROMPT, sample.token_ids, 0.8)
        np.testing.assert_allclose(sample.logprobs, said, **served.near)
        assert np.abs(sample.logprobs - said_of(served.models["base"], PROMPT, sample.token_ids, 0.8)).max() > 0.1
    served.close()


def test_vllm_refuses_heads_that_it_cannot_adapt_before_it_starts(tmp_path: Path) -> None:
    path, limits = Path(build_mixture("mixtral", tmp_path)), AdapterLimits(8, 2)
    with pytest.raises(
        ConfigError, match=r"output layer of MixtralForCausalLM .*rollout\.engine=hf, or .*train_unembed"
    ):
        servable_layers(str(path), limits, on_gpu=True)
    assert "lm_head" not in servable_layers(str(path), replace(limits, head=False), on_gpu=True)
    with pytest.raises(ConfigError, match=r"has experts, and vLLM's CPU build"):
        servable_layers(str(path), limits, on_gpu=False)


def build_family(kind: str, path: Path) -> Path:
    """A tiny model with a head of its own."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        kind, vocab_size=99, num_key_value_heads=1, head_dim=32, tie_word_embeddings=False, eos_token_id=2,
        bos_token_id=1, pad_token_id=0, max_position_embeddings=1024, **sizes,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
    character_tokenizer(FreshModelConfig()).save_pretrained(path)
    return path
