"""Seccomp filters as classic BPF programs. Pure: bytes that bubblewrap and `inside.py` hand to the kernel.

A program reads the call's number, architecture and first argument (`struct seccomp_data`, linux/seccomp.h) and returns
what the kernel shall do. Each instruction is a `struct sock_filter`: code, jump if true, jump if false, operand.
"""

import errno
import struct

from penstock.conf.errors import SandboxUnavailable
from penstock.workers.sandbox.syscalls import CLONE, CLONE3, MACHINES, OF_THE_KEEPER, ORDINARY, numbers

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
LOAD_WORD, JUMP_IF_EQUAL, JUMP_IF_ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
"""Offsets in `struct seccomp_data`. The argument's lower half: both machines are little-endian."""
ALLOW, KILL, FAIL = 0x7FFF0000, 0x80000000, 0x00050000
"""What to do with the call, from linux/seccomp.h. `FAIL` takes the error number in its lower half."""
NAMESPACES = 0x7E020000
"""`CLONE_NEWNS`, `NEWCGROUP`, `NEWUTS`, `NEWIPC`, `NEWUSER`, `NEWPID` and `NEWNET` together."""


def program(machine: str, *, keeper: bool) -> bytes:
    """The filter for code of a model, or for the `keeper` of its fence, who may also make and leave namespaces.

    Raises `SandboxUnavailable` for a machine whose system calls are not listed.
    """
    if machine not in MACHINES:
        raise SandboxUnavailable(
            f"sandbox: the system calls of {machine} are not listed, only those of {', '.join(MACHINES)}. Run rewards "
            "that execute code on one of these machines."
        )
    allowed = numbers(ORDINARY + (OF_THE_KEEPER if keeper else ""), machine)
    clone, clone3 = numbers(CLONE, machine), numbers(CLONE3, machine)
    lines = [
        _line(LOAD_WORD, operand=ARCHITECTURE),
        _line(JUMP_IF_EQUAL, 1, 0, AUDIT_ARCH[machine]),
        _line(RETURN, operand=KILL),
        _line(LOAD_WORD, operand=NUMBER),
    ]
    for number in allowed:
        lines += [_line(JUMP_IF_EQUAL, 0, 1, number), _line(RETURN, operand=ALLOW)]
    lines += [
        _line(JUMP_IF_EQUAL, 0, 1, clone3[0]),
        _line(RETURN, operand=FAIL | errno.ENOSYS),
        _line(JUMP_IF_EQUAL, 0, 3, clone[0]),
        _line(LOAD_WORD, operand=FIRST_ARGUMENT),
        _line(JUMP_IF_ANY_BIT, 1, 0, NAMESPACES),
        _line(RETURN, operand=ALLOW),
        _line(RETURN, operand=FAIL | errno.EPERM),
    ]
    return b"".join(lines)


def _line(code: int, if_true: int = 0, if_false: int = 0, operand: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, operand)
