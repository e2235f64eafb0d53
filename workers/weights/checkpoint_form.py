"""A model and its checkpoint: the names and shapes of one's tensors in the other, by transformers' own mapping.

transformers makes one tensor of many: it stacks the weights of a mixture's experts, and calls some tensors otherwise
than their checkpoints do.

    model        mlp.experts.gate_up_proj  [E, 2 I, H]
    checkpoint   mlp.experts.0.gate_proj.weight [I, H], mlp.experts.0.up_proj.weight [I, H], mlp.experts.1.…

*From the model to the checkpoint* (`CheckpointForm`): what transformers stacks lies expert after expert in the model's
tensor, so that each tensor of the checkpoint is a range of its elements, and a rank's range is ranges of those.
Exports and streams have the checkpoint's form, which engines and `from_pretrained` read; the trainer's states have the
model's. Publications in shared memory have it, too, but for experts, which stay stacked where vLLM's loaders know
stacks (`STACKS`): 531 tensors of Qwen3-30B-A3B instead of 18,867. A stream gathers a tensor at a time, and small ones
take less of a GPU.

*From the checkpoint to the model* (`match_keys`, `check_weights`): by the headers of its files, before any is read.
transformers draws random numbers for what a checkpoint lacks, and says so in a log. Here that is an error, for
policies, references, teachers, reward models and engines alike. What a caller wants to be new, such as the head of a
critic, it asks for by name.

    check_model(path)         a directory or hub id, as a causal language model or with a head `score`
    check_weights(lm, path)   for a model that is there already, with weights or without

Legend: E experts, I neurons of one, H width of the hidden states.
"""

import math
import re
import zipfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from penstock.conf.errors import ModelError
from penstock.workers.models.model_files import ADAPTER_CONFIG, BIN, BIN_INDEX, INDEX, SINGLE, files_of_index
from penstock.workers.pictures.processor import auto_class
from penstock.workers.weights.piece import Piece

