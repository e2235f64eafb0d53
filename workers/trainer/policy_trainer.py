"""A rank of a trainer: log-probabilities, updates, publications. Its engine decides where weights, gradients and
optimizer states lie (`engines/train_engine.py`).

    update(rows, loss):  rows ─▶ minibatches of whole groups ─▶ micro-batches ─▶ forward, loss, backward ─▶ clip, AdamW
                         └──────────────────────── forward_backward(rows, loss) ────────────────────┘   optim_step()
    publish(root, v):    each rank writes its shard into shared memory, beside the next update (`publishing.py`)

How rows are cut into micro-batches and spread over ranks changes no result but for rounding: losses are divided by
totals over all ranks, gradients are sums.

Legend: B rows of the micro-batch, T response tokens, padded, N response tokens, J candidates of each.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from penstock.algorithms.graph.columns import CANDIDATE_LOGPROBS
from penstock.conf.errors import ConfigError, DataError
from penstock.conf.trainer import VISION, TrainerConfig
from penstock.store.data.rows import Rows
from penstock.workers.models.routed_experts import KEY as REPLAY_KEY
from penstock.workers.protocols import AdamParams, Loss, Publication, UpdateReport
from penstock.workers.runtime.heap import Heap
from penstock.workers.runtime.host_memory import HostBuffer
from penstock.workers.trainer.engines.lora import (
    ADAPTER,
    add_adapters,
    check_compiles,
    keep_frozen_in,
    use_adapter,
)
from penstock.workers.trainer.engines.train_engine import (
    NOTHING_KEPT,
    HostActivations,
    KeptState,
    give_back,
    learning_rate,
    make_engine,
)
from penstock.workers.trainer.models import packed_attention
from penstock.workers.trainer.models.language_model import (
    PolicyModel,
    check_scores,
    compile_layers,
    max_length,
    open_causal_lm,
    stream_layers,
    use_liger,
)
from penstock.workers.trainer.models.routing import Routers
from penstock.workers.trainer.models.starting_weights import StartingWeights
from penstock.workers.trainer.models.vision import (
    FrozenTower,
    PictureCache,
    check_vision,
    freeze_tower,
    has_frozen_tower,
    tower_cost,
    vision_tower,
)
from penstock.workers.trainer.publishing import Publisher, export, try_texts
from penstock.workers.trainer.ranks import Ranks, phase
from penstock.workers.trainer.step_meter import clock, size_of
from penstock.workers.trainer.token_recorder import TokenRecorder
from penstock.workers.trainer.update import batching
from penstock.workers.trainer.update.batching import MicroBatch
from penstock.workers.trainer.update.minibatches import Batcher, LossSignature, Minibatch
from penstock.workers.trainer.update.picture_places import Pictures
from penstock.workers.trainer.update.rank_groups import PassCosts
from penstock.workers.trainer.update.tally import Tally, TokenAges, add_mismatch, with_shares
from penstock.workers.weights.chain.plan import ChunkPlan
from penstock.workers.weights.piece import Piece, hash_of_pieces

T = TypeVar("T")


@dataclass(frozen=True)
class UpdateContext:
    """The parts of one update that all its micro-batches share."""

    inputs: LossSignature
    tally: Tally
    old_logprobs: list[np.ndarray] | None
    """Log-probabilities before the update, `[T_i]` for each row, where the loss asks for them and weights change before
    its last micro-batch."""
    recorder: TokenRecorder | None
    ages: TokenAges | None = None


class PolicyTrainer:
    """A rank of several, all of which make the same calls in the same order, each with its own rows (maybe none). Ranks
    that split the work on a row (`TrainerConfig.ranks_per_row`) have the same ones.

        trainer = PolicyTrainer(TrainerConfig(), "path/to/model", temperature=1.0)
        report = trainer.update(rows, partial(ppo_clip_loss, clip_high=0.28))
        report = trainer.forward_backward(rows, sft_loss)    # or in two calls: gradients add up until the step
        metrics = trainer.optim_step()
        publication = trainer.publish("/dev/shm/run", version=1)
        trainer.close()

    Several policies (`trainer.policies`) are adapters of one model: what is said of weights, optimizer and updates is
    of the one in use, but publications, states and exports have all of them.

        with trainer.using("proposer"):     # else the first
            trainer.update(rows, loss)

    `trainable=False`: for a scorer, which has no optimizer; `update` is then an error.
    """

    metrics_prefix = "actor"
    """Prefix of the metrics that `update` reports."""

    def __init__(
        self,
        config: TrainerConfig,
        model_path: str,
        ranks: Ranks | None = None,
        *,
        temperature: float = 1.0,
        attention: str = "sdpa",
        trainable: bool = True,
        engine_dtype: str = "float32",
        rows_alone: bool = False,
    ) -> None:
        """Load the model. Collective.

        `ranks`: that have joined for this trainer, which leaves them; None: it is the only rank. `temperature`: of the
        sampling distribution. `engine_dtype`: of publications. `rows_alone`: what `logprobs` says of a row depends on
        nothing but the row. Raises `ModelError`, `ConfigError`.
        """
        self.config = config
        self.model_path = model_path
        self.engine_dtype = engine_dtype
        self.policies = tuple(config.policies) or (ADAPTER,)
        """Names of the policies."""
        self.policy = self.policies[0]
        """Name of the one in use."""
        self._num_updates = dict.fromkeys(self.policies, 0)
        self.num_epochs = 1
        """Passes of `update` over its rows."""
        self.keeps_caches = False
        """True if engines sample on from old caches under new weights (`rollout.on_update=keep`)."""
        self.ranks = ranks or Ranks.join(config)
        self.all_ranks = self.ranks
        """The ranks of all policies, some of which may have ranks of their own (`own_models.py`)."""
        self._temperature = temperature
        self.publisher = Publisher(self.ranks, self._published, engine_dtype)
        self.trainable = trainable
        self._has_gradients = False
        self._heap = Heap()
        self._activations = HostBuffer(self.ranks.device)
        """The host memory of `trainer.activation_offload`."""
        self.before_weights_change: list[Callable[[], None]] = []
        """Functions called before weights change or leave the device: a checkpoint, or the copy that a rank keeps, may
        still be made of them."""
        try:
            self._make(model_path, attention)
        except BaseException:
            self.ranks.leave()
            raise
        self._batcher = Batcher(self.ranks, self.config, self.max_length, rows_alone, self.packs, sharing=self.sharing)
        if self.ranks.block is not None:
            self.split_by(self.estimated_costs())

    def _make(self, model_path: str, attention: str) -> None:
        """Make the model, and the engine that trains it."""
        config = self.config
        dtype = "float32" if self.trainable else config.dtype
        streams = self.trainable and config.streams_layers
        checkpoint_layers = self.trainable and config.recomputes_layers and not streams
        self.model, weights, self.max_length = self._open(model_path, dtype, attention, checkpoint_layers)
        self.size = size_of(self.model, has_adapters=self.trainable and bool(config.lora.rank))
        """Size of the whole model, whatever part of it this rank has."""
        kernels = packed_attention.find_kernels(self.model.lm, config, self.ranks)
        packing = "always" if self.ranks.block is not None else config.packing
        self.packs = packed_attention.choose(self.model.lm, packing, has_kernel=kernels.packed)
        """True if rows of a micro-batch are packed (`trainer.packing`)."""
        self.sharing = packed_attention.choose_trees(
            self.model.lm,
            "never" if config.streams_layers else config.share_prefixes,
            is_compiled=config.compile,
            has_kernel=kernels.trees,
        )
        """Whether rows of a group are trees: never, auto or always."""
        self.model.requires_grad_(self.trainable)
        check_vision(self.model.lm)
        if VISION in config.freeze:
            freeze_tower(self.model.lm)
        self._tower_cost = tower_cost(self.model.lm) if vision_tower(self.model.lm) else None
        if config.liger:
            use_liger(self.model.lm)
        if self.trainable and config.lora.rank:
            weights.add(self._add_adapters())
            keep_frozen_in(self.model.lm, getattr(torch, config.dtype))
        watched = self.trainable and config.router_aux_loss_coef > 0
        self.routers = Routers(self.model.lm) if watched else None
        if config.compile:
            check_compiles(self.model.lm)
            compile_layers(self.model)
        if streams:
            stream_layers(self.model)
        self.engine = make_engine(self.model, weights, self.ranks, config)

    def _add_adapters(self) -> dict[str, Tensor]:
        """Put adapters into the model; returns their values."""
        return add_adapters(self.model.lm, self.config.lora, self.policies)

    def estimated_costs(self) -> PassCosts:
        """Costs of passes by the model's size, the same in every run."""
        return PassCosts.estimated(
            self.engine.split_sizes, self.ranks.device.type, num_parameters=self.size.num_parameters,
            num_layers=self.size.num_layers, width=self.size.width,
            element_bytes=getattr(torch, self.config.dtype).itemsize,
        )  # fmt: skip

    def split_by(self, costs: PassCosts) -> None:
        """Choose groups of ranks by these costs from now on (`trainer.sequence_parallel_size=auto`)."""
        self._batcher = replace(self._batcher, costs=costs)

    @contextmanager
    def using(self, policy: str) -> Iterator["PolicyTrainer"]:
        """Have what is done in the block be of this one of several policies. Its optimizer has numbers and a clock of
        its own. Returns the trainer, this one."""
        before = self.policy
        try:
            self._use(policy)
            yield self
        finally:
            self._use(before)

    def _use(self, policy: str) -> None:
        use_adapter(self.model.lm, policy)
        self.policy = policy

    @property
    def num_updates(self) -> int:
        """Number of updates so far, also before this trainer's start; the schedule's clock."""
        return self._num_updates[self.policy]

    @num_updates.setter
    def num_updates(self, count: int) -> None:
        self._num_updates[self.policy] = count

    @property
    def counters(self) -> dict[str, Tensor]:
        """Updates and optimizer steps so far, `[2]` int64: `counters`, or of several policies `counters/<policy>`."""
        found = {}
        for policy in self.policies:
            with self.using(policy):
                found[self._counter(policy)] = torch.tensor([self.num_updates, self.engine.num_optimizer_steps()])
        return found

    def loaded(self, counters: Mapping[str, Tensor]) -> None:
        """Go on with the weights and the optimizer's state that have been read into the engine's pieces, and with these
        counters. Collective."""
        for policy in self.policies:
            with self.using(policy):
                self.num_updates, num_optimizer_steps = counters[self._counter(policy)].tolist()
                self.engine.loaded(num_optimizer_steps)

    def _counter(self, policy: str) -> str:
        return f"counters/{policy}" if len(self.policies) > 1 else "counters"

    def _open(
        self, path: str, dtype: str, attention: str, checkpoint_layers: bool
    ) -> tuple[Any, StartingWeights, int | None]:
        """The model without its weights, the weights, and the longest sequence."""
        lm, weights = open_causal_lm(path, dtype=dtype, attention=attention, checkpoint_layers=checkpoint_layers)
        chunk_mib = self.config.logprob_chunk_mib
        return PolicyModel(lm, temperature=self._temperature, chunk_mib=chunk_mib), weights, max_length(lm)

    def replay_experts(self) -> None:
        """Send the tokens of rows that have `routed_experts` where the engine sent them (`rollout.router_replay`). Call
        it before `check_scores`, which looks at the routers' weights then. Rows share nothing then, as each has records
        of its own. Raises `ConfigError` for a dense model, and where trees are asked for."""
        if self.config.streams_layers:
            raise ConfigError(
                f"trainer.activation_checkpointing=stream: layers are computed in chunks of tokens, and {REPLAY_KEY} "
                "has records of whole rows for them. Leave out one of them."
            )
        if self.sharing == "always":
            raise ConfigError(
                f"{packed_attention.TREES_KEY}=always: with {REPLAY_KEY} each row has records of its own for what it "
                "shares. Leave out one of them."
            )
        self._batcher = replace(self._batcher, sharing="never")
        self.routers = self.routers or Routers(self.model.lm, REPLAY_KEY)
        self.routers.check_weights()

    def attach_vision(self, pictures: PictureCache) -> None:
        """Read the pictures of rows by the model's own processor, and leave special tokens of vision no probability, as
        engines do. Collective."""
        self._batcher = replace(self._batcher, reader=pictures)
        if isinstance(self.model, PolicyModel):
            if has_frozen_tower(self.model.lm):
                pictures.cache_features(FrozenTower(self._features, self.engine.free, self.ranks))
            else:
                pictures.weight = self._tower_cost
            self.model.lm.get_output_embeddings().ban(pictures.token_ids)

    def _features(self, pictures: Pictures) -> Tensor:
        """The vision tower's features of pictures, `[U, E]`. Collective."""
        nothing = torch.zeros(0, dtype=torch.int64, device=self.ranks.device)
        with self._phase("vision tower"):
            features_UE, _ = self.engine.forward(None, nothing, nothing, "none", None, None, False, pictures)
        return features_UE

    def check_scores(self) -> None:
        """Compare log-probabilities of a few tokens with those by the logits of the model's own forward: whatever a
        model does to its logits, the trainer does too. Collective. Raises `ModelError` where they differ, and
        `ConfigError` for routers whose choice cannot be replayed."""
        with self._phase("comparison with the model's own logits"):
            check_scores(self.model, self.engine.forward, getattr(torch, self.config.dtype), self.ranks, self.packs)
        self.engine.free()

    @torch.no_grad()
    def logprobs(self, rows: Rows) -> list[np.ndarray]:
        """Return `[T_i]` float32 for each row: log-probabilities of the response tokens at the sampling temperature.
        Collective.

        Raises `DataError` for a row that does not fit the model.
        """
        return self._by_token(rows, lambda batch: self._scores(batch, "none")[0])

    @torch.no_grad()
    def candidates(self, rows: Rows, count: int) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
        """Return for each row the response's log-probabilities `[T_i]`, and ids (int32) and log-probabilities `[T_i *
        J]` of the `count` = J likeliest tokens in each place. Collective. Raises `DataError`."""
        ids: dict[int, np.ndarray] = {}

        def forward(batch: MicroBatch) -> Tensor:
            logprobs_NJ, ids_NJ = self._scores(batch, "none", likeliest=count)
            if not batch.is_dummy:
                for position, part in zip(batch.rows.tolist(), batching.split_rows(batch, ids_NJ), strict=True):
                    ids[position] = part.astype(np.int32).reshape(-1)
            return logprobs_NJ

        scored = self._by_token(rows, forward)
        own = [np.ascontiguousarray(part.reshape(-1, 1 + count)[:, 0]) for part in scored]
        found = self._of_block(ids)
        every_id = [found[position] for position in range(len(rows))]
        return own, every_id, [part.reshape(-1, 1 + count)[:, 1:].reshape(-1) for part in scored]

    def _scores(self, batch: MicroBatch, entropy: str, likeliest: int = 0) -> tuple[Tensor, Any]:
        """Log-probabilities of the response tokens `[N]`, at the temperatures that they were sampled at, and entropies.
        In a batch with candidates `[N, 1 + J]`, theirs after the token's own. `likeliest`: see `PolicyModel`."""
        temperature: float | Tensor | None = batch.temperature
        if batch.temperatures_N is not None:
            temperature = batch.temperatures_N.view(torch.int32)
        elif temperature == np.float32(self._temperature):  # as rows have it
            temperature = None
        if self.routers is not None:
            self.routers.follow(batch.experts_SLW)
        more: tuple[Any, ...] = () if batch.pictures is None else (False, batch.pictures.to(self.ranks.device))
        if likeliest:
            more = (*(more or (False, None)), likeliest)
        self.engine.split_over(batch.group_size)
        logprobs_N, entropy_N = self.engine.forward(
            batch.input_ids_SL, batch.places, batch.scored, entropy, temperature, batch.blocks, *more
        )
        return batch.per_target(logprobs_N), None if entropy_N is None else batch.per_target(entropy_N)

    def _by_token(self, rows: Rows, forward: Callable[[MicroBatch], Tensor]) -> list[np.ndarray]:
        """Turn `forward`'s `[N]` of each micro-batch into one `[T_i]` float32 for each row. Collective."""
        results: dict[int, np.ndarray] = {}
        for batch in self._all_batches(rows):
            with self._phase("forward without gradient"):
                values_N = forward(batch)
            if not batch.is_dummy:
                results |= zip(batch.rows.tolist(), batching.split_rows(batch, values_N), strict=True)
        self.engine.free()
        self._heap.trim()
        found = self._of_block(results)
        return [found[position] for position in range(len(rows))]

    def seconds_of_pass(self, rows: Rows, size: int) -> float:
        """Run forward and backward of these rows, packed, with the tokens split over groups of `size` ranks, and
        forget the gradients. Returns seconds: of this process's work on a CPU, where ranks share cores, else by the
        clock. Collective; every rank gives as many rows of the same lengths."""
        batch = batching.collate(rows, np.arange(len(rows)), packed=True, reader=self._batcher.reader)
        read = time.process_time if self.ranks.device.type == "cpu" else partial(clock, self.ranks.device)
        started = read()
        with self._phase("trial of passes"):
            self.engine.before_backward(is_last=True)
            self.engine.backward(self._outputs(replace(batch.to(self.ranks.device), group_size=size)).sum() * 0.0)
        seconds = read() - started
        self.model.zero_grad()
        return seconds

    def _outputs(self, batch: MicroBatch) -> Tensor:
        """What the model answers for a micro-batch's response tokens, `[N]`."""
        return self._scores(batch, "none")[0]

    def _of_block(self, values: dict[int, T]) -> dict[int, T]:
        """Values by the positions of rows, those of the block's other ranks among them where these have computed other
        rows. Collective."""
        with self._phase("exchange of rows' values"):
            parts = self.ranks.gather_block(values)
        return {position: value for part in parts for position, value in part.items()}

    def _all_batches(self, rows: Rows) -> list[MicroBatch]:
        """The rows in micro-batches, as many as on any rank. Collective."""
        with self._phase("agreement on micro-batches"):
            return self._batcher.microbatches(rows)

    def update(
        self, rows: Rows, loss: Loss, recorder: TokenRecorder | None = None, version: int | None = None
    ) -> UpdateReport:
        """Run one policy update over the union of all ranks' rows: `num_epochs` passes, each of `num_minibatches`
        optimizer steps. Collective.

        `rows`: `prompt_ids`, `response_ids`, and the columns that `loss` names. Metrics: the loss's own as
        `actor/<name>` (means over minibatches), `actor/entropy|grad_norm|lr|skipped_nonfinite`, and when rows have
        `behavior_logprobs`, `mismatch/…` of tokens sampled under `version`, the trainer's (None: of all), and `lag/…@k`
        of those k versions older. An optimizer step whose gradient norm is not finite is left out and counted:
        weights and optimizer stay as they were. `recorder`: notes each token in the first pass. Raises `DataError`,
        `DataflowError`.
        """
        started = clock(self.ranks.device)
        seconds: dict[str, float] = defaultdict(float)
        inputs, minibatches = self._planned(rows, loss)
        steps = [(epoch, minibatch) for epoch in range(self.num_epochs) for minibatch in minibatches]
        old = self.logprobs(rows) if inputs.takes_old_logprobs and len(steps) > 1 else None
        params = self._own_params()
        seconds["plan"] = clock(self.ranks.device) - started

        ages = TokenAges.of(rows, version, keeps_caches=self.keeps_caches)
        first = UpdateContext(inputs, Tally(len(steps)), old, recorder, ages)
        later = replace(first, recorder=None)
        norms = []
        for number, (epoch, minibatch) in enumerate(steps):
            shared = later if epoch else first
            self._accumulate(minibatch.batches, partial(self._contribution, minibatch, shared, number == 0), seconds)
            norms.append(self._optimizer_step(params, seconds))
        self.num_updates += 1
        metrics = self._metrics(first, minibatches) | self._step_metrics(params, norms)
        return replace(self._report(rows, metrics, seconds, started), norms=tuple(norms))

    def forward_backward(self, rows: Rows, loss: Loss) -> UpdateReport:
        """Run forward and backward over the union of all ranks' rows, in one minibatch; weights stay as they are, and
        gradients add up to those of earlier calls until `optim_step`. Collective. Rows, metrics and errors as of
        `update`, without those of the step."""
        started = clock(self.ranks.device)
        seconds: dict[str, float] = defaultdict(float)
        inputs, minibatches = self._planned(rows, loss, 1)
        seconds["plan"] = clock(self.ranks.device) - started
        shared = UpdateContext(inputs, Tally(), None, None)
        for minibatch in minibatches:
            self._accumulate(minibatch.batches, partial(self._contribution, minibatch, shared, True), seconds)
        self._has_gradients = True
        return self._report(rows, self._metrics(shared, minibatches), seconds, started)

    def optim_step(self, params: AdamParams | None = None) -> dict[str, float]:
        """Step by the gradients since the last step, and clear them. Collective. `params`: numbers of the step; None:
        those of `trainer.optimizer`, whose schedule counts steps. Metrics: those of `update` that are the step's.
        Raises `DataError` where there are no gradients."""
        if not self._has_gradients:
            raise DataError("optim_step: no gradients have been computed since the last step. Call forward_backward.")
        params = params or self._own_params()
        norm = self._optimizer_step(params, defaultdict(float))
        self.num_updates += 1
        return self._step_metrics(params, [norm])

    def _own_params(self) -> AdamParams:
        """The optimizer's numbers as this update's turn in the schedule has them."""
        config = self.config.optimizer_of(self.policy)
        max_updates = math.ceil(self.config.max_steps / self.config.every(self.policy))
        rate = learning_rate(config, self.num_updates, max_updates)
        beta1, beta2 = config.betas
        return AdamParams(rate, beta1, beta2, config.eps, config.weight_decay, config.clip_norm)

    def _planned(self, rows: Rows, loss: Loss, count: int | None = None) -> tuple[LossSignature, list[Minibatch]]:
        """What the loss reads, and the minibatches, `count` or as many as configured. Collective."""
        if not self.trainable:
            raise RuntimeError("this trainer was made with trainable=False; it has no optimizer.")
        inputs = LossSignature.of(loss, rows.names)
        with self._phase(f"update {self.num_updates + 1}, agreement on micro-batches"):
            return inputs, self._batcher.minibatches(rows, inputs, count or self.config.num_minibatches)

    def _metrics(self, shared: UpdateContext, minibatches: list[Minibatch]) -> dict[str, float]:
        """Metrics of the micro-batches, over all ranks. Collective."""
        with self._phase(f"update {self.num_updates}, metrics"):
            shared.tally.add_padding(minibatches)
            return with_shares(shared.tally.reduced(self.ranks), self.metrics_prefix)

    def _step_metrics(self, params: AdamParams, norms: list[float]) -> dict[str, float]:
        return {
            f"{self.metrics_prefix}/lr": params.learning_rate,
            f"{self.metrics_prefix}/grad_norm": sum(norms) / len(norms),
            f"{self.metrics_prefix}/skipped_nonfinite": float(sum(not math.isfinite(norm) for norm in norms)),
        }

    def _report(self, rows: Rows, metrics: dict[str, float], seconds: dict[str, float], started: float) -> UpdateReport:
        seconds["update"] = clock(self.ranks.device) - started
        num_tokens = int(rows.lengths("response_ids").sum()) if len(rows) else 0
        return UpdateReport(metrics, len(rows), num_tokens, dict(seconds))

    def publish(self, directory: str, version: int) -> Publication:
        """Publish a version, and wait until that is done. Collective."""
        self.begin_publishing(directory, version)
        return self.finish_publishing(version, self.ranks.timeout.total_seconds())

    def begin_publishing(self, directory: str, version: int) -> None:
        """Begin to write version `version` under the root `directory`, every rank its shard: the model, or with
        `trainer.lora.publish=adapter` the adapter alone. The weights may change when this returns. Collective."""
        with self._phase(f"publication of version {version}"):
            self.publisher.begin(directory, version)

    def finish_publishing(self, version: int, timeout_s: float) -> Publication:
        """Wait until it is written. On one node it is sealed then; relays between nodes seal it later. May be called
        beside the next update, and again."""
        return self.publisher.finish(version, timeout_s)

    @property
    def publication_bytes(self) -> int:
        """Bytes of one version. Collective where it is asked for before the first."""
        with self._phase("layout of publications"):
            return self.publisher.layout.num_bytes

    def plan_chunks(self, node: str, num_receivers: int) -> ChunkPlan:
        """Publish to other nodes from now on: this rank is on `node`, and so many nodes receive. Collective; returns
        the same plan on every rank."""
        with self._phase("planning of publications"):
            return self.publisher.plan_chunks(node, num_receivers)

    def hash_of_weights(self) -> int:
        """Hash of this rank's part of what is trained (`row_hashes.py`). Collective."""
        pieces = self.engine.adapter_pieces() if self.config.lora.rank else self.engine.pieces()
        with self._phase("hash of the weights"):
            return hash_of_pieces(pieces)

    def _published(self) -> Iterator[Piece]:
        """Pieces that engines are sent. Collective."""
        alone = self.trainable and self.config.lora.publishes_adapter
        return self.engine.adapter_pieces() if alone else self.engine.pieces(stacked=True)

    def try_export(self) -> None:
        """See that what an export has besides the weights can be written. Raises `ModelError`."""
        if self.ranks.rank == 0:
            try_texts(self.engine.model.lm, self.model_path, self.engine_dtype)

    def export(self, directory: str) -> dict[str, int]:
        """Write a HF model directory (safetensors, configuration, tokenizer), in the engines' dtype; return the weight
        files that this rank has written, with their bytes. Several policies get a folder each. `directory`: visible to
        all ranks. Collective. Raises `WeightError`."""
        written: dict[str, int] = {}
        for policy in self.policies:
            folder = f"{policy}/" if len(self.policies) > 1 else ""
            with self._phase("export"), self.using(policy):
                own = export(self.engine, f"{directory}/{folder}", self.model_path, self.engine_dtype)
            written |= {folder + name: num_bytes for name, num_bytes in own.items()}
        return written

    def take_device(self) -> None:
        """Come back to the device after an engine has used it. Does nothing on a CPU."""
        if self.ranks.device.type != "cpu":
            self.engine.take_device()

    def free_device(self) -> None:
        """Release what only computing needs of the device; weights and optimizer states stay. Does nothing on a
        CPU."""
        if self.routers is not None:
            self.routers.follow(None)
        if self.ranks.device.type != "cpu":
            self.engine.free()
            give_back(self.ranks.device)

    def leave_device(self, kept: KeptState = NOTHING_KEPT) -> None:
        """Make room for an engine on the same device, as soon as a checkpoint has copied what it needs. Does nothing on
        a CPU. `kept`: see `TrainEngine`."""
        self._before_weights_change()
        if self.routers is not None:
            self.routers.follow(None)
        if self.ranks.device.type != "cpu":
            self.engine.leave_device(kept)

    def close(self) -> None:
        """Release the engine, and leave the other ranks."""
        self.engine.close()
        self.ranks.leave()

    def _phase(self, name: str) -> AbstractContextManager[None]:
        return phase(name, self.all_ranks, lambda: self.engine.where)

    def _before_weights_change(self) -> None:
        for wait in self.before_weights_change:
            wait()

    def _accumulate(
        self, batches: list[MicroBatch], share: Callable[[MicroBatch], Tensor], seconds: dict[str, float]
    ) -> None:
        """Run forward and backward of each micro-batch: gradients add up in the parameters. `share`: what it adds to
        the loss, `[]` with gradient."""
        for number, batch in enumerate(batches):
            place = f"update {self.num_updates + 1}, micro-batch {number + 1} of {len(batches)}"
            started = clock(self.ranks.device)
            offload = HostActivations(self._activations) if self.config.activation_offload else nullcontext()
            with self._phase(f"{place}, forward"), offload:
                self.engine.before_backward(is_last=number == len(batches) - 1)
                loss = share(batch)
            seconds["forward"] += clock(self.ranks.device) - started
            started = clock(self.ranks.device)
            with self._phase(f"{place}, backward"):
                self.engine.backward(loss)
            seconds["backward"] += clock(self.ranks.device) - started

    def _contribution(self, minibatch: Minibatch, shared: UpdateContext, is_first: bool, batch: MicroBatch) -> Tensor:
        """Run forward of one micro-batch: returns its share of the minibatch's loss, `[]` with gradient. `is_first`:
        weights are still those from before the update."""
        balances = self.routers is not None and self.config.router_aux_loss_coef > 0
        with self.routers.recording() if self.routers and balances else nullcontext():
            logprobs_N, entropy_N = self._scores(batch, "gradient" if shared.inputs.takes_entropy else "value")
        loss = policy_contribution(minibatch, batch, shared, is_first, (logprobs_N, entropy_N))
        if self.routers and balances and not batch.is_dummy:
            num_rows, width = batch.mask_BT.shape
            balance = self.routers.balance(batch.positions_N, batch.slots_N // width, num_rows)
            balance = balance / max(1.0, minibatch.totals.num_sequences)
            shared.tally.of(batch).add("actor/router_balance", balance)
            loss = loss + self.config.router_aux_loss_coef * balance
        return loss

    def _optimizer_step(self, params: AdamParams, seconds: dict[str, float]) -> float:
        """Step, and return the norm before clipping. Where it is not finite, nothing is changed."""
        started = clock(self.ranks.device)
        self._before_weights_change()
        with self._phase(f"update {self.num_updates + 1}, optimizer step"):
            norm = self.engine.optimizer_step(params)
        self._has_gradients = False
        self._heap.trim()
        seconds["optimizer"] += clock(self.ranks.device) - started
        return norm


def policy_contribution(
    minibatch: Minibatch, batch: MicroBatch, shared: UpdateContext, is_first: bool, scores: tuple[Tensor, Tensor]
) -> Tensor:
    """Share of the minibatch's loss, `[]` with gradient. `is_first`: weights are still those from before the update.
    `scores`: log-probabilities and entropies of the response tokens, `[N]` each, or the first `[N, 1 + J]`."""
    inputs, tally, old = shared.inputs, shared.tally.of(batch), shared.old_logprobs
    logprobs_N, entropy_N = scores
    if batch.is_dummy:
        return logprobs_N.sum() * 0.0
    candidates_BTJ = None
    if batch.candidates_NJ is not None:
        candidates_BTJ, logprobs_N = batch.scatter(logprobs_N[:, 1:]), logprobs_N[:, 0]
    logprobs_BT = batch.scatter(logprobs_N)
    old_BT = logprobs_BT.detach()
    if old is not None:
        old_BT = batch.pad([old[position] for position in batch.rows])
    entropy_BT = batch.scatter(entropy_N) if inputs.takes_entropy else None
    available = {"logprobs": logprobs_BT, "entropy": entropy_BT, "old_logprobs": old_BT}
    if candidates_BTJ is not None:
        available[CANDIDATE_LOGPROBS] = candidates_BTJ
    loss, metrics = inputs.call(batch, minibatch.totals, available)
    for name, value in metrics.items():
        tally.add(f"actor/{name}", value)
    num_tokens = max(1.0, minibatch.totals.num_tokens)
    tally.add("actor/entropy", entropy_N.sum() / num_tokens)
    if shared.recorder is not None:
        before_BT = logprobs_BT if is_first else old_BT if old is not None else None
        shared.recorder.add(batch, logprobs_BT, before_BT)
    if is_first and "behavior_logprobs" in batch.columns:
        add_mismatch(tally, logprobs_BT, batch, shared.ages)
    return loss
