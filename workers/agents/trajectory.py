"""The trajectory of an attempt at a task: its turns, the segments that they form, its outcome, and the columns of its
row. Pure.

    turn 0: prompt P,            sampled A      ┐ segment 0:  P A Q B, of which A and B are trained
    turn 1: prompt P A Q,        sampled B      ┘
    turn 2: prompt P' (rewritten), sampled C      segment 1:  P' C

A segment is a linear sequence of tokens, in which each turn continues where the last one ended. A turn continues a
segment if its prompt begins with all tokens of it, and with the same pictures; that is decided without the messages.
Every sampled token is trained in one segment, its turn's: where a later segment begins with it, it is context there.
"""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from penstock.algorithms.graph.columns import POLICY, ROUTED_EXPERTS, SEEN_PICTURES, TURN_STATES
from penstock.conf.errors import suggest
from penstock.workers.pictures.prompt_pictures import NO_PICTURES, PromptPictures
from penstock.workers.protocols import truncated_by

COMPLETED, TRUNCATED, REJECTED, FAILED = "completed", "truncated", "rejected", "failed"
"""Outcomes of attempts. The first two are trained; the others are dropped with their reason, and never count as a
reward of zero."""
SILENT = "silent"
"""Reason for dropping the row of a policy that sampled nothing in an attempt."""
MAX_CHARACTERS = 4_000
"""Largest length of one message: a tool may have returned a megabyte."""


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
    routed_experts: bytes = b""
    """A record for every token of prompt and output but the last one (`Completion.routed_experts`); empty for none."""
    pictures: PromptPictures = NO_PICTURES
    """Pictures of the prompt, those of earlier turns included, and their places in `prompt_ids`."""
    state: str | None = None
    """Name of the state that it answered, where the environment has said it."""
    policy: str = ""
    """Policy that sampled it, where several are trained."""

    @property
    def answer(self) -> str:
        """Text without thinking, calls and a stop string: what rewards look at."""
        return str(self.message.get("content") or "")

    @property
    def is_cut(self) -> bool:
        """True if a limit of the run ended the turn. A turn of the length that the request asked for is whole."""
        wanted = self.sampling.get("max_tokens")
        return self.finish == "length" and (wanted is None or len(self.output_ids) < wanted)


@dataclass(frozen=True)
class AttemptOutcome:
    """The way an attempt ended, and why."""

    kind: str = COMPLETED
    reason: str = ""
    """Reason. truncated: the limit (turns, tokens, context, time, length). rejected, failed: the reason for dropping
    the row."""
    detail: str = ""
    """Text for people: the error, say."""

    @property
    def is_trained(self) -> bool:
        return self.kind in (COMPLETED, TRUNCATED)


