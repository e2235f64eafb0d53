"""The source of a run's rows: draws prompts in order, tokenises them, and puts them into the store.

    dataset ─ row ─▶ PromptEncoder ─ prompt_ids, task ─▶ store (whose credits say when)

The controller starts `run`, which ends when the store closes. It continues exactly after the groups that the store has,
even if another source put them. `cursor_after` is for checkpoints.
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from penstock.algorithms.graph.columns import ENVIRONMENT_TASK, HINTED, TASK_MESSAGES
from penstock.conf.errors import DataError
from penstock.store.client.store_client import StoreClient
from penstock.store.errors import StoreClosed
from penstock.workers.prompts.data_identity import DataIdentity, HeldOutProblems
from penstock.workers.prompts.dataset_row import DatasetRow, PromptDataset, RowNeeds
from penstock.workers.prompts.order import Curriculum, CurriculumState, PromptCursor, PromptOrder
from penstock.workers.prompts.tokenization import PromptEncoder, PromptTooLong

TOO_LONG, HELD_OUT, NO_ANSWER = "prompt_too_long", "held_out", "no_answer"
"""Reasons to leave rows out: data.too_long=skip, evaluation measures them, data.no_answer=skip."""
REMEMBERED_CURSORS = 65_536
PASSED_AT_ONCE = 256
"""Number of groups drawn and dropped at a time, because another source has put them; between times other calls are
served."""


@dataclass(frozen=True)
class PromptStart:
    """The place where a resumed run continues."""

    cursor: PromptCursor = field(default_factory=PromptCursor)
    """Cursor before group `first_group`."""
    first_group: int = 0
    """Number of the first group that the store has not had."""
    curriculum: CurriculumState | None = None
    """What the curriculum knows then; None: there was none."""
    data: DataIdentity | None = None
    """Identity of the data that the cursor belongs to; None: not known."""
    num_rows: int | None = None
    """Number of rows of the cursor's epoch, if the data has grown since it began; None: all."""


@dataclass(frozen=True)
class DrawState:
    """The state of drawing at some moment."""

    num_groups: int
    """Number of groups of the run."""
    cursor: PromptCursor
    num_left_out: Mapping[str, int] = field(default_factory=dict)
    """Number of rows that were left out, by reason."""


