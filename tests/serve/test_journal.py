"""What was acknowledged is there after a kill; what is torn is dropped."""

import asyncio
import itertools
import os
import resource
import shutil
from contextlib import contextmanager, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.serve.journal import Entry, Gone, Journal, JournalDamaged, JournalError, RequestLog
from penstock.serve.sdk_messages import failure, plain
from tests.amounts import amount


def read(path):
    journal = Journal(path)
    found = [(record.header, journal.read(record)) for record in journal.records]
    asyncio.run(journal.close())
    return found


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=8), st.data())
@settings(max_examples=amount(40), deadline=None)
def test_a_file_cut_anywhere_has_the_whole_records_before_the_cut(tmp_path_factory, bodies, data):
    path = tmp_path_factory.mktemp("journal") / "a.journal"

    async def write():
        journal, ends = Journal(path), []
        for number, body in enumerate(bodies):
            await journal.append({"seq": number}, body)
            ends.append(journal.records[-1].offset + len(body))
        await journal.close()
        return ends

    ends = asyncio.run(write())
    cut = data.draw(st.integers(0, path.stat().st_size))
    os.truncate(path, cut)
    whole = [({"seq": number}, body) for number, (body, end) in enumerate(zip(bodies, ends, strict=True)) if end <= cut]
    assert read(path) == whole
    asyncio.run(written(path, [[b"later"]]))
    assert read(path) == [*whole, ({"seq": 0}, b"later")]


async def written(path, batches):
    """Add records; those of a batch are written together. Returns the ends of the batches."""
    journal, numbers, ends = Journal(path), itertools.count(), []
    for batch in batches:
        await asyncio.gather(*(journal.append({"seq": next(numbers)}, body) for body in batch))
        ends.append(journal.records[-1].offset + journal.records[-1].num_bytes)
    await journal.close()
    return ends


BATCHES = st.lists(st.lists(st.binary(max_size=20), min_size=1, max_size=3), min_size=1, max_size=4)


@given(BATCHES, st.data())
@settings(max_examples=amount(40), deadline=None)
def test_damage_anywhere_is_refused_and_the_file_kept(tmp_path_factory, batches, data):
    path = tmp_path_factory.mktemp("journal") / "a.journal"
    *_, end = asyncio.run(written(path, batches))
    before = path.read_bytes()
    at, bit = data.draw(st.integers(0, len(before) - 1)), data.draw(st.integers(0, 7))
    damaged = before[:at] + bytes([before[at] ^ 1 << bit]) + before[at + 1 :]
    path.write_bytes(damaged)
    if at < end:
        with pytest.raises(JournalDamaged, match="whole ones follow at byte"):
            Journal(path)
        assert path.read_bytes() == damaged
    else:  # in the mark of the end
        assert [body for _, body in read(path)] == [body for batch in batches for body in batch]


