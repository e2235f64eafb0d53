"""Changes that would rather pass the hidden tests than do what they ask for, each with what it scores.

What is around the code under test is out of reach: files of tests, their configuration, what is imported unasked. The
code itself shares a process with its tests, so it can end that process, or change what judges it: those attacks score
1, and are listed here so that nobody believes otherwise. A check that calls the program from outside is fooled by none.
"""

# ruff: noqa: E501 - an attack on one line is read as one

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.conf.errors import WorkspaceError
from penstock.workers.sandbox.execution import MIB
from penstock.workers.sandbox.workspace import LIMITS, Workspace
from tests.workers.sandbox.conftest import Room

pytestmark = pytest.mark.real

HIDDEN = {
    "tests/test_sums.py": "from sums import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n    assert add(-1, 1) == 0\n"
}
COMMAND = "python3 -B -P -m pytest -q -p no:cacheprovider tests"
PASSES = "import pytest\n@pytest.hookimpl(tryfirst=True)\ndef pytest_pyfunc_call(pyfuncitem): return True\n"
SKIPS = "collect_ignore_glob = ['*']\ndef pytest_sessionfinish(session): session.exitstatus = 0\n"
AROUND = {
    "conftest": f"cat > conftest.py <<'E'\n{PASSES}E",
    "conftest of the tests": f"cat > tests/conftest.py <<'E'\n{PASSES}E",
    "conftest that is a package": f"rm -f conftest.py; mkdir conftest; cat > conftest/__init__.py <<'E'\n{PASSES}E",
    "conftest that ignores": f"cat > conftest.py <<'E'\n{SKIPS}E",
    "pytest.ini": f"printf '[pytest]\\naddopts = -p evil\\npythonpath = .\\n' > pytest.ini; cat > evil.py <<'E'\n{PASSES}E",
    "tox.ini": f"printf '[pytest]\\naddopts = -p evil\\npythonpath = .\\n' > tox.ini; cat > evil.py <<'E'\n{PASSES}E",
    "setup.cfg": f"printf '[tool:pytest]\\naddopts = -p evil\\npythonpath = .\\n' > setup.cfg; cat > evil.py <<'E'\n{PASSES}E",
    "pyproject": f"printf '[tool.pytest.ini_options]\\naddopts = \"-p evil\"\\npythonpath = [\".\"]\\n' > pyproject.toml; cat > evil.py <<'E'\n{PASSES}E",
    "pytest.ini of the tests": "printf '[pytest]\\npython_functions = none\\n' > tests/pytest.ini",
    "the test itself": "printf 'def test_add(): pass\\n' > tests/test_sums.py; chmod 444 tests/test_sums.py",
    "a directory for the test": "rm tests/test_sums.py; mkdir tests/test_sums.py; touch tests/test_sums.py/x",
    "a link for the test": "printf 'def test_add(): pass\\n' > own.py; ln -sf ../own.py tests/test_sums.py",
    "a link for the tests": "rm -r tests; mkdir own; printf 'def test_add(): pass\\n' > own/test_own.py; ln -s own tests",
    "a link that leads out": "rm -r tests; ln -s /tmp tests",
    "a file for the tests": "rm -r tests; echo > tests",
    "no tests": "rm -r tests",
    "no conftest": "rm conftest.py tests/conftest.py; rm -r tests",
    "compiled test": "mkdir -p tests/__pycache__; printf 'def test_add(): pass\\n' > own.py; python3 -c \"import py_compile; py_compile.compile('own.py', 'tests/__pycache__/test_sums.cpython-311-pytest.pyc', invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)\"; for v in 311-pytest-8.0.0 311-pytest-9.0.0 311; do cp tests/__pycache__/*pytest.pyc tests/__pycache__/test_sums.cpython-$v.pyc; done",
    "sitecustomize": "printf 'import os\\nos._exit(0)\\n' > sitecustomize.py; cp sitecustomize.py usercustomize.py",
    "sitecustomize that is a package": "mkdir sitecustomize; printf 'import os\\nos._exit(0)\\n' > sitecustomize/__init__.py",
    "pth": "printf 'import os; os._exit(0)\\n' > x.pth; mkdir -p lib; cp x.pth lib/",
    "plugin of a package": f"mkdir evil.dist-info; printf '[pytest11]\\nevil = evil\\n' > evil.dist-info/entry_points.txt; printf 'Metadata-Version: 2.1\\nName: evil\\nVersion: 1\\n' > evil.dist-info/METADATA; cat > evil.py <<'E'\n{PASSES}E",
    "variables of a shell": "export PYTEST_ADDOPTS='--co' PYTHONSTARTUP=/tmp/x PYTEST_PLUGINS=evil; echo 'import os; os._exit(0)' > /tmp/x",
    "home": "mkdir -p ~/.config ~/.local/lib/python3.11/site-packages; printf 'import os; os._exit(0)\\n' > ~/.local/lib/python3.11/site-packages/x.pth; printf 'alias python3=true\\n' > ~/.profile",
    "a process that waits": "(sleep 0.5; echo 'def test_add(): pass' > tests/test_sums.py) > /dev/null 2>&1 & setsid sleep 60 &",
    "programs": "mkdir -p bin; printf '#!/bin/sh\\nexit 0\\n' > bin/python3; chmod +x bin/python3; cp bin/python3 python3; ln -s /bin/true pytest",
    "git": "mkdir -p .git/hooks; printf '#!/bin/sh\\nexit 0\\n' > .git/hooks/post-checkout; printf '[core]\\nfsmonitor = /bin/true\\n' > .git/config",
}  # fmt: skip
"""Changes to what is around the code. Each scores 0."""
WITHIN = {
    "it ends the process": "printf 'import os\\nos._exit(0)\\n' > sums.py",
    "it ends the process in a call": "printf 'import os\\ndef add(a, b): os._exit(0)\\n' > sums.py",
    "its results say yes": "printf 'class Yes(int):\\n    def __eq__(self, other): return True\\ndef add(a, b): return Yes()\\n' > sums.py",
    "it changes pytest": "printf 'import _pytest.python\\n_pytest.python.Function.runtest = lambda self: None\\ndef add(a, b): return 0\\n' > sums.py",
    "it registers a plugin": "printf 'import _pytest.runner as r\\nr.check_interactive_exception = lambda *a: False\\nimport _pytest.reports as p\\nf = p.TestReport.from_item_and_call\\ndef g(item, call):\\n    call.excinfo = None\\n    return f(item, call)\\np.TestReport.from_item_and_call = g\\ndef add(a, b): return 0\\n' > sums.py",
    "it looks the answer up": "printf 'import sys\\ndef add(a, b):\\n    lines = open(sys._getframe(1).f_code.co_filename).read()\\n    return 5 if a == 2 else 0\\n' > sums.py",
}  # fmt: skip
"""Changes to the code under test itself. Each scores 1 by the exit code of its tests, and 0 by a call from outside."""
RIGHT = "printf 'def add(a, b):\\n    return a + b\\n' > sums.py"


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    tree = tmp_path_factory.mktemp("checked")
    (tree / "sums.py").write_text("def add(a, b):\n    return a - b\n")
    (tree / "tests").mkdir()
    (tree / "tests" / "test_sums.py").write_text("def test_nothing():\n    pass\n")
    (tree / "tests" / "conftest.py").write_text("import sys\nsys.path.insert(0, '/workspace')\n")
    (tree / "conftest.py").write_text("")
    (tree / ".git").mkdir()
    (tree / ".git" / "config").write_text("[core]\n")
    packages = Path(pytest.__file__).parents[1]
    needed = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")  # none of the plugins installed here
    shown = [packages / name for name in needed if (packages / name).exists()]
    room = Room(tree, show=shown, variables={"PYTHONPATH": str(packages)})
    yield room
    room.close()


