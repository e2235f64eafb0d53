"""What vLLM is asked where sequences keep their KV cache when weights change (`rollout.on_update=keep`).

A prefix cache cannot be reset while sequences hold its blocks, and so would give later prompts keys and values of older
weights. Therefore

    salt       each prompt's version is the salt of its cached blocks: prompts find blocks of their own version alone
    begin anew sequences without a token when weights come, which wait for room or are being read, get the new salt

So a sequence whose tokens are all of one version has read its prompt under it, and is what the trainer computes. Pure.
"""

from typing import Any

IMAGE = "image"
"""vLLM's name of the modality."""


def unread_requests(processor: Any) -> list[str]:
    """Ids of the requests of vLLM's `OutputProcessor` of which nothing was sampled yet."""
    states = processor.request_states.values()
    return [state.external_req_id for state in states if not state.detokenizer.num_output_tokens()]


def salted(prompt: Any, version: int, *, with_pictures: bool) -> Any:
    """A prompt whose cached prefixes only prompts of the same version find. `with_pictures`: the features of its
    pictures, too. It is rendered, so that vLLM takes it within the call: no weights come in between."""
    more: dict[str, Any] = {"cache_salt": str(version)}
    if with_pictures and "mm_hashes" in prompt:
        more["mm_hashes"] = {IMAGE: [f"{version}/{digest}" for digest in prompt["mm_hashes"][IMAGE]]}
    return {"type": "token", **prompt, **more}


def single_samples(parameters: Any) -> list[Any]:
    """vLLM's parameters of a request for each of its samples alone, as it would make them itself."""
    if parameters.n == 1:
        return [parameters]
    each = [parameters.clone() for _ in range(parameters.n)]
    for index, one in enumerate(each):
        one.n, one.seed = 1, None if parameters.seed is None else parameters.seed + index
    return each
