"""The keys of attempts: which requests are admitted over HTTP, and to which session each belongs."""

import secrets

from penstock.workers.gateway.session import Session


class Door:
    """Lifecycle: `admit` an attempt, `session_of` its requests, `dismiss` it; `base_url` is known once a server
    listens."""

    def __init__(self) -> None:
        self.base_url = ""
        """The server's URL, such as http://127.0.0.1:8000/v1; empty while no server listens."""
        self._sessions: dict[str, Session] = {}

    def admit(self, session: Session) -> tuple[str, str]:
        """Admit an attempt; return the address, and a key for this attempt alone."""
        key = f"ps-{secrets.token_urlsafe(24)}"
        self._sessions[key] = session
        return self.base_url, key

    def session_of(self, key: str) -> Session | None:
        """The session of a key; None: no attempt has this key, or not any more."""
        return self._sessions.get(key)

    def dismiss(self, key: str) -> None:
        self._sessions.pop(key, None)
