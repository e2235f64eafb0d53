"""The imperative API: a user's own `for` loop over the same actors that the controller drives.

    with penstock.session(penstock.load_config(["recipe=arithmetic"])) as run:
        for step in range(100):
            rows = run.policy.generate(run.prompts.next(8), n=8)
            rows = rows.with_column("reward", run.reward(rows))
            metrics = run.policy.update(rows.with_column("advantage", my_advantage(rows)), my_loss)
            run.policy.publish()
            run.log(step, metrics)

Each call is one line here and one SPMD program on all ranks. There is no store and no staleness: every call waits for
its result.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from penstock.algorithms.catalogue import dataflow_of
from penstock.algorithms.graph.columns import PROMPT_PICTURES
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.errors import ConfigError
from penstock.conf.run import RunConfig, validate
from penstock.conf.weights import takes_newcomers
from penstock.orchestrator.checkpointing.export import export_model
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.placement.actors import ActorPlan, plan_actors
from penstock.orchestrator.cluster.ray_calls import Handles, get_all
from penstock.orchestrator.cluster.weight_sync import WeightSync
from penstock.orchestrator.configuration.validate import check_run
from penstock.orchestrator.membership.members import catching_up
from penstock.orchestrator.membership.scaling import ScalableRole
from penstock.orchestrator.observability.reporting.sinks.sink import Sink, log_to, opened_sinks
from penstock.orchestrator.run import is_refusal
from penstock.orchestrator.run_directory.failed_writes import FailedWrites
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.orchestrator.storeless import started_fleet
from penstock.store.data.rows import Rows
from penstock.store.ledger.batches import balance, row_cost
from penstock.workers.pictures.placeholders import NO_PICTURES, PromptPictures
from penstock.workers.prompts.opening import open_source
from penstock.workers.prompts.source import PromptSource
from penstock.workers.protocols import Completion, Loss, Sampling
from penstock.workers.rollout.worker import response_columns, sample_seed
from penstock.workers.training_calls import AdamParams

T = TypeVar("T")


@dataclass(frozen=True)
class Prompt:
    """A prompt, ready to be sampled from. `index` counts the prompts of the session and seeds the samples."""

    index: int
    prompt_ids: list[int]
    task: str
    pictures: PromptPictures | None = None


class PromptStream:
    """The run's dataset in its order, epoch after epoch."""

    def __init__(self, source: PromptSource) -> None:
        self._source = source
        self._drawn = 0

    def next(self, count: int) -> list[Prompt]:
        groups = self._source.next_groups(count)
        first, self._drawn = self._drawn, self._drawn + count
        return [
            Prompt(first + i, list(group["prompt_ids"]), str(group["task"]), PromptPictures.of(group))
            for i, group in enumerate(groups)
        ]


