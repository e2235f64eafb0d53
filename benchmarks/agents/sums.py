"""The task that is put to TRL as well: sums of three digits, and a tool that adds two. Three turns, two calls.

    user       x=7 y=5 z=4
    assistant  .........<tool_call>{"name": "add", "arguments": {"a": 7, "b": 5}}</tool_call>
    tool       12
    assistant  ...<tool_call>{"name": "add", "arguments": {"a": 12, "b": 4}}</tool_call>
    tool       16
    assistant  ......16

The dots stand for thinking. How many there are is drawn anew in each demonstration, and so the model's turns are of
very different lengths, as those of models that think are. The chat template is one that both sides can go on with from
sampled tokens; words and numbers are one token each, so that a tiny model learns to copy them in a minute.
"""

import functools
import itertools
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.conf.model import FreshModelConfig
from penstock.workers.agents.environment import Context, Task
from penstock.workers.agents.gateway.conversation import Message
from penstock.workers.fresh_model import build_fresh_model, character_tokenizer

THOUGHT, MOST_THOUGHTS = 32, 160
"""Numbers of tokens: the mean of a turn, and the most that are demonstrated."""
CALL, MIDDLE, END = '<tool_call>\n{"name": "add", "arguments": {"a": ', ', "b": ', "}}\n</tool_call>"
HEADS = [f"<|im_start|>{role}\n" for role in ("user", "assistant", "tool")]
NUMBERS = [f"{name}={digit}" for name in "xyz" for digit in range(1, 10)] + [str(number) for number in range(10, 28)]
WORDS = [*HEADS, CALL, MIDDLE, END, *NUMBERS]
MODEL = FreshModelConfig(hidden_size=256, intermediate_size=704, initializer_range=0.04, words=WORDS)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>\\n{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' }}"
    "{{ call['function']['arguments'] | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}"
    "{{ eos_token + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""A chat template of Qwen's form. It does not describe the tools: the model has learned what there is."""


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


class Sums:
    """The environment of Penstock's side; rows of a file are its tasks."""

    async def run(self, task: Task, ctx: Context) -> None:
        messages: list[Message] = [{"role": "user", "content": task.data["prompt"]}]
        turn = await ctx.sample(messages, [add])
        while turn.calls:
            messages += [turn.message, *await ctx.use_tools(turn, [add])]
            turn = await ctx.sample(messages, [add])
        ctx.reward(float(turn.text.lstrip(".") == str(task.data["answer"])))


def problems(seed: int) -> Iterator[tuple[int, int, int]]:
    draws = random.Random(seed)
    while True:
        yield draws.randint(1, 9), draws.randint(1, 9), draws.randint(1, 9)


def write_problems(file: Path, count: int, seed: int = 1) -> None:
    """Write problems, a line of JSON each, which both sides read."""
    with file.open("w") as lines:
        for numbers, _ in zip(problems(seed), range(count), strict=False):
            lines.write(json.dumps({"prompt": asked(*numbers), "answer": str(sum(numbers))}) + "\n")


def write_demonstrations(file: Path, count: int, num_growing: int) -> None:
    with file.open("w") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in itertools.islice(demonstrations(0, num_growing), count))


def demonstrations(seed: int, num_growing: int = 0) -> Iterator[dict[str, Any]]:
    """Iterate over rows, one a turn: the conversation so far, and what is said. The three turns of a problem follow
    each other. In the first `num_growing` rows thoughts grow from none to their full length: from short turns it is
    soon learned to copy a number, and then to copy it from further and further away."""
    draws = random.Random(seed)
    for index, (a, b, c) in enumerate(problems(seed)):
        share = min(1.0, 3 * index / num_growing) if num_growing else 1.0
        thought = functools.partial(thoughts, draws, THOUGHT * share**2)
        messages = [{"role": "user", "content": asked(a, b, c)}]
        for call, result in ((written(a, b), a + b), (written(a + b, c), a + b + c)):
            said = thought() + call
            yield {"messages": list(messages), "said": said}
            messages += [{"role": "assistant", "content": said}, {"role": "tool", "content": str(result)}]
        yield {"messages": list(messages), "said": thought() + str(a + b + c)}


def asked(a: int, b: int, c: int) -> str:
    return f"x={a} y={b} z={c}"


def thoughts(draws: random.Random, mean: float = THOUGHT) -> str:
    """Draw dots of a geometric length: whether one more follows does not depend on how many there were, which is easily
    learned."""
    if mean == 0:
        return ""
    return "." * min(MOST_THOUGHTS, int(math.log(1.0 - draws.random()) / math.log(mean / (mean + 1.0))))


def written(a: int, b: int) -> str:
    return f"{CALL}{a}{MIDDLE}{b}{END}"


def build_model(directory: Path, seed: int = 0) -> None:
    """Make a model that has learned nothing yet, with its chat template."""
    build_fresh_model(directory, MODEL, seed)
    tokenizer = character_tokenizer(MODEL)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)