Shape = tuple[int, ...]
SAFETENSORS = ".safetensors"
HEAD = "score.weight"
"""Name of the weights of a scalar head."""
MOST_SHOWN = 5
"""Most names in a message."""
STACKED_FAMILIES = ("mixtral", "qwen3_moe")
"""Types of models whose stacks vLLM's loaders take as they are. Others' loaders may know single experts only."""
STACKS = {
    ("gate_proj", "up_proj"): "gate_up_proj", ("down_proj",): "down_proj", ("w1", "w3"): "w13", ("w2",): "w2",
}  # fmt: skip
"""vLLM's names of stacks `[E, rows, columns]`, by those of the weights of one expert whose rows they join."""


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor of a checkpoint, as elements of one of the model's."""

    name: str
    shape: tuple[int, ...]
    first: int
    """Index of its first element in the model's flattened tensor."""

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class CheckpointForm:
    """The checkpoint's tensors that a model's tensors are made of.

    form = CheckpointForm(lm)
    pieces_of_publication = (part for piece in pieces for part in form.pieces(piece))
    """

    def __init__(self, lm: Any, *, stacked: bool = False) -> None:
        """`lm`: a model of transformers, with or without weights or adapters. `stacked`: the form of publications."""
        self._lm = lm
        self._stacked = stacked and lm.config.get_text_config().model_type in STACKED_FAMILIES
        self._keeps_float32 = keeps_float32(lm)
        self._parts: dict[str, tuple[CheckpointTensor, ...]] = {}

    def parts(self, name: str, shape: tuple[int, ...]) -> tuple[CheckpointTensor, ...]:
        """The checkpoint's tensors of which transformers makes a tensor of the model, in the order in which they lie in
        it; one for most. Raises `ModelError` for a tensor that is made in an unsupported way."""
        if name not in self._parts:
            self._parts[name] = self._parts_of(name, shape)
        return self._parts[name]

    def pieces(self, piece: Piece) -> Iterator[Piece]:
        """The same elements as pieces of the checkpoint's tensors: one of each, empty where the piece has none of it.
        They share memory with `piece`. Parameters that the model's class keeps in float32 are so for engines, too.
        Raises as `parts` does."""
        keeps_dtype = piece.keeps_dtype or self._keeps_float32(piece.name)
        end = piece.first + len(piece.values)
        for part in self.parts(piece.name, tuple(piece.shape)):
            start = min(max(piece.first, part.first), part.first + part.num_elements)
            stop = max(start, min(end, part.first + part.num_elements))
            offset = start - piece.first if stop > start else 0
            values = piece.values.narrow(0, offset, stop - start)
            yield Piece(part.name, part.shape, start - part.first, values, keeps_dtype)

    @cached_property
    def _mapping(self) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
        """Transformers' renamings from the model's names to the checkpoint's; the converters that take a stack apart;
        and those that are not known here. Converters are by the end of a name that they are for."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightConverter

        renamings: list[Any] = []
        apart: dict[str, Any] = {}
        unknown: dict[str, Any] = {}
        for transform in reversed(get_model_conversion_mapping(self._lm, add_legacy=False)):
            if isinstance(transform, PrefixChange):
                # That of a whole model says nothing of the checkpoint, which may have had it or not. One that is taken
                # off a part is in all published checkpoints, and in engines.
                if transform.scope_prefix and transform.prefix_to_remove:
                    renamings.append(transform.reverse_transform())
                continue
            if not isinstance(transform, WeightConverter):
                renamings.append(transform.reverse_transform())
            elif is_expert_stack(transform):
                apart[transform.target_patterns[0]] = transform.reverse_transform()
            else:
                unknown |= dict.fromkeys(transform.target_patterns, transform)
        return renamings, apart, unknown

    def _parts_of(self, name: str, shape: tuple[int, ...]) -> tuple[CheckpointTensor, ...]:
        from transformers.core_model_loading import rename_source_key

        renamings, apart, unknown = self._mapping
        how = next((converter.operations for end, converter in unknown.items() if end in name), None)
        if how is not None:
            raise ModelError(
                f"the model {self._lm.config.model_type!r}: transformers makes {name} of its checkpoint's tensors by "
                f"{how}, which cannot be undone range by range, so that engines cannot be sent it. Choose another "
                "model.path."
            )
        stored, end = rename_source_key(name, renamings, list(apart.values()), reverse=True)
        if end is None:
            return (CheckpointTensor(stored, shape, 0),)
        ends = apart[end].target_patterns
        if len(shape) < 2 or ends[0] not in stored or shape[1] % len(ends):
            raise ModelError(
                f"the model {self._lm.config.model_type!r}: {name} of shape {list(shape)} is not what transformers "
                f"would make of {stored}. Choose another model.path."
            )
        if self._stacked and (stack := STACKS.get(tuple(end.rsplit(".", 2)[-2] for end in ends))) is not None:
            return (CheckpointTensor(f"{stored.partition('*')[0]}{stack}", shape, 0),)
        inner = (shape[1] // len(ends), *shape[2:])
        names = [stored.replace(ends[0], other) for other in ends]
        return tuple(
            CheckpointTensor(key.replace("*", str(expert)), inner, (expert * len(ends) + number) * math.prod(inner))
            for expert in range(shape[0])
            for number, key in enumerate(names)
        )


def keeps_float32(lm: Any) -> Callable[[str], bool]:
    """A predicate of a parameter's name: whether the model's class keeps it in float32 where the model is bfloat16.
    transformers has patterns that it finds anywhere in a name, such as `gate.weight`."""
    patterns = [pattern.replace("*", ".*") for pattern in getattr(lm, "_keep_in_fp32_modules_strict", None) or ()]
    return lambda name: any(re.search(pattern, name) for pattern in patterns)


def stacked_experts(lm: Any) -> dict[str, Any]:
    """The parameters of a model that are a mixture's experts, stacked along dim 0, by name; of each three dims."""
    return {
        f"{name}.{key}": parameter
        for name, module in lm.named_modules()
        for key, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3 and parameter.shape[0] == getattr(module, "num_experts", None)
    }


def is_expert_stack(converter: Any) -> bool:
    """Return whether a converter of transformers stacks one tensor an expert, or several that it first joins by their
    rows. Other ways are not supported."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    if len(converter.target_patterns) != 1 or not all("*" in pattern for pattern in converter.source_patterns):
        return False
    match converter.operations:
        case [MergeModulelist(dim=0)]:
            return len(converter.source_patterns) == 1
        case [MergeModulelist(dim=0), Concatenate(dim=1, num_shards_attribute=None)]:
            return True
    return False


def nonfinite_weights(model: Any) -> list[str]:
    """Names of a module's parameters that are not finite numbers."""
    return [name for name, parameter in model.named_parameters() if not bool(parameter.isfinite().all())]


