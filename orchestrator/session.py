"""The imperative API: a user's own `for` loop over the same actors that the controller drives.

    with penstock.session(penstock.load_config(["recipe=arithmetic"])) as run:
        for step in range(100):
            rows = run.policy.generate(run.prompts.next(8), n=8)
            rows = rows.with_column("reward", run.reward(rows))
            metrics = run.policy.update(rows.with_column("advantage", my_advantage(rows)), my_loss)
            run.policy.publish()
            run.log(step, metrics)

Each call is one line here and one SPMD program on all ranks. There is no store and no staleness: every call but
`sample_async` waits for its result. In an environment `run.environment.play` takes the place of `generate` and
`reward`. `Policy` also has the verbs of `loops/verbs.py`, as a server's clients have them.
"""

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.errors import ConfigError, is_refusal
from penstock.conf.run import RunConfig
from penstock.conf.weights import takes_newcomers
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.placement.actors import answers_are_needed
from penstock.orchestrator.cluster.ray_calls import get_all
from penstock.orchestrator.cluster.weight_sync import WeightSync
from penstock.orchestrator.configuration.resolved import ResolvedRun, resolve
from penstock.orchestrator.configuration.validate import check_run
from penstock.orchestrator.control.members import catch_up_by_role
from penstock.orchestrator.control.scaling import ScalableRole
from penstock.orchestrator.loops.attempts import Attempts
from penstock.orchestrator.loops.policy import Model, Policy, Prompt, waited_for
from penstock.orchestrator.loops.sampling import SampleCalls
from penstock.orchestrator.loops.saved_states import SavedStates
from penstock.orchestrator.observability.reporting.sinks import Sink, log_to, opened_sinks
from penstock.orchestrator.run_directory.failed_writes import FailedWrites
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.orchestrator.storeless import started_fleet
from penstock.store.data.rows import Rows
from penstock.workers.pictures.prompt_pictures import PromptPictures
from penstock.workers.prompts.opening import open_source
from penstock.workers.prompts.source import PromptSource
from penstock.workers.reward.reward_result import RewardError
from penstock.workers.reward.reward_worker import responses_of
from penstock.workers.runtime.serving import ErrorShare


class PromptStream:
    """The run's dataset in its order, epoch after epoch."""

    def __init__(self, source: PromptSource) -> None:
        self._source = source
        self._drawn = 0

    def next(self, count: int) -> list[Prompt]:
        """The next prompts, or tasks of an environment."""
        groups = self._source.next_groups(count)
        first, self._drawn = self._drawn, self._drawn + count
        return [
            Prompt(first + i, list(group.get("prompt_ids", [])), str(group["task"]), PromptPictures.of(group))
            for i, group in enumerate(groups)
        ]


class Reward:
    """The run's reward, as a function of rows."""

    def __init__(self, fleet: Fleet, config: RunConfig) -> None:
        self._fleet = fleet
        self._timeout_s = config.rollout.generate_timeout_s
        self._share = ErrorShare(config.reward.max_error_share, config.reward.error_window)
        self.last_errors: list[str] = []
        """Reasons why rewards of the last call failed."""

    def __call__(self, rows: Rows) -> np.ndarray:
        """Rewards of the rows, `[len(rows)]` float32; NaN where the reward failed (see `last_errors`) or does not count
        the row. Updates leave such rows out. Raises `RewardFailure` where more fail than `reward.max_error_share`
        allows."""
        actors = self._fleet.role("reward", self._fleet.first_stage("reward"))
        if not actors:
            raise ConfigError("no stage of the dataflow gives rewards: the environment does, with the rows of `play`.")
        tasks, responses, num = rows.strings("task"), responses_of(rows), len(actors)
        calls = [
            (name, handle.score.remote(tasks[index::num], responses[index::num]))
            for index, (name, handle) in enumerate(actors)
        ]
        scores: list[Any] = [None] * len(rows)
        for index, part in enumerate(get_all(calls, phase="reward", timeout_s=self._timeout_s)):
            scores[index::num] = part
        self.last_errors = [str(score) for score in scores if isinstance(score, RewardError)]
        for score in scores:
            if score is None:
                self._share.leave_out()
            else:
                self._share.add(str(score) if isinstance(score, RewardError) else None)
        self._share.check()
        return np.array([score if isinstance(score, float) else np.nan for score in scores], np.float32)


