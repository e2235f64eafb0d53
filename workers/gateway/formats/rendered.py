"""The format that `environment.gateway` names: the tokenizer's own chat template (`template.py`), or one by the package
`renderers`, which has a model family's chat template as code.

The package reads what a family writes token by token, thinking and calls in the family's syntax. It knows which
conversations go on with the tokens that were sampled (its "bridges"). It is used for
`environment.gateway.format=FAMILY`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.conf.environment import GatewayConfig
from penstock.conf.errors import ConfigError, DataError, suggest
from penstock.workers.gateway.formats.answers import Unreadable, checked_calls, split_thinking, strict_json, with_ids
from penstock.workers.gateway.formats.conversation import Format, Message, ParsedAnswer, Tools, tool_call
from penstock.workers.gateway.formats.forced import forced_call
from penstock.workers.gateway.formats.template import TemplateFormat
from penstock.workers.gateway.formats.tool_support import AUTO
from penstock.workers.trajectory import Turn, encodable

TEMPLATE = "template"
"""Name of the format by the tokenizer's own template."""
NO_FAMILIES = ("auto", "custom", "default")
"""Names of `renderers` that are no family: ways to choose one, and the one that never goes on with sampled tokens."""


def make_format(
    tokenizer: Any, config: GatewayConfig, template_kwargs: Mapping[str, Any] | None = None, *, sees: bool = False
) -> Format:
    """Make the format. `template_kwargs`: `model.chat_template_kwargs`. `sees`: conversations may have pictures. Raises
    `ConfigError` for a family that is not known, for pictures in one, or for calls that the template writes in another
    way, `ModelError` for a model that cannot chat."""
    if config.format == TEMPLATE:
        form = TemplateFormat(tokenizer, config.tools, template_kwargs, in_parts=sees)
        if config.tools != AUTO and form.refusal:
            raise ConfigError(form.refusal)
        return form
    if sees:
        raise ConfigError(
            f"environment.gateway.format={config.format}: pictures are written by the model's own chat template alone. "
            "Say template, or rollout.max_pictures=0."
        )
    return RenderedFormat(tokenizer, config.format, template_kwargs)


class RenderedFormat:
    """The format of one tokenizer and a family."""

    refusal = ""

    def __init__(self, tokenizer: Any, family: str, template_kwargs: Mapping[str, Any] | None = None) -> None:
        """`template_kwargs`: of the family, such as enable_thinking. Raises `ConfigError` for a family that is not
        known or is not the tokenizer's, or has no such arguments."""
        self._tokenizer, self._family = tokenizer, family
        self._renderer = _renderer(tokenizer, family, template_kwargs or {})

    def describe_tools(self) -> str:
        return f"calls are read by the package renderers, as {self._family} writes them"

    def prompt_ids(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        return list(self._written(self._renderer.render_ids, encodable(messages), tools, add_generation_prompt=True))

    def next_prompt_ids(
        self, turn: Turn, before: Sequence[Message], new: Sequence[Message], tools: Tools
    ) -> list[int] | None:
        so_far = [*turn.prompt_ids, *turn.output_ids]
        bridge = self._renderer.bridge_to_next_turn
        rendered = self._written(bridge, list(turn.prompt_ids), tools, list(turn.output_ids), encodable(new))
        if rendered is None:
            return None
        ids = list(rendered.token_ids)
        return ids if ids[: len(so_far)] == so_far else None  # it cuts what was sampled after the end of an answer

    def forced(self, tools: Tools, name: str) -> Mapping[str, Any]:
        return forced_call(self._family, tools, name)

    def read(
        self, token_ids: Sequence[int], tools: Tools, prompt_ids: Sequence[int] = (), turn: int = 0
    ) -> ParsedAnswer:
        try:
            parsed = self._renderer.parse_response(list(token_ids), tools=_or_none(tools), prompt_ids=list(prompt_ids))
        except RecursionError:
            return ParsedAnswer(
                {"role": "assistant", "content": self._text(token_ids)}, (), "The call is nested too deeply."
            )
        message: dict[str, Any] = {"role": "assistant"}
        if parsed.reasoning_content is not None:
            message["reasoning_content"] = parsed.reasoning_content
        said = split_thinking(self._text(token_ids))[1] if parsed.tool_calls else parsed.content
        if not (tools and parsed.tool_calls):
            return ParsedAnswer(message | {"content": said})
        found = [_call(call) for call in parsed.tool_calls]
        content, values, problem = checked_calls(parsed.content, found, tools, said)
        calls = with_ids(values, turn)
        message["content"] = content
        if calls:
            message["tool_calls"] = [tool_call(call.id, call.name, call.arguments) for call in calls]
        return ParsedAnswer(message, calls, problem)

    def _written(self, write: Callable[..., Any], first: Any, tools: Tools, *more: Any, **named: Any) -> Any:
        try:
            return write(first, *more, tools=_or_none(encodable(tools)), **named)
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(f"the model's chat format does not take this conversation: {error}.") from error

    def _text(self, token_ids: Sequence[int]) -> str:
        """The text of an answer, without the token that ended it."""
        ends = set(self._renderer.get_stop_token_ids())
        ids = token_ids[:-1] if token_ids and token_ids[-1] in ends else token_ids
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def _renderer(tokenizer: Any, family: str, template_kwargs: Mapping[str, Any]) -> Any:
    try:
        from renderers import base, configs
    except ImportError as error:
        raise ConfigError(
            f"environment.gateway.format={family}: it needs the package renderers: {error}. Install it with "
            "`pip install renderers`, or say template."
        ) from error
    base._populate_registry()
    known = {name for name in base.RENDERER_REGISTRY if name not in NO_FAMILIES}
    if family not in known:
        raise ConfigError(
            f"environment.gateway.format={family}: the package renderers knows no family of this name"
            f"{suggest(family, known)} The families are: {', '.join(sorted(known))}; or say template."
        )
    config = configs.config_from_name(family)
    for name in template_kwargs:
        if name not in (taken := config.template_field_names()):
            raise ConfigError(
                f"model.chat_template_kwargs.{name}: {family} of the package renderers takes no such argument"
                f"{suggest(name, taken)}"
            )
    try:
        config = type(config)(**template_kwargs)
    except ValueError as error:
        raise ConfigError(f"model.chat_template_kwargs={dict(template_kwargs)}: {error}") from error
    try:
        return base.create_renderer(tokenizer, config)
    except (AssertionError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"environment.gateway.format={family}: the model's tokenizer is none of this family: {error}. Say "
            "template, which takes the tokenizer's own chat template."
        ) from error


def _call(parsed: Any) -> Any:
    """A call in the form that `found` takes."""
    if parsed.status != "ok" and parsed.status != "unknown_tool":
        return Unreadable(f"The call cannot be read ({str(parsed.status).replace('_', ' ')}).")
    try:
        arguments = parsed.arguments if isinstance(parsed.arguments, str) else json.dumps(parsed.arguments)
        return {"name": parsed.name, "arguments": strict_json(arguments)}
    except (ValueError, TypeError, RecursionError) as error:
        return Unreadable(f"The arguments of {parsed.name} are no JSON: {error}.")


def _or_none(tools: Tools) -> list[dict[str, Any]] | None:
    return [dict(tool) for tool in tools] or None
