"""Conversations by the tokenizer's own chat template, whatever it is.

A turn goes on with its sampled tokens as they are, never with their text written anew. What the template puts between
them and the next answer is the difference of two of its texts:

    template(before, answer)                 = A          what ends an answer: after a mark in one, such as <|im_end|>
    template(before, answer, new, to speak)  = A + more

A template that does not begin the second text with the first one has rewritten its history (some strip the thinking of
earlier answers); then there is nothing that the sampled tokens could go on with.
"""

import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from jinja2 import TemplateError

from penstock.conf.errors import DataError, ModelError
from penstock.workers.gateway.formats.format import Message, Read, Tools
from penstock.workers.gateway.formats.thinking import BEGIN, split_thinking
from penstock.workers.gateway.formats.tool_calls import READERS
from penstock.workers.trajectory.turn import ToolCall, Turn

NUM_BEFORE = 16
"""Tokens of a prompt's end that show whether it has begun the thinking, however they are cut."""
MARK = "\u2042"
"""Stands for an answer in a text of the template."""


class TemplateFormat:
    """Of one tokenizer of transformers, or anything called like it."""

    def __init__(self, tokenizer: Any, tool_format: str = "hermes") -> None:
        """Raises `ModelError` for a tokenizer without a chat template."""
        if not getattr(tokenizer, "chat_template", None):
            raise ModelError(
                "an environment needs a chat template, and the model's tokenizer has none: put chat_template.jinja "
                "into its directory, or take a model that was trained to chat."
            )
        self._tokenizer = tokenizer
        self._read_calls = READERS[tool_format]
        self._numbers = itertools.count()

    def prompt_ids(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        return self._encode(self._text(messages, tools, to_speak=True))

    def next_prompt_ids(
        self, turn: Turn, before: Sequence[Message], new: Sequence[Message], tools: Tools
    ) -> list[int] | None:
        so_far = [*before, turn.message]
        closed, going_on = self._text(so_far, tools), self._text([*so_far, *new], tools, to_speak=True)
        if not going_on.startswith(closed):
            return None
        more = self._encode(self._ending + going_on[len(closed) :])
        if more and turn.output_ids and turn.output_ids[-1] == more[0]:  # it has ended its answer itself
            more = more[1:]
        return [*turn.prompt_ids, *turn.output_ids, *more]

    def read(self, token_ids: Sequence[int], tools: Tools, prompt_ids: Sequence[int] = ()) -> Read:
        text = str(self._tokenizer.decode(self._without_ending(token_ids), skip_special_tokens=False))
        before = str(self._tokenizer.decode(prompt_ids[-NUM_BEFORE:], skip_special_tokens=False))
        thinking, said = split_thinking(text, begun=before.rstrip().endswith(BEGIN))
        message: dict[str, Any] = {"role": "assistant"}
        if thinking is not None:
            message["reasoning_content"] = thinking
        if not tools:
            return Read(message | {"content": said})
        content, found, problem = self._read_calls(said, tools)
        calls = [ToolCall(f"call_{next(self._numbers)}", name, arguments) for name, arguments in found]
        message["content"] = content
        if calls:
            message["tool_calls"] = [as_message(call) for call in calls]
        return Read(message, calls, problem)

    @cached_property
    def _ending(self) -> str:
        """What the template writes after an answer, before anything else."""
        text = self._text([{"role": "user", "content": "."}, {"role": "assistant", "content": MARK}], ())
        _, mark, ending = text.rpartition(MARK)
        if not mark:
            raise ModelError("the model's chat template leaves out what the assistant says: nothing can go on with it.")
        return ending

    @cached_property
    def _ending_id(self) -> int | None:
        ids = self._encode(self._ending)
        return ids[0] if ids else None

    def _without_ending(self, token_ids: Sequence[int]) -> Sequence[int]:
        if token_ids and token_ids[-1] in (self._ending_id, self._tokenizer.eos_token_id):
            return token_ids[:-1]
        return token_ids

    def _text(self, messages: Sequence[Message], tools: Tools, *, to_speak: bool = False) -> str:
        described = [dict(tool) for tool in tools] or None
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tools=described, tokenize=False, add_generation_prompt=to_speak
            )
        except (TemplateError, TypeError) as error:
            raise DataError(f"the model's chat template does not take this conversation: {error}.") from error
        return str(text)

    def _encode(self, text: str) -> list[int]:
        whole = text.encode("utf-8", "replace").decode()  # half of a sign of two, which a harness has cut
        return list(self._tokenizer(whole, add_special_tokens=False)["input_ids"])


def as_message(call: ToolCall) -> Mapping[str, Any]:
    """As templates take it: arguments are an object, where OpenAI's protocol has text."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
