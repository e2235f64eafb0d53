"""A server's adapter as a loop sees it: the verbs of a session's policy, over the SDK `tinker`.

    with penstock.Client("http://10.0.0.1:8430", key="tml-…") as run:
        loop(run.policy)                                # what runs in penstock.session, too

Light: neither torch nor Ray, so that a laptop can run it. The SDK is imported when a client opens.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import numpy as np

from penstock.conf.errors import ConfigError, DataError, DeadlineExceeded, NotStarted, PenstockError
from penstock.network.host import bypass_proxy
from penstock.orchestrator.loops.verbs import LoopPolicy, LoopThread, SampleOptions, check_name, loss_call
from penstock.workers.protocols import (
    AdamParams,
    Datum,
    ForwardOutput,
    LossCall,
    SampledTokens,
    SampleOutput,
    Sampling,
    TopTokens,
)

T = TypeVar("T")


class Client:
    """A session on a server (`penstock serve`), with one adapter of its own. Lifecycle: a context manager; leaving it
    ends the session, and what is not saved goes with it.

        with penstock.Client("http://127.0.0.1:8430", rank=16) as run:
            run.policy.forward_backward(data, "importance_sampling")
            run.policy.optim_step(penstock.AdamParams(learning_rate=1e-4))
    """

    def __init__(
        self, url: str, key: str | None = None, rank: int = 32, *, model: str | None = None, seed: int | None = None,
        timeout_s: float = 3600.0,
    ) -> None:  # fmt: skip
        """`key`: the one that the server has printed, or a tenant's; None: `TINKER_API_KEY`. `rank`: of the adapter.
        `model`: name of the server's model; None: the one that it has. `seed`: of the adapter's first weights;
        None: made of counters. `timeout_s`: deadline of each call; the SDK sends a request again until then."""
        self.url, self._rank, self._model, self._seed, self._timeout_s = url, rank, model, seed, timeout_s
        self._key = key or os.environ.get("TINKER_API_KEY", "")
        if not self._key:
            raise ConfigError("key: is missing. Set TINKER_API_KEY to the one that `penstock serve` has printed.")
        self._service: Any = None
        self._thread: LoopThread | None = None
        self._policy: ServedPolicy | None = None

    def __enter__(self) -> Self:
        """Open the session, and make the adapter. Raises `ConfigError` without the SDK, or where the server does not
        take the key; `PenstockError` for what else the server refuses."""
        tinker = _sdk()
        bypass_proxy()
        calls = _Calls(self.url, self._timeout_s)
        self._service = tinker.ServiceClient(base_url=self.url, api_key=self._key)
        self._thread = LoopThread("client")
        try:
            with calls:
                name = self._model or self._service.get_server_capabilities().supported_models[0].model_name
                made = self._service.create_lora_training_client(base_model=name, rank=self._rank, seed=self._seed)
                self._policy = ServedPolicy(self._service, made.result(self._timeout_s), name, calls, self._thread)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    @property
    def policy(self) -> "ServedPolicy":
        """The adapter. Raises `NotStarted` outside of the context."""
        if self._policy is None:
            raise NotStarted("the client is not open: use `with penstock.Client(…) as run`.")
        return self._policy

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        service, self._service, self._policy = self._service, None, None
        if self._thread is not None:
            self._thread.close()
        if service is not None:
            service.__exit__(kind, error, trace)


class ServedPolicy(LoopPolicy):
    """An adapter on a server. Made by `Client`."""

    def __init__(self, service: Any, training: Any, model: str, calls: "_Calls", thread: LoopThread) -> None:
        """`service`, `training`: the SDK's clients. `model`: name of the base model."""
        self._service, self._training, self._model, self._calls, self._thread = service, training, model, calls, thread
        self._sampler: Any = None
        self.version = 0

    def forward(self, data: Sequence[Datum], loss: str | LossCall) -> ForwardOutput:
        return self._of_data(self._training.forward, data, loss)

    def forward_backward(self, data: Sequence[Datum], loss: str | LossCall) -> ForwardOutput:
        return self._of_data(self._training.forward_backward, data, loss)

    def _of_data(self, method: Callable[..., Any], data: Sequence[Datum], loss: str | LossCall) -> ForwardOutput:
        if not data:
            raise DataError("no data is given: pass at least one Datum.")
        call = loss_call(loss)
        sent = [_sdk_datum(datum) for datum in data]
        output = self._calls.done(lambda: method(sent, call.name, dict(call.config) or None))
        logprobs = [np.asarray(one["logprobs"].to_numpy(), np.float32) for one in output.loss_fn_outputs]
        return ForwardOutput(logprobs, {name.removesuffix(":sum"): value for name, value in output.metrics.items()})

    def optim_step(self, params: AdamParams) -> dict[str, float]:
        sent = _sdk().types.AdamParams(**vars(params))
        found = self._calls.done(lambda: self._training.optim_step(sent)).metrics or {}
        return {"actor/lr": params.learning_rate, **{f"actor/{name}": value for name, value in found.items()}}

    def publish(self) -> int:
        self._sampler = self._calls.done(self._training.save_weights_and_get_sampling_client)
        self.version += 1
        return self.version

    def sample_async(
        self, prompt_ids: Sequence[int], num_samples: int = 1, sampling: Sampling | None = None,
        **options: Unpack[SampleOptions],
    ) -> "Future[SampleOutput]":  # fmt: skip
        """Begin to sample, as `LoopPolicy` says it; `sampling` None: `Sampling()`. Before the first `publish`, samples
        come from the base model, which a new adapter is."""
        arguments = _sdk_sample(sampling or Sampling(), options)
        if self._sampler is None:
            self._sampler = self._calls.done(lambda: self._service.create_sampling_client(base_model=self._model))
        prompt = _sdk().types.ModelInput.from_ints([int(token) for token in prompt_ids])
        with self._calls:
            answer = self._sampler.sample(prompt, num_samples, **arguments)
        return self._thread.submit(self._sampled(answer))

    async def _sampled(self, answer: Any) -> SampleOutput:
        with self._calls:
            return _sample_output(await answer.result_async(self._calls.timeout_s))

    def save(self, name: str) -> str:
        path: str = self._calls.done(lambda: self._training.save_state(check_name(name))).path
        return path

    def load(self, path: str) -> None:
        self._calls.done(lambda: self._training.load_state_with_optimizer(path))


