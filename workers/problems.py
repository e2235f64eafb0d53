"""Procedural problems of `reasoning_gym`, and their verifiers.

`Problems` makes the prompts of a run (`workers/prompts/dataset.py`) or the tasks of an environment
(`workers/agents/adapters/reasoning_gym.py`); `verify` scores a response to one of them, in the reward processes
(`workers/reward/functions.py`), from nothing but the task's JSON.
"""

import functools
import importlib
import json
from collections.abc import Collection
from typing import Any

from penstock.conf.errors import ConfigError, DataError, suggest
from penstock.conf.secret import reveal

TUPLE = "__tuple__"
MAX_REPLACEMENTS = 200
"""Problems that are made in place of one that is held out, before the task is called too small."""


class Problems:
    """`size` problems of one task, the same ones for the same arguments.

        held_out = Problems("chain_sum", {"max_digits": 2}, seed=1, size=200)
        train = Problems("chain_sum", {"max_digits": 2}, seed=0, size=100_000, exclude=held_out.questions())
        train.entry(5)["question"]

    A problem whose question is in `exclude` is replaced by one from beyond `size`, always the same one. (Three tasks of
    reasoning_gym 0.1.25, isomorphic_strings, polynomial_multiplication and ransom_note, depend on PYTHONHASHSEED
    besides.)
    """

    def __init__(
        self, task: str, options: dict[str, Any] | None = None, *, seed: int, size: int, exclude: Collection[str] = ()
    ) -> None:
        self.task, self.options, self.seed, self.size = task, dict(reveal(options or {})), seed, size
        self.exclude = frozenset(exclude)
        self._spares: dict[int, Any] = {}
        self.dataset = self._spare(0)

    def __len__(self) -> int:
        return self.size

    def questions(self) -> frozenset[str]:
        return frozenset(str(self.dataset[index]["question"]) for index in range(self.size))

    def entry(self, index: int) -> dict[str, Any]:
        """The `question`, `answer` and `metadata` of problem `index`. `DataError`: all its replacements are held
        out."""
        for attempt in range(MAX_REPLACEMENTS + 1):
            entry: dict[str, Any] = self._spare(attempt)[index]
            if str(entry["question"]) not in self.exclude:
                return entry
        raise DataError(
            f"data.path={self.task}: {MAX_REPLACEMENTS} problems in a row are among the {len(self.exclude)} held-out "
            f"ones; the task has too few different problems with data.options={self.options}. Make it larger, or lower "
            "evaluation.num_problems."
        )

    def _spare(self, attempt: int) -> Any:
        """Make the attempt-th replacements. Tasks draw problem i from `seed + i`, so these lie beyond `size`."""
        if attempt not in self._spares:
            seeded = {**self.options, "seed": self.seed + attempt * self.size, "size": self.size}
            self._spares[attempt] = make_dataset(self.task, seeded)
        return self._spares[attempt]

    def extra(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Data that `verify` needs to score a response, as JSON values."""
        return {"environment": self.task, "options": self.options, "entry": to_json(entry)}


def verify(response: str, task: dict[str, Any]) -> float:
    """Score by the problem's own verifier, from 0 to 1. `task` is a row made by `Problems.extra`.

    Raises `DataError` for a task that comes from elsewhere.
    """
    if "environment" not in task or "entry" not in task:
        raise DataError(
            "reward.function=reasoning_gym scores problems of data.source=reasoning_gym only; this row has no "
            "verifier. Use reward.function=math_verify, or one of your own."
        )
    verifier = _verifier(task["environment"], json.dumps(task.get("options", {})))
    return float(verifier.score_answer(response, from_json(task["entry"])))


@functools.lru_cache(maxsize=64)
def _verifier(task: str, options: str) -> Any:
    return make_dataset(task, json.loads(options))


def make_dataset(task: str, options: dict[str, Any], keys: tuple[str, str] = ("data.path", "data.options")) -> Any:
    """The dataset object of reasoning_gym. Raises `ConfigError` for an unknown task or option, or a refused value;
    `keys` are the keys that the error names."""
    factory = importlib.import_module("reasoning_gym.factory")
    importlib.import_module("reasoning_gym")
    if task not in factory.DATASETS:
        raise ConfigError(f"{keys[0]}={task}: reasoning_gym has no such task{suggest(task, factory.DATASETS)}")
    fields = factory.DATASETS[task][1].__dataclass_fields__
    for key in options:
        if key not in fields:
            known = [name for name in fields if name not in ("seed", "size")]
            raise ConfigError(f"{keys[1]}.{key}: {task} has no such option{suggest(key, known)}")
    try:
        return factory.create_dataset(task, **options)
    except (AssertionError, ValueError, TypeError) as error:
        shown = {key: value for key, value in options.items() if key not in ("seed", "size")}
        raise ConfigError(f"{keys[1]}={shown}: {task} refuses them: {error or type(error).__name__}") from error


def to_json(value: Any) -> Any:
    """Convert to a JSON value from which `from_json` makes an equal one: verifiers tell tuples from lists."""
    if isinstance(value, tuple):
        return {TUPLE: [to_json(item) for item in value]}
    if isinstance(value, list):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    item = getattr(value, "item", None)
    return item() if callable(item) else value


def from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {TUPLE}:
            return tuple(from_json(item) for item in value[TUPLE])
        return {key: from_json(item) for key, item in value.items()}
    return value
