"""The interfaces of the roles, and the plain data of their calls. Each role has a real implementation and a
deterministic fake, held to the same tests.

The loop that calls an engine is `workers/rollout/rollout_worker.py`; the one that calls a trainer is
`workers/trainer/trainer_worker.py`. Servers and sessions train adapters step by step, and sample from them by name:

    forward_backward(data, loss) ─▶ gradients add up ─▶ optim_step(params) ─▶ weights change, gradients are cleared

Legend: T tokens that the model reads for a datum, K targets at each of them (1 for most losses), or K tokens that are
reported at a position; P tokens of a prompt.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any, Protocol

import numpy as np

from penstock.conf.checks import is_utf8
from penstock.conf.errors import DataError, SamplingError, suggest
from penstock.conf.rollout import (
    HIGHEST_TEMPERATURE,
    LARGEST_TOP_K,
    LOWEST_TEMPERATURE,
    RolloutConfig,
    SamplingConfig,
    wrong_stops,
)
from penstock.conf.trainer import LoraConfig
from penstock.conf.weights import WeightsConfig
from penstock.store.data.rows import Rows
from penstock.workers.pictures.prompt_pictures import PromptPictures

STRUCTURES = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
Loss = Callable[..., Any]
"""The type of losses, `(logprobs, mask, totals, <columns>) -> (loss, metrics)`: see `algorithms/losses/`."""
WHOLE = 0
"""The rank of what is no adapter but a whole model."""


@dataclass(frozen=True)
class Sampling:
    """The sampling distribution of one request. `temperature=0` is greedy. Raises `SamplingError` for values that no
    engine can draw from: an engine is asked for nothing that would fail in it."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    """Seed of the request; sample i uses seed + i. None: not reproducible."""
    structure: Mapping[str, Any] | None = None
    """Required form of a response: {json: a schema}, {json_object: true}, {regex: …}, {choice: […]}, {grammar: …}, or
    vLLM's {structural_tag: JSON text}. Tokens that would break it are left out of the distribution, and so out of their
    log-probabilities. vLLM alone does it."""
    priority: int = 0
    """Priority among requests that wait for an engine: lower ones are served first."""
    policy: str = ""
    """Policy that is asked, where several are trained; empty: there is one."""

    def __post_init__(self) -> None:
        self._number("temperature", float, 0, HIGHEST_TEMPERATURE)
        is_drawn = self.temperature == 0 or self.temperature >= LOWEST_TEMPERATURE
        self._need(is_drawn, "temperature", f"must be 0, which is greedy, or at least {LOWEST_TEMPERATURE}.")
        self._number("top_p", float, 0, 1)
        self._need(self.top_p > 0, "top_p", "must be greater than 0: no token would be left.")
        self._number("min_p", float, 0, 1)
        self._number("top_k", int, 0, LARGEST_TOP_K)
        self._number("max_tokens", int, 1)
        self._need(isinstance(self.stop, tuple), "stop", "must be a tuple of texts.")
        wrong = wrong_stops(self.stop)
        self._need(not wrong, "stop", wrong)
        if self.structure is not None:
            is_one = isinstance(self.structure, Mapping) and len(self.structure) == 1
            self._need(is_one and {*self.structure} <= {*STRUCTURES}, "structure", f"is one of {STRUCTURES}.")
            self._need(is_utf8(self.structure), "structure", "must be JSON whose texts can be encoded.")

    def _number(self, name: str, kind: type[int] | type[float], low: float, high: float | None = None) -> None:
        """Check that a value is a number within its bounds, and make it Python's own."""
        value = getattr(self, name)
        called = "a whole number" if kind is int else "a number"
        within = f"of at least {low}" if high is None else f"from {low} to {high}"
        is_number = isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
        is_within = is_number and low <= value and (high is None or value <= high)
        self._need(is_within, name, f"must be {called} {within}.")
        object.__setattr__(self, name, kind(value))

    def _need(self, is_right: bool, name: str, text: str) -> None:
        if not is_right:
            raise SamplingError(f"{name}={getattr(self, name)!r:.100}: {text}", name)

    @classmethod
    def of(cls, config: SamplingConfig) -> "Sampling":
        return cls(
            config.temperature, config.top_p, config.top_k, config.min_p, config.max_tokens, tuple(config.stop),
            config.ignore_eos,
        )  # fmt: skip

    def seeded(self, seed: int | None) -> "Sampling":
        return replace(self, seed=seed)

    def greedy(self) -> "Sampling":
        return replace(self, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=None)


