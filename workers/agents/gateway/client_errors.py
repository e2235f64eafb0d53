"""The message to a client when there is no answer, in the form that its protocol has for errors. Pure.

    400 BadRequest, DataError             what was sent cannot be answered; the message names the field
    400 LimitReached                      code context_length_exceeded: a shorter one may continue;
                                          code limit_reached: the attempt has used up its turns, tokens or time
    401                                   no key, an unknown one, or that of an attempt which has ended
    404, 405, 413                         no such path, no such method, too large a body
    410 AttemptOver                       the attempt ended while the turn was sampled
    500                                   a fault of the gateway's own
    503 any other error of Penstock's     no engine answered

Clients retry by themselves after 503 alone: every other error would be the same the next time.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.conf.errors import AttemptOver, DataError, LimitReached, PenstockError, SamplingError


class BadRequest(PenstockError):
    """The error for a field of a request that cannot be taken as it is."""

    def __init__(self, text: str, field: str = "", code: str = "") -> None:
        """`code`: by which Anthropic's client knows what to do without; empty: it has none for this."""
        super().__init__(f"{field}: {text}" if field else text)
        self.text, self.field, self.code = text, field, code

    def __reduce__(self) -> tuple[Any, ...]:
        return BadRequest, (self.text, self.field, self.code)


@dataclass(frozen=True)
class ClientFailure:
    """The reason why there is no answer."""

    status: int
    """Status of HTTP."""
    code: str
    message: str
    field: str | None = None
    """Field of the request, if one is at fault."""
    details: Mapping[str, Any] | None = None
    """What Anthropic's client reads of the error."""

    @property
    def headers(self) -> dict[str, str]:
        """Headers that tell the clients of OpenAI and Anthropic whether to retry."""
        return {"x-should-retry": "true" if self.status == 503 else "false"}


NO_KEY = ClientFailure(
    401, "invalid_api_key",
    "The request has no key. Send the one that belongs to the attempt (ctx.api_key) as `Authorization: Bearer KEY` or "
    "`x-api-key: KEY`.",
)  # fmt: skip
UNKNOWN_KEY = ClientFailure(
    401, "invalid_api_key",
    "No attempt that is under way has this key. Each attempt has its own (ctx.api_key), which is good until the "
    "attempt ends.",
)  # fmt: skip
_ANTHROPIC = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 405: "invalid_request_error",
    410: "invalid_request_error", 413: "request_too_large", 500: "api_error", 503: "overloaded_error",
}  # fmt: skip


def failure_of(error: BaseException) -> ClientFailure:
    """The failure for an error that a sampler or a translation has raised."""
    text = str(error)
    if isinstance(error, BadRequest):
        details = {"error_code": error.code, "unsupported": [error.field]} if error.code else None
        return ClientFailure(400, "invalid_value", text, error.field or None, details)
    if isinstance(error, LimitReached) and error.limit == "context":
        # Harnesses that make their history shorter look for the code, or for these words.
        return ClientFailure(400, "context_length_exceeded", f"prompt is too long: {text}", "messages")
    if isinstance(error, LimitReached):
        return ClientFailure(400, "limit_reached", f"limit of {error.limit} reached: {text}")
    if isinstance(error, AttemptOver):
        return ClientFailure(410, "attempt_over", text)
    if isinstance(error, SamplingError):
        return ClientFailure(400, "invalid_value", text, error.field or None)
    if isinstance(error, DataError):
        return ClientFailure(400, "invalid_value", text)
    if isinstance(error, PenstockError):
        return ClientFailure(503, "no_engine", text)
    return ClientFailure(500, "internal_error", f"{type(error).__name__}: {text}")


def as_openai(failure: ClientFailure) -> dict[str, Any]:
    kind = "server_error" if failure.status >= 500 else "invalid_request_error"
    return {"error": {"message": failure.message, "type": kind, "param": failure.field, "code": failure.code}}


def as_anthropic(failure: ClientFailure) -> dict[str, Any]:
    kind = _ANTHROPIC.get(failure.status, "invalid_request_error")
    shape = {"type": kind, "message": failure.message, "code": failure.code}
    return {"type": "error", "error": shape | ({"details": failure.details} if failure.details else {})}


def error_shape(path: str, headers: Mapping[str, str]) -> Callable[[ClientFailure], Mapping[str, Any]]:
    """The form of errors in answers to any path."""
    is_anthropic = path.startswith("/v1/messages") or "anthropic-version" in headers
    return as_anthropic if is_anthropic else as_openai
