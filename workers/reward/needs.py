"""What a reward needs of a row: the reference answer, or not. Rows that lack it are told before they are scored."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from penstock.conf.data import ColumnsConfig
from penstock.conf.reward import ENVIRONMENT_REWARD
from penstock.workers.reward.registry import find_reward

ANSWER = ("answer", "ground_truth")
"""Parameters that get the row's answer."""


def needs_answer(function: str | Callable[..., Any], options: Mapping[str, Any], column: str | None) -> bool:
    """Return whether a reward asks for the answer, by a parameter without a default or in a judge's rubric. `column`:
    that of the answer, which a function of TRL's names. Raises `ConfigError` for one that is not found."""
    if function == ENVIRONMENT_REWARD:
        return False
    if "{answer}" in str(options.get("rubric", "")):
        return True
    try:
        parameters = inspect.signature(find_reward(function) if isinstance(function, str) else function).parameters
    except (TypeError, ValueError):  # a builtin, which `adapt` refuses
        return False
    columns = (column, "solution") if column == ColumnsConfig.answer else (column,)  # as rows of TRL's datasets call it
    asked = [name for name in (*ANSWER, *columns) if name in parameters and name not in options]
    return any(parameters[name].default is inspect.Parameter.empty for name in asked if name is not None)
