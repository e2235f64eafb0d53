"""The reasons why an attempt gets no more turns."""

from typing import Any

from penstock.conf.errors import PenstockError


class LimitReached(PenstockError):
    """The error for a limit that was reached: the attempt is truncated, unless it goes on with a shorter conversation.
    `limit`: turns, tokens, context or time."""

    def __init__(self, limit: str, text: str = "") -> None:
        super().__init__(text or limit)
        self.limit = limit

    def __reduce__(self) -> tuple[Any, ...]:
        return LimitReached, (self.limit, str(self))


class Rejected(PenstockError):
    """The error by which an environment keeps an attempt from being trained, with a word for the reason: `raise
    Rejected("refused")`."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return Rejected, (self.reason, str(self))


class AttemptOver(PenstockError):
    """The error for an attempt that has ended: nothing more is sampled for it."""
