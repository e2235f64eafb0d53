"""The models of a session: calls of all ranks together, and of the engines that sample.

rows = policy.generate(prompts, n=8)        columns, with a loss of one's own: `update`, or its halves
policy.sample(prompt_ids, 8)                data with a loss by its name: the verbs of a server's clients
"""

import asyncio
import inspect
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, Unpack, overload

import numpy as np
import pyarrow as pa

from penstock.algorithms.graph.columns import PROMPT_PICTURES, STANDARD_COLUMNS, Column
from penstock.algorithms.graph.loss import aggregated, check_loss
from penstock.algorithms.graph.stage import GROUP_IDS
from penstock.conf.errors import DataError
from penstock.conf.run import RunConfig
from penstock.orchestrator.checkpointing.export import export_model
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.ray_calls import Handles, get_all
from penstock.orchestrator.cluster.weight_sync import WeightSync
from penstock.orchestrator.loops.sampling import SampleCalls
from penstock.orchestrator.loops.saved_states import SavedStates
from penstock.orchestrator.loops.verbs import LoopPolicy, SampleOptions, loss_call, put_together, shares_of
from penstock.store.data.rows import Rows
from penstock.store.ledger.batches import GroupLoad, spread
from penstock.workers.calls.sample_calls import SampleCall, SampleOutput
from penstock.workers.calls.training_calls import AdamParams, Datum, ForwardOutput, LossCall
from penstock.workers.pictures.placeholders import NO_PICTURES, PromptPictures
from penstock.workers.protocols import Completion, Loss, Sampling
from penstock.workers.rollout.rollout_worker import response_columns, sample_seed

NOT_FINITE = "dropped/not_finite"
"""Metric: rows that an update left out."""
T = TypeVar("T")


@dataclass(frozen=True)
class Prompt:
    """A prompt, ready to be sampled from; or a task of an environment, which has no `prompt_ids`. `index` counts the
    prompts of the session and seeds the samples."""

    index: int
    prompt_ids: list[int]
    task: str
    pictures: PromptPictures | None = None


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

    def _shares(self, rows: Rows, *, whole_groups: bool = False) -> list[np.ndarray]:
        """Positions of `rows` by rank, balanced by cost; ranks that split the work on a row get the same ones."""
        are_attempts = "context_ids" in rows  # in an environment; what they begin with is not told apart
        read = rows.lengths("context_ids" if are_attempts else "prompt_ids")
        lengths = read + rows.lengths("response_ids")
        members = [np.flatnonzero(rows.group_ids == group) for group in np.unique(rows.group_ids)]
        loads = [GroupLoad(0 if are_attempts else int(read[some].min()), lengths[some].tolist()) for some in members]
        trainer = self._config.trainer
        num_parts, shares = len(self._ranks) // trainer.ranks_per_row, self._config.shares_prefixes
        parts = spread(loads, num_parts, whole_groups=whole_groups, shares=shares)
        order = np.concatenate([np.zeros(0, np.int64), *members])
        return [np.sort(order[np.asarray(part, np.int64)]) for part in parts for _ in range(trainer.ranks_per_row)]

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
        """Sample `n` responses to each prompt, without an environment: columns prompt_ids, task, response_ids,
        response_text, finish_reason, behavior_logprobs, token_versions, and pictures and picture_ranges with
        `rollout.max_pictures`; `group_ids` are the prompts' indices."""
        if self._config.environment.name is not None:
            raise DataError("environment.name is set: tasks are played, by `run.environment.play`.")
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
        `trainer.num_minibatches`. `loss`: as of `Dataflow.train`; values of tokens are aggregated by
        `algorithm.aggregation`, or to their mean where the algorithm has no such key. Returns the batch's metrics.
        Rows of which it would read a number that is not finite, such as the advantage of a failed reward, are left out
        and counted as `dropped/not_finite`. Raises `DataError` where none is left."""
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
        are. Rows with a function: returns the batch's metrics. Data with a loss by its name: as `LoopPolicy` says
        it."""
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
        loss = aggregated(loss, getattr(self._config.algorithm, "aggregation", "token_mean"))
        check_loss(loss, _declared(rows))
        kept = finite_rows(rows, inspect.signature(loss).parameters)
        left_out = {NOT_FINITE: float(len(rows) - len(kept))} if len(kept) < len(rows) else {}
        rows = kept
        compares = GROUP_IDS in inspect.signature(loss).parameters
        arguments = [(rows.select(share), loss) for share in self._shares(rows, whole_groups=compares)]
        reports = self._all(method, arguments, self._config.trainer.step_timeout_s)
        return {**reports[0].metrics, **left_out}

    def publish(self) -> int:
        """Bring the trainer's weights to the engines, once samples under way have ended. Returns the new version once
        every engine serves it."""
        self._samples.settle()
        version = self.version + 1
        waited_for(self._bring(version))
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
        return waited_for(self._states.save(name, {"samples": self._samples.num_begun}))

    def load(self, path: str) -> None:
        """Go on from what `save` has saved, in this session or another one of the same model: weights, optimizer,
        counters, and the seeds of samples. Engines have it after `publish`. Raises `DataError` while gradients wait, or
        where there is no state, `CheckpointError` for one that is damaged or does not fit; nothing has changed then."""
        self._check_stepped("load")
        self._samples.num_begun = waited_for(self._states.load(path))["samples"]

    def _check_stepped(self, verb: str) -> None:
        if self._has_gradients:
            raise DataError(f"{verb}: gradients wait for their step, and are no part of a state. Call optim_step.")

    def export(self, directory: str | Path) -> None:
        """Write the weights as a HF model."""
        waited_for(export_model(self._fleet, str(Path(directory).expanduser().resolve())))


def _declared(rows: Rows) -> dict[str, Column]:
    """The columns as a dataflow would declare them."""
    found = {}
    for one in rows.table().schema:
        is_list = pa.types.is_list(one.type)
        kind = one.type.value_type if is_list else one.type
        kinds = {"float32": pa.types.is_floating, "bool": pa.types.is_boolean, "int64": pa.types.is_integer}
        dtype = next((name for name, fits in kinds.items() if fits(kind)), "string")
        found[one.name] = STANDARD_COLUMNS.get(one.name) or Column(one.name, dtype, "token" if is_list else "sample")
    return found


def finite_rows(rows: Rows, names: Iterable[str]) -> Rows:
    """The rows whose numbers in the columns of these names are finite. Raises `DataError` where there are none."""
    finite = np.ones(len(rows), bool)
    for name in names:
        if name in rows:
            finite &= _are_finite(rows, name)
            if not finite.any():
                raise DataError(
                    f"column {name!r}: none of {len(rows)} rows is left whose number is finite. Where a reward fails "
                    "it is NaN, and so is every mean of it: take rows.group_mean(reward), or np.nanmean."
                )
    return rows if finite.all() else rows.select(np.flatnonzero(finite))


def _are_finite(rows: Rows, name: str) -> np.ndarray:
    """True for each row whose value, or all of whose values, are finite, `[N]`; also where the column has no floats."""
    kind = rows.table().schema.field(name).type
    if pa.types.is_floating(kind):
        return np.asarray(np.isfinite(rows.values(name)))
    if hasattr(kind, "value_type") and pa.types.is_floating(kind.value_type):
        return np.array([bool(np.isfinite(values).all()) for values in rows.arrays(name)], bool)
    return np.ones(len(rows), bool)


def waited_for(work: Coroutine[Any, Any, T]) -> T:
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
