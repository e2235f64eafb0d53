"""Conversion of Penstock's requests to vLLM's, and of vLLM's answers to Penstock's."""

from dataclasses import dataclass
from typing import Any

from penstock.conf.errors import DataError
from penstock.workers.protocols import Completion, Sampled, Sampling
from penstock.workers.weights.publication.reading import MappedWeights
from penstock.workers.weights.transport import Info


def sampling_params(num_samples: int, sampling: Sampling) -> Any:
    """vLLM's parameters for a request. Without stop strings the text is decoded once at the end (`completion_of`), not
    token by token. Raises `DataError` for a structure that vLLM does not know."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    try:
        structure = StructuredOutputsParams(**sampling.structure) if sampling.structure else None
    except (TypeError, ValueError, VLLMValidationError) as error:
        raise DataError(f"structure={sampling.structure!r:.200}: {error}") from None
    return SamplingParams(
        n=num_samples,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_tokens,
        stop=list(sampling.stop) or None,
        ignore_eos=sampling.ignore_eos,
        seed=sampling.seed,
        structured_outputs=structure,
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def completion_of(sample: Any, tokenizer: Any, *, detokenized: bool) -> Completion:
    """The completion of one sample of a request. `detokenized`: vLLM has decoded its text already."""
    token_ids = list(sample.token_ids)
    flat = sample.logprobs
    logprobs = [flat.logprobs[start] for start in flat.start_indices]
    versions = [int(span.version) for span in sample.weight_versions for _ in range(span.start, span.end)]
    text = sample.text if detokenized else tokenizer.decode(token_ids, skip_special_tokens=True)
    return Completion(token_ids, logprobs, versions, text, sample.finish_reason)


def under_way(processor: Any) -> Sampled:
    """Counts of the requests that vLLM's `OutputProcessor` has, without asking for their outputs before the end.
    Samples of a group that are done wait for the others with the group."""
    samples = processor.request_states.values()
    done = [sample for group in processor.parent_requests.values() for sample in group.output_aggregator if sample]
    num_tokens = sum(sample.detokenizer.num_output_tokens() for sample in samples)
    return Sampled(num_tokens + sum(len(sample.token_ids) for sample in done), len(samples))


@dataclass(frozen=True)
class Opened:
    """A publication that is mapped and verified. `mapped`: keeps its file locked; `info`: vLLM's arguments for it."""

    mapped: MappedWeights
    info: Info


def init_request(info: Info) -> Any:
    """vLLM's request that announces weights to a weight-transfer engine."""
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

    return WeightTransferInitRequest(init_info=info)


def update_request(info: Info) -> Any:
    """vLLM's request to a weight-transfer engine to load."""
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    return WeightTransferUpdateRequest(update_info=info)
