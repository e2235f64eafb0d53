"""Models as large as those that people train, on 16 ranks: what a rank has of them and sends of them.

Weights are on the meta device, and the process group is torch's fake one, in which this process is any rank and nothing
is sent. Meshes, shards and pieces are those of real ranks.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3MoeConfig

from penstock.conf.trainer import TrainerConfig
from penstock.workers.trainer.checkpointing.shard_files import FORMAT, metadata_of
from penstock.workers.trainer.engines.fsdp import FsdpEngine
from penstock.workers.trainer.models.language_model import PolicyModel
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.weights.piece import boxes

NUM_RANKS = 16
STATES = 3
"""Tensors of a parameter's state: weight and two moments, float32."""


@dataclass(frozen=True)
class Model:
    config: Callable[..., PretrainedConfig]
    sizes: dict[str, Any]
    num_parameters: int
    """Of the whole model, as its card says."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the trainer: how its ranks split it."""


MODELS = {
    "Qwen2.5-7B": Model(
        Qwen2Config,
        {
            "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
        },
        7_615_616_512,
        {"shard_size": 8},
    ),
    "Qwen2.5-32B": Model(
        Qwen2Config,
        {
            "vocab_size": 152064, "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64,
            "num_attention_heads": 40, "num_key_value_heads": 8, "tie_word_embeddings": False,
        },
        32_763_876_352,
        {"tensor_parallel_size": 4, "shard_size": 8},
    ),
    "Llama-3.1-70B": Model(
        LlamaConfig,
        {
            "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
            "num_attention_heads": 64, "num_key_value_heads": 8, "tie_word_embeddings": False,
        },
        70_553_706_496,
        {"tensor_parallel_size": 8},
    ),
    "Qwen3-30B-A3B": Model(
        Qwen3MoeConfig,
        {
            "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
            "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
            "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "tie_word_embeddings": False,
        },
        30_532_122_624,
    ),
}  # fmt: skip


class Unfilled(FsdpEngine):
    """An engine whose shards have shapes alone."""

    def _load(self, *_: Any) -> None:
        """Leave the weights on the meta device."""


@contextmanager
def engine_of(model: Model, rank: int = 0, **sizes: int) -> Iterator[FsdpEngine]:
    """The engine of one of the ranks. `sizes`: in the place of the model's."""
    dist.init_process_group("fake", rank=rank, world_size=NUM_RANKS, store=FakeStore())
    try:
        ranks = Ranks(rank, NUM_RANKS, torch.device("cpu"), owned=True, timeout=timedelta(seconds=60))
        with torch.device("meta"):
            lm = AutoModelForCausalLM.from_config(model.config(**model.sizes | sizes), dtype=torch.float32)
        config = TrainerConfig(num_ranks=NUM_RANKS, dtype="bfloat16", **model.options)
        yield Unfilled(PolicyModel(lm), None, ranks, config)  # type: ignore[arg-type]
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Found:
    """What the first rank of a model has, with all of its layers."""

    model: Model
    names: list[str]
    """Names of the pieces of its state."""
    num_parameters: int
    """Of the whole model."""
    num_root: int
    """Elements of what is gathered outside of the layers."""
    num_units: int
    """Parts of the model that are gathered by themselves."""
    keeps_whole: bool
    num_published: int
    """Elements that it publishes."""
    num_gathers: int
    """Collectives of a publication."""


@pytest.fixture(scope="module", params=MODELS)
def found(request: pytest.FixtureRequest) -> Found:
    model = MODELS[request.param]
    with engine_of(model) as engine:
        with CommDebugMode() as calls:
            num_published = sum(piece.values.numel() for piece in engine.pieces())
        sizes = {name: parameter.numel() for name, parameter in engine.model.named_parameters()}
        return Found(
            model,
            [piece.name for piece in engine.state()],
            sum(sizes.values()),
            sum(size for name, size in sizes.items() if ".layers." not in name),
            len(engine.units),
            engine.keeps_whole,
            num_published,
            calls.get_total_counts(),
        )


