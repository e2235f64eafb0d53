"""The command line: the commands with their options and help, and what carries each out.

Errors that Penstock raises on purpose end in one message and the exit code of their class: 2 for configuration and
data. Heavy imports wait until a command needs them, so that a misspelt key is answered at once.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

from penstock.conf.checks import need_extra
from penstock.conf.errors import ConfigError, DataError, ModelError, PenstockError, ResourceError
from penstock.conf.secret import Secret, hide_in, reveal
from penstock.orchestrator.signals import heed_end

INTERRUPTED = 130
CHECKS = "checking configuration, model, data and cluster"
SERVED = ("rollout.sampling.max_tokens=1", "evaluation.every_steps=0", "checkpoint.every_steps=0")
"""Words of every server: clients say how long samples are, and nothing is evaluated or saved by steps."""
KINDS = {ConfigError: "configuration", DataError: "data", ModelError: "model", ResourceError: "resources"}
"""Words for the errors that say what has to be changed, by their class."""
EPILOG = """\
examples:
  penstock run recipe=arithmetic                      a tiny model learns sums, on two CPU cores
  penstock run recipe=arithmetic max_staleness=1      the same, generation one step ahead of training
  penstock run recipe=gsm8k data.path=train.jsonl     your own problems
  penstock validate recipe=gsm8k model=tiny           every key, the dataflow, the checks; starts no actor
  penstock run recipe=gsm8k                           engines and ranks as is best for the present GPUs
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


Argument = tuple[tuple[str, ...], dict[str, Any]]
"""Names and settings of an argument, as `add_argument` takes them."""


@dataclass(frozen=True)
class Command:
    """A command: its function, which returns the exit code, its help and its arguments."""

    function: Callable[[argparse.Namespace], int]
    help: str
    description: str | None
    arguments: tuple[Argument, ...]


COMMANDS: dict[str, Command] = {}
"""The commands by name, in the order of the help."""


def argument(*names: str, **settings: Any) -> Argument:
    return names, settings


def command(name: str, text: str, *arguments: Argument, description: str | None = None) -> Callable[..., Any]:
    """Register the decorated function as a command. `text`: its line in the list of commands."""

    def registered(function: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
        COMMANDS[name] = Command(function, text, description, arguments)
        return function

    return registered


WORDS = argument(
    "overrides", nargs="*", metavar="key=value",
    help="recipe=NAME or recipe=DIRECTORY, algorithm=NAME, model=PRESET, and any key=value",
)  # fmt: skip
RUN = argument("run", help="the run's directory or URL")
KEY = argument("--key", help="the key itself, which ps shows to everyone on this machine; deprecated")
LENGTHS = argument(
    "--lengths", metavar="MEAN[:SIGMA]",
    help="tokens of a response in the mean, and the spread of their logarithm (default: 0.4 of the most, 0.6)",
)  # fmt: skip
PILOT = argument(
    "--from", dest="pilot", metavar="RUN",
    help="a run of ten steps, for the lengths of its responses, and how fast its engines and ranks were",
)  # fmt: skip


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="penstock",
        description="Post-train language models with reinforcement learning on a Ray cluster.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=None)
    parser.add_argument("--version", action="version", version=f"penstock {version('penstock')}")
    subparsers = parser.add_subparsers(title="commands", metavar="", parser_class=_CommandParser)
    for name, one in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=one.help, description=one.description)
        for names, settings in one.arguments:
            subparser.add_argument(*names, **settings)
        subparser.set_defaults(command=one.function)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the `penstock` script. Returns the exit code."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 0
    try:
        return int(arguments.command(arguments))
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
    """Send what is written to a stream, and what it has buffered, to /dev/null."""
    for stream in streams:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _load(overrides: Sequence[str]) -> Any:
    from penstock.orchestrator.configuration.compose import load_config
    from penstock.workers.user_code import packaged_recipes

    if not overrides:
        raise ConfigError(
            "no recipe is named. Name one, like recipe=arithmetic, or a directory with a "
            f"recipe.yaml of your own, recipe=DIRECTORY. Penstock comes with: {', '.join(packaged_recipes())}."
        )
    return load_config(overrides)


def _with_plan(overrides: Sequence[str], config: Any) -> tuple[list[str], Any]:
    """Plan a run for the cluster's GPUs. Returns its overrides with those of the plan, and their configuration."""
    from penstock.workers.runtime.builds import GPU, vllm_build

    has_gpus = config.trainer.num_gpus_per_rank or (vllm_build() or ("", ""))[0] == GPU
    if config.plan != "auto" or not has_gpus:
        return list(overrides), config
    from rich.console import Console

    from penstock.planner.planned_runs import with_plan

    words = with_plan(overrides, Console())
    return words, _load(words)


