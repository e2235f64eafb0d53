"""The house rules about sizes, which keep the code readable: functions, constructors, names of tests. A file has no
limit: it holds one idea. And how many files of tests look at what is private."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "cli", "planner", "serve", "ui", "orchestrator", "workers", "store", "algorithms", "conf", "network", "metering",
    "recipes",
)  # fmt: skip
MOST_OF_FUNCTION, MOST_PARAMETERS, SMALL = 60, 8, 60
MOST_OF_NAME = 75
MOST_THAT_PRY = 17
"""Largest number of files of tests that use private names of the product. The others see what everybody can see."""


def files() -> list[Path]:
    found = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py")) if file.name != "__init__.py"]
    assert len(found) > 300
    return found


def lines_of(file: Path) -> int:
    return len(file.read_text().splitlines())


def functions_of(file: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_at_most_a_quarter_of_the_files_are_small() -> None:
    lines = [lines_of(file) for file in files()]
    assert sum(number < SMALL for number in lines) <= len(lines) / 4


def test_no_function_is_long() -> None:
    long = [
        f"{file.relative_to(ROOT)}: {function.name}"
        for file in files()
        for function in functions_of(file)
        if (function.end_lineno or 0) - function.lineno + 1 > MOST_OF_FUNCTION
    ]
    assert long == []


def test_constructors_have_few_parameters() -> None:
    many = {
        str(file.relative_to(ROOT))
        for file in files()
        for function in functions_of(file)
        if function.name == "__init__" and len(function.args.args) - 1 + len(function.args.kwonlyargs) > MOST_PARAMETERS
    }
    assert many == set()


def test_no_name_of_a_test_is_long() -> None:
    names = [
        (file, function.name)
        for file in sorted((ROOT / "tests").rglob("test_*.py"))
        for function in functions_of(file)
        if function.name.startswith("test_")
    ]
    assert len(names) > 1000
    assert [f"{file.relative_to(ROOT)}: {name}" for file, name in names if len(name) > MOST_OF_NAME] == []


def own_names(tree: ast.AST) -> Iterator[str]:
    """Private names that a file defines: functions, classes, variables, attributes of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            name = node.attr
        else:
            continue
        if name.startswith("_") and not name.startswith("__") and not name.endswith("_"):  # `_repr_html_` is IPython's
            yield name


def foreign_names(tree: ast.AST) -> Iterator[str]:
    """Names that a file uses of others: attributes of anything but `self`, imports, and what it patches."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not is_self(node.value):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock"):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            texts = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            if ast.unparse(node.func).endswith(("setattr", "getattr", "object")):
                yield from (text.rpartition(".")[2] for text in texts if isinstance(text, str))


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def test_few_tests_use_private_names_of_the_product() -> None:
    private = {name for file in files() for name in own_names(ast.parse(file.read_text()))}
    prying = []
    for file in sorted((ROOT / "tests").rglob("*.py")):
        tree = ast.parse(file.read_text())
        if names := private & set(foreign_names(tree)) - set(own_names(tree)):
            prying.append(f"{file.relative_to(ROOT)}: {', '.join(sorted(names))}")
    assert len(prying) <= MOST_THAT_PRY, "\n".join(prying)