@dataclass(frozen=True)
class Completion:
    """A sampled response. The three lists have one entry a token; the end-of-sequence token, if sampled, is the last
    one."""

    token_ids: list[int]
    logprobs: list[float]
    """Log-probabilities of the sampled tokens, natural log, under the sampling distribution (after temperature and
    truncation)."""
    versions: list[int]
    """Weight version that each token was sampled under."""
    text: str
    """Text without special tokens and without the stop string."""
    finish_reason: str
    """Reason: stop (end of sequence or a stop string) or length."""
    routed_experts: bytes = b""
    """Experts of every token that the engine read, the prompt's first: all but the last one of the response. A record
    each (`routed_experts.py`). Empty without `rollout.router_replay`."""
    num_cached: int | None = None
    """Tokens of the prompt that the engine had in its prefix cache; None: it does not say."""

    @property
    def is_finite(self) -> bool:
        """True if every log-probability is a finite number."""
        return math.isfinite(sum(self.logprobs))


def truncated_by(limit: str) -> str:
    """The name under which samples are counted that a limit has truncated."""
    return f"truncated_by_{limit}"


@dataclass(frozen=True)
class Publication:
    """A version of the weights in node-local shared memory: a directory with `model.safetensors` and
    `manifest.json`."""

    directory: str
    version: int
    num_bytes: int = 0
    checksum: int = 0
    """Sum modulo 2^128 of the hashes of its ranges: of those that one rank wrote, or of all. 0: it is not known."""


@dataclass(frozen=True)
class SamplingProgress:
    """The work of an engine so far, to see that it goes on."""

    num_tokens: int
    """Tokens since the start, those of samples in flight included."""
    num_in_flight: int
    """Samples that it decodes. Those that wait for new weights, or for the device, are not among them."""
    tokens_in_flight: int = 0
    """Tokens that the samples in flight have so far."""
    num_waiting: int = 0
    """Samples among those in flight that wait for room in the engine's own queue."""
    paused_s: float = 0.0
    """Seconds since the start in which samples stood still while weights were exchanged."""
    num_read_again: int = 0
    """Tokens since the start that were prefilled a second time: of samples that lost their KV cache, to new weights or
    for want of room."""
    num_drafted: int = 0
    num_accepted: int = 0
    """Tokens since the start that were drafted, and those of them that were accepted (`rollout.speculation`)."""


@dataclass(frozen=True)
class KvLoad:
    """The load of an engine's KV memory."""

    num_tokens: float
    """Tokens that fit."""
    max_len: int
    """Largest number of tokens of a sequence: `rollout.max_model_len`."""
    usage: float
    """Share of the memory that running samples use, 0 to 1. What is kept of ended ones is free."""
    num_running: int
    """Number of samples that have memory."""
    num_steps: float
    """Decode steps since the start: tokens of a sample that ran all the time."""
    num_preempted: int
    """Samples since the start that had to give their memory to others, and are read again."""


@dataclass(frozen=True)
class AdapterLimits:
    """The room for adapters that an engine serves side by side, by names of their own (`AdapterEngine`)."""

    max_rank: int
    """Largest rank; `WHOLE`: there are whole models in the place of adapters."""
    max_loaded: int
    """Adapters that are ready to be sampled from. The others wait on disk (vLLM) or in host memory (hf)."""
    head: bool = True
    """True if the output layer may have an adapter, too."""


