"""What the vLLM engine does with adapters, beyond what every engine does (`test_engine_contract.py`)."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, load_file
from transformers import AutoModelForCausalLM

from penstock.algorithms.losses import sft_loss
from penstock.conf.errors import ConfigError, DataError, PenstockError, WeightError
from penstock.conf.rollout import RolloutConfig
from penstock.conf.trainer import LoraConfig, OptimizerConfig, TrainerConfig
from penstock.store.data.rows import Rows
from penstock.workers.protocols import Completion, EngineSpec, Publication, Sampling
from penstock.workers.rollout.engine_vllm import adapter_arguments, engine_arguments
from penstock.workers.rollout.engine_vllm_adapters import VllmAdapterEngine
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.weights.publication.adapter import adapted_layers, adapter_layout, tensor_name
from tests.mixtures import build_mixture
from tests.publications import write_publication
from tests.workers.rollout.fake_llm import FakeLLM, fail, is_serving

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("warm_spawn")]
pytest.importorskip("vllm", reason="vLLM is not installed: its engine is not tested")

LORA = LoraConfig(rank=4, alpha=12, publish="adapter")
PROMPT = [20, 14, 21, 32, 50]


class FakeAdapterLLM(FakeLLM):
    """Keeps the requests by which adapters came, and the bytes that it found there."""

    def __init__(self, **troubles: Any) -> None:
        super().__init__(**troubles)
        self.added: list[tuple[Any, bytes]] = []

    def get_tokenizer(self) -> None:
        return None

    async def add_lora(self, request: Any) -> bool:
        await self._do("add")
        self.added.append((request, (Path(request.lora_path) / "adapter_model.safetensors").read_bytes()))
        return True

    async def update_weight_version(self, version: str) -> None:
        self.version = version
        await self._do("set version")

    def shutdown(self) -> None:
        pass


@pytest.fixture
def publications(tiny_model: Path, tmp_path: Path) -> Iterator[Publication]:
    """Adapters of the tiny model, versions 1, 2, ..."""
    return (adapter_of(tiny_model, tmp_path, LORA, version) for version in range(1, 9))


def adapter_of(model: Path, root: Path, config: LoraConfig, version: int = 1) -> Publication:
    places = adapter_layout(adapted_layers(str(model), config), config, "float32").tensors
    return write_publication(root, version, [(place.name, torch.full(place.shape, version / 9)) for place in places])


def made(llm: FakeAdapterLLM, model: Path, *, in_flight: int = 0, policies: tuple[str, ...] = ()) -> VllmAdapterEngine:
    """An engine as `start` leaves it, around `llm`."""
    engine = VllmAdapterEngine(EngineSpec(RolloutConfig(), str(model), adapter=LORA, policies=policies))
    engine._build = lambda: setattr(engine, "llm", llm)  # type: ignore[method-assign]
    asyncio.run(engine._create())
    llm.calls.clear()
    engine.num_in_flight = in_flight
    return engine


def test_the_first_adapter_is_zeros_under_the_version_of_the_start(tiny_model: Path) -> None:
    llm = FakeAdapterLLM()
    made(llm, tiny_model)
    ((request, data),) = llm.added
    layout = adapter_layout(adapted_layers(str(tiny_model), LORA), LORA, "float32")
    assert (request.lora_int_id, request.load_inplace) == (1, False)
    assert data == layout.header + bytes(layout.num_bytes - len(layout.header))


def test_a_mixture_whose_experts_the_cpu_build_cannot_compute_is_refused(tmp_path: Path) -> None:
    llm, path = FakeAdapterLLM(), Path(build_mixture("mixtral", tmp_path))
    with pytest.raises(ConfigError, match=r"publish=adapter: Mixtral.* has experts, .*publish=merged or rollout\.e"):
        made(llm, path)
    assert llm.added == []


def test_a_load_in_flight_replaces_the_adapter_while_nothing_runs(
    tiny_model: Path, publications: Iterator[Publication]
) -> None:
    llm, publication = FakeAdapterLLM(), next(publications)
    engine = made(llm, tiny_model, in_flight=1)
    asyncio.run(engine.load(publication))
    assert llm.calls == ["pause", "add", "set version", "version", "resume"]
    request, data = llm.added[-1]
    assert (request.lora_int_id, request.load_inplace) == (1, True)
    assert data == (Path(publication.directory) / "model.safetensors").read_bytes()


def test_an_idle_engine_forgets_cached_prefixes(tiny_model: Path, publications: Iterator[Publication]) -> None:
    llm = FakeAdapterLLM()
    asyncio.run(made(llm, tiny_model).load(next(publications)))
    assert llm.calls == ["reset", "add", "set version", "version"]


def test_requests_name_the_one_adapter_and_the_place_of_its_version(
    tiny_model: Path, publications: Iterator[Publication]
) -> None:
    engine = made(FakeAdapterLLM(), tiny_model)
    requests = [engine._lora_request()]
    for _ in range(2):
        asyncio.run(engine.load(next(publications)))
        requests.append(engine._lora_request())
    assert {(request.lora_name, request.lora_int_id, request.load_inplace) for request in requests} == {
        ("policy", 1, False)
    }
    assert [Path(request.lora_path).name for request in requests] == ["v00000000", "v00000001", "v00000002"]


def test_only_the_served_version_is_kept_and_none_after_the_end(
    tiny_model: Path, publications: Iterator[Publication]
) -> None:
    engine = made(FakeAdapterLLM(), tiny_model)
    for _ in range(3):
        asyncio.run(engine.load(next(publications)))
    folder = Path(engine._lora_request().lora_path)
    assert list(folder.parent.iterdir()) == [folder]
    asyncio.run(engine.close())
    assert not folder.parent.exists()


def test_each_policy_has_a_number_and_a_place_of_its_own(tiny_model: Path, tmp_path: Path) -> None:
    llm, policies = FakeAdapterLLM(), ("solver", "proposer")
    engine = made(llm, tiny_model, policies=policies)
    places = adapter_layout(adapted_layers(str(tiny_model), LORA), LORA, "float32").tensors
    tensors = {
        f"{policy}/{place.name}": torch.full(place.shape, 1.0 + number)
        for number, policy in enumerate(policies)
        for place in places
    }
    asyncio.run(engine.load(write_publication(tmp_path, 1, tensors.items())))
    assert llm.calls == ["reset", "add", "add", "set version", "version"]
    found = [(one.lora_name, one.lora_int_id, one.load_inplace, Path(one.lora_path).name) for one, _ in llm.added]
    of_start = [(policy, 1 + number, False, policy) for number, policy in enumerate(policies)]
    assert found == of_start + [(name, number, True, place) for name, number, _, place in of_start]
    for number, (request, data) in enumerate(llm.added[2:]):
        weights = load(data)
        assert weights.keys() == {place.name for place in places}
        assert all((one == 1.0 + number).all() for one in weights.values())
        asked = engine._lora_request(policies[number])
        assert (asked.lora_int_id, asked.lora_path) == (request.lora_int_id, request.lora_path)
    with pytest.raises(DataError, match=r"policy '': the engine has solver and proposer"):
        engine._lora_request()
    assert engine_arguments(engine._spec)["max_loras"] == 2


def other_rank(model: Path, root: Path) -> Publication:
    return adapter_of(model, root, LoraConfig(rank=8))


def other_targets(model: Path, root: Path) -> Publication:
    return adapter_of(model, root, LoraConfig(rank=4, target_modules=["q_proj"]))


def whole_model(model: Path, root: Path) -> Publication:
    return write_publication(root, 1, load_file(model / "model.safetensors").items())


def other_widths(model: Path, root: Path) -> Publication:
    name = "model.layers.0.self_attn.q_proj"
    return write_publication(
        root, 1, [(tensor_name(name, "A"), torch.ones(4, 3)), (tensor_name(name, "B"), torch.ones(3, 4))]
    )


@pytest.mark.parametrize(
    ("publish", "message"),
    [
        (other_rank, r"not of rank 4, .*trainer\.lora\.rank"),
        (other_targets, r"not an adapter of the layers \['all-linear'\] of .*trainer\.lora\.target_modules"),
        (other_widths, r"not an adapter of the layers .*model\.path"),
        (whole_model, r"no part of an adapter, .*trainer\.lora\.publish"),
    ],
)
def test_what_is_not_this_models_adapter_never_reaches_vllm(
    tiny_model: Path, tmp_path: Path, publish: Any, message: str
) -> None:
    llm = FakeAdapterLLM()
    engine = made(llm, tiny_model, in_flight=1)
    with pytest.raises(WeightError, match=message):
        asyncio.run(engine.load(publish(tiny_model, tmp_path)))
    assert llm.calls == []
    assert is_serving(engine)


@pytest.mark.parametrize(("phase", "serves"), [("pause", True), ("add", False), ("set version", False)])
def test_a_failure_from_loading_on_marks_the_engine_broken(
    tiny_model: Path, publications: Iterator[Publication], phase: str, serves: bool
) -> None:
    llm = FakeAdapterLLM()
    engine = made(llm, tiny_model, in_flight=1)
    llm.troubles[phase] = fail
    with pytest.raises(PenstockError, match=r"version 1, phase .*: the worker says: cannot"):
        asyncio.run(engine.load(next(publications)))
    assert is_serving(engine) == serves
    if serves:
        assert Path(engine._lora_request().lora_path).name == "v00000000"


def test_layers_that_vllm_serves_no_adapter_for_are_refused_at_the_start(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.lora\.publish=adapter: vLLM cannot serve .*the worker says: cann"):
        made(FakeAdapterLLM(add=fail), tiny_model)


@pytest.mark.parametrize(("rank", "room"), [(1, 8), (8, 8), (9, 16), (65, 128), (512, 512)])
def test_vllm_makes_room_for_the_next_larger_rank(rank: int, room: int) -> None:
    assert adapter_arguments(rank, 1)["max_lora_rank"] == room


# With a real engine and a trainer


def rows_of(completions: list[Completion]) -> Rows:
    return Rows.from_lists(
        {
            "prompt_ids": [PROMPT] * len(completions),
            "response_ids": [completion.token_ids for completion in completions],
            "behavior_logprobs": [completion.logprobs for completion in completions],
        }
    )


def assert_says(completions: list[Completion], expected: list[np.ndarray]) -> None:
    for completion, logprobs in zip(completions, expected, strict=True):
        np.testing.assert_allclose(completion.logprobs, logprobs, atol=1e-4)


@torch.no_grad()
def logprobs_of_model(directory: Path | str, completions: list[Completion]) -> list[np.ndarray]:
    """Log-probabilities by a HF model on disk."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    results = []
    for completion in completions:
        logits = model(torch.tensor([PROMPT + completion.token_ids])).logits[0, len(PROMPT) - 1 : -1]
        chosen = torch.tensor(completion.token_ids)[:, None]
        results.append(logits.log_softmax(-1).gather(-1, chosen)[:, 0].numpy())
    return results


