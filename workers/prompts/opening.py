"""The opening of a run's prompts from its configuration: dataset, tokenizer and limits put together to a source, and
looked at before anything starts, by `penstock validate` and in the first second of a run.

It is used both for training and for the held-out problems of evaluation.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.conf.data import ENVIRONMENT
from penstock.conf.errors import ConfigError, DataError
from penstock.conf.run import RunConfig
from penstock.workers.agents import environment as environments
from penstock.workers.agents.environment import make_environment
from penstock.workers.models.tokenizer import generation_ends, load_tokenizer
from penstock.workers.pictures.processor import PictureProcessor
from penstock.workers.prompts.data_identity import HeldOutProblems
from penstock.workers.prompts.dataset import open_dataset
from penstock.workers.prompts.dataset_row import DataPart, DatasetRow, PromptDataset, RowNeeds
from penstock.workers.prompts.order import Curriculum, CurriculumState
from penstock.workers.prompts.raw_rows import check_texts, first_of
from penstock.workers.prompts.source import PromptSource, PromptStart
from penstock.workers.prompts.tokenization import PromptEncoder, PromptTooLong, TokenLimits

MAX_READ_ROWS = 50_000
"""Rows that are read of a file. Problems of reasoning_gym are generated and pictures are decoded, which takes longer:
only `sample` of such rows are read."""


def open_source(
    config: RunConfig,
    model_path: str,
    *,
    rows_are: str = "prompts",
    held_out: bool = False,
    start: PromptStart | None = None,
    picture_digest: str | None = None,
    needs_answer: bool = False,
) -> PromptSource:
    """Open the groups of a run in order, epoch after epoch; or the held-out ones in the dataset's own order.

    `rows_are`: "prompts", "tasks", "demonstrations" or "preferences". `start`: the place where a resumed run continues.
    `picture_digest`: of the processor that the run has; None: any. `needs_answer`: the reward needs each prompt's
    answer.
    Raises `DataError`, `ConfigError` or `ModelError`.
    """
    dataset = open_rows(config, held_out=held_out)
    if dataset is None:
        raise DataError("evaluation.path=null: there are no held-out problems to evaluate on.")
    processor = PictureProcessor.of(model_path, picture_digest) if config.rollout.max_pictures else None
    encoder = encoder_of(config, load_tokenizer(model_path), processor, rows_are)
    if held_out:
        return PromptSource(dataset, encoder, start, rows_are=rows_are, once=True, needs_answer=needs_answer)
    return PromptSource(
        dataset, encoder, start,
        rows_are=rows_are, held_out=open_held_out(config), curriculum=_curriculum(config, start or PromptStart()),
        needs_answer=needs_answer,
    )  # fmt: skip


def _curriculum(config: RunConfig, start: PromptStart) -> Curriculum | None:
    """The curriculum at the run's start. It does not wait for groups that may be under way, whatever the timing."""
    if config.data.curriculum.by is None:
        return None
    groups, state = config.trainer.groups_per_step, start.curriculum or CurriculumState(start.first_group)
    lag = config.max_active_groups - groups + config.store.window - 1
    return Curriculum(config.data.curriculum, config.data.seed, groups, lag, state)


def encoder_of(
    config: RunConfig, tokenizer: Any, processor: PictureProcessor | None, rows_are: str = "prompts"
) -> PromptEncoder:
    """The encoder of a run's prompts. `processor`: the model's; None without `rollout.max_pictures`."""
    limits = TokenLimits.of_run(config, with_responses=rows_are != "prompts")
    kwargs, most = config.model.chat_template_kwargs, config.rollout.max_pictures
    return PromptEncoder(
        tokenizer, config.data, limits, kwargs, processor, most, getattr(config.algorithm, "hint", None),
        generation_ends(tokenizer) if rows_are in ("demonstrations", "preferences") else (),
    )  # fmt: skip


def open_held_out(config: RunConfig) -> HeldOutProblems:
    """Problems that evaluation measures, and no step may train on. None where it measures nothing, or with
    `evaluation.overlap=allow`. Raises `DataError`, `ConfigError`."""
    evaluation = config.evaluation
    if not evaluation.every_steps or evaluation.overlap == "allow":
        return HeldOutProblems()
    configs = map(config.with_held_out, (None, *evaluation.sets))
    held_out = [open_rows(one, held_out=True) for one in configs]
    return HeldOutProblems.of(dataset for dataset in held_out if dataset is not None)