def _announce(text: str) -> None:
    """Print what a command does before its imports, which may take a minute on a busy machine."""
    print(text, flush=True)


@command(
    "run", "train", WORDS,
    argument(
        "--retries", type=int, default=0, metavar="N",
        help="restart up to N times, from where the run was, when the command is killed or loses its cluster",
    ),
    description="Train.",
)  # fmt: skip
def _run(arguments: argparse.Namespace) -> int:
    written = _load(arguments.overrides)
    if arguments.retries > 0:
        from penstock.orchestrator.recovery.retries import run_with_retries

        return run_with_retries(arguments.overrides, arguments.retries)
    words, config = _with_plan(arguments.overrides, written)
    _announce(CHECKS)
    # Late: the configuration is in order, so it may take seconds.
    from penstock.orchestrator.observability.reporting.closing import print_summary
    from penstock.orchestrator.run import run

    heed_end()
    result = run(config)
    with contextlib.suppress(OSError):  # of an output that is a file on a full disk
        print_summary(result.directory, config, words)
    return 0


@command(
    "validate", "show and check a run without starting it", WORDS,
    description="Show and check a run without starting it.",
)  # fmt: skip
def _validate(arguments: argparse.Namespace) -> int:
    written = _load(arguments.overrides)
    _announce(CHECKS)
    _, config = _with_plan(arguments.overrides, written)
    from rich.console import Console

    from penstock.orchestrator.configuration.validate import validate_run

    return validate_run(config, Console())


@command(
    "serve", "serve a model to other people's training loops", WORDS,
    argument("--host", help="interface (default: serve.host, loopback)"),
    argument("--port", type=int, help="0: any (default: serve.port)"),
    KEY,
    argument(
        "--key-file", metavar="FILE",
        help="with the key that clients need, tml-… (default: TINKER_API_KEY, or one that is made and printed)",
    ),
    description="Serve a base model to loops that are written for the SDK `tinker`: adapters are trained on this "
    "cluster and sampled from, each request exactly once. After a kill the same command continues where it was.",
)  # fmt: skip
def _serve(arguments: argparse.Namespace) -> int:
    need_extra("serve", "penstock serve")
    words = [*SERVED, *arguments.overrides] if arguments.overrides else []
    config = _load(words)
    if not config.rollout.num_gpus_per_worker:  # vLLM's build for GPUs takes parts of them
        _, config = _with_plan(words, config)
    _announce("starting the server: its address follows once engines and ranks are there")
    from rich.console import Console

    from penstock.serve.command import serve

    given = {name: getattr(arguments, name) for name in ("host", "port") if getattr(arguments, name) is not None}
    console = Console()
    serve(
        replace(config, serve=replace(config.serve, **given)), key_of(arguments, "TINKER_API_KEY"),
        lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True),
    )  # fmt: skip
    return 0


@command(
    "plan", "how to split a cluster of GPUs, before anything starts", WORDS,
    argument(
        "--cluster", metavar="NxG:KIND,…",
        help="nodes, GPUs of each, kind: 2x8:h100 or 1x8:h100,2x8:l40s (default: the cluster at RAY_ADDRESS)",
    ),
    LENGTHS,
    PILOT,
    argument(
        "--turns", metavar="N[:SECONDS[:TOKENS]]",
        help="of an attempt in an environment, with what it takes and adds between them (default: 0.4 of "
        "environment.max_turns, 0 s, 100 tokens)",
    ),
    argument("--within", metavar="hours=H", help="the cheapest part of the cluster that is done in time"),
    argument("--price", metavar="KIND=MONEY,…", help="of a GPU for an hour, as in h100=2.5: plans say what they cost"),
    argument(
        "--probe", metavar="N[:MINUTES]",
        help="run the best N plans for some steps each, where they are to run, and keep the fastest",
    ),
    argument("--write", metavar="FILE", help="for the winner's keys, a line each"),
    description="Compare the ways to split a cluster between engines and ranks by an estimate of their memory and of "
    "the seconds of a step. Needs no GPU and no model, but the model's config.json.",
)  # fmt: skip
def _plan(arguments: argparse.Namespace) -> int:
    config = _load(arguments.overrides)
    from penstock.planner.plan_view import run, wide_console

    if arguments.probe:
        heed_end()  # so that no probe is left
    run(config, arguments, wide_console())
    return 0


