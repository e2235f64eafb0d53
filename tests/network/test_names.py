"""Names that others give stay below the directory that they are joined to."""

import os
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.network.names import OutsideName, below, checked

HOSTILE = ["", ".", "..", "../x", "a/../../x", "a/..", "/etc/passwd", "//x", "a\0b", "./../x"]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_that_leads_elsewhere_is_refused_by_name(name: str) -> None:
    with pytest.raises(OutsideName, match="is no name of a file"):
        below(Path("/run"), name)
    with pytest.raises(OutsideName, match="is no name of a file"):
        checked(name)


def test_a_file_has_no_folder_in_its_name_unless_folders_are_allowed() -> None:
    assert below(Path("/run"), "a/b..c/.d") == Path("/run/a/b..c/.d")
    assert checked("b..c") == "b..c"
    with pytest.raises(OutsideName):
        checked("a/b")


@given(st.lists(st.sampled_from(["a", ".", "..", "", "/", "b c", "\0", "~"]), max_size=6).map("/".join))
@example("a//b")
def test_paths_of_any_name_lie_below_the_directory_or_are_refused(name: str) -> None:
    root = Path("/run/of/us")
    try:
        path = below(root, name)
    except OutsideName:
        return
    assert Path(os.path.normpath(path)).is_relative_to(root)
    assert os.path.normpath(path) != str(root)
