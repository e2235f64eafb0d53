"""The weights of a checkpoint against those of a model: names and shapes by the headers of its files, before any is
read.

    check_model(path)         a directory or hub id, as a causal language model or with a head `score`
    check_weights(lm, path)   for a model that is there already, with weights or without

transformers draws random numbers for what a checkpoint lacks, and says so in a log. Here that is an error, for
policies, references, teachers, reward models and engines alike. What a caller wants to be new, such as the head of a
critic, it asks for by name.
"""

import zipfile
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from re import search
from typing import Any

from penstock.conf.errors import ModelError
from penstock.workers.models.model_files import ADAPTER_CONFIG, BIN, BIN_INDEX, INDEX, SINGLE, files_of_index
from penstock.workers.pictures.families import auto_class
from penstock.workers.weights.checkpoint_form import stacks

Shape = tuple[int, ...]
SAFETENSORS = ".safetensors"
HEAD = "score.weight"
"""Name of the weights of a scalar head."""
MOST_TOLD = 5
"""Most names in a message."""


@dataclass(frozen=True)
class KeysOfModel:
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


def keys_of_model(lm: Any, keys: Iterable[str]) -> KeysOfModel:
    """Find the tensors of `lm` among the keys of a checkpoint."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    transforms = get_model_conversion_mapping(lm)
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    known, prefix = lm.state_dict(), lm.base_model_prefix
    found = KeysOfModel()
    several: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, known)
        if name not in known and key in known:
            name, pattern = rename_source_key(key, [], [], prefix, known)
        if name not in known:
            found.strange.append(key)
        elif pattern is None:
            found.single[name] = key
        elif stacks(by_pattern[pattern]):
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
    found = keys_of_model(lm, shapes)
    lacks, wrong = _lacking(lm, found, new), _misshapen(lm, found, shapes)
    if lacks or wrong:
        faults = [f"it lacks {len(lacks)} of {len(lm.state_dict())} tensors: {_some(lacks)}"] if lacks else []
        faults += [_some(wrong)] if wrong else []
        raise ModelError(
            f"{key}={path}: its weights are not those of {type(lm).__name__}, which its config.json describes: "
            f"{'; '.join(faults)}. {_advice(found.strange, path, is_headless=lacks == [HEAD] and not wrong)}"
        )


def _lacking(lm: Any, found: KeysOfModel, new: Collection[str]) -> list[str]:
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
        and not any(search(pattern, names[0]) for pattern in optional)
    ]


def _misshapen(lm: Any, found: KeysOfModel, shapes: Mapping[str, Shape]) -> list[str]:
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
            f"It has names of PEFT's ({_some(strange, 1)}). Merge the adapter before you save: "
            "model.merge_and_unload().save_pretrained(DIRECTORY)."
        )
    others = f"It has others: {_some(strange)}. " if strange else ""
    return f"{others}Save the whole model there: model.save_pretrained({path!r})."


def _some(names: list[str], most: int = MOST_TOLD) -> str:
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