def test_versions_in_turn_say_what_the_trainer_says_and_what_merged_weights_say(
    tiny_model: Path, tmp_path: Path
) -> None:
    config = TrainerConfig(lora=LORA, optimizer=OptimizerConfig(lr=1e-2))
    trainer = PolicyTrainer(config, str(tiny_model))
    sampling = Sampling(max_tokens=24, seed=5, ignore_eos=True)

    async def scenario() -> None:
        config = RolloutConfig(max_model_len=128, kv_cache_gib=0.25)
        engine = VllmAdapterEngine(EngineSpec(config, str(tiny_model), adapter=LORA))
        await engine.start()
        try:
            before = await engine.generate(PROMPT, 4, sampling)
            assert_says(before, trainer.logprobs(rows_of(before)))
            assert_says(before, logprobs_of_model(tiny_model, before))
            for version in (1, 2):
                for _ in range(3):
                    trainer.update(rows_of(before), sft_loss)
                old = trainer.logprobs(rows_of(before))
                assert np.abs(old[0] - before[0].logprobs).max() > 0.1, "training changed next to nothing"
                await engine.load(trainer.publish(str(tmp_path / "weights"), version))
                after = await engine.generate(PROMPT, 4, sampling)
                assert {token for completion in after for token in completion.versions} == {version}
                assert_says(after, trainer.logprobs(rows_of(after)))
                trainer.export(str(tmp_path / f"merged_{version}"))
                assert_says(after, logprobs_of_model(tmp_path / f"merged_{version}", after))
                before = after
        finally:
            await engine.close()

    asyncio.run(scenario())
    trainer.close()


