"""Runs a recipe of tinker-cookbook, unmodified, in an environment of its own and without a network.

made = make_directory(tmp_path)
logged = run_recipe("sl_loop", server.url, made)
logged.values("train_mean_nll")                        # one a step
"""

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.serve.cookbook.recipes import RECIPES, Recipe

PYTHON = Path(__file__).parents[3] / ".venv-tinker38/bin/python"
KEY = "tml-test"
NET_S = 900.0
"""Seconds after which a recipe is ended: a net, wide enough for a busy machine."""
LAST_LINES = 60
SAVED = "checkpoints.jsonl"
"""File in which recipes log what they have saved, and find what they go on from."""


@dataclass(frozen=True)
class Logged:
    """What a recipe has logged."""

    log: Path

    def values(self, name: str) -> list[float]:
        """The values of one number, in the order of steps; lines without it are left out."""
        return [float(line[name]) for line in self._lines("metrics.jsonl") if name in line]

    @property
    def saved(self) -> str:
        """Path of the state that was saved last."""
        return str(self._lines(SAVED)[-1]["state_path"])

    def _lines(self, file: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.log / file).read_text().splitlines()]


class RecipeFailed(AssertionError):
    """A recipe that has not come to its end; the message has its last lines."""


def run_recipe(
    recipe: str | Recipe, url: str, directory: Path, start: str | None = None, key: str = KEY, timeout_s: float = NET_S
) -> Logged:
    """Run a recipe in a directory of `make_directory` against the server at `url`. `start`: path of the weights that it
    starts from; None: the base model's. Raises `RecipeFailed`."""
    chosen = RECIPES[recipe] if isinstance(recipe, str) else recipe
    log = directory / "logs" / f"{chosen.module}-{len(list(directory.glob('logs/*')))}"
    if start is not None and not chosen.takes_start:
        log.mkdir(parents=True)
        (log / SAVED).write_text(json.dumps({"name": "start", "batch": 0, "state_path": start}) + "\n")
    run_module(chosen.command(str(log), start), url, directory, key, timeout_s)
    return Logged(log)


def run_module(words: list[str], url: str, directory: Path, key: str = KEY, timeout_s: float = NET_S) -> str:
    """Run Python of the SDK's environment with these words. Returns what it has written. Raises `RecipeFailed`."""
    assert PYTHON.exists(), "no environment with the SDK: type `make .venv-tinker38/.locked`"
    (directory / "logs").mkdir(exist_ok=True)
    command = [str(PYTHON), *words]
    try:
        done = subprocess.run(
            command, cwd=directory, env=environment(url, directory, key), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        output = late.output or b""
        told = output if isinstance(output, str) else output.decode(errors="replace")
        raise RecipeFailed(f"{' '.join(words)}: not ended after {timeout_s:g} s.\n{_last(told)}") from None
    if done.returncode:
        raise RecipeFailed(f"{' '.join(words)}: ended with {done.returncode}.\n{_last(done.stdout)}")
    return done.stdout


def environment(url: str, directory: Path, key: str = KEY) -> Mapping[str, str]:
    """Environment variables of a recipe: nobody is asked but the server, and nothing is sent anywhere else."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(directory),
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": key,
        "TINKER_TELEMETRY": "0",
        "TINKER_COOKBOOK_RUNS_DIR": str(directory / "runs"),
        "HF_HOME": str(directory / ".hf"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DO_NOT_TRACK": "1",
        "WANDB_MODE": "disabled",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _last(output: str) -> str:
    return "\n".join(output.splitlines()[-LAST_LINES:])
