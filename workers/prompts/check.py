"""A check of the prompts before anything starts: `penstock validate`, and the first second of a run."""

import heapq
from dataclasses import dataclass
from typing import Any

from penstock.conf.errors import DataError
from penstock.conf.run import RunConfig
from penstock.workers.prompts.task import PromptDataset, Task
from penstock.workers.prompts.tokenization import PromptEncoder, PromptTooLong, TokenLimits

MAX_READ_ROWS = 50_000
"""Rows that are read of a file. Problems of reasoning_gym are generated, which takes longer: only `sample` of them are
read."""


@dataclass(frozen=True)
class PromptReport:
    """The findings of `check_prompts`."""

    rows: int
    """Number of rows of the dataset."""
    read: int
    """Number of rows looked at: columns and types."""
    tokenized: int
    """Number of rows tokenised, the longest of those looked at."""
    longest_prompt: int
    """Length of the longest prompt, in tokens."""
    longest_response: int
    """Length of the longest demonstration with its end, in tokens; 0 without demonstrations."""
    skipped: int
    """Number of tokenised rows that data.too_long=skip leaves out."""


def check_prompts(
    dataset: PromptDataset,
    tokenizer: Any,
    config: RunConfig,
    *,
    rows_are: str = "prompts",
    sample: int = 1000,
) -> PromptReport:
    """Check a dataset before anything starts: the first rows as they are, and the `sample` longest of them tokenised.

    Raises `DataError` (a missing column, a line that is no JSON, a prompt too long) or `ModelError`.
    """
    limits = TokenLimits.of_run(config, with_responses=rows_are != "prompts")
    encoder = PromptEncoder(tokenizer, config.data, limits, config.model.chat_template_kwargs)
    num_read = rows_to_read(dataset, config, sample)

    def num_characters(row: tuple[int, Task]) -> int:
        return len(row[1].prompt) + (len(row[1].response or "") if rows_are != "prompts" else 0)

    longest = heapq.nlargest(sample, ((index, dataset.row(index)) for index in range(num_read)), key=num_characters)
    prompts, responses, skipped = [], [], 0
    for _, task in sorted(longest, key=lambda row: row[0]):
        try:
            prompt, response = _encoded(encoder, task, rows_are)
        except PromptTooLong:
            if config.data.too_long != "skip":
                raise
            skipped += 1
            continue
        prompts.append(len(prompt))
        responses.append(len(response))
    if skipped == len(dataset):
        raise DataError(
            f"data.too_long=skip leaves out all of the {skipped} rows: none has room ({limits.room_means}: "
            f"{limits.room})."
        )
    return PromptReport(
        len(dataset), num_read, len(longest), max(prompts, default=0), max(responses, default=0), skipped
    )


def rows_to_read(dataset: PromptDataset, config: RunConfig, sample: int = 1000) -> int:
    """Number of the first rows that are looked at."""
    return min(len(dataset), sample if config.data.source == "reasoning_gym" else MAX_READ_ROWS)


def _encoded(encoder: PromptEncoder, task: Task, rows_are: str) -> tuple[list[int], list[int]]:
    """Prompt and longest response."""
    if rows_are == "preferences":
        prompt, *pair = encoder.preference_ids(task)
        return prompt, max(pair, key=len)
    return encoder.demonstration_ids(task) if rows_are == "demonstrations" else (encoder.prompt_ids(task), [])
