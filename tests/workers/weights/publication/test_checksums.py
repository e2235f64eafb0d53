"""The hash of a version of the weights, which ranks add up from their ranges."""

from pathlib import Path

import torch

from penstock.workers.weights.publication.layout import compute_layout
from penstock.workers.weights.publication.publication import PublicationWriter

LAYOUT = compute_layout([("a", (2, 3), "float32"), ("b", (4,), "float32")])


def checksum_of(root: Path, values: dict[str, torch.Tensor]) -> int:
    """The checksum of values that one rank has written."""
    writer = PublicationWriter(root, 1, LAYOUT)
    for name, flat in values.items():
        writer.write_elements(name, 0, flat)
    writer.close()
    return writer.checksum


def test_the_order_of_tensors_changes_nothing_and_one_bit_does(tmp_path: Path) -> None:
    values = {"a": torch.arange(6.0), "b": torch.arange(4.0)}
    found = checksum_of(tmp_path / "one", values)
    assert checksum_of(tmp_path / "two", dict(reversed(values.items()))) == found
    values["b"].view(torch.int32)[3] ^= 1
    assert checksum_of(tmp_path / "three", values) != found


def test_parts_of_ranks_add_up_to_the_whole(tmp_path: Path) -> None:
    values = {"a": torch.arange(6.0), "b": torch.arange(4.0)}
    parts = [checksum_of(tmp_path / name, {name: values[name]}) for name in values]
    assert sum(parts) % 2**128 == checksum_of(tmp_path / "whole", values)
