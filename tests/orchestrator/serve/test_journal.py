"""What was acknowledged is there after a kill; what is torn is dropped."""

import asyncio
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.orchestrator.serve.journal import Journal, JournalError
from penstock.orchestrator.serve.request_log import Asked, RequestLog
from penstock.orchestrator.serve.wire.results import failure, plain
from tests.amounts import amount


def read(path):
    journal = Journal(path)
    found = [(record.header, journal.read(record.place)) for record in journal.records]
    asyncio.run(journal.close())
    return found


@given(st.lists(st.binary(max_size=50), max_size=8), st.data())
@settings(max_examples=amount(40), deadline=None)
def test_a_file_cut_anywhere_has_the_whole_records_before_the_cut(tmp_path_factory, bodies, data):
    path = tmp_path_factory.mktemp("journal") / "a.journal"

    async def write():
        journal, ends = Journal(path), []
        for number, body in enumerate(bodies):
            await journal.append({"seq": number}, body)
            ends.append(path.stat().st_size)
        await journal.close()
        return ends

    ends = asyncio.run(write())
    cut = data.draw(st.integers(0, path.stat().st_size))
    os.truncate(path, cut)
    whole = [({"seq": number}, body) for number, (body, end) in enumerate(zip(bodies, ends, strict=True)) if end <= cut]
    assert read(path) == whole
    assert path.stat().st_size == max([0, *(end for end in ends if end <= cut)])


def test_a_damaged_record_ends_the_journal(tmp_path):
    path = tmp_path / "a.journal"

    async def write():
        journal = Journal(path)
        places = [await journal.append({"seq": number}, b"x" * 10) for number in range(3)]
        await journal.close()
        return places

    place = asyncio.run(write())[1]
    with path.open("r+b") as file:
        file.seek(place.offset)
        file.write(b"y")
    assert [header["seq"] for header, _ in read(path)] == [0]


def test_appends_at_the_same_time_and_a_rewrite_keep_all_that_is_kept(tmp_path):
    path = tmp_path / "a.journal"

    async def scenario():
        journal = Journal(path)
        first = await asyncio.gather(*(journal.append({"seq": number}, b"%d" % number) for number in range(20)))
        more = [asyncio.create_task(journal.append({"seq": number}, b"%d" % number)) for number in range(20, 40)]
        await asyncio.sleep(0)
        await journal.rewrite(lambda header: header["seq"] % 2 == 0 or header["seq"] >= 20)
        later = await asyncio.gather(*more)
        assert [journal.read(place) for place in [*first[::2], *later]] == [
            b"%d" % number for number in [*range(0, 20, 2), *range(20, 40)]
        ]
        await journal.close()
        with pytest.raises(JournalError, match="ending"):
            await journal.append({}, b"")

    asyncio.run(scenario())
    assert [header["seq"] for header, _ in read(path)] == [*range(0, 20, 2), *range(20, 40)]


def test_what_is_read_while_a_rewrite_ends_is_what_was_written(tmp_path, monkeypatch):
    """The new file has its name before the places of its records are known."""
    journal_of, seen = {}, []

    async def then_read(function, *arguments):
        result = function(*arguments)
        seen.extend(journal_of["it"].read(place) for place in journal_of["places"])
        return result

    async def scenario():
        journal = journal_of["it"] = Journal(tmp_path / "a.journal")
        journal_of["places"] = [await journal.append({"seq": number}, b"%d" % number) for number in range(3)]
        monkeypatch.setattr(asyncio, "to_thread", then_read)
        await journal.rewrite(lambda header: header["seq"] > 0)
        assert seen == [b"0", b"1", b"2"]
        assert [journal.read(place) for place in journal_of["places"][1:]] == [b"1", b"2"]
        await journal.close()
        with pytest.raises(JournalError, match="is closed"):
            journal.read(journal_of["places"][1])

    asyncio.run(scenario())


