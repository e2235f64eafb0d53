"""The page's modules as one script."""

import re
from pathlib import Path

import pytest

from penstock.orchestrator.observability.reporting.report import SCRIPT
from penstock.orchestrator.observability.ui import bundle


def test_modules_become_a_script_that_names_no_other() -> None:
    text = bundle.script(*SCRIPT)
    assert not re.search(r"^\s*(import|export)\b", text, re.MULTILINE)
    assert "class ChartView" in text
    assert "</script" not in text + bundle.library()


def test_no_two_modules_define_the_same_name() -> None:
    names = re.findall(r"^(?:async )?(?:const|let|class|function) (\w+)", bundle.script(*SCRIPT), re.MULTILINE)
    assert sorted(names) == sorted(set(names))


def test_modules_that_cannot_be_one_script_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "odd.js").write_text("export default 3;\n")
    monkeypatch.setattr(bundle, "STATIC", tmp_path)
    with pytest.raises(ValueError, match="export default"):
        bundle.script("odd.js")


def test_styles_follow_one_another() -> None:
    assert (
        bundle.style("vendor/uPlot.min.css", "style.css").index(".uplot")
        < bundle.style("style.css").index(":root") + 10_000
    )
