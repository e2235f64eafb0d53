"""Keeps held-out problems out of the training, for every data source and environment.

    held-out rows ─▶ HeldOutProblems: a digest of each ─▶ the source of prompts leaves out rows that are among them
                                                       ─▶ a check before the start: how many are, and an error for most

A problem is what the model is asked: two rows with the same conversation and pictures are the same one, whatever else
they hold, as text or as messages, and with any system message before it. `data.prompt_template` is part of it: where
the parts of a mixture have others than the held-out rows, the same question is another problem. A task of an
environment is identified by its data, or by its own `Task.problem`.
"""

import hashlib
import itertools
import json
from collections.abc import Collection, Iterable

from penstock.conf.errors import DataError
from penstock.workers.prompts.dataset_row import DatasetRow, PromptDataset

MOST_LEFT_OUT = 0.5
"""Largest share of the rows to train on that may be held out. With more, what is left is no longer the data that was
asked for."""


class HeldOutProblems:
    """Problems that evaluation measures, and on which no step may train.

    held_out = HeldOutProblems.of([evaluation])
    train.row(3) in held_out
    """

    def __init__(self, problems: Collection[bytes] = ()) -> None:
        self._problems = frozenset(problems)

    @classmethod
    def of(cls, datasets: Iterable[PromptDataset]) -> "HeldOutProblems":
        """Collect all rows of these datasets."""
        return cls([problem_of(dataset.row(index)) for dataset in datasets for index in range(len(dataset))])

    def __len__(self) -> int:
        return len(self._problems)

    def __contains__(self, row: DatasetRow) -> bool:
        return bool(self._problems) and problem_of(row) in self._problems

    def check(self, dataset: PromptDataset, num_read: int) -> int:
        """Count how many of the first rows to train on are held out. Raises `DataError` where it is most of them."""
        if not self._problems:
            return 0
        found = sum(dataset.row(index) in self for index in range(num_read))
        if found > MOST_LEFT_OUT * num_read:
            raise DataError(
                f"{found:,} of {num_read:,} rows to train on are problems of evaluation, on which no step trains: "
                f"{len(self):,} different ones are held out. Lower evaluation.num_problems, or name other held-out "
                "problems; where there are no others, as in a game that always begins alike, set "
                "evaluation.overlap=allow. An environment may say what tells its tasks apart: Task(…, problem=…)."
            )
        return found


def _asked(row: DatasetRow) -> list[dict[str, str]]:
    """The conversation after its system messages, or these where there is no more."""
    said = [dict(message) for message in row.messages] or [{"role": "user", "content": row.prompt}]
    return list(itertools.dropwhile(lambda message: message["role"] == "system", said)) or said


def problem_of(row: DatasetRow) -> bytes:
    """Digest that identifies a row's problem."""
    what = _asked(row) if row.problem is None else row.problem
    if row.pictures:
        what = [what, *(hashlib.sha256(picture).hexdigest() for picture in row.pictures)]
    return hashlib.blake2b(json.dumps(what, sort_keys=True, default=str).encode(), digest_size=16).digest()
