"""The command line: `penstock run|validate|serve|plan|simulate|sweep|report|ui|grafana|status|scale|export|
recipes|keys|translate`.

Errors that Penstock raises on purpose end in one message and the exit code of their class: 2 for configuration and
data. Heavy imports wait until a command needs them, so that a misspelt key is answered at once.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from penstock.cli.parser import Functions, make_parser
from penstock.conf.errors import ConfigError, PenstockError
from penstock.conf.secret import Secret, hide_in, reveal
from penstock.orchestrator.signals import heed_end

INTERRUPTED = 130
CHECKS = "checking configuration, model, data and cluster"
SERVED = ("rollout.sampling.max_tokens=1", "evaluation.every_steps=0", "checkpoint.every_steps=0")
"""Words of every server: clients say how long samples are, and nothing is evaluated or saved by steps."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the `penstock` script. Returns the exit code."""
    parser = make_parser(COMMANDS)
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 0
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        return command(arguments)
    except PenstockError as error:
        return _report_error(error)
    except KeyboardInterrupt:
        try:
            _stderr("[yellow]interrupted[/]")
        except OSError:  # a terminal that is closed
            _discard(sys.stdout, sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `penstock validate | head`
        _discard(sys.stdout)
        return 0


def _discard(*streams: TextIO) -> None:
    """Have what a stream is told, and has been told, come nowhere."""
    for stream in streams:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _load(overrides: Sequence[str]) -> Any:
    from penstock.orchestrator.configuration.compose import load_config
    from penstock.workers.user_code import packaged_recipes

    if not overrides:
        raise ConfigError(
            "nothing said about what to run. Name a recipe, like recipe=arithmetic, or a directory with a "
            f"recipe.yaml of your own, recipe=DIRECTORY. Penstock brings: {', '.join(packaged_recipes())}."
        )
    return load_config(overrides)


def _planned(overrides: Sequence[str], config: Any) -> tuple[list[str], Any]:
    """Plan a run for the cluster's GPUs. Returns its overrides with those of the plan, and their configuration."""
    if config.plan != "auto" or not config.trainer.num_gpus_per_rank:
        return list(overrides), config
    from rich.console import Console

    from penstock.planner.plan_view import with_plan

    words = with_plan(overrides, Console())
    return words, _load(words)


def _begin(text: str) -> None:
    """Print what a command does before its imports, which may take a minute on a busy machine."""
    print(text, flush=True)


def _run(arguments: argparse.Namespace) -> int:
    config = _load(arguments.overrides)
    if arguments.retries > 0:
        from penstock.orchestrator.control.retries import run_with_retries

        return run_with_retries(arguments.overrides, arguments.retries)
    arguments.overrides, config = _planned(arguments.overrides, config)
    _begin(CHECKS)
    # Late: the configuration is in order, so it may take seconds.
    from penstock.orchestrator.observability.reporting.closing import print_summary
    from penstock.orchestrator.run import run

    heed_end()
    result = run(config)
    with contextlib.suppress(OSError):  # of an output that is a file on a full disk
        print_summary(result.directory, config, arguments.overrides)
    return 0


def _validate(arguments: argparse.Namespace) -> int:
    config = _load(arguments.overrides)
    _begin(CHECKS)
    _, config = _planned(arguments.overrides, config)
    from rich.console import Console

    from penstock.orchestrator.configuration.validate import validate_run

    return validate_run(config, Console())


def _serve(arguments: argparse.Namespace) -> int:
    config = _load([*SERVED, *arguments.overrides] if arguments.overrides else [])
    _begin("starting the server: its address follows once engines and ranks are there")
    from rich.console import Console

    from penstock.serve.command import serve

    given = {name: getattr(arguments, name) for name in ("host", "port") if getattr(arguments, name) is not None}
    console = Console()
    serve(
        replace(config, serve=replace(config.serve, **given)), key_of(arguments, "TINKER_API_KEY"),
        lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True),
    )  # fmt: skip
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    config = _load(arguments.overrides)
    from penstock.planner.plan_view import run, wide_console

    if arguments.probe:
        heed_end()  # so that no probe is left
    run(config, arguments, wide_console())
    return 0


def _simulate(arguments: argparse.Namespace) -> int:
    config = _load(arguments.overrides)
    from penstock.planner.plan_view import wide_console
    from penstock.planner.simulation.view import run

    run(config, arguments, wide_console())
    return 0


