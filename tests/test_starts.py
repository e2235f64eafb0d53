"""A test that is not marked `real` and starts a process, or uses one, fails."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real

CONFTEST = """
import pytest
from tests.starts import Starts
STARTS = Starts()
STARTS.listen()
def pytest_configure(config):
    config.pluginmanager.register(STARTS)
@pytest.fixture(scope="session")
def child():
    import subprocess
    return subprocess.run(["true"]).returncode
"""
TESTS = """
import contextlib, multiprocessing, os, subprocess, threading
import pytest

def test_nothing(): pass

@pytest.mark.real
def test_marked(child): assert child == 0

def test_shared_fixture(child): pass

def test_popen(): subprocess.run(["true"])

def test_system(): os.system("true")

def test_spawn():
    process = multiprocessing.get_context("spawn").Process(target=print)
    process.start()
    process.join()

def test_caught():
    with contextlib.suppress(BaseException): subprocess.run(["true"])

def test_thread():
    thread = threading.Thread(target=subprocess.run, args=(["true"],))
    thread.start()
    thread.join()
"""


def test_whatever_starts_a_process_fails_unless_it_is_marked(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_them.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "-c", "/dev/null", str(tmp_path)]
    said = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False).stdout
    outcomes = re.findall(r"^(PASSED|FAILED|ERROR) \S+::test_(\w+)", said, re.MULTILINE)
    found = {name: outcome for outcome, name in outcomes}
    bad = dict.fromkeys(("popen", "system", "spawn", "caught", "thread"), "FAILED")
    assert found == {"nothing": "PASSED", "marked": "PASSED", "shared_fixture": "ERROR", **bad}, said
    assert "is not marked `real`" in said
