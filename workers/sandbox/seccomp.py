"""Seccomp filters as classic BPF programs. Pure: bytes that bubblewrap and `inside.py` hand to the kernel.

A program reads the call's number, architecture and some arguments (`struct seccomp_data`, linux/seccomp.h) and returns
what the kernel shall do. Each instruction is a `struct sock_filter`: code, jump if true, jump if false, operand.
"""

import errno
import struct

from penstock.conf.errors import SandboxUnavailable
from penstock.workers.sandbox.syscalls import (
    BY_ARGUMENT,
    CLONE,
    CLONE3,
    MACHINES,
    MMAP,
    OF_THE_KEEPER,
    ORDINARY,
    numbers,
)

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
LOAD_WORD, JUMP_IF_EQUAL, JUMP_IF_ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
"""Offsets in `struct seccomp_data`. `ARGUMENTS` is that of the lower half of an argument: both machines are
little-endian."""
ALLOW, KILL, FAIL = 0x7FFF0000, 0x80000000, 0x00050000
"""Actions for a call, from linux/seccomp.h. `FAIL` takes the error number in its lower half."""
NAMESPACES = 0x7E020000
"""Flags of all namespaces: `CLONE_NEWNS`, `NEWCGROUP`, `NEWUTS`, `NEWIPC`, `NEWUSER`, `NEWPID` and `NEWNET`
together."""


MAP_SHARED, MAP_ANONYMOUS, MAP_HUGETLB = 0x01, 0x20, 0x40000
LINE_BYTES = 8


def program(machine: str, *, keeper: bool, is_counted: bool = True) -> bytes:
    """The filter for code of a model, or for the `keeper` of its fence, which may also make and leave namespaces.
    `is_counted`: a cgroup counts the memory of all, shared memory without a file too.

    Raises `SandboxUnavailable` for a machine whose system calls are not listed.
    """
    if machine not in MACHINES:
        raise SandboxUnavailable(
            f"sandbox: the system calls of {machine} are not listed, only those of {', '.join(MACHINES)}. Run rewards "
            "that execute code on one of these machines."
        )
    lines = [
        _line(LOAD_WORD, operand=ARCHITECTURE),
        _line(JUMP_IF_EQUAL, 1, 0, AUDIT_ARCH[machine]),
        _line(RETURN, operand=KILL),
        _line(LOAD_WORD, operand=NUMBER),
    ]
    for number in numbers(ORDINARY + (OF_THE_KEEPER if keeper else ""), machine):
        lines += [_line(JUMP_IF_EQUAL, 0, 1, number), _line(RETURN, operand=ALLOW)]
    for call, (index, values) in BY_ARGUMENT.items():
        allowed = [_line(JUMP_IF_EQUAL, 0, 1, value) + _line(RETURN, operand=ALLOW) for value in values]
        lines += _block(call, machine, index, *allowed)
    lines += [
        *_block(CLONE, machine, 0, _line(JUMP_IF_ANY_BIT, 1, 0, NAMESPACES), _line(RETURN, operand=ALLOW)),
        *_block(
            MMAP,
            machine,
            3,
            _line(JUMP_IF_ANY_BIT, 3, 0, MAP_HUGETLB),
            _line(JUMP_IF_ANY_BIT, 0, 1, 0 if is_counted else MAP_SHARED),
            _line(JUMP_IF_ANY_BIT, 1, 0, MAP_ANONYMOUS),
            _line(RETURN, operand=ALLOW),
        ),
        _line(JUMP_IF_EQUAL, 0, 1, numbers(CLONE3, machine)[0]),
        _line(RETURN, operand=FAIL | errno.ENOSYS),
        _line(RETURN, operand=FAIL | errno.EPERM),
    ]
    return b"".join(lines)


def _block(call: str, machine: str, index: int, *lines: bytes) -> list[bytes]:
    """Instructions for one call, with its argument of this index loaded; in the end it is refused. No path leads on
    from here: what comes after a block expects the call's number."""
    (number,) = numbers(call, machine)
    block = [_line(LOAD_WORD, operand=ARGUMENTS + 8 * index), *lines, _line(RETURN, operand=FAIL | errno.EPERM)]
    return [_line(JUMP_IF_EQUAL, 0, sum(map(len, block)) // LINE_BYTES, number), *block]


def _line(code: int, if_true: int = 0, if_false: int = 0, operand: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, operand)
