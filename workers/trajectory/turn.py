"""A turn of a trajectory: what the policy read, and what it sampled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ToolCall:
    """A call that the policy made."""

    id: str
    name: str
    arguments: Mapping[str, Any]
    """Arguments, parsed from JSON."""


@dataclass(frozen=True)
class Turn:
    """The tokens of one sample. The lists `output_ids`, `logprobs` and `versions` have an entry for each sampled
    token."""

    id: int
    """Number in its trajectory, from 0 in the order in which turns were asked for."""
    parent: int | None
    """The turn whose tokens this one's prompt begins with; None for the first of a segment."""
    message: Mapping[str, Any]
    """Message as the chat template takes it: {role: assistant, content, reasoning_content, tool_calls}."""
    calls: Sequence[ToolCall]
    prompt_ids: Sequence[int]
    """All tokens that the policy read."""
    output_ids: Sequence[int]
    """Tokens that it sampled, the end-of-sequence token included."""
    logprobs: Sequence[float]
    """Log-probabilities of the sampled tokens, natural log, under the sampling distribution."""
    versions: Sequence[int]
    """Weight version that each token was sampled under."""
    finish: str
    """Reason of the end: stop; or length: no more tokens were allowed."""
    text: str = ""
    """Sampled tokens as text, without special tokens: thinking and calls included. See `answer`."""
    problem: str = ""
    """The reason why calls in the text could not be read; empty if they could, or there were none."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Options of the request that differ from the run's sampling."""
    temperature: float = 1.0
    """Temperature at which `logprobs` are those of the policy: that of sampling; 1 where that was 0."""
    stopped_by: str = ""
    """The stop string that ended it, and that its message does not have; empty if none did."""

    @property
    def answer(self) -> str:
        """Text without thinking, calls and a stop string: what rewards look at."""
        return str(self.message.get("content") or "")

    @property
    def is_cut(self) -> bool:
        """True if a limit of the run ended the turn. A turn of the length that the request asked for is whole."""
        wanted = self.sampling.get("max_tokens")
        return self.finish == "length" and (wanted is None or len(self.output_ids) < wanted)
