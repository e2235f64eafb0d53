"""The table of sinks by name, which are opened and closed with a run."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

from penstock.conf.run import RunConfig
from penstock.conf.tracking import TrackingConfig
from penstock.orchestrator.observability.reporting.sinks import mlflow, trackio, wandb
from penstock.orchestrator.observability.reporting.sinks.sender import Sender
from penstock.orchestrator.observability.reporting.sinks.sink import (
    JsonLines,
    RayGauges,
    Sink,
    TensorBoard,
    close_sinks,
)
from penstock.orchestrator.observability.reporting.sinks.tracker import About, End, Tracker
from penstock.orchestrator.run_directory.run_directory import RunDirectory

FILES: Mapping[str, Callable[[RunDirectory], Sink]] = {
    "tensorboard": TensorBoard,
    "ray": lambda directory: RayGauges(directory.path.name),
}
TRACKERS: Mapping[str, Callable[[TrackingConfig], Tracker]] = {
    "wandb": lambda tracking: wandb.Wandb(tracking.wandb, tracking.close_timeout_s),
    "mlflow": lambda tracking: mlflow.Mlflow(tracking.mlflow),
    "trackio": lambda tracking: trackio.Trackio(tracking.trackio),
}


@contextlib.contextmanager
def opened_sinks(config: RunConfig, directory: RunDirectory, own: Sequence[Sink] = ()) -> Iterator[list[Sink]]:
    """Open metrics.jsonl, the sinks that the configuration asks for, and `own`. They are told how the run has ended by
    what ends the block, and closed."""
    sinks: list[Sink] = [*own, JsonLines(directory)]
    senders: list[Sender] = []
    try:
        sinks += [FILES[name](directory) for name in config.tracking.sinks if name in FILES]
        for name in (name for name in config.tracking.sinks if name in TRACKERS):
            tracker = TRACKERS[name](config.tracking)
            senders.append(
                Sender(name, tracker, About.of(config, directory), directory, config.tracking.close_timeout_s)
            )
            senders[-1].begin()
        yield [*sinks, *senders]
    except BaseException as error:
        _tell_end(senders, error, directory)
        raise
    else:
        _tell_end(senders, None, directory)
    finally:
        close_sinks([*senders, *sinks], directory.losses)


def _tell_end(senders: Sequence[Sender], error: BaseException | None, directory: RunDirectory) -> None:
    """Tell the end to all senders before any is waited for: they share the deadline."""
    if senders:
        end = End.of(error, directory)
        for sender in senders:
            sender.finish(end)