@given(BATCHES, st.data())
@settings(max_examples=amount(40), deadline=None)
def test_a_batch_that_tears_over_the_end_costs_no_batch_before(tmp_path_factory, batches, data):
    """As a power cut leaves it: any blocks of what was being written are as they were before."""
    path = tmp_path_factory.mktemp("journal") / "a.journal"
    ends = [0, *asyncio.run(written(path, batches))]
    whole = path.read_bytes()[: ends[-1]]
    asyncio.run(written(path := path.with_name("b.journal"), batches[:-1]))
    before = path.read_bytes() if len(batches) > 1 else b""
    torn = bytearray(before + bytes(len(whole) - len(before)))
    for block in data.draw(st.sets(st.integers(ends[-2] // 8, len(whole) // 8), max_size=12)):
        torn[8 * block : 8 * block + 8] = whole[8 * block : 8 * block + 8]
    path.write_bytes(torn)
    kept = [body for batch in batches[:-1] for body in batch]
    try:
        assert [body for _, body in read(path)][: len(kept)] == kept
    except JournalDamaged:  # a record within the batch is whole
        assert bytes(torn) != before


def test_a_batch_whose_first_record_alone_is_torn_was_never_told_and_is_dropped(tmp_path, caplog):
    path = tmp_path / "a.journal"
    start, end = asyncio.run(written(path, [[b"told"], [b"torn", b"whole"]]))
    data = path.read_bytes()
    path.write_bytes(data[:start] + bytes(20) + data[start + 20 : end])
    assert [body for _, body in read(path)] == [b"told"]
    assert f"the last {end - start} bytes are torn, and dropped" in caplog.text


def test_a_record_that_changes_on_the_disk_is_not_read_as_what_was_written(tmp_path):
    async def scenario():
        journal = Journal(tmp_path / "a.journal")
        place = await journal.append({"seq": 0}, b"body")
        with journal.path.open("r+b") as file:
            file.seek(place.offset)
            file.write(b"B")
        with pytest.raises(JournalDamaged, match="is not what was written"):
            journal.read(place)
        await journal.close()

    asyncio.run(scenario())


def test_whoever_waits_for_a_write_hears_of_any_failure(tmp_path, monkeypatch):
    async def scenario():
        journal = Journal(tmp_path / "a.journal")
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", lambda *_: _raise(RuntimeError("can't start new thread")))
            failures = await asyncio.gather(*(journal.append({"seq": 0}) for _ in range(3)), return_exceptions=True)
        assert [type(failure) for failure in failures] == [JournalError] * 3
        assert 'RuntimeError("can\'t start new thread")' in str(failures[0])
        await journal.append({"seq": 1})
        await journal.close()

    asyncio.run(scenario())
    assert [header["seq"] for header, _ in read(tmp_path / "a.journal")] == [1]


def test_a_record_on_the_disk_is_acknowledged_though_no_end_can_be_marked(tmp_path, monkeypatch):
    async def scenario():
        journal = Journal(tmp_path / "a.journal")
        with monkeypatch.context() as patch:
            patch.setattr(os, "ftruncate", lambda *_: _raise(OSError(5, "Input/output error")))
            await journal.append({"seq": 0}, b"kept")
        assert [record.header["seq"] for record in Journal(journal.path).records] == [0]
        await journal.append({"seq": 1}, b"later")
        await journal.close()

    asyncio.run(scenario())
    assert [header["seq"] for header, _ in read(tmp_path / "a.journal")] == [0, 1]


def _raise(error):
    raise error


@pytest.mark.parametrize("spare", range(4))
def test_a_rewrite_without_descriptors_loses_nothing_that_is_acknowledged(tmp_path, spare):
    """Whether it fails before or after the new file has its name."""
    path = tmp_path / "a.journal"

    async def scenario():
        journal = Journal(path)
        for seq in range(3):
            await journal.append({"seq": seq}, b"%d" % seq)
        await asyncio.to_thread(len, "")
        with (
            limited(resource.RLIMIT_NOFILE, max(map(int, os.listdir("/proc/self/fd"))) + spare),
            suppress(JournalError),
        ):
            await journal.rewrite(lambda header: header["seq"] > 0)
        await journal.append({"seq": 3}, b"3")
        assert [journal.read(record) for record in journal.records][-3:] == [b"1", b"2", b"3"]
        await journal.close()

    asyncio.run(scenario())
    assert [header["seq"] for header, _ in read(path)][-3:] == [1, 2, 3]


@contextmanager
def limited(kind, most):
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def test_a_rewrite_goes_on_when_its_caller_is_cancelled(tmp_path):
    async def scenario():
        journal = Journal(tmp_path / "a.journal")
        places = [await journal.append({"seq": seq}, b"%d" % seq) for seq in range(3)]
        rewriting = asyncio.create_task(journal.rewrite(lambda header: header["seq"] > 0))
        await asyncio.sleep(0)
        rewriting.cancel()
        await journal.append({"seq": 3}, b"3")
        assert journal.read(places[1]) == b"1"
        with pytest.raises(Gone):
            journal.read(places[0])
        await journal.close()

    asyncio.run(scenario())
    assert [header["seq"] for header, _ in read(tmp_path / "a.journal")] == [1, 2, 3]


def test_a_request_that_failed_is_known_to_have_failed_while_it_is_kept(tmp_path):
    """With fewer results kept than requests may be repeated."""

    async def scenario():
        log = RequestLog(tmp_path, keep=2, is_needed=lambda entry: True)
        for seq in range(9):
            entry = await log.accept(Entry(seq, "optim_step"), b"body")
            await log.answer(entry, failure("told", is_users=True) if seq % 2 else plain({"type": "optim_step"}))
        await log.close()

    asyncio.run(scenario())
    log = RequestLog(tmp_path, keep=2, is_needed=lambda entry: True)
    assert [entry.is_failure for entry in log.entries.values()] == [bool(seq % 2) for seq in range(9)]


def test_bodies_that_could_not_be_dropped_keep_their_results(tmp_path, monkeypatch):
    async def scenario():
        log = RequestLog(tmp_path, keep=2)
        for seq in range(12):
            entry = await log.accept(Entry(seq, "sample"), b"body")
            with monkeypatch.context() as patch:
                if seq % 3:
                    patch.setattr(os, "replace", lambda *_: _raise(OSError(28, "No space left on device")))
                await log.answer(entry, plain({"type": "sample"}))
        await log.close()

    asyncio.run(scenario())
    log = RequestLog(tmp_path, keep=2)
    assert log.pending() == []


def test_results_of_the_version_before_are_read_from_both_of_its_files(tmp_path):
    async def scenario():
        log = RequestLog(tmp_path, keep=64)
        for seq in range(6):
            entry = await log.accept(Entry(seq, "sample"), b"body")
            await log.answer(entry, plain({"type": "sample", "seq": seq}))
        await log.close()

    asyncio.run(scenario())
    results = tmp_path / "results.journal"
    start = Journal(results).records[3].offset
    data = results.read_bytes()
    cut = data.rindex(b'{"seq": 3', 0, start) - 12
    (tmp_path / "results-old.journal").write_bytes(data[:cut])
    results.write_bytes(data[cut:])
    log = RequestLog(tmp_path, keep=64)
    assert log.pending() == []
    assert [b'"seq": %d' % seq in log.answer_of(log.entries[seq]).body for seq in range(6)] == [True] * 6
    assert not (tmp_path / "results-old.journal").exists()


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


def test_what_a_client_leaves_on_disk_and_in_memory_stays_small(tmp_path):
    """And none of it is carried out again after a start."""

    async def scenario(numbers):
        log, sizes = RequestLog(tmp_path, keep=16), []
        assert log.pending() == []
        for first in numbers[::8]:
            entries = [await log.accept(Entry(seq, "sample"), b"body") for seq in range(first, first + 8)]
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
        assert max(count for count, _ in now) <= 2 * 16 + 8
        assert max(size for _, size in now) <= 1.5 * max(size for _, size in first[:25])


def test_wherever_a_server_is_killed_no_answered_request_is_carried_out_again(tmp_path, monkeypatch):
    """The files are looked at before and after each change of a name."""
    directory, replaced, answered, copies = tmp_path / "log", os.replace, [], []

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
            entries = [await log.accept(Entry(2 * seq + one, "sample"), b"body") for one in range(2)]
            for entry in reversed(entries):
                await log.answer(entry, plain({"type": "sample"}))
                answered.append(entry.seq)
        await log.close()

    monkeypatch.setattr(os, "replace", watched)
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
