"""Hands a program to the server of warm workers, and lives as long as the process that is forked for it. Run by the
command that `warm_workers.py` makes, once for each process, so it imports next to nothing: `socket`, `signal` and
`json` would take three times as long as all that is done here.
"""

import _signal
import _socket
import marshal
import os
import select
import sys

SIGKILLED = 137
"""Exit status of who said none."""


def run(path: str, arguments: list[str]) -> int:
    """Hand everything to the server that listens at `path`; the exit status of the process that it forks. The first
    argument is this file where a node of Ray sets up a worker by it."""
    ends_with = [os.pidfd_open(os.getppid())] if arguments[0] == __file__ else []  # its raylet
    files = [int(name) for name in os.listdir("/proc/self/fd")]
    files = sorted(file for file in files if file <= 2 or _is_open(file))
    request = {
        "arguments": arguments, "environment": dict(os.environ), "directory": os.getcwd(), "files": files
    }  # fmt: skip
    server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    try:
        server.connect(path)
    except ConnectionRefusedError:
        with open(path + ".log") as log:  # what the server has printed: a traceback, if it has ended by one
            raise RuntimeError("the server of warm workers has been killed, or ended by this: " + log.read()) from None
    sent = b"".join(file.to_bytes(4, sys.byteorder) for file in files)
    server.sendmsg([marshal.dumps(request)], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, sent)])
    process = int(server.recv(64) or b"0")
    if not process:
        return SIGKILLED
    for number in (_signal.SIGTERM, _signal.SIGINT):
        _signal.signal(number, lambda number, _: os.kill(process, number))
    ended = select.select([server, *ends_with], [], [])[0]
    return int((server in ended and server.recv(64)) or SIGKILLED)


def _is_open(file: int) -> bool:
    """Whether a descriptor is open, and would be open in a program that replaces this one."""
    try:
        return os.get_inheritable(file)
    except OSError:
        return False
