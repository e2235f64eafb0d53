"""The filters, run by a small interpreter of classic BPF."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.errors import SandboxUnavailable
from penstock.workers.sandbox.seccomp import ALLOW, AUDIT_ARCH, FAIL, KILL, NAMESPACES, program
from penstock.workers.sandbox.syscalls import CLONE, CLONE3, MACHINES, OF_THE_KEEPER, ORDINARY, numbers

EPERM, ENOSYS = FAIL | 1, FAIL | 38


def verdict(filter_program: bytes, number: int, architecture: int, first: int = 0) -> int:
    """What the kernel would do with a call."""
    lines = list(struct.iter_unpack("<HBBI", filter_program))
    words = {0: number, 4: architecture, 16: first}
    at = loaded = 0
    while True:
        code, if_true, if_false, operand = lines[at]
        at += 1
        if code == 0x20:
            loaded = words[operand]
        elif code == 0x15:
            at += if_true if loaded == operand else if_false
        elif code == 0x45:
            at += if_true if loaded & operand else if_false
        else:
            assert code == 0x06
            return operand


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("keeper", [True, False])
@given(number=st.integers(0, 2**32 - 1) | st.integers(0, 600), first=st.integers(0, 2**32 - 1))
def test_what_is_listed_is_allowed_and_nothing_else(machine, keeper, number, first):
    allowed = numbers(ORDINARY + (OF_THE_KEEPER if keeper else ""), machine)
    expected = ALLOW if number in allowed else EPERM
    if [number] == numbers(CLONE3, machine):
        expected = ENOSYS
    if [number] == numbers(CLONE, machine):
        expected = EPERM if first & NAMESPACES else ALLOW
    assert verdict(program(machine, keeper=keeper), number, AUDIT_ARCH[machine], first) == expected


@pytest.mark.parametrize("machine", MACHINES)
def test_another_architecture_is_death(machine):
    """0x40000003: i386, whose numbers mean other calls."""
    assert verdict(program(machine, keeper=True), numbers(CLONE, machine)[0], 0x40000003) == KILL


@pytest.mark.parametrize("machine", MACHINES)
def test_forks_and_threads_are_allowed_and_namespaces_are_not(machine):
    (clone,) = numbers(CLONE, machine)
    fork, thread = 0x01200011, 0x003D0F00
    for flags, expected in [(fork, ALLOW), (thread, ALLOW), (fork | 0x10000000, EPERM), (thread | 0x20000, EPERM)]:
        assert verdict(program(machine, keeper=False), clone, AUDIT_ARCH[machine], flags) == expected


@pytest.mark.parametrize("machine", MACHINES)
def test_no_call_is_listed_twice_and_programs_are_short_enough(machine):
    listed = numbers(" ".join([ORDINARY, CLONE, CLONE3, OF_THE_KEEPER]), machine)
    assert len(set(listed)) == len(listed)
    assert len(program(machine, keeper=True)) // 8 <= 4096


def test_x32_numbers_are_none_of_those_listed():
    for number in numbers(ORDINARY, "x86_64"):
        assert verdict(program("x86_64", keeper=False), number | 0x40000000, AUDIT_ARCH["x86_64"]) == EPERM


def test_a_machine_without_a_list_has_no_filter():
    with pytest.raises(SandboxUnavailable, match="s390x"):
        program("s390x", keeper=False)
