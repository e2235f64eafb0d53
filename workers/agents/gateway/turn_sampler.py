"""The turns of one attempt: the only place where its tokens are made, for every caller.

    messages ─▶ history: which turn do they continue? ─▶ its tokens and what is new, or all of them written anew
             ─▶ format: one placeholder a picture ─▶ PictureProcessor ─▶ expanded tokens, pictures and their places
             ─▶ limits ─▶ engine ─▶ Turn, kept for the row

A turn that continues another keeps the tokens of what was read and sampled, and the pictures in them with their places;
what is new after them is expanded alone. An update of the weights in the middle of a turn changes the versions of its
tokens from there on, and nothing else. Environments call the sampler through their context, agents over HTTP.
"""

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.conf.errors import AttemptOver, DataError, LimitReached, SamplingError, suggest
from penstock.workers.agents.gateway.conversation import (
    ConversationFormat,
    Key,
    Message,
    ParsedAnswer,
    Tools,
    history_key,
    kept,
    pictures_in,
)
from penstock.workers.agents.gateway.engine_pool import Engines
from penstock.workers.agents.trajectory import Turn
from penstock.workers.pictures.processor import PictureProcessor
from penstock.workers.pictures.prompt_pictures import NO_PICTURES, PromptPictures
from penstock.workers.protocols import Completion, Sampling

MUST_CALL = "must_call"
"""Option that names the tool which an answer has to call, or is `ANY` of them: a structure is made of it."""
OPTIONS = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "stop", "structure", "ignore_eos")
"""Options in which a request may differ from the run."""
DISTRIBUTION = OPTIONS[:4]
"""Options that a client chooses only with `environment.gateway.sampling=client`, and never in a greedy attempt."""

SLACK_TOKENS = 64
"""Tokens of a prefix that are read again in any case: the last block is not full."""


@dataclass(frozen=True)
class WrittenPrompt:
    """A prompt of an engine."""

    ids: list[int]
    pictures: PromptPictures = NO_PICTURES

    def __len__(self) -> int:
        return len(self.ids)


class PromptWriter:
    """The writer of an attempt's prompts. Messages are those of `conversation.kept`."""

    def __init__(
        self, form: ConversationFormat, processor: PictureProcessor | None = None, max_pictures: int = 0
    ) -> None:
        """`processor`: the model's; None in a run of text."""
        self._form, self._processor, self._max_pictures = form, processor, max_pictures

    def whole(self, messages: Sequence[Message], tools: Tools) -> WrittenPrompt:
        """The prompt of a conversation, all of it written anew. Raises `DataError`."""
        pictures = self._pictures(messages)
        return self._expanded(self._form.prompt_ids(messages, tools), 0, NO_PICTURES, pictures)

    def continued(
        self, turn: Turn, before: Sequence[Message], new: Sequence[Message], tools: Tools
    ) -> WrittenPrompt | None:
        """The prompt of `new` messages after a turn, whose own conversation was `before`; None: the conversation cannot
        continue that turn's tokens. Raises `DataError`."""
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


@dataclass(frozen=True)
class TurnLimits:
    """Limits of one attempt."""

    max_turns: int = 32
    max_tokens: int = 8192
    """Largest number of sampled tokens. Turns that are sampled concurrently do not see each other's, and may exceed it
    together."""
    max_model_len: int = 1024
    """Largest length of prompt and response of a turn."""
    max_pictures: int = 0
    """Largest number of pictures of a prompt."""


@dataclass(frozen=True)
class _TurnRecord:
    """A turn, and the conversation that it answered."""

    turn: Turn
    messages: Sequence[Message]


def turn_seed(seed: int | None, number: int) -> int | None:
    """Seed of a turn's sampling: a pure function of the attempt's seed, so that a turn that is sampled again is the
    same. The first turn has the attempt's own, as a response without an environment has."""
    if seed is None or number == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=6).digest(), "little")


