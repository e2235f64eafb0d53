"""Experiment trackers, which take a step's metrics to a service: Weights & Biases, MLflow (by its client, which
`mlflow-skinny` has) and trackio, by their own packages. `wandb login` and the variables WANDB_*, MLFLOW_* and TRACKIO_*
keep their meaning.

A `Sender` brings metrics to a tracker from a thread of its own, so that a slow, absent or broken one costs the run
nothing. The three calls of a tracker may be slow, and raise anything.

    controller ── log ──▶ queue of at most 1,000 steps ──▶ thread ── open, log, …, finish ──▶ W&B, MLflow, trackio
                   └ NewSteps                                └ TrackerState: trackers/NAME.json, for the next process

A step that cannot be sent is tried again; lost ones are counted and reported by `run_directory/failed_writes.py`.
"""

import asyncio
import contextlib
import json
import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from penstock.conf.errors import ConfigError, PenstockError, TakenOver
from penstock.conf.run import RunConfig
from penstock.conf.secret import hide_in, reveal
from penstock.conf.tracking import MlflowConfig, TrackingConfig, TrackioConfig, WandbConfig
from penstock.orchestrator.observability.differences import flat
from penstock.orchestrator.observability.reporting.closing import cards_of
from penstock.orchestrator.run_directory.run_directory import RunDirectory

FINISHED, FAILED, INTERRUPTED, TAKEN_OVER = "finished", "failed", "interrupted", "taken_over"
DEFAULT_PROJECT = "penstock"
FOLDER = "trackers"
WANDB_EXIT_CODES = {FAILED: 1, INTERRUPTED: 255}
"""Exit codes that W&B shows as failed and as killed."""
WANDB_TAG_CHARS = 64
MLFLOW_STATUSES = {FINISHED: "FINISHED", FAILED: "FAILED", INTERRUPTED: "KILLED"}
MLFLOW_BATCH = 100
"""Most parameters or tags of one call."""
MLFLOW_PARAM_CHARS, MLFLOW_TAG_CHARS = 6_000, 5_000
MLFLOW_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # with its own 7 a server that is down is told after two minutes
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Defaults of MLflow's environment variables, where the user has not set them."""
MAX_WAITING = 1_000
"""Most steps in memory; beyond that the oldest is lost."""
MAX_TRIES = 3
"""Most tries of one step, which may itself be what makes the tracker fail."""
PAUSE_S = 10.0
"""Seconds to wait after an attempt that failed."""
TRIED_AGAIN = f"The run goes on. Up to {MAX_WAITING:,} steps wait for it in memory."
FULL = f"{MAX_WAITING:,} steps wait for it"
MAX_ERROR_CHARS = 300


@dataclass(frozen=True)
class About:
    """Facts that a tracker is told of a run at its start."""

    name: str
    group: str
    project: str | None
    """Name of the project; None: as the tracker's environment says, else `DEFAULT_PROJECT`."""
    tags: Mapping[str, str]
    config: Mapping[str, Any]
    """The resolved configuration."""
    directory: Path
    """The run's directory."""

    @classmethod
    def of(cls, config: RunConfig, directory: RunDirectory) -> "About":
        recipe = config.recipe_name
        return cls(
            name=directory.full_name,
            group=config.tracking.group or recipe,
            project=config.tracking.project,
            tags={"recipe": recipe, "algorithm": config.algorithm.name, **config.tracking.tags},
            config=directory.read_config(),
            directory=directory.path,
        )


@dataclass(frozen=True)
class End:
    """The end of a run."""

    state: str
    error: str = ""
    cards: Mapping[str, str] = field(default_factory=dict)
    """Cards of the report: label to value, with its detail."""

    @classmethod
    def of(cls, error: BaseException | None, directory: RunDirectory) -> "End":
        """The end of a run. `error`: the one that ended it, if any."""
        if isinstance(error, TakenOver):  # it goes on elsewhere
            return cls(TAKEN_OVER)
        is_interrupted = isinstance(error, KeyboardInterrupt | asyncio.CancelledError)
        state = FINISHED if error is None else INTERRUPTED if is_interrupted else FAILED
        text = "" if error is None or is_interrupted else hide_in(f"{type(error).__name__}: {error}")
        return cls(state, text, _cards(directory))

    def facts(self) -> dict[str, str]:
        """The end as texts by name, for trackers that keep such."""
        found = {"state": self.state, "error": self.error}  # empty, too: a run that was resumed may have had one
        return found | {f"summary/{label}": value for label, value in self.cards.items()}


