"""The house rules about sizes, which keep the code readable: files, functions, constructors, names of tests."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("orchestrator", "workers", "store", "algorithms", "conf", "network", "metering", "recipes")
MOST_LINES, MOST_OF_FUNCTION, MOST_PARAMETERS, SMALL = 400, 60, 8, 60
MOST_OF_NAME = 75


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


def test_no_file_is_long_and_at_most_a_quarter_are_small() -> None:
    lines = {str(file.relative_to(ROOT)): lines_of(file) for file in files()}
    assert [name for name, number in lines.items() if number > MOST_LINES] == []
    assert sum(number < SMALL for number in lines.values()) <= len(lines) / 4


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
