"""Prints the test files that a change can affect: `python -m tests.affected [SINCE]`. Used by `make affected`.

A test file is affected by the modules that it imports, directly or indirectly, by modules that these name in quotes
(`"penstock.workers.reward.code"`), by the `conftest.py` of its folders, and by documents if it reads any. A file that
is neither Python nor a document (a recipe, a script of the page, a lock) affects every test. The change is the
difference from the commit SINCE (default: HEAD), including untracked files.
"""

import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
PACKAGES = ("penstock", "tests", "benchmarks")
QUOTED = re.compile(r"[\"'`](penstock(?:\.[a-z_0-9]+)+)")
"""A module that is imported by name or run as a program, perhaps followed by a name inside it."""


def changed_files(since: str) -> list[str]:
    """Paths relative to the project's root, including removed files."""
    commands = (["git", "diff", "--name-only", since], ["git", "ls-files", "--others", "--exclude-standard"])
    printed = [subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout for words in commands]
    return sorted({line for text in printed for line in text.splitlines()})


def import_graph() -> grimp.ImportGraph:
    """Imports within the project. A module that the product names in quotes counts as imported."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    for module in [name for name in graph.modules if name.startswith("penstock.")]:
        file = ROOT / path_of(module)
        for name in QUOTED.findall(file.read_text()) if file.exists() else ():
            while name not in graph.modules:
                name = name.rpartition(".")[0]
            if "." in name:
                graph.add_import(importer=module, imported=name)
    return graph


def affected_tests(changed: Iterable[str], graph: grimp.ImportGraph, text_of: Callable[[str], str]) -> list[str]:
    """Paths of test files. `text_of` returns the text of the file at a path."""
    tests = {module: path_of(module) for module in graph.modules if is_test(module)}
    found: set[str] = set()
    for path in changed:
        if path.endswith(".md"):
            found |= {path for path in tests.values() if ".md" in text_of(path)}
        elif not path.endswith(".py"):
            found |= set(tests.values())
        elif (module := module_of(path)) in graph.modules:
            reached = {module} | graph.find_downstream_modules(module)
            fixtures = [name.removesuffix("conftest") for name in reached if name.endswith(".conftest")]
            found |= {
                tests[name] for name in tests if name in reached or any(name.startswith(folder) for folder in fixtures)
            }
    return sorted(found)


def module_of(path: str) -> str:
    """The layers lie at the root and are imported below `penstock`."""
    words = path.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join(words if words[0] in PACKAGES else ["penstock", *words])


def path_of(module: str) -> str:
    return module.removeprefix("penstock.").replace(".", "/") + ".py"


def is_test(module: str) -> bool:
    """Return whether a module has tests that `.venv` can run. Those of `tests/oracle` have another environment."""
    in_oracle = module.startswith("tests.oracle.")
    return module.startswith("tests.") and module.rpartition(".")[2].startswith("test_") and not in_oracle


def main() -> None:
    since = sys.argv[1] if len(sys.argv) > 1 else "HEAD"
    print(*affected_tests(changed_files(since), import_graph(), lambda path: (ROOT / path).read_text()), sep="\n")


if __name__ == "__main__":
    main()
