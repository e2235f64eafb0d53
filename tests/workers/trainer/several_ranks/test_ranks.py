"""Two ranks over gloo, in small micro-batches, against one rank with all rows in one: the same mathematics, whichever
engine shards it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from penstock.conf.trainer import TrainerConfig
from penstock.workers.protocols import Publication
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.weights.publication.publication_files import MappedWeights
from tests.model_files import load_model
from tests.rank_processes import run_ranks
from tests.workers.trainer.conftest import ENGINES, put_state, whole_state
from tests.workers.trainer.several_ranks import ranks

pytestmark = pytest.mark.real
EVERY = [(engine, scenario) for engine in ENGINES for scenario in ranks.scenarios_of(engine)]
EXACT = [(engine, scenario) for engine, scenario in EVERY if not scenario.endswith("bfloat16")]
ROUNDED = [(engine, scenario) for engine, scenario in EVERY if scenario.endswith("bfloat16")]


@pytest.fixture(scope="module")
def two(model_path: str, tmp_path_factory: pytest.TempPathFactory, warm_python: list[str]) -> Path:
    """The directory of what two processes wrote."""
    directory = tmp_path_factory.mktemp("two")
    command = [*warm_python, "-m", ranks.__name__]
    run_ranks(command, 2, model_path, directory, *ENGINES, timeout_s=900)
    return directory


@pytest.fixture(scope="module")
def one(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of what one rank of FSDP2 wrote."""
    directory = tmp_path_factory.mktemp("one")
    ranks.run(0, 1, None, model_path, directory, ["fsdp"])
    return directory


def result(directory: Path, engine: str, scenario: str, rank: int = 0) -> dict[str, Any]:
    return torch.load(directory / f"{engine}.{scenario}.{rank}.pt", weights_only=False)


def expected_of(one: Path, scenario: str) -> dict[str, Any]:
    return result(one, "fsdp", ranks.plain(scenario))


def weights(directory: Path, engine: str, scenario: str) -> dict[str, torch.Tensor]:
    return load_file(directory / engine / scenario / "v00000001" / "model.safetensors")


@pytest.mark.parametrize(("engine", "scenario"), EXACT)
def test_gradients_of_two_ranks_are_those_of_one(one: Path, two: Path, engine: str, scenario: str) -> None:
    expected, ours = weights(one, "fsdp", ranks.plain(scenario)), weights(two, engine, scenario)
    assert ours.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(ours[name], weight, atol=1e-6, rtol=0, msg=name)


@pytest.mark.parametrize(("engine", "scenario"), EXACT)
def test_metrics_are_those_of_the_whole_batch_on_every_rank(one: Path, two: Path, engine: str, scenario: str) -> None:
    expected = expected_of(one, scenario)["metrics"]
    for rank in range(2):
        metrics = result(two, engine, scenario, rank)["metrics"]
        assert metrics.keys() == expected.keys()
        for name, value in expected.items():
            if not name.endswith("/padding_share"):  # more ranks, smaller micro-batches
                assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize(("engine", "scenario"), EXACT)
@pytest.mark.parametrize("when", ["before", "after"])
def test_each_row_gets_the_logprobs_that_it_gets_from_one_rank(
    one: Path, two: Path, engine: str, scenario: str, when: str
) -> None:
    expected = expected_of(one, scenario)[when]
    for rank in range(2):
        ours = result(two, engine, scenario, rank)[when]
        for position, values in zip(ranks.share_of(ranks.plain(scenario), rank, 2), ours, strict=True):
            np.testing.assert_allclose(values, expected[position], atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_tokens_are_counted_by_rank(one: Path, two: Path, engine: str) -> None:
    assert result(two, engine, "empty_rank", 1)["tokens"] == 0
    counted = sum(result(two, engine, "uneven", rank)["tokens"] for rank in range(2))
    assert counted == result(one, "fsdp", "uneven")["tokens"]


@pytest.mark.parametrize(("engine", "scenario"), ROUNDED)
def test_bfloat16_on_two_ranks_is_near_one(one: Path, two: Path, engine: str, scenario: str) -> None:
    expected, ours = weights(one, "fsdp", ranks.plain(scenario)), weights(two, engine, scenario)
    for name, weight in expected.items():
        torch.testing.assert_close(ours[name], weight, atol=2e-3, rtol=0, msg=name)


@pytest.mark.parametrize("engine", ENGINES)
def test_each_rank_publishes_about_half_of_the_model(one: Path, two: Path, engine: str) -> None:
    num_elements = result(one, "fsdp", "even")["elements"]
    shares = [result(two, engine, "even", rank)["elements"] / num_elements for rank in range(2)]
    assert sum(shares) == 1.0
    assert max(shares) < 0.55


@pytest.mark.parametrize("engine", ENGINES)
def test_an_export_of_two_ranks_is_their_publication(two: Path, engine: str) -> None:
    exported = load_model(two / engine / "exported")
    published = weights(two, engine, list(ranks.scenarios_of(engine))[-1])
    assert exported.keys() == published.keys()
    assert all(torch.equal(exported[name], published[name]) for name in published)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("way", ranks.WAYS)
def test_a_version_is_that_of_its_beginning_whatever_is_trained_meanwhile(two: Path, engine: str, way: str) -> None:
    before, begun, after = (
        (two / engine / way / place / "model.safetensors").read_bytes()
        for place in ("before/v00000001", "v00000002", "v00000003")
    )
    assert begun == before
    assert after != before
    for version in (2, 3):
        path = two / engine / way / f"v{version:08d}"
        MappedWeights(Publication(str(path), version)).verify()


@pytest.mark.parametrize("engine", ENGINES)
def test_after_twenty_steps_losses_and_norms_are_those_of_one_rank_of_fsdp(one: Path, two: Path, engine: str) -> None:
    expected = torch.load(one / "fsdp.learned.pt")
    ours = torch.load(two / f"{engine}.learned.pt")
    assert expected["losses"][-1] < expected["losses"][0] - 0.1
    np.testing.assert_allclose(ours["losses"], expected["losses"], atol=1e-4)
    np.testing.assert_allclose(ours["norms"], expected["norms"], atol=1e-4)


def test_a_state_goes_through_every_engine_bit_for_bit(two: Path) -> None:
    for rank in range(2):
        carried = torch.load(two / f"carried.{rank}.pt")
        assert carried["states"].keys() == ENGINES.keys()
        assert set(carried["steps"].values()) == {3}
        for state in carried["states"].values():
            assert state.keys() == carried["first"].keys()
            assert all(torch.equal(state[name], carried["first"][name]) for name in state)
        for losses in carried["losses"].values():
            np.testing.assert_allclose(losses, carried["losses"]["fsdp"], rtol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_state_of_two_ranks_goes_into_one(two: Path, engine: str, model_path: str) -> None:
    state = torch.load(two / f"{engine}.learned.pt")["state"]
    trainer = PolicyTrainer(TrainerConfig(), model_path)
    put_state(trainer, state, 20)
    ours = whole_state(trainer)
    trainer.close()
    assert all(torch.equal(ours[name], state[name]) for name in state)
