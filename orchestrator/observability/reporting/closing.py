"""The last screen of `penstock run`: the results, where they lie, and what to try next, or how to go on."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.conf.errors import ConfigError
from penstock.conf.run import RunConfig
from penstock.conf.secret import hide_word
from penstock.orchestrator.observability.charts.cards import Card, cards
from penstock.orchestrator.observability.faults import duration_s
from penstock.orchestrator.observability.runs.columns import Columns
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.orchestrator.run_directory.run_place import RunPlace

WORKING_DIRECTORIES = "working_dir_files"
"""Folder below Ray's directory with the copies of working directories in which jobs run. Ray deletes them."""


def print_summary(
    directory: Path, config: RunConfig, words: Sequence[str] | None = None, console: Console | None = None
) -> None:
    """Print the summary of a finished run, after the progress display has closed. `words`: those that the command was
    given; None: its recipe alone."""
    console = console or Console(highlight=False)
    try:
        run = RunDirectory.open(directory)
        found = cards_of(run)
    except (OSError, ConfigError) as error:  # a lost mount; the run has come to its end all the same
        console.print(f"\nThe run has ended, and its directory cannot be read: {error}", markup=False, soft_wrap=True)
        return
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), show_header=False)
    for card in found:
        style = {True: "bold green", False: "bold red", None: "bold"}[card.good]
        table.add_row(card.label, Text(card.value, style), Text(card.detail, "dim"))  # errors may have brackets
    console.print()
    console.print(table)
    console.print()
    url = RunPlace.of_run(config).url
    console.print(f"report    {_at(url, run.report)}", markup=False, soft_wrap=True)
    if run.model.is_dir():
        console.print(f"model     {_at(url, run.model)}", markup=False, soft_wrap=True)
    console.print(f"all files {url or _short(run.path)}", markup=False, soft_wrap=True)
    if url is not None:
        console.print(f"also in   {_short(run.path)}", markup=False, soft_wrap=True)
    elif _is_temporary(run.path):
        note = "Ray deletes this copy of the working directory after the job. output_dir=PATH or a URL keeps the files"
        console.print(f"          [yellow]{note}[/]", soft_wrap=True)
    console.print("\n[bold]Try next[/]")
    for command, meaning in next_steps(config, run, words):
        console.print(f"  {command}", markup=False, soft_wrap=True)
        console.print(f"      [dim]{meaning}[/]", soft_wrap=True)


def print_unfinished(config: RunConfig, run: RunDirectory, console: Console) -> None:
    """Print where a failed or interrupted run lies, and how it goes on, before its error is told."""
    name = run.path.name
    if config.checkpoint.every_steps:
        way_on = f"the same command with name={name} resume=auto goes on from the newest checkpoint, if there is one"
    else:
        way_on = "it took no checkpoints to go on from; checkpoint.every_steps=N takes them"
    console.print(f"\nrun       {run.url or _short(run.path)}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"report    {_at(run.url, run.report)}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"go on     {way_on}", markup=False, highlight=False, soft_wrap=True)


def cards_of(directory: RunDirectory) -> list[Card]:
    """The cards of a run. Raises `ConfigError` where there is no run, `OSError` where it cannot be read."""
    columns = Columns(directory.metrics_file)
    columns.update()
    events = directory.read_events()
    return cards(columns, directory.read_config(), events, duration_s(events))


def next_steps(config: RunConfig, run: RunDirectory, words: Sequence[str] | None = None) -> list[tuple[str, str]]:
    """Commands that make sense after this run, with what they show. They have the words of its own command."""
    words = [f"recipe={config.recipe or 'arithmetic'}"] if words is None else words
    steps = []
    model = [f"model.path={_short(run.model)}"] if run.model.is_dir() and not _is_temporary(run.model) else []
    if config.max_staleness == 0 and config.algorithm.name != "sft" and config.placement != "colocated":
        hint = "generation runs one step ahead of training: compare samples/s"
        steps.append((_command("run", words, "max_staleness=1"), hint))
    if config.recipe_name == "arithmetic":
        hint = "sums of three numbers" + (", from the model just trained" if model else "")
        steps.append((_command("run", words, "data.options.max_terms=3", *model), hint))
        hint = "a reward of your own: see README.md"
        steps.append((_command("run", words, "reward.function=my_reward.py:score"), hint))
        hint = "word problems, by the path of larger models; downloads openai/gsm8k, or data.path=FILE.jsonl"
        steps.append((_command("run", ["recipe=gsm8k", "model=tiny", "trainer.max_steps=2"]), hint))
    steps.append((_command("validate", words), "every key that can be set, and the dataflow"))
    return steps


def _command(name: str, words: Sequence[str], *more: str) -> str:
    """The command with a run's words and further ones in their place, as a job where the run is one. A new run has a
    name of its own."""
    replaced = {word.partition("=")[0] for word in more} | {"name", "resume"}
    kept = [word for word in map(hide_word, words) if word.partition("=")[0].lstrip("+") not in replaced]
    words = ["penstock", name, *kept, *more]
    if RAY_JOB_CONFIG_JSON_ENV_VAR in os.environ:
        sent = ["--working-dir", "."] if _is_temporary(Path.cwd()) else []
        words = ["ray", "job", "submit", *sent, "--", *words]
    return shlex.join(words)


def _is_temporary(path: Path) -> bool:
    return WORKING_DIRECTORIES in path.parts


def _at(url: str | None, path: Path) -> str:
    """The place of a file or directory of the run, for people."""
    return _short(path) if url is None else f"{url}/{path.name}"


def _short(path: Path) -> str:
    """The path relative to the working directory, if it lies below that and people know that."""
    if _is_temporary(path):
        return str(path)
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
