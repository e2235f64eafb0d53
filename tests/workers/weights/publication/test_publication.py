"""A publication is complete and right, or it does not exist."""

import json
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import safetensors.torch
import torch

from penstock.conf.errors import WeightError
from penstock.workers.protocols import Publication
from penstock.workers.weights.publication import publication_files
from penstock.workers.weights.publication.layout import Outlet, byte_span, compute_layout
from penstock.workers.weights.publication.publication import PublicationWriter, seal
from penstock.workers.weights.publication.publication_files import (
    MappedWeights,
    open_publication,
    publication_directories,
    publication_directory,
    reclaim,
)
from tests.publications import newest_publication, write_publication, write_rows

NET_S = 900.0
TENSORS = {
    "model.embed_tokens.weight": torch.arange(7 * 4, dtype=torch.float32).reshape(7, 4),
    "model.layers.0.bias": torch.tensor([1.5, -2.0, 3.25]),
    "model.norm.scale": torch.tensor(0.5),
    "model.none": torch.empty(0, 3),
}


def adapter_layout(dtype: str = "float32"):
    return compute_layout((name, tuple(tensor.shape), dtype) for name, tensor in TENSORS.items())


def weights_file(publication: Publication) -> Path:
    return Path(publication.directory) / "model.safetensors"


