"""A loop with the Tinker SDK, run by the interpreter of each of its versions; prints what it saw as JSON."""

import io
import json
import sys
import tarfile
import urllib.request

import tinker
from tinker import types


def datum(first, length=8, columns=None):
    tokens = [(3 * index + first) % 16 for index in range(length + 1)]
    inputs = {"target_tokens": tokens[1:], **{name: [value] * length for name, value in (columns or {}).items()}}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def weighted(first):
    return datum(first, columns={"weights": 1.0})


def done(value):
    """The value of a future, or of what was one in other versions."""
    return value.result() if hasattr(value, "result") else value


def failure(call):
    try:
        done(call())
    except Exception as error:  # noqa: BLE001 - which one it is, is what is told
        return f"{type(error).__name__}: {error}"
    return ""


def train(service, client, seen):
    steps = []
    for _ in range(5):
        forward = client.forward_backward([weighted(1), weighted(5)], "cross_entropy")
        step = client.optim_step(types.AdamParams(learning_rate=0.1))
        steps.append((forward.result().metrics["loss:sum"], step.result().metrics["grad_norm"]))
    advantages = datum(2, columns={"advantages": 0.5, "logprobs": -2.0})
    output = client.forward_backward([advantages], "importance_sampling").result().loss_fn_outputs
    seen["steps"], seen["shape"] = steps, list(output[0]["logprobs"].to_numpy().shape)
    seen["forward"] = client.forward([weighted(1)], "cross_entropy").result().metrics["loss:sum"]
    seen["unknown_loss"] = failure(lambda: client.forward_backward([weighted(1)], "stable_reinforce"))
    seen["wrong_token"] = failure(lambda: client.forward_backward(
        [types.Datum(model_input=types.ModelInput.from_ints([1, 99]),
                     loss_fn_inputs={"target_tokens": [1, 2], "weights": [1.0, 1.0]})], "cross_entropy"))  # fmt: skip
    seen["after"] = client.forward([weighted(1)], "cross_entropy").result().metrics["loss:sum"]


def sample(service, client, seen):
    prompt, params = types.ModelInput.from_ints([1, 2, 3]), types.SamplingParams(max_tokens=5, seed=7)
    own = done(client.save_weights_and_get_sampling_client())
    out = own.sample(prompt, 2, params, include_prompt_logprobs=True, topk_prompt_logprobs=2).result()
    seen["samples"] = [list(sequence.tokens) for sequence in out.sequences]
    seen["prompt"] = own.compute_logprobs(prompt).result()
    seen["prompt_again"], seen["top"] = out.prompt_logprobs, len(out.topk_prompt_logprobs[1])
    path = client.save_weights_for_sampler("named").result().path
    named = service.create_sampling_client(model_path=path)
    seen["named"] = [list(sequence.tokens) for sequence in named.sample(prompt, 2, params).result().sequences]
    seen["too_many"] = failure(lambda: named.sample(prompt, 5000, params))
    return path


def keep(service, client, named, seen):
    path = client.save_state("kept").result().path
    again = service.create_training_client_from_state_with_optimizer(path)
    seen["restored"] = again.forward([weighted(1)], "cross_entropy").result().metrics["loss:sum"]
    seen["again"] = failure(lambda: client.save_state("kept"))
    rest = service.create_rest_client()
    run = path.split("/")[2]
    seen["rank"] = rest.get_weights_info_by_tinker_path(path).result().lora_rank
    seen["checkpoints"] = sorted(one.checkpoint_id for one in rest.list_checkpoints(run).result().checkpoints)
    seen["runs"] = rest.list_training_runs().result().cursor.total_count
    if hasattr(rest, "get_checkpoint_archive_url_from_tinker_path"):
        url = rest.get_checkpoint_archive_url_from_tinker_path(named).result().url
        with urllib.request.urlopen(url) as answer, tarfile.open(fileobj=io.BytesIO(answer.read())) as tar:
            seen["archive"] = sorted(tar.getnames())
    rest.delete_checkpoint_from_tinker_path(named).result()
    seen["left"] = [one.checkpoint_id for one in rest.list_user_checkpoints().result().checkpoints]
    seen["published"] = failure(lambda: rest.publish_checkpoint_from_tinker_path(path))


def main():
    seen = {"sdk": tinker.__version__}
    service = tinker.ServiceClient()
    seen["models"] = [model.model_name for model in service.get_server_capabilities().supported_models]
    client = service.create_lora_training_client(base_model="tiny/bigram", rank=4, seed=3)
    train(service, client, seen)
    keep(service, client, sample(service, client, seen), seen)
    json.dump(seen, sys.stdout)


main()
