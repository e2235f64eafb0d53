"""What stands in for a cgroup: processor time from look to look, and what sockets may hold."""

import fcntl
import socket
import termios

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.sandbox.cgroup import BUFFERS_HELD, Process, ProcessorTime, Times, buffer_bytes

P, C, D = (1, 0), (2, 0), (3, 0)
"""A parent and its children."""


def total_of(*looks: dict[Process, Times]) -> float:
    time = ProcessorTime()
    for look in looks:
        time.add(look)
    return time.total_s


def test_a_process_that_is_waited_for_between_two_looks_counts_once():
    assert total_of({P: (1, 0), C: (2, 0)}, {P: (1, 3)}) == 4


def test_a_process_that_is_waited_for_after_its_parent_was_read_counts_once():
    """The second look has read the parent before it waited, and then found no child."""
    assert total_of({P: (1, 0), C: (2, 0)}, {P: (1, 0)}, {P: (1, 3)}) == 4


def test_a_process_that_one_look_misses_counts_once():
    assert total_of({P: (1, 0), C: (2, 0)}, {P: (1, 0)}, {P: (1, 0), C: (2, 0)}) == 3


def test_what_grows_while_another_ends_unseen_is_counted():
    assert total_of({P: (1, 0), C: (2, 0)}, {P: (2, 0)}) == 4


def test_a_process_that_no_look_has_seen_is_counted_when_it_is_waited_for():
    assert total_of({P: (1, 0)}, {P: (1, 5)}) == 6


def test_an_id_that_another_process_gets_is_another_process():
    assert total_of({P: (1, 0), C: (2, 0)}, {P: (1, 2), (2, 7): (1, 0)}) == 4


def test_a_waits_for_c_which_had_waited_for_d():
    assert total_of({P: (0, 0), C: (1, 0), D: (4, 0)}, {P: (0, 0), C: (1, 4)}, {P: (0, 5)}) == 5


class Tree:
    """Processes that are forked, work, end, and are waited for, or not."""

    def __init__(self) -> None:
        self.times: dict[int, Times] = {0: (0, 0)}
        self.parents: dict[int, int] = {}
        self.ended: set[int] = set()
        self.used_s = 0.0
        self._next = 1

    def do(self, step: tuple[str, int]) -> None:
        """`step`: what to do, and which process does it, among those that can."""
        kind, choice = step
        able = sorted(self.ended if kind == "is waited for" else self.times.keys() - self.ended)
        if kind in ("ends", "vanishes"):
            able.remove(0)
        if able:
            getattr(self, f"_{kind.replace(' ', '_')}")(able[choice % len(able)])

    def read(self, number: int) -> dict[Process, Times]:
        return {(number, 0): self.times[number]} if number in self.times else {}

    def _forks(self, number: int) -> None:
        self.times[self._next], self.parents[self._next] = (0, 0), number
        self._next += 1

    def _works(self, number: int) -> None:
        own, waited = self.times[number]
        self.times[number] = own + 1, waited
        self.used_s += 1

    def _ends(self, number: int) -> None:
        self.ended.add(number)
        for child, parent in self.parents.items():
            self.parents[child] = 0 if parent == number else parent

    def _vanishes(self, number: int) -> None:
        """Its parent ignores how it ends."""
        self._ends(number)
        self._leaves(number)

    def _is_waited_for(self, number: int) -> None:
        parent = self.parents[number]
        own, waited = self.times[parent]
        self.times[parent] = own, waited + sum(self.times[number])
        self._leaves(number)

    def _leaves(self, number: int) -> None:
        self.ended.discard(number)
        del self.times[number], self.parents[number]


def steps(*kinds: str) -> st.SearchStrategy[list[tuple[str, int]]]:
    return st.lists(st.tuples(st.sampled_from(kinds), st.integers(0, 9)), min_size=5, max_size=80)


def look(tree: Tree, time: ProcessorTime, meanwhile: list[tuple[str, int]], num_between: int) -> None:
    """Parents are read before children; so many steps are made before each that is read."""
    now: dict[Process, Times] = {}
    for number in sorted(tree.times):
        for _ in range(min(num_between, len(meanwhile))):
            tree.do(meanwhile.pop())
        now |= tree.read(number)
    time.add(now)


@given(steps("forks", "works", "ends", "vanishes", "is waited for"), st.integers(0, 3), st.integers(1, 6))
def test_never_more_is_counted_than_was_used(made, num_between, every):
    tree, time = Tree(), ProcessorTime()
    while made:
        for _ in range(min(every, len(made))):
            tree.do(made.pop())
        look(tree, time, made, num_between)
        assert time.total_s <= tree.used_s


@given(steps("forks", "works", "ends", "is waited for"), st.integers(0, 3), st.integers(1, 6))
def test_all_is_counted_of_processes_that_are_waited_for(made, num_between, every):
    tree, time = Tree(), ProcessorTime()
    while made:
        for _ in range(min(every, len(made))):
            tree.do(made.pop())
        look(tree, time, made, num_between)
    look(tree, time, [], 0)
    assert time.total_s == tree.used_s


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET])
def test_no_socket_holds_more_than_is_counted_for_it(kind):
    """Small messages until its buffer is all but full, and then the largest that it takes."""

    def held() -> int:
        return int.from_bytes(fcntl.ioctl(sender, termios.TIOCOUTQ, bytes(4)), "little")

    sender, receiver = socket.socketpair(socket.AF_UNIX, kind)
    with sender, receiver:
        sender.setblocking(False)
        sender.send(b"x")
        of_one = held()
        while held() + of_one < buffer_bytes():
            sender.send(b"x")
        sender.send(bytes(buffer_bytes() - 64))
        assert buffer_bytes() < held() <= BUFFERS_HELD * buffer_bytes()
