"""The life of segments: by hand, and through random histories of writers and readers that come, read, lag and die."""

from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.store.data import segment_book
from penstock.store.data.segment_book import POOLED_SHARE, Instructions, SegmentBook, SegmentState, writer_of
from tests.amounts import amount

BUDGET = 800


def pooled_bytes(book: SegmentBook) -> int:
    """Bytes in shared memory, with their writers."""
    return book._pooled.total()


def test_a_segment_comes_back_to_its_writer_after_its_last_row_and_reader() -> None:
    book = SegmentBook(BUDGET)
    book.add_client("w")
    book.add_client("r")
    assert not book.adopt("w-0", "batch", 50, False)
    book.begin_reading("r", "w-0")
    assert book.end("w-0") == Instructions()
    assert book.segments["w-0"].state is SegmentState.ENDED
    assert book.end_reading("r", "w-0") == Instructions(recycled=["w-0"])
    assert (book.bytes, pooled_bytes(book)) == (0, 50)
    book.adopt("w-0", "another", 50, False)
    assert (book.bytes, pooled_bytes(book)) == (50, 0)
    assert book.end("w-0").recycled == ["w-0"]
    assert list(book.left("w")) == [Instructions(unmapped=[("w-0", {"r"})], removed=[("w-0", False)])]


