"""The directory of a Hugging Face model, read without building the model: its files, and the longest sequence that it
takes.

One listing serves what is exported with a model, copied to other nodes, and read for its weights. A model may lie in a
clone, in a trainer's output or in the working directory, beside `.git`, checkpoints, runs and data. So files count by
their names, and those of the directory itself alone. Names are relative to it. Links count as what they lead to, as in
the hub's cache; what is no regular file does not count.

The longest sequence is derived as vLLM does, which refuses longer ones, so that nothing is refused here that an engine
serves. Both forms are read: `rope_scaling` of transformers 4 and `rope_parameters` of transformers 5, the latter also
by kinds of layers.
"""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from penstock.conf.errors import WeightError
from penstock.workers.runtime.url_files import size_fault

CONFIG = "config.json"
TEXTS = (
    CONFIG, "*_config.json", "*.jinja", "*.model", "*.py", "*.tiktoken", "added_tokens.json", "chat_template.json",
    "merges.txt", "params.json", "special_tokens_map.json", "tekken.json", "tokenizer.json", "vocab.*", "LICENSE*",
    "NOTICE*",
)  # fmt: skip
"""Names of configurations, of what tokenizers and processors of pictures read, and of code."""
ADAPTER_CONFIG = "adapter_config.json"
TEMPLATES = "additional_chat_templates"
"""Folder of the tokenizer's further chat templates, the only one that counts."""
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
SHARDS, BIN_SHARDS = "model-*-of-*.safetensors", "pytorch_model-*.bin"
LENGTHS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_target_positions",
    "max_sequence_length", "max_seq_length", "seq_len",
)  # fmt: skip
"""Names of lengths in configurations; the smallest counts."""
OVERRIDE = "model_max_length"
"""Name of the one that counts alone where it is there."""
SCALED_ALREADY = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Rope types whose configurations have the length after scaling: their factor is not applied to it. Linear scaling's
is."""
DYNAMIC = "dynamic"
"""Rope type whose angles depend on the sequence's length. vLLM accepts sequences of `factor` times the length, but its
table of angles ends at the length itself."""
LONGROPE = ("su", "longrope")


def text_files(directory: Path) -> list[str]:
    """Names of all files that belong to a model but for its weights."""
    names = [path.name for path in directory.iterdir() if _is_text(path.name) and path.is_file()]
    templates = [path for path in directory.glob(f"{TEMPLATES}/*.jinja") if path.is_file()]
    return sorted([*names, *(path.relative_to(directory).as_posix() for path in templates)])


def weight_files(directory: Path) -> list[str]:
    """Names of the files that transformers reads the weights from, and of their index: safetensors before others, one
    file before several. Raises `ValueError` for an index that is none."""
    for single, index in ((SINGLE, INDEX), (BIN, BIN_INDEX)):
        if (directory / single).is_file():
            return [single]
        if (directory / index).is_file():
            return [index, *sorted({*files_of_index((directory / index).read_text(encoding="utf-8")).values()})]
    return []


def files_of_index(text: str) -> dict[str, str]:
    """The file of each tensor, by an index of weights. Raises `ValueError`."""
    values = json.loads(text)
    files = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(files, dict):
        raise ValueError("an index of weights without a weight_map")
    return {str(name): str(file) for name, file in files.items()}


def model_files(directory: Path) -> list[str]:
    """Names of all files of a model. Raises `ValueError` as `weight_files` does."""
    return sorted([*text_files(directory), *weight_files(directory)])


def files_of_model(names: Iterable[str]) -> list[str]:
    """Those of a repository's files that belong to its model, as `model_files` finds them in a directory. Shards count
    by their names."""
    names = list(names)
    texts = [name for name in names if _is_text(name) or fnmatchcase(name, f"{TEMPLATES}/*.jinja")]
    for patterns in ((SINGLE,), (INDEX, SHARDS), (BIN,), (BIN_INDEX, BIN_SHARDS)):
        if patterns[0] in names:
            return sorted([*texts, *(name for name in names if any(fnmatchcase(name, one) for one in patterns))])
    return sorted(texts)


def copy_texts(source: Path, target: Path) -> None:
    """Copy the files of a model but for its weights into a directory, under the same names. Raises `OSError`."""
    for name in text_files(source):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)


def _is_text(name: str) -> bool:
    return name != ADAPTER_CONFIG and "/" not in name and any(fnmatchcase(name, pattern) for pattern in TEXTS)


def shard_name(number: int, count: int) -> str:
    """Name of a shard. `number`: from 1, as transformers counts them."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def remove_weights(directory: Path, but: Iterable[str] = ()) -> None:
    """Remove what an earlier export has left: transformers would read it instead. `but`: names of files that stay, of
    whose folders the others go, too."""
    kept = {directory / name for name in but}
    for folder in {directory, *(file.parent for file in kept)}:
        for file in (folder / SINGLE, folder / INDEX, *folder.glob(SHARDS)):
            if file not in kept:
                file.unlink(missing_ok=True)


def check_exported(directory: str, written: Iterable[Mapping[str, int]]) -> None:
    """Check that all written files are there, and remove others. `written`: by each rank, the names of its files and
    their bytes. Raises `WeightError`."""
    files = {name: num_bytes for own in written for name, num_bytes in own.items()}
    for name, num_bytes in files.items():
        if fault := size_fault(f"{directory}/{name}", num_bytes):
            raise WeightError(
                f"export: {directory}/{name} {fault} as this machine sees it, and a rank has written it. Whatever "
                "removes files there, try again, or make the model of a checkpoint: penstock export CHECKPOINT "
                "DIRECTORY."
            )
    remove_weights(Path(directory), files)


def longest_context(config: Mapping[str, Any]) -> int | None:
    """Most tokens of a sequence; None where the configuration does not say.

    >>> longest_context({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 2.0}})
    8192
    """
    text = _of_text(config)
    lengths = [text[name] for name in LENGTHS if isinstance(text.get(name), int)]
    longest = text.get(OVERRIDE) or min(lengths, default=None)
    if longest is None or "gemma3" in str(text.get("model_type")):  # Gemma 3's is scaled already, by whatever type
        return longest
    factor = 1.0
    for rope in _ropes(text):
        if _type(rope) not in (*SCALED_ALREADY, DYNAMIC):
            factor = rope.get("factor") or factor
    return int(longest * factor)


def longest_short_context(config: Mapping[str, Any]) -> int | None:
    """Most tokens of a sequence for which LongRoPE (2402.13753) has its short factors; None for other models.

    Beyond it transformers takes the long ones for long batches, and an engine of vLLM that is to serve longer sequences
    takes them for all.
    """
    text = _of_text(config)
    name = "original_max_position_embeddings"
    lengths = [text.get(name) or rope.get(name) for rope in _ropes(text) if _type(rope) in LONGROPE]
    return min((length for length in lengths if length), default=None)


def _of_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part about text in the configuration of a model that sees, too."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def _ropes(text: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The rope's settings; those of each kind of layers where they differ."""
    found = text.get("rope_parameters") or text.get("rope_scaling") or {}
    nested = [value for value in found.values() if isinstance(value, Mapping)]
    yield from nested or ([found] if found else [])


def _type(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type"))
