"""The models of a session: calls of all ranks together, and of the engines that sample.

    rows = policy.generate(prompts, n=8)        columns, with a loss of one's own: `update`, or its halves
    policy.sample(prompt_ids, 8)                data with a loss by its name: the verbs of a server's clients

`SampleCalls` runs many samples at a time, each on the engine with the fewest under way:

    begin ─▶ seed, engine ─▶ a task in a thread of its own ─▶ a future with a deadline, whose `cancel` ends the call

`SavedStates` keeps what the trainer continues from, bit for bit, below the run's directory or its URL. Any number of
ranks may load a state, in another session too.

    states/NAME/trainer/      weights, optimizer and counters in shards, written by the ranks
    states/NAME/state.json    files with their checksums, counters of the loop; written last: without it there is none
"""

import asyncio
import concurrent.futures
import contextlib
import inspect
import json
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Unpack, overload

import numpy as np
import pyarrow as pa

from penstock.algorithms.graph.columns import PROMPT_PICTURES, STANDARD_COLUMNS, Column
from penstock.algorithms.graph.loss import check_loss, wrap_loss
from penstock.algorithms.graph.stage import GROUP_IDS
from penstock.conf.errors import (
    CheckpointError,
    DamagedCheckpoint,
    DataError,
    DeadlineExceeded,
    PenstockError,
    WorkerDied,
)
from penstock.conf.run import RunConfig
from penstock.orchestrator.checkpointing.export import export_model
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.ray_calls import (
    GRACE_S,
    Handles,
    answers,
    answers_or_end,
    deal,
    get_all,
    run_in_thread,
    undeal,
)
from penstock.orchestrator.cluster.weight_sync import WeightSync
from penstock.orchestrator.loops.verbs import (
    LoopPolicy,
    LoopThread,
    SampleOptions,
    check_name,
    loss_call,
    merge_outputs,
    seed_of,
    shares_of,
)
from penstock.orchestrator.run_directory.checkpoint import trainer_directory
from penstock.store.data.rows import Rows
from penstock.store.ledger.batches import GroupLoad, spread
from penstock.workers.pictures.prompt_pictures import NO_PICTURES, PromptPictures
from penstock.workers.protocols import (
    AdamParams,
    Completion,
    Datum,
    ForwardOutput,
    Loss,
    LossCall,
    SampleCall,
    SampleOutput,
    Sampling,
)
from penstock.workers.rollout.rollout_worker import response_columns, sample_seed
from penstock.workers.runtime.url_files import SavedFile, absolute, exists, read_text, remove, sync, write_text

MANIFEST = "state.json"
FORMAT = 1


class SavedStates:
    """Lifecycle: `save` and `load`, one call at a time, over a fleet that has started."""

    def __init__(self, fleet: Fleet, place: str, timeout_s: float) -> None:
        """`place`: the directory or URL of all states. `timeout_s`: deadline of a save."""
        self._fleet, self._place, self._timeout_s = fleet, place, timeout_s

    async def save(self, name: str, counters: Mapping[str, int]) -> str:
        """Save the present state under a new name, with counters of the loop. Returns its path. Raises `DataError` for
        a name that is taken, `CheckpointError`, `DeadlineExceeded`."""
        path = f"{self._place}/{check_name(name)}"
        if exists(f"{path}/{MANIFEST}"):
            raise DataError(f"{path} is there already: states are not overwritten. Choose another name.")
        remove(path)
        directory = trainer_directory(path)
        places = await self._fleet.places(directory)
        try:
            files = await self._written(places)
            await self._fleet.collect(directory, places)
            manifest = {"format": FORMAT, "files": [asdict(file) for file in files], "counters": dict(counters)}
            await asyncio.to_thread(sync, directory)
            write_text(f"{path}/{MANIFEST}", json.dumps(manifest, indent=1))
        except BaseException:
            with contextlib.suppress(PenstockError, OSError):
                await self._fleet.discard(directory, places)
                remove(path)
            raise
        return path

    async def load(self, path: str) -> dict[str, int]:
        """Go on from a state. Returns the counters that were saved with it. Raises `DataError` where there is none,
        `CheckpointError` for one that is damaged or of another model; then nothing has changed."""
        path = absolute(path)
        files, counters = _read(path)
        places = self._fleet.provided(trainer_directory(path), self._fleet.role("trainer"))
        calls = [(name, handle.resume.remote(places[name], files)) for name, handle in self._fleet.role("trainer")]
        await answers(calls, phase=f"load {path}", timeout_s=self._fleet.config.rollout.start_timeout_s)
        return counters

    async def _written(self, places: Mapping[str, str]) -> list[SavedFile]:
        trainers, epoch = self._fleet.role("trainer"), self._fleet.owner.epoch
        begins = [(name, handle.begin_saving.remote(places[name], epoch)) for name, handle in trainers]
        if not all(await answers(begins, phase="save", timeout_s=self._timeout_s)):
            raise CheckpointError(
                f"an earlier save has missed its deadline (checkpoint.timeout_s={self._timeout_s:g}) and is still "
                "being written. See whether the run's directory answers, and save again."
            )
        ends = [(name, handle.finish_saving.remote()) for name, handle in trainers]
        saved = await answers(ends, phase="save", timeout_s=self._timeout_s + GRACE_S)
        return [file for files in saved for file in files]


