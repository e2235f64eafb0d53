"""A loop as people write it for the SDK: samples groups, rewards a letter, trains by importance sampling."""

from collections.abc import Callable
from typing import Any

import numpy as np

PROMPTS = [[5, 6, 7], [8, 9, 10, 11]]
GROUP, MAX_TOKENS = 4, 6
RATE = 3e-3


def reward(tokens: list[int]) -> float:
    """The share of even tokens."""
    return sum(token % 2 == 0 for token in tokens) / max(1, len(tokens))


def datum(prompt: list[int], tokens: list[int], logprobs: list[float], advantage: float) -> Any:
    from tinker import types

    before = len(prompt) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints([*prompt, *tokens[:-1]]),
        loss_fn_inputs={
            "target_tokens": np.array([0] * before + tokens, np.int64),
            "logprobs": np.array([0.0] * before + logprobs, np.float32),
            "advantages": np.array([0.0] * before + [advantage] * len(tokens), np.float32),
        },
    )


def step(training: Any, number: int, disturb: Callable[[str], None] = lambda _: None) -> tuple[float, list[Any]]:
    """Make one step. `disturb`: called at its places. Returns the mean reward, and all that was answered, for a
    comparison to the bit."""
    from tinker import types

    told: list[Any] = []
    disturb("publish")
    sampler = training.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0)
    disturb("sample")
    futures = [sampler.sample(types.ModelInput.from_ints(prompt), GROUP, params) for prompt in PROMPTS]
    data, rewards = [], []
    for prompt, future in zip(PROMPTS, futures, strict=True):
        group = future.result().sequences
        scores = [reward(one.tokens) for one in group]
        told += [(one.tokens, one.logprobs) for one in group]
        rewards += scores
        data += [
            datum(prompt, one.tokens, one.logprobs, score - sum(scores) / GROUP)
            for one, score in zip(group, scores, strict=True)
        ]
    backward = training.forward_backward(data, "importance_sampling")
    disturb("backward")
    optim = training.optim_step(types.AdamParams(learning_rate=RATE))
    disturb("optim")
    told.append([output["logprobs"].tolist() for output in backward.result().loss_fn_outputs])
    optim.result()
    return sum(rewards) / len(rewards), told
