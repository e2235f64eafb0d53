"""Tokenization of dataset rows: by the chat template or as bare text, with the places of their pictures expanded and
every length checked.

    "<image>How many?"  ─▶ "<start><pad><end>How many?"  ─▶ tokens  ─▶ expanded tokens and ranges, by the processor

A demonstration is what the template writes of the answered conversation after the prompt, as far as the token that ends
the turn:

    <|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n         the prompt
                        … what they have in common …             <think>\n\n</think>\n\n4<|im_end|>  \n

It is the same for training, for held-out prompts, and for the check before a run starts.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from penstock.conf.data import DataConfig
from penstock.conf.errors import DataError, ModelError
from penstock.conf.run import RunConfig
from penstock.workers.models.tokenizer import answer_ending, begins_thinking
from penstock.workers.pictures.processor import PictureProcessor
from penstock.workers.pictures.prompt_pictures import PromptPictures
from penstock.workers.prompts.dataset_row import DatasetRow
from penstock.workers.prompts.row_pictures import MARK, in_parts


class PromptTooLong(DataError):
    """The error for a row that does not fit; the row is skipped instead with `data.too_long=skip`."""


@dataclass(frozen=True)
class TokenLimits:
    """The numbers of tokens that fit."""

    max_prompt_tokens: int
    """Most tokens of a prompt: `data.max_prompt_tokens`."""
    room: int
    """Room for the prompt, or for prompt and demonstration together, in tokens."""
    room_means: str

    @classmethod
    def of_run(cls, config: RunConfig, *, with_responses: bool) -> "TokenLimits":
        room, means = config.rollout.max_model_len, "rollout.max_model_len"
        if not with_responses:
            room, means = room - config.rollout.sampling.max_tokens, f"{means} less rollout.sampling.max_tokens"
        return cls(config.data.max_prompt_tokens, room, means)

    def check(self, where: str, num_prompt: int, num_response: int = 0) -> None:
        """Raise `PromptTooLong` unless a row with so many tokens fits."""
        if num_prompt > self.max_prompt_tokens:
            raise PromptTooLong(
                f"{where}: the prompt has {num_prompt} tokens, more than data.max_prompt_tokens="
                f"{self.max_prompt_tokens} (the model has room for {self.room}: {self.room_means}). Raise "
                "data.max_prompt_tokens, or set data.too_long=skip to leave such rows out."
            )
        if num_prompt + num_response > self.room:
            response = f" and its response {num_response}" if num_response else ""
            raise PromptTooLong(
                f"{where}: the prompt has {num_prompt} tokens{response}, but there is room for {self.room} "
                f"({self.room_means}). Shorten the row, raise rollout.max_model_len if the model takes more, or set "
                "data.too_long=skip to leave such rows out."
            )


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as models read it."""

    ids: list[int]
    """Tokens, those of pictures expanded."""
    pictures: PromptPictures | None = None
    """Its pictures, of which there may be none; None in a run of text."""
    opens_thinking: bool = False
    """True if it has begun the thinking that the response continues."""

    def columns(self) -> dict[str, Any]:
        """The columns of a group that has this prompt."""
        return {"prompt_ids": self.ids, **(self.pictures.columns() if self.pictures is not None else {})}


