"""The page's modules as one script."""

import re

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


def test_what_cannot_be_one_script_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "_read", lambda name: "export default 3;\n")
    with pytest.raises(ValueError, match="export default"):
        bundle.script("odd.js")


def test_styles_follow_one_another() -> None:
    assert (
        bundle.style("vendor/uPlot.min.css", "style.css").index(".uplot")
        < bundle.style("style.css").index(":root") + 10_000
    )
