"""Tasks in SWE-bench's columns: a policy that repairs a repository is rewarded by tests that it has never seen."""

import asyncio
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.conf.errors import ConfigError, DataError
from penstock.workers.agents.adapters.repository import Repository, paths_of, required_tests
from penstock.workers.agents.environment import Task
from penstock.workers.agents.gateway.http_server import AttemptKeys, HttpServer
from penstock.workers.agents.trajectory import COMPLETED, FAILED
from penstock.workers.protocols import Sampling
from tests.workers.agents.played import ScriptedEngines, make_runner
from tests.workers.sandbox import test_images

PATCH = """\
diff --git a/tests/test_sums.py b/tests/test_sums.py
--- a/tests/test_sums.py
+++ b/tests/test_sums.py
@@ -1,5 +1,9 @@
 from sums import add, double


 def test_double():
     assert double(3) == 6
+
+
+def test_add():
+    assert add(2, 3) == 5
diff --git a/tests/old.py b/tests/old.py
deleted file mode 100644
--- a/tests/old.py
+++ /dev/null
@@ -1 +0,0 @@
-import gone
"""
ROW = {
    "index": 0, "instance_id": "sums-1", "problem_statement": "add subtracts", "test_patch": PATCH,
    "FAIL_TO_PASS": json.dumps(["tests/test_sums.py::test_add"]), "PASS_TO_PASS": ["tests/test_sums.py::test_double"],
}  # fmt: skip


AGENT = """
import json, os, subprocess, sys, urllib.request

said = [{"role": "user", "content": sys.argv[1]}]
while True:
    body = json.dumps({"model": "policy", "messages": said}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    address = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(address, body, headers)) as answer:
        command = json.load(answer)["choices"][0]["message"]["content"]
    if command == "done":
        break
    output = subprocess.run(command, shell=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout
    said += [{"role": "assistant", "content": command}, {"role": "user", "content": output or "nothing"}]
"""


TESTS = "tests/test_sums.py"


def task(**changes: Any) -> Task:
    return Task("0", 0, {**ROW, **changes})


def archive(directory: Path) -> None:
    tree = directory / "tree"
    (tree / "tests").mkdir(parents=True)
    (tree / "sums.py").write_text("def add(a, b):\n    return a - b\n\n\ndef double(a):\n    return 2 * a\n")
    (tree / "agent.py").write_text(AGENT)
    (tree / "tests" / "__init__.py").touch()
    (tree / "tests" / "test_sums.py").write_text(PATCH.partition("@@\n")[2].partition("+")[0].replace("\n ", "\n")[1:])
    (tree / "tests" / "old.py").write_text("import gone\n")
    with tarfile.open(directory / "sums-1.tar.gz", "w:gz") as file:
        file.add(tree, ".")


def pytest_options() -> dict[str, Any]:
    """What shows pytest in a workspace."""
    packages = Path(pytest.__file__).parents[1]
    names = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")
    shown = [str(packages / name) for name in names if (packages / name).exists()]
    return {"show": shown, "variables": {"PYTHONPATH": str(packages)}}


def played(directory: Path, *answers: str, agent: str | None = None, **changes: Any) -> Any:
    attempts, read = played_all(directory, answers, task(**changes), agent=agent)
    return attempts[0], read


def played_all(directory: Path, answers: Sequence[str], *tasks: Task, **options: Any) -> Any:
    """Attempts at the tasks, one after the other, and what the policy has read last."""
    left = iter(answers)
    environment = Repository(f"{directory}/{{instance_id}}.tar.gz", **pytest_options(), **options)

    async def main() -> Any:
        engines, keys = ScriptedEngines(lambda prompt, sampling: next(left)), AttemptKeys()
        runner = make_runner(environment, engines, max_model_len=4000, max_tokens=2000, keys=keys)
        server = HttpServer(keys)
        keys.base_url = await server.start("127.0.0.1", 0)
        attempts = [await runner.attempt(one, Sampling(max_tokens=200, seed=5)) for one in tasks]
        await runner.close()
        await server.stop()
        return attempts, engines.asked[-1][0] if engines.asked else ""

    return asyncio.run(main())