@command(
    "simulate", "play a run on a virtual clock", WORDS,
    argument("--steps", type=int, metavar="N", help="(default: trainer.max_steps, and at most 50)"),
    argument("--durations", metavar="FILE", help="YAML with how long things take: docs/planning.md"),
    argument("--cluster", metavar="NxG:KIND,…", help="take them from the cost model of GPUs instead"),
    LENGTHS,
    PILOT,
    argument("--dropped", type=float, default=0.0, metavar="SHARE", help="share of groups that each filter drops"),
    argument(
        "--faults", metavar="HOURS[:SECONDS]",
        help="mean hours until a member is lost, and seconds until another is there (default: none; 60)",
    ),
    argument("--join", action="append", metavar="SECOND:N", help="N engines join at that second"),
    argument("--directory", metavar="DIR", help="for a directory of the run, which penstock ui shows"),
    description="Play the dataflow of a run through its own ledger on a virtual clock: who works when, who waits for "
    "whom. Starts nothing.",
)  # fmt: skip
def _simulate(arguments: argparse.Namespace) -> int:
    config = _load(arguments.overrides)
    from penstock.planner.plan_view import wide_console
    from penstock.planner.simulation.simulate_view import run

    run(config, arguments, wide_console())
    return 0


@command(
    "sweep", "many runs: keys with several values",
    argument(
        "overrides", nargs="+", metavar="key=value,…",
        help="as for run; several values as in trainer.optimizer.lr=1e-4,3e-4 or seed=range(1,4)",
    ),
    argument("--directory", metavar="DIR", help="for its runs (default: sweeps/RECIPE)"),
    argument("--jobs", type=int, metavar="N", help="side by side (default: as there is room)"),
    description="Run every combination, as many at a time as the machine or the cluster has room for. The same command "
    "again continues where it was.",
)  # fmt: skip
def _sweep(arguments: argparse.Namespace) -> int:
    _announce("reading the runs of the sweep")
    from rich.console import Console

    from penstock.orchestrator.configuration.sweep import Sweep, jobs_for, points_of

    points = points_of(arguments.overrides)
    jobs = jobs_for(points, lambda words: _with_plan(words, _load(words))[0])
    recipe = next((word.partition("=")[2] for word in arguments.overrides if word.startswith("recipe=")), "runs")
    directory = Path(arguments.directory or f"sweeps/{Path(recipe).name}")
    return Sweep(points, directory, arguments.jobs or jobs, Console()).run()


def _price(text: str) -> float:
    """The money of `2.5`, and of `h100=2.5`, as `plan` takes it."""
    price = float(text.rpartition("=")[2])
    if not 0 <= price < float("inf"):
        raise ValueError
    return price


@command(
    "report", "rebuild report.html and the plots of a run",
    argument("runs", nargs="+", help="a run's directory or URL, e.g. runs/arithmetic-20260101-120000"),
    argument(
        "--band", action="store_true",
        help="make the band that runs of their recipe are compared with from these runs of different seeds",
    ),
    argument(
        "--price", type=_price, default=0.0, metavar="MONEY", help="of a GPU for an hour, as in 2.5: what it cost"
    ),
)  # fmt: skip
def _report(arguments: argparse.Namespace) -> int:
    from penstock.orchestrator.observability.charts.known_curves import write_known
    from penstock.orchestrator.observability.reporting.report import report_of

    reports = (report_of(run, arguments.price) for run in arguments.runs)
    for place in [write_known(arguments.runs)] if arguments.band else reports:
        print(place)
    return 0


@command(
    "ui", "a live page about runs",
    argument("runs", nargs="?", default="runs", help="a directory or URL with runs below, or a run (default: runs)"),
    argument("--host", default="127.0.0.1", help="interface; any but loopback asks visitors for a key"),
    argument("--port", type=int, help="0: any (default: the first free one from 8420 on)"),
    KEY,
    argument(
        "--key-file", metavar="FILE",
        help="with the key that visitors need (default: PENSTOCK_UI_KEY, or one that is made except for loopback)",
    ),
)  # fmt: skip
def _ui(arguments: argparse.Namespace) -> int:
    need_extra("ui", "penstock ui")
    from rich.console import Console

    from penstock.ui.app import serve

    serve(arguments.runs, Console(), arguments.host, arguments.port, key_of(arguments, "PENSTOCK_UI_KEY") or None)
    return 0


def key_of(arguments: argparse.Namespace, variable: str) -> str:
    """The key of a command: in a file, or in a variable, which is removed so that no child process gets it; empty: none
    is given."""
    given = os.environ.pop(variable, "")
    if arguments.key:
        _stderr("[yellow]--key[/]", f"ps shows it to everyone on this machine. Use --key-file FILE, or {variable}.")
        return str(arguments.key)
    return str(reveal(Secret.read(f"file:{arguments.key_file}", "--key-file"))) if arguments.key_file else given