@dataclass(frozen=True)
class EngineSpec:
    """The specification that an engine is made from. Plain data, so that it can be sent through Ray."""

    config: RolloutConfig
    model_path: str = ""
    num_threads: int = 1
    """Number of CPU threads of the forward pass."""
    version: int = 0
    """Version of the weights in `model_path`."""
    transport: str = "shm"
    """Transport of newer weights (`conf/weights.py`). Those that stream are vLLM's alone."""
    adapter: LoraConfig | None = None
    """Kind of the adapters that are published, to be served on top of the weights in `model_path`; None: whole models
    are."""
    policies: tuple[str, ...] = ()
    """Names of the policies of several, each of which has an adapter in a publication; without adapters the one whose
    model the engine has; empty: there is one."""
    phase_timeout_s: float = WeightsConfig.phase_timeout_s
    """Seconds that each phase of a weight sync may take."""
    picture_digest: str | None = None
    """Digest of the processor of the run's pictures (`workers/pictures/`); None: the run is one of text."""
    by_priority: bool = False
    """True if waiting requests of the lowest `Sampling.priority` are served first (vLLM)."""
    tower_is_frozen: bool = False
    """True if all versions see the same in a picture, so that it need not be computed again for each."""
    adapters: AdapterLimits | None = None
    """Room for adapters that come by name, on top of the weights that are published; None: there are none."""
    draft_path: str = ""
    """Path of the model that drafts tokens (`rollout.speculation`); empty: none does."""
    is_probed: bool = False
    """True if it scores a sequence now and then beside as many samples as it decodes (`trainer/probe.py`)."""

    @property
    def first_policy(self) -> str:
        """A policy that the engine has; empty: there is one alone."""
        return next(iter(self.policies), "")

    @property
    def prefix(self) -> str:
        """Beginning of the names of the engine's tensors in a publication of several models."""
        return f"{self.first_policy}/" if self.policies and self.adapter is None else ""

    def check_policy(self, policy: str) -> None:
        """Raise `DataError` for a policy that the engine does not have (`Sampling.policy`)."""
        if policy not in (self.policies or ("",)):
            raise DataError(
                f"policy {policy!r}: the engine has {' and '.join(self.policies) or 'one policy alone'}"
                f"{suggest(policy, self.policies)}"
            )


class RolloutEngine(Protocol):
    """Samples responses. `generate` may be called concurrently; `load` waits for no sequence to end:
    those in flight go on under the new weights, and their tokens say so in `Completion.versions`."""

    async def start(self) -> None: ...

    async def generate(
        self, prompt_ids: Sequence[int], num_samples: int, sampling: Sampling, pictures: PromptPictures | None = None
    ) -> list[Completion]:
        """Sample responses. `pictures`: of the prompt, whose tokens are expanded. Raises `DataError` for a prompt that
        cannot be sampled, `WorkerDied`."""

    async def load(self, publication: Publication) -> None:
        """Verify checksums, pause, load, check the version, resume: it is served from here on. Raises `WeightError`,
        `DeadlineExceeded`."""

    async def version(self) -> int: ...

    def sampled(self) -> SamplingProgress:
        """The engine's work so far. May be called at any time; returns at once."""

    def kv_load(self) -> KvLoad | None:
        """The load of its KV memory; None for an engine whose memory sets no limit, or that does not know it. May be
        called at any time; returns at once."""

    async def nonfinite_weights(self) -> list[str]:
        """Names of weights that are not finite numbers, as the engine has them now. Raises `WeightError` where that
        cannot be found out, `WorkerDied`."""

    async def sleep(self) -> None:
        """Leave the device to others; nothing is in flight. `generate` waits until `wake`; `load` does not."""

    async def wake(self) -> None:
        """Take the device again. `generate` goes on with a version that was loaded since `sleep`, else with the
        previous one, for which an engine that keeps none asleep waits for the next `load`."""

    async def close(self) -> None: ...