@pytest.mark.real
@pytest.mark.parametrize(
    ("commands", "reward"),
    [
        (["sed -i 's/a - b/a + b/' sums.py"], 1.0),
        (["cd tests", "ls; cat test_sums.py", "cd ..", "true"], 0.0),
        (["echo 'def test_add(): pass' > tests/test_sums.py"], 0.0),
        (["sed -i 's/a - b/a + b/; s/2 [*] a/a/' sums.py"], 0.0),
        ([f"for name in add double; do echo \"print('PASSED {TESTS}::test_$name')\" >> pytest.py; done"], 0.0),
    ],
    ids=["repaired", "looked", "changed the tests", "broke another", "made a pytest"],
)
def test_a_policy_is_rewarded_for_tests_that_it_has_not_seen(
    tmp_path: Path, commands: list[str], reward: float
) -> None:
    archive(tmp_path)
    attempt, read = played(tmp_path, *(f"[bash(command={command!r})]" for command in commands), "done")
    assert (attempt.outcome.kind, attempt.reward) == (COMPLETED, reward), attempt.outcome
    assert "exit code 0" in read
    assert "add(2, 3)" not in read


@pytest.mark.real
@pytest.mark.parametrize(
    ("answers", "reward"),
    [
        (["hostname", "sed -i 's/a - b/a + b/' sums.py", "done"], 1.0),
        (["hostname", "done"], 0.0),
        (["sed -i 's/a - b/a + b/' sums.py; hostname", "kill -9 $PPID"], 1.0),
    ],
    ids=["repaired", "looked", "killed its agent"],
)
def test_an_agent_in_the_workspace_asks_the_policy(tmp_path: Path, answers: list[str], reward: float) -> None:
    archive(tmp_path)
    problem = "add 'subtracts'; $(exit 1)\n{here}"
    attempt, read = played(tmp_path, *answers, agent="python3 agent.py {problem_statement}", problem_statement=problem)
    assert (attempt.outcome.kind, attempt.reward) == (COMPLETED, reward), attempt.outcome
    assert [turn.answer for turn in attempt.turns] == answers
    assert problem in read
    assert "sandbox\n" in read


@pytest.mark.real
def test_an_agent_that_never_asks_fails_its_attempt_with_what_it_said(tmp_path: Path) -> None:
    archive(tmp_path)
    attempt, _ = played(tmp_path, agent="no-such-agent {instance_id}")
    assert attempt.outcome.kind == FAILED
    assert "has not asked the policy" in attempt.outcome.detail
    assert "no-such-agent: not found" in attempt.outcome.detail


@pytest.mark.real
def test_rows_of_two_datasets_with_the_same_id_have_their_own_tests(tmp_path: Path) -> None:
    archive(tmp_path)
    other = {
        "test_patch": PATCH.replace("def test_add", "def test_sum"),
        "FAIL_TO_PASS": ["tests/test_sums.py::test_sum"],
    }
    repaired = ("[bash(command=\"sed -i 's/a - b/a + b/' sums.py\")]", "done")
    attempts, _ = played_all(tmp_path, repaired * 2, task(), task(**other))
    assert [attempt.reward for attempt in attempts] == [1.0, 1.0]


@pytest.mark.real
def test_a_patch_that_does_not_fit_the_archive_is_named(tmp_path: Path) -> None:
    archive(tmp_path)
    attempt, _ = played(tmp_path, "done", test_patch=PATCH.replace("double(3)", "triple(3)"))
    assert attempt.outcome.kind == FAILED
    assert "test_patch cannot be applied" in attempt.outcome.detail


@pytest.mark.real
def test_a_row_is_tried_with_its_own_patch_once(tmp_path: Path) -> None:
    archive(tmp_path)
    right = "--- a/sums.py\n+++ b/sums.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a - b\n+    return a + b\n"
    wrong = right.replace("a + b", "a * b")
    answers = ("[bash(command=\"sed -i 's/a - b/a + b/' sums.py\")]", "done")
    attempts, _ = played_all(tmp_path, answers * 2, task(patch=right), task(patch=right))
    assert [attempt.reward for attempt in attempts] == [1.0, 1.0]
    (attempt,), _ = played_all(tmp_path, answers, task(patch=wrong))
    assert attempt.outcome.kind == FAILED
    assert "1 of its 2 tests do not pass here with its own patch" in attempt.outcome.detail
    assert "tests/test_sums.py::test_add" in attempt.outcome.detail


