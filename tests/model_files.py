"""The tensors of an exported model, whether it is one file or several with an index."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from penstock.workers.trainer.exported_files import INDEX, SINGLE


def load_model(directory: str | Path) -> dict[str, torch.Tensor]:
    """Each must be in one of the files, and those be the only ones."""
    directory = Path(directory)
    index = directory / INDEX
    if not index.exists():
        assert [path.name for path in directory.glob("*.safetensors")] == [SINGLE]
        return load_file(directory / SINGLE)
    files = {path.name: load_file(path) for path in directory.glob("*.safetensors")}
    tensors = {name: tensor for file in files.values() for name, tensor in file.items()}
    content = json.loads(index.read_text())
    assert content["weight_map"] == {name: file for file, own in files.items() for name in own}
    assert content["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert len(tensors) == sum(map(len, files.values()))
    assert len(files) > 1
    return tensors