@dataclass
class UpdateReport:
    """The report of one rank on its share of one update. Counts add up over ranks; `metrics` are the batch's on
    each."""

    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics, already reduced over ranks: the same on each, e.g. actor/pg_loss, actor/grad_norm,
    mismatch/logprob_abs_mean."""
    num_samples: int = 0
    num_tokens: int = 0
    """Response tokens of this rank's rows."""
    seconds: dict[str, float] = field(default_factory=dict)
    norms: tuple[float, ...] = ()
    """Gradient norm of each optimizer step, before clipping: the same on each rank."""


class Trainer(Protocol):
    """A rank of several that run one program: all get the same calls in the same order, each with its own rows (maybe
    none)."""

    def logprobs(self, rows: Rows) -> list[np.ndarray]:
        """Log-probabilities, `[T_i]` float32 for each row, of the response tokens under the current weights."""

    def update(self, rows: Rows, loss: Loss, recorder: Any = None, version: int | None = None) -> UpdateReport:
        """Run one policy update over the union of all ranks' rows. `recorder`: notes each token
        (`trainer/token_recorder.py`). `version`: of the weights before the update, if known."""

    def using(self, policy: str) -> AbstractContextManager["Trainer"]:
        """The trainer whose updates in the block are of this one of several policies."""

    def publish(self, directory: str, version: int) -> Publication:
        """Write the weights into shared memory, each rank its own shard."""


@dataclass(frozen=True)
class Datum:
    """A sequence, and what its tokens are to be scored for."""

    token_ids: np.ndarray
    """Tokens that the model reads, `[T]` int32."""
    targets: np.ndarray
    """Tokens whose log-probability is asked for after each of them, `[T]` or `[T, K]` int64. Mostly the next tokens."""
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Further inputs of the loss by name, float32, each of the shape of `targets`: `weights`, `advantages`, `logprobs`
    (those at sampling), `clip_low_threshold`, `clip_high_threshold`, `sequence_ratio_mask`."""
    pictures: PromptPictures | None = None


@dataclass(frozen=True)
class LossCall:
    """A loss by its name, with its numbers, for a list of `Datum`: a sum over their targets.

    A datum's columns have a number for each target: `cross_entropy` reads `weights`, 1 where there are none, all others
    also `logprobs`, of the policy that sampled, and `advantages` (formulas: `algorithms/losses/summed.py`).

        columns = {"logprobs": np.array([-1.2], np.float32), "advantages": np.array([0.5], np.float32)}
        datum = Datum(np.array([7], np.int32), np.array([9]), columns)
        run.policy.forward_backward([datum], LossCall("ppo", {"clip_high_threshold": 1.3}))
    """

    name: str
    """`cross_entropy`, `importance_sampling`, `ppo`, `cispo`, `dro` or `gspo`."""
    config: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the loss by name: `clip_low_threshold`, `clip_high_threshold`, `beta`. Others keep their defaults."""


@dataclass(frozen=True)
class ForwardOutput:
    """The result of a forward pass, with or without gradients."""

    logprobs: list[np.ndarray]
    """Log-probabilities of the targets of each datum, float32, of the shape of its `targets`, natural log."""
    metrics: dict[str, float]
    """Sums over all data: `loss` and what else the loss counts."""


@dataclass(frozen=True)
class AdamParams:
    """The numbers of one optimizer step of AdamW (1711.05101)."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """Norm that larger gradients are scaled down to; 0: never."""


@dataclass(frozen=True)
class AdapterSpec:
    """The shape of a LoRA adapter (2106.09685), and the seed of its A. B starts at zero. Or `WHOLE`: all weights of the
    model in the place of an adapter, which start as the base model's."""

    rank: int
    """Rank of A and B; `WHOLE`: there are none, and the model's weights themselves are trained."""
    seed: int = 0
    alpha: int = 32
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    """True if the output layer has an adapter, too."""

    @property
    def is_whole(self) -> bool:
        """True if it is of a whole model, and of no adapter."""
        return self.rank == WHOLE


