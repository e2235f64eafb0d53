"""The API keys of attempts: which requests are admitted over HTTP, and which attempt each belongs to."""

import secrets

from penstock.workers.gateway.turn_sampler import TurnSampler


class AttemptKeys:
    """Lifecycle: `admit` an attempt, `sampler_of` its requests, `dismiss` it; `base_url` is known once a server
    listens."""

    def __init__(self) -> None:
        self.base_url = ""
        """The server's URL, such as http://127.0.0.1:8000/v1; empty while no server listens."""
        self._samplers: dict[str, TurnSampler] = {}

    def admit(self, sampler: TurnSampler) -> tuple[str, str]:
        """Admit an attempt; return the address, and a key for this attempt alone."""
        key = f"ps-{secrets.token_urlsafe(24)}"
        self._samplers[key] = sampler
        return self.base_url, key

    def sampler_of(self, key: str) -> TurnSampler | None:
        """The sampler of a key; None: no attempt has this key, or not any more."""
        return self._samplers.get(key)

    def dismiss(self, key: str) -> None:
        self._samplers.pop(key, None)
