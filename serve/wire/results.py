"""Encodes results for the Tinker SDK: in protobuf where they have arrays, all others in JSON.

Legend: P prompt tokens, T sampled ones, K per token.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from penstock.serve.wire.messages import JSON, PROTOBUF, messages, tensor_message
from penstock.serve.wire.requests import SampleRequest
from penstock.workers.calls.sample_calls import SampleOutput, TopTokens
from penstock.workers.calls.training_calls import ForwardOutput

FORWARD, SAMPLE, PLAIN = "ForwardBackwardOutput", "SampleResponse", ""
_MASKED = -99999.0
"""Log-probability in a cell of the most likely tokens that says nothing."""


@dataclass(frozen=True)
class Answer:
    """The result of a request, or its failure."""

    body: bytes
    message: str = PLAIN
    """Type of the protobuf message that the body is; empty: it is JSON."""
    is_failure: bool = False

    @property
    def content_type(self) -> str:
        return PROTOBUF if self.message else JSON


def plain(value: Mapping[str, Any]) -> Answer:
    return Answer(json.dumps(value).encode())


def failure(text: str, *, is_users: bool) -> Answer:
    """A failure that the SDK raises at once. `is_users`: whether the request is wrong, and not the server."""
    body = {"error": text, "category": "user" if is_users else "server"}
    return Answer(json.dumps(body).encode(), is_failure=True)


def forward_answer(output: ForwardOutput) -> Answer:
    """`logprobs` of every datum, and the sums as metrics that clients add up (`loss:sum`)."""
    pb = messages()
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for name, value in output.metrics.items():
        message.metrics[f"{name}:sum"] = value
    values = [np.ascontiguousarray(array, "<f4") for array in output.logprobs]
    for trailing, alike in groupby(values, key=lambda value: value.shape[1:]):
        arrays = list(alike)
        ends = np.cumsum([0, *(array.nbytes for array in arrays)])
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(arrays))
        field = record.fields["logprobs"]
        field.data = b"".join(array.tobytes() for array in arrays)
        field.offsets = ends.astype("<i8").tobytes()
        field.dtype = pb.DTYPE_FLOAT32
        field.trailing_shape.extend(trailing)
    return Answer(message.SerializeToString(deterministic=True), FORWARD)


def sample_answer(output: SampleOutput, request: SampleRequest) -> Answer:
    pb = messages()
    message = pb.SampleResponse()
    for sample in output.samples:
        reason = pb.STOP_REASON_LENGTH if sample.finish_reason == "length" else pb.STOP_REASON_STOP
        sequence = message.sequences.add(
            stop_reason=reason, tokens=np.asarray(sample.token_ids, "<i4").tobytes(),
            logprobs=np.asarray(sample.logprobs, "<f4").tobytes(),
        )  # fmt: skip
        if sample.top is not None:
            sequence.topk_sampled_logprobs.CopyFrom(_top(sample.top, 0))
    num_hidden = max(1, len(request.call.prompt_ids) - (request.last_logprobs or len(request.call.prompt_ids)))
    if output.prompt_logprobs is not None:
        told = np.array(output.prompt_logprobs, "<f4")
        told[:num_hidden] = np.nan
        message.prompt_logprobs = told.tobytes()
    if output.top_prompt is not None:
        message.topk_prompt_logprobs.CopyFrom(_top(output.top_prompt, num_hidden))
    if output.target_logprobs is not None and request.call.target_prompt_ids is not None:
        told = np.asarray(output.target_logprobs, np.float32)
        is_there = request.call.target_prompt_ids != -1 if request.is_sparse else None
        message.target_prompt_logprobs.CopyFrom(tensor_message(told, is_there))
    return Answer(message.SerializeToString(deterministic=True), SAMPLE)


def _top(top: TopTokens, num_hidden: int) -> Any:
    """The most likely tokens at each position; the first ones say nothing."""
    token_ids, logprobs = np.array(top.token_ids, "<i4"), np.array(top.logprobs, "<f4")
    token_ids[:num_hidden], logprobs[:num_hidden] = 0, _MASKED
    length, k = token_ids.shape
    return messages().TopkLogprobs(token_ids=token_ids.tobytes(), logprobs=logprobs.tobytes(), k=k, length=length)
