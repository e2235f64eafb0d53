"""Ranks over gloo that split the work in the ways that a configuration can ask for, against one rank that does it
all."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from penstock.conf.model import FreshModelConfig
from penstock.conf.trainer import TrainerConfig
from penstock.workers.fresh_model import build_fresh_model
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.trainer.training_state import TrainingState
from penstock.workers.weights.checkpoint_form import STACKS
from tests.mixtures import build_mixture
from tests.model_files import load_model
from tests.rank_processes import run_ranks
from tests.workers.trainer.conftest import put_together
from tests.workers.trainer.several_ranks import ranks_parallel as ranks

pytestmark = pytest.mark.real
FRESH = FreshModelConfig(
    num_layers=2, hidden_size=32, intermediate_size=48, num_heads=8, num_kv_heads=4, max_position_embeddings=64
)
LARGE = FreshModelConfig(num_layers=10, hidden_size=640, intermediate_size=1760, num_heads=10, num_kv_heads=2)
EVERY = [(number, scenario) for number, some in ranks.SCENARIOS.items() for scenario in some]
CASES = [case for case in EVERY if "bfloat16" not in case[1]]
SHARE = "actor/shared_share"
Several = Callable[[int], Path]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models")
    build_fresh_model(path / "qwen2", FRESH, seed=3)
    like = json.loads((path / "qwen2" / "config.json").read_text())
    names = ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "num_key_value_heads")
    config = Qwen3Config(
        **{name: like[name] for name in names}, num_hidden_layers=2, head_dim=4, max_position_embeddings=64
    )
    torch.manual_seed(4)
    Qwen3ForCausalLM(config).save_pretrained(path / "qwen3")
    build_mixture("mixtral", path / "mixtral")
    build_fresh_model(path / "large", LARGE, seed=5)
    return str(path)


@pytest.fixture(scope="module")
def several(models: str, tmp_path_factory: pytest.TempPathFactory, warm_python: list[str]) -> Several:
    """The directory of what so many processes wrote; they start where a test first asks for them."""
    made: dict[int, Path] = {}

    def of(num_ranks: int) -> Path:
        if num_ranks not in made:
            made[num_ranks] = tmp_path_factory.mktemp(f"ranks{num_ranks}")
            run_ranks([*warm_python, "-m", ranks.__name__], num_ranks, models, made[num_ranks])
        return made[num_ranks]

    return of


@pytest.fixture(scope="module")
def one(models: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("one")
    ranks.run(0, 1, None, models, directory)
    return directory


def result(directory: Path, scenario: str, rank: int = 0) -> dict[str, Any]:
    return torch.load(directory / f"{scenario}.{rank}.pt", weights_only=False)


def weights(directory: Path, scenario: str) -> dict[str, torch.Tensor]:
    return load_file(directory / scenario / "v00000001" / "model.safetensors")


def exported_of(directory: Path, scenario: str) -> Path:
    """The exported model, of two policies the first one's."""
    exported = directory / scenario / "exported"
    return exported / "a" if "two_policies" in scenario else exported