def open_rows(config: RunConfig, *, held_out: bool = False) -> PromptDataset | None:
    """Open the rows to train on, or the held-out part: tasks of the run's environment with `data.source=environment`,
    rows of a dataset otherwise. None: nothing is held out. Raises `DataError`, `ConfigError`."""
    if config.data.source != ENVIRONMENT:
        return open_dataset(config.data, config.evaluation, held_out=held_out)
    name = config.environment.name
    if name is None:
        raise ConfigError("data.source=environment: there is none. Set environment.name.")
    environment = make_environment(config.environment, config.imports)
    if not callable(getattr(environment, "tasks", None)):
        raise ConfigError(
            f"data.source=environment: {name} has no method tasks(seed). Give it one, or take its tasks from a "
            "dataset: data.source=jsonl."
        )
    seed = config.evaluation.seed if held_out else config.data.seed
    size = config.evaluation.num_problems if held_out else config.data.size
    return EnvironmentTasks(environment.tasks(seed), size, name)


class EnvironmentTasks:
    """The tasks of an environment, as a dataset: the first `size`, or all of a list, or the first ones of an endless
    generator."""

    def __init__(self, tasks: Iterable[environments.Task], size: int | None, name: str) -> None:
        """`name`: of the environment, for messages. Raises `DataError` if there are no tasks."""
        self._tasks, self.is_cut = first_of(tasks, size)
        self._name = name
        if not self._tasks:
            raise DataError(f"environment.name={name}: its tasks(seed) gives no task at all.")
        for task in self._tasks:
            check_texts(task.data, f"{name} task {task.id!a}")

    def __len__(self) -> int:
        return len(self._tasks)

    def parts(self) -> Mapping[str, DataPart]:
        return {"": DataPart(self._name, len(self), lambda index: self._tasks[index].as_columns())}

    def row(self, index: int) -> DatasetRow:
        task = self._tasks[index]
        where = f"{self._name} task {task.id}"
        return DatasetRow("", None, index, where, extra=task.as_columns(), problem=[task.identity])


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
    unanswered: int = 0
    """Number of rows read whose answer is null or NaN, where they have a column of answers."""
    left_out: int = 0
    """Number of rows read that data.no_answer=skip leaves out."""


def check_prompts(
    dataset: PromptDataset,
    encoder: PromptEncoder,
    config: RunConfig,
    *,
    rows_are: str = "prompts",
    sample: int = 1000,
    needs: RowNeeds | None = None,
) -> PromptReport:
    """Check a dataset before anything starts: the first rows as they are, and the `sample` longest of them tokenised.
    `needs`: what the rows are needed to have.

    Raises `DataError` (a missing column, a line that is no JSON, a prompt too long, no answer) or `ModelError`.
    """
    limits = encoder.limits
    num_read = rows_to_read(dataset, config, sample)

    def num_characters(row: DatasetRow) -> int:
        seen = sum(map(encoder.processor.length_of, row.pictures)) if encoder.processor is not None else 0
        return len(row.prompt) + seen + (len(row.response or "") if rows_are != "prompts" else 0)

    needs, unanswered, left_out = needs or RowNeeds.of(config.data, rows_are, answer=False), 0, 0

    def complete_rows() -> Iterator[DatasetRow]:
        nonlocal unanswered, left_out
        for row in map(dataset.row, range(num_read)):
            unanswered += row.answer is None
            if needs.lacks(row):
                left_out += 1
            else:
                yield row

    longest = heapq.nlargest(sample, complete_rows(), key=num_characters)
    prompts, responses, skipped = [], [], 0
    for row in sorted(longest, key=lambda row: row.index):
        try:
            prompt, response = _encoded(encoder, row, rows_are)
        except PromptTooLong:
            if config.data.too_long != "skip":
                raise
            skipped += 1
            continue
        prompts.append(len(prompt))
        responses.append(len(response))
    if skipped + left_out == len(dataset):
        raise DataError(
            f"data.too_long=skip and data.no_answer=skip leave out all of the {skipped + left_out} rows: {left_out} "
            f"have no answer, and the others no room ({limits.room_means}: {limits.room})."
            if left_out
            else f"data.too_long=skip leaves out all of the {skipped} rows: none has room ({limits.room_means}: "
            f"{limits.room})."
        )
    return PromptReport(
        len(dataset), num_read, len(longest), max(prompts, default=0), max(responses, default=0), skipped,
        0 if config.data.columns.answer is None else unanswered, left_out,
    )  # fmt: skip


def rows_to_read(dataset: PromptDataset, config: RunConfig, sample: int = 1000) -> int:
    """Number of the first rows that are looked at."""
    is_slow = config.data.source == "reasoning_gym" or config.rollout.max_pictures > 0
    return min(len(dataset), sample if is_slow else MAX_READ_ROWS)


def _encoded(encoder: PromptEncoder, row: DatasetRow, rows_are: str) -> tuple[list[int], list[int]]:
    """Prompt and longest response."""
    if rows_are == "preferences":
        prompt, *pair = encoder.preference(row)
        return prompt.ids, max(pair, key=len)
    if rows_are == "demonstrations":
        prompt, response = encoder.demonstration(row)
        return prompt.ids, response
    hinted = [] if encoder.hint is None else encoder.hinted(row)
    return max(encoder.prompt(row).ids, hinted, key=len), []