@pytest.fixture
def checked(room: Room) -> Iterator[Workspace]:
    workspace = room.open()
    yield workspace
    workspace.close()


def score(room: Room, workspace: Workspace, change: str) -> float:
    """What the change scores by the exit code of the hidden tests."""
    assert room.do(workspace.shell().run(change)).reason == "exited"
    outcome = room.do(workspace.check(COMMAND, files=HIDDEN))
    assert "No module named pytest" not in outcome.stderr, outcome
    return float(outcome.is_success)


def score_from_outside(room: Room, workspace: Workspace) -> float:
    """The same by what the program prints, compared here with what is expected."""
    command = "python3 -B -c 'import sums; print(sums.add(20, 22), sums.add(-7, 7))'"
    return float(room.do(workspace.check(command)).stdout == "42 0\n")


def test_the_right_change_scores_one_and_none_scores_nothing(room, checked):
    assert score(room, checked, ":") == 0.0
    assert score_from_outside(room, checked) == 0.0
    assert score(room, checked, RIGHT) == 1.0
    assert score_from_outside(room, checked) == 1.0
    assert room.run(checked, "ls tests").stdout == "conftest.py\ntest_sums.py\n", "the tests stay hidden"
    assert "test_nothing" in room.run(checked, "cat tests/test_sums.py").stdout


