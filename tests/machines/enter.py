"""Run a command in the namespaces of another process: `python enter.py PIDFD KINDS DIRECTORY COMMAND …`.

`namespaces.py` starts it, once for every command on a machine. Whoever starts it deals with it as with the command: it
hands on signals, ends as the command ended, and when it is killed, the command is. `tests/warm_workers.py` has its
forks join the namespaces of their callers by `join`.
"""

import ctypes
import os
import signal
import sys
from typing import NoReturn

KINDS = {"mount": 0x20000, "uts": 0x4000000, "ipc": 0x8000000, "pid": 0x20000000, "net": 0x40000000, "time": 0x80}
"""Flags `CLONE_NEW…` of the kernel, by the names that `unshare` gives to its options."""
PR_SET_PDEATHSIG = 1
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
NOT_STARTED = 127
"""Exit status, as a shell has it, of a command that is not there."""

libc = ctypes.CDLL(None, use_errno=True)


def join(process: int, kinds: int) -> None:
    """Enter namespaces of a process. For `pid`, children are in them from now on, this process is not.

    `process`: a descriptor that refers to it (pidfd). `kinds`: the sum of values of `KINDS`.
    """
    if libc.setns(process, kinds):
        number = ctypes.get_errno()
        raise OSError(number, f"entering the namespaces of a process: {os.strerror(number)}")


def _become(directory: str, command: list[str]) -> NoReturn:
    """Become the command, in the child."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        os.chdir(directory)
        os.execvp(command[0], command)
    except OSError as error:
        folder = f"{directory} as the working directory: below /tmp a machine has only what `keep` names"
        print(f"{command[0]} does not start: {error}; with {folder}", file=sys.stderr, flush=True)
        os._exit(NOT_STARTED)


def main(process: int, kinds: int, directory: str, command: list[str]) -> NoReturn:
    try:
        join(process, kinds)
    except OSError as error:
        sys.exit(f"{command[0]} does not start: {error}")
    os.close(process)
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # one that comes before there is whom to forward it to waits
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        _become(directory, command)
    for number in FORWARDED:
        signal.signal(number, lambda number, _: os.kill(child, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
