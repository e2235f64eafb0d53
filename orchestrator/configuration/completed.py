"""Completes a configuration, loaded or made in Python, for the actors of a run: paths are absolute, the user's files
imported, sections checked against each other."""

import glob
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

from penstock.conf.checks import AUTO
from penstock.conf.run import RunConfig, validate
from penstock.orchestrator.configuration.recipes import load_file
from penstock.workers.prompts.data_names import names_split
from penstock.workers.user_code import with_file


def completed(config: RunConfig) -> RunConfig:
    """Return a copy that a run can start from. Raises `ConfigError` for what `load_config` refuses."""
    config = deepcopy(config)
    make_paths_absolute(config, Path.cwd())
    config.imports = [str(Path(file).expanduser().resolve()) for file in config.imports]
    for file in config.imports:
        load_file(Path(file), "imports")
    validate(config)
    return config


def make_paths_absolute(config: RunConfig, directory: Path) -> None:
    """Give files and directories that exist their absolute path, since actors run elsewhere. Names of the hub stay as
    they are. `directory`: where they are looked for after the working directory."""

    def absolute(value: str | None) -> str | None:
        if not value:
            return value
        candidates = (base / Path(value).expanduser() for base in (Path.cwd(), directory))
        return next((str(path.resolve()) for path in candidates if path.exists() or any(matches(path))), value)

    def matches(pattern: Path) -> Iterator[str]:
        return glob.iglob(str(pattern), recursive=True)

    parts: list[Any] = [config.data, *config.data.mixture.values()]
    for data in parts:
        if (data.source or config.data.source) != "reasoning_gym":
            data.path = absolute(data.path)
    if config.data.kind in (AUTO, "jsonl", "huggingface"):
        trained = next((str(part.path) for part in config.data.mixture.values()), config.data.path or "")
        measured: list[Any] = [config.evaluation, *config.evaluation.sets.values()]
        for held_out in measured:
            if held_out.path and not names_split(held_out.path, trained):
                held_out.path = absolute(held_out.path)
    config.model.path = absolute(config.model.path)
    config.model.reference_path = absolute(config.model.reference_path)
    config.model.paths = {name: absolute(path) or path for name, path in config.model.paths.items()}
    for section, key in (
        (config.reward, "function"), (config.data, "teacher"), (config.data, "rejected_teacher"),
        (config.data, "path"), (config.evaluation, "path"), (config.environment, "name"),
        *((part, "path") for part in config.data.mixture.values()),
    ):  # fmt: skip
        setattr(section, key, _of_code(getattr(section, key), absolute))
    for reward in config.rewards:
        reward.function = str(_of_code(reward.function, absolute))
    options = config.environment.options
    options |= {key: _of_code(value, absolute) for key, value in options.items() if isinstance(value, str)}


def _of_code(name: str | None, absolute: Callable[[str], str | None]) -> str | None:
    """The name of a function: `file.py:function` with the file's absolute path; anything else as it is."""
    return with_file(name, absolute) if name else name
