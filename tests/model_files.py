"""What is in an exported model: its tensors, whether it is one file or several with an index, and what it says of
rows."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from penstock.store.data.rows import Rows
from penstock.workers.models.model_files import INDEX, SINGLE


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


def logprobs_by(model: Any, rows: Rows) -> torch.Tensor:
    """Log-probabilities of the first row's response, `[T]`, by a model of transformers alone."""
    prompt, response = rows.lists("prompt_ids")[0], rows.lists("response_ids")[0]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[range(len(response)), response]
