"""Why an attempt gets no more turns."""

from typing import Any

from penstock.conf.errors import PenstockError


class LimitReached(PenstockError):
    """The attempt is truncated, unless it goes on with a shorter conversation. `limit`: turns, tokens, context or
    time."""

    def __init__(self, limit: str, text: str = "") -> None:
        super().__init__(text or limit)
        self.limit = limit

    def __reduce__(self) -> tuple[Any, ...]:
        return LimitReached, (self.limit, str(self))


class Rejected(PenstockError):
    """An environment does not want this attempt to be trained, and says why in a word: `raise Rejected("refused")`."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return Rejected, (self.reason, str(self))


class AttemptOver(PenstockError):
    """The attempt has ended: nothing more is sampled for it."""
