"""A typed Python function as a tool's description: its name, its docstring and a JSON schema of its parameters."""

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import TypeAdapter, create_model
from pydantic.errors import PydanticUserError

from penstock.conf.errors import ConfigError


class Described:
    """A function with its description; `arguments` checks the arguments that a model gave."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Describe the function. Raises `ConfigError` if its parameters cannot be described."""
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)
        fields: dict[str, Any] = {}
        hints = typing.get_type_hints(function, include_extras=True)
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
                raise ConfigError(f"tool {self.name}: its parameter {name} has no name that a model could give.")
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[name] = (hints.get(name, Any), default)
        try:
            self._model = create_model(f"{self.name}_arguments", **fields)
            schema = TypeAdapter(self._model).json_schema()
        except PydanticUserError as error:
            raise ConfigError(f"tool {self.name}: its parameters cannot be described: {error}") from error
        self.schema: Mapping[str, Any] = {
            "type": "function",
            "function": {
                "name": self.name,
                "description": inspect.getdoc(function) or "",
                "parameters": _plain(schema),
            },
        }

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Convert the arguments to what the function takes. Raises `ValueError` with what is wrong with each."""
        unknown = given.keys() - self._model.model_fields.keys()
        if unknown:
            raise ValueError(f"{self.name} has no parameter {', '.join(map(repr, sorted(unknown)))}")
        values = self._model(**given)
        return {name: getattr(values, name) for name in self._model.model_fields}


def _plain(schema: Any) -> Any:
    """The schema without the titles that pydantic makes of names."""
    if isinstance(schema, Mapping):
        return {key: _plain(value) for key, value in schema.items() if not (key == "title" and isinstance(value, str))}
    return [_plain(item) for item in schema] if isinstance(schema, list) else schema
