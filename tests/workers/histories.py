"""Random histories of a policy: turns that go on, branch off and are rewritten."""

import random

from penstock.workers.agents.trajectory import Turn


def random_turns(rng: random.Random, num_turns: int, vocabulary: int = 50) -> list[Turn]:
    """Turns whose prompts begin with an earlier one's tokens, or are new."""
    turns: list[Turn] = []
    for number in range(num_turns):
        before: list[int] = []
        if turns and rng.random() < 0.8:
            parent = rng.choice(turns[-3:])
            before = [*parent.prompt_ids, *parent.output_ids]
        prompt = before + [rng.randrange(vocabulary) for _ in range(rng.randrange(1 if not before else 0, 6))]
        count = rng.randrange(1, 6)
        turns.append(turn(number, prompt, [rng.randrange(vocabulary) for _ in range(count)]))
    return turns


def turn(
    number: int, prompt: list[int], output: list[int], version: int = 0, text: str = "", temperature: float = 1.0
) -> Turn:
    """Log-probabilities tell the tokens of turns apart: turn 2's third token has -2.03."""
    logprobs = [-(number + place / 100) for place in range(1, len(output) + 1)]
    message = {"role": "assistant", "content": text}
    return Turn(
        number, None, message, (), prompt, output, logprobs, [version] * len(output), "stop", text,
        temperature=temperature,
    )  # fmt: skip
