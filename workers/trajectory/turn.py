"""One turn of a trajectory: what the policy read, and what it sampled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ToolCall:
    """A call that the policy made."""

    id: str
    name: str
    arguments: Mapping[str, Any]
    """Parsed JSON."""


@dataclass(frozen=True)
class Turn:
    """What was sampled at once. The lists `output_ids`, `logprobs` and `versions` have one entry a sampled token."""

    id: int
    """Of its trajectory, from 0 in the order in which turns were asked for."""
    parent: int | None
    """The turn whose tokens this one's prompt begins with; None for the first of a segment."""
    message: Mapping[str, Any]
    """As the chat template takes it: {role: assistant, content, reasoning_content, tool_calls}."""
    calls: Sequence[ToolCall]
    prompt_ids: Sequence[int]
    """All that the policy read."""
    output_ids: Sequence[int]
    """What it sampled, the end-of-sequence token included."""
    logprobs: Sequence[float]
    """Of the sampled tokens, natural log, under the sampling distribution."""
    versions: Sequence[int]
    """Weight version that each token was sampled under."""
    finish: str
    """stop; or length: no more tokens were allowed."""
    text: str = ""
    """What was sampled, decoded, without special tokens: thinking and calls included. See `answer`."""
    problem: str = ""
    """Why calls in the text could not be read; empty if they could, or there were none."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """What the request asked for beyond the run's sampling."""
    temperature: float = 1.0
    """At which `logprobs` are those of the policy: what it was sampled at; 1 where that was 0."""
    stopped_by: str = ""
    """The stop string that ended it, which its message is without; empty if none did."""

    @property
    def answer(self) -> str:
        """What was said, without thinking, calls and a stop string: what rewards look at."""
        return str(self.message.get("content") or "")

    @property
    def is_cut(self) -> bool:
        """Whether a limit of the run ended it. One that is as long as whoever asked wanted it is whole."""
        wanted = self.sampling.get("max_tokens")
        return self.finish == "length" and (wanted is None or len(self.output_ids) < wanted)
