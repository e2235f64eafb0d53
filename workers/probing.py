"""Probes: a sequence that an engine scores again, to see that it computes and samples what it is believed to.

    a row of the trainer     ─▶ scored under the same weights: shows other weights, layers, a dtype
    a sample of the engine's ─▶ scored without its caches, at temperature 1: shows another temperature, old keys and
    own, by what it recorded    values, tokens that it did not sample

vLLM's scores of a prompt pass by its prefix cache and the temperature. What they would be at another temperature
follows from the scores of the whole vocabulary, at the last `POSITIONS` tokens.

Legend: T tokens whose log-probability is known, R the last of them, V vocabulary.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.workers.protocols import Completion, SampleCall, SampleOutput, Sampling

POSITIONS = 16
"""Most tokens at which the whole vocabulary is scored."""
NUM_KEPT = 16
"""Samples that are kept, each of another group."""
LEAST_SLOPE = 0.05
"""Least change of a token's log-probability, in nats by a change of the temperature by a factor of e (root mean
square), from which the temperature can be estimated."""
EXPLAINED = 0.5
"""Largest share of the difference that is left where another temperature explains it."""
OTHER_TOKEN = 0.1
"""|Δ log p| of a token that is no rounding in any dtype, and its least ratio to that of all tokens before it."""
OTHER_RATIO = 5.0


@dataclass(frozen=True)
class ProbeRow:
    """A sequence for an engine to score."""

    token_ids: np.ndarray
    """Tokens, int32."""
    logprobs: np.ndarray
    """Log-probabilities of the last tokens at `temperature`, `[T]` float32."""
    temperature: float = 1.0
    policy: str = ""
    """The one of several policies whose it is."""


@dataclass(frozen=True)
class ProbeAnswer:
    """The difference between what is known of a row and what an engine gives it."""

    differences: np.ndarray
    """|Δ log p| of tokens, `[T]` float32; at temperatures other than 1 of the last ones, `[R]`."""
    temperature: float = math.nan
    """The temperature at which the engine's scores are closest to what it recorded, as a multiple of that asked for.
    NaN: not known, or no temperature explains half of the difference."""
    is_doubled: bool = False
    """True if the first token that differs repeats the one before it: it was written twice."""


class RecentSamples:
    """Keeps the newest samples of an engine. Lifecycle: `note` each group, `take` one for a probe."""

    def __init__(self, max_length: int, *, keeps_caches: bool = False) -> None:
        """`max_length`: tokens that the engine has room for (`rollout.max_model_len`). `keeps_caches`: what was under
        way at a load has read on from old keys and values, and is not kept here."""
        self._max_length, self._keeps_caches = max_length, keeps_caches
        self._kept: deque[tuple[Sequence[int], Sampling, Completion]] = deque(maxlen=NUM_KEPT)

    def note(self, prompt_ids: Sequence[int], sampling: Sampling, completions: Sequence[Completion]) -> None:
        """Keep one sample of a group, if it was sampled from the whole distribution: preferably one that has read on
        under newer weights."""
        is_cut = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0 or bool(sampling.structure)
        usable = [one for one in completions if one.token_ids and one.is_finite]
        if self._keeps_caches:
            usable = [one for one in usable if not _crosses(one)]
        if usable and sampling.temperature > 0 and not is_cut:
            self._kept.append((prompt_ids, sampling, max(usable, key=_crosses)))

    def take(self, version: int, most_tokens: int) -> ProbeRow | None:
        """A sample whose last tokens are of a version, for which it has log-probabilities; each is taken once."""
        for crosses in (True, False):
            for one in reversed(self._kept):
                prompt_ids, sampling, completion = one
                length = min(len(prompt_ids) + len(completion.token_ids), self._max_length - 1)
                is_of_version = completion.versions[-1] == version and length > len(prompt_ids)
                if is_of_version and length <= most_tokens and _crosses(completion) == crosses:
                    self._kept.remove(one)
                    token_ids = np.array([*prompt_ids, *completion.token_ids][:length], np.int32)
                    first = completion.versions.index(version)
                    known = np.array(completion.logprobs[first : length - len(prompt_ids)], np.float32)
                    row = ProbeRow(token_ids, known, sampling.temperature, sampling.policy)
                    return row if len(known) else None
        return None


def _crosses(completion: Completion) -> bool:
    """True if several versions have sampled it."""
    return completion.versions[0] != completion.versions[-1]


def call_of(row: ProbeRow, is_own: bool) -> SampleCall:
    """The request for a row's log-probabilities. `is_own`: a sample of the engine's own."""
    positions = min(POSITIONS, len(row.logprobs)) if is_own or row.temperature != 1 else 0
    sampling = Sampling(max_tokens=1, seed=0, policy=row.policy)
    return SampleCall(
        row.token_ids.tolist(), 1, sampling, prompt_logprobs=True, vocabulary_positions=positions
    )  # fmt: skip


def compare(row: ProbeRow, output: SampleOutput, is_own: bool) -> ProbeAnswer | None:
    """Compare what is known of a row with an engine's scores. None: at this temperature they cannot be compared, as the
    engine does not score its whole vocabulary."""
    known_T, whole_RV = row.logprobs, output.vocabulary_logprobs
    assert output.prompt_logprobs is not None
    ids_T = row.token_ids[len(row.token_ids) - len(known_T) :]
    if row.temperature == 1:
        found_T = output.prompt_logprobs[len(row.token_ids) - len(known_T) :]
    elif whole_RV is None:
        return None
    else:
        known_T, ids_T = known_T[-len(whole_RV) :], ids_T[-len(whole_RV) :]
        found_T = at_temperature(whole_RV, ids_T, row.temperature)
    differences_T = np.abs(found_T - known_T).astype(np.float32)
    if not is_own:
        return ProbeAnswer(differences_T)
    factor = math.nan
    if whole_RV is not None:
        num = len(whole_RV)
        factor = _explaining_factor(whole_RV, ids_T[-num:], known_T[-num:], row.temperature)
    return ProbeAnswer(differences_T, factor, _is_doubled(ids_T, differences_T))


def _explaining_factor(whole_RV: np.ndarray, ids_R: np.ndarray, known_R: np.ndarray, temperature: float) -> float:
    """See `ProbeAnswer.temperature`."""
    fitted = fitted_temperature(whole_RV, ids_R, known_R, temperature)
    if math.isnan(fitted):
        return math.nan
    before, after = (np.abs(at_temperature(whole_RV, ids_R, each) - known_R).mean() for each in (temperature, fitted))
    return fitted / temperature if after <= EXPLAINED * before else math.nan


def at_temperature(whole_RV: np.ndarray, ids_R: np.ndarray, temperature: float) -> np.ndarray:
    """Log-probabilities of tokens at a temperature, `[R]` float64. `whole_RV`: of the vocabulary at temperature 1."""
    scaled_RV = whole_RV.astype(np.float64) / temperature
    scaled_RV -= scaled_RV.max(-1, keepdims=True)
    chosen_R: np.ndarray = scaled_RV[np.arange(len(ids_R)), ids_R] - np.log(np.exp(scaled_RV).sum(-1))
    return chosen_R


def fitted_temperature(whole_RV: np.ndarray, ids_R: np.ndarray, known_R: np.ndarray, start: float) -> float:
    """The temperature at which the tokens have log-probabilities closest to the known ones (least squares, by Gauss and
    Newton from `start`). NaN where they hardly depend on it."""
    logarithm, step = math.log(start), 1e-4
    for _ in range(4):
        low_R, high_R = (at_temperature(whole_RV, ids_R, math.exp(logarithm + sign * step)) for sign in (-1, 1))
        slope_R = (high_R - low_R) / (2 * step)
        if math.sqrt(float(np.mean(slope_R**2))) < LEAST_SLOPE:
            return math.nan
        missing_R = known_R - at_temperature(whole_RV, ids_R, math.exp(logarithm))
        change = float(slope_R @ missing_R / (slope_R @ slope_R))
        logarithm += max(-1.0, min(1.0, change))
    return math.exp(logarithm)


def _is_doubled(ids_T: np.ndarray, differences_T: np.ndarray) -> bool:
    different = np.flatnonzero(differences_T > OTHER_TOKEN)
    if not len(different) or different[0] == 0:
        return False
    first = int(different[0])
    agrees = bool(differences_T[:first].max() * OTHER_RATIO < differences_T[first])
    return agrees and bool(ids_T[first] == ids_T[first - 1])
