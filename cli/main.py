"""The command line: `penstock run|validate|serve|plan|simulate|sweep|report|ui|grafana|status|scale|export|
recipes|keys|translate`.

Errors that Penstock raises on purpose end in one message and the exit code of their class: 2 for configuration and
data. Heavy imports wait until a command needs them, so that a misspelt key is answered at once.

The commands of the command line: their names, their options and their help.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

from penstock.conf.errors import ConfigError, PenstockError
from penstock.conf.secret import Secret, hide_in, reveal
from penstock.orchestrator.signals import heed_end

Functions = Mapping[str, Callable[[argparse.Namespace], int]]
"""What carries out each command, by its name."""
OVERRIDES_HELP = "recipe=NAME or recipe=DIRECTORY, algorithm=NAME, model=PRESET, and any key=value"
RETRIES_HELP = "when the command itself is killed or loses its cluster, go on up to N times from where it was"
BAND_HELP = "make of these runs, of different seeds, the band that others of their recipe are compared with"
RUN_HELP = "the run's directory or URL"
REQUESTS_HELP = "rollout=+2, rollout=3, reward=-1: so many more, so many in all (of each reward stage), so many less"
SWEEP = """Run every combination, as many at a time as the machine or the cluster has room for. The same command again
goes on where it was."""
SWEEP_HELP = "as for run; several values as in trainer.optimizer.lr=1e-4,3e-4 or seed=range(1,4)"
PLAN = """Compare the ways to split a cluster between engines and ranks by an estimate of their memory and of the
seconds of a step. Needs no GPU and no model, but the model's config.json."""
CLUSTER_HELP = "nodes, GPUs of each, kind: 2x8:h100 or 1x8:h100,2x8:l40s (default: the cluster at RAY_ADDRESS)"
FROM_HELP = "a run of ten steps, for the lengths of its responses, and how fast its engines and ranks were"
PROBE_HELP = "run the best N plans for some steps each, where they are to run, and keep the fastest"
LENGTHS_HELP = "tokens of a response in the mean, and the spread of their logarithm (default: 0.4 of the most, 0.6)"
SERVE = """Serve a base model to loops that are written for the SDK `tinker`: adapters are trained on this cluster and
sampled from, each request exactly once. Killed or not, the same command goes on where it was."""
SHOWN_KEY_HELP = "the key itself, which ps shows to all on this machine; deprecated"
KEY_HELP = "with the key that clients need, tml-… (default: TINKER_API_KEY, or one that is made and printed)"
PAGE_KEY_HELP = "with the key that visitors need (default: PENSTOCK_UI_KEY, or one that is made except for loopback)"
SIMULATE = """Play the dataflow of a run through its own ledger on a virtual clock: who works when, who waits for whom.
Starts nothing."""
FAULTS_HELP = "mean hours until a member is lost, and seconds until another is there (default: none; 60)"
DISCOVERY_HELP = "where Ray's head node lists its nodes (default: in the directory of the cluster at RAY_ADDRESS)"
DRAIN_HELP = "seconds for those that leave to finish what they have; the rest goes back (default: rollout.drain_s)"
EPILOG = """\
examples:
  penstock run recipe=arithmetic                      a tiny model learns sums, on two CPU cores
  penstock run recipe=arithmetic max_staleness=1      the same, generation one step ahead of training
  penstock run recipe=gsm8k data.path=train.jsonl     one's own problems
  penstock validate recipe=gsm8k model=tiny           every key, the dataflow, the checks; starts no actor
  penstock run recipe=gsm8k                           engines and ranks as is best for the GPUs that are there
  penstock plan recipe=gsm8k --cluster 1x8:h100       engines and ranks: how many GPUs for which
  penstock simulate recipe=gsm8k --cluster 1x8:h100   who would work when, and wait for whom

PENSTOCK_TRACEBACK=1 shows where an error comes from. RAY_ADDRESS names a cluster to run on.
"""