class TurnSampler:
    """Lifecycle: `sample` any number of times, also concurrently; then `end`, after which nothing is sampled."""

    def __init__(
        self,
        engines: Engines,
        form: ConversationFormat,
        sampling: Sampling,
        limits: TurnLimits,
        *,
        counts: Counter[str] | None = None,
        clients_sample: bool = False,
        processor: PictureProcessor | None = None,
        policies: Sequence[str] = (),
    ) -> None:
        """`sampling`: of the run, with the attempt's seed, and the policy that answers where a request names none;
        empty: there is one. `counts`: counters of the whole actor, for metrics. `clients_sample`: a client's options
        take precedence over the run's `DISTRIBUTION`, unless that is greedy, as in evaluation. `processor`: of
        pictures; None in a run of text. `policies`: names of those that are trained."""
        self.engines, self._form, self._sampling, self._limits = engines, form, sampling, limits
        self._writer = PromptWriter(form, processor, limits.max_pictures)
        self.counts = counts if counts is not None else Counter()
        self._clients_sample = clients_sample
        self.policies = tuple(policies)
        self._answered: dict[Key, _TurnRecord] = {}
        self._by_request: dict[Key, Turn] = {}
        self._turns: dict[int, Turn] = {}
        self._num_asked = self._num_untrained = self.num_under_way = 0
        self._ended_s: float | None = None
        """Time at which the last turn ended; None: none has."""
        self._end_reason: Exception | None = None
        self._context_error: LimitReached | None = None
        self._in_flight: set[asyncio.Task[Any]] = set()
        self.last_messages: dict[str, Sequence[Message]] = {}
        """The conversation of each policy with its newest answer."""

    @property
    def speaker(self) -> str:
        """Policy that answers where a request names none; empty: there is one."""
        return self._sampling.policy

    @property
    def turns(self) -> list[Turn]:
        """Turns that are to be trained, in the order in which they were asked for."""
        return [self._turns[number] for number in sorted(self._turns)]

    @property
    def num_sampled(self) -> int:
        """Number of tokens of these turns."""
        return sum(len(turn.output_ids) for turn in self._turns.values())

    async def sample(
        self,
        messages: Sequence[Message],
        tools: Tools = (),
        *,
        train: bool = True,
        is_client: bool = False,
        is_retry: bool = False,
        one_call: bool = False,
        state: str | None = None,
        policy: str | None = None,
        **options: Any,
    ) -> Turn:
        """Sample a policy's answer to a conversation, with pictures in any form that `conversation.py` reads.

        `options`: temperature, top_p, top_k, min_p, max_tokens, stop, structure, ignore_eos: other than the run's;
        must_call: the name of a tool that the answer has to call, "*" for any, in the formats of `forced_call`.
        `train=False`: it is no turn of the attempt (an opponent that the policy plays). `is_client`: the request came
        over HTTP, from a client that may not know of the run. `is_retry`: the client asks again, and gets the answer
        that it missed, if there is one. `one_call`: of several calls in an answer the first alone is made. `state`:
        that of the turn (`Turn.state`). `policy`: which of several answers. Raises `LimitReached`, `AttemptOver`,
        `DataError` (`SamplingError`, which is a `ValueError`, for options that no engine can take, and for an unknown
        policy), `DeadlineExceeded`.
        """
        messages = kept(messages)
        if name := options.pop(MUST_CALL, None):
            if options.get("structure") is not None:
                raise SamplingError("structure: a call has to be made, which has a structure of its own.", "structure")
            options["structure"] = self._form.forced(tools, name)
        policy = self.named(policy)
        request = history_key(messages, tools) + repr((policy, one_call, sorted(options.items()))).encode()
        if is_retry and request in self._by_request:
            self.counts["retries_answered"] += 1
            return self._by_request[request]
        self._check_open()
        options = self._accepted(options) if is_client else options
        if not train:
            return await self._untrained(messages, tools, options, one_call, policy)
        if len(self._turns) + self.num_under_way >= self._limits.max_turns:
            text = f"the attempt has had {self._limits.max_turns} turns (environment.max_turns)"
            raise self._truncated("turns", text)
        number = self._num_asked
        parent, before, prompt = self._prompt(messages, tools, policy)
        sampling = self._sampling_of(options, turn_seed(self._sampling.seed, number), policy)
        sampling = self._within_limits(sampling, len(prompt))
        self._num_asked += 1
        self.num_under_way += 1
        try:
            turn = await self._await_turn(self._turn(number, parent, prompt, sampling, tools, options, one_call))
        finally:
            self.num_under_way -= 1
        self._turns[number] = turn = replace(turn, state=state)
        self._count_distribution(options)
        self._context_error = None
        self._by_request[request] = turn
        self.last_messages[policy] = said = [*before, turn.message]
        self._answered[history_key(said, tools) + policy.encode()] = _TurnRecord(turn, before)
        return turn

    def count(self, messages: Sequence[Message], tools: Tools = ()) -> int:
        """Number of tokens of a conversation, up to the start of the next answer, as if none of it had been
        sampled."""
        return len(self._writer.whole(kept(messages), tools))

    def forget(self, turn: Turn) -> None:
        """Forget a turn whose answer never reached its client, as if it had not been sampled."""
        if self._turns.pop(turn.id, None) is not None:
            self.counts["turns_abandoned"] += 1
            self._answered = {key: value for key, value in self._answered.items() if value.turn is not turn}
            self._by_request = {key: value for key, value in self._by_request.items() if value is not turn}

    def end(self, why: Exception) -> None:
        """End the attempt: nothing more is sampled; turns under way are given up."""
        self._end_reason = self._end_reason or why
        for task in self._in_flight:
            task.cancel()

    @property
    def limit(self) -> str:
        """The limit that was reached; empty if none was, or if the attempt went on with a shorter conversation."""
        over = self._end_reason or self._context_error
        return over.limit if isinstance(over, LimitReached) else ""

    async def _await_turn(self, turn: Coroutine[Any, Any, Turn]) -> Turn:
        if self._ended_s is not None and not self._in_flight:
            self.counts["waited_ms"] += round(1e3 * (time.monotonic() - self._ended_s))
        task = asyncio.ensure_future(turn)
        self._in_flight.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self._end_reason is not None and not _is_cancelled():
                raise AttemptOver(str(self._end_reason)) from None
            self.counts["turns_abandoned"] += 1
            raise
        finally:
            self._in_flight.discard(task)
            self._ended_s = time.monotonic()
            task.cancel()

    async def _turn(
        self,
        number: int,
        parent: Turn | None,
        prompt: WrittenPrompt,
        sampling: Sampling,
        tools: Tools,
        options: Any,
        one_call: bool,
    ) -> Turn:
        seen = (prompt.pictures,) if prompt.pictures.encoded else ()
        completion = await self.engines.sample(prompt.ids, sampling, self, *seen)
        read = self._form.read(completion.token_ids, tools, prompt.ids, number)
        read = _with_one_call(read) if one_call and len(read.calls) > 1 else read
        if parent is not None:
            num_known = len(parent.prompt_ids) + len(parent.output_ids)
            self.counts["tokens_reread"] += num_reread(num_known, parent.versions[-1:], completion)
            self.counts["tokens_continued"] += num_known
            self.counts["tokens_added"] += len(prompt.ids) - num_known
        self.counts["tokens_sampled"] += len(completion.token_ids)
        self.counts["turns"] += 1
        self.counts["calls"] += len(read.calls)
        self.counts["calls_unreadable"] += bool(read.problem)
        stops = sampling.stop if completion.finish_reason == "stop" else ()
        message, stopped_by = _without_stop(read.message, stops)
        return Turn(
            number, parent.id if parent is not None else None, message, read.calls, prompt.ids,
            completion.token_ids, completion.logprobs, completion.versions, completion.finish_reason, completion.text,
            read.problem, dict(options), sampling.temperature or 1.0, stopped_by, completion.routed_experts,
            prompt.pictures, policy=sampling.policy,
        )  # fmt: skip

    async def _untrained(
        self, messages: Sequence[Message], tools: Tools, options: Mapping[str, Any], one_call: bool, policy: str
    ) -> Turn:
        self._num_untrained += 1
        number = -self._num_untrained
        prompt = self._writer.whole(messages, tools)
        sampling = self._sampling_of(options, turn_seed(self._sampling.seed, number), policy)
        sampling = self._within_context(sampling, len(prompt))
        return await self._await_turn(self._turn(number, None, prompt, sampling, tools, options, one_call))

    def named(self, policy: str | None) -> str:
        """The policy of a request; empty: there is one. Raises `SamplingError` for an unknown one."""
        if policy is None:
            return self.speaker
        if policy not in self.policies:
            raise SamplingError(
                f"policy={policy}: none of the run has this name{suggest(policy, self.policies)}", "policy"
            )
        return policy if self.speaker else ""

    def _prompt(
        self, messages: Sequence[Message], tools: Tools, policy: str
    ) -> tuple[Turn | None, list[Message], WrittenPrompt]:
        """The policy's turn that a conversation continues, the conversation as it is kept here, and its prompt."""
        for end in range(len(messages), 0, -1):
            if messages[end - 1].get("role") != "assistant":
                continue
            answered = self._answered.get(history_key(messages[:end], tools) + policy.encode())
            if answered is None:
                continue
            before, new = [*answered.messages], list(messages[end:])
            prompt = self._writer.continued(answered.turn, before, new, tools)
            before += [answered.turn.message, *new]
            if prompt is not None:
                return answered.turn, before, prompt
            self.counts["rewritten_by_template"] += 1
            return None, before, self._writer.whole(before, tools)
        has_spoken = any(turn.policy == policy for turn in self._turns.values())
        if has_spoken and any(message.get("role") == "assistant" for message in messages):
            self.counts["rewritten_by_client"] += 1
        return None, list(messages), self._writer.whole(messages, tools)

    def _sampling_of(self, options: Mapping[str, Any], seed: int | None, policy: str = "") -> Sampling:
        """The run's sampling, with the changes that a request asks for."""
        for name in options:
            if name not in OPTIONS:
                raise SamplingError(f"{name}: a request has no such option{suggest(name, OPTIONS)}", name)
        changes = {name: value for name, value in options.items() if value is not None}
        if "stop" in changes:
            stop = changes["stop"]
            changes["stop"] = tuple(stop) if isinstance(stop, list | tuple) else (stop,)
        sampling = replace(self._sampling, seed=seed, policy=policy, **changes)
        return replace(sampling, max_tokens=min(sampling.max_tokens, self._sampling.max_tokens))

    def _accepted(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The client's options that take effect; the rest is counted as ignored. Raises `SamplingError` for either."""
        self._sampling_of(options, None)
        if self._clients_sample and self._sampling.temperature > 0:
            return dict(options)
        for name in DISTRIBUTION:
            self.counts[f"ignored_{name}"] += options.get(name) not in (None, getattr(self._sampling, name))
        return {name: value for name, value in options.items() if name not in DISTRIBUTION}

    def _count_distribution(self, options: Mapping[str, Any]) -> None:
        """Count turns whose log-probabilities the trainer cannot reproduce at any temperature."""
        changed = [name for name in DISTRIBUTION if options.get(name) not in (None, getattr(self._sampling, name))]
        is_greedy = "temperature" in changed and options["temperature"] == 0
        self.counts["turns_greedy"] += is_greedy
        self.counts["turns_narrowed"] += not is_greedy and any(name != "temperature" for name in changed)
        self.counts["turns_structured"] += options.get("structure") is not None

    def _within_context(self, sampling: Sampling, num_prompt: int) -> Sampling:
        room = self._limits.max_model_len - num_prompt
        if room < 1:
            raise self._no_room(num_prompt)
        return replace(sampling, max_tokens=min(sampling.max_tokens, room))

    def _within_limits(self, sampling: Sampling, num_prompt: int) -> Sampling:
        sampling = self._within_context(sampling, num_prompt)
        left = self._limits.max_tokens - self.num_sampled
        if left < 1:
            text = f"the attempt has sampled {self._limits.max_tokens} tokens (environment.max_tokens)"
            raise self._truncated("tokens", text)
        return replace(sampling, max_tokens=min(sampling.max_tokens, left))

    def _no_room(self, num_prompt: int) -> LimitReached:
        """The error for a full context. The attempt need not end: its client may shorten the history."""
        self._context_error = LimitReached(
            "context",
            f"the conversation has {num_prompt} tokens, which leave no room for an answer in "
            f"rollout.max_model_len={self._limits.max_model_len}",
        )
        return self._context_error

    def _truncated(self, limit: str, text: str) -> LimitReached:
        self._end_reason = self._end_reason or LimitReached(limit, text)
        return LimitReached(limit, text)

    def _check_open(self) -> None:
        if isinstance(self._end_reason, LimitReached):
            raise LimitReached(self._end_reason.limit, str(self._end_reason))
        if self._end_reason is not None:
            raise AttemptOver(str(self._end_reason))


def num_reread(num_known: int, versions: Sequence[int], completion: Completion) -> int:
    """Number of tokens that the engine has read again, as their prefix was evicted, or is on another engine.
    `num_known`: tokens of the conversation so far. `versions`: of its last token: newer weights read all of it anew."""
    if completion.num_cached is None or [*completion.versions[:1]] != [*versions]:
        return 0
    return max(0, num_known - SLACK_TOKENS - completion.num_cached)


def _is_cancelled() -> bool:
    """Return whether the caller of the turn is cancelled, and not only the sampling."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _with_one_call(read: ParsedAnswer) -> ParsedAnswer:
    message = {**read.message, "tool_calls": read.message["tool_calls"][:1]}
    return replace(read, message=message, calls=read.calls[:1])


def _without_stop(message: Message, stops: Sequence[str]) -> tuple[Message, str]:
    """The message before a stop string, and which one it was."""
    for name in ("reasoning_content", "content"):
        text = message.get(name) or ""
        found = [(text.index(stop), stop) for stop in stops if stop in text]
        if found:
            start, stop = min(found)
            return {**message, name: text[:start]}, stop
    return message, ""
