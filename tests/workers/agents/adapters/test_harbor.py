"""Harbor's task folders: played where they need no container, and refused by name where they do."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.conf.errors import ConfigError
from penstock.workers.agents.adapters.harbor import Harbor, reward_of
from penstock.workers.agents.trajectory import COMPLETED, FAILED, Trajectory
from penstock.workers.protocols import Sampling
from penstock.workers.sandbox.execution import ProgramOutcome
from tests.workers.agents.played import ScriptedEngines, make_runner

DOCKERFILE = """\
# A comment
FROM python:3.13-slim
WORKDIR /app
ENV MODE=strict OTHER=2
COPY sums.py data* \\
     ./
COPY notes /app/notes
CMD ["bash"]
"""
TEST = """\
#!/bin/bash
if python3 /tests/test_outputs.py; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""
TEST_OUTPUTS = """
import os, sys
sys.path.insert(0, "/app")
import sums
assert sums.add(2, 3) == 5 and os.environ["MODE"] == "strict" and os.getcwd() == "/app"
assert open("/app/notes/deep/note").read() == "note" and open("/app/data.txt").read() == "data"
"""
SOLVE = "#!/bin/bash\nsed -i 's/a - b/a + b/' sums.py; ls /solution/extra >&2\n"


def folder(directory: Path, name: str = "sums", **files: str) -> None:
    """A task folder. `files`: content of others, by their paths."""
    contents = {
        "task.toml": 'schema_version = "1.4"\n[verifier]\ntimeout_sec = 60.0\n[environment.env]\nOTHER = "3"\n',
        "instruction.md": "Mend sums.add.",
        "environment/Dockerfile": DOCKERFILE,
        "environment/sums.py": "def add(a, b):\n    return a - b\n",
        "environment/data.txt": "data",
        "environment/notes/deep/note": "note",
        "tests/test.sh": TEST,
        "tests/test_outputs.py": TEST_OUTPUTS,
        "solution/solve.sh": SOLVE,
        "solution/extra": "",
        **files,
    }
    for path, content in contents.items():
        place = directory / "tasks" / name / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(content)


def played(directory: Path, *attempts: list[str], **options: Any) -> list[Trajectory]:
    environment = Harbor(f"{directory}/tasks/*", **options)
    (task,) = environment.tasks(seed=1)
    answers = iter([answer for attempt in attempts for answer in [*map(call, attempt), "done"]])

    async def main() -> list[Trajectory]:
        runner = make_runner(environment, ScriptedEngines(lambda *_: next(answers)), max_model_len=4000)
        found = [await runner.attempt(task, Sampling(max_tokens=400, seed=5)) for _ in attempts]
        await runner.close()
        return found

    return asyncio.run(main())


def call(command: str) -> str:
    return f"[bash(command={command!r})]"


@pytest.mark.real
def test_a_task_is_played_and_its_own_tests_give_the_reward(tmp_path: Path) -> None:
    folder(tmp_path)
    mend = "sed -i 's/a - b/a + b/' sums.py"
    attempts = played(
        tmp_path,
        ["pwd; echo $OTHER; ls /tests /solution /logs", mend],
        ["true"],
        ["mkdir -p /tmp/logs/verifier /tests; echo 1 > /logs/verifier/reward.txt; echo 'echo 1' > /tests/test.sh"],
        ["mkdir .harbor .harbor/tests; echo 'class add: pass' > .harbor/tests/sums.py; echo 5 > .harbor/test.sh"],
    )
    assert [attempt.outcome.kind for attempt in attempts] == [COMPLETED] * 4, attempts[0].outcome
    assert [attempt.reward for attempt in attempts] == [1.0, 0.0, 0.0, 0.0]
    read = str(attempts[0].said)
    assert "Mend sums.add." in read
    assert "/app\\n3\\n" in read
    assert "test_outputs" not in read, "the tests are seen"


@pytest.mark.real
def test_a_task_whose_own_solution_earns_nothing_is_refused(tmp_path: Path) -> None:
    folder(tmp_path, **{"solution/solve.sh": "echo tried\n"})
    for attempt in played(tmp_path, [], []):
        assert attempt.outcome.kind == FAILED
        assert "task sums: its own solution/solve.sh earns nothing here" in attempt.outcome.detail
        assert "tried" in attempt.outcome.detail


def test_what_needs_a_container_is_refused_by_name(tmp_path: Path) -> None:
    lines = {
        "installs": "RUN pip install flask",
        "stages": "COPY --from=other /a /b",
        "fetches": "ADD https://example.com/x .",
        "elsewhere": "COPY sums.py /etc/sums.py",
        "above": "COPY sums.py ../sums.py",
    }
    for name, line in lines.items():
        folder(tmp_path, name, **{"environment/Dockerfile": f"{DOCKERFILE}{line}\n"})
    for key in ('docker_image = "x"', "gpus = 1", 'workdir = "/x"', '[[environment.mcp_servers]]\nname = "x"'):
        folder(tmp_path, key.split()[0].strip("[]"), **{"task.toml": f"[environment]\n{key}\n"})
    folder(tmp_path, "composed", **{"environment/docker-compose.yaml": ""})
    folder(tmp_path, "secret", **{"task.toml": '[environment.env]\nKEY = "${KEY}"\n'})
    folder(tmp_path, "separate", **{"task.toml": '[verifier]\nenvironment_mode = "separate"\n'})
    folder(tmp_path, "steps", **{"task.toml": '[[steps]]\nname = "one"\n'})
    folder(tmp_path, "fine")
    with pytest.raises(ConfigError, match="13 of 14 tasks need a container") as caught:
        Harbor(f"{tmp_path}/tasks/*")
    for said in (
        "installs: RUN pip install flask", "stages: COPY --from", "elsewhere: COPY to /etc", "above: COPY to ..",
        "docker_image: environment.docker_image", "composed: environment/docker-compose.yaml", "steps: steps",
        "secret: the variable KEY", "separate: verifier.environment_mode",
    ):  # fmt: skip
        assert said in str(caught.value)
    assert len(Harbor(f"{tmp_path}/tasks/installs", provided=["RUN"]).tasks(1)) == 1
    with pytest.raises(ConfigError, match=r"no folder there has a task\.toml"):
        Harbor(f"{tmp_path}/nothing")


def test_tasks_have_an_order_by_the_seed(tmp_path: Path) -> None:
    for number in range(20):
        folder(tmp_path, f"task-{number}")
    environment = Harbor(f"{tmp_path}/tasks/*")
    orders = [[task.id for task in environment.tasks(seed)] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])
    assert len({str(task.identity) for task in environment.tasks(1)}) == 20


@pytest.mark.parametrize(
    ("text", "reward"),
    [("1", 1), ("0.25", 0.25), ('{"reward": 0.5, "style": 1}', 0.5), ("", 0), ("NaN", 0), ('{"a": 1}', 0), ("[1]", 0)],
)  # fmt: skip
def test_the_reward_is_the_number_that_was_written(text: str, reward: float) -> None:
    assert reward_of(ProgramOutcome(text, "", 0, 0.0, 0.0, "exited")) == reward
