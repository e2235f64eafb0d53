"""A response as rewards get it: its text, the answer in it, its tokens."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from penstock.algorithms.graph.columns import OPENS_THINKING, TASK_MESSAGES
from penstock.workers.gateway.formats.answers import split_thinking


@dataclass(frozen=True)
class Response:
    """A sampled response. What an environment takes for an answer is scored without it, as it is."""

    text: str
    """Whole text, thinking included."""
    token_ids: Sequence[int] = ()
    """Sampled tokens; empty where there are none, as for a text that a user has written."""
    version: int = 0
    """Newest version of the policy when it was scored."""
    opens_thinking: bool = False
    """True if its prompt has begun the thinking."""
    prompt: Sequence[Mapping[str, Any]] = ()
    """Messages of its prompt; empty for a prompt that is a text."""

    @cached_property
    def answer(self) -> str:
        """The text after the thinking; empty where the thinking has no end."""
        return split_thinking(self.text, begun=self.opens_thinking)[1]


def with_task(response: Any, task: str) -> tuple[Any, dict[str, Any]]:
    """The response with what its task says of the prompt, and the columns of the task (JSON) that rewards get."""
    columns = json.loads(task)
    opens_thinking, messages = bool(columns.pop(OPENS_THINKING, False)), columns.pop(TASK_MESSAGES, ())
    if isinstance(response, Response):
        response = replace(response, opens_thinking=opens_thinking, prompt=messages)
    return response, columns


def text_of(response: Any) -> Any:
    """The whole text of a response; an environment's answer as it is."""
    return response.text if isinstance(response, Response) else response


def answer_of(response: Any) -> Any:
    """The answer of a response; an environment's as it is."""
    return response.answer if isinstance(response, Response) else response