def single_experts(published: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Published weights as streams and exports have them: a tensor for each weight of an expert, in place of stacks."""
    parts_of, single = {stack: parts for parts, stack in STACKS.items()}, {}
    for name, tensor in published.items():
        prefix, _, stack = name.rpartition(".")
        if stack not in parts_of:
            single[name] = tensor
            continue
        for number, expert in enumerate(tensor):
            parts = parts_of[stack]
            for part, weight in zip(parts, expert.chunk(len(parts)), strict=True):
                single[f"{prefix}.{number}.{part}.weight"] = weight
    return single


def assert_same(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float) -> None:
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(ours[name], tensor, atol=atol, rtol=0, msg=name)


@pytest.mark.parametrize(("num_ranks", "scenario"), CASES)
def test_weights_after_an_update_are_those_of_one_rank(
    one: Path, several: Several, num_ranks: int, scenario: str
) -> None:
    assert_same(weights(several(num_ranks), scenario), weights(one, scenario), atol=2e-6)


@pytest.mark.parametrize(("num_ranks", "scenario"), [case for case in EVERY if case not in CASES])
def test_weights_of_bfloat16_passes_are_near_those_of_one_rank(
    one: Path, several: Several, num_ranks: int, scenario: str
) -> None:
    assert_same(weights(several(num_ranks), scenario), weights(one, scenario), atol=2e-3)


@pytest.mark.parametrize(("num_ranks", "scenario"), EVERY)
def test_what_is_streamed_to_engines_is_what_is_published(several: Several, num_ranks: int, scenario: str) -> None:
    published = single_experts(weights(several(num_ranks), scenario))
    for rank in (0, num_ranks - 1):
        assert_same(result(several(num_ranks), scenario, rank)["streamed"], published, 0)


@pytest.mark.parametrize(("num_ranks", "scenario"), EVERY)
def test_what_is_exported_by_a_file_a_rank_is_what_is_published(
    several: Several, num_ranks: int, scenario: str
) -> None:
    published = single_experts(weights(several(num_ranks), scenario))
    assert_same(load_model(exported_of(several(num_ranks), scenario)), published, 0)


@pytest.mark.parametrize("num_ranks", ranks.SCENARIOS)
def test_transformers_loads_what_several_ranks_export(several: Several, num_ranks: int) -> None:
    directory = several(num_ranks) / next(iter(ranks.SCENARIOS[num_ranks])) / "exported"
    loaded, exported = AutoModelForCausalLM.from_pretrained(directory).state_dict(), load_model(directory)
    assert_same({name: loaded[name] for name in exported}, exported, 0)


@pytest.mark.parametrize(("num_ranks", "scenario"), CASES)
def test_metrics_are_those_of_one_rank_on_every_rank(
    one: Path, several: Several, num_ranks: int, scenario: str
) -> None:
    expected = result(one, scenario)["metrics"]
    for rank in range(num_ranks):
        metrics = result(several(num_ranks), scenario, rank)["metrics"]
        assert (metrics.pop(SHARE, 0.0) > 0.1) == ("shared" in scenario and "critic" not in scenario)
        metrics.pop("critic/shared_share", None)
        assert metrics.keys() == expected.keys()
        for name, value in expected.items():
            if not name.endswith("/padding_share"):  # more ranks, smaller micro-batches
                assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_what_a_critic_explains_is_of_the_rows_of_all_ranks(one: Path, several: Several) -> None:
    explained = [result(one, "critic_minibatches")["metrics"]["critic/explained_variance"]]
    for rank in range(2):
        explained.append(result(several(2), "critic_minibatches", rank)["metrics"]["critic/explained_variance"])
    assert abs(explained[0]) > 0.01
    assert explained[1:] == pytest.approx(explained[:1] * 2, rel=1e-4)


@pytest.mark.parametrize(("num_ranks", "scenario"), CASES)
@pytest.mark.parametrize("when", ["before", "after", "restored"])
def test_each_row_gets_the_answers_that_it_gets_from_one_rank(
    one: Path, several: Several, num_ranks: int, scenario: str, when: str
) -> None:
    expected = result(one, scenario)[when]
    for rank in range(num_ranks):
        ours = result(several(num_ranks), scenario, rank)[when]
        shares = ranks.share_of(rank, num_ranks, ranks.SCENARIOS[num_ranks][scenario])
        for position, values in zip(shares, ours, strict=True):
            # Sums over ranks are in another order: 20 units in the last place of a number near 8.
            np.testing.assert_allclose(values, expected[position], rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize(("num_ranks", "scenario"), EVERY)
def test_a_rank_that_leaves_by_its_kept_copy_answers_the_same(several: Several, num_ranks: int, scenario: str) -> None:
    for rank in range(num_ranks):
        found = result(several(num_ranks), scenario, rank)
        assert found["shared"] or "copies" in scenario or rank > 0
        for before, after in zip(found["restored"], found["back"], strict=True):
            np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("scenario", [name for number, name in CASES if number == 2 and "candidates" in name])
def test_each_row_gets_the_likeliest_tokens_that_it_gets_from_one_rank(
    one: Path, several: Several, scenario: str
) -> None:
    expected = result(one, scenario)["likeliest"]
    for rank in range(2):
        shares = ranks.share_of(rank, 2, ranks.SCENARIOS[2][scenario])
        own, ids, logprobs = result(several(2), scenario, rank)["likeliest"]
        for number, position in enumerate(shares):
            np.testing.assert_array_equal(ids[number], expected[1][position])
            np.testing.assert_allclose(own[number], expected[0][position], rtol=2e-6, atol=1e-5)
            np.testing.assert_allclose(logprobs[number], expected[2][position], rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("num_ranks", "scenario"), [case for case in CASES if "lora" in ranks.SCENARIOS[case[0]][case[1]]]
)
def test_the_exported_adapter_is_that_of_one_rank(one: Path, several: Several, num_ranks: int, scenario: str) -> None:
    ours, expected = (
        load_file(exported_of(directory, scenario) / "adapter" / "adapter_model.safetensors")
        for directory in (several(num_ranks), one)
    )
    assert_same(ours, expected, atol=2e-6)


@pytest.mark.parametrize(("num_ranks", "scenario"), [case for case in EVERY if "lora" in case[1]])
def test_the_adapter_that_is_published_alone_is_the_one_that_is_exported(
    several: Several, num_ranks: int, scenario: str
) -> None:
    directory = several(num_ranks) / scenario
    exported = load_file(directory / "exported" / "adapter" / "adapter_model.safetensors")
    assert_same(load_file(directory / "alone" / "v00000001" / "model.safetensors"), exported, atol=0)


@pytest.mark.parametrize(("num_ranks", "scenario"), [case for case in EVERY if "two_policies" in case[1]])
def test_each_of_two_policies_ends_with_the_bits_of_one_alone(several: Several, num_ranks: int, scenario: str) -> None:
    both, alone = (
        whole_state([result(several(num_ranks), name, rank)["state"] for rank in range(num_ranks)])
        for name in (scenario, scenario.replace("two_policies", "lora"))
    )
    published = load_file(several(num_ranks) / scenario / "alone" / "v00000001" / "model.safetensors")
    for policy in "ab":
        own = {name.replace(f".{policy}.", ".default."): one for name, one in both.items() if f".{policy}." in name}
        assert_same(own, alone, atol=0)
        adapter = several(num_ranks) / scenario / "exported" / policy / "adapter" / "adapter_model.safetensors"
        names = [name for name in published if name.startswith(f"{policy}/")]
        assert_same({name.removeprefix(f"{policy}/"): published[name] for name in names}, load_file(adapter), atol=0)


@pytest.mark.parametrize(("num_ranks", "scenario"), [case for case in CASES if "critic" not in case[1]])
def test_logits_that_are_not_the_models_own_are_refused_on_every_rank(
    several: Several, num_ranks: int, scenario: str
) -> None:
    for rank in range(num_ranks):
        assert "nats a token away" in result(several(num_ranks), scenario, rank)["refusal"]


def whole_state(parts: list[ranks.State]) -> dict[str, torch.Tensor]:
    """The pieces of all ranks, put together."""
    return put_together(piece for part in parts for piece in part)


@pytest.mark.parametrize(("num_ranks", "scenario"), CASES)
def test_the_state_of_all_ranks_is_that_of_one(one: Path, several: Several, num_ranks: int, scenario: str) -> None:
    parts = [result(several(num_ranks), scenario, rank)["state"] for rank in range(num_ranks)]
    assert_same(whole_state(parts), whole_state([result(one, scenario)["state"]]), atol=2e-6)


def test_ranks_that_have_the_same_give_even_shares_of_it(several: Several) -> None:
    shares = [sum(piece.values.numel() for piece in result(several(4), "copies", rank)["state"]) for rank in range(4)]
    assert max(shares) < 1.1 * sum(shares) / 4


@pytest.mark.parametrize(("num_ranks", "scenario"), EVERY)
def test_a_rank_has_one_piece_a_tensor_however_the_layers_are_split(
    several: Several, num_ranks: int, scenario: str
) -> None:
    for rank in range(num_ranks):
        names = [piece.name for piece in result(several(num_ranks), scenario, rank)["state"]]
        assert len(names) == len(set(names))


@pytest.mark.parametrize("name", ranks.RESUMED)
def test_ranks_that_split_a_model_otherwise_go_on_from_a_checkpoint_bit_for_bit(several: Several, name: str) -> None:
    resumed = [result(several(4), "resumed", rank) for rank in range(4)]
    expected, ours = (whole_state([part["states"][key] for part in resumed]) for key in ("started", name))
    assert_same(ours, expected, atol=0)
    by_row = {row: values for part in resumed for row, values in part["answers"]["started"].items()}
    for row, values in (entry for part in resumed for entry in part["answers"][name].items()):
        np.testing.assert_allclose(values, by_row[row], atol=1e-5)


def test_one_rank_goes_on_from_a_checkpoint_of_copies(several: Several, models: str) -> None:
    parts = [result(several(4), "resumed", rank)["states"]["started"] for rank in range(4)]
    trainer = PolicyTrainer(TrainerConfig(), f"{models}/qwen2")
    TrainingState({"policy": trainer}).load(str(several(4) / "before_shards"))
    ours = whole_state([ranks.state_of(trainer.engine)])
    trainer.close()
    assert_same(ours, whole_state(parts), atol=0)


@pytest.mark.parametrize("scenario", ranks.LARGE)
def test_no_rank_ever_holds_much_more_than_its_shard_while_it_loads_or_exports(several: Several, scenario: str) -> None:
    for rank in range(4):
        loaded = result(several(4), scenario, rank)
        assert loaded["shard"] > 40 * 2**20
        assert loaded["peak"] > 0.9 * loaded["shard"]
        assert loaded["peak"] <= 1.2 * loaded["shard"] + loaded["layer"]
        assert all(loaded["right"])
        assert loaded["exported_peak"] < 2 * loaded["shard"]  # half a model; most of it is what malloc keeps