@dataclass(frozen=True)
class AdapterState:
    """Everything that training an adapter continues from, bit for bit, whole and independent of the number of ranks."""

    spec: AdapterSpec
    tensors: dict[str, np.ndarray]
    """Float32, by `weights/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME` and, where gradients wait for their step,
    `gradients/NAME`. NAME is PEFT's in an adapter's file (`publication/adapter.py`), shapes are of the adapter's own
    rank: `[rank, in]` for A, `[out, rank]` for B. Of a whole model they are its parameters by the names of its
    checkpoint, tied ones once. Without optimizer there are weights alone."""
    num_steps: int = 0
    """Optimizer steps so far, which AdamW's bias correction counts."""

    def weights(self) -> dict[str, np.ndarray]:
        """The weights alone, by their own names."""
        return {name.removeprefix("weights/"): value for name, value in self.tensors.items() if _is_weight(name)}

    def for_sampling(self) -> "AdapterState":
        """The state without optimizer and gradients."""
        return AdapterState(self.spec, {name: value for name, value in self.tensors.items() if _is_weight(name)})


def _is_weight(name: str) -> bool:
    return name.startswith("weights/")


@dataclass(frozen=True)
class SampleCall:
    """A request for samples."""

    prompt_ids: Sequence[int]
    num_samples: int
    sampling: Sampling
    """With a seed, always: a call that is repeated draws the same samples (with the hf engine, to the bit)."""
    stop_ids: Sequence[int] = ()
    """Tokens that end a sample, besides the model's own."""
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    target_prompt_ids: np.ndarray | None = None
    """Tokens whose log-probability after each prompt token is asked for, `[P - 1, K]` int64; -1: none."""
    topk_logprobs: int = 0
    """Most likely tokens to report at each sampled position, under the sampling distribution."""
    pictures: PromptPictures | None = None
    vocabulary_positions: int = 0
    """Last tokens of the prompt, R, at which the log-probabilities of the whole vocabulary are asked for."""


@dataclass(frozen=True)
class TopTokens:
    """The K most likely tokens at each position, best first."""

    token_ids: np.ndarray
    """`[positions, K]` int32."""
    logprobs: np.ndarray
    """`[positions, K]` float32."""


@dataclass(frozen=True)
class SampledTokens:
    token_ids: list[int]
    logprobs: list[float]
    """Under the sampling distribution, natural log."""
    finish_reason: str
    """Reason: stop or length."""
    top: TopTokens | None = None


@dataclass(frozen=True)
class SampleOutput:
    samples: list[SampledTokens]
    prompt_logprobs: np.ndarray | None = None
    """Of each prompt token under the model at temperature 1, `[P]` float32, NaN for the first."""
    top_prompt: TopTokens | None = None
    """At each prompt token, `[P, K]`, under the model at temperature 1; the first row means nothing."""
    target_logprobs: np.ndarray | None = None
    """Of `target_prompt_ids`, of its shape; 0 where it has -1."""
    vocabulary_logprobs: np.ndarray | None = None
    """At the last R tokens of the prompt, under the model at temperature 1, `[R, V]` float32. None also where the
    engine cannot bring so many."""


class AdapterEngine(Protocol):
    """An engine that samples from adapters by their names, besides what every `RolloutEngine` does: `generate` goes on
    with the weights that are published."""

    async def add_adapter(self, name: str, state: AdapterState) -> None:
        """Take an adapter, which stays until it is dropped. Does nothing for a name that is there. Raises `DataError`
        for an adapter of layers or of a rank that the engine does not serve, `WorkerDied`."""

    async def drop_adapter(self, name: str) -> None:
        """Forget an adapter; requests in flight end with it. Does nothing where there is none of that name."""

    def adapters(self) -> list[str]:
        """Names of the adapters, in the order in which they came."""

    async def sample(self, adapter: str | None, call: SampleCall) -> SampleOutput:
        """Sample from an adapter; None: from the weights that are published. A cancelled call ends in the engine, too.
        Raises `UnknownAdapter`, `PromptRefused` and other `DataError` for what cannot be served, `WorkerDied`."""
