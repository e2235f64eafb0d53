"""What `make affected` runs after a change."""

import pytest

from tests.affected import ROOT, affected_tests, import_graph, module_of, path_of

LEDGER = "store/ledger/ledger.py"


@pytest.fixture(scope="module")
def affected():
    graph = import_graph()
    return lambda *changed: affected_tests(changed, graph, lambda path: (ROOT / path).read_text())


def test_a_file_and_its_module_have_each_others_name():
    for path in (LEDGER, "tests/store/driver.py", "benchmarks/store.py"):
        assert path_of(module_of(path)) == path
    assert module_of("penstock/__init__.py") == "penstock"


def test_tests_that_import_a_module_are_affected_and_others_are_not(affected):
    found = affected(LEDGER)
    assert "tests/store/ledger/test_staleness.py" in found
    assert "tests/orchestrator/recovery/test_supervisor.py" in found  # through the scripted store
    assert not [path for path in found if path.startswith(("tests/algorithms/losses/", "tests/conf/"))]


def test_a_test_is_affected_by_itself_alone(affected):
    assert affected("tests/store/ledger/test_staleness.py") == ["tests/store/ledger/test_staleness.py"]


def test_a_module_that_is_imported_by_its_name_affects_who_may_import_it(affected):
    assert "tests/workers/reward/test_functions.py" in affected("workers/reward/judge.py")


def test_tests_that_need_another_environment_are_not_named(affected):
    found = affected("requirements/cpu.lock")
    assert "tests/store/ledger/test_staleness.py" in found
    assert not [path for path in found if path.startswith("tests/oracle/")]


def test_fixtures_affect_all_tests_of_their_folder(affected):
    found = affected("tests/store/conftest.py")
    assert {"tests/store/test_imports.py", "tests/store/ledger/test_staleness.py"} <= set(found)
    assert all(path.startswith("tests/store/") for path in found)


def test_a_document_affects_those_that_read_documents(affected):
    found = affected("README.md")
    assert {"tests/test_documents.py", "tests/test_promises.py"} <= set(found)
    assert len(found) < 30


def test_what_is_neither_python_nor_a_document_affects_everything(affected):
    everything = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    assert {path for path in everything if "/oracle/" not in path} <= set(affected("recipes/grpo/recipe.yaml"))