@dataclass(frozen=True)
class CheckpointKeys:
    """The keys of a checkpoint that a model's tensors are made of, by transformers' rules for renaming."""

    single: dict[str, str] = field(default_factory=dict)
    """The key of each tensor that is stored as it is."""
    stacked: dict[str, list[list[str]]] = field(default_factory=dict)
    """The keys of each tensor that is stored expert by expert: of each expert, those whose rows are joined."""
    converted: dict[str, str] = field(default_factory=dict)
    """A key of each tensor that is made in another way."""
    strange: list[str] = field(default_factory=list)
    """Keys that the model has no tensors for."""

    @property
    def names(self) -> set[str]:
        """Names of the model's tensors that the checkpoint has."""
        return self.single.keys() | self.stacked.keys() | self.converted.keys()


def match_keys(lm: Any, keys: Iterable[str]) -> CheckpointKeys:
    """Find the tensors of `lm` among the keys of a checkpoint."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    transforms = get_model_conversion_mapping(lm)
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    known, prefix = lm.state_dict(), lm.base_model_prefix
    found = CheckpointKeys()
    several: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, known)
        if name not in known and key in known:
            name, pattern = rename_source_key(key, [], [], prefix, known)
        if name not in known:
            found.strange.append(key)
        elif pattern is None:
            found.single[name] = key
        elif is_expert_stack(by_pattern[pattern]):
            several[name][pattern].append(key)
        else:
            targets = by_pattern[pattern].target_patterns
            found.converted.update({name.replace(targets[0], target): key for target in targets})
    for name, some in several.items():
        parts = (some[pattern] for pattern in by_pattern if pattern in some)
        found.stacked[name] = [list(keys) for keys in zip(*parts, strict=False)]
    return found


def stored_files(path: str) -> dict[str, str]:
    """The file of each key of a checkpoint, in a directory or of a hub id; empty where it has none. Raises `OSError`,
    `ValueError`."""
    from transformers.utils.hub import get_checkpoint_shard_files

    for single, index in ((SINGLE, INDEX), (BIN, BIN_INDEX)):
        if (file := _file(path, single)) is not None:
            return dict.fromkeys(_shapes_in(file), file)
        if (file := _file(path, index)) is not None:
            shards, _ = get_checkpoint_shard_files(path, file)
            by_name = {Path(shard).name: shard for shard in shards}
            named = files_of_index(Path(file).read_text(encoding="utf-8"))
            return {key: by_name[Path(name).name] for key, name in named.items()}
    return {}


def empty_model(path: str, *, scores: bool = False) -> Any:
    """The model of a configuration without weights, on torch's meta device. `scores`: with a scalar head instead of
    that of a language model. Raises what transformers raises."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.from_pretrained(path, **({"num_labels": 1} if scores else {}))
    with torch.device("meta"):
        return (AutoModelForSequenceClassification if scores else auto_class(config)).from_config(config)


def check_model(path: str, key: str = "model.path", *, scores: bool = False) -> Any:
    """Check the weights of a model on disk or at the hub. Returns the model without weights. `key`: the
    configuration's, for messages. Raises `ModelError`."""
    try:
        lm = empty_model(path, scores=scores)
    except (OSError, ValueError) as error:
        raise ModelError(f"{key}={path}: transformers makes no model of its configuration: {error}") from error
    check_weights(lm, path, key)
    return lm