def _cards(directory: RunDirectory) -> dict[str, str]:
    try:
        found = cards_of(directory)
    except (OSError, PenstockError):  # a lost mount
        return {}
    return {card.label: f"{card.value} ({card.detail})" if card.detail else card.value for card in found}


class Opened(NamedTuple):
    """A run as the tracker has it."""

    id: str
    """The tracker's id of the run, to go on with it in another process."""
    place: str
    """The place where people find the run."""


class Tracker(Protocol):
    """Lifecycle: `open` until it succeeds, then `log` once a step, then `finish`."""

    def open(self, about: About, id: str | None) -> Opened:
        """Open a run. `id`: that of the run, if an earlier process has opened it, to go on with it."""
        ...

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log a step. Steps grow; a step comes again only with other names, such as those of its evaluation."""
        ...

    def finish(self, end: End) -> None: ...


class TrackerState:
    """The facts that a tracker needs to go on with a run in another process: `trackers/NAME.json` and `NAME.step`, in
    the run's directory. There are two files since the id is written once: so it is at the URL of a run long before its
    machine may be lost.

    Lifecycle: read when made, `keep` once the tracker knows the run, `keep_step` with each step that it has.

    Raises no `OSError`: what cannot be written is told as a loss of the tracker.
    """

    def __init__(self, directory: RunDirectory, name: str) -> None:
        self._directory, self._name = directory, name
        self.id: str | None = None
        """The run's id in the tracker, of an earlier process."""
        self.step: int | None = None
        """The last step that an earlier process gave to the tracker."""
        self._newest = 0
        folder = directory.path / FOLDER
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            self.id = str(json.loads((folder / f"{name}.json").read_text())["id"])
            self.step = int((folder / f"{name}.step").read_text())

    def keep(self, id: str) -> None:
        self.id = id
        self._write(f"{self._name}.json", json.dumps({"id": id}))

    def keep_step(self, step: int) -> None:
        self._newest = step = max(step, self._newest)
        self._write(f"{self._name}.step", str(step))

    def _write(self, file: str, text: str) -> None:
        with self._directory.failed_writes.tolerating(FOLDER):
            (self._directory.path / FOLDER).mkdir(exist_ok=True)
            self._directory.write_text(f"{FOLDER}/{file}", text)


OF_STEP = "evaluation/step"
"""Metric: the step whose version an evaluation beside training has measured."""


def measured(config: Mapping[str, Any]) -> list[str]:
    """Metrics that evaluations measure beside training, as W&B takes them: a name may end with "*"."""
    if not config.get("max_staleness"):
        return []
    policies = config.get("trainer", {}).get("policies", {})
    return [
        "accuracy/*", "heldout_reward/*", "heldout_rejected/*", *(f"{name}/heldout_reward/*" for name in policies)
    ]  # fmt: skip


class NewSteps:
    """Selects the metrics that a tracker has not had yet. Pure. A run that goes on from a checkpoint takes some steps
    again. Trackers keep what they had first: a curve that goes back is drawn as a zigzag, and W&B refuses it. An
    evaluation comes after later steps.

    >>> new = NewSteps(after=None)
    >>> new.of(1, {"loss": 0.5}), new.of(1, {"loss": 0.4, "accuracy": 0.9}), new.of(0, {"loss": 0.1})
    ({'loss': 0.5}, {'accuracy': 0.9}, {})
    >>> new.of(0, {"accuracy": 0.8, "evaluation/step": 0})
    {'accuracy': 0.8, 'evaluation/step': 0}
    """

    def __init__(self, after: int | None) -> None:
        """`after`: the last step of an earlier process."""
        self._last = after
        self._names: set[str] | None = None if after is not None else set()
        """Names of the last step's metrics that the tracker has; None: all."""

    def of(self, step: int, numbers: Mapping[str, float]) -> dict[str, float]:
        if self._last is not None and step < self._last:
            return dict(numbers) if OF_STEP in numbers else {}
        if self._last is None or step > self._last:
            self._last, self._names = step, set()
        if self._names is None:
            return {}
        new = {name: value for name, value in numbers.items() if name not in self._names}
        self._names |= new.keys()
        return new


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that can be plotted."""
    return {
        name: float(value) for name, value in metrics.items() if isinstance(value, int | float) and math.isfinite(value)
    }


class Wandb:
    """W&B: its service, or files to be sent later."""

    def __init__(self, config: WandbConfig, timeout_s: float) -> None:
        """`timeout_s`: deadline of W&B's uploads at the end."""
        self._config, self._timeout_s = config, timeout_s
        self._run: Any = None
        self._last = 0

    def open(self, about: About, id: str | None) -> Opened:
        import wandb  # late: half a second, and only where it is asked for

        mode: Any = self._config.mode or os.environ.get("WANDB_MODE")  # wandb looks at it once in a process
        self._run = wandb.init(
            entity=self._config.entity,
            project=about.project or os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT,
            dir=self._config.directory or os.environ.get("WANDB_DIR") or about.directory,
            mode=mode,
            id=id,
            resume="allow" if id else None,
            reinit="create_new",  # a program may have a run of its own
            name=about.name,
            group=about.group,
            tags=tags_of(about.tags),
            config=dict(about.config),
            allow_val_change=True,  # a run may go on for more steps
            # A console that is captured is no terminal, and the display needs one.
            settings=wandb.Settings(console="off", silent=True, finish_timeout=self._timeout_s),
        )
        self._last = int(self._run.step)
        for name in measured(about.config):
            self._run.define_metric(name, step_metric=OF_STEP)  # W&B takes no step that is older than its last
        place = f"wandb sync {self._run.settings.sync_dir}" if self._run.offline else str(self._run.url)
        return Opened(self._run.id, place)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._last = max(step, self._last)
        self._run.log(dict(numbers), step=self._last)

    def finish(self, end: End) -> None:
        self._run.summary.update(end.facts())
        self._run.finish(exit_code=WANDB_EXIT_CODES.get(end.state, 0))


