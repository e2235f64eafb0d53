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
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, Unpack, overload

import numpy as np

from penstock.algorithms.catalogue import dataflow_of
from penstock.algorithms.graph.columns import PROMPT_PICTURES
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.errors import ConfigError, DataError
from penstock.conf.run import RunConfig, validate
from penstock.conf.weights import takes_newcomers
from penstock.orchestrator.checkpointing.export import export_model
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.placement.actors import ActorPlan, plan_actors
from penstock.orchestrator.cluster.ray_calls import Handles, get_all
from penstock.orchestrator.cluster.weight_sync import WeightSync
from penstock.orchestrator.configuration.validate import check_run
from penstock.orchestrator.loops.sampling import SampleCalls
from penstock.orchestrator.loops.saved_states import SavedStates
from penstock.orchestrator.loops.verbs import LoopPolicy, SampleOptions, loss_call, put_together, shares_of
from penstock.orchestrator.membership.members import catching_up
from penstock.orchestrator.membership.scaling import ScalableRole
from penstock.orchestrator.observability.reporting.sinks.sink import Sink, log_to, opened_sinks
from penstock.orchestrator.run import is_refusal
from penstock.orchestrator.run_directory.failed_writes import FailedWrites
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.orchestrator.storeless import started_fleet
from penstock.store.data.rows import Rows
from penstock.workers.pictures.placeholders import NO_PICTURES, PromptPictures
from penstock.workers.prompts.opening import open_source
from penstock.workers.prompts.source import PromptSource
from penstock.workers.protocols import Completion, Loss, Sampling
from penstock.workers.rollout.worker import response_columns, sample_seed
from penstock.workers.sample_calls import SampleCall, SampleOutput
from penstock.workers.training_calls import AdamParams, Datum, ForwardOutput, LossCall

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
        shares = shares_of(lengths.tolist(), len(self._ranks), self._config.trainer.ranks_per_row)
        return [np.asarray(share, np.int64) for share in shares]

    def logprobs(self, rows: Rows) -> list[np.ndarray]:
        """Log-probabilities of each row's response tokens under this model's weights, `[T_i]` float32."""
        shares = self._shares(rows)
        parts = self._all("logprobs", [(rows.select(share),) for share in shares], self._config.trainer.step_timeout_s)
        results: list[np.ndarray] = [np.zeros(0, np.float32)] * len(rows)
        for share, part in zip(shares, parts, strict=True):
            for position, values in zip(share, part, strict=True):
                results[int(position)] = values
        return results


