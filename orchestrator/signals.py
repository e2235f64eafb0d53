"""Signals that tell a process to end: they are as Ctrl-C.

SIGTERM   schedulers, `ray job stop`
SIGHUP    a terminal that is closed

One may arrive several times: `timeout` sends it to its command, then to the process group, and systemd sends it to
every process, some of which pass it on. What arrives within `SAME_S` is the same one.
"""

import math
import signal
import time

ENDING = (signal.SIGTERM, signal.SIGHUP)
SAME_S = 1.0
"""Seconds within which a signal that arrives again is the same one."""


def ending() -> list[signal.Signals]:
    """Signals that tell this process to end. A SIGHUP that is ignored is none: the command was started by `nohup`."""
    return [number for number in ENDING if signal.getsignal(number) != signal.SIG_IGN]


class Repeats:
    """Tells whether a signal is the one before, which has arrived again."""

    def __init__(self) -> None:
        self._heard = -math.inf

    def __call__(self) -> bool:
        before, self._heard = self._heard, time.monotonic()
        return self._heard < before + SAME_S


class Interrupt:
    """Handler of SIGTERM and SIGHUP: ends the process as Ctrl-C does, once for a signal that arrives several times.

    A shell without job control has what it starts by `&` ignore Ctrl-C, but these signals are meant for this process
    all the same.
    """

    def __init__(self) -> None:
        self._repeats = Repeats()

    def __call__(self, *_: object) -> None:
        if self._repeats():
            return
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.raise_signal(signal.SIGINT)


def heed_end() -> None:
    """Have the signals that tell this process to end be as Ctrl-C."""
    handler = Interrupt()
    for number in ending():
        signal.signal(number, handler)
