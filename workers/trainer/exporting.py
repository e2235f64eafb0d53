"""The trainer's model as a HF directory for people, which `from_pretrained` loads.

    one rank      model.safetensors
    several       model-00001-of-00002.safetensors, …, one a rank, and by rank 0 model.safetensors.index.json

Tensors are divided among the ranks by bytes, and gathered one after the other on the rank that writes them. So no rank
ever holds more of the model than its own elements and one whole tensor, and each element is sent once at most. Ranks on
several machines write into a directory that all of them see, or each into one of its own, which the driver collects.
What an earlier export left there goes when all files have been written; the index comes last.
"""

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoProcessor, AutoTokenizer

from penstock.conf.errors import ModelError, WeightError
from penstock.store.data import durable
from penstock.workers.machine.local_files import FreeSpace, part_of, write_whole
from penstock.workers.models.model_files import CONFIG, INDEX, SINGLE, copy_texts
from penstock.workers.trainer.engines.engine import TrainEngine
from penstock.workers.trainer.engines.lora import save_adapter
from penstock.workers.trainer.exported_files import remove_weights, shard_name
from penstock.workers.trainer.models.pictures import tower_of
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.weights.piece import Piece, Span, spans_by_tensor
from penstock.workers.weights.publication.layout import DTYPE_BYTES, Layout, compute_layout

ADVICE = "Make room, or make the model of a checkpoint elsewhere: penstock export CHECKPOINT DIRECTORY."
ADAPTER_FOLDER = "adapter"
GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class FilePlan:
    """The rank that writes each tensor, the same on every rank."""

    tensors: dict[str, tuple[tuple[int, ...], str]]
    """Shape and dtype of each."""
    owners: dict[str, int]

    @cached_property
    def names(self) -> dict[int, str]:
        """The file of each rank that has one."""
        writers = sorted(set(self.owners.values()))
        if len(writers) == 1:
            return {writers[0]: SINGLE}
        return {rank: shard_name(number, len(writers)) for number, rank in enumerate(writers, 1)}

    def layout(self, rank: int) -> Layout:
        """Layout of the rank's file."""
        mine = [name for name, owner in self.owners.items() if owner == rank]
        return compute_layout((name, *self.tensors[name]) for name in mine)

    def index(self) -> str:
        """Text of the index, as `save_pretrained` writes it."""
        num_bytes = sum(math.prod(shape) * DTYPE_BYTES[dtype] for shape, dtype in self.tensors.values())
        files = {name: self.names[owner] for name, owner in sorted(self.owners.items())}
        return json.dumps({"metadata": {"total_size": num_bytes}, "weight_map": files}, indent=2) + "\n"


def plan_files(tensors: dict[str, tuple[tuple[int, ...], str]], num_ranks: int) -> FilePlan:
    """Assign each tensor, in order, to the rank that has the fewest bytes so far. `tensors`: shape and dtype of
    each."""
    loads, owners = [0] * num_ranks, {}
    for name, (shape, dtype) in tensors.items():
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += math.prod(shape) * DTYPE_BYTES[dtype]
    return FilePlan(tensors, owners)


def export(engine: TrainEngine, directory: str, model_path: str, dtype: str) -> dict[str, int]:
    """Write the model; return the weight files, with their bytes, that this rank has written. `model_path`: where
    configuration, tokenizer and processor come from. Where LoRA was trained, its weights are merged, and the adapter
    alone lies in `adapter/`. Collective. Raises `WeightError` where a file cannot be written."""
    target, ranks = Path(directory), engine.ranks
    tensors = spans_by_tensor(engine.pieces(), dtype, ranks.gather_ranks)
    plan = plan_files({each.name: (each.shape, each.dtype) for each in tensors}, ranks.num_ranks)
    with _named(target, ranks.rank, plan):
        target.mkdir(parents=True, exist_ok=True)
        written = _write_own(engine, plan, [each.spans for each in tensors], target)
    ranks.barrier()
    with _named(target, ranks.rank, plan):
        remove_weights(target)
    ranks.barrier()
    with _named(target, ranks.rank, plan):
        for name in written:
            durable.rename(part_of(target / name), target / name)
    ranks.barrier()
    with _named(target, ranks.rank, plan, "config, tokenizer, index or adapter"):
        if ranks.rank == 0:
            if len(plan.names) > 1:
                write_whole(target / INDEX, index := plan.index())
                written[INDEX] = len(index.encode())
            _write_texts(engine.model.lm, target, model_path, dtype)
        save_adapter(engine.model.lm, target / ADAPTER_FOLDER, ranks.rank == 0)
    ranks.barrier()
    return written