class _Calls:
    """The failures of the SDK as Penstock's own, and the deadline of its calls: a context manager around each."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url, self.timeout_s = url, timeout_s

    def done(self, begin: Callable[[], Any]) -> Any:
        """The result of what `begin` begins."""
        with self:
            return begin().result(self.timeout_s)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        tinker = _sdk()
        if isinstance(error, tinker.RequestFailedError) and "user" in str(error.category).lower():
            raise DataError(str(error)) from error
        if isinstance(error, tinker.AuthenticationError):
            raise ConfigError(f"{self._url} does not take this key: pass one of its tenants' (key=…).") from error
        if isinstance(error, TimeoutError):
            raise DeadlineExceeded(f"{self._url} did not answer within {self.timeout_s:g} s (timeout_s).") from error
        if isinstance(error, tinker.TinkerError):
            raise PenstockError(f"{self._url}: {type(error).__name__}: {error}") from error


def _sdk() -> Any:
    """The SDK. Raises `ConfigError` where it is missing."""
    try:
        import tinker
    except ImportError as error:
        raise ConfigError(
            f"penstock.Client speaks to servers by the Tinker SDK ({error}): pip install 'penstock[serve]'."
        ) from None
    return tinker


def _sdk_datum(datum: Datum) -> Any:
    if datum.pictures is not None:
        raise DataError("a server reads text alone: leave out the datum's pictures.")
    types = _sdk().types
    inputs = {name: np.asarray(values, np.float32) for name, values in datum.columns.items()}
    inputs["target_tokens"] = np.asarray(datum.targets, np.int64)
    tokens = np.asarray(datum.token_ids).tolist()
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def _sdk_sample(sampling: Sampling, options: SampleOptions) -> dict[str, Any]:
    """Arguments of the SDK's `sample`. Raises `DataError` for what its protocol has no words for."""
    for name, default in (("min_p", 0.0), ("ignore_eos", False), ("structure", None), ("priority", 0)):
        if getattr(sampling, name) != default:
            raise DataError(f"sampling.{name}: a server does not do it. Leave it out.")
    stop_ids, targets = list(options.get("stop_ids", ())), options.get("target_prompt_ids")
    if stop_ids and sampling.stop:
        raise DataError("a server takes stop_ids or sampling.stop, not both.")
    types = _sdk().types
    params = types.SamplingParams(
        max_tokens=sampling.max_tokens, seed=sampling.seed, temperature=sampling.temperature, top_p=sampling.top_p,
        top_k=sampling.top_k or -1, stop=stop_ids or sampling.stop or None,
    )  # fmt: skip
    return {
        "sampling_params": params,
        "include_prompt_logprobs": options.get("prompt_logprobs", False),
        "topk_prompt_logprobs": options.get("topk_prompt_logprobs", 0),
        "topk_sample_logprobs": options.get("topk_logprobs", 0),
        "target_prompt_logprobs": None if targets is None else types.TensorData.from_numpy(targets),
    }


def _sample_output(answer: Any) -> SampleOutput:
    samples = [
        SampledTokens(list(one.tokens), list(one.logprobs or ()), str(one.stop_reason), _top(one.topk_logprobs_np))
        for one in answer.sequences
    ]
    targets = answer.target_prompt_logprobs
    return SampleOutput(
        samples, answer.prompt_logprobs_np, _top(answer.topk_prompt_logprobs_np),
        None if targets is None else targets.to_numpy(),
    )  # fmt: skip


def _top(found: Any) -> TopTokens | None:
    return None if found is None else TopTokens(found.token_ids, found.logprobs)
