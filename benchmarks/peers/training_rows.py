"""Rows of random tokens for the training benchmark, by kind: rows of their own, groups of a prompt, attempts of several
turns."""

from collections.abc import Callable

import numpy as np

from penstock.store.data.rows import Rows
from penstock.workers.agents.trajectory import Trajectory, Turn, row_columns

PROMPT_TOKENS = 16


def make_rows(seed: int, vocabulary: int, *, count: int, response_tokens: int, spread: float, longest: int) -> Rows:
    """Make responses of a median of `response_tokens` tokens, lognormal with that spread (0: all alike)."""
    random = np.random.default_rng(seed)
    lengths = np.clip(response_tokens * random.lognormal(0, spread, count), 1, longest).astype(int)
    return Rows.from_lists(
        {
            "prompt_ids": [random.integers(3, vocabulary, PROMPT_TOKENS).tolist() for _ in lengths],
            "response_ids": [random.integers(3, vocabulary, length).tolist() for length in lengths],
            "behavior_logprobs": [(-np.log(vocabulary) + np.zeros(length)).tolist() for length in lengths],
            "advantage": random.normal(size=count).tolist(),
            "preferred": (2 * (np.arange(count) % 2) - 1).tolist(),
        },
        group_ids=(np.arange(count) // 2).tolist(),
    )


def make_groups(
    seed: int, vocabulary: int, *, num_groups: int, size: int, prompt_tokens: int, response_tokens: int, is_shared: bool
) -> Rows:
    """Make groups of one prompt each, or where it is not shared, of one for each row."""
    random = np.random.default_rng(seed)
    groups = np.repeat(np.arange(num_groups), size).tolist()
    prompts = [random.integers(3, vocabulary, prompt_tokens).tolist() for _ in groups]
    return Rows.from_lists(
        {
            "prompt_ids": [prompts[group if is_shared else row] for row, group in enumerate(groups)],
            "response_ids": [random.integers(3, vocabulary, response_tokens).tolist() for _ in groups],
            "behavior_logprobs": [np.full(response_tokens, -np.log(vocabulary)).tolist() for _ in groups],
            "advantage": random.normal(size=len(groups)).tolist(),
        },
        group_ids=groups,
    )


def make_attempts(
    seed: int, vocabulary: int, *, num_groups: int, size: int, prompt_tokens: int, num_turns: int,
    message_tokens: int, thought_tokens: int, answer_tokens: int,
) -> Rows:  # fmt: skip
    """Make attempts whose thoughts are left out of the histories of later turns, so that each turn is a sequence."""
    random = np.random.default_rng(seed)

    def some(count: int) -> list[int]:
        return random.integers(3, vocabulary, count).tolist()

    attempts = []
    for _ in range(num_groups):
        prompt = some(prompt_tokens)
        for _ in range(size):
            history, turns = prompt, []
            for number in range(num_turns):
                history = history + some(message_tokens)
                thought, answer = some(thought_tokens), some(answer_tokens)
                count = thought_tokens + answer_tokens
                logprobs = np.full(count, -np.log(vocabulary)).tolist()
                turns.append(Turn(number, None, {}, (), history, thought + answer, logprobs, [0] * count, "stop"))
                history = history + answer
            attempts.append(Trajectory(turns))
    columns = row_columns(attempts) | {"advantage": random.normal(size=len(attempts)).tolist()}
    return Rows.from_lists(columns, group_ids=np.repeat(np.arange(num_groups), size).tolist())


KINDS: dict[str, Callable[..., Rows]] = {"rows": make_rows, "groups": make_groups, "attempts": make_attempts}