@pytest.mark.parametrize("why", ["on disk", "too many pooled", "writer gone"])
def test_a_segment_is_removed_where_it_cannot_be_pooled(why: str) -> None:
    book = SegmentBook(BUDGET)
    book.add_client("r")
    if why != "writer gone":
        book.add_client("w")
    book.adopt("w-0", "batch", BUDGET // POOLED_SHARE + (why == "too many pooled"), False)
    book.begin_reading("r", "w-0")
    if why == "on disk":
        assert book.spilled("w-0").unmapped == [("w-0", {"w", "r"})]
        assert (book.bytes, book.spilled_bytes) == (0, BUDGET // POOLED_SHARE)
    book.end_reading("r", "w-0")
    told = {"r"} if why == "writer gone" else {"r", "w"}
    assert book.end("w-0") == Instructions(unmapped=[("w-0", told)], removed=[("w-0", why == "on disk")])
    assert (book.bytes, book.spilled_bytes, pooled_bytes(book), book.segments) == (0, 0, 0, {})


def test_each_node_has_a_budget_and_a_pool_of_its_own() -> None:
    book = SegmentBook(BUDGET)
    for client in ("w", "v"):
        book.add_client(client)
    assert not book.adopt("w-0", "batch", BUDGET, False)
    assert not book.adopt("v-0", "batch", BUDGET, False, "remote")
    assert book.adopt("v-1", "batch", 1, False, "remote")
    assert book.spilled("v-1").unmapped == [("v-1", {"v"})]
    assert book.end("v-1") == Instructions(unmapped=[("v-1", {"v"})], removed_remote=[("remote", "v-1")])
    assert book.end("v-0").removed_remote == [("remote", "v-0")]
    book.adopt("v-2", "batch", BUDGET // POOLED_SHARE, False, "remote")
    book.adopt("w-1", "batch", BUDGET // POOLED_SHARE, False)
    assert book.end("v-2").recycled + book.end("w-1").recycled == ["v-2", "w-1"]


NODES = {"a": "", "b": "", "c": "remote"}
"""Where each client writes."""


class Histories(RuleBasedStateMachine):
    """Clients write and read at random; a model knows who reads what, and where each file is."""

    def __init__(self) -> None:
        super().__init__()
        self.book = SegmentBook(BUDGET)
        self.clients: set[str] = set()
        self.made = 0
        self.live: set[str] = set()
        self.readers: dict[str, list[str]] = {}
        """Clients that read each file that is in use."""
        self.with_writer: set[str] = set()
        self.mapped: dict[str, set[str]] = {}
        """Clients, by file, that have heard of it, and not yet that it is gone."""
        self.leaving: dict[str, Iterator[Instructions]] = {}
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(segment_book, "AT_ONCE", 1)

    def heard(self, instructions: Instructions) -> None:
        """Carry out, and see that it is right."""
        for name in instructions.recycled:
            assert name not in self.live
            assert not self.readers[name], "it would be written over while somebody reads it"
            assert writer_of(name) in self.clients
            del self.readers[name]
            self.with_writer.add(name)
        for name, clients in instructions.unmapped:
            assert clients <= self.clients, "nobody is there to hear it"
            assert self.mapped.get(name, set()) <= clients, "a mapping would hold on to the pages"
            self.mapped[name] = set()
        assert all(NODES[writer_of(name)] == node for node, name in instructions.removed_remote)
        assert not any(NODES[writer_of(name)] for name, _ in instructions.removed)
        for name in [name for name, _ in instructions.removed] + [name for _, name in instructions.removed_remote]:
            assert name not in self.live
            assert not self.readers.pop(name, [])
            self.with_writer.discard(name)
            assert name not in self.book.segments

    @rule(client=st.sampled_from("abc"))
    def enter(self, client: str) -> None:
        while client in self.leaving:
            self.go_on_leaving(client)
        self.clients.add(client)
        self.book.add_client(client)

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), nbytes=st.integers(1, 300), on_disk=st.booleans(), again=st.booleans())
    def write(self, data: st.DataObject, nbytes: int, on_disk: bool, again: bool) -> None:
        """Into a file that came back, or a new one."""
        back = sorted(name for name in self.with_writer if writer_of(name) in self.clients)
        if again and back:
            name = data.draw(st.sampled_from(back))
            self.with_writer.discard(name)
            on_disk = False
        else:
            name = f"{data.draw(st.sampled_from(sorted(self.clients)))}-{self.made}"
            self.made += 1
        node = NODES[writer_of(name)]
        over = self.book.adopt(name, object(), nbytes, on_disk and not node, node)
        self.live.add(name)
        self.readers[name] = []
        self.mapped.setdefault(name, set()).add(writer_of(name))
        if over:
            self.heard(self.book.spilled(name))
            assert self.book.segments[name].on_disk
        assert all(count <= BUDGET for count in self.book._in_use.values())

    @precondition(lambda self: self.live and self.clients)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        client = data.draw(st.sampled_from(sorted(self.clients)))
        self.book.begin_reading(client, name)
        self.readers[name].append(client)
        self.mapped[name].add(client)

    @precondition(lambda self: any(self.readers.values()))
    @rule(data=st.data())
    def finish_reading(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(name for name, readers in self.readers.items() if readers)))
        client = data.draw(st.sampled_from(sorted(self.readers[name])))
        self.readers[name].remove(client)
        self.heard(self.book.end_reading(client, name))

    @rule(client=st.sampled_from("abc"))
    def finish_what_is_not_known(self, client: str) -> None:
        assert self.book.end_reading(client, "nobody-7") == Instructions()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        self.live.discard(name)
        self.heard(self.book.end(name))

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.end_process(data.draw(st.sampled_from(sorted(self.clients))))

    def end_process(self, client: str) -> None:
        self.clients.discard(client)
        for readers in self.readers.values():
            readers[:] = [reader for reader in readers if reader != client]
        for mapped in self.mapped.values():
            mapped.discard(client)
        self.leaving[client] = self.book.left(client)
        self.go_on_leaving(client)

    @precondition(lambda self: self.leaving)
    @rule(data=st.data())
    def let_go_of_some_more(self, data: st.DataObject) -> None:
        self.go_on_leaving(data.draw(st.sampled_from(sorted(self.leaving))))

    def go_on_leaving(self, client: str) -> None:
        instructions = next(self.leaving[client], None)
        if instructions is None:
            del self.leaving[client]
        else:
            self.heard(instructions)

    @invariant()
    def it_counts_what_is_there(self) -> None:
        segments = self.book.segments
        assert set(segments) == set(self.readers) | self.with_writer
        for name, segment in segments.items():
            pooled, live = name in self.with_writer, name in self.live
            assert segment.state is (
                SegmentState.POOLED if pooled else SegmentState.LIVE if live else SegmentState.ENDED
            )
        used = [segment for segment in segments.values() if segment.state is not SegmentState.POOLED]
        assert self.book.bytes == sum(one.nbytes for one in used if not one.on_disk)
        assert self.book.spilled_bytes == sum(one.nbytes for one in used if one.on_disk)
        in_pool = sum(one.nbytes for one in segments.values() if one.state is SegmentState.POOLED)
        assert pooled_bytes(self.book) == in_pool
        assert all(count <= BUDGET // POOLED_SHARE for count in self.book._pooled.values())

    def teardown(self) -> None:
        """Once all rows have ended and all processes have, nothing is left."""
        for name in sorted(self.live):
            self.live.discard(name)
            self.heard(self.book.end(name))
        for client in sorted(self.clients):
            self.end_process(client)
        while self.leaving:
            self.go_on_leaving(min(self.leaving))
        self.patch.undo()
        assert not self.book.segments
        assert (self.book.bytes, self.book.spilled_bytes, pooled_bytes(self.book)) == (0, 0, 0)
        assert not self.book._written
        assert not any(self.book._mapped.values())


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=amount(100), stateful_step_count=30, deadline=None)
