"""Chat templates as models ship them, read from the packages that have them: TRL's copies of those of Qwen and Llama,
and what `mistral_common` makes for each version of Mistral's tokenizers. With a character tokenizer that has the
family's marks as tokens."""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mistral_common.integrations.chat_templates.template_generator import TemplateConfig, build_chat_template
from mistral_common.tokens.tokenizers.base import TokenizerVersion

from penstock.conf.model import FreshModelConfig
from penstock.workers.agents.gateway.chat_formats import TemplateFormat
from penstock.workers.agents.gateway.turn_sampler import TurnLimits, TurnSampler
from penstock.workers.fresh_model import character_tokenizer
from penstock.workers.protocols import Completion, Sampling

QWEN_MARKS = (
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
    "<tool_response>", "</tool_response>",
)  # fmt: skip
LLAMA_MARKS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
MISTRAL_MARKS = (
    "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CONTENT]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[ARGS]", "[CALL_ID]", "[THINK]",
    "[/THINK]",
)  # fmt: skip
Write = Callable[[str, str], str]
"""A call as the family writes it: of the tool's name and JSON arguments."""


def _trl_templates() -> Path:
    spec = find_spec("trl")
    assert spec is not None, "TRL is not installed: make setup"
    return Path((spec.submodule_search_locations or [""])[0]) / "chat_templates"


TRL_TEMPLATES = sorted(path.stem for path in _trl_templates().glob("*.jinja"))
"""All chat templates of models that TRL has, and those that it has made of them to train with."""
_MARKS = re.compile(r"""<\|"\|>|</?[|｜]?[A-Za-z_][^<>\s{}%'"=]*[|｜]?>|<[|｜][^<>\s{}%'"]+>""")


def trl_template(name: str) -> str:
    return (_trl_templates() / f"{name}.jinja").read_text()


def trl_tokenizer(name: str) -> Any:
    """A character tokenizer with one of TRL's templates, and the marks in it as tokens."""
    template = trl_template(name)
    marks = {mark for mark in _MARKS.findall(template) if "arg_" not in mark and "=" not in mark}
    made = character_tokenizer(FreshModelConfig(words=sorted(marks), max_position_embeddings=100_000))
    made.chat_template = template
    return made


def mistral_template(version: TokenizerVersion, *, spm: bool = False, thinking: bool = False) -> str:
    return build_chat_template(TemplateConfig(version, spm=spm, thinking_support=thinking))


def hermes_call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama_call(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


def mistral_call(name: str, arguments: str, space: str = "") -> str:
    return f'[TOOL_CALLS]{space}[{{"name": "{name}", "arguments": {arguments}, "id": "sV1hLtRz8"}}]'


@dataclass(frozen=True)
class Family:
    read: Callable[[], str]
    """The template."""
    marks: Sequence[str]
    begin: str
    end: str
    """What ends an answer."""
    tools: str
    call: Write
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    thought: str = ""
    """What an answer begins with, where the model thinks."""
    space: str = ""
    """Before what is said: of SentencePiece."""

    def said(self, text: str) -> str:
        return self.thought + self.space + text

    def called(self, arguments: str) -> str:
        return self.thought + self.call("add", arguments)

    @functools.cached_property
    def tokenizer(self) -> Any:
        made = character_tokenizer(FreshModelConfig(words=list(self.marks)))
        made.chat_template, made.bos_token, made.eos_token = self.read(), self.begin, self.end
        return made

    @property
    def form(self) -> TemplateFormat:
        return TemplateFormat(self.tokenizer, self.tools, self.kwargs)

    def text(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=False))

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def sampler(self, texts: Sequence[str]) -> TurnSampler:
        bounds = TurnLimits(max_model_len=100_000, max_tokens=100_000)
        return TurnSampler(Said(self, texts), self.form, Sampling(max_tokens=10_000), bounds)


class Said:
    """Engines that say these texts in turn, and end each, unless it has an end."""

    def __init__(self, family: Family, texts: Sequence[str]) -> None:
        self._family, self._texts = family, iter(texts)

    async def sample(self, prompt_ids: Sequence[int], sampling: Sampling, conversation: object) -> Completion:
        text = next(self._texts)
        ended = text if text.endswith("|>") else text + self._family.end
        ids = self._family.ids(ended)
        return Completion(ids, [-1.0] * len(ids), [0] * len(ids), text, "stop")


def _qwen(name: str, **more: Any) -> Family:
    read = functools.partial(trl_template, name)
    return Family(read, QWEN_MARKS, "<|im_start|>", "<|im_end|>", "hermes", hermes_call, **more)


def _llama(name: str) -> Family:
    read = functools.partial(trl_template, name)
    kwargs = {"date_string": "26 Jul 2024"}
    return Family(read, LLAMA_MARKS, "<|begin_of_text|>", "<|eot_id|>", "llama3_json", llama_call, kwargs)


def _mistral(version: TokenizerVersion, call: Write = mistral_call, **more: Any) -> Family:
    thought = "[THINK]hm[/THINK]" if more.get("thinking") else ""
    read = functools.partial(mistral_template, version, **more)
    space = " " if more.get("spm") else ""
    return Family(read, MISTRAL_MARKS, "<s>", "</s>", "mistral", call, thought=thought, space=space)


def _named(name: str, arguments: str) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{arguments}"


def _named_with_id(name: str, arguments: str) -> str:
    return f"[TOOL_CALLS]{name}[CALL_ID]sV1hLtRz8[ARGS]{arguments}"


V = TokenizerVersion
FAMILIES = {
    "qwen2.5": _qwen("qwen2_5"),
    "qwen3": _qwen("qwen3", thought="<think>\nhm\n</think>\n\n"),
    "qwen3, thinking of nothing": _qwen("qwen3", thought="<think>\n\n</think>\n\n"),
    "qwen3, thinking off": _qwen("qwen3", kwargs={"enable_thinking": False}),
    "qwen3-instruct-2507": _qwen("qwen3_instruct_2507"),
    "llama3.1": _llama("llama3_1"),
    "llama3.2": _llama("llama3_2"),
    "mistral v3": _mistral(V.v3),
    "mistral v3, sentencepiece": _mistral(V.v3, functools.partial(mistral_call, space=" "), spm=True),
    "mistral v7": _mistral(V.v7),
    "mistral v11": _mistral(V.v11, _named_with_id),
    "mistral v13": _mistral(V.v13, _named),
    "mistral v13, thinking": _mistral(V.v13, _named, thinking=True),
}