def test_a_rank_has_three_pieces_a_parameter_and_fewer_than_ten_thousand(found: Found) -> None:
    """By hand: a Llama has nine parameters a layer, and three more."""
    assert len(found.names) == len(set(found.names)) < 10_000
    assert found.num_parameters == found.model.num_parameters
    if found.model.config is LlamaConfig:
        assert len(found.names) == STATES * (80 * 9 + 3)


def test_layers_are_gathered_one_by_one_and_the_embedding_with_the_head(found: Found) -> None:
    sizes = found.model.sizes
    assert not found.keeps_whole
    assert found.num_units == sizes["num_hidden_layers"] + 1
    assert found.num_root == (2 * sizes["vocab_size"] + 1) * sizes["hidden_size"]


def test_a_publication_gathers_the_columns_that_ranks_split_and_nothing_else(found: Found) -> None:
    """o_proj and down_proj of each layer, where there is tensor parallelism."""
    is_split = "tensor_parallel_size" in found.model.options
    assert found.num_gathers == (2 * found.model.sizes["num_hidden_layers"] if is_split else 0)
    assert found.num_published == pytest.approx(found.num_parameters / NUM_RANKS, rel=0.01)


def num_state_bytes(name: str, rank: int) -> int:
    with engine_of(MODELS[name], rank) as made:
        return sum(piece.values.nbytes for piece in made.state())


def test_bytes_of_a_rank_at_70b_are_those_worked_out_by_hand() -> None:
    """Two shards of eight parts. The first part also has what no part has alone: embedding, head and 161 norms."""
    unsplit = 2 * 128256 * 8192 + 161 * 8192
    split = 70_553_706_496 - unsplit
    assert num_state_bytes("Llama-3.1-70B", 0) == 12 * (split // 16 + unsplit // 2) == 63_954_272_256
    assert num_state_bytes("Llama-3.1-70B", 9) == 12 * split // 16 == 51_338_280_960


@pytest.mark.parametrize("name", MODELS)
def test_the_boxes_of_all_ranks_are_every_element_once(name: str) -> None:
    """Of the first two layers. The reader of checkpoints does the counting."""
    tensors: dict[str, Any] = {}
    for rank in range(NUM_RANKS):
        with engine_of(MODELS[name], rank, num_hidden_layers=2) as made:
            for box in boxes(made.state()):
                entry = tensors.setdefault(box.name, {"shape": list(box.shape), "dtype": "float32", "boxes": []})
                place = {"corner": box.corner, "extents": tuple(box.values.shape), "file": f"rank_{rank}", "offset": 0}
                entry["boxes"].append(place)
    metadata = metadata_of({"format": FORMAT, "tensors": tensors}, {})
    assert len(metadata.state_dict_metadata) == len(tensors)
    with engine_of(MODELS[name], num_hidden_layers=2) as made:
        elements = STATES * sum(parameter.numel() for parameter in made.model.parameters())
    assert sum(math.prod(entry["shape"]) for entry in tensors.values()) == elements


@pytest.mark.parametrize(
    ("name", "rank", "place"),
    [
        ("Qwen2.5-7B", 13, (1, 5, 0)),
        ("Qwen2.5-32B", 13, (1, 1, 1)),
        ("Llama-3.1-70B", 13, (0, 1, 5)),
        ("Qwen3-30B-A3B", 13, (0, 13, 0)),
    ],
)
def test_a_ranks_place_is_its_copy_shard_and_part(name: str, rank: int, place: tuple[int, int, int]) -> None:
    with engine_of(MODELS[name], rank, num_hidden_layers=1) as made:
        mesh = made.mesh
        assert (mesh.copy, mesh.shard, mesh.part) == place
        assert mesh.num_copies * mesh.num_shards * mesh.num_parts == NUM_RANKS
        assert tuple(mesh.fsdp.shape) == (
            (mesh.num_copies, mesh.num_shards) if mesh.num_copies > 1 else (mesh.num_shards,)
        )
