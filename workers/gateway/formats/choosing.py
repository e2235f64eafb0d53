"""The format that `environment.gateway` names."""

from collections.abc import Mapping
from typing import Any

from penstock.conf.environment import GatewayConfig
from penstock.workers.gateway.formats.format import Format
from penstock.workers.gateway.formats.rendered import RenderedFormat
from penstock.workers.gateway.formats.template import TemplateFormat

TEMPLATE = "template"


def make_format(tokenizer: Any, config: GatewayConfig, template_kwargs: Mapping[str, Any] | None = None) -> Format:
    """Make the format. `template_kwargs`: `model.chat_template_kwargs`. Raises `ConfigError` for a family that is not
    known, `ModelError` for a model that cannot chat."""
    if config.format == TEMPLATE:
        return TemplateFormat(tokenizer, config.tools, template_kwargs)
    return RenderedFormat(tokenizer, config.format, template_kwargs)
