"""From a run's configuration to its source of prompts: dataset, teacher, tokenizer, limits, put together once.

Called by the `Prompts` actor for what is trained on, and by evaluation for the held-out problems.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from penstock.conf.errors import DataError, ModelError
from penstock.conf.run import RunConfig
from penstock.workers.prompts.dataset import PromptDataset, Task, open_dataset
from penstock.workers.prompts.source import PromptSource
from penstock.workers.prompts.tokenization import PromptEncoder, TokenLimits
from penstock.workers.reward.registry import find_function

Teacher = Callable[[dict[str, Any]], str]
"""From a task (its JSON as a dict: prompt, answer, index, the row's own columns) to the demonstration."""


class TaughtDataset:
    """A dataset whose demonstrations come from a teacher instead of from its own column (`data.teacher`)."""

    def __init__(self, dataset: PromptDataset, teacher: Teacher) -> None:
        self._dataset, self._teacher = dataset, teacher

    def __len__(self) -> int:
        return len(self._dataset)

    def row(self, index: int) -> Task:
        task = self._dataset.row(index)
        response = self._teacher({**task.extra, "prompt": task.prompt, "answer": task.answer, "index": task.index})
        if not isinstance(response, str):
            raise DataError(f"{task.where}: the teacher (data.teacher) returned {type(response).__name__}, where text is due.")
        return replace(task, response=response)


def open_rows(config: RunConfig, *, held_out: bool = False) -> PromptDataset:
    """The rows to train on or the held-out ones. Raises `DataError` naming the key."""
    dataset = open_dataset(config.data, config.evaluation, held_out=held_out)
    if dataset is None:
        raise DataError("there are no held-out problems: set evaluation.path.")
    if config.data.teacher is None or held_out:
        return dataset
    return TaughtDataset(dataset, find_function(config.data.teacher, "data.teacher"))


def open_source(config: RunConfig, model_path: str, *, demonstrations: bool, held_out: bool = False) -> PromptSource:
    """The groups of a run, in order. Raises `DataError` or `ModelError`."""
    tokenizer, positions = open_tokenizer(model_path)
    limits = TokenLimits.of(config, demonstrations=demonstrations, model_positions=positions)
    data = replace(config.data, shuffle=False) if held_out else config.data
    encoder = PromptEncoder(tokenizer, data, limits)
    return PromptSource(open_rows(config, held_out=held_out), encoder, data, demonstrations=demonstrations)


def open_tokenizer(model_path: str) -> tuple[Any, int | None]:
    """The tokenizer and the model's longest sequence. Raises `ModelError` if the directory lacks either."""
    from transformers import AutoConfig, AutoTokenizer

    try:
        model = AutoConfig.from_pretrained(model_path)
        tokenizer = AutoTokenizer.from_pretrained(model_path)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model.path={model_path}: no tokenizer or config.json can be loaded from it ({str(error).splitlines()[0]}). "
            "A model directory holds config.json, tokenizer files and safetensors, as save_pretrained writes them."
        ) from error
    return tokenizer, getattr(model, "max_position_embeddings", None)
