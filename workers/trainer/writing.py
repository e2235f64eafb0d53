"""The trainer's weights to files: publications in shared memory for the engines, and HF model directories for people.

Every rank writes its own rows. Rank 0 seals, or, where engines are on other nodes, the nodes' relays do. An exported
model is a publication of the whole model with its configuration and tokenizer beside it. Called by `trainer.py`.
"""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from transformers import AutoTokenizer

from penstock.workers.protocols import Publication
from penstock.workers.trainer.engines.engine import TrainEngine
from penstock.workers.trainer.engines.lora import save_adapter
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.weights.chain.plan import ChunkPlan, choose_chunk_bytes, make_plan
from penstock.workers.weights.chain.reports import Reporter
from penstock.workers.weights.piece import Piece
from penstock.workers.weights.publication.layout import Layout, compute_layout
from penstock.workers.weights.publication.publication import PublicationWriter, publication_directory, seal
from penstock.workers.weights.publication.reading import WEIGHTS_NAME

ADAPTER_FOLDER = "adapter"
WEIGHT_FILES = (
    "*.safetensors",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.gguf",
    "*.index.json",
    "*.h5",
    "*.msgpack",
    "manifest*.json",
    ADAPTER_FOLDER,
)


def layout_of(pieces: Iterable[Piece], dtype: str) -> Layout:
    """Of an engine's `pieces`: names and shapes as `save_pretrained` has them, tied weights once. Or of its
    `adapter_pieces`."""
    return compute_layout((piece.name, piece.shape, dtype) for piece in pieces)


def plan_chunks(ranks: Ranks, pieces: Iterable[Piece], layout: Layout, node: str, num_receivers: int) -> ChunkPlan:
    """What each rank will publish in every version, the same on all of them. `node`: this rank's, as its relay is
    called; `num_receivers`: nodes with engines. Collective. Raises `WeightError` if the pieces are not the whole
    layout."""
    told = [(piece.name, piece.first, len(piece.values)) for piece in pieces if len(piece.values)]
    nodes, pieces_of_ranks = zip(*ranks.gather_ranks((node, told)), strict=True)
    chunk_bytes = choose_chunk_bytes(layout.num_bytes, len(set(nodes)), num_receivers)
    return make_plan(layout, pieces_of_ranks, nodes, chunk_bytes)


def publish_between(
    ranks: Ranks, pieces: Iterable[Piece], directory: str, version: int, plan: ChunkPlan
) -> Publication:
    """As `publish`, to nodes whose relays have begun the version: each chunk goes on as soon as it is written. Every
    rank returns once all have written; the relays seal. Collective."""
    with Reporter(directory, plan, version, ranks.rank) as reporter:
        writer = PublicationWriter(directory, version, plan.layout, ranks.rank, ranks.num_ranks, reporter.outlet)
        for piece in pieces:
            writer.write_elements(piece.name, piece.first, piece.values)
        writer.close()
        reporter.finish()
    ranks.barrier()
    return Publication(str(publication_directory(directory, version)), version, plan.layout.num_bytes)


def publish(ranks: Ranks, pieces: Iterable[Piece], directory: str, version: int, layout: Layout) -> Publication:
    """Version `version` under the root `directory`, in the layout's dtype. Collective: every rank returns once it is
    sealed. `layout`: of `layout_of` of such pieces, which is the same for every version.

    Raises `WeightError`, e.g. when shared memory is full.
    """
    writer = PublicationWriter(directory, version, layout, ranks.rank, ranks.num_ranks)
    for piece in pieces:
        writer.write_elements(piece.name, piece.first, piece.values)
    writer.finish()
    ranks.barrier()
    if ranks.rank == 0:
        seal(directory, version, layout, ranks.num_ranks)
    ranks.barrier()
    return Publication(str(publication_directory(directory, version)), version, layout.num_bytes)


def export(engine: TrainEngine, directory: str, model_path: str, dtype: str) -> None:
    """A HF model directory that `from_pretrained` loads. `model_path`: where configuration and tokenizer come from.
    Where LoRA was trained, its weights are merged, and the adapter alone lies in `adapter/`. Collective.
    """
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    layout = layout_of(engine.pieces(), dtype)
    publish(engine.ranks, engine.pieces(), str(target / ".export"), 0, layout)
    if engine.ranks.rank == 0:
        os.replace(publication_directory(target / ".export", 0) / WEIGHTS_NAME, target / WEIGHTS_NAME)
        shutil.rmtree(target / ".export")
        _copy_tokenizer(model_path, target)
        _write_config(engine, target, dtype)
    save_adapter(engine.model.lm, target / ADAPTER_FOLDER, engine.ranks.rank == 0)
    engine.ranks.barrier()


def _copy_tokenizer(model_path: str, target: Path) -> None:
    """A directory's files as they are, weights left out; a hub id's tokenizer through transformers."""
    source = Path(model_path)
    if not source.is_dir():
        AutoTokenizer.from_pretrained(model_path).save_pretrained(target)
    elif source.resolve() != target.resolve():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns(*WEIGHT_FILES), dirs_exist_ok=True)


def _write_config(engine: TrainEngine, target: Path, dtype: str) -> None:
    lm = engine.model.lm
    config = type(lm.config).from_dict(lm.config.to_dict() | {"dtype": dtype})
    config.save_pretrained(target)
    if getattr(lm, "generation_config", None) is not None:
        lm.generation_config.save_pretrained(target)
