"""The source of a run's rows: draws prompts in order, tokenises them when their turn comes, and puts them into the store.

    dataset ─ row ─▶ PromptEncoder ─ prompt_ids, task ─▶ store (whose credits say when)

`run` is started by the controller and ends when the store closes. `cursor_after` is for checkpoints.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.conf.data import DataConfig
from penstock.conf.errors import DataError
from penstock.conf.run import RunConfig
from penstock.store.errors import StoreClosed
from penstock.workers.prompts.dataset import ProblemDataset, PromptDataset
from penstock.workers.prompts.order import PromptCursor, PromptOrder
from penstock.workers.prompts.tokenization import PromptEncoder, PromptTooLong, TokenLimits

MAX_READ_ROWS = 50_000
"""Rows that `check_prompts` reads of a file; problems of an environment are made, which takes longer: fewer of them."""
REMEMBERED_CURSORS = 65_536


class GroupSink(Protocol):
    """What the source needs of `store.client.StoreClient`."""

    async def put_groups(self, groups: list[dict[str, Any]]) -> list[int]: ...


class PromptSource:
    """Groups in a fixed order, from a cursor on, epoch after epoch.

    `first_group`: groups that the run had drawn before (0 for a new one); `cursor_after(n)` counts from the run's start.
    The store admits groups in the order drawn, so after n admissions `cursor_after(n)` is where a resumed run goes on.
    """

    def __init__(
        self,
        dataset: PromptDataset,
        encoder: PromptEncoder,
        data: DataConfig,
        *,
        cursor: PromptCursor | None = None,
        first_group: int = 0,
        demonstrations: bool = False,
    ) -> None:
        self.dataset = dataset
        self.encoder = encoder
        self.skips = data.too_long == "skip"
        self.demonstrations = demonstrations
        self.skipped = 0
        """Rows left out by data.too_long=skip so far, for `dropped/prompt_too_long`."""
        self._order = PromptOrder(len(dataset), data.seed, cursor, shuffle=data.shuffle)
        self._cursors: deque[tuple[int, PromptCursor]] = deque(
            [(first_group, self._order.cursor)], maxlen=REMEMBERED_CURSORS
        )

    @property
    def cursor(self) -> PromptCursor:
        """After the last group drawn, which may not have been admitted yet."""
        return self._order.cursor

    def cursor_after(self, num_groups: int) -> PromptCursor:
        """The cursor after the first `num_groups` groups of the run. Raises `DataError` for a number not drawn, or long ago."""
        first, last = self._cursors[0][0], self._cursors[-1][0]
        if not first <= num_groups <= last:
            raise DataError(
                f"the prompt cursor after {num_groups} groups is unknown: those after {first} to {last} groups are."
            )
        return self._cursors[num_groups - first][1]

    def next_groups(self, count: int) -> list[dict[str, Any]]:
        """The source columns of the next `count` groups: `prompt_ids` (list of int), `task` (JSON string), and
        `response_ids` with demonstrations. Raises `DataError` for a row that cannot be used."""
        return [self._next_group() for _ in range(count)]

    async def run(self, store: GroupSink, batch: int = 8) -> None:
        """Keep the store supplied until it closes. It takes groups as credits allow, so this waits more than it works."""
        try:
            while True:
                await store.put_groups(self.next_groups(batch))
        except StoreClosed:
            return

    def _next_group(self) -> dict[str, Any]:
        for _ in range(2 * len(self.dataset)):
            task = self.dataset.row(self._order.next())
            try:
                group = self._group(task)
            except PromptTooLong:
                if not self.skips:
                    raise
                self.skipped += 1
                continue
            self._cursors.append((self._cursors[-1][0] + 1, self._order.cursor))
            return group
        raise DataError(
            f"data.too_long=skip left out every one of the {len(self.dataset)} rows: all are longer than "
            f"data.max_prompt_tokens={self.encoder.limits.max_prompt_tokens} or what {self.encoder.limits.room_key} allows."
        )

    def _group(self, task: Any) -> dict[str, Any]:
        if self.demonstrations:
            prompt_ids, response_ids = self.encoder.demonstration_ids(task)
            return {"prompt_ids": prompt_ids, "task": task.to_json(), "response_ids": response_ids}
        return {"prompt_ids": self.encoder.prompt_ids(task), "task": task.to_json()}


@dataclass(frozen=True)
class PromptReport:
    """What `check_prompts` found."""

    rows: int
    """Of the dataset."""
    read: int
    """Rows looked at: columns and types."""
    tokenized: int
    """The longest of these, tokenised."""
    longest_prompt: int
    """Tokens."""
    longest_response: int
    """Tokens of a demonstration with its end; 0 without."""
    skipped: int
    """Of those tokenised, left out by data.too_long=skip."""


def check_prompts(
    dataset: PromptDataset,
    tokenizer: Any,
    config: RunConfig,
    *,
    demonstrations: bool = False,
    model_positions: int | None = None,
    sample: int = 1000,
) -> PromptReport:
    """Look at a dataset before anything starts: the first rows as they are, and the `sample` longest of them tokenised.

    Raises `DataError` (a missing column, a line that is no JSON, a prompt too long) or `ModelError`.
    """
    limits = TokenLimits.of(config, demonstrations=demonstrations, model_positions=model_positions)
    encoder = PromptEncoder(tokenizer, config.data, limits)
    num_read = min(len(dataset), sample if isinstance(dataset, ProblemDataset) else MAX_READ_ROWS)
    sizes = []
    for index in range(num_read):
        task = dataset.row(index)
        sizes.append(len(task.prompt) + (len(task.response or "") if demonstrations else 0))
    longest = sorted(range(num_read), key=lambda index: -sizes[index])[:sample]
    prompts, responses, skipped = [], [], 0
    for index in sorted(longest):
        try:
            task = dataset.row(index)
            prompt, response = encoder.demonstration_ids(task) if demonstrations else (encoder.prompt_ids(task), [])
        except PromptTooLong:
            if config.data.too_long != "skip":
                raise
            skipped += 1
            continue
        prompts.append(len(prompt))
        responses.append(len(response))
    if skipped == len(dataset):
        raise DataError(f"data.too_long=skip leaves out all of the {skipped} rows: none has room. {limits.describe()}")
    return PromptReport(
        len(dataset), num_read, len(longest), max(prompts, default=0), max(responses, default=0), skipped
    )
