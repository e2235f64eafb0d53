"""A backend in numpy: a softmax bigram model with LoRA adapters, real gradients and AdamW, which can lose its ranks."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from penstock.conf.errors import DataError
from penstock.serve.backend import DeadlyRequest, ModelFacts, RequestFailed, TrainerLost
from penstock.workers.protocols import AdapterState, ForwardOutput, SampledTokens, SampleOutput, TopTokens

VOCABULARY = 16
LAYER = "base_model.model.table.lora_"
NAMES = (f"{LAYER}A.weight", f"{LAYER}B.weight")
_BASE = np.random.default_rng(0).normal(size=(VOCABULARY, VOCABULARY)).astype(np.float32)


@dataclass
class Adapter:
    spec: object
    weights: dict[str, np.ndarray]
    first: dict[str, np.ndarray]
    second: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    steps: int = 0

    @classmethod
    def of(cls, spec, state):
        if state is None:
            draw = np.random.default_rng(spec.seed).normal(size=(spec.rank, VOCABULARY)) / 4
            weights = {NAMES[0]: draw.astype(np.float32), NAMES[1]: np.zeros((VOCABULARY, spec.rank), np.float32)}
            return cls(spec, weights, zeros(weights), zeros(weights))
        parts = {
            kind: {
                name.partition("/")[2]: np.array(value)
                for name, value in state.tensors.items()
                if name.startswith(f"{kind}/")
            }
            for kind in ("weights", "exp_avg", "exp_avg_sq", "gradients")
        }
        first, second = (parts[kind] or zeros(parts["weights"]) for kind in ("exp_avg", "exp_avg_sq"))
        return cls(state.spec, parts["weights"], first, second, parts["gradients"], state.num_steps)

    def state(self):
        kinds = {"weights": self.weights, "exp_avg": self.first, "exp_avg_sq": self.second, "gradients": self.gradients}
        tensors = {f"{kind}/{name}": value.copy() for kind, values in kinds.items() for name, value in values.items()}
        return AdapterState(self.spec, tensors, self.steps)


class FakeBackend:
    """`lose_at`: numbers of calls at which the ranks are lost, before or (`after`) once the call has changed them. A
    tenant may lose them three times."""

    window_s = 600.0

    def __init__(self, lose_at=(), *, is_late=False, delay_s=0.0):
        self.facts = ModelFacts("tiny/bigram", "/nowhere", 64, VOCABULARY, 8)
        self.adapters, self.samplers, self.calls = {}, {}, []
        self.lose_at, self._is_late, self._delay_s = set(lose_at), is_late, delay_s
        self.num_backward = 0
        self.largest_resident = 0
        self.dropped_samplers = []
        self.losses = Counter()

    async def run(self):
        await asyncio.Event().wait()

    async def bring_back(self, tenant, failure):
        assert not self.adapters
        self.losses[tenant] += 1
        if self.losses[tenant] > 3:
            raise DeadlyRequest("ranks were lost again after 3 restarts")

    async def called(self, what, act):
        number = len(self.calls)
        self.calls.append(what)
        await asyncio.sleep(self._delay_s)
        is_lost = number in self.lose_at
        if is_lost and not self._is_late:
            self.lose()
        result = act()
        if is_lost:
            self.lose()
        return result

    def lose(self):
        self.adapters.clear()
        raise TrainerLost("a rank has died")

    async def create_adapter(self, name, spec, state=None):
        def act():
            assert name not in self.adapters
            self.adapters[name] = Adapter.of(spec, state)
            self.largest_resident = max(self.largest_resident, len(self.adapters))

        await self.called(("create", name), act)

    async def drop_adapter(self, name):
        self.adapters.pop(name, None)

    async def forward(self, name, data, loss, *, backward):
        def act():
            adapter = self.adapters[name]
            if "deadly" in loss.config:
                self.lose()
            if "fail" in loss.config:
                self.adapters.clear()
                raise RequestFailed("out of memory")
            if any((datum.targets >= VOCABULARY).any() or (datum.token_ids >= VOCABULARY).any() for datum in data):
                raise DataError(f"a token is beyond the vocabulary of {VOCABULARY}.")
            outputs, total = [], 0.0
            for datum in data:
                logprobs, value, gradients = scored(adapter.weights, datum, loss)
                outputs.append(logprobs)
                total += value
                for key, gradient in gradients.items() if backward else ():
                    adapter.gradients[key] = adapter.gradients.get(key, np.zeros_like(gradient)) + gradient
            self.num_backward += backward
            return ForwardOutput(outputs, {"loss": total})

        return await self.called(("forward", name), act)

    async def optim_step(self, name, params):
        def act():
            adapter = self.adapters[name]
            adapter.steps += 1
            norm = float(np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in adapter.gradients.values())))
            for key, gradient in adapter.gradients.items():
                first = adapter.first[key] = params.beta1 * adapter.first[key] + (1 - params.beta1) * gradient
                second = adapter.second[key] = params.beta2 * adapter.second[key] + (1 - params.beta2) * gradient**2
                step = (first / (1 - params.beta1**adapter.steps)) / (
                    np.sqrt(second / (1 - params.beta2**adapter.steps)) + params.eps
                )
                adapter.weights[key] = (adapter.weights[key] - params.learning_rate * step).astype(np.float32)
                adapter.first[key], adapter.second[key] = first.astype(np.float32), second.astype(np.float32)
            adapter.gradients.clear()
            return {"grad_norm": norm}

        return await self.called(("optim", name), act)

    async def adapter_state(self, name):
        return await self.called(("state", name), lambda: self.adapters[name].state())

    async def publish(self, sampler, state):
        assert sampler not in self.samplers
        assert not any(name.startswith(("exp_avg", "gradients")) for name in state.tensors)
        self.samplers[sampler] = {name.partition("/")[2]: value for name, value in state.tensors.items()}

    async def drop_sampler(self, sampler):
        self.dropped_samplers.append(sampler)
        self.samplers.pop(sampler, None)

    async def sample(self, sampler, call, tenant):
        await asyncio.sleep(self._delay_s)
        weights = self.samplers[sampler] if sampler is not None else None
        logits = _BASE if weights is None else _BASE + (weights[NAMES[1]] @ weights[NAMES[0]]).T
        samples = []
        for index in range(call.num_samples):
            draw, last, ids, logprobs = np.random.default_rng(call.sampling.seed + index), call.prompt_ids[-1], [], []
            reason = "length"
            for _ in range(call.sampling.max_tokens):
                row = log_softmax(logits[last])
                last = int(draw.choice(VOCABULARY, p=np.exp(row) / np.exp(row).sum()))
                ids.append(last)
                logprobs.append(float(row[last]))
                if last in call.stop_ids:
                    reason = "stop"
                    break
            top = top_of(logits, [call.prompt_ids[-1], *ids[:-1]], call.topk_logprobs) if call.topk_logprobs else None
            samples.append(SampledTokens(ids, logprobs, reason, top))
        prompt = np.asarray(call.prompt_ids)
        rows = log_softmax(logits[prompt[:-1]])
        told = np.concatenate([[np.nan], rows[np.arange(len(rows)), prompt[1:]]]).astype(np.float32)
        targets = call.target_prompt_ids
        at = None if targets is None else np.where(targets >= 0, np.take_along_axis(rows, targets.clip(0), 1), 0)
        likely = top_of(logits, [0, *prompt[:-1]], call.topk_prompt_logprobs) if call.topk_prompt_logprobs else None
        return SampleOutput(samples, told if call.prompt_logprobs else None, likely, at)


def zeros(values):
    return {name: np.zeros_like(value) for name, value in values.items()}


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def top_of(logits, tokens, k):
    rows = log_softmax(logits[np.asarray(tokens)])
    ids = np.argsort(-rows, axis=1)[:, :k]
    return TopTokens(ids.astype(np.int32), np.take_along_axis(rows, ids, 1).astype(np.float32))


def scored(weights, datum, loss):
    """Log-probabilities of the targets, the summed loss, and its gradients."""
    a, b = weights[NAMES[0]], weights[NAMES[1]]
    hidden = a.T[datum.token_ids]
    rows = log_softmax(_BASE[datum.token_ids] + hidden @ b.T)
    targets = datum.targets.reshape(len(datum.targets), -1)
    logprobs = np.take_along_axis(rows, targets, 1)
    if loss.name == "cross_entropy":
        factor = datum.columns["weights"].reshape(targets.shape)
        value = float(-(factor * logprobs).sum())
    else:
        old, advantages = (datum.columns[name].reshape(targets.shape) for name in ("logprobs", "advantages"))
        factor = np.exp(logprobs - old) * advantages
        value = float(-factor.sum())
    change = np.exp(rows) * factor.sum(1, keepdims=True)
    np.subtract.at(change, (np.arange(len(rows))[:, None], targets), factor)
    gradient_a = np.zeros_like(a)
    np.add.at(gradient_a.T, datum.token_ids, change @ b)
    gradients = {NAMES[0]: gradient_a, NAMES[1]: (change.T @ hidden).astype(np.float32)}
    return logprobs.reshape(datum.targets.shape).astype(np.float32), value, gradients