class PromptEncoder:
    """Encoder of prompts and demonstrations for one tokenizer of transformers, or an object with the same methods."""

    def __init__(
        self,
        tokenizer: Any,
        data: DataConfig,
        limits: TokenLimits,
        template_kwargs: Mapping[str, Any] | None = None,
        processor: PictureProcessor | None = None,
        max_pictures: int = 0,
        hint: str | None = None,
        end_ids: Collection[int] = (),
    ) -> None:
        """`template_kwargs`: `model.chat_template_kwargs`. `processor`: the model's; None: the run is one of text.
        `max_pictures`: `rollout.max_pictures`. `hint`: `algorithm.hint`; None: a teacher reads what the policy does.
        `end_ids`: tokens that end a response, beside the tokenizer's own."""
        self.tokenizer, self.data, self.limits = tokenizer, data, limits
        self.processor, self.max_pictures, self.hint = processor, max_pictures, hint
        self.template_kwargs, self._end_ids = dict(template_kwargs or {}), frozenset(end_ids)
        self.uses_chat_template = bool(data.chat_template and getattr(tokenizer, "chat_template", None))

    def text(self, row: DatasetRow, response: str | None = None) -> str:
        """The prompt as the model sees it, before tokenisation, with one placeholder a picture. `response`: its answer,
        which the chat template writes, too. Raises `DataError` for a conversation without a chat template, or more
        pictures than the run has places for."""
        self._check_pictures(row)
        if not self.uses_chat_template and row.messages:
            raise DataError(
                f"{row.where}: the prompt is a conversation, and there is no chat template to write it with: set "
                "data.chat_template=true, and take a model whose tokenizer has one."
            )
        if not self.uses_chat_template:
            text = f"{self.data.system_prompt}\n{row.prompt}" if self.data.system_prompt else row.prompt
            return self._with_placeholders(text) if row.pictures else text
        answered = [] if response is None else [{"role": "assistant", "content": response}]
        return self._written([*self.messages(row), *answered], has_pictures=bool(row.pictures))

    def _written(self, messages: list[dict[str, Any]], *, has_pictures: bool = False, **options: bool) -> str:
        """The text that the chat template writes of messages; it asks for an answer where there is none. `options`:
        of `apply_chat_template`."""
        if self.processor is not None:
            for message in messages:
                message["content"] = in_parts(message["content"], has_pictures=has_pictures)
        is_answered = messages[-1]["role"] == "assistant"
        return str(
            self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=not is_answered, **options, **self.template_kwargs
            )
        )

    def messages(self, row: DatasetRow) -> list[dict[str, str]]:
        """The prompt as a conversation, with `data.system_prompt` before one that has no system message; its pictures
        are marks in the texts. Raises `DataError` for more pictures than the run has places for."""
        self._check_pictures(row)
        messages = [dict(message) for message in row.messages] or [{"role": "user", "content": row.prompt}]
        if self.data.system_prompt and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.data.system_prompt})
        return messages

    def hinted(self, row: DatasetRow) -> list[int]:
        """Tokens of the prompt that a teacher reads. Raises what `prompt` raises."""
        return self.prompt(row if self.hint is None else row.with_hint(self.hint)).ids

    def conversation(self, row: DatasetRow) -> list[dict[str, Any]]:
        """The messages, with contents in parts where they have pictures. Raises as `messages` does."""
        messages: list[dict[str, Any]] = [*self.messages(row)]
        for message in messages if row.pictures else ():
            if MARK in message["content"]:
                message["content"] = in_parts(message["content"], has_pictures=True)
        return messages

    def prompt(self, row: DatasetRow) -> EncodedPrompt:
        """Encode a prompt. Raises `PromptTooLong`, or `DataError` for a prompt without tokens."""
        prompt = self._encoded(row, self._continued(row))
        self.limits.check(row.where, len(prompt.ids))
        return prompt

    def demonstration(self, row: DatasetRow) -> tuple[EncodedPrompt, list[int]]:
        """Encode prompt and response, the response with the token that ends it.

        Raises `PromptTooLong`; `DataError` for a row without a demonstration; `ModelError` for a tokenizer without such
        a token, or a chat template that leaves answers out.
        """
        if not row.response:
            raise DataError(
                f"{row.where}: no demonstration to train on. Name its column with data.columns.response (or "
                "data.columns.answer)."
            )
        prompt, (response,) = self._answered(row, row.response)
        self.limits.check(row.where, len(prompt.ids), len(response))
        return prompt, response

    def preference(self, row: DatasetRow) -> tuple[EncodedPrompt, list[int], list[int]]:
        """Encode prompt, chosen and rejected response; errors as for `demonstration`."""
        if not row.response or not row.rejected:
            lacks = "rejected" if row.response else "chosen"
            raise DataError(
                f"{row.where}: no {lacks} response to compare. Name the columns with data.columns.response (the "
                "chosen one) and data.columns.rejected, or functions with data.teacher and data.rejected_teacher."
            )
        prompt, (chosen, rejected) = self._answered(row, row.response, row.rejected)
        self.limits.check(row.where, len(prompt.ids), max(len(chosen), len(rejected)))
        return prompt, chosen, rejected

    def is_rewritten(self, row: DatasetRow) -> bool:
        """Return whether the chat template begins the answered conversation with another text than the prompt."""
        return self.uses_chat_template and not self.text(row, row.response).startswith(self.text(row))

    def _answered(self, row: DatasetRow, *responses: str) -> tuple[EncodedPrompt, list[list[int]]]:
        """The prompt, and each response to it. Where the template writes an answered conversation otherwise, the prompt
        is what all have in common."""
        prompt = self.text(row)
        if not self.uses_chat_template:
            return self._encoded(row, prompt), [self._ended(self._ids(response)) for response in responses]
        written = [self.text(row, response) for response in responses]
        common = _beginning([prompt, *written])
        return self._encoded(row, common), [self._turn_ids(text[len(common) :]) for text in written]

    def _turn_ids(self, text: str) -> list[int]:
        """Tokens of what a template has written for an answer, as far as the one that ends the turn."""
        ids, ending = self._ids(text), self._ids(self._ending)
        first = len(ids) - len(ending)
        if ids[first:] != ending:
            first = 0
        end_ids = self._end_ids | {self.tokenizer.eos_token_id}
        for ends in (end_ids, self.tokenizer.added_tokens_decoder if first else ()):
            for place in range(first, len(ids)):
                if ids[place] in ends:
                    return ids[: place + 1]
        return self._ended(ids[:first] if first else ids)

    def _ended(self, ids: list[int]) -> list[int]:
        if self.tokenizer.eos_token_id is None:
            raise ModelError(
                "model.path: its tokenizer has no end-of-sequence token (eos_token), which ends a demonstration."
            )
        return [*ids, self.tokenizer.eos_token_id]

    @cached_property
    def _ending(self) -> str:
        """The text that the chat template writes after an answer."""
        return answer_ending(
            self._written,
            ", so that nothing can be learned from demonstrations. Set data.chat_template=false, or give the model "
            "another chat_template.jinja.",
        )

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _continued(self, row: DatasetRow) -> str:
        """The prompt, which ends with the beginning of the answer where the row has one."""
        if row.prefix is None or not self.uses_chat_template:
            return self.text(row)
        begun = [*self.messages(row), {"role": "assistant", "content": row.prefix}]
        return self._written(begun, has_pictures=bool(row.pictures), continue_final_message=True)

    def _encoded(self, row: DatasetRow, text: str) -> EncodedPrompt:
        # A chat template writes its special tokens itself.
        ids = self.tokenizer(text, add_special_tokens=not self.uses_chat_template)["input_ids"]
        if not ids:
            raise DataError(f"{row.where}: the prompt {row.prompt!r:.40} has no tokens; a model needs at least one.")
        if self.processor is None:
            return EncodedPrompt(list(ids), None, begins_thinking(text))
        try:
            expanded, ranges = self.processor.expand(ids, row.pictures)
        except DataError as error:
            raise DataError(f"{row.where}: {error}") from None
        return EncodedPrompt(expanded, PromptPictures(tuple(row.pictures), tuple(ranges)), begins_thinking(text))

    def _with_placeholders(self, text: str) -> str:
        """A text with the tokens that stand for a picture in the place of each mark."""
        assert self.processor is not None
        return text.replace(MARK, "".join(self.tokenizer.convert_ids_to_tokens(self.processor.unexpanded)))

    def _check_pictures(self, row: DatasetRow) -> None:
        if len(row.pictures) > self.max_pictures:
            raise DataError(
                f"{row.where}: the prompt has {len(row.pictures)} pictures, and rollout.max_pictures="
                f"{self.max_pictures}. Raise it, or set data.columns.pictures=null where the text is enough."
            )


def _beginning(texts: Sequence[str]) -> str:
    """The longest text that all begin with."""
    first, last = min(texts), max(texts)
    length = next((place for place, (one, other) in enumerate(zip(first, last)) if one != other), len(first))  # noqa: B905
    return first[:length]
