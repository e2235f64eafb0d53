"""Calls that may never return, watched: work that has made no progress for too long is left behind with an error.

A collective that lost its partner blocks in a library that knows no deadline. So it runs in a thread of its own, and
the waiting thread can go on. The stuck thread remains until its process ends, which is what the caller's error leads
to.
"""

import threading
import time
from collections.abc import Callable

import torch


def watched(
    action: Callable[[], None],
    *,
    timeout_s: float,
    progress: Callable[[], int],
    alarm: threading.Event,
    device: torch.device,
) -> None:
    """Run `action` in a thread until it ends, or `alarm` is set elsewhere, or `progress()` has not changed for
    `timeout_s` (looked at in eighths of it).

    Raises what `action` raised; `TimeoutError` when it stands still. Returns early, `action` unfinished, on an alarm
    that was set elsewhere: the one that set it knows what happened. `device`: the thread's current one, if it is a GPU.
    """
    call = _Call(action, alarm, device)
    last, moved = progress(), time.monotonic()
    call.start()
    while not alarm.wait(timeout_s / 8):
        if progress() != last:
            last, moved = progress(), time.monotonic()
        elif time.monotonic() - moved > timeout_s:
            raise TimeoutError
    if call.error is not None:
        raise call.error


class _Call(threading.Thread):
    """A daemon thread for the action, so that a stuck one does not keep the process from ending."""

    def __init__(self, action: Callable[[], None], ended: threading.Event, device: torch.device) -> None:
        super().__init__(name="weights", daemon=True)
        self.error: Exception | None = None
        self._action, self._ended, self._device = action, ended, device

    def run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a thread starts on device 0
        try:
            self._action()
        except Exception as error:  # noqa: BLE001 - raised again in the thread that waits
            self.error = error
        finally:
            self._ended.set()
