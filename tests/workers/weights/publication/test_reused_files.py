"""Two files take turns; one that somebody reads is left alone; whatever kills a writer, the last publication stays."""

import errno
import itertools
import mmap
import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from penstock.conf.errors import WeightError
from penstock.workers.protocols import Publication
from penstock.workers.weights.publication import publication_files
from penstock.workers.weights.publication.layout import compute_layout
from penstock.workers.weights.publication.publication import PublicationWriter
from penstock.workers.weights.publication.publication_files import (
    MappedWeights,
    WritableMappings,
    open_publication,
    publication_directories,
    publication_directory,
    reclaim,
)
from tests.publications import newest_publication, write_publication
from tests.tmpfs import run_in_tmpfs

ELEMENTS = 300_000


def publish(root: Path, version: int, elements: int = ELEMENTS) -> Publication:
    """Two tensors filled with the version."""
    return write_publication(root, version, [(name, torch.full((elements,), float(version))) for name in ("a", "b")])


def check(publication: Publication | None) -> None:
    assert publication is not None
    mapped = MappedWeights(publication)
    mapped.verify()
    for _, tensor in mapped.tensors():
        assert torch.all(tensor == publication.version)


def inode(publication: Publication) -> int:
    return (Path(publication.directory) / "model.safetensors").stat().st_ino


def versions(root: Path) -> list[int]:
    return [int(path.name[1:]) for path in publication_directories(root)]


def test_two_files_take_turns(tmp_path: Path) -> None:
    inodes = [inode(publish(tmp_path, version)) for version in range(1, 7)]
    assert inodes == inodes[:2] * 3
    assert inodes[0] != inodes[1]
    assert versions(tmp_path) == [5, 6]
    check(newest_publication(tmp_path))


def test_a_file_of_another_size_is_taken_all_the_same(tmp_path: Path) -> None:
    first = inode(publish(tmp_path, 1))
    publish(tmp_path, 2)
    grown = publish(tmp_path, 3, elements=2 * ELEMENTS)
    check(grown)
    assert inode(grown) == first
    check(publish(tmp_path, 4, elements=100))


def test_a_publication_that_is_being_loaded_is_not_written_over(tmp_path: Path) -> None:
    slow = publish(tmp_path, 1)
    loading = MappedWeights(slow)
    for version in range(2, 6):
        check(publish(tmp_path, version))
        reclaim(tmp_path, keep=2)
    loading.verify()
    assert torch.all(loading.tensor("a") == 1)
    assert versions(tmp_path) == [4, 5]


def test_a_tensor_alone_keeps_its_file_from_being_taken(tmp_path: Path) -> None:
    tensor = MappedWeights(publish(tmp_path, 1)).tensor("a")
    for version in range(2, 5):
        publish(tmp_path, version)
    assert torch.all(tensor == 1)


def test_a_file_is_free_again_when_its_reader_has_let_go(tmp_path: Path) -> None:
    first = publish(tmp_path, 1)
    expected = inode(first)
    MappedWeights(first).verify()
    publish(tmp_path, 2)
    assert inode(publish(tmp_path, 3)) == expected


def test_files_that_take_turns_are_mapped_once_and_read_as_the_present_version(tmp_path: Path) -> None:
    made: list[int] = []

    def make(descriptor: int, num_bytes: int) -> mmap.mmap:
        made.append(num_bytes)
        return mmap.mmap(descriptor, num_bytes)

    files = WritableMappings(make)
    for version in range(1, 7):
        publication = publish(tmp_path, version)
        mapped = MappedWeights(publication)
        mapped.read_from(files)
        mapped.verify()
        assert torch.all(mapped.tensor("a") == version)
        del mapped
    assert len(made) == 2
    held = MappedWeights(publication)
    held.read_from(files)
    for version in range(7, 10):  # its file is locked all the same
        publish(tmp_path, version)
    assert torch.all(held.tensor("a") == 6)


def test_a_version_published_again_is_not_read_for_the_one_that_was_verified(tmp_path: Path) -> None:
    loading = MappedWeights(publish(tmp_path, 1))
    write_publication(tmp_path, 1, [(name, torch.full((ELEMENTS,), 9.0)) for name in ("a", "b")])
    loading.read_from(WritableMappings())
    loading.verify()
    assert torch.all(loading.tensor("a") == 1)


def test_a_manifest_read_before_its_file_was_taken_maps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publication = publish(tmp_path, 1)
    manifest = open_publication(publication)
    for version in (2, 3):
        publish(tmp_path, version)
    monkeypatch.setattr(publication_files, "open_publication", lambda _: manifest)
    with pytest.raises(WeightError, match=r"never completed|was reclaimed"):
        MappedWeights(publication)


def test_a_version_republished_while_it_is_loaded_gets_another_file(tmp_path: Path) -> None:
    publication = publish(tmp_path, 1)
    loading = MappedWeights(publication)
    again = write_publication(tmp_path, 1, [(name, torch.full((ELEMENTS,), 9.0)) for name in ("a", "b")])
    assert torch.all(loading.tensor("a") == 1)
    assert torch.all(MappedWeights(again).tensor("a") == 9)


READER = """
import sys, time
from penstock.workers.protocols import Publication
from penstock.workers.weights.publication.publication_files import MappedWeights
mapped = MappedWeights(Publication(sys.argv[1], 1))
print("mapped", flush=True)
time.sleep(60)
"""


