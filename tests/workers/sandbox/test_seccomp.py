"""The filters, run by a small interpreter of classic BPF."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.errors import SandboxUnavailable
from penstock.workers.sandbox.fence import (
    ALLOW,
    AUDIT_ARCH,
    BY_ARGUMENT,
    CLONE,
    CLONE3,
    FAIL,
    IN_WORKSPACES,
    KILL,
    MACHINES,
    MEMORY_FILES,
    MMAP,
    NAMESPACE_FLAGS,
    OF_THE_KEEPER,
    ORDINARY,
    SET_ATTRIBUTES,
    SOCKETS,
    call_numbers,
    seccomp_program,
)

EPERM, ENOSYS, EOPNOTSUPP = FAIL | 1, FAIL | 38, FAIL | 95


def verdict(filter_program: bytes, number: int, architecture: int, *arguments: int) -> int:
    """What the kernel would do with a call. No way through the program is longer than the program."""
    lines = list(struct.iter_unpack("<HBBI", filter_program))
    words = {0: number, 4: architecture}
    words |= {16 + 4 * index: 0 for index in range(12)}
    words |= {16 + 8 * index: argument for index, argument in enumerate(arguments)}
    at = loaded = 0
    while True:
        code, if_true, if_false, operand = lines[at]
        at += 1
        if code == 0x20:
            loaded = words[operand]
        elif code == 0x15:
            at += if_true if loaded == operand else if_false
        elif code == 0x54:
            loaded &= operand
        elif code == 0x45:
            at += if_true if loaded & operand else if_false
        else:
            assert code == 0x06
            return operand


WORDS = st.integers(0, 2**32 - 1) | st.integers(0, 1100)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("keeper", [True, False])
@pytest.mark.parametrize("is_counted", [True, False])
@pytest.mark.parametrize("workspace", [True, False])
@given(number=WORDS, arguments=st.lists(WORDS, min_size=4, max_size=4))
def test_what_is_listed_is_allowed_and_nothing_else(machine, keeper, is_counted, workspace, number, arguments):
    listed = ORDINARY + (OF_THE_KEEPER if keeper else "") + (IN_WORKSPACES if workspace else "")
    listed += MEMORY_FILES if workspace and is_counted else ""
    is_granted = number in call_numbers(listed, machine)
    for call, alternatives in SOCKETS.items() if workspace else ():
        is_granted |= [number] == call_numbers(call, machine) and holds(alternatives, arguments)
    for call, (index, values) in BY_ARGUMENT.items():
        if not (workspace and call in SOCKETS):
            is_granted |= [number] == call_numbers(call, machine) and arguments[index] in values
    if [number] == call_numbers(CLONE, machine):
        is_granted = not arguments[0] & NAMESPACE_FLAGS
    if [number] == call_numbers(MMAP, machine):
        is_shared = arguments[3] & 0x01 and arguments[3] & 0x20
        is_granted = not arguments[3] & 0x40000 and (is_counted or not is_shared)
    refused = dict.fromkeys(call_numbers(SET_ATTRIBUTES if workspace else "", machine), EOPNOTSUPP)
    refused |= dict.fromkeys(call_numbers(CLONE3, machine), ENOSYS)
    expected = ALLOW if is_granted else refused.get(number, EPERM)
    program = seccomp_program(machine, keeper=keeper, is_counted=is_counted, workspace=workspace)
    assert verdict(program, number, AUDIT_ARCH[machine], *arguments) == expected


def holds(alternatives, arguments):
    """Whether one of the alternatives does."""
    return any(all(arguments[index] & mask in values for index, mask, values in each) for each in alternatives)


@pytest.mark.parametrize("machine", MACHINES)
@given(data=st.data())
def test_sockets_of_workspaces_are_streams_and_datagrams_without_filters(machine, data):
    """The property above, drawn from the calls that it is about, by hand where it matters."""
    program = seccomp_program(machine, keeper=False, workspace=True)
    for call, alternatives in SOCKETS.items():
        arguments = [data.draw(st.sampled_from([0, 1, 2, 3, 5, 6, 10, 16, 17, 26, 41, 0x80801])) for _ in range(4)]
        expected = ALLOW if holds(alternatives, arguments) else EPERM
        (number,) = call_numbers(call, machine)
        found = verdict(program, number, AUDIT_ARCH[machine], *arguments)
        assert found == expected
    (sockets,), (options,) = (call_numbers(call, machine) for call in SOCKETS)
    for number, values, expected in [
        (sockets, (2, 0x80801, 0), ALLOW), (sockets, (2, 1, 132), EPERM), (sockets, (2, 5, 0), EPERM),
        (sockets, (16, 3, 0), EPERM), (sockets, (10, 2, 17), ALLOW), (sockets, (2, 3, 1), EPERM),
        (options, (0, 1, 26), EPERM), (options, (0, 41, 26), ALLOW), (options, (0, 6, 31), EPERM),
    ]:  # fmt: skip
        assert verdict(program, number, AUDIT_ARCH[machine], *values) == expected


@pytest.mark.parametrize("machine", MACHINES)
@given(data=st.data())
def test_a_call_that_depends_on_an_argument_is_decided_by_that_alone(machine, data):
    """The property above, drawn from the calls that it is about."""
    call = data.draw(st.sampled_from([*BY_ARGUMENT, CLONE, MMAP]))
    (number,) = call_numbers(call, machine)
    every = [number for entry in [ORDINARY, CLONE, CLONE3, MMAP] for number in call_numbers(entry, machine)]
    index, values = BY_ARGUMENT.get(call, (0, (0x01200011,)) if call == CLONE else (3, (0x22, 0x01)))
    arguments = [data.draw(st.sampled_from(every)) for _ in range(4)]
    filter_program = seccomp_program(machine, keeper=False, is_counted=False)
    for value in values:
        given = [*arguments[:index], value, *arguments[index + 1 :]]
        assert verdict(filter_program, number, AUDIT_ARCH[machine], *given) == ALLOW
    bad = {CLONE: 0x10000011, MMAP: 0x21}.get(call, 0x7FFF)
    given = [*arguments[:index], bad, *arguments[index + 1 :]]
    assert verdict(filter_program, number, AUDIT_ARCH[machine], *given) == EPERM
    if call == MMAP:
        counted = seccomp_program(machine, keeper=False)
        assert verdict(counted, number, AUDIT_ARCH[machine], *given) == ALLOW
        assert verdict(counted, number, AUDIT_ARCH[machine], *given[:3], 0x40022) == EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_another_architecture_is_death(machine):
    """0x40000003: i386, whose numbers mean other calls."""
    assert verdict(seccomp_program(machine, keeper=True), call_numbers(CLONE, machine)[0], 0x40000003) == KILL


@pytest.mark.parametrize("machine", MACHINES)
def test_forks_and_threads_are_allowed_and_namespaces_are_not(machine):
    (clone,) = call_numbers(CLONE, machine)
    fork, thread = 0x01200011, 0x003D0F00
    for flags, expected in [(fork, ALLOW), (thread, ALLOW), (fork | 0x10000000, EPERM), (thread | 0x20000, EPERM)]:
        assert verdict(seccomp_program(machine, keeper=False), clone, AUDIT_ARCH[machine], flags) == expected


@pytest.mark.parametrize("machine", MACHINES)
def test_memory_files_are_for_workspaces_whose_memory_a_group_counts(machine):
    (number,) = call_numbers(MEMORY_FILES, machine)
    for workspace, is_counted, expected in [(True, True, ALLOW), (True, False, EPERM), (False, True, EPERM)]:
        program = seccomp_program(machine, keeper=False, is_counted=is_counted, workspace=workspace)
        assert verdict(program, number, AUDIT_ARCH[machine]) == expected


@pytest.mark.parametrize("machine", MACHINES)
def test_no_call_is_listed_twice_and_programs_are_short_enough(machine):
    for more in (" ".join(BY_ARGUMENT), OF_THE_KEEPER):  # the keeper may call prctl with every argument
        listed = call_numbers(" ".join([ORDINARY, CLONE, CLONE3, MMAP, more]), machine)
        assert len(set(listed)) == len(listed)
    in_workspaces = call_numbers(
        " ".join([ORDINARY, IN_WORKSPACES, MEMORY_FILES, *SOCKETS, CLONE, CLONE3, MMAP]), machine
    )
    assert len(set(in_workspaces)) == len(in_workspaces)
    assert len(seccomp_program(machine, keeper=True, workspace=True)) // 8 <= 4096


def test_x32_numbers_are_none_of_those_listed():
    for number in call_numbers(ORDINARY, "x86_64"):
        assert verdict(seccomp_program("x86_64", keeper=False), number | 0x40000000, AUDIT_ARCH["x86_64"]) == EPERM


def test_a_machine_without_a_list_has_no_filter():
    with pytest.raises(SandboxUnavailable, match="s390x"):
        seccomp_program("s390x", keeper=False)