def test_a_sequence_in_flight_since_before_the_first_adapter_goes_on_under_it(tiny_model: Path, tmp_path: Path) -> None:
    trainer = PolicyTrainer(TrainerConfig(lora=LORA, optimizer=OptimizerConfig(lr=3e-2)), str(tiny_model))

    async def scenario() -> Completion:
        config = RolloutConfig(max_model_len=512, kv_cache_gib=0.25)
        engine = VllmAdapterEngine(EngineSpec(config, str(tiny_model), adapter=LORA))
        await engine.start()
        try:
            sampling = Sampling(max_tokens=480, seed=5, ignore_eos=True)
            (first,) = await engine.generate(PROMPT, 1, Sampling(max_tokens=16, seed=5, ignore_eos=True))
            for _ in range(4):
                trainer.update(rows_of([first]), sft_loss)
            publication = trainer.publish(str(tmp_path), 1)
            group = asyncio.create_task(engine.generate(PROMPT, 1, sampling))
            await asyncio.sleep(0.3)
            await engine.load(publication)
            return (await group)[0]
        finally:
            await engine.close()

    completion = asyncio.run(scenario())
    assert set(completion.versions) == {0, 1}
    switch = completion.versions.index(1)
    (new,), (old,) = trainer.logprobs(rows_of([completion])), logprobs_of_model(tiny_model, [completion])
    np.testing.assert_allclose(completion.logprobs[:switch], old[:switch], atol=1e-4)
    np.testing.assert_allclose(completion.logprobs[switch:], new[switch:], atol=1e-4)
    assert np.abs(old - new)[switch:].max() > 0.1
    trainer.close()