@contextlib.contextmanager
def _named(target: Path, rank: int, plan: FilePlan, what: str | None = None) -> Iterator[None]:
    """Raise `WeightError` for what cannot be written in the block, by default the rank's weights. Nothing of it stays,
    since it may be what has filled the disk."""
    free = FreeSpace(plan.layout(rank).num_bytes)
    free.measure(target)
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        name = plan.names.get(rank)
        if name is not None:
            with contextlib.suppress(OSError):
                part_of(target / name).unlink()
        told = f"export to {target}: rank {rank} could not write {what or name or 'its part'}: {error}"
        raise WeightError(told + free.too_little(ADVICE)) from None


def _write_own(engine: TrainEngine, plan: FilePlan, spans: Sequence[Sequence[Span]], target: Path) -> dict[str, int]:
    """Write this rank's file, under a temporary name until all are there. Every rank takes part in every tensor."""
    ranks = engine.ranks
    name, layout = plan.names.get(ranks.rank), plan.layout(ranks.rank)
    with part_of(target / name).open("wb", buffering=0) if name else contextlib.nullcontext() as file:
        if file is not None:
            _write_at(file.fileno(), memoryview(layout.header), 0)
        for piece, own in zip(engine.pieces(), spans, strict=True):
            dtype = getattr(torch, plan.tensors[piece.name][1])
            whole = _gathered(piece, own, plan.owners[piece.name], dtype, ranks)
            if whole is not None and file is not None:
                data = whole.view(torch.uint8).numpy().data
                _write_at(file.fileno(), data, layout.place(piece.name).offset)
        if file is not None:
            durable.sync_opened(file.fileno())
    return {name: layout.num_bytes} if name else {}


def _gathered(piece: Piece, spans: Sequence[Span], owner: int, dtype: torch.dtype, ranks: Ranks) -> Tensor | None:
    """Gather the flattened tensor on its owner; None on the others. Collective over the ranks that have a part of
    it."""
    values = piece.values.detach().to(device="cpu", dtype=dtype).contiguous()
    if ranks.rank != owner:
        if len(values):
            dist.send(values, dst=owner)
        return None
    if len(values) == math.prod(piece.shape):
        return values
    whole = torch.empty(math.prod(piece.shape), dtype=dtype)
    whole[piece.first : piece.first + len(values)] = values
    for rank, (first, count) in enumerate(spans):
        if count and rank != owner:
            dist.recv(whole[first : first + count], src=rank)
    return whole


def _write_at(file: int, data: memoryview, offset: int) -> None:
    """Write all data: a system call writes at most 2 GiB."""
    while data:
        count = os.pwrite(file, data, offset)
        data, offset = data[count:], offset + count


def try_texts(lm: Any, model_path: str, dtype: str) -> None:
    """Write all that an export has but for the weights, and throw it away: what cannot be written is told before
    anything is trained. Raises `ModelError`."""
    with tempfile.TemporaryDirectory(prefix="penstock-export-") as folder:
        try:
            _write_texts(lm, Path(folder), model_path, dtype)
        except (OSError, ValueError) as error:
            raise ModelError(
                f"model.path={model_path}: what belongs to its weights could not be exported after the training: "
                f"{error}. Mend the file there, or choose another model.path."
            ) from error


def _write_texts(lm: Any, target: Path, model_path: str, dtype: str) -> None:
    """Write what a directory has besides its weights: a directory's files as they are; a hub id's tokenizer through
    transformers, or its processor. Configurations are written as they are, too: transformers would refuse what it
    has read before, such as a temperature without sampling."""
    source = Path(model_path)
    if not source.is_dir():
        (AutoProcessor if tower_of(lm) else AutoTokenizer).from_pretrained(model_path).save_pretrained(target)
    elif source.resolve() != target.resolve():
        copy_texts(source, target)
    config = type(lm.config).from_dict(lm.config.to_dict() | {"dtype": dtype})
    config.to_json_file(target / CONFIG)
    if getattr(lm, "generation_config", None) is not None:
        lm.generation_config.to_json_file(target / GENERATION_CONFIG)
