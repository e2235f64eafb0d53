"""The benchmark runs and writes its file. The figures of one minute are not judged."""

import pytest


@pytest.mark.real
@pytest.mark.soak("the other quick runs of this folder")
def test_the_quick_run_measures_all_sides_of_all_comparisons(run_quickly):
    written, _ = run_quickly("training")
    assert [entry["side"] for entry in written["rounds"]] == [
        "whole", "tiled", "streamed", "recomputed", "fixed", *("bucketed", "packed") * 3, *("alone", "shared") * 4,
        "1", "2", "4", "auto",
    ]  # fmt: skip
    assert all(entry["seconds"] > 0 and entry["tokens"] > 0 for entry in written["rounds"])
    assert len(written["targets"]) == 13
