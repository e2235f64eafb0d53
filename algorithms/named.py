"""Functions by name: `@surrogate`, `@correction` and `@advantage` put them in, and a configuration finds them again.

SURROGATES: Named[Surrogate] = Named("algorithm.surrogate")
surrogate = SURROGATES.register

@surrogate("mine")
def mine(...): ...

SURROGATES.find("mine")
"""

from collections.abc import Callable
from typing import Any, TypeVar

from penstock.conf.errors import ConfigError, suggest

Function = Callable[..., Any]
F = TypeVar("F", bound=Function)


class Named(dict[str, Function]):
    """A mapping of names to functions. `key`: the configuration's key, for messages.

    A name is known where its file has been imported. A process that has not imported a user's file can still run the
    function: `find` takes the function itself in place of its name, and a function travels with the `partial` that
    holds it.
    """

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key

    def register(self, name: str) -> Callable[[F], F]:
        """A decorator that names a function and returns it as it is. Raises `ConfigError` if another function has the
        name; the same one again (a file that is loaded twice) replaces itself."""

        def put(function: F) -> F:
            there = self.get(name)
            if there is not None and _home(there) != _home(function):
                raise ConfigError(
                    f"{self.key}={name}: {_home(function)} takes a name that {_home(there)} has. Choose another one."
                )
            self[name] = function
            return function

        return put

    def find(self, which: str | Function) -> Function:
        """The function of that name, or the function itself. Raises `ConfigError` with the nearest known name."""
        if callable(which):
            return which
        if which not in self:
            raise ConfigError(f"{self.key}={which}: unknown{suggest(str(which), self)}")
        return self[which]


def _home(function: Function) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', function)}"
