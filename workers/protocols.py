"""What a role promises, whoever plays it. Each has a real implementation and a deterministic fake, held to the same
tests.

The loop that calls an engine is `workers/rollout/worker.py`; the one that calls a trainer is
`workers/trainer/worker.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from penstock.conf.rollout import SamplingConfig
from penstock.store.data.rows import Rows


@dataclass(frozen=True)
class Sampling:
    """The sampling distribution of one request. `temperature=0` is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    """Of the request; sample i uses seed + i. None: not reproducible."""
    structure: Mapping[str, Any] | None = None
    """What a response must be: {json: a schema}, {json_object: true}, {regex: …}, {choice: […]} or {grammar: …}. Tokens
    that would break it are left out of the distribution, and so out of their log-probabilities. vLLM alone does it."""
    priority: int = 0
    """Of requests that wait for an engine, lower ones are served first."""

    @classmethod
    def of(cls, config: SamplingConfig) -> "Sampling":
        return cls(
            config.temperature,
            config.top_p,
            config.top_k,
            config.min_p,
            config.max_tokens,
            tuple(config.stop),
            config.ignore_eos,
        )

    def seeded(self, seed: int | None) -> "Sampling":
        return replace(self, seed=seed)

    def greedy(self) -> "Sampling":
        return replace(self, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=None)


@dataclass(frozen=True)
class Completion:
    """One sampled response. The three lists have one entry a token; the end-of-sequence token, if sampled, is the last
    one."""

    token_ids: list[int]
    logprobs: list[float]
    """Of the sampled tokens, natural log, under the sampling distribution (after temperature and truncation)."""
    versions: list[int]
    """Weight version that each token was sampled under."""
    text: str
    """Without special tokens; without the stop string."""
    finish_reason: str
    """stop (end of sequence or a stop string) or length."""


@dataclass(frozen=True)
class Publication:
    """One version of the weights in node-local shared memory: a directory with `model.safetensors` and
    `manifest.json`."""

    directory: str
    version: int
    num_bytes: int = 0


@dataclass(frozen=True)
class Sampled:
    """What an engine has done so far, to see that it goes on."""

    num_tokens: int
    """Since the start, those of samples in flight included."""
    num_in_flight: int
    """Samples that it decodes. What waits for new weights, or for the device, is not among them."""
    tokens_in_flight: int = 0
    """That those have so far."""
    num_waiting: int = 0
    """Samples among those in flight that wait for room in the engine's own queue."""


class RolloutEngine(Protocol):
    """Samples responses. `generate` may be called concurrently; `load` waits for no sequence to end:
    those in flight go on under the new weights, and their tokens say so in `Completion.versions`."""

    async def start(self) -> None: ...

    async def generate(self, prompt_ids: Sequence[int], num_samples: int, sampling: Sampling) -> list[Completion]: ...

    async def load(self, publication: Publication) -> None:
        """Pause, load, verify checksums and version, resume: it is served from here on. Raises `WeightError`,
        `DeadlineExceeded`."""

    async def version(self) -> int: ...

    def sampled(self) -> Sampled:
        """At any time, at once."""

    async def sleep(self) -> None:
        """Leave the device to others; nothing is in flight. `generate` waits until `wake`; `load` does not."""

    async def wake(self) -> None:
        """The opposite. The weights are those of before, or of a version loaded since."""

    async def close(self) -> None: ...


Loss = Callable[..., Any]
"""`(logprobs, mask, totals, <columns>) -> (loss, metrics)`: see `algorithms/losses/`."""


@dataclass
class UpdateReport:
    """What one rank says of its share of one update. Counts add up over ranks; `metrics` are the batch's on each."""

    metrics: dict[str, float] = field(default_factory=dict)
    """Already reduced over ranks: the same on each, e.g. actor/pg_loss, actor/grad_norm, mismatch/logprob_abs_mean."""
    num_samples: int = 0
    num_tokens: int = 0
    """Response tokens of this rank's rows."""
    seconds: dict[str, float] = field(default_factory=dict)


class Trainer(Protocol):
    """One rank of several that run one program: all get the same calls in the same order, each with its own rows
    (maybe none)."""

    def logprobs(self, rows: Rows) -> list[np.ndarray]:
        """`[T_i]` float32 for each row: log-probabilities of the response tokens under the current weights."""

    def update(self, rows: Rows, loss: Loss, recorder: Any = None) -> UpdateReport:
        """One policy update (`num_minibatches` optimizer steps) over the union of all ranks' rows. `recorder`: is told
        of each token (`trainer/update/token_recorder.py`)."""

    def publish(self, directory: str, version: int) -> Publication:
        """Write the weights into shared memory, each rank its own shard."""
