"""A two-layer model of 20 thousand parameters, rows for it, and trainers that clean up after themselves."""

import gc
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.conf.model import FreshModelConfig
from penstock.conf.trainer import DeepSpeedConfig, OptimizerConfig, TrainerConfig
from penstock.store.data.rows import Rows
from penstock.workers.fresh_model import build_fresh_model
from penstock.workers.trainer.engines import deepspeed
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.weights.piece import Piece, boxes

FRESH = FreshModelConfig(
    num_layers=2, hidden_size=32, intermediate_size=48, num_heads=2, num_kv_heads=1, max_position_embeddings=64
)
ENGINES: dict[str, dict[str, Any]] = {"fsdp": {}} | {
    f"zero{stage}": {"engine": "deepspeed", "deepspeed": DeepSpeedConfig(zero_stage=stage)} for stage in (1, 2, 3)
}
"""Options of a `TrainerConfig` for each kind of engine. All pass the same tests."""
HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests with an engine of DeepSpeed (`zero1` and so on by name) as real: it runs programs when it starts."""
    for item in items:
        if item.path.is_relative_to(HERE) and "[" in item.name and re.search(r"\bzero\d", item.name):
            item.add_marker(pytest.mark.real)


@pytest.fixture
def engine() -> str:
    """A module whose claims are about every engine has a fixture of this name with `params=ENGINES`."""
    return "fsdp"


@pytest.fixture
def engine_options(engine: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options of a `TrainerConfig`. ZeRO-3 keeps the norms gathered and shards the rest, small as it is; its own
    version of `linear`, which it puts into torch for good, goes when the test ends."""
    monkeypatch.setattr(deepspeed, "PERSISTENT_ELEMENTS", FRESH.hidden_size)
    monkeypatch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)
    if engine != "fsdp":
        monkeypatch.setattr(gc, "collect", lambda *_: 0)  # which its reports of memory call
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):  # written for good, too
            monkeypatch.setenv(name, "0")
    return ENGINES[engine]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums in one order: a test may ask for equal bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def without_inductor() -> Iterator[None]:
    """Graphs are made as always, forward and backward, and run without the code of inductor, which takes minutes."""
    torch.compiler.reset()
    torch.compiler.set_default_backend("aot_eager")
    yield
    torch.compiler.set_default_backend("inductor")
    torch.compiler.reset()


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    build_fresh_model(path, FRESH, seed=3)
    return str(path)


@pytest.fixture
def make_rows() -> Callable[..., Rows]:
    return random_rows


def random_rows(num_rows: int = 12, *, seed: int = 0, group_size: int = 2, same_length: bool = False) -> Rows:
    """Rows as a lease of GRPO's train stage has them, of prompts of 1-9 and responses of 1-20 tokens."""
    random = np.random.default_rng(seed)
    responses = [
        random.integers(3, 90, 12 if same_length else random.integers(1, 21)).tolist() for _ in range(num_rows)
    ]
    return Rows.from_lists(
        {
            "prompt_ids": [
                random.integers(3, 90, 7 if same_length else random.integers(1, 10)).tolist() for _ in range(num_rows)
            ],
            "response_ids": responses,
            "behavior_logprobs": [(-4.5 + 0.1 * random.normal(size=len(ids))).tolist() for ids in responses],
            "advantage": random.normal(size=num_rows).tolist(),
        },
        group_ids=[index // group_size for index in range(num_rows)],
    )


@pytest.fixture
def make_trainer(model_path: str, engine_options: dict[str, Any]) -> Iterator[Callable[..., PolicyTrainer]]:
    """`make_trainer(lr=…, max_tokens_per_microbatch=…, trainable=…)`: options of the optimizer, the config or the
    trainer.
    """
    made: list[PolicyTrainer] = []

    def make(path: str = model_path, **options: Any) -> PolicyTrainer:
        optimizer = {name: options.pop(name) for name in list(options) if name in OptimizerConfig.__dataclass_fields__}
        config = {name: options.pop(name) for name in list(options) if name in TrainerConfig.__dataclass_fields__}
        config = engine_options | config
        made.append(PolicyTrainer(TrainerConfig(**config, optimizer=OptimizerConfig(**optimizer)), path, **options))
        return made[-1]

    yield make
    for trainer in reversed(made):
        trainer.close()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """This process as the only rank."""
    alone = Ranks.join(TrainerConfig())
    yield alone
    alone.leave()


@pytest.fixture
def weights_of() -> Callable[[PolicyTrainer], dict[str, torch.Tensor]]:
    return copy_of_weights


def copy_of_weights(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    """Weights of a trainer that is the only rank."""
    return {piece.name: piece.values.clone().reshape(piece.shape) for piece in trainer.engine.pieces()}


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    return tmp_path


def assert_same(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Assert that tensors are equal, bit for bit."""
    assert ours.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(ours[name], values), name


def whole_state(trainer: PolicyTrainer) -> dict[str, Tensor]:
    """`TrainEngine.state` of all ranks, put together: what a checkpoint holds. Collective. Every element must be in
    exactly one piece."""
    return whole(trainer, trainer.engine.state())


def whole(trainer: PolicyTrainer, pieces: Iterable[Piece]) -> dict[str, Tensor]:
    return put_together(piece for some in trainer.ranks.gather(copied(pieces)) for piece in some)


def copied(pieces: Iterable[Piece]) -> list[Piece]:
    return [replace(piece, values=piece.values.detach().clone()) for piece in pieces]


def put_together(pieces: Iterable[Piece]) -> dict[str, Tensor]:
    """The full tensors of all ranks' pieces. Every element must be in exactly one of them."""
    tensors: dict[str, Tensor] = {}
    counts: dict[str, Tensor] = {}
    for piece in pieces:
        tensor = tensors.setdefault(piece.name, torch.empty(piece.shape, dtype=piece.values.dtype))
        count = counts.setdefault(piece.name, torch.zeros(piece.shape, dtype=torch.int32))
        for box in boxes([piece]):
            place_in(tensor, box).copy_(box.values)
            place_in(count, box).add_(1)
    assert all((count == 1).all() for count in counts.values())
    return tensors


def place_in(tensor: Tensor, box: Piece) -> Tensor:
    """The part of a full tensor, a view, that a box is of."""
    for dim, (start, extent) in enumerate(zip(box.corner, box.values.shape, strict=True)):
        tensor = tensor.narrow(dim, start, extent)
    return tensor


def put_state(trainer: PolicyTrainer, state: dict[str, Tensor], num_optimizer_steps: int) -> None:
    """Collective."""
    pieces = list(trainer.engine.state())
    assert {piece.name for piece in pieces} == state.keys()
    for box in boxes(pieces):
        box.values.copy_(place_in(state[box.name], box))
    trainer.engine.loaded(num_optimizer_steps)


def as_reference(compute: Callable[[Rows], Any]) -> Callable[[Rows], dict[str, Any]]:
    """What a reference's worker calls: its column, by this function of rows."""
    return lambda rows: {"reference_logprobs": compute(rows)}
