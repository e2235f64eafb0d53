"""`penstock.train`: a run in one call, for programs and notebooks, with functions and rows in the place of their names.

What is given goes to actors with their configuration (`InlineValue`), and into no file. So a run that is to be resumed
has a name, and the same call resumes it; `penstock run` refuses to.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.algorithms.registry import algorithm as register
from penstock.conf.errors import ConfigError
from penstock.conf.model import MODEL_PRESETS
from penstock.conf.renamed import present_key
from penstock.conf.reward import WeightedRewardConfig
from penstock.conf.run import RunConfig
from penstock.orchestrator.configuration.compose import compose_run
from penstock.orchestrator.configuration.overrides import Override
from penstock.orchestrator.run import RunResult, run
from penstock.workers.reward.signatures import name_of
from penstock.workers.user_code import GIVEN, InlineValue

EVALUATION_STEPS = 10
"""Steps between evaluations on `eval_dataset`, unless `evaluation` says it."""


def train(
    model: Any = None,
    dataset: Any = None,
    reward: Any = None,
    algorithm: Any = None,
    *,
    eval_dataset: Any = None,
    quiet: bool = False,
    **keys: Any,
) -> RunResult:
    """Train in one call. What is None is as the recipe has it (`recipe="arithmetic"`), or as the defaults do.

    `model`: a name of the hub, a directory, or a preset such as "tiny". `dataset`, `eval_dataset`: rows, as a list of
    dicts or a `datasets.Dataset`; or paths, as `data.path`. `reward`: a function with any signature of rewards, a name,
    or a list of these, whose sum is trained on. `algorithm`: a name, or a function `(config) -> Dataflow`. `keys`: of
    the configuration, a section as a dict (`trainer={"max_steps": 20}`), a single key as `**{"trainer.max_steps": 20}`.
    Keys that name a function take the function itself. `quiet`: print nothing.

        def exact(response: str, answer: str) -> float:
            return float(response.strip() == answer)

        rows = [{"question": "2 + 2 =", "answer": "4"}]
        result = penstock.train(model="tiny", dataset=rows, reward=exact, name="sums", trainer={"max_steps": 20})
        print(result.model, result.metrics[-1]["reward/mean"])

    With a `name` the same call again resumes the run. Raises what `run` raises.
    """
    given = {"model": model, "data.path": dataset, "reward": reward, "algorithm": algorithm, **keys}
    if eval_dataset is not None:
        given = {"evaluation.every_steps": EVALUATION_STEPS, "evaluation.path": eval_dataset} | given
    config = _config({name: value for name, value in given.items() if value is not None})
    return run(config, quiet=quiet)


def _config(given: Mapping[str, Any]) -> RunConfig:
    """The configuration of a call. Raises `ConfigError`."""
    settings = dict(_flatten({name: _section_of(name, value) for name, value in given.items()}))
    if "data.path" in settings:
        settings = {"data.source": "auto"} | settings
        if not any(key.startswith("evaluation.") for key in settings):
            settings["evaluation.every_steps"] = 0
    if "name" in settings:
        settings = {"resume": "auto"} | settings
    if "algorithm.name" in settings:
        settings["algorithm"] = settings.pop("algorithm.name")
    rewards = settings.pop("reward.functions", ())
    inline = {key: value for key, value in settings.items() if isinstance(value, InlineValue)}
    config = compose_run([Override(present_key(key), value, f"{key}={value}") for key, value in settings.items()])
    for key, value in inline.items():
        *sections, leaf = key.split(".")
        section: Any = config
        for part in sections:
            section = section[part] if isinstance(section, dict) else getattr(section, part)
        section.update({leaf: value}) if isinstance(section, dict) else setattr(section, leaf, value)
    if "reward" in given and "rewards" not in given:
        config.rewards = _weighted(rewards)
    return config


def _weighted(rewards: Sequence[Any]) -> list[WeightedRewardConfig]:
    """Rewards of equal weights; lambdas get numbers."""
    names = [name_of(one).strip("<>") if callable(one) else None for one in rewards]
    titles = [f"{name}_{number}" if name and names.count(name) > 1 else name for number, name in enumerate(names)]
    return [WeightedRewardConfig(_inline_function(one), name=title) for one, title in zip(rewards, titles, strict=True)]


def _section_of(name: str, value: Any) -> Any:
    """An argument as keys have it."""
    if name == "model" and not isinstance(value, Mapping):
        if not isinstance(value, str | Path):
            raise ConfigError(
                f"model: a {type(value).__name__}, and engines and ranks load a model of their own. Save it and its "
                "tokenizer with save_pretrained(DIRECTORY), and give the directory."
            )
        return value if value in MODEL_PRESETS else {"path": str(value)}
    if name == "algorithm" and callable(value):
        return register(value.__name__)(value).__name__
    if name == "reward" and not isinstance(value, Mapping):
        return {"functions": value} if isinstance(value, list | tuple) else {"function": value}
    return _rows(name, value) if name in ("data.path", "evaluation.path") else value


def _rows(key: str, value: Any) -> Any:
    """Rows as an `InlineValue`: Arrow's table of a `datasets.Dataset`, or the list that they are; a path as text."""
    if isinstance(value, str | Path):
        return str(value)
    if isinstance(value, Sequence) and all(isinstance(row, dict) for row in value):
        return InlineValue(f"{len(value):,} rows, {GIVEN}", list(value))
    if hasattr(value, "with_format") and hasattr(value, "num_rows") and not isinstance(value, Mapping):
        return InlineValue(f"{len(value):,} rows, {GIVEN}", value.with_format("arrow")[:])
    splits = f" Give one of its splits: {', '.join(map(repr, value))}." if isinstance(value, Mapping) else ""
    raise ConfigError(
        f"{key}: a {type(value).__name__}, where rows are due: a list of dicts, a datasets.Dataset, or a path.{splits}"
    )


def _inline_function(value: Any) -> Any:
    return InlineValue(f"{name_of(value)}, {GIVEN}", value) if callable(value) else value


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values by dotted keys, functions as `InlineValue`s."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _inline_function(value)
