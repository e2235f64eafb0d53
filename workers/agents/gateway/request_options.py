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
NOT_CUT = "the conversation is not cut: send a shorter one."
PENALTIES = "penalties are not supported"
INPUT_ALONE = "is not supported: send the messages as `input`."
SAMPLED_ALONE = "only the log-probabilities of sampled tokens are known (logprobs)."


@dataclass(frozen=True)
class RefusedOption:
    """An option that is refused, unless it has a value that changes nothing."""

    why: str
    harmless: tuple[Any, ...] = ()
    code: str = ""
    """Code of the error, by which Anthropic's client knows what to do without."""


def _alike(names: str, why: str, *harmless: Any) -> dict[str, RefusedOption]:
    """Options that are refused for one reason, their names separated by blanks."""
    return dict.fromkeys(names.split(), RefusedOption(why, harmless))


@dataclass(frozen=True)
class OptionTable:
    """The table of one protocol."""

    honoured: frozenset[str]
    harmless: frozenset[str]
    refused: Mapping[str, RefusedOption]
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
    **_alike("frequency_penalty presence_penalty", f"{PENALTIES}: they would change what the policy is trained on.", 0),
    **_alike("repetition_penalty length_penalty", f"{PENALTIES}.", 1),
    **_alike("logit_bias repetition_detection mm_payload vllm_xargs", NOT_SUPPORTED),
    **_alike("media_io_kwargs mm_processor_kwargs", NOT_SUPPORTED),
    **_alike("bad_words allowed_token_ids", TRAINED),
    "min_tokens": RefusedOption(TRAINED, (0,)),
    **_alike("watermarking use_beam_search", TRAINED, False),
    "thinking_token_budget": RefusedOption("thinking is bounded by max_tokens alone."),
    "stop_token_ids": RefusedOption("is not supported: name what ends an answer as text."),
    "include_stop_str_in_output": RefusedOption(TEXT, (False,)),
    **_alike("skip_special_tokens spaces_between_special_tokens", TEXT, True),
    **_alike("truncate_prompt_tokens truncation_side", NOT_CUT),
    **_alike("prompt_logprobs logprob_token_ids", SAMPLED_ALONE),
    "add_generation_prompt": RefusedOption(CONTINUED, (True,)),
    "continue_final_message": RefusedOption(CONTINUED, (False,)),
    "add_special_tokens": RefusedOption(TEMPLATE, (False,)),
    **_alike("chat_template chat_template_kwargs", TEMPLATE),
    "documents": RefusedOption("is not supported: write them into a message."),
    "echo": RefusedOption(NOT_SUPPORTED, (False,)),
    "include_reasoning": RefusedOption("an answer is given with its thinking.", (True,)),
    "return_mm_kwargs": RefusedOption(NOT_SUPPORTED, (False,)),
}
CHAT = OptionTable(
    _SAMPLING | {
        "messages", "max_tokens", "max_completion_tokens", "stop", "response_format", "parallel_tool_calls", "logprobs",
        "stream_options",
    },
    _HARMLESS | {"return_tokens_as_token_ids"},
    _REFUSED | {
        "n": RefusedOption("there is one answer to a request: send several, side by side.", (1,)),
        "best_of": RefusedOption("there is one answer to a request.", (1,)),
        "modalities": RefusedOption("the policy answers in text alone.", (["text"],)),
        "functions": RefusedOption("is not supported: describe them as `tools`."),
        "function_call": RefusedOption("is not supported: say `tool_choice`.", ("none", "auto")),
        "top_logprobs": RefusedOption(SAMPLED_ALONE, (0,)),
        **_alike("audio prediction web_search_options", NOT_SUPPORTED),
        **_alike("return_token_ids return_token_offsets", "tokens are told by logprobs alone.", False),
        "return_prompt_text": RefusedOption(NOT_SUPPORTED, (False,)),
        "routed_experts_prompt_start": RefusedOption(NOT_SUPPORTED, (0,)),
    },
    frozenset({"reasoning_effort", "verbosity"}),
)  # fmt: skip
RESPONSES = OptionTable(
    _SAMPLING | {
        "input", "instructions", "max_output_tokens", "stop", "text", "parallel_tool_calls", "previous_response_id",
        "store",
    },
    (_HARMLESS - {"store"}) | {"stream_options", "max_tool_calls"},
    _REFUSED | {
        **_alike("conversation prompt context_management previous_input_messages", INPUT_ALONE),
        "background": RefusedOption(INPUT_ALONE, (False,)),
        "truncation": RefusedOption(NOT_CUT, ("disabled",)),
        "top_logprobs": RefusedOption("are not given here.", (0,)),
        "enable_response_messages": RefusedOption(NOT_SUPPORTED, (False,)),
        "image": RefusedOption("the policy answers in text alone."),
    },
    frozenset({"reasoning", "include", "access_programs"}),
)  # fmt: skip
MESSAGES = OptionTable(
    _SAMPLING | {
        "messages", "max_tokens", "stop_sequences", "system", "thinking", "output_config", "output_format",
    },
    _HARMLESS | {"cache_control", "workspace_id", "user_profile_id", "inference_geo", "speed", "billing_policy"},
    _REFUSED | {
        **_alike("container mcp_servers context_management compaction", NOT_SUPPORTED),
        "thread": RefusedOption("is not supported: send all messages each time.", code="thread_unsupported_request"),
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