class Mlflow:
    """MLflow: a server, or a database beside the run's directory."""

    def __init__(self, config: MlflowConfig) -> None:
        self._uri = reveal(config.tracking_uri)
        self._client: Any = None
        self._id = ""

    def open(self, about: About, id: str | None) -> Opened:
        client = self._connected(about)
        experiment = about.project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or DEFAULT_PROJECT
        run = self._found(id) if id else None
        if run is None:
            tags = {"mlflow.runName": about.name, "group": about.group, **about.tags}
            run = client.create_run(self._experiment(experiment, about), run_name=about.name, tags=tags)
        else:
            client.update_run(run.info.run_id, status="RUNNING")
        self._id = run.info.run_id
        params = {plain_name(name): str(value)[:MLFLOW_PARAM_CHARS] for name, value in flat(about.config)}
        self._give_params(params, run.data.params)
        return Opened(self._id, f"experiment {experiment}, run {about.name}, at {hide_in(client.tracking_uri)}")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        entries = [Metric(plain_name(name), value, now_ms, step) for name, value in numbers.items()]
        self._client.log_batch(self._id, metrics=entries, synchronous=True)

    def finish(self, end: End) -> None:
        from mlflow.entities import RunTag

        facts = end.facts()
        self._client.log_batch(
            self._id, tags=[RunTag(plain_name(name), value[:MLFLOW_TAG_CHARS]) for name, value in facts.items()],
            synchronous=True,
        )  # fmt: skip
        if end.state in MLFLOW_STATUSES:
            self._client.set_terminated(self._id, MLFLOW_STATUSES[end.state])

    def _connected(self, about: About) -> Any:
        for name, value in MLFLOW_DEFAULTS.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient  # late: a second, and only where it is asked for

        beside = f"sqlite:///{about.directory.parent / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=self._uri or os.environ.get("MLFLOW_TRACKING_URI") or beside)
        return self._client

    def _found(self, id: str) -> Any:
        """The run of an earlier process; None if it is not there, as people delete runs and change servers."""
        from mlflow.exceptions import MlflowException

        try:
            run = self._client.get_run(id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return run if run.info.lifecycle_stage == "active" else None

    def _experiment(self, name: str, about: About) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        is_file = self._client.tracking_uri.startswith("sqlite:")
        artifacts = (about.directory.parent / "mlartifacts").as_uri() if is_file else None
        return str(self._client.create_experiment(name, artifact_location=artifacts))

    def _give_params(self, params: Mapping[str, str], known: Mapping[str, str]) -> None:
        """Log parameters. MLflow's never change: what differs in a run that goes on becomes a tag."""
        from mlflow.entities import Param, RunTag

        new = [Param(name, value) for name, value in params.items() if name not in known]
        changed = [RunTag(f"now.{name}", value) for name, value in params.items() if known.get(name, value) != value]
        for first in range(0, len(new), MLFLOW_BATCH):
            self._client.log_batch(self._id, params=new[first : first + MLFLOW_BATCH], synchronous=True)
        if changed:
            self._client.log_batch(self._id, tags=changed[:MLFLOW_BATCH], synchronous=True)


class Trackio:
    """trackio: a database here, or a server or a Space by TRACKIO_SERVER_URL or TRACKIO_SPACE_ID."""

    def __init__(self, config: TrackioConfig) -> None:
        self._config = config
        self._run: Any = None
        self._last = 0

    def open(self, about: About, id: str | None) -> Opened:
        wanted = Path(self._config.directory).expanduser().resolve() if self._config.directory is not None else None
        if wanted is not None:
            os.environ["TRACKIO_DIR"] = str(wanted)  # read as trackio is imported
        import trackio  # late: half a second, and only where it is asked for

        if wanted is not None and wanted != trackio.utils.TRACKIO_DIR:
            raise ConfigError(
                f"tracking.trackio.directory={self._config.directory}: trackio has been imported before, and writes to "
                f"{trackio.utils.TRACKIO_DIR}. Set TRACKIO_DIR for the whole process."
            )
        project = about.project or DEFAULT_PROJECT
        self._run = trackio.init(
            project=project,
            name=about.name,
            group=about.group,
            config={**about.config, "tags": dict(about.tags)},
            resume="allow" if id else "never",
            embed=False,
        )
        where = f"TRACKIO_DIR={wanted} " if wanted is not None else ""
        return Opened(self._run.id, f"{where}trackio show --project {project}")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._last = step
        self._run.log(dict(numbers), step=step)

    def finish(self, end: End) -> None:
        import trackio

        text = "\n".join(f"- **{name}**: {value}" for name, value in end.facts().items() if value)
        self._run.log({"end": trackio.Markdown(text)}, step=self._last)
        if end.state == FAILED:
            self._run.alert("the run has failed", end.error, level=trackio.AlertLevel.ERROR, step=self._last)
        self._run.finish()


def tags_of(tags: Mapping[str, str]) -> list[str]:
    """Tags for W&B, whose tags have no names.

    >>> tags_of({"recipe": "arithmetic", "team": "blue"})
    ['recipe: arithmetic', 'team: blue']
    """
    return [re.sub(r"\s+", " ", f"{name}: {value}")[:WANDB_TAG_CHARS] for name, value in tags.items()]


def plain_name(name: str) -> str:
    """The name as MLflow allows it: pass@8 and faults of oddly named roles are not allowed."""
    return "".join(sign if sign.isalnum() or sign in "_-. :/" else "_" for sign in name)[:250]


class Sender:
    """Lifecycle: `begin`, `log` at any time, `finish` when the run has ended, then `close`. Only `close` waits for
    the tracker, until `timeout_s` after `finish`.

        sender = Sender("wandb", Wandb(config.tracking.wandb, 30.0), About.of(config, directory), directory, 30.0)
        sender.begin()
        sender.log(1, {"reward/mean": 0.5})
        sender.finish(End("finished"))
        sender.close()
    """

    def __init__(
        self, name: str, tracker: Tracker, about: About, directory: RunDirectory, timeout_s: float,
        pause_s: float = PAUSE_S, max_waiting: int = MAX_WAITING,
    ) -> None:  # fmt: skip
        self.name = name
        self._tracker, self._about, self._directory, self._failed_writes = (
            tracker,
            about,
            directory,
            directory.failed_writes,
        )
        self._timeout_s, self._pause_s, self._max_waiting = timeout_s, pause_s, max_waiting
        self._state = TrackerState(directory, name)
        self._new = NewSteps(self._state.step)
        self._changed = threading.Condition()
        """Lock of all fields below."""
        self._waiting: deque[tuple[int, dict[str, float]]] = deque()
        self._sending = 0
        """Number of steps that the thread has taken out: 0 or 1."""
        self._end: End | None = None
        self._give_up_at = 0.0
        self._is_abandoned = False
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        new = self._new.of(step, {name: value for name, value in numbers(metrics).items() if name != "step"})
        if not new:
            return
        with self._changed:
            self._waiting.append((step, new))
            is_full = self._cut()
            self._changed.notify_all()
        if is_full:
            self._failed_writes.record_failure(
                f"{self.name} queue", TimeoutError(FULL), "The oldest of its steps are lost."
            )

    def finish(self, end: End) -> None:
        with self._changed:
            if self._end is None:
                self._end, self._give_up_at = end, time.monotonic() + self._timeout_s
            self._changed.notify_all()

    def close(self) -> None:
        """Wait until the tracker has everything, or will not get it. May be called twice."""
        self.finish(End("unknown"))
        self._thread.join(max(0.0, self._give_up_at - time.monotonic()))
        with self._changed:
            num_lost = len(self._waiting) + self._sending
            is_late = self._thread.is_alive() and not self._is_abandoned
            self._is_abandoned = True
            self._waiting.clear()
            self._sending = 0
        if num_lost:
            self._failed_writes.count_lost(self.name, num_lost)
        self._failed_writes.set_waiting(self.name, 0)
        if is_late:
            self._failed_writes.tell(
                f"{self.name}: has not closed within {self._timeout_s:g} s, and is left. {_lacks(num_lost)}"
            )
        elif num_lost:
            self._failed_writes.tell(f"{self.name}: {_lacks(num_lost)}")

    # In the thread.

    def _run(self) -> None:
        while not self._attempt(self._open):
            if self._end is not None:
                return
            self._pause()
        tries = 0
        while (entry := self._next()) is not None:
            if self._attempt(lambda: self._log(*entry)):
                tries = 0
                continue
            tries += 1
            is_lost = tries == MAX_TRIES or self._end is not None
            self._put_back(entry, is_lost)
            tries = 0 if is_lost else tries
            self._pause()
        if not self._is_abandoned:
            self._attempt(self._finish)

    def _open(self) -> None:
        opened = self._tracker.open(self._about, self._state.id)
        if self._is_abandoned:
            return
        self._state.keep(opened.id)
        self._directory.event("tracked", tracker=self.name, id=opened.id, place=opened.place)
        self._failed_writes.tell(f"{self.name}: {opened.place}")

    def _log(self, step: int, new: Mapping[str, float]) -> None:
        self._tracker.log(step, new)
        if not self._is_abandoned:  # or the directory may be another process's
            self._state.keep_step(step)

    def _finish(self) -> None:
        assert self._end is not None
        self._tracker.finish(self._end)

    def _attempt(self, call: Callable[[], None]) -> bool:
        """Make a call. Returns whether it succeeded. What it raises is told."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - a tracker must not end a run, whatever its package raises
            if not self._is_abandoned:
                self._failed_writes.record_failure(self.name, _short(error), TRIED_AGAIN if self._end is None else "")
            return False
        if not self._is_abandoned:
            self._failed_writes.record_success(self.name)
        return True

    def _next(self) -> tuple[int, dict[str, float]] | None:
        """The next step to send; None at the end."""
        with self._changed:
            self._sending = 0
            self._changed.wait_for(lambda: self._waiting or self._end is not None or self._is_abandoned)
            entry = self._waiting.popleft() if self._waiting and not self._is_abandoned else None
            self._sending = 0 if entry is None else 1
            self._failed_writes.set_waiting(self.name, len(self._waiting))
        return entry

    def _put_back(self, entry: tuple[int, dict[str, float]], is_lost: bool) -> None:
        with self._changed:
            if self._is_abandoned:
                return
            self._sending = 0
            if is_lost:
                self._failed_writes.count_lost(self.name)
            else:
                self._waiting.appendleft(entry)
                self._cut()

    def _cut(self) -> bool:
        """Drop the oldest step if there are too many. Returns whether there were."""
        is_full = len(self._waiting) > self._max_waiting
        if is_full:
            self._waiting.popleft()
            self._failed_writes.count_lost(self.name)
        self._failed_writes.set_waiting(self.name, len(self._waiting))
        return is_full

    def _pause(self) -> None:
        """Wait until the next attempt; once the run has ended, do not."""
        with self._changed:
            self._changed.wait_for(lambda: self._end is not None or self._is_abandoned, self._pause_s)


def _lacks(num_lost: int) -> str:
    return f"It lacks {num_lost:,} steps; metrics.jsonl has them." if num_lost else "It has every step."


def _short(error: Exception) -> Exception:
    """The error with the first line of its message: packages put whole pages into theirs."""
    lines = str(error).strip().splitlines()
    return RuntimeError(f"{type(error).__name__}: {lines[0][:MAX_ERROR_CHARS]}" if lines else type(error).__name__)


TRACKERS: Mapping[str, Callable[[TrackingConfig], Tracker]] = {
    "wandb": lambda tracking: Wandb(tracking.wandb, tracking.close_timeout_s),
    "mlflow": lambda tracking: Mlflow(tracking.mlflow),
    "trackio": lambda tracking: Trackio(tracking.trackio),
}
