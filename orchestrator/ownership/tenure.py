"""Who drives a run: one process after the other, each with an epoch of its own. Pure, with time as an argument; kept by
`owner_actor.py`.

    take ─▶ epoch 1 ─ renew, renew, … silence ─▶ take ─▶ epoch 2 ─ …        who comes with an older epoch is refused
                                         └─ for longer than the lease ─▶ over: nobody comes any more
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
        """`lease_s`: for how long nobody needs to be heard of."""
        self._lease_s = lease_s
        self.epoch = 0
        """Of who drives the run now; 0: nobody has yet."""
        self._heard = 0.0

    def take(self, now: float) -> int:
        """The epoch of a process that drives the run from now on."""
        self.epoch += 1
        self._heard = now
        return self.epoch

    def check(self, epoch: int) -> None:
        """Raises `TakenOver` unless that one still drives it."""
        if epoch != self.epoch:
            raise TakenOver(
                "Another process has taken this run over, and goes on with it. This one ends here, and leaves its "
                "actors and its directory to the other."
            )

    def renew(self, epoch: int, now: float) -> None:
        """It is there. Raises `TakenOver`."""
        self.check(epoch)
        self._heard = now

    def silent_s(self, now: float) -> float:
        """For how long nobody has been heard of."""
        return now - self._heard

    def is_over(self, now: float) -> bool:
        return self.silent_s(now) >= self._lease_s