class _CommandParser(argparse.ArgumentParser):
    """Parser of one command, which takes words and options in any order."""

    _is_inner = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._is_inner:
            return super().parse_known_args(args, namespace)
        self._is_inner = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._is_inner = False


def make_parser(functions: Functions) -> argparse.ArgumentParser:
    """The parser of all commands. `functions`: what carries each out, by its name."""
    parser = argparse.ArgumentParser(
        prog="penstock",
        description="Post-train language models with reinforcement learning on a Ray cluster.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=None)
    parser.add_argument("--version", action="version", version=f"penstock {version('penstock')}")
    commands = parser.add_subparsers(title="commands", metavar="", parser_class=_CommandParser)
    for name, text in (("run", "train"), ("validate", "show and check a run without starting it")):
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        command.add_argument("overrides", nargs="*", metavar="key=value", help=OVERRIDES_HELP)
        command.set_defaults(command=functions[name])
        if name == "run":
            command.add_argument("--retries", type=int, default=0, metavar="N", help=RETRIES_HELP)
    _add_serve(commands, functions)
    _add_planning(commands, functions)
    sweep = commands.add_parser("sweep", help="many runs: keys with several values", description=SWEEP)
    sweep.add_argument("overrides", nargs="+", metavar="key=value,…", help=SWEEP_HELP)
    sweep.add_argument("--directory", default=None, metavar="DIR", help="for its runs (default: sweeps/RECIPE)")
    sweep.add_argument("--jobs", type=int, default=None, metavar="N", help="side by side (default: as there is room)")
    sweep.set_defaults(command=functions["sweep"])
    report = commands.add_parser("report", help="rebuild report.html and the plots of a run")
    report.add_argument("runs", nargs="+", help="a run's directory or URL, e.g. runs/arithmetic-20260101-120000")
    report.add_argument("--band", action="store_true", help=BAND_HELP)
    report.set_defaults(command=functions["report"])
    ui = commands.add_parser("ui", help="a page about runs, live while they go on")
    ui.add_argument(
        "runs", nargs="?", default="runs", help="a directory or URL with runs below, or a run (default: runs)"
    )
    ui.add_argument("--host", default="127.0.0.1", help="interface; any but loopback asks visitors for a key")
    ui.add_argument("--port", type=int, default=None, help="0: any (default: the first free one from 8420 on)")
    ui.add_argument("--key", default=None, help=SHOWN_KEY_HELP)
    ui.add_argument("--key-file", default=None, metavar="FILE", help=PAGE_KEY_HELP)
    ui.set_defaults(command=functions["ui"])
    grafana = commands.add_parser("grafana", help="write a Grafana dashboard, and alert rules for Prometheus")
    grafana.add_argument("directory", help="for the files")
    grafana.add_argument("--discovery", default=None, metavar="FILE", help=DISCOVERY_HELP)
    grafana.set_defaults(command=functions["grafana"])
    status = commands.add_parser("status", help="what a run's store is doing right now")
    status.add_argument("run", help=RUN_HELP)
    status.set_defaults(command=functions["status"])
    scale = commands.add_parser("scale", help="more or fewer engines and rewards for a run that goes on")
    scale.add_argument("run", help=RUN_HELP)
    scale.add_argument("requests", nargs="+", metavar="role=N", help=REQUESTS_HELP)
    scale.add_argument("--drain", type=float, default=None, metavar="S", help=DRAIN_HELP)
    scale.set_defaults(command=functions["scale"])
    export = commands.add_parser("export", help="write a checkpoint's weights as a HF model")
    export.add_argument(
        "checkpoint", help="its directory or URL, e.g. runs/NAME/checkpoints/global_step_50, or a run's"
    )
    export.add_argument("directory", help="a new directory for the model, or a URL")
    export.add_argument("--dtype", choices=("float32", "bfloat16"), default="", help="default: the run's rollout.dtype")
    export.set_defaults(command=functions["export"])
    _add_lookups(commands, functions)
    return parser


def _add_serve(commands: Any, functions: Functions) -> None:
    """Add the command of the server."""
    serve = commands.add_parser("serve", help="serve a model to other people's training loops", description=SERVE)
    serve.add_argument("overrides", nargs="*", metavar="key=value", help=OVERRIDES_HELP)
    serve.add_argument("--host", default=None, help="interface (default: serve.host, loopback)")
    serve.add_argument("--port", type=int, default=None, help="0: any (default: serve.port)")
    serve.add_argument("--key", default=None, help=SHOWN_KEY_HELP)
    serve.add_argument("--key-file", default=None, metavar="FILE", help=KEY_HELP)
    serve.set_defaults(command=functions["serve"])


def _add_planning(commands: Any, functions: Functions) -> None:
    """Add the commands that need nothing to run on."""
    plan = commands.add_parser("plan", help="how to split a cluster of GPUs, before anything starts", description=PLAN)
    plan.add_argument("overrides", nargs="*", metavar="key=value", help=OVERRIDES_HELP)
    plan.add_argument("--cluster", metavar="NxG:KIND,…", help=CLUSTER_HELP)
    plan.add_argument("--lengths", metavar="MEAN[:SIGMA]", help=LENGTHS_HELP)
    plan.add_argument("--from", dest="pilot", metavar="RUN", help=FROM_HELP)
    plan.add_argument("--within", metavar="hours=H", help="the cheapest part of the cluster that is done in time")
    plan.add_argument("--probe", metavar="N[:MINUTES]", help=PROBE_HELP)
    plan.add_argument("--write", metavar="FILE", help="for the winner's keys, a line each")
    plan.set_defaults(command=functions["plan"])
    simulate = commands.add_parser("simulate", help="play a run on a virtual clock", description=SIMULATE)
    simulate.add_argument("overrides", nargs="*", metavar="key=value", help=OVERRIDES_HELP)
    simulate.add_argument("--steps", type=int, metavar="N", help="(default: trainer.max_steps, and at most 50)")
    simulate.add_argument("--durations", metavar="FILE", help="YAML with how long things take: docs/planning.md")
    simulate.add_argument("--cluster", metavar="NxG:KIND,…", help="take them from the cost model of GPUs instead")
    simulate.add_argument("--lengths", metavar="MEAN[:SIGMA]", help=LENGTHS_HELP)
    simulate.add_argument("--from", dest="pilot", metavar="RUN", help=FROM_HELP)
    simulate.add_argument("--dropped", type=float, default=0.0, metavar="SHARE", help="that each filter drops")
    simulate.add_argument("--faults", metavar="HOURS[:SECONDS]", help=FAULTS_HELP)
    simulate.add_argument("--join", action="append", metavar="SECOND:N", help="so many engines join then")
    simulate.add_argument("--directory", metavar="DIR", help="for a directory of the run, which penstock ui shows")
    simulate.set_defaults(command=functions["simulate"])


def _add_lookups(commands: Any, functions: Functions) -> None:
    """Add the commands that say what there is."""
    recipes = commands.add_parser("recipes", help="list the recipes that come with Penstock")
    recipes.set_defaults(command=functions["recipes"])
    keys = commands.add_parser("keys", help="what a key means, and which there are")
    keys.add_argument("words", nargs="*", metavar="WORD", help="parts of its name, or of what it means")
    keys.set_defaults(command=functions["keys"])
    translation = commands.add_parser("translate", help="a configuration of verl or TRL as a recipe")
    translation.add_argument("file", help="a YAML file, or the shell script that starts it")
    translation.add_argument("words", nargs="*", metavar="key=value", help="more of its keys, such as num_processes=8")
    translation.add_argument("--write", metavar="FILE", help="for the recipe.yaml (default: print it)")
    translation.set_defaults(command=functions["translate"])


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

    from penstock.orchestrator.configuration.sweep import Sweep, jobs_for, points_of

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
