"""What is written past the page cache is there to the last byte, also where a file system takes no such writes."""

import errno
import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.runtime import local_files
from penstock.workers.runtime.local_files import DirectReader, DirectWriter

BLOCK = 8192


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_files, "BLOCK_BYTES", BLOCK)


def some_bytes(count: int) -> bytes:
    return bytes(number % 251 for number in range(count))


def write(path: Path, parts: Sequence[bytes]) -> DirectWriter:
    with closing(DirectWriter(path)) as writer:
        for part in parts:
            writer.write(memoryview(part))
        writer.finish()
    return writer


def read(path: Path, offset: int, count: int) -> bytes:
    target = bytearray(count)
    with closing(DirectReader(path)) as reader:
        reader.read_into(offset, memoryview(target))
    return bytes(target)


@pytest.mark.parametrize("count", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 4097])
def test_a_file_of_any_length_is_what_was_written(tmp_path: Path, count: int) -> None:
    data, path = some_bytes(count), tmp_path / "file"
    written = write(path, [data[:1000], b"", data[1000:]])
    assert path.read_bytes() == data
    assert (written.num_bytes, written.checksum) == (count, xxhash.xxh3_128_hexdigest(data))
    with closing(DirectReader(path)) as reader:
        assert b"".join(bytes(block) for block in reader.blocks()) == data


def test_a_new_file_has_nothing_of_the_one_before(tmp_path: Path) -> None:
    write(tmp_path / "file", [some_bytes(2 * BLOCK)])
    write(tmp_path / "file", [b"new"])
    assert (tmp_path / "file").read_bytes() == b"new"


@given(st.lists(st.tuples(st.integers(0, 3 * BLOCK), st.integers(0, 2 * BLOCK)), max_size=5))
def test_any_ranges_in_any_order_can_be_read(
    tmp_path_factory: pytest.TempPathFactory, ranges: list[tuple[int, int]]
) -> None:
    data, path = some_bytes(5 * BLOCK + 17), tmp_path_factory.mktemp("ranges") / "file"
    path.write_bytes(data)
    with closing(DirectReader(path)) as reader:
        for offset, count in ranges:
            target = bytearray(count)
            reader.read_into(offset, memoryview(target))
            assert target == data[offset : offset + count]


def test_a_range_beyond_the_end_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "file", [some_bytes(BLOCK + 10)])
    with pytest.raises(EOFError, match="ends 5 bytes too early"):
        read(tmp_path / "file", BLOCK, 15)


def test_where_files_cannot_be_opened_so_the_page_cache_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str, flags: int, mode: int = 0o777, *, real: object = os.open) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return real(path, flags, mode)  # type: ignore[operator]

    monkeypatch.setattr(os, "open", refuse)
    data = some_bytes(2 * BLOCK + 5)
    write(tmp_path / "file", [data])
    assert read(tmp_path / "file", 0, len(data)) == data


@pytest.mark.parametrize("call", ["write", "preadv"])
def test_where_direct_transfers_are_refused_the_page_cache_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    transferred, real = [], getattr(os, call)

    def refuse_once(*arguments: object) -> int:
        transferred.append(arguments)
        if len(transferred) == 1:
            raise OSError(errno.EINVAL, "not aligned as this disk wants it")
        count: int = real(*arguments)
        return count

    monkeypatch.setattr(os, call, refuse_once)
    data = some_bytes(2 * BLOCK + 5)
    write(tmp_path / "file", [data])
    assert read(tmp_path / "file", 0, len(data)) == data


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "file", [some_bytes(10)])
    with pytest.raises(FileNotFoundError):
        DirectReader(tmp_path / "absent")