def test_who_has_a_cursor_from_before_a_start_hears_of_all_that_is_kept(tmp_path):
    async def life(numbers, cursor):
        log = RequestLog(tmp_path, keep=2)
        before = log.ended_since(cursor)
        for seq in numbers:
            entry = await log.accept(Asked(seq, "sample", b"body"))
            await log.answer(entry, failure("told", is_users=True) if seq % 2 else plain({"type": "sample"}))
        found = before, log.ended_since(0), log.ended_since(log.cursor - 1), log.ended_since(log.cursor), log.cursor
        await log.close()
        return found

    before, told, newest, none, cursor = asyncio.run(life(range(3), 0))
    assert (before, told) == ([], [(0, False), (1, True), (2, False)])
    assert (newest, none) == ([(2, False)], [])
    before, told, *_, cursor = asyncio.run(life(range(3, 7), cursor))
    assert before == [(0, False), (1, True), (2, False)]
    assert told == [(3, True), (4, False), (5, True), (6, False)]
    before, *_ = asyncio.run(life([], cursor))
    assert before[-1] == (6, False)


def test_what_a_client_leaves_on_disk_and_in_memory_stays_small(tmp_path):
    """And none of it is carried out again after a start."""

    async def scenario(numbers):
        log, sizes = RequestLog(tmp_path, keep=16), []
        assert log.pending() == []
        for first in numbers[::8]:
            entries = [await log.accept(Asked(seq, "sample", b"body")) for seq in range(first, first + 8)]
            await asyncio.gather(*(log.answer(entry, plain({"type": "sample"})) for entry in entries))
            sizes.append((len(log.entries), sum(file.stat().st_size for file in tmp_path.iterdir())))
        told = [log.answer_of(log.entries[seq]) for seq in numbers[-16:]]
        await log.close()
        return sizes, told

    first, told = asyncio.run(scenario(range(1000, 1400)))
    assert all(told)
    later, told = asyncio.run(scenario(range(1400, 1600)))
    assert all(told)
    for now in (first[25:], later):
        assert max(count for count, _ in now) <= max(count for count, _ in first[:25])
        assert max(size for _, size in now) <= max(size for _, size in first[:25])


def test_wherever_a_server_is_killed_no_answered_request_is_carried_out_again(tmp_path, monkeypatch):
    """The files are looked at before and after each change of a name."""
    directory, replaced, answered, copies = tmp_path / "log", Path.replace, [], []

    def copy():
        copies.append((tmp_path / f"copy-{len(copies)}", list(answered)))
        shutil.copytree(directory, copies[-1][0])

    def watched(path, target):
        copy()
        found = replaced(path, target)
        copy()
        return found

    async def scenario():
        log = RequestLog(directory, keep=4)
        for seq in range(30):
            entries = [await log.accept(Asked(2 * seq + one, "sample", b"body")) for one in range(2)]
            for entry in reversed(entries):
                await log.answer(entry, plain({"type": "sample"}))
                answered.append(entry.seq)
        await log.close()

    monkeypatch.setattr(Path, "replace", watched)
    asyncio.run(scenario())
    monkeypatch.undo()
    assert len(copies) > 40
    for place, told in copies:
        log = RequestLog(place, keep=4)
        assert not {entry.seq for entry in log.pending()} & set(told)
        assert all(log.answer_of(log.entries[seq]) for seq in told[-4:])
        asyncio.run(log.close())


def test_a_full_disk_refuses_and_leaves_what_was_written(tmp_path, monkeypatch):
    path = tmp_path / "a.journal"

    async def scenario():
        journal = Journal(path)
        await journal.append({"seq": 0}, b"kept")
        real, full = os.pwrite, OSError(28, "No space left on device")

        def half(file, data, offset):
            real(file, data[: len(data) // 2], offset)
            raise full

        monkeypatch.setattr(os, "pwrite", half)
        with pytest.raises(JournalError, match="No space left"):
            await journal.append({"seq": 1}, b"lost")
        monkeypatch.setattr(os, "pwrite", real)
        await journal.append({"seq": 2}, b"after")
        await journal.close()

    asyncio.run(scenario())
    assert [header["seq"] for header, _ in read(path)] == [0, 2]
