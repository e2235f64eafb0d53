"""The imperative API: a user's own `for` loop over the same actors that the controller drives.

    with penstock.session(penstock.load_config(["recipe=arithmetic"])) as run:
        for step in range(100):
            rows = run.policy.generate(run.prompts.next(8), n=8)
            rows = rows.with_column("reward", run.reward(rows))
            metrics = run.policy.update(rows.with_column("advantage", my_advantage(rows)), my_loss)
            run.policy.publish()
            run.log(step, metrics)

Each call is one line here and one SPMD program on all ranks. There is no store and no staleness: every call but
`sample_async` waits for its result. `Policy` also has the verbs of `loops/verbs.py`, as a server's clients have them.
In an environment `play` takes the place of `generate` and `reward`:

    rows = run.environment.play(run.prompts.next(8), n=8)     # an attempt a row, with its reward
    run.environment.lost                                      # attempts without a row, by reason
"""

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.errors import ConfigError, DataError, is_refusal
from penstock.conf.run import RunConfig
from penstock.conf.weights import takes_newcomers
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.node_agents import NodeAgents
from penstock.orchestrator.cluster.placement.actors import answers_are_needed
from penstock.orchestrator.cluster.placement.nodes import cluster_nodes
from penstock.orchestrator.cluster.ray_calls import deal, get_all, run_in_thread, undeal
from penstock.orchestrator.cluster.ray_cluster import Cluster, check_placement, namespace_of, while_it_lives
from penstock.orchestrator.cluster.weight_sync import WeightSync
from penstock.orchestrator.configuration.memory_view import resolve_auto
from penstock.orchestrator.configuration.resolved import ResolvedRun, plan_run, resolve
from penstock.orchestrator.configuration.validate import check_run
from penstock.orchestrator.control.evaluation import play_timeout_s
from penstock.orchestrator.control.members import catch_up_by_role
from penstock.orchestrator.control.scaling import ScalableRole
from penstock.orchestrator.loops.session_policy import Model, Policy, Prompt, SampleCalls, SavedStates
from penstock.orchestrator.observability.actor_logs import Logs, end_fleet
from penstock.orchestrator.observability.reporting.sinks import Sink, log_to, opened_sinks
from penstock.orchestrator.recovery.ended_ranks import naming_failures
from penstock.orchestrator.run import with_models
from penstock.orchestrator.run_directory.failed_writes import FailedWrites
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.store.data.rows import Rows
from penstock.store.spec import environment_rewards
from penstock.workers.agents.attempts import ERROR_WINDOW, AttemptColumns
from penstock.workers.agents.trajectory import FAILED, Trajectory
from penstock.workers.pictures.prompt_pictures import PromptPictures
from penstock.workers.prompts.opening import open_source
from penstock.workers.prompts.source import PromptSource
from penstock.workers.protocols import Sampling
from penstock.workers.reward.reward_result import RewardError
from penstock.workers.reward.reward_worker import responses_of
from penstock.workers.rollout.rollout_worker import sample_seed
from penstock.workers.runtime.serving import ErrorShare


@contextlib.contextmanager
def started_fleet(asked: ResolvedRun, directory: RunDirectory) -> Iterator[Fleet]:
    """Start the actors of a run without a store, and end them on leaving. Raises `ResourceError`, `ModelError` and
    what the first failing actor raised."""
    with contextlib.closing(Cluster(asked.plan, asked.config)) as cluster:
        cluster.connect(directory)
        check_placement(asked.plan, asked.config)
        run = with_models(resolve_auto(asked, cluster_nodes(), partial(print, file=sys.stderr)), directory)
        spill_dir = run.config.store.spill_dir
        agents = NodeAgents(directory.full_name, namespace_of(directory), run.config.cluster, spill_dir)
        fleet = Fleet(run.plan, run.config, run.flow, run.model_path, agents, with_store=False)
        logs = Logs(fleet, directory)
        try:
            fleet.create(partial(print, file=sys.stderr))
            logs.meet(run.config.rollout.start_timeout_s)
            with naming_failures(fleet, directory):
                fleet.start()
                yield fleet
        finally:
            while_it_lives(partial(end_fleet, fleet, logs))