def _sweep(arguments: argparse.Namespace) -> int:
    _begin("reading the runs of the sweep")
    from rich.console import Console

    from penstock.orchestrator.configuration.sweep import Sweep, jobs_for
    from penstock.orchestrator.configuration.sweep_points import points_of

    points = points_of(arguments.overrides)
    jobs = jobs_for(points, lambda words: _planned(words, _load(words))[0])
    recipe = next((word.partition("=")[2] for word in arguments.overrides if word.startswith("recipe=")), "runs")
    directory = Path(arguments.directory or f"sweeps/{Path(recipe).name}")
    return Sweep(points, directory, arguments.jobs or jobs, Console()).run()


def _ui(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from penstock.ui.app import serve

    serve(arguments.runs, Console(), arguments.host, arguments.port, key_of(arguments, "PENSTOCK_UI_KEY") or None)
    return 0


def key_of(arguments: argparse.Namespace, variable: str) -> str:
    """The key of a command: in a file, or in a variable, which no process that this one starts sees; empty: none is
    given."""
    given = os.environ.pop(variable, "")
    if arguments.key:
        _stderr("[yellow]--key[/]", f"ps shows it to everyone on this machine. Use --key-file FILE, or {variable}.")
        return str(arguments.key)
    return str(reveal(Secret.read(f"file:{arguments.key_file}", "--key-file"))) if arguments.key_file else given


def _grafana(arguments: argparse.Namespace) -> int:
    from penstock.ui.grafana.files import write

    print(write(arguments.directory, arguments.discovery), end="")
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from penstock.orchestrator.observability.charts.known_curves import write_known
    from penstock.orchestrator.observability.reporting.report import report_of

    for place in [write_known(arguments.runs)] if arguments.band else map(report_of, arguments.runs):
        print(place)
    return 0


def _status(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from penstock.orchestrator.observability.reporting.status import print_status

    print_status(arguments.run, Console())
    return 0


def _scale(arguments: argparse.Namespace) -> int:
    from penstock.orchestrator.membership.scaling_requests import ask

    done, problems = ask(arguments.run, arguments.requests, arguments.drain)
    print(*done, sep="\n")
    for problem in problems:
        _stderr("[bold red]not all[/]", problem)
    return 1 if problems else 0


def _export(arguments: argparse.Namespace) -> int:
    from penstock.orchestrator.checkpointing.export import export_checkpoint

    print(export_checkpoint(arguments.checkpoint, arguments.directory, arguments.dtype))
    return 0


def _recipes(_: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from penstock.orchestrator.configuration.recipes import find_recipe
    from penstock.workers.user_code import packaged_recipes

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), show_header=False)
    for name in packaged_recipes():
        table.add_row(f"[bold]{name}[/]", find_recipe(name).description)
    Console().print(table)
    return 0


def _keys(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from penstock.orchestrator.configuration.keys import show

    show(arguments.words, Console())
    return 0


def _translate(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from penstock.orchestrator.configuration.translate import show

    return show(arguments.file, Console(), arguments.write, arguments.words)


def _report_error(error: PenstockError) -> int:
    if os.environ.get("PENSTOCK_TRACEBACK", "0") not in ("", "0"):
        raise error
    # An error that crossed Ray carries the remote traceback in its text and the error itself as `cause`.
    cause = getattr(error, "cause", None)
    _stderr(f"[bold red]{_kind(error)}[/]", hide_in(str(cause if isinstance(cause, PenstockError) else error)))
    return error.exit_code


def _kind(error: PenstockError) -> str:
    """The kind of an error, which says what has to be changed: `configuration` for `ConfigError`."""
    from penstock.conf import errors

    for base in type(error).__mro__:
        known = {
            errors.ConfigError: "configuration",
            errors.DataError: "data",
            errors.ModelError: "model",
            errors.ResourceError: "resources",
        }
        if base in known:
            return known[base]
    return "error"


def _stderr(markup: str, text: str = "") -> None:
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    console.print(markup + (": " if text else ""), end="" if text else "\n", soft_wrap=True)
    if text:
        console.print(text, markup=False, soft_wrap=True)


COMMANDS: Functions = {
    "run": _run,
    "validate": _validate,
    "serve": _serve,
    "sweep": _sweep,
    "report": _report,
    "ui": _ui,
    "grafana": _grafana,
    "status": _status,
    "scale": _scale,
    "export": _export,
    "plan": _plan,
    "simulate": _simulate,
    "recipes": _recipes,
    "keys": _keys,
    "translate": _translate,
}
"""What carries out each command."""


if __name__ == "__main__":
    sys.exit(main())