@command(
    "grafana", "write a Grafana dashboard, and alert rules for Prometheus",
    argument("directory", help="for the files"),
    argument(
        "--discovery", metavar="FILE",
        help="where Ray's head node lists its nodes (default: in the directory of the cluster at RAY_ADDRESS)",
    ),
)  # fmt: skip
def _grafana(arguments: argparse.Namespace) -> int:
    need_extra("ui", "penstock grafana")
    from penstock.ui.grafana.files import write

    print(write(arguments.directory, arguments.discovery), end="")
    return 0


@command(
    "reproduce", "make a run again and compare its bits", RUN,
    argument("--steps", type=int, metavar="N", help="(default: all that the run has)"),
    argument("--directory", metavar="DIR", help="a new one, for the second run (default: beside the first)"),
    description="Make a run again with what it chose, and compare each step. Ends after the first difference, and "
    "names its step and its quantity. Exit code 0: the same bits, 1: others.",
)  # fmt: skip
def _reproduce(arguments: argparse.Namespace) -> int:
    _announce("reading the run")
    from penstock.orchestrator.reproduce import reproduce

    heed_end()
    return reproduce(arguments.run, _announce, steps=arguments.steps, directory=arguments.directory)


@command(
    "diff", "where two runs begin to differ, bit for bit",
    argument("runs", nargs=2, metavar="RUN", help="a run's directory or URL"),
    description="Say up to which step two runs have the same bits, which quantity is the first that differs, and what "
    "differs in their manifests. Exit code 0: the same bits, 1: others.",
)  # fmt: skip
def _diff(arguments: argparse.Namespace) -> int:
    from penstock.orchestrator.reproduce import diff

    first, second = arguments.runs
    return diff(first, second, _announce)


@command("status", "what a run's store is doing now", RUN)
def _status(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from penstock.orchestrator.observability.reporting.status import print_status

    print_status(arguments.run, Console())
    return 0


@command(
    "scale", "more or fewer engines and reward actors during a run", RUN,
    argument(
        "requests", nargs="+", metavar="role=N",
        help="rollout=+2, rollout=3, reward=-1: two more, three in all (of each reward stage), one less",
    ),
    argument(
        "--drain", type=float, metavar="S",
        help="seconds for leaving actors to finish what they have; the rest is returned (default: rollout.drain_s)",
    ),
)  # fmt: skip
def _scale(arguments: argparse.Namespace) -> int:
    from penstock.orchestrator.control.scaling_requests import ask

    done, problems = ask(arguments.run, arguments.requests, arguments.drain)
    print(*done, sep="\n")
    for problem in problems:
        _stderr("[bold red]not all[/]", problem)
    return 1 if problems else 0


@command(
    "export", "write a checkpoint's weights as a HF model",
    argument("checkpoint", help="its directory or URL, e.g. runs/NAME/checkpoints/global_step_50, or a run's"),
    argument("directory", help="a new directory for the model, or a URL"),
    argument("--dtype", choices=("float32", "bfloat16"), default="", help="default: the run's rollout.dtype"),
    argument("--best", action="store_true", help="of a run's checkpoints the best one, by its checkpoint.best_metric"),
)  # fmt: skip
def _export(arguments: argparse.Namespace) -> int:
    from penstock.orchestrator.checkpointing.export import export_best, export_checkpoint

    export = export_best if arguments.best else export_checkpoint
    print(export(arguments.checkpoint, arguments.directory, arguments.dtype))
    return 0


@command("recipes", "list the recipes that come with Penstock")
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


@command(
    "keys", "find keys and their meanings",
    argument("words", nargs="*", metavar="WORD", help="parts of its name, or of what it means"),
)  # fmt: skip
def _keys(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from penstock.orchestrator.configuration.keys import show

    show(arguments.words, Console())
    return 0


@command(
    "translate", "a configuration of verl or TRL as a recipe",
    argument("file", help="a YAML file, or the shell script that starts it"),
    argument("words", nargs="*", metavar="key=value", help="more of its keys, such as num_processes=8"),
    argument("--write", metavar="FILE", help="for the recipe.yaml (default: print it)"),
)  # fmt: skip
def _translate(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from penstock.orchestrator.configuration.translate import show

    return show(arguments.file, Console(), arguments.write, arguments.words)


def _report_error(error: PenstockError) -> int:
    if os.environ.get("PENSTOCK_TRACEBACK", "0") not in ("", "0"):
        raise error
    # An error that crossed Ray carries the remote traceback in its text and the error itself as `cause`.
    cause = getattr(error, "cause", None)
    kind = next((KINDS[base] for base in type(error).__mro__ if base in KINDS), "error")
    _stderr(f"[bold red]{kind}[/]", hide_in(str(cause if isinstance(cause, PenstockError) else error)))
    return error.exit_code


def _stderr(markup: str, text: str = "") -> None:
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    console.print(markup + (": " if text else ""), end="" if text else "\n", soft_wrap=True)
    if text:
        console.print(text, markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
