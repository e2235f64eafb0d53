"""Keys of attempts: who may come in over HTTP, and to which session a request belongs."""

import secrets

from penstock.workers.gateway.session import Session


class Door:
    """Lifecycle: `admit` an attempt, `session_of` its requests, `dismiss` it; `base_url` is known once a server
    listens."""

    def __init__(self) -> None:
        self.base_url = ""
        """Such as http://127.0.0.1:8000/v1; empty while nobody listens."""
        self._sessions: dict[str, Session] = {}

    def admit(self, session: Session) -> tuple[str, str]:
        """The address, and a key that is this attempt's alone."""
        key = f"ps-{secrets.token_urlsafe(24)}"
        self._sessions[key] = session
        return self.base_url, key

    def session_of(self, key: str) -> Session | None:
        """None: nobody has this key, or not any more."""
        return self._sessions.get(key)

    def dismiss(self, key: str) -> None:
        self._sessions.pop(key, None)
