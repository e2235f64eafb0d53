"""The options of requests, a table for each protocol: those that are honoured, those that are harmless, as the answer
is the same without them, and those that are refused, as it would not be. Pure.

An option that a table does not list, or lists with no effect here, is returned, so that it is counted and told once.
Tests compare the tables with what the packages `openai`, `anthropic` and vLLM let their clients send.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.workers.agents.gateway.client_requests import Fields

TRAINED = "is not supported: it would change the distribution, and the trainer knows of the run's alone."
NOT_SUPPORTED = "is not supported."
CONTINUED = "an answer cannot be begun for the policy: let a message of the user be the last."
TEMPLATE = "is the run's to choose: set model.chat_template_kwargs."
TEXT = "an answer is given without special tokens and stop strings."


@dataclass(frozen=True)
class Refused:
    """An option that is refused, unless it has a value that changes nothing."""

    why: str
    harmless: tuple[Any, ...] = ()
    code: str = ""
    """Code of the error, by which Anthropic's client knows what to do without."""


@dataclass(frozen=True)
class Options:
    """The table of one protocol."""

    honoured: frozenset[str]
    harmless: frozenset[str]
    refused: Mapping[str, Refused]
    without_effect: frozenset[str] = frozenset()
    """Options that clients send by themselves, and that mean nothing to the policy. They are told like unknown ones."""

    def checked(self, body: Fields) -> tuple[str, ...]:
        """Names of options that have no effect. Raises `BadRequest` for one that is refused."""
        for name, refused in self.refused.items():
            body.refuse(name, refused.why, *refused.harmless, code=refused.code)
        known = self.honoured | self.harmless | self.refused.keys()
        without_effect = (name for name in body.value if name in body and name not in known)
        return (*without_effect, *_nested_without_effect(body))