@dataclass(frozen=True)
class Trajectory:
    """The result of an attempt."""

    turns: Sequence[Turn]
    """Turns in the order of their ids."""
    outcome: AttemptOutcome = AttemptOutcome()
    reward: float = 0.0
    """Reward of the whole, those of its turns included; of `policy`, where several are trained."""
    turn_rewards: Mapping[int, float] = field(default_factory=dict)
    """Rewards by the turn's id."""
    said: Sequence[Mapping[str, Any]] = ()
    """Messages in the order in which they were said, for people; where several policies are trained, those of each,
    with its name."""
    policy: str = ""
    """Policy whose row it is, or that answers where no other is named; empty: there is one."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Reward of the whole for each policy, where several are trained."""

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens."""
        return sum(len(turn.output_ids) for turn in self.turns)

    @property
    def text(self) -> str:
        """Text of the last answer, for reward functions: without thinking and calls."""
        return self.turns[-1].answer

    def without(self, limits: Collection[str]) -> "Trajectory":
        """The same trajectory, rejected if one of these limits has truncated it (`rollout.truncated`)."""
        outcome = self.outcome
        if outcome.kind != TRUNCATED or outcome.reason not in limits:
            return self
        return self.ended(AttemptOutcome(REJECTED, truncated_by(outcome.reason), outcome.detail))

    def of_policy(self, name: str) -> "Trajectory":
        """What a policy has of it: its turns, reward and messages; rejected as `silent` if it sampled no turn that is
        trained. Empty: all of it, as there is one."""
        if not name:
            return self
        turns = [turn for turn in self.turns if turn.policy == name]
        said = [message for message in self.said if message.get("policy") == name]
        own = replace(self, turns=turns, reward=self.rewards[name], said=said, policy=name)
        if turns or not self.outcome.is_trained:
            return own
        return own.ended(AttemptOutcome(REJECTED, SILENT, f"policy {name} sampled no turn of the attempt"))

    def with_reward(self, reward: float | Mapping[str, float]) -> "Trajectory":
        """The same trajectory, with another reward for the whole, or for some of several policies. Raises `ValueError`
        for a policy that there is not."""
        if not isinstance(reward, Mapping):
            return replace(self, reward=reward, rewards=dict.fromkeys(self.rewards, reward))
        if unknown := next((name for name in reward if name not in self.rewards), None):
            raise ValueError(f"score_group rewards policy {unknown!r}{suggest(unknown, self.rewards)}")
        rewards = {**self.rewards, **reward}
        return replace(self, reward=rewards[self.policy], rewards=rewards)

    def ended(self, outcome: AttemptOutcome) -> "Trajectory":
        """The same trajectory, with another outcome."""
        return replace(self, outcome=outcome)


def row_columns(trajectories: Sequence[Trajectory], reward_column: str = "reward") -> dict[str, list[Any]]:
    """The columns that an environment writes, an entry for each trajectory; each has at least one turn. Token columns
    have one value for each sampled token, in the order of segments: a turn's sampled tokens are in one of them."""
    columns: dict[str, list[Any]] = {}
    for trajectory in trajectories:
        own = {reward_column: float(trajectory.reward)} | ({POLICY: trajectory.policy} if trajectory.policy else {})
        for name, value in (_row(trajectory) | own).items():
            columns.setdefault(name, []).append(value)
    return columns


def _row(trajectory: Trajectory) -> dict[str, Any]:
    segments = segments_of(trajectory.turns)
    runs = [run for segment in segments for run in segment.runs]
    turns = [run.turn for run in runs]
    outcome = trajectory.outcome
    columns = {
        "response_ids": _joined([turn.output_ids for turn in turns], np.int32),
        "response_text": trajectory.text,
        "finish_reason": outcome.reason if outcome.kind == TRUNCATED else "stop",
        "behavior_logprobs": _joined([turn.logprobs for turn in turns], np.float32),
        "token_versions": _joined([turn.versions for turn in turns], np.int32),
        "context_ids": _joined([run.context for run in runs], np.int32),
        "spans": np.asarray(spans_of(segments), np.int32),
        "token_temperatures": _joined([[turn.temperature] * len(turn.output_ids) for turn in turns], np.float32),
        "turn_tokens": np.asarray([len(turn.output_ids) for turn in turns], np.int32),
        "turn_rewards": np.asarray([trajectory.turn_rewards.get(turn.id, 0.0) for turn in turns], np.float32),
        "turn_ids": np.asarray([turn.id for turn in turns], np.int32),
        TURN_STATES: np.asarray([run.state for run in runs], np.int64),
        **_seen(segments),
    }
    columns["transcript"] = as_json(trajectory.said, columns[SEEN_PICTURES[0]])
    if any(turn.routed_experts for turn in turns):
        columns[ROUTED_EXPERTS] = np.frombuffer(b"".join(run.new_records() for run in runs), np.uint8)
    return columns


def _seen(segments: Sequence["TurnSegment"]) -> dict[str, Any]:
    """The columns of pictures: those of each segment, and the number of the segment, start and length of each."""
    pictures = [picture for segment in segments for picture in segment.pictures.encoded]
    places = [(index, *place) for index, segment in enumerate(segments) for place in segment.pictures.ranges]
    return dict(zip(SEEN_PICTURES, (pictures, np.asarray(places, np.int32).reshape(-1)), strict=True))


def _joined(parts: Sequence[Sequence[Any]], dtype: Any) -> np.ndarray:
    return np.concatenate([np.asarray(part, dtype=dtype) for part in parts])