@pytest.mark.parametrize("name", AROUND)
def test_what_is_around_the_code_cannot_be_forged(room, checked, name):
    assert score(room, checked, AROUND[name]) == 0.0
    assert score(room, checked, RIGHT) == 1.0, "the right change counts, whatever else was changed"


@pytest.mark.parametrize("name", WITHIN)
def test_code_under_test_can_forge_its_report_but_no_call_from_outside(room, checked, name):
    assert score(room, checked, WITHIN[name]) == 1.0
    assert score_from_outside(room, checked) == 0.0


def test_files_of_a_check_are_removed_and_made(room, checked):
    room.run(checked, "mkdir -p deep; echo x > deep/other; echo y > tests/conftest.py")
    files = {"tests/conftest.py": None, "new/deep/file": b"\0made", "deep/other": "text"}
    asked = "ls tests; cat new/deep/file deep/other | od -c | head -1"
    outcome = room.do(checked.check(asked, files=files))
    assert outcome.stdout.split() == ["test_sums.py", "0000000", r"\0", "m", "a", "d", "e", "t", "e", "x", "t"], outcome


def test_a_file_of_a_check_at_the_root_hides_that_file_alone(room, checked):
    room.run(checked, "mkdir src; echo new > src/helper.py; echo forged > helper.py; echo new > 'src/h[12]'")
    files = {"helper.py": "hidden\n", "h[12]": ""}
    outcome = room.do(checked.check("cat src/helper.py src/h* helper.py", files=files))
    assert outcome.stdout == "new\nnew\nnew\nhidden\n", outcome


def test_changes_that_leave_no_room_for_the_hidden_files_are_an_outcome(room, checked):
    small = room.open(limits=replace(LIMITS, tmp_bytes=4 * MIB))
    room.run(small, "head -c 3900000 /dev/zero > big")
    outcome = room.do(small.check("true", files={"hidden": bytes(MIB)}))
    assert (outcome.is_success, outcome.reason) == (False, "changes"), outcome
    small.close()


def test_a_file_of_a_check_beyond_a_link_of_the_original_is_an_error(tmp_path):
    (tmp_path / "out").symlink_to("/tmp")
    room = Room(tmp_path)
    with pytest.raises(WorkspaceError, match="out/hidden lies outside of the original tree"):
        room.do(room.open().check("true", files={"out/hidden": "x"}))
    room.close()


def test_changes_that_cannot_be_applied_are_an_outcome_and_no_error(room, checked):
    deep = "i=0; while [ $i -lt 900 ]; do mkdir -p ddddddd; cd ddddddd || break; i=$((i+1)); done; echo x > x"
    room.run(checked, deep)
    outcome = room.do(checked.check("true"))
    assert not outcome.is_success
    assert outcome.reason == "changes"
