"""The processes that drive a run, one after the other, each with an epoch of its own. Pure, with time as an argument.

take ─▶ epoch 1 ─ renew, renew, … silence ─▶ take ─▶ epoch 2 ─ …        an older epoch is refused
                                     └─ for longer than the lease ─▶ over: no process takes it any more
"""

from penstock.conf.errors import TakenOver


class Tenure:
    """Lifecycle: `take` by each process that drives the run; it may then `renew`, until the next one takes it.

    >>> tenure = Tenure(lease_s=60.0)
    >>> first = tenure.take(now=0.0)
    >>> tenure.renew(first, now=50.0)
    >>> tenure.is_over(now=100.0), tenure.is_over(now=120.0)
    (False, True)
    """

    def __init__(self, lease_s: float) -> None:
        """`lease_s`: how long the process that drives the run may be silent."""
        self._lease_s = lease_s
        self.epoch = 0
        """Epoch of the process that drives the run now; 0: none has yet."""
        self._heard = 0.0

    def take(self, now: float) -> int:
        """Give a process that drives the run from now on its epoch."""
        self.epoch += 1
        self._heard = now
        return self.epoch

    def check(self, epoch: int) -> None:
        """Raise `TakenOver` unless the process of that epoch still drives the run."""
        if epoch != self.epoch:
            raise TakenOver(
                "Another process has taken this run over, and goes on with it. This one ends here, and leaves its "
                "actors and its directory to the other."
            )

    def renew(self, epoch: int, now: float) -> None:
        """Note that the process is alive. Raises `TakenOver`."""
        self.check(epoch)
        self._heard = now

    def silent_s(self, now: float) -> float:
        """Seconds since the process that drives the run was heard of."""
        return now - self._heard

    def is_over(self, now: float) -> bool:
        return self.silent_s(now) >= self._lease_s
