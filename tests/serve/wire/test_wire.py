"""What the SDK writes is read, and what is written the SDK reads: held against the SDK's own conversions."""

import json

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_proto_response

from penstock.orchestrator.loops.verbs import seed_of
from penstock.serve.sdk_messages import (
    PROTOBUF,
    Body,
    SampleRequest,
    TooLarge,
    adapter_spec,
    decompress,
    forward_answer,
    forward_call,
    numbered,
    optim_call,
    read,
    sample_answer,
    sample_request,
)
from penstock.workers.agents.gateway.client_errors import BadRequest
from penstock.workers.protocols import (
    WHOLE,
    AdamParams,
    AdapterSpec,
    ForwardOutput,
    SampleCall,
    SampledTokens,
    SampleOutput,
    Sampling,
    TopTokens,
)
from tests.amounts import amount

SHAPES = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=5)


def body(fields):
    return read(Body, json.dumps(fields).encode())


def sdk_request(data, loss="cross_entropy", config=None):
    given = types.ForwardBackwardInput(data=data, loss_fn=loss, loss_fn_config=config)
    request = types.ForwardBackwardRequest(forward_backward_input=given, model_id="m", seq_id=3)
    return forward_backward_request_to_proto(request).SerializeToString()


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 2**31))
@settings(max_examples=amount(40), deadline=None)
def test_matrices_of_targets_come_as_they_were_sent(num_tokens, k, seed):
    draw = np.random.default_rng(seed)
    is_there = draw.random((num_tokens, k)) < 0.3
    targets = np.where(is_there, draw.integers(1, 9, (num_tokens, k)), 0)
    weights = np.where(is_there, draw.normal(size=(num_tokens, k)), 0).astype(np.float32)
    import torch

    inputs = {"target_tokens": torch.tensor(targets), "weights": torch.tensor(weights)}
    datum = types.Datum(model_input=types.ModelInput.from_ints(list(range(num_tokens))), loss_fn_inputs=inputs)
    call = forward_call(sdk_request([datum]), PROTOBUF, backward=True)
    np.testing.assert_array_equal(call.data[0].targets, targets)
    np.testing.assert_array_equal(call.data[0].columns["weights"], weights)


def test_a_request_is_known_by_its_content_whatever_the_order_of_its_maps():
    inputs = {"target_tokens": [1, 2], "weights": [1.0, 0.0]}
    chunks = types.ModelInput.from_ints([0, 1])
    orders = (inputs, dict(reversed(inputs.items())))
    found = [numbered(sdk_request([types.Datum(model_input=chunks, loss_fn_inputs=one)]), PROTOBUF)
             for one in orders]  # fmt: skip
    assert found[0] == found[1]
    assert (found[0][0].model_id, found[0][0].seq_id) == ("m", 3)


@pytest.mark.parametrize(("loss", "words"), [("stable_reinforce", "not public"), ("custom", "in the client"),
                                             ("dpo", "no such loss")])  # fmt: skip
def test_a_loss_that_is_not_done_is_named(loss, words):
    datum = types.Datum(model_input=types.ModelInput.from_ints([1]), loss_fn_inputs={"target_tokens": [1]})
    with pytest.raises(BadRequest, match=f"{loss}.*{words}"):
        forward_call(sdk_request([datum], loss), PROTOBUF, backward=True)


def test_inputs_of_another_shape_are_named():
    datum = types.Datum(model_input=types.ModelInput.from_ints([1, 2]),
                        loss_fn_inputs={"target_tokens": [1, 2], "weights": [1.0]})  # fmt: skip
    with pytest.raises(BadRequest, match=r"data\[0\].weights"):
        forward_call(sdk_request([datum]), PROTOBUF, backward=True)


