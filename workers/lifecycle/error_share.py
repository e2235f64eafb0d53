"""The share of failures that a run bears: of rewards, of attempts, of an engine's samples."""

from collections import deque

from penstock.conf.errors import PenstockError, RewardFailure

EARLY_ERRORS = 20
"""Number of results that, if all of them failed, end a run before the window is full."""


class ErrorShare:
    """Counts results and says when too many have failed.

    Too many are more failures among the last `window` results than `max_share` of a full window, or nothing but
    failures from the start. `max_share=1` never ends a run.
    """

    def __init__(
        self, max_share: float, window: int, what: str = "rewards", key: str = "reward",
        error: type[PenstockError] = RewardFailure,
    ) -> None:  # fmt: skip
        """`what`: name of what is counted, for messages. `key`: the section of the configuration that has
        max_error_share. `error`: raised where too many have failed."""
        self.max_share, self.window, self._what, self._key, self._error = max_share, window, what, key, error
        self.recent: deque[bool] = deque(maxlen=window)
        self.succeeded = self.failed = self.not_counted = 0
        self.last_error = ""

    def add(self, error: str | None) -> None:
        """Count one result: None, or what it failed with."""
        self.recent.append(error is not None)
        if error is not None:
            self.failed += 1
            self.last_error = error
        else:
            self.succeeded += 1

    def leave_out(self) -> None:
        """Note a sample that does not count. A run of nothing else ends, too."""
        self.not_counted += 1

    def check(self) -> None:
        """Raise the error, with the last failure, if too many have failed, or nothing has counted."""
        if self.max_share < 1 and not self.succeeded + self.failed and self.not_counted >= self.window:
            raise self._error(
                f"the first {self.not_counted} {self._what} were all None, which is TRL's word for a sample that does "
                "not count. Check the columns that the function reads."
            )
        failures, seen = sum(self.recent), len(self.recent)
        hopeless = self.max_share < 1 and self.succeeded == 0 and self.failed >= min(EARLY_ERRORS, self.window)
        if hopeless or failures > self.max_share * self.window:
            raise self._error(
                f"{failures} of the last {seen} {self._what} failed, more than "
                f"{self._key}.max_error_share={self.max_share:g} of {self.window} allows. The last one: "
                f"{self.last_error} Mend what fails, or raise {self._key}.max_error_share."
            )