class PromptSource:
    """Groups in a fixed order, from a start on, epoch after epoch. The store admits groups in the order drawn, so after
    n admissions since the run's start a resumed run continues at `start_after(n)`."""

    def __init__(
        self,
        dataset: PromptDataset,
        encoder: PromptEncoder,
        start: PromptStart | None = None,
        *,
        rows_are: str = "prompts",
        once: bool = False,
        held_out: HeldOutProblems | None = None,
        curriculum: Curriculum | None = None,
        needs_answer: bool = False,
    ) -> None:
        """`rows_are`: "prompts", "tasks", or rows with responses: "demonstrations", "preferences". `once`: one epoch,
        in the dataset's own order. `held_out`: problems that are left out. `curriculum`: at the same start; None: all
        rows are taken. `needs_answer`: the reward needs each prompt's answer."""
        data = encoder.data
        self.dataset, self.encoder, self.rows_are = dataset, encoder, rows_are
        self.skips = data.too_long == "skip"
        self.num_left_out = dict.fromkeys((TOO_LONG, HELD_OUT, NO_ANSWER), 0)
        """Number of rows left out so far, by reason, for `dropped/<reason>`."""
        self._held_out = held_out or HeldOutProblems()
        self._needs = RowNeeds.of(data, rows_are, needs_answer)
        start = start or PromptStart()
        self._first_rows = start.num_rows
        shuffle = data.shuffle and not once
        self._order = PromptOrder(len(dataset), data.seed, start.cursor, shuffle=shuffle, first_rows=start.num_rows)
        self._once, self._curriculum = once, curriculum
        self._start = DrawState(start.first_group, start.cursor)
        self._drawn: deque[DrawState] = deque([self._start], maxlen=REMEMBERED_CURSORS)

    @cached_property
    def identity(self) -> DataIdentity:
        """Identity of the data, for checkpoints."""
        return DataIdentity.of(self.dataset, self.encoder.data)

    @property
    def cursor(self) -> PromptCursor:
        """Cursor after the last group drawn, which may not have been admitted yet."""
        return self._order.cursor

    @property
    def num_drawn(self) -> int:
        """Number of groups of the run so far."""
        return self._drawn[-1].num_groups

    def cursor_after(self, num_groups: int) -> PromptCursor:
        """The cursor after the first `num_groups` groups of the run. `DataError`: not drawn yet, or long ago."""
        first, last = self._drawn[0].num_groups, self._drawn[-1].num_groups
        if not first <= num_groups <= last:
            raise DataError(
                f"the prompt cursor after {num_groups} groups is unknown: those after {first} to {last} groups are."
            )
        return self._drawn[num_groups - first].cursor

    def start_after(self, num_groups: int) -> PromptStart:
        """The place where a run continues whose store has had the first `num_groups` groups. Groups that are not drawn
        yet were put by another source; and a store that replaces another has had fewer."""
        if not self._drawn[0].num_groups <= num_groups <= self._drawn[-1].num_groups:
            self.go_to(num_groups)
        curriculum = None if self._curriculum is None else self._curriculum.state_before(num_groups)
        cursor = self.cursor_after(num_groups)
        num_rows = self._first_rows if cursor.epoch <= self._start.cursor.epoch else None
        return PromptStart(cursor, num_groups, curriculum, self.identity, num_rows)

    def go_to(self, num_groups: int) -> None:
        """Go on as if the first `num_groups` groups of the run, and no more, had been drawn. Raises `DataError` if the
        source begins later."""
        if num_groups < self._start.num_groups:
            raise DataError(
                f"the store has {num_groups} groups, and the prompts begin after {self._start.num_groups}: they are of "
                "different checkpoints."
            )
        if not self._remembers(num_groups):
            self._go_back(self._start)
        while self._drawn[-1].num_groups > num_groups:
            self._drawn.pop()
        self._go_back(self._drawn[-1])
        self._skip_groups(num_groups - self._drawn[-1].num_groups)

    def next_groups(self, count: int) -> list[dict[str, Any]]:
        """Draw the source columns of the next `count` groups: `prompt_ids` (list of int; tasks have none), `task` (JSON
        string), and `response_ids` and `response_text` with demonstrations, `chosen_ids` and `rejected_ids` with
        preferences; in a run with pictures `pictures`, and `picture_ranges` beside `prompt_ids`. Fewer than `count`
        only from a source that goes through its dataset once. Raises `DataError` for a row that cannot be used."""
        groups = (self._next_group() for _ in range(count))
        return [group for group in groups if group is not None]

    async def run(self, store: StoreClient, batch: int = 8) -> None:
        """Keep the store supplied until it closes. The store takes groups as credits allow, so this mostly waits. From
        now on the groups come from this source alone, beginning with the first that the store has not had."""
        had = await store.become_source()
        while had - self._drawn[-1].num_groups > PASSED_AT_ONCE:  # other calls may come meanwhile
            if not await self._load_outcomes(store, self.num_drawn + PASSED_AT_ONCE):
                return
            self._skip_groups(PASSED_AT_ONCE)
            await asyncio.sleep(0)
        if not await self._load_outcomes(store, had):
            return
        self.go_to(had)
        try:
            while await self._load_outcomes(store, self.num_drawn):
                await store.put_groups(self.next_groups(batch if self._curriculum is None else self._curriculum.left))
        except StoreClosed:
            return

    async def _load_outcomes(self, store: StoreClient, group: int) -> bool:
        """Have the curriculum hear what it draws this group by. Returns False when the store is closed."""
        missing = range(0) if self._curriculum is None else self._curriculum.missing(group)
        if self._curriculum is None or not missing:
            return True
        outcomes = await store.outcomes(missing.start, missing.stop)
        self._curriculum.hear(outcomes or ())
        return outcomes is not None

    def __len__(self) -> int:
        """Number of rows of the dataset."""
        return len(self.dataset)

    def stats(self) -> dict[str, float]:
        dropped = {f"dropped/{reason}": count for reason, count in self.num_left_out.items()}
        by_level = {} if self._curriculum is None else self._curriculum.stats()
        return {"groups": self.num_drawn, "epoch": self.cursor.epoch, **dropped, **by_level}

    def _next_group(self) -> dict[str, Any] | None:
        if self._curriculum is not None:
            self._curriculum.begin()
        for tried in range(2 * len(self.dataset)):
            if self._once and self.cursor.position >= len(self.dataset):
                return None
            row = self._next_row(tried)
            if row is None:
                continue
            try:
                group = self._group(row)
            except PromptTooLong:
                if not self.skips:
                    raise
                self.num_left_out[TOO_LONG] += 1
                continue
            if self._curriculum is not None:
                self._curriculum.drew(row)
            drawn = self._drawn[-1].num_groups + 1
            self._drawn.append(self._after(drawn))
            return group
        raise self._nothing_left()

    def _next_row(self, tried: int) -> DatasetRow | None:
        """The next row; None: it is one that evaluation measures, that lacks its answer, or that the curriculum passes
        over. `tried`: rows since the last group."""
        row = self.dataset.row(self._order.next())
        if row in self._held_out:
            self.num_left_out[HELD_OUT] += 1
            return None
        if self._needs.lacks(row):
            self.num_left_out[NO_ANSWER] += 1
            return None
        if self._curriculum is not None and not self._curriculum.takes(
            row, self._order.cursor, tried < len(self.dataset)
        ):
            return None
        return row

    def _after(self, num_groups: int) -> DrawState:
        """The state of drawing now, with so many groups."""
        return DrawState(num_groups, self._order.cursor, dict(self.num_left_out))

    def _remembers(self, num_groups: int) -> bool:
        """Return whether drawing can go back to after so many groups without beginning at the start."""
        is_near = self._drawn[0].num_groups <= num_groups
        return is_near and (self._curriculum is None or self._curriculum.remembers(num_groups))

    def _nothing_left(self) -> DataError:
        limits = self.encoder.limits
        if self._curriculum is not None and self._curriculum.phase:
            return DataError(
                f"none of the {len(self.dataset)} rows is of the levels that this phase draws "
                f"({', '.join(self._curriculum.phase)}). Mend data.curriculum.phases, whose levels are values of "
                "data.curriculum.by."
            )
        if num_unanswered := self.num_left_out[NO_ANSWER]:
            return DataError(
                f"data.no_answer=skip leaves out {num_unanswered:,} rows, and none is left of the "
                f"{len(self.dataset):,} that is not too long (data.max_prompt_tokens={limits.max_prompt_tokens}) or "
                "held out."
            )
        if self._held_out:
            return DataError(
                f"none of the {len(self.dataset)} rows is left to train on: {len(self._held_out)} problems are held "
                "out (evaluation.overlap=drop), and data.too_long=skip leaves out rows that are longer than "
                f"data.max_prompt_tokens={limits.max_prompt_tokens} or than the room of {limits.room}."
            )
        return DataError(
            f"data.too_long=skip left out every one of the {len(self.dataset)} rows: all are longer than "
            f"data.max_prompt_tokens={limits.max_prompt_tokens} or than the room of {limits.room}."
        )

    def _go_back(self, drawn: DrawState) -> None:
        self._order.go_to(drawn.cursor)
        self.num_left_out |= dict.fromkeys(self.num_left_out, 0) | dict(drawn.num_left_out)
        if self._curriculum is not None:
            self._curriculum.go_to(drawn.num_groups)
        if drawn is not self._drawn[-1]:
            self._drawn.clear()
            self._drawn.append(drawn)

    def _skip_groups(self, count: int) -> None:
        """Draw and drop so many groups."""
        if self.skips or self._curriculum is not None:  # which rows are too long is found out by their tokens alone
            self.next_groups(count)
        elif count:
            self._skip_rows(count)
            drawn = self._drawn[-1].num_groups + count
            self._drawn.clear()
            self._drawn.append(self._after(drawn))

    def _skip_rows(self, count: int) -> None:
        if not self._held_out and not (self._needs.skips and self._needs.fields):
            self._order.skip(count)
            return
        for _ in range(count):
            if all(self._next_row(tried) is None for tried in range(2 * len(self.dataset))):
                raise self._nothing_left()

    def _group(self, row: DatasetRow) -> dict[str, Any]:
        if self.rows_are == "preferences":
            prompt, chosen_ids, rejected_ids = self.encoder.preference(row)
            pair = {"chosen_ids": chosen_ids, "rejected_ids": rejected_ids}
            return {**prompt.columns(), "task": row.to_json(), **pair}
        if self.rows_are == "demonstrations":
            prompt, response_ids = self.encoder.demonstration(row)
            response = {"response_ids": response_ids, "response_text": row.response}
            return {**prompt.columns(), "task": row.to_json(), **response}
        if self.rows_are == "tasks":
            has_conversation = ENVIRONMENT_TASK not in row.extra
            task = row.to_json(**{TASK_MESSAGES: self.encoder.conversation(row)} if has_conversation else {})
            return {"task": task} | ({"pictures": list(row.pictures)} if self.encoder.processor is not None else {})
        hinted = {} if self.encoder.hint is None else {HINTED: self.encoder.hinted(row)}
        prompt = self.encoder.prompt(row)
        return {**prompt.columns(), "task": row.prompt_task(opens_thinking=prompt.opens_thinking), **hinted}
