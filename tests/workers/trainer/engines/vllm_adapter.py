"""vLLM's log-probabilities under an adapter, in a process of its own: `python vllm_adapter.py MODEL ADAPTER
TOKEN,TOKEN,...`.

Prints a JSON list: the log-probability of each token after the first.
"""

import json
import sys

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest


def main(model: str, adapter: str, token_ids: list[int]) -> None:
    llm = LLM(model, dtype="float32", enable_lora=True, max_lora_rank=8, max_model_len=64, enforce_eager=True)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    request = LoRARequest("trained", 1, adapter)
    (output,) = llm.generate([{"prompt_token_ids": token_ids}], params, lora_request=request)
    scored = zip(token_ids[1:], output.prompt_logprobs[1:], strict=True)
    print(json.dumps([entry[token].logprob for token, entry in scored]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], [int(word) for word in sys.argv[3].split(",")])
