"""Conversations as the prompts that engines read: the tokens of a format, in which the places of pictures are expanded,
each once.

    messages ─▶ Format: one placeholder a picture ─▶ PictureProcessor ─▶ expanded tokens, pictures and their places

A turn that goes on keeps the tokens of what was read and sampled, and the pictures in them with their places; what is
new after them is expanded alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.conf.errors import DataError
from penstock.workers.gateway.formats.conversation import Format, Message, Tools
from penstock.workers.gateway.formats.pictures import pictures_in
from penstock.workers.pictures.placeholders import NO_PICTURES, PromptPictures
from penstock.workers.pictures.processor import PictureProcessor
from penstock.workers.trajectory import Turn


@dataclass(frozen=True)
class WrittenPrompt:
    """A prompt of an engine."""

    ids: list[int]
    pictures: PromptPictures = NO_PICTURES

    def __len__(self) -> int:
        return len(self.ids)


class PromptWriter:
    """The writer of an attempt's prompts. Messages are those of `formats/pictures.py: kept`."""

    def __init__(self, form: Format, processor: PictureProcessor | None = None, max_pictures: int = 0) -> None:
        """`processor`: the model's; None in a run of text."""
        self._form, self._processor, self._max_pictures = form, processor, max_pictures

    def whole(self, messages: Sequence[Message], tools: Tools) -> WrittenPrompt:
        """The prompt of a conversation, all of it written anew. Raises `DataError`."""
        pictures = self._pictures(messages)
        return self._expanded(self._form.prompt_ids(messages, tools), 0, NO_PICTURES, pictures)

    def going_on(
        self, turn: Turn, before: Sequence[Message], new: Sequence[Message], tools: Tools
    ) -> WrittenPrompt | None:
        """The prompt of `new` messages after a turn, whose own conversation was `before`; None: the conversation cannot
        go on with that turn's tokens. Raises `DataError`."""
        pictures = self._pictures(new, len(turn.pictures.encoded))
        ids = self._form.next_prompt_ids(turn, before, new, tools)
        if ids is None:
            return None
        return self._expanded(ids, len(turn.prompt_ids) + len(turn.output_ids), turn.pictures, pictures)

    def _expanded(
        self, ids: list[int], num_read: int, earlier: PromptPictures, pictures: Sequence[bytes]
    ) -> WrittenPrompt:
        """The prompt of these tokens, of which the first `num_read` are expanded, with the pictures `earlier`."""
        if self._processor is None:
            return WrittenPrompt(ids)
        new, ranges = self._processor.expand(ids[num_read:], pictures)
        placed = ((num_read + offset, length) for offset, length in ranges)
        return WrittenPrompt(
            [*ids[:num_read], *new],
            PromptPictures((*earlier.encoded, *pictures), (*earlier.ranges, *placed)),
        )

    def _pictures(self, messages: Sequence[Message], num_earlier: int = 0) -> list[bytes]:
        """The pictures of messages. Raises `DataError` where a prompt has more, with those before, than it may."""
        pictures, most = pictures_in(messages), self._max_pictures
        if (count := num_earlier + len(pictures)) > most:
            mend = "Raise it, or send fewer." if most else "Set it to the most that a conversation has, or send none."
            raise DataError(f"the conversation has {count} pictures, and rollout.max_pictures={most}. {mend}")
        return pictures