class Workers:
    """Actors of one role, whose number may change between two calls of the session, not during one."""

    def __init__(self, members: ScalableRole) -> None:
        self._members = members

    def __len__(self) -> int:
        return len(self._members)

    def add(self, n: int = 1) -> list[str]:
        """Add actors. Returns their names once they serve. Raises `CannotScale`, `ResourceError`; then none was
        added."""
        return waited_for(self._members.added(n))

    def remove(self, n: int = 1, drain_s: float | None = None) -> list[str]:
        """Remove the actors that came last. Returns their names. `drain_s`: seconds for each to finish calls that are
        under way in another thread; None: `rollout.drain_s`. Raises `CannotScale`: one has to stay."""
        return waited_for(self._members.removed(n, drain_s))


@dataclass
class Session:
    """The session that `penstock.session` gives: the handles, and where to write metrics."""

    config: RunConfig
    directory: Path
    """The run's directory on this machine: with a URL as output_dir the working copy."""
    policy: Policy
    prompts: PromptStream
    reward: Reward
    environment: Attempts | None
    """Plays attempts at tasks, where `environment.name` is set."""
    rollouts: Workers
    """The engines: `add` and `remove` some."""
    rewards: Workers
    """The reward actors: `add` and `remove` some."""
    reference: Model | None
    """The reference model, if the dataflow has a log-probability stage."""
    sinks: list[Sink]
    failed_writes: FailedWrites
    """Record of what could not be written."""
    started: float

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one step to metrics.jsonl and the other sinks."""
        line = {
            "step": step,
            "policy_version": self.policy.version,
            **metrics,
            "wall_s": time.monotonic() - self.started,
            **self.failed_writes.metrics(),
        }
        log_to(self.sinks, step, line, self.failed_writes)


@contextlib.contextmanager
def session(config: RunConfig, flow: Dataflow | None = None) -> Iterator[Session]:
    """Start the actors of a run without its loop, and end them on leaving, whatever happened.

    Raises what `penstock.run` raises before it starts. `flow` (default: the configured algorithm's) says which actors
    there are.
    """
    asked = resolve(config, flow)
    if not asked.flow.of_kind("rollout"):
        raise ConfigError(f"algorithm={config.algorithm.name} samples nothing; a session needs a rollout stage.")
    if config.data.curriculum.by is not None:
        raise ConfigError(
            f"data.curriculum.by={config.data.curriculum.by}: a session draws its prompts itself, and tells nobody how "
            "they ended. Leave it out, or use penstock.run."
        )
    if config.trainer.replay.share:
        raise ConfigError(
            f"trainer.replay.share={config.trainer.replay.share:g}: a session trains the rows that it is given. "
            "Leave it out, or use penstock.run."
        )
    check_run(asked)
    directory = RunDirectory.create(asked.config)
    directory.failed_writes.tell_to(lambda text: print(text, file=sys.stderr))
    directory.mirror(config.tracking)
    try:
        with _started(asked, directory) as run:
            yield run
    except BaseException as error:
        if is_refusal(error) and directory.is_unused:
            directory.discard()
        raise
    finally:
        directory.close()


@contextlib.contextmanager
def _started(asked: ResolvedRun, directory: RunDirectory) -> Iterator[Session]:
    with contextlib.ExitStack() as stack:
        fleet = stack.enter_context(started_fleet(asked, directory))
        config, flow = fleet.config, fleet.flow
        sinks = stack.enter_context(opened_sinks(config, directory))
        calls = SampleCalls(lambda: fleet.role("rollout"), config.seed, config.rollout.generate_timeout_s)
        samples = stack.enter_context(contextlib.closing(calls))
        states = SavedStates(fleet, f"{directory.place}/{directory.states.name}", config.checkpoint.timeout_s)
        judged = {stage.name for stage in flow.of_kind("logprobs")[:1]}
        reference = {actor.name for actor in asked.plan if actor.role == "scorer" and actor.stage in judged}
        ranks = [(name, handle) for name, handle in fleet.role("scorer") if name in reference]
        weights = WeightSync(fleet, config)
        catch_up = catch_up_by_role(config, weights)
        yield Session(
            config,
            directory.path,
            Policy(fleet, config, weights, samples, states),
            PromptStream(
                open_source(
                    config, fleet.model_path, rows_are=flow.rows_are, needs_answer=answers_are_needed(flow, config)
                )
            ),
            Reward(fleet, config),
            Attempts(fleet, config, flow) if flow.has_environment else None,
            Workers(
                ScalableRole("rollout", fleet, config, catch_up.get("rollout") if takes_newcomers(config) else None)
            ),
            Workers(ScalableRole("reward", fleet, config, catch_up["reward"])),
            Model(ranks, config) if ranks else None,
            sinks,
            directory.failed_writes,
            time.monotonic(),
        )
