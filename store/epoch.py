"""The epoch of calls that change something: the number of the command among those that have driven the run.

A command that was stopped and continues after another has taken over its run still has the handles of all actors.
So each actor keeps the newest epoch that it was called with, and does nothing for an older one.
"""

from penstock.conf.errors import TakenOver


class Epoch:
    """The newest epoch that an actor was called with. 0: the run ends with its command, so no other takes it over.

    >>> epoch = Epoch()
    >>> epoch.check(1), epoch.check(2)
    (None, None)
    >>> epoch.check(1)
    Traceback (most recent call last):
    penstock.conf.errors.TakenOver: Another process has taken this run over, and goes on with it...
    """

    def __init__(self) -> None:
        self._newest = 0

    def check(self, epoch: int) -> None:
        """Note the epoch of a call. Raises `TakenOver` if it is older than another's."""
        if epoch < self._newest:
            raise taken_over()
        self._newest = epoch


def taken_over() -> TakenOver:
    """The refusal of a command that does not drive the run any more."""
    return TakenOver(
        "Another process has taken this run over, and goes on with it. This one ends here, and leaves its actors and "
        "its directory to the other."
    )