def flip_byte(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x01
    path.write_bytes(data)


def test_the_library_reads_back_what_was_published(tmp_path: Path) -> None:
    publication = write_publication(tmp_path, 3, TENSORS.items())
    loaded = safetensors.torch.load_file(weights_file(publication))
    assert set(loaded) == set(TENSORS)
    for name, tensor in TENSORS.items():
        torch.testing.assert_close(loaded[name], tensor, rtol=0, atol=0)


def test_the_file_is_what_the_library_would_have_written(tmp_path: Path) -> None:
    publication = write_publication(tmp_path, 3, TENSORS.items())
    assert weights_file(publication).read_bytes() == safetensors.torch.save(TENSORS, metadata={"format": "pt"})
    assert publication.num_bytes == weights_file(publication).stat().st_size


def test_mapped_tensors_equal_those_written(tmp_path: Path) -> None:
    mapped = MappedWeights(write_publication(tmp_path, 1, TENSORS.items()))
    mapped.verify()
    for name, tensor in mapped.tensors():
        torch.testing.assert_close(tensor, TENSORS[name], rtol=0, atol=0)


def test_tensors_are_cast_to_the_dtype_of_the_layout(tmp_path: Path) -> None:
    mapped = MappedWeights(write_publication(tmp_path, 1, TENSORS.items(), dtype="bfloat16"))
    assert torch.equal(mapped.tensor("model.layers.0.bias"), TENSORS["model.layers.0.bias"].bfloat16())


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_ranks_writing_their_rows_make_the_same_file_as_one(tmp_path: Path, num_ranks: int) -> None:
    layout = adapter_layout()
    writers = [PublicationWriter(tmp_path, 2, layout, rank, num_ranks) for rank in range(num_ranks)]
    for name, tensor in TENSORS.items():
        if not tensor.shape:
            write_rows(writers[0], name, 0, tensor)
            continue
        rows = -(-tensor.shape[0] // num_ranks)
        for rank, writer in enumerate(writers):
            write_rows(writer, name, min(rank * rows, tensor.shape[0]), tensor[rank * rows : (rank + 1) * rows])
    for writer in reversed(writers):
        writer.finish()
    publication = seal(tmp_path, 2, layout, num_ranks)
    alone = write_publication(tmp_path / "alone", 2, TENSORS.items())
    assert weights_file(publication).read_bytes() == weights_file(alone).read_bytes()
    MappedWeights(publication).verify()
    assert sorted(os.listdir(publication.directory)) == ["manifest.json", "model.safetensors"]


def test_flat_pieces_in_any_cut_make_the_same_file_as_whole_tensors(tmp_path: Path) -> None:
    layout = adapter_layout()
    writers = [PublicationWriter(tmp_path, 2, layout, rank, 3) for rank in range(3)]
    for name, tensor in TENSORS.items():
        flat, size = tensor.reshape(-1), -(-tensor.numel() // 3)
        for rank, writer in enumerate(writers):
            writer.write_elements(name, min(rank * size, len(flat)), flat[rank * size : (rank + 1) * size])
    for writer in writers:
        writer.finish()
    publication = seal(tmp_path, 2, layout, 3)
    alone = write_publication(tmp_path / "alone", 2, TENSORS.items())
    assert weights_file(publication).read_bytes() == weights_file(alone).read_bytes()
    MappedWeights(publication).verify()


def test_large_tensors_are_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.workers.weights.publication.publication.BLOCK_BYTES", 12)
    writer = PublicationWriter(tmp_path, 1, adapter_layout(), outlet=Outlet(range_bytes=36))
    for name, tensor in TENSORS.items():
        write_rows(writer, name, 0, tensor)
    assert max(entry.num_elements for entry in writer.finish()) == 9
    publication = seal(tmp_path, 1, adapter_layout())
    MappedWeights(publication).verify()
    assert weights_file(publication).read_bytes() == safetensors.torch.save(TENSORS, metadata={"format": "pt"})


def test_a_half_written_publication_cannot_be_opened(tmp_path: Path) -> None:
    writer = PublicationWriter(tmp_path, 4, adapter_layout())
    write_rows(writer, "model.layers.0.bias", 0, TENSORS["model.layers.0.bias"])
    writer.finish()
    with pytest.raises(WeightError, match="never completed"):
        open_publication(Publication(str(publication_directory(tmp_path, 4)), 4))
    assert newest_publication(tmp_path) is None


def test_sealing_names_the_tensor_whose_elements_are_missing(tmp_path: Path) -> None:
    writer = PublicationWriter(tmp_path, 4, adapter_layout())
    for name, tensor in TENSORS.items():
        write_rows(writer, name, 0, tensor[:5] if name == "model.embed_tokens.weight" else tensor)
    writer.finish()
    with pytest.raises(WeightError, match=r"'model.embed_tokens.weight' has 28 elements, 20 were written"):
        seal(tmp_path, 4, adapter_layout())


def test_sealing_refuses_elements_that_two_ranks_wrote(tmp_path: Path) -> None:
    layout = adapter_layout()
    for rank in range(2):
        writer = PublicationWriter(tmp_path, 4, layout, rank, 2)
        for name, tensor in TENSORS.items():
            write_rows(writer, name, 0, tensor)
        writer.finish()
    with pytest.raises(WeightError, match="written by exactly one rank"):
        seal(tmp_path, 4, layout, 2)


def test_sealing_names_the_rank_that_did_not_finish(tmp_path: Path) -> None:
    PublicationWriter(tmp_path, 4, adapter_layout(), 0, 2).finish()
    with pytest.raises(WeightError, match="rank 1 of 2 did not finish"):
        seal(tmp_path, 4, adapter_layout(), 2)


def test_publishing_a_version_again_replaces_it(tmp_path: Path) -> None:
    write_publication(tmp_path, 1, TENSORS.items())
    writer = PublicationWriter(tmp_path, 1, adapter_layout())
    with pytest.raises(WeightError):
        open_publication(Publication(str(writer.path), 1))
    writer.finish()
    again = write_publication(tmp_path, 1, [(name, tensor + 1) for name, tensor in TENSORS.items()])
    mapped = MappedWeights(again)
    mapped.verify()
    assert torch.equal(mapped.tensor("model.layers.0.bias"), TENSORS["model.layers.0.bias"] + 1)


def test_a_flipped_bit_is_found_and_its_tensor_named(tmp_path: Path) -> None:
    publication = write_publication(tmp_path, 1, TENSORS.items())
    flip_byte(weights_file(publication), adapter_layout().place("model.layers.0.bias").offset + 5)
    mapped = MappedWeights(publication)
    with pytest.raises(WeightError, match=r"model\.safetensors: tensor 'model\.layers\.0\.bias', elements 0 to 2"):
        mapped.verify()


def noted_checks(monkeypatch: pytest.MonkeyPatch, before: Callable[[], None] = lambda: None) -> list[MappedWeights]:
    checked: list[MappedWeights] = []
    verify = MappedWeights.verify

    def noted(mapped: MappedWeights) -> None:
        checked.append(mapped)
        before()
        verify(mapped)

    monkeypatch.setattr(MappedWeights, "verify", noted)
    return checked


def test_one_of_several_engines_of_a_node_verifies_and_the_others_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publication = write_publication(tmp_path, 1, TENSORS.items())
    may_end = threading.Event()
    checked = noted_checks(monkeypatch, lambda: may_end.wait(NET_S) and None)
    with ThreadPoolExecutor(4) as threads:
        engines = [MappedWeights(publication) for _ in range(4)]
        found = [threads.submit(engine.verify_once) for engine in engines]
        assert not wait(found, 0.05).done
        assert len(checked) == 1
        may_end.set()
        assert sorted(one.result(NET_S) for one in found) == [False, False, False, True]
    assert MappedWeights(publication).verify_once() is False
    assert len(checked) == 1


def test_no_engine_loads_what_another_has_found_damaged(tmp_path: Path) -> None:
    publication = write_publication(tmp_path, 1, TENSORS.items())
    flip_byte(weights_file(publication), adapter_layout().place("model.layers.0.bias").offset + 5)
    for _ in range(3):
        with pytest.raises(WeightError, match=r"tensor 'model\.layers\.0\.bias'"):
            MappedWeights(publication).verify_once()


def test_a_version_that_is_written_again_is_verified_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = noted_checks(monkeypatch)
    for change in (0, 0, 1):  # also if its bytes are the same
        mapped = MappedWeights(
            write_publication(tmp_path, 1, [(name, some + change) for name, some in TENSORS.items()])
        )
        assert mapped.verify_once()
        del mapped
    version_2 = MappedWeights(write_publication(tmp_path, 2, TENSORS.items()))
    assert version_2.verify_once()
    assert len(checked) == 4


def test_a_note_of_another_file_or_manifest_counts_for_nothing(tmp_path: Path) -> None:
    publication = write_publication(tmp_path, 1, TENSORS.items())
    mapped = MappedWeights(publication)
    for text in ("", f"{mapped.inode}", f"{mapped.inode + 1} {mapped.manifest.digest}", f"{mapped.inode} torn"):
        (Path(publication.directory) / "verified").write_text(text)
        assert mapped.verify_once()
        assert not mapped.verify_once()


def test_a_reclaimed_version_that_is_mapped_is_verified_all_the_same(tmp_path: Path) -> None:
    mapped = MappedWeights(write_publication(tmp_path, 1, TENSORS.items()))
    shutil.rmtree(mapped.manifest.directory)
    assert mapped.verify_once()
    assert mapped.verify_once()


def test_every_single_bit_of_the_file_matters(tmp_path: Path) -> None:
    publication = write_publication(tmp_path, 1, TENSORS.items())
    path = weights_file(publication)
    intact = path.read_bytes()
    for position in range(0, len(intact), 7):
        flip_byte(path, position)
        with pytest.raises(WeightError):
            MappedWeights(publication).verify()
        path.write_bytes(intact)
    MappedWeights(publication).verify()


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    publication = write_publication(tmp_path, 1, TENSORS.items())
    os.truncate(weights_file(publication), publication.num_bytes - 1)
    with pytest.raises(WeightError, match="truncated"):
        open_publication(publication)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    publication = write_publication(tmp_path, 1, TENSORS.items())
    weights_file(publication).unlink()
    with pytest.raises(WeightError, match=r"model\.safetensors: missing"):
        open_publication(publication)


def test_another_version_than_asked_for_is_refused(tmp_path: Path) -> None:
    publication = write_publication(tmp_path, 1, TENSORS.items())
    with pytest.raises(WeightError, match="holds version 1, but version 2"):
        open_publication(Publication(publication.directory, 2))


@pytest.mark.parametrize("text", ["", "{", '{"version": 1}', "[1]"])
def test_an_unreadable_manifest_is_refused(tmp_path: Path, text: str) -> None:
    publication = write_publication(tmp_path, 1, TENSORS.items())
    (Path(publication.directory) / "manifest.json").write_text(text)
    with pytest.raises(WeightError, match="unreadable manifest"):
        open_publication(publication)


def test_a_shard_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    writer = PublicationWriter(tmp_path, 1, adapter_layout())
    for first_row, shape in ((0, (7, 5)), (1, (7, 4)), (-1, (2, 4)), (0, (8, 4))):
        with pytest.raises(WeightError, match="do not fit"):
            write_rows(writer, "model.embed_tokens.weight", first_row, torch.zeros(shape))


def test_too_small_a_file_system_is_reported_before_writing(tmp_path: Path) -> None:
    huge = compute_layout([("w", (10**15,), "float32")])
    with pytest.raises(WeightError, match=r"[\d,]+ bytes are needed, [\d,]+ of [\d,]+ are free") as failure:
        PublicationWriter(tmp_path, 1, huge)
    assert str(tmp_path) in str(failure.value)
    assert f"{huge.num_bytes:,}" in str(failure.value)


def test_reclaiming_keeps_the_newest(tmp_path: Path) -> None:
    for version in (1, 2, 3, 12):
        write_publication(tmp_path, version, TENSORS.items())
    reclaim(tmp_path, keep=2)
    assert [path.name for path in publication_directories(tmp_path)] == ["v00000003", "v00000012"]
    newest = newest_publication(tmp_path)
    assert newest is not None
    assert newest.version == 12
    MappedWeights(newest).verify()


def test_a_mapping_outlives_its_publication(tmp_path: Path) -> None:
    publication = write_publication(tmp_path, 1, TENSORS.items())
    mapped = MappedWeights(publication)
    reclaim(tmp_path, keep=0)
    mapped.verify()
    assert torch.equal(mapped.tensor("model.layers.0.bias"), TENSORS["model.layers.0.bias"])


def test_the_manifest_says_who_wrote_what(tmp_path: Path) -> None:
    publication = write_publication(tmp_path, 9, TENSORS.items())
    fields = json.loads((Path(publication.directory) / "manifest.json").read_text())
    assert fields["version"] == 9
    assert fields["tensors"]["model.layers.0.bias"] == {"dtype": "float32", "shape": [3]}
    assert {entry[0] for entry in fields["ranges"]} == set(TENSORS) - {"model.none"}


def test_several_threads_check_a_large_file_and_name_the_first_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publication_files, "THREAD_BYTES", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    assert publication_files.num_checking_threads(2**40) == publication_files.MOST_THREADS
    publication = write_publication(tmp_path, 1, TENSORS.items())
    mapped = MappedWeights(publication)
    mapped.verify()
    first, *_, last = mapped.manifest.ranges
    for entry in (last, first):
        flip_byte(weights_file(publication), byte_span(mapped.manifest.layout, entry)[0])
    with pytest.raises(WeightError, match=f"tensor '{first.name}'"):
        mapped.verify()


def test_a_small_file_is_checked_by_one_thread() -> None:
    assert publication_files.num_checking_threads(2**20) == 1