class Model:
    """A model on its ranks, which run one program together: a reference, or the base of `Policy`."""

    def __init__(self, ranks: Handles, config: RunConfig) -> None:
        self._ranks, self._config = ranks, config

    def _all(self, method: str, arguments: Sequence[tuple[Any, ...]], timeout_s: float) -> list[Any]:
        """Call `method` on every rank with its own arguments."""
        calls = [
            (name, getattr(handle, method).remote(*own))
            for (name, handle), own in zip(self._ranks, arguments, strict=True)
        ]
        return get_all(calls, phase=method, timeout_s=timeout_s)

    def _shares(self, rows: Rows) -> list[np.ndarray]:
        """Positions of `rows` by rank, balanced by cost; ranks that split the work on a row get the same ones."""
        lengths = rows.lengths("prompt_ids") + rows.lengths("response_ids")
        costs = [row_cost(length) for length in lengths.tolist()]
        peers = self._config.trainer.ranks_per_row
        shares = balance(costs, len(self._ranks) // peers)
        return [np.asarray(sorted(share), np.int64) for share in shares for _ in range(peers)]

    def logprobs(self, rows: Rows) -> list[np.ndarray]:
        """Log-probabilities of each row's response tokens under this model's weights, `[T_i]` float32."""
        shares = self._shares(rows)
        parts = self._all("logprobs", [(rows.select(share),) for share in shares], self._config.trainer.step_timeout_s)
        results: list[np.ndarray] = [np.zeros(0, np.float32)] * len(rows)
        for share, part in zip(shares, parts, strict=True):
            for position, values in zip(share, part, strict=True):
                results[int(position)] = values
        return results


class Policy(Model):
    """The model that is trained, and the engines that sample from it."""

    def __init__(self, fleet: Fleet, config: RunConfig, weights: WeightSync) -> None:
        super().__init__(fleet.role("trainer"), config)
        self._fleet = fleet
        self._weights = weights
        self._sampling = Sampling.of(config.rollout.sampling)
        self.version = 0
        """Version that the engines serve: the number of `publish` calls."""

    def generate(self, prompts: Sequence[Prompt], n: int = 1, sampling: Sampling | None = None) -> Rows:
        """Sample `n` responses to each prompt: columns prompt_ids, task, response_ids, response_text, finish_reason,
        behavior_logprobs, token_versions, and pictures and picture_ranges with `rollout.max_pictures`; `group_ids` are
        the prompts' indices."""
        chosen = sampling or self._sampling
        seeded = self._config.rollout.sampling.seeded and chosen.temperature > 0
        samplings = [
            chosen.seeded(sample_seed(self._config.seed, prompt.index) if seeded else None) for prompt in prompts
        ]
        members = self._fleet.role("rollout")
        engines = len(members)
        calls = []
        for i, (name, handle) in enumerate(members):
            ids, seen = [one.prompt_ids for one in prompts[i::engines]], [one.pictures for one in prompts[i::engines]]
            calls.append((name, handle.generate.remote(ids, n, samplings[i::engines], seen)))
        answers = get_all(calls, phase="generate", timeout_s=self._config.rollout.generate_timeout_s)
        groups: list[list[Completion]] = [[]] * len(prompts)
        for i, answer in enumerate(answers):
            groups[i::engines] = answer
        return _rows(prompts, groups, has_pictures=self._config.rollout.max_pictures > 0)

    def update(self, rows: Rows, loss: Loss) -> dict[str, float]:
        """Make one policy update on the rows: `forward_backward` and `optim_step`, once for each of
        `trainer.num_minibatches`. `loss` reads columns by the names of its parameters. Returns the batch's metrics."""
        return self._of_batch("update", rows, loss)

    def forward_backward(self, rows: Rows, loss: Loss) -> dict[str, float]:
        """Compute gradients on the rows, and add them to those of earlier calls since the last `optim_step`. Weights
        stay as they are. Returns the batch's metrics."""
        return self._of_batch("forward_backward", rows, loss)

    def optim_step(self, params: AdamParams | None = None) -> dict[str, float]:
        """Step by the gradients since the last step. `params`: numbers of this step; None: those of
        `trainer.optimizer`, whose schedule counts steps. Returns `actor/grad_norm` and the like. Raises `DataError`
        where there are no gradients."""
        answers = self._all("optim_step", [(params,)] * len(self._ranks), self._config.trainer.step_timeout_s)
        return dict(answers[0])

    def _of_batch(self, method: str, rows: Rows, loss: Loss) -> dict[str, float]:
        arguments = [(rows.select(share), loss) for share in self._shares(rows)]
        reports = self._all(method, arguments, self._config.trainer.step_timeout_s)
        return dict(reports[0].metrics)

    def publish(self) -> int:
        """Bring the trainer's weights to the engines. Returns the new version once every engine serves it."""
        version = self.version + 1
        _run(self._bring(version))
        self.version = version
        return version

    async def _bring(self, version: int) -> None:
        if self.version == 0:
            await self._weights.connect()
        await self._weights.begin(version)
        await self._weights.load(await self._weights.finish(version))

    def export(self, directory: str | Path) -> None:
        """Write the weights as a HF model."""
        _run(export_model(self._fleet, str(Path(directory).expanduser().resolve())))


class Reward:
    """The run's reward, as a function of rows."""

    def __init__(self, fleet: Fleet, config: RunConfig) -> None:
        self._fleet = fleet
        self._timeout_s = config.rollout.generate_timeout_s
        self.last_errors: list[str] = []
        """Reasons why rewards of the last call failed."""

    def __call__(self, rows: Rows) -> np.ndarray:
        """Rewards of the rows, `[len(rows)]` float32; NaN where the reward failed (see `last_errors`)."""
        actors = self._fleet.role("reward", self._fleet.first_stage("reward"))
        tasks, texts, num = rows.strings("task"), rows.strings("response_text"), len(actors)
        calls = [
            (name, handle.score.remote(tasks[index::num], texts[index::num]))
            for index, (name, handle) in enumerate(actors)
        ]
        scores: list[Any] = [None] * len(rows)
        for index, part in enumerate(get_all(calls, phase="reward", timeout_s=self._timeout_s)):
            scores[index::num] = part
        self.last_errors = [str(score) for score in scores if not isinstance(score, float)]
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
        return _run(self._members.added(n))

    def remove(self, n: int = 1, drain_s: float | None = None) -> list[str]:
        """Remove the actors that came last. Returns their names. `drain_s`: seconds for each to finish calls that are
        under way in another thread; None: `rollout.drain_s`. Raises `CannotScale`: one has to stay."""
        return _run(self._members.removed(n, drain_s))


@dataclass
class Session:
    """The session that `penstock.session` gives: the handles, and where to write metrics."""

    config: RunConfig
    directory: Path
    """The run's directory on this machine: with a URL as output_dir the working copy."""
    policy: Policy
    prompts: PromptStream
    reward: Reward
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
    validate(config)
    if config.environment.name is not None:
        raise ConfigError(
            "environment.name is set: a session has no attempts, it samples responses to prompts. Train in an "
            "environment with penstock.run."
        )
    flow = dataflow_of(config, flow)
    if not flow.of_kind("rollout"):
        raise ConfigError(f"algorithm={config.algorithm.name} samples nothing; a session needs a rollout stage.")
    plan = plan_actors(flow, config)
    check_run(config, flow, plan)
    directory = RunDirectory.create(config)
    directory.failed_writes.tell_to(lambda text: print(text, file=sys.stderr))
    directory.mirror(config.tracking)
    try:
        with _started(config, flow, plan, directory) as run:
            yield run
    except BaseException as error:
        if not directory.has_begun and (isinstance(error, KeyboardInterrupt) or is_refusal(error)):
            directory.discard()
        raise
    finally:
        directory.close()


@contextlib.contextmanager
def _started(config: RunConfig, flow: Dataflow, plan: list[ActorPlan], directory: RunDirectory) -> Iterator[Session]:
    with started_fleet(config, flow, plan, directory) as started, opened_sinks(config, directory) as sinks:
        config, fleet = started.config, started.fleet
        judged = {stage.name for stage in flow.of_kind("logprobs")[:1]}
        reference = {actor.name for actor in plan if actor.role == "scorer" and actor.stage in judged}
        ranks = [(name, handle) for name, handle in fleet.role("scorer") if name in reference]
        weights = WeightSync(fleet, config)
        catch_up = catching_up(config, weights)
        yield Session(
            config,
            directory.path,
            Policy(fleet, config, weights),
            PromptStream(open_source(config, started.model_path)),
            Reward(fleet, config),
            Workers(
                ScalableRole("rollout", fleet, config, catch_up.get("rollout") if takes_newcomers(config) else None)
            ),
            Workers(ScalableRole("reward", fleet, config, catch_up["reward"])),
            Model(ranks, config) if ranks else None,
            sinks,
            directory.failed_writes,
            time.monotonic(),
        )


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a thread of its own: a notebook has an event loop in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def _rows(prompts: Sequence[Prompt], groups: Sequence[Sequence[Completion]], *, has_pictures: bool) -> Rows:
    pairs = [(prompt, completion) for prompt, group in zip(prompts, groups, strict=True) for completion in group]
    columns: dict[str, list[Any]] = {
        "prompt_ids": [prompt.prompt_ids for prompt, _ in pairs],
        "task": [prompt.task for prompt, _ in pairs],
        **response_columns([completion for _, completion in pairs]),
    }
    if has_pictures:
        seen = [(prompt.pictures or NO_PICTURES).columns() for prompt, _ in pairs]
        columns |= {name: [one[name] for one in seen] for name in PROMPT_PICTURES}
    return Rows.from_lists(columns, group_ids=[prompt.index for prompt, _ in pairs])