class Attempts:
    """Attempts in the environment that `environment.name` names.

    Lifecycle: `play` over a fleet that has started, any number of times; `lost` after each.
    """

    def __init__(self, fleet: Fleet, config: RunConfig, flow: Dataflow) -> None:
        self._fleet, self._config = fleet, config
        (stage,) = flow.of_kind("rollout")
        self._columns = AttemptColumns([column.name for column in stage.writes], environment_rewards(flow)[0])
        self._errors = ErrorShare(config.environment.max_error_share, ERROR_WINDOW, "attempts", "environment")
        self.lost: Counter[str] = Counter()
        """Attempts of the last call that have no row, by reason: what the environment rejects, and what fails."""

    def play(self, prompts: Sequence[Prompt], n: int = 1, sampling: Sampling | None = None) -> Rows:
        """Play `n` attempts at each task with the weights published last, and the seeds that a run's have. `sampling`
        None: `rollout.sampling`.

        Returns a row for each attempt that counts: `task`, and the columns that a run's attempts have, such as
        `reward`, `response_ids` and `spans`; `group_ids` are the tasks' indices. Others are counted in `lost`. Raises
        `RewardFailure` if too many fail (`environment.max_error_share`), `DataError` if no attempt is left, and what
        engines fail with.
        """
        groups = self._play(prompts, [self._samplings(prompt, n, sampling) for prompt in prompts])
        self.lost = Counter()
        dropped = self._config.rollout.truncated_to("drop")
        kept: list[tuple[Prompt, Trajectory]] = []
        for prompt, group in zip(prompts, groups, strict=True):
            for played in group:
                attempt = played.without(dropped)
                outcome = attempt.outcome
                self._errors.add(outcome.detail if outcome.kind == FAILED else None)
                if outcome.is_trained:
                    kept.append((prompt, attempt))
                else:
                    self.lost[outcome.reason] += 1
        self._errors.check()
        if not kept:
            raise DataError(
                f"no attempt is left of {len(prompts) * n}: {dict(self.lost)}. The environment rejects them or fails; "
                f"its last error: {self._errors.last_error or 'none'}."
            )
        columns = {"task": [prompt.task for prompt, _ in kept], **self._columns.of([attempt for _, attempt in kept])}
        return Rows.from_lists(columns, group_ids=[prompt.index for prompt, _ in kept])

    def _samplings(self, prompt: Prompt, n: int, sampling: Sampling | None) -> list[Sampling]:
        options = self._config.rollout.sampling
        chosen = sampling or Sampling.of(options)
        if not options.seeded or chosen.temperature == 0:
            return [chosen] * n
        first = sample_seed(self._config.seed, prompt.index)
        return [chosen.seeded(first + index) for index in range(n)]

    def _play(self, prompts: Sequence[Prompt], samplings: Sequence[Sequence[Sampling]]) -> list[Sequence[Trajectory]]:
        """The attempts of each task's group, which one actor plays."""
        players, engines = self._fleet.role("environment"), self._fleet.role("rollout")
        tasks, seen = [prompt.task for prompt in prompts], [prompt.pictures for prompt in prompts]
        calls = deal(
            players,
            lambda handle, share: handle.trajectories.remote(engines, tasks[share], samplings[share], seen[share]),
        )
        timeout_s = play_timeout_s(self._config, -(-sum(map(len, samplings)) // len(players)))
        return undeal(get_all(calls, phase="play", timeout_s=timeout_s))


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
        tasks, responses = rows.strings("task"), responses_of(rows)
        calls = deal(actors, lambda handle, share: handle.score.remote(tasks[share], responses[share]))
        scores = undeal(get_all(calls, phase="reward", timeout_s=self._timeout_s))
        self.last_errors = [str(score) for score in scores if isinstance(score, RewardError)]
        for score in scores:
            if score is None:
                self._share.leave_out()
            else:
                self._share.add(str(score) if isinstance(score, RewardError) else None)
        self._share.check()
        return np.array([score if isinstance(score, float) else np.nan for score in scores], np.float32)


class Workers(ScalableRole):
    """Actors of one role, whose number may change between two calls of the session, not during one."""

    def add(self, n: int = 1) -> list[str]:
        """Add actors. Returns their names once they serve. Raises `CannotScale`, `ResourceError`; then none was
        added."""
        return run_in_thread(self.add_members(n))

    def remove(self, n: int = 1, drain_s: float | None = None) -> list[str]:
        """Remove the actors that came last. Returns their names. `drain_s`: seconds for each to finish calls that are
        under way in another thread; None: `rollout.drain_s`. Raises `CannotScale`: one has to stay."""
        return run_in_thread(self.remove_members(n, drain_s))


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
    if len(asked.flow.policies) > 1:
        raise ConfigError(
            f"the dataflow trains {' and '.join(asked.flow.policies)}: a session has one policy. Use penstock.run."
        )
    asked = plan_run(asked, partial(print, file=sys.stderr))
    check_run(asked)
    directory = RunDirectory.create(asked.config)
    directory.failed_writes.set_printer(lambda text: print(text, file=sys.stderr))
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
            Workers("rollout", fleet, config, catch_up.get("rollout") if takes_newcomers(config) else None),
            Workers("reward", fleet, config, catch_up["reward"]),
            Model(ranks, config) if ranks else None,
            sinks,
            directory.failed_writes,
            time.monotonic(),
        )
