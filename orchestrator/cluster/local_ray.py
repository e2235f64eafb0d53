"""The Ray of a run without RAY_ADDRESS, started by a launcher: a process in a session of its own.

    this process ── a pipe, open until it ends ──▶ launcher ─▶ Ray's daemons ─▶ actors
                 ◀── the address, or what went wrong ──

A terminal and `timeout` signal a process group: Ray is in another, so that a run that gets a signal can ask its actors
to end. The launcher ends Ray when the pipe is closed, also where this process is killed. systemd and Slurm signal every
process: then Ray's daemons end with the run. The launcher says at once that Ray is no more, so that nobody here waits
for it, and ends what is left.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import psutil

from penstock.conf.errors import ResourceError
from penstock.orchestrator.signals import ENDING

START_S = 300.0
"""Deadline in seconds for Ray to start on a busy machine. It has deadlines of its own, which are shorter."""
END_S = 15.0
"""Seconds for Ray to end in order, before it is killed."""
LEAVE_S = 3.0
"""Seconds for processes whose Ray has died to notice it, and to end."""
SOCKET_BYTES = 107
"""Longest path of a socket."""
SOCKET = b"/ray/session_2026-12-31_23-59-59_999999_4194304/sockets/plasma_store"
"""Longest path of Ray's sockets below the temporary directory."""
SHORT = "/tmp"
DAEMONS = ("gcs_server", "raylet")
"""Daemons without which there is no Ray."""


class LocalRay:
    """Lifecycle: made, Ray runs at `address`; `close`. In between Ray may end by itself: `is_over`."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """`options`: those of `ray.init`. Raises `ResourceError`."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True, env={**os.environ, **short_paths(os.environ)},
        )  # fmt: skip
        try:
            self.address = self._started(options)
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise

    def _started(self, options: Mapping[str, Any]) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(options) + "\n")
            self._process.stdin.flush()
        answers = select.poll()
        answers.register(self._process.stdout, select.POLLIN)
        ready = answers.poll(START_S * 1000)
        answer = json.loads((ready and self._process.stdout.readline()) or "{}")
        if "address" not in answer:
            reason = answer.get("failed") or f"it has not answered within {START_S:g} s, or was ended"
            raise ResourceError(f"Ray does not start on this machine: {reason}")
        return str(answer["address"])

    @property
    def is_over(self) -> bool:
        """True once Ray has ended, by itself or by `close`."""
        assert self._process.stdout is not None
        open_end = select.poll()
        open_end.register(self._process.stdout, select.POLLIN)
        return bool(open_end.poll(0))

    def close(self) -> None:
        """End Ray, with all that it has started. A second call changes nothing."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(END_S + 2 * LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # Ray's daemons end with it, and its actors with them
            self._process.wait()


def short_paths(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that have sockets in `/tmp`, where the temporary directory makes their paths longer than the kernel
    takes. Raises `ResourceError` where RAY_TMPDIR names that directory, or Ray cannot use `/tmp`."""
    chosen = environment.get("RAY_TMPDIR") or environment.get("TMPDIR") or SHORT
    if len(os.fsencode(chosen) + SOCKET) <= SOCKET_BYTES:
        return {}
    if environment.get("RAY_TMPDIR") or not os.access(SHORT, os.W_OK):
        raise ResourceError(
            f"{chosen}: Ray's sockets are below this directory, and their paths would be longer than {SOCKET_BYTES} "
            f"bytes. Set RAY_TMPDIR to a directory of at most {SOCKET_BYTES - len(SOCKET)} bytes."
        )
    return {"RAY_TMPDIR": SHORT, "VLLM_RPC_BASE_PATH": environment.get("VLLM_RPC_BASE_PATH", SHORT)}


def main() -> None:
    """Entry of the launcher."""
    if os.getsid(0) != os.getpid():  # it was forked from a process of another session
        os.setsid()
    with os.fdopen(os.dup(1), "w") as answers:  # open as long as Ray runs; its daemons must not have it
        os.dup2(2, 1)
        print(json.dumps(_start(json.loads(sys.stdin.readline()))), file=answers, flush=True)
        runs = _wait_for_end()
    if runs:
        _end_in_order()
    _end_session()


def _start(options: Mapping[str, Any]) -> dict[str, str]:
    """Start Ray. Returns the answer for the process that asked for it."""
    import ray

    try:
        ray.init(address="local", **options)
        return {"address": ray.get_runtime_context().gcs_address}
    except Exception as error:  # noqa: BLE001 - whatever Ray raises is reported
        return {"failed": " ".join(f"{type(error).__name__}: {error}".split())}


def _wait_for_end() -> bool:
    """Wait until Ray is to end. Returns whether it runs still: False if one of its daemons has died, or will: a signal
    that this process hears has been sent to every process."""
    heard, tell = os.pipe()
    signal.signal(signal.SIGINT, lambda *_: None)
    for number in ENDING:
        signal.signal(number, lambda *_: os.write(tell, b"!"))
    daemons = [os.pidfd_open(child.pid) for child in psutil.Process().children() if child.name() in DAEMONS]
    ready, _, _ = select.select([sys.stdin.fileno(), heard, *daemons], [], [])
    return not {heard, *daemons} & set(ready)


def _end_in_order() -> None:
    import ray

    ending = threading.Thread(target=ray.shutdown, daemon=True)
    ending.start()
    ending.join(END_S)


def _end_session() -> None:
    """End all that is left of Ray. Processes that notice by themselves that Ray is gone have some time for it."""
    deadline = time.monotonic() + LEAVE_S
    while (left := _others()) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _others() -> list[psutil.Process]:
    """The other processes of this session."""
    return [process for process in psutil.process_iter() if process.pid != os.getpid() and _is_of_session(process)]


def _is_of_session(process: psutil.Process) -> bool:
    try:
        return os.getsid(process.pid) == os.getpid() and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


if __name__ == "__main__":
    main()