class Policy(Model, LoopPolicy):
    """The model that is trained, and the engines that sample from it."""

    def __init__(
        self, fleet: Fleet, config: RunConfig, weights: WeightSync, samples: SampleCalls, states: SavedStates
    ) -> None:
        super().__init__(fleet.role("trainer"), config)
        self._fleet = fleet
        self._weights, self._samples, self._states = weights, samples, states
        self._sampling = Sampling.of(config.rollout.sampling)
        self.version = 0
        """Version that the engines serve: the number of `publish` calls."""
        self._has_gradients = False
        """True if gradients wait for `optim_step`."""

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
        metrics = self._of_batch("update", rows, loss)
        self._has_gradients = False
        return metrics

    def forward(self, data: Sequence[Datum], loss: str | LossCall) -> ForwardOutput:
        return self._of_data(data, loss, backward=False)

    @overload
    def forward_backward(self, data: Rows, loss: Loss) -> dict[str, float]: ...

    @overload
    def forward_backward(self, data: Sequence[Datum], loss: str | LossCall) -> ForwardOutput: ...

    def forward_backward(
        self, data: Rows | Sequence[Datum], loss: Loss | str | LossCall
    ) -> dict[str, float] | ForwardOutput:
        """Compute gradients, and add them to those of earlier calls since the last `optim_step`. Weights stay as they
        are. Rows with a function: returns the batch's metrics. Data with a loss by its name: as `LoopPolicy` says it,
        with log-probabilities at the temperature `rollout.sampling.temperature`."""
        output: dict[str, float] | ForwardOutput
        if isinstance(data, Rows):
            if not callable(loss):
                raise DataError(f"loss={loss!r}: rows are trained by a function. A name is for a list of Datum.")
            output = self._of_batch("forward_backward", data, loss)
        else:
            if not isinstance(loss, str | LossCall):
                raise DataError(
                    "a list of Datum is trained by a loss's name, or by a LossCall. Functions are for Rows."
                )
            output = self._of_data(data, loss, backward=True)
        self._has_gradients = True
        return output

    def optim_step(self, params: AdamParams | None = None) -> dict[str, float]:
        """Step by the gradients since the last step. `params`: numbers of this step; None: those of
        `trainer.optimizer`, whose schedule counts steps. Returns `actor/grad_norm` and the like. Raises `DataError`
        where there are no gradients."""
        answers = self._all("optim_step", [(params,)] * len(self._ranks), self._config.trainer.step_timeout_s)
        self._has_gradients = False
        return dict(answers[0])

    def _of_data(self, data: Sequence[Datum], loss: str | LossCall, *, backward: bool) -> ForwardOutput:
        if not data:
            raise DataError("no data is given: pass at least one Datum.")
        lengths = [len(datum.token_ids) for datum in data]
        shares = shares_of(lengths, len(self._ranks), self._config.trainer.ranks_per_row)
        arguments = [([data[position] for position in share], loss_call(loss), backward) for share in shares]
        return put_together(shares, self._all("forward_data", arguments, self._config.trainer.step_timeout_s))

    def _of_batch(self, method: str, rows: Rows, loss: Loss) -> dict[str, float]:
        arguments = [(rows.select(share), loss) for share in self._shares(rows)]
        reports = self._all(method, arguments, self._config.trainer.step_timeout_s)
        return dict(reports[0].metrics)

    def publish(self) -> int:
        """Bring the trainer's weights to the engines, once samples under way have ended. Returns the new version once
        every engine serves it."""
        self._samples.settle()
        version = self.version + 1
        _run(self._bring(version))
        self.version = version
        return version

    async def _bring(self, version: int) -> None:
        if self.version == 0:
            await self._weights.connect()
        await self._weights.begin(version)
        await self._weights.load(await self._weights.finish(version))

    def sample_async(
        self, prompt_ids: Sequence[int], num_samples: int = 1, sampling: Sampling | None = None,
        **options: Unpack[SampleOptions],
    ) -> "Future[SampleOutput]":  # fmt: skip
        """Begin to sample, as `LoopPolicy` says it; `sampling` None: `rollout.sampling`. Calls are spread over the
        engines. Those under way hold up `publish`: a sample is of one version."""
        return self._samples.begin(SampleCall(list(prompt_ids), num_samples, sampling or self._sampling, **options))

    def save(self, name: str) -> str:
        """Save weights, optimizer and counters as `states/NAME` of the run's directory, or of its URL. Returns the
        path. Raises `DataError` for a name that is taken, and while gradients wait, which no state keeps;
        `CheckpointError`, `DeadlineExceeded`."""
        self._check_stepped("save")
        return _run(self._states.save(name, {"samples": self._samples.num_begun}))

    def load(self, path: str) -> None:
        """Go on from what `save` has saved, in this session or another one of the same model: weights, optimizer,
        counters, and the seeds of samples. Engines have it after `publish`. Raises `DataError` while gradients wait, or
        where there is no state, `CheckpointError` for one that is damaged or does not fit; nothing has changed then."""
        self._check_stepped("load")
        self._samples.num_begun = _run(self._states.load(path))["samples"]

    def _check_stepped(self, verb: str) -> None:
        if self._has_gradients:
            raise DataError(f"{verb}: gradients wait for their step, and are no part of a state. Call optim_step.")

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
    with contextlib.ExitStack() as stack:
        started = stack.enter_context(started_fleet(config, flow, plan, directory))
        sinks = stack.enter_context(opened_sinks(config, directory))
        config, fleet = started.config, started.fleet
        calls = SampleCalls(lambda: fleet.role("rollout"), config.seed, config.rollout.generate_timeout_s)
        samples = stack.enter_context(contextlib.closing(calls))
        states = SavedStates(fleet, f"{directory.place}/{directory.states.name}", config.checkpoint.timeout_s)
        judged = {stage.name for stage in flow.of_kind("logprobs")[:1]}
        reference = {actor.name for actor in plan if actor.role == "scorer" and actor.stage in judged}
        ranks = [(name, handle) for name, handle in fleet.role("scorer") if name in reference]
        weights = WeightSync(fleet, config)
        catch_up = catching_up(config, weights)
        yield Session(
            config,
            directory.path,
            Policy(fleet, config, weights, samples, states),
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