@dataclass
class Run:
    """Tokens that were read, and those that one turn sampled after them."""

    context: Sequence[int]
    turn: Turn

    @property
    def state(self) -> int:
        """Hash of the turn's state, or where the environment has not said it, of what was read since the turn before:
        tokens and pictures."""
        first = len(self.turn.prompt_ids) - len(self.context)
        pictures = [
            picture
            for picture, (place, _) in zip(self.turn.pictures.encoded, self.turn.pictures.ranges, strict=True)
            if place >= first
        ]
        read = b"".join([np.asarray(self.context, np.int32).tobytes(), *pictures])
        said = read if self.turn.state is None else self.turn.state.encode()
        return int.from_bytes(hashlib.blake2b(said, digest_size=8).digest(), "little", signed=True)

    def new_records(self) -> bytes:
        """Records of the tokens that no turn of the segment had read before: those of the context and of the output
        but for its last token, and of the last token that the turn before sampled. What earlier turns have read has
        the experts with which it was sampled."""
        turn = self.turn
        num_records = len(turn.prompt_ids) + len(turn.output_ids) - 1
        num_known = max(0, len(turn.prompt_ids) - len(self.context) - 1)
        return turn.routed_experts[num_known * (len(turn.routed_experts) // num_records) :]


@dataclass
class TurnSegment:
    """Runs that follow each other."""

    runs: list[Run] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """Tokens of all runs."""
    pictures: PromptPictures = NO_PICTURES
    """Pictures of all runs, and their places in `tokens`."""

    def is_continued_by(self, turn: Turn) -> bool:
        """Return whether the turn has read all of the segment, its pictures too, and maybe more."""
        length, count, seen = len(self.tokens), len(self.pictures.encoded), turn.pictures
        has_read = length <= len(turn.prompt_ids) and list(turn.prompt_ids[:length]) == self.tokens
        return has_read and self.pictures == PromptPictures(seen.encoded[:count], seen.ranges[:count])

    def append(self, turn: Turn) -> None:
        self.runs.append(Run(turn.prompt_ids[len(self.tokens) :], turn))
        self.tokens, self.pictures = [*turn.prompt_ids, *turn.output_ids], turn.pictures


def segments_of(turns: Sequence[Turn]) -> list[TurnSegment]:
    """Make segments of turns, which are in the order of their ids. A turn that two segments begin with belongs to the
    first."""
    segments: list[TurnSegment] = []
    for turn in turns:
        continued = [segment for segment in segments if segment.is_continued_by(turn)]
        if continued:
            max(continued, key=lambda segment: len(segment.tokens)).append(turn)
        else:
            segments.append(TurnSegment())
            segments[-1].append(turn)
    return segments


def spans_of(segments: Sequence[TurnSegment]) -> list[int]:
    """The column `spans`: segment, context tokens and sampled tokens of each run, one after the other."""
    return [
        number
        for index, segment in enumerate(segments)
        for run in segment.runs
        for number in (index, len(run.context), len(run.turn.output_ids))
    ]


def as_json(messages: Sequence[Mapping[str, Any]], pictures: Sequence[bytes] = ()) -> str:
    """The messages of a trajectory, [{role, content, …}, …], as JSON for people, with long contents cut. Of a picture
    it has the number, among the distinct ones of `pictures`: {type: image, picture}."""
    numbers = {picture: number for number, picture in enumerate(dict.fromkeys(pictures))}
    shown = [{name: _shown(value, numbers) for name, value in message.items()} for message in messages]
    return json.dumps(encodable(shown), default=str)


def _shown(value: Any, numbers: Mapping[bytes, int]) -> Any:
    """A message's value for people. A picture that no turn which is kept has read is only mentioned."""
    if isinstance(value, str) and len(value) > MAX_CHARACTERS:
        return f"{value[:MAX_CHARACTERS]}… ({len(value) - MAX_CHARACTERS:,} more characters)"
    if isinstance(value, list | tuple):
        return [_shown(one, numbers) for one in value]
    if not isinstance(value, Mapping):
        return value
    if not isinstance(picture := value.get("image"), bytes):
        return {name: _shown(one, numbers) for name, one in value.items()}
    if picture not in numbers:
        return {"type": "text", "text": "[picture]"}
    return {"type": "image", "picture": numbers[picture]}


def encodable(value: Any) -> Any:
    """Return the same value with all texts made encodable: a text, or what JSON is made of. For texts with half of a
    surrogate pair, where a harness that counts in UTF-16 has cut between the two: `?` takes its place."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {encodable(name): encodable(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [encodable(one) for one in value]
    return value
