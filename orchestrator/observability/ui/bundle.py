"""The page's scripts and styles as text, for a page that is one file: `report.html`.

A module of the page imports by lines of its own, and no two define the same name. So modules that are put one after the
other, without their imports and exports, are one script.
"""

import re
from functools import cache
from pathlib import Path

STATIC = Path(__file__).parent / "static"
_IMPORT = re.compile(r"^import .*$\n?", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=async |class |const |function )", re.MULTILINE)


@cache
def script(*modules: str) -> str:
    """Several modules as one script. `modules`: in the order in which they need each other."""
    text = "\n".join(_EXPORT.sub("", _IMPORT.sub("", _read(module))) for module in modules)
    if left := re.search(r"^\s*(import|export)\b.*$", text, re.MULTILINE):
        raise ValueError(f"{modules}: {left[0]} stands in the way of one script.")
    return text


@cache
def library() -> str:
    """The script of uPlot."""
    return _read("vendor/uPlot.iife.min.js")


@cache
def style(*sheets: str) -> str:
    return "\n".join(map(_read, sheets))


def _read(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")