@pytest.mark.real
def test_a_killed_reader_leaves_no_lock(tmp_path: Path) -> None:
    first = publish(tmp_path, 1)
    expected = inode(first)
    reader = subprocess.Popen([sys.executable, "-c", READER, first.directory], stdout=subprocess.PIPE, text=True)
    assert reader.stdout is not None
    assert reader.stdout.readline() == "mapped\n"
    publish(tmp_path, 2)
    assert inode(publish(tmp_path, 3)) != expected
    reader.kill()
    reader.wait()
    assert inode(publish(tmp_path, 4)) == expected


def publish_forever(root: Path, version: int) -> None:
    torch.set_num_threads(1)  # a child by fork has none of its parent's
    for following in itertools.count(version):
        publish(root, following)
        reclaim(root, keep=2)


@pytest.mark.real
def test_a_writer_killed_at_any_moment_leaves_the_newest_publication_whole(tmp_path: Path) -> None:
    dice = random.Random(5)
    last = publish(tmp_path, 1)
    for kill in range(20):
        writer = multiprocessing.get_context("fork").Process(target=publish_forever, args=(tmp_path, last.version + 1))
        writer.start()
        deadline = time.monotonic() + 300
        while kill % 2 and newest_publication(tmp_path) == last and time.monotonic() < deadline:
            time.sleep(0.001)  # every other writer is on its second version at least
        time.sleep(dice.uniform(0.0, 0.02))
        writer.kill()
        writer.join()
        newest = newest_publication(tmp_path)
        assert newest is not None
        assert newest.version >= last.version
        check(newest)
        assert len(versions(tmp_path)) <= 3
        last = newest
    assert last.version > 10, "the writers did not get far"


@pytest.mark.parametrize("step", range(1, 10))
def test_a_writer_that_dies_between_two_changes_of_the_directory_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Dies at the n-th call that changes the file system, by an exception that nothing handles."""
    for version in (1, 2):
        publish(tmp_path, version)
    left = [step]

    def dying(call: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*arguments: object, **options: object) -> object:
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            return call(*arguments, **options)

        return wrapped

    with monkeypatch.context() as patch:
        for name in ("posix_fallocate", "ftruncate", "replace", "unlink", "mkdir"):
            patch.setattr(os, name, dying(getattr(os, name)))
        try:
            publish(tmp_path, 3)
        except KeyboardInterrupt:
            newest = newest_publication(tmp_path)
            check(newest)
    check(newest_publication(tmp_path))
    check(publish(tmp_path, 3))


def test_a_full_file_system_is_reported_and_the_attempt_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = publish(tmp_path, 1)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(WeightError, match="no room for a publication"):
        PublicationWriter(tmp_path, 2, compute_layout([("w", (5000,), "float32")]))
    assert not publication_directory(tmp_path, 2).exists()
    check(last)


SMALL_TMPFS = """
import sys
import torch
from penstock.conf.errors import WeightError
from tests.publications import newest_publication, write_publication
from penstock.workers.weights.publication.publication_files import MappedWeights, open_publication

def publish(version, megabytes):
    return write_publication(sys.argv[1], version, [("w", torch.full((megabytes * 2**18,), float(version)))])

def refused(version, megabytes):
    try:
        publish(version, megabytes)
    except WeightError as error:
        assert "no room for a publication" in str(error) and "/dev/shm" in str(error), error
    else:
        raise SystemExit(f"{megabytes} MB fitted")
    newest = newest_publication(sys.argv[1])
    mapped = MappedWeights(newest)
    mapped.verify()
    assert torch.all(mapped.tensor("w") == newest.version)

first = publish(1, 3)
reader = MappedWeights(first)
publish(2, 3)
refused(3, 3)  # a third file, while the first is being read
del reader
publish(3, 3)
refused(4, 7)
publish(4, 3)
print("the last publication was whole")
"""


@pytest.mark.real
def test_a_small_tmpfs_that_fills_up_costs_the_attempt_only(tmp_path: Path, warm_python: list[str]) -> None:
    output = run_in_tmpfs(SMALL_TMPFS, tmp_path, "covered only by the simulated ENOSPC above", warm_python)
    assert output == "the last publication was whole\n"


def test_threads_with_different_roots_release_each_others_mappings_unharmed(tmp_path: Path) -> None:
    mappings = WritableMappings()

    def write(name: str) -> None:
        root = tmp_path / name
        root.mkdir()
        for number in range(300):
            file = root / str(number % 3)
            if not file.exists() or number % 7 == 0:
                file.unlink(missing_ok=True)
                file.write_bytes(bytes(4096))
            mappings.unmap_stale(root)
            mappings.map(file, root).window(0, 1)[:] = bytes([number % 256])
            assert file.read_bytes()[0] == number % 256

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(write, name) for name in "abcd"]:
            done.result()
    mappings.close()


def test_the_same_file_is_mapped_once(tmp_path: Path) -> None:
    file, mappings = tmp_path / "file", WritableMappings()
    file.write_bytes(bytes(4096))
    first, again = mappings.map(file, tmp_path), mappings.map(file, tmp_path)
    assert (first.is_fresh, again.is_fresh) == (True, False)
    assert first.memory is again.memory
    mappings.close()