def _read(path: str) -> tuple[list[SavedFile], dict[str, int]]:
    """The files and counters of a state."""
    try:
        manifest = json.loads(read_text(f"{path}/{MANIFEST}"))
    except FileNotFoundError:
        raise DataError(f"{path}: no state is there. Give the path that `save` has returned.") from None
    except ValueError as error:
        raise DamagedCheckpoint(f"{path}/{MANIFEST} is no JSON: {error}. Load another state.") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path}/{MANIFEST} is not of format {FORMAT}: another version of Penstock wrote it.")
    return [SavedFile(**file) for file in manifest["files"]], dict(manifest["counters"])


class SampleCalls:
    """Lifecycle: `begin` any number, `settle` before the engines' weights change, `close`."""

    def __init__(self, engines: Callable[[], Handles], seed: int, timeout_s: float) -> None:
        """`engines`: those that are there now. `seed`: the run's. `timeout_s`: deadline of a call."""
        self._engines, self._seed, self._timeout_s = engines, seed, timeout_s
        self._thread = LoopThread("samples")
        self._num_under_way: Counter[str] = Counter()
        self._calls: set[Future[SampleOutput]] = set()
        self._lock = threading.Lock()
        self.num_begun = 0
        """Number of calls so far, which seeds those without a seed."""

    def begin(self, call: SampleCall) -> "Future[SampleOutput]":
        with self._lock:
            members, number = self._engines(), self.num_begun
            if not members:
                raise WorkerDied("no engine is left to sample: `rollouts.add` one.")
            self.num_begun += 1
            name, handle = min(members, key=lambda member: self._num_under_way[member[0]])
            self._num_under_way[name] += call.num_samples
        if call.sampling.seed is None:
            call = replace(call, sampling=call.sampling.seeded(seed_of("sample", self._seed, number)))
        future = self._thread.submit(self._sampled(name, handle, call))
        self._calls.add(future)
        future.add_done_callback(lambda ended: self._ended(name, call.num_samples, ended))
        return future

    def settle(self) -> None:
        """Wait for the calls under way, whatever they end with. Raises `DeadlineExceeded`."""
        late = concurrent.futures.wait(list(self._calls), self._timeout_s).not_done
        if late:
            raise DeadlineExceeded(
                f"{len(late)} calls of sample have not ended within {self._timeout_s:g} s "
                "(rollout.generate_timeout_s), and samples keep the weights that they were begun with."
            )

    def close(self) -> None:
        self._thread.close()

    async def _sampled(self, name: str, handle: Any, call: SampleCall) -> SampleOutput:
        one = (name, handle.sample.remote(None, call, uuid.uuid4().hex))
        (output,) = await answers_or_end([one], phase="sample", timeout_s=self._timeout_s)
        return output  # type: ignore[no-any-return]

    def _ended(self, name: str, num_samples: int, future: "Future[SampleOutput]") -> None:
        with self._lock:
            self._num_under_way[name] -= num_samples
            self._calls.discard(future)


NOT_FINITE = "dropped/not_finite"
"""Metric: rows that an update left out."""


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
        are_attempts = "context_ids" in rows  # in an environment; their prompt is not distinguished
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
        ids, seen = [prompt.prompt_ids for prompt in prompts], [prompt.pictures for prompt in prompts]
        calls = deal(
            self._fleet.role("rollout"),
            lambda handle, share: handle.generate.remote(ids[share], n, samplings[share], seen[share]),
        )
        groups = undeal(get_all(calls, phase="generate", timeout_s=self._config.rollout.generate_timeout_s))
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
        return merge_outputs(shares, self._all("forward_data", arguments, self._config.trainer.step_timeout_s))

    def _of_batch(self, method: str, rows: Rows, loss: Loss) -> dict[str, float]:
        loss = wrap_loss(loss, getattr(self._config.algorithm, "aggregation", "token_mean"))
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
        run_in_thread(self._bring(version))
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
        return run_in_thread(self._states.save(name, {"samples": self._samples.num_begun}))

    def load(self, path: str) -> None:
        """Go on from what `save` has saved, in this session or another one of the same model: weights, optimizer,
        counters, and the seeds of samples. Engines have it after `publish`. Raises `DataError` while gradients wait, or
        where there is no state, `CheckpointError` for one that is damaged or does not fit; nothing has changed then."""
        self._check_stepped("load")
        self._samples.num_begun = run_in_thread(self._states.load(path))["samples"]

    def _check_stepped(self, verb: str) -> None:
        if self._has_gradients:
            raise DataError(f"{verb}: gradients wait for their step, and are no part of a state. Call optim_step.")

    def export(self, directory: str | Path) -> None:
        """Write the weights as a HF model."""
        run_in_thread(export_model(self._fleet, str(Path(directory).expanduser().resolve())))


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