@pytest.mark.real
def test_a_tree_and_its_environment_are_found_by_the_row(tmp_path: Path) -> None:
    archive(tmp_path)
    options = pytest_options()
    packages = options["variables"].pop("PYTHONPATH")
    where, version = str(Path(packages).parent), Path(packages).name
    environment = Repository(
        f"{tmp_path}/{{instance_id}}.tar.gz",
        show=[path.replace(packages, "{where}/{version}") for path in options["show"]],
        variables={"PYTHONPATH": "{where}/{version}"},
    )
    answers = iter(["[bash(command='echo $PYTHONPATH')]", "done"])
    engines = ScriptedEngines(lambda *_: next(answers))
    runner = make_runner(environment, engines, max_model_len=4000)

    async def main() -> None:
        for one in (task(where=where, version=version), task(where=where)):
            found = await runner.attempt(one, Sampling(max_tokens=200, seed=5))
            detail.append(found.outcome.detail)
        await runner.close()

    detail: list[str] = []
    asyncio.run(main())
    assert packages in engines.asked[-1][0]
    assert detail[0] == ""
    assert "environment.options.show" in detail[1]
    assert "has no column 'version'" in detail[1]


@pytest.mark.real
def test_a_tree_may_be_the_whole_file_system_of_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_images, "PROGRAMS", ("sh", "bash", "cat", "ls", "sed", "patch"))
    scripts = {"testbed/sums.sh": b"echo $(($1 - $2))\n", "testbed/tests/a.sh": b"true\n"}
    files = {**test_images.files_of_programs(), "usr/bin/.keep": b"", **scripts}
    for path, content in files.items():
        place = tmp_path / "sums-1" / path
        place.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            place.symlink_to(content)
        else:
            place.write_bytes(content)
            place.chmod(0o755)
    patch = "--- a/tests/a.sh\n+++ b/tests/a.sh\n@@ -1 +1 @@\n-true\n+[ $(sh sums.sh 2 3) = 5 ]\n"
    row = task(test_patch=patch, FAIL_TO_PASS=["tests/a.sh"], PASS_TO_PASS=[])
    command = "for file in {files}; do sh $file && echo PASSED $file; done"
    environment = Repository(f"{tmp_path}/{{instance_id}}", root=True, command=command)
    answers = iter(["[bash(command='ls /; sed -i s/-/+/ sums.sh')]", "done", "done"])
    engines = ScriptedEngines(lambda *_: next(answers))

    async def main() -> list[float]:
        runner = make_runner(environment, engines, max_model_len=4000)
        found = [await runner.attempt(row, Sampling(max_tokens=200, seed=5)) for _ in range(2)]
        await runner.close()
        assert [attempt.outcome.detail for attempt in found] == ["", ""]
        return [attempt.reward for attempt in found]

    assert asyncio.run(main()) == [1.0, 0.0]
    assert "testbed\\ntmp\\n" in repr(engines.asked[1][0])


def test_what_is_missing_or_wrong_is_named() -> None:
    assert required_tests(task()) == {"tests/test_sums.py::test_add", "tests/test_sums.py::test_double"}
    with pytest.raises(DataError, match="would be right"):
        required_tests(task(FAIL_TO_PASS="[]", PASS_TO_PASS=[]))
    with pytest.raises(DataError, match="neither a list"):
        required_tests(task(FAIL_TO_PASS="test_add"))
    with pytest.raises(DataError, match="no column PASS_TO_PASS"):
        required_tests(Task("0", 0, {"FAIL_TO_PASS": []}))
    with pytest.raises(ConfigError, match="command=pytest"):
        Repository("x", command="pytest")
    with pytest.raises(ConfigError, match="two positive numbers"):
        Repository("x", timeouts_s=[1])


def test_files_of_a_patch_are_those_that_it_names() -> None:
    moved = "diff --git a/x b/y\nrename from x\nrename to y\n"
    assert paths_of(PATCH + moved) == ["tests/test_sums.py", "tests/old.py", "x", "y"]
    empty = "diff --git a/tests/__init__.py b/tests/__init__.py\nnew file mode 100644\nindex 0000000..e69de29\n"
    binary = "diff --git a/a b/p b/a b/p\nindex 1..2 100644\nGIT binary patch\n"
    assert paths_of(empty + binary) == ["tests/__init__.py", "a b/p"]