@given(SHAPES, st.integers(0, 2**31))
@settings(max_examples=amount(40), deadline=None)
def test_the_sdk_reads_log_probabilities_of_every_shape(shapes, seed):
    draw = np.random.default_rng(seed)
    arrays = [draw.normal(size=(t, k) if k else (t,)).astype(np.float32) for t, k in shapes]
    answer = forward_answer(ForwardOutput(arrays, {"loss": 1.5}))
    output = deserialize_proto_response(answer.body, types.ForwardBackwardOutput)
    assert output.metrics == {"loss:sum": 1.5}
    for array, told in zip(arrays, output.loss_fn_outputs, strict=True):
        np.testing.assert_array_equal(told["logprobs"].to_numpy(), array)


def test_the_sdk_reads_samples_with_all_that_was_asked_for():
    call = SampleCall([1, 2, 3], 1, Sampling(seed=0), target_prompt_ids=np.array([[4, -1], [5, 6]]))
    top = TopTokens(np.array([[7, 8], [9, 1]], np.int32), np.array([[-1.0, -2.0], [-1.5, -3.0]], np.float32))
    prompt_top = TopTokens(np.array([[0, 0], [1, 2], [3, 4]], np.int32), np.full((3, 2), -1.0, np.float32))
    output = SampleOutput([SampledTokens([5, 6], [-0.5, -0.25], "length", top)],
                          np.array([np.nan, -1.0, -2.0], np.float32), prompt_top,
                          np.array([[-1.0, 0.0], [-2.0, -3.0]]))  # fmt: skip
    for is_sparse in (False, True):
        answer = sample_answer(output, SampleRequest(call, last_logprobs=1, is_sparse=is_sparse))
        told = deserialize_proto_response(answer.body, types.SampleResponse)
        assert told.prompt_logprobs == [None, None, -2.0]
        assert told.topk_prompt_logprobs == [None, None, [(3, -1.0), (4, -1.0)]]
        assert told.sequences[0].tokens == [5, 6]
        assert told.sequences[0].stop_reason == "length"
        assert told.target_prompt_logprobs.to_numpy().tolist() == [[-1.0, 0.0], [-2.0, -3.0]]


def test_numbers_of_the_optimizer_are_adams_and_another_one_is_named():
    assert optim_call(body({"adam_params": {"learning_rate": 0.5}})) == AdamParams(learning_rate=0.5)
    with pytest.raises(BadRequest, match="dimuon"):
        optim_call(body({"optimizer_params": {"type": "dimuon", "learning_rate": 0.1}}))


def test_an_adapter_has_the_seed_and_parts_that_it_is_asked_for():
    made = adapter_spec(body({"lora_config": {"rank": 8, "train_unembed": False}}), 32, seed=5)
    assert made == AdapterSpec(8, 5, train_unembed=False)
    with pytest.raises(BadRequest, match="max_rank"):
        adapter_spec(body({"lora_config": {"rank": 64}}), 32, seed=5)
    whole = adapter_spec(body({"lora_config": {"rank": 64, "train_mlp": True}}), WHOLE, seed=5)
    assert whole == AdapterSpec(WHOLE)
    with pytest.raises(BadRequest, match="this server trains all weights"):
        adapter_spec(body({"lora_config": {"rank": 8, "train_mlp": False}}), WHOLE, seed=5)


def test_samples_have_a_seed_and_room():
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1] * 10}]}
    given = {"prompt": prompt, "sampling_params": {"stop": [3], "top_k": -1}}
    request = sample_request(json.dumps(given).encode(), 16, 9)
    assert (request.call.sampling.max_tokens, request.call.sampling.seed, request.call.stop_ids) == (6, 9, (3,))
    assert seed_of("sample", 1, 2) == seed_of("sample", 1, 2) != seed_of("sample", 1, 3)


def test_a_small_body_that_unpacks_to_a_large_one_is_refused():
    packed = zstandard.ZstdCompressor().compress(bytes(10**6))
    assert decompress(packed, "zstd", 10**6) == bytes(10**6)
    with pytest.raises(TooLarge, match="max_body_mib"):
        decompress(packed, "zstd", 10**6 - 1)
    with pytest.raises(BadRequest, match="no zstd"):
        decompress(b"abc", "zstd", 100)