def check_weights(lm: Any, path: str, key: str = "model.path", new: Collection[str] = ()) -> None:
    """Raise `ModelError` for a checkpoint that lacks weights of `lm`, or has some in another shape, with their names.

    `new`: names of parameters that it need not have. What is quantized has weights of other names, and is not looked
    at.
    """
    if Path(path, ADAPTER_CONFIG).exists():
        raise ModelError(
            f"{key}={path}: has an {ADAPTER_CONFIG}, so it is an adapter of PEFT. Merge it into its model: "
            "AutoPeftModelForCausalLM.from_pretrained(ADAPTER).merge_and_unload().save_pretrained(DIRECTORY)."
        )
    config = lm.config
    if any(getattr(config, name, None) is not None for name in ("quantization_config", "transformers_weights")):
        return
    try:
        shapes = _shapes(stored_files(path))
    except (OSError, EOFError, ValueError, KeyError, RuntimeError, UnpicklingError) as error:
        raise ModelError(f"{key}={path}: its weights cannot be read: {type(error).__name__}: {error}") from error
    if not shapes:
        raise ModelError(
            f"{key}={path}: has no weights ({SINGLE} or {BIN}, or several files with an index). Save them there: "
            f"model.save_pretrained({path!r})."
        )
    found = match_keys(lm, shapes)
    lacks, wrong = _missing_tensors(lm, found, new), _misshapen(lm, found, shapes)
    if lacks or wrong:
        faults = [f"it lacks {len(lacks)} of {len(lm.state_dict())} tensors: {_listed(lacks)}"] if lacks else []
        faults += [_listed(wrong)] if wrong else []
        raise ModelError(
            f"{key}={path}: its weights are not those of {type(lm).__name__}, which its config.json describes: "
            f"{'; '.join(faults)}. {_advice(found.strange, path, is_headless=lacks == [HEAD] and not wrong)}"
        )


def _missing_tensors(lm: Any, found: CheckpointKeys, new: Collection[str]) -> list[str]:
    """Names of tensors that a checkpoint has no key of."""
    present, names_of = found.names, defaultdict(list)
    for name, tensor in lm.state_dict(keep_vars=True).items():
        names_of[id(tensor)].append(name)
    optional = [*(lm._keys_to_ignore_on_load_missing or ())]
    tied = getattr(lm, "all_tied_weights_keys", None) or {}
    return [
        names[0]
        for names in names_of.values()
        if present.isdisjoint([*names, *(tied[name] for name in names if name in tied)])
        and names[0] not in new
        and not any(re.search(pattern, names[0]) for pattern in optional)
    ]


def _misshapen(lm: Any, found: CheckpointKeys, shapes: Mapping[str, Shape]) -> list[str]:
    """Tensors of another shape than the model's, in words."""
    stored = {name: shapes[key] for name, key in found.single.items()}
    for name, experts in found.stacked.items():
        first = [shapes[key] for key in experts[0]]
        stored[name] = (len(experts), sum(shape[0] for shape in first), *first[0][1:])
    due = {name: tuple(tensor.shape) for name, tensor in lm.state_dict().items()}
    return [
        f"{name} is {list(shape)} instead of {list(due[name])}" for name, shape in stored.items() if shape != due[name]
    ]


def _advice(strange: list[str], path: str, *, is_headless: bool) -> str:
    """What to do. `strange`: keys that the model has no tensors for. `is_headless`: only the scalar head is missing."""
    if is_headless:
        return "A language model has no such head. Choose a reward model, or train one (recipe=reward_model)."
    if any(key.startswith("base_model.model.") or ".base_layer." in key or ".lora_" in key for key in strange):
        return (
            f"It has names of PEFT's ({_listed(strange, 1)}). Merge the adapter before you save: "
            "model.merge_and_unload().save_pretrained(DIRECTORY)."
        )
    others = f"It has others: {_listed(strange)}. " if strange else ""
    return f"{others}Save the whole model there: model.save_pretrained({path!r})."


def _listed(names: list[str], most: int = MOST_SHOWN) -> str:
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


def _shapes(files: Mapping[str, str]) -> dict[str, Shape]:
    """Shapes of all tensors by their keys. `files`: the file of each key. Raises `KeyError` for a key that its file
    does not have."""
    by_file = {file: _shapes_in(file) for file in dict.fromkeys(files.values())}
    return {key: by_file[file][key] for key, file in files.items()}


def _shapes_in(file: str) -> dict[str, Shape]:
    """Shapes of the tensors of one file."""
    if file.endswith(SAFETENSORS):
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(file, framework="pt") as opened:
                return {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{file}: {error}") from None
    import torch

    tensors = torch.load(file, map_location="meta", weights_only=True, mmap=zipfile.is_zipfile(file))
    return {key: tuple(tensor.shape) for key, tensor in tensors.items()}


def _file(path: str, name: str) -> str | None:
    """The path of a file of a directory, or of a hub id; None where there is none."""
    from transformers.utils import cached_file

    if Path(path).is_dir():
        return str(Path(path, name)) if Path(path, name).is_file() else None
    try:
        return cached_file(path, name)
    except OSError:
        return None