_SAMPLING = frozenset({
    "model", "temperature", "top_p", "top_k", "min_p", "ignore_eos", "tools", "tool_choice", "stream",
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
})  # fmt: skip
_HARMLESS = frozenset({
    # accounts, caches and queues
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "cache_salt", "priority", "request_id", "session_id", "stream_interval",
    "kv_transfer_params", "ec_transfer_params", "moderation",
    # the attempt has a seed of its own
    "seed",
})  # fmt: skip
_REFUSED = {
    "frequency_penalty": Refused("penalties are not supported: they would change what the policy is trained on.", (0,)),
    "presence_penalty": Refused("penalties are not supported: they would change what the policy is trained on.", (0,)),
    "repetition_penalty": Refused("penalties are not supported.", (1,)),
    "length_penalty": Refused("penalties are not supported.", (1,)),
    "logit_bias": Refused("is not supported."),
    "bad_words": Refused(TRAINED),
    "allowed_token_ids": Refused(TRAINED),
    "min_tokens": Refused(TRAINED, (0,)),
    "watermarking": Refused(TRAINED, (False,)),
    "use_beam_search": Refused(TRAINED, (False,)),
    "repetition_detection": Refused(NOT_SUPPORTED),
    "thinking_token_budget": Refused("thinking is bounded by max_tokens alone."),
    "stop_token_ids": Refused("is not supported: name what ends an answer as text."),
    "include_stop_str_in_output": Refused(TEXT, (False,)),
    "skip_special_tokens": Refused(TEXT, (True,)),
    "spaces_between_special_tokens": Refused(TEXT, (True,)),
    "truncate_prompt_tokens": Refused("the conversation is not cut: send a shorter one."),
    "truncation_side": Refused("the conversation is not cut: send a shorter one."),
    "prompt_logprobs": Refused("only the log-probabilities of sampled tokens are known (logprobs)."),
    "logprob_token_ids": Refused("only the log-probabilities of sampled tokens are known (logprobs)."),
    "add_generation_prompt": Refused(CONTINUED, (True,)),
    "continue_final_message": Refused(CONTINUED, (False,)),
    "add_special_tokens": Refused(TEMPLATE, (False,)),
    "chat_template": Refused(TEMPLATE),
    "chat_template_kwargs": Refused(TEMPLATE),
    "documents": Refused("is not supported: write them into a message."),
    "echo": Refused("is not supported.", (False,)),
    "include_reasoning": Refused("an answer is given with its thinking.", (True,)),
    "media_io_kwargs": Refused(NOT_SUPPORTED),
    "mm_processor_kwargs": Refused(NOT_SUPPORTED),
    "mm_payload": Refused(NOT_SUPPORTED),
    "return_mm_kwargs": Refused(NOT_SUPPORTED, (False,)),
    "vllm_xargs": Refused(NOT_SUPPORTED),
}
CHAT = Options(
    _SAMPLING | {
        "messages", "max_tokens", "max_completion_tokens", "stop", "response_format", "parallel_tool_calls", "logprobs",
        "stream_options",
    },
    _HARMLESS | {"return_tokens_as_token_ids"},
    _REFUSED | {
        "n": Refused("there is one answer to a request: send several, side by side.", (1,)),
        "best_of": Refused("there is one answer to a request.", (1,)),
        "modalities": Refused("the policy answers in text alone.", (["text"],)),
        "functions": Refused("is not supported: describe them as `tools`."),
        "function_call": Refused("is not supported: say `tool_choice`.", ("none", "auto")),
        "top_logprobs": Refused("only the log-probabilities of sampled tokens are known (logprobs).", (0,)),
        "audio": Refused(NOT_SUPPORTED),
        "prediction": Refused(NOT_SUPPORTED),
        "web_search_options": Refused(NOT_SUPPORTED),
        "return_token_ids": Refused("tokens are told by logprobs alone.", (False,)),
        "return_token_offsets": Refused("tokens are told by logprobs alone.", (False,)),
        "return_prompt_text": Refused(NOT_SUPPORTED, (False,)),
        "routed_experts_prompt_start": Refused(NOT_SUPPORTED, (0,)),
    },
    frozenset({"reasoning_effort", "verbosity"}),
)  # fmt: skip
RESPONSES = Options(
    _SAMPLING | {
        "input", "instructions", "max_output_tokens", "stop", "text", "parallel_tool_calls", "previous_response_id",
        "store",
    },
    (_HARMLESS - {"store"}) | {"stream_options", "max_tool_calls"},
    _REFUSED | {
        **dict.fromkeys(
            ("conversation", "prompt", "context_management", "previous_input_messages"),
            Refused("is not supported: send the messages as `input`."),
        ),
        "background": Refused("is not supported: send the messages as `input`.", (False,)),
        "truncation": Refused("the conversation is not cut: send a shorter one.", ("disabled",)),
        "top_logprobs": Refused("are not given here.", (0,)),
        "enable_response_messages": Refused(NOT_SUPPORTED, (False,)),
        "image": Refused("the policy answers in text alone."),
    },
    frozenset({"reasoning", "include", "access_programs"}),
)  # fmt: skip
MESSAGES = Options(
    _SAMPLING | {
        "messages", "max_tokens", "stop_sequences", "system", "thinking", "output_config", "output_format",
    },
    _HARMLESS | {"cache_control", "workspace_id", "user_profile_id", "inference_geo", "speed", "billing_policy"},
    _REFUSED | {
        **dict.fromkeys(("container", "mcp_servers", "context_management", "compaction"), Refused(NOT_SUPPORTED)),
        "thread": Refused("is not supported: send all messages each time.", code="thread_unsupported_request"),
    },
    frozenset({"betas", "diagnostics", "fallbacks", "fallback_credit_token"}),
)  # fmt: skip


def _nested_without_effect(body: Fields) -> Iterator[str]:
    """Names of options inside of others that clients send by themselves, and that mean nothing to the policy."""
    for holder, name in (("thinking", "budget_tokens"), ("output_config", "effort"), ("text", "verbosity")):
        inner = body.raw(holder)
        if isinstance(inner, Mapping) and inner.get(name) is not None:
            yield f"{holder}.{name}"
    if any(tool.get("strict") or _function(tool).get("strict") for tool in _mappings(body.raw("tools"))):
        yield "tools.strict"


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = tool.get("function")
    return inner if isinstance(inner, Mapping) else {}


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    return (one for one in value if isinstance(one, Mapping)) if isinstance(value, list) else iter(())
