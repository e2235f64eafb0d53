"""Small models that chat: a character tokenizer with templates of several kinds, and engines that say what they are
told to."""

import asyncio
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from penstock.conf.errors import WorkerDied
from penstock.conf.model import FreshModelConfig
from penstock.workers.agents.gateway.chat_formats import RenderedFormat, TemplateFormat
from penstock.workers.agents.gateway.conversation import ConversationFormat
from penstock.workers.agents.gateway.turn_sampler import TurnLimits, TurnSampler
from penstock.workers.fresh_model import character_tokenizer
from penstock.workers.protocols import Completion, Sampling

QWEN3 = "qwen3"
BEGIN, END = "<|im_start|>", "<|im_end|>"
SPECIAL = [
    BEGIN,
    END,
    "<|endoftext|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
]

_TOOLS = (
    "{% if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
)
_CALLS = (
    "{% for call in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}"
)
_THOUGHT = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
_TO_SPEAK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_RESULT = "{% if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>{% else %}{{ m.content }}{% endif %}"


def _template(thought: str) -> str:
    return (
        "{% set ns = namespace(last=-1) %}"
        "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        f"{_TOOLS}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        f"{thought}{_RESULT}{_CALLS}<|im_end|>\n"
        "{% endfor %}"
        f"{_TO_SPEAK}"
    )


TEMPLATES = {
    # knows neither tools nor thinking
    "plain": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + _TO_SPEAK,
    # writes everything that it gets
    "hermes": _template(_THOUGHT),
    # leaves out what was thought before the last question
    "strips": _template("{% if loop.index0 > ns.last %}" + _THOUGHT + "{% endif %}"),
    # begins the thinking for the model
    "opens": _template(_THOUGHT).replace(_TO_SPEAK, _TO_SPEAK.replace("assistant\n", "assistant\n<think>\n")),
    # takes turns strictly
    "strict": "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant take turns') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + _TO_SPEAK,
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


@functools.cache
def tokenizer(template: str = "hermes") -> Any:
    made = character_tokenizer(FreshModelConfig(words=SPECIAL))
    made.chat_template = TEMPLATES[template]
    return made


def chat_format(template: str = "hermes", tools: str = "hermes") -> ConversationFormat:
    """The format of one of the templates; for `qwen3`, the one of the package `renderers`."""
    return RenderedFormat(tokenizer(), QWEN3) if template == QWEN3 else TemplateFormat(tokenizer(template), tools)


def text_of(token_ids: Sequence[int]) -> str:
    return str(tokenizer().decode(token_ids, skip_special_tokens=False))


def ids_of(text: str) -> list[int]:
    return list(tokenizer()(text, add_special_tokens=False)["input_ids"])


def call_text(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


class Saying:
    """Engines that say given texts in turn, or what a function of the prompt's text says. Each sampled token has a
    log-probability of its own."""

    def __init__(self, texts: Iterable[str] | Callable[[str], str]) -> None:
        self._say = texts if callable(texts) else functools.partial(_next, iter(texts))
        self.prompts: list[list[int]] = []
        self.sampled: list[list[int]] = []
        self.samplings: list[Sampling] = []
        self.open = asyncio.Event()
        """Nothing is answered while this is not set."""
        self.open.set()
        self.num_cancelled = 0
        self.fails_with: Exception | None = None

    async def sample(self, prompt_ids: Sequence[int], sampling: Sampling, conversation: object) -> Completion:
        self.prompts.append(list(prompt_ids))
        self.samplings.append(sampling)
        text = "" if self.fails_with is not None else self._say(text_of(prompt_ids))
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if self.fails_with is not None:
            raise self.fails_with
        completion = to_completion(text, sampling, len(self.sampled))
        self.sampled.append(completion.token_ids)
        return completion


def to_completion(text: str, sampling: Sampling, number: int = 0, version: int = 0) -> Completion:
    """A text as an engine samples it, with what ends it unless it is cut short."""
    ended, said = text + END, text
    stops = [(text.index(stop), stop) for stop in sampling.stop if stop in text]
    if stops:
        start, stop = min(stops)
        ended, said = text[: start + len(stop)], text[:start]
    ids = ids_of(ended)
    reason = "stop" if len(ids) <= sampling.max_tokens else "length"
    ids = ids[: sampling.max_tokens]
    logprobs = [-(number + 1 + place / 10_000) for place in range(len(ids))]
    return Completion(ids, logprobs, [version] * len(ids), said if reason == "stop" else text_of(ids), reason)


def make_sampler(
    engines: Any,
    template: str = "hermes",
    sampling: Sampling | None = None,
    *,
    clients_sample: bool = False,
    policies: Sequence[str] = (),
    **limits: int,
) -> TurnSampler:
    """`policies`: those that are trained, of which the first answers where none is named."""
    bounds = TurnLimits(**({"max_model_len": 100_000, "max_tokens": 100_000} | limits))
    sampling = replace(sampling or Sampling(max_tokens=10_000), policy=policies[0] if len(policies) > 1 else "")
    form = chat_format(template)
    return TurnSampler(engines, form, sampling, bounds, clients_sample=clients_sample, policies=policies)


class Dying:
    """Calls of engines by name: those in `dead` die in their turn."""

    def __init__(self) -> None:
        self.dead: set[str] = set()
        self.asked: list[str] = []
        self.open = asyncio.Event()
        self.open.set()

    async def __call__(self, handle: Any, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        self.asked.append(handle)
        await self.open.wait()
        if handle in self.dead:
            raise WorkerDied(f"{handle} is gone")
        return to_completion(f"{handle}", sampling)


def _next(texts: Any, prompt: str) -> str:
    return str(next(texts))
