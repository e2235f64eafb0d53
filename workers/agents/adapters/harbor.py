"""Task folders in the format of Harbor (harborframework.com), which Terminal-Bench's tasks have, as far as they need no
container.

    environment/Dockerfile   its COPY makes the tree of a workspace at WORKDIR; ENV is kept, FROM names nothing here
    instruction.md           what the policy, or an agent, is asked
    tests/test.sh            run in a clean fork; what it writes to /logs/verifier is the reward
    solution/solve.sh        tried first: a task whose own solution earns nothing here is refused

What else a container would have, such as packages that RUN installs, comes from `show`.
"""

import random
import shlex
import shutil
import tempfile
import tomllib
from asyncio import to_thread
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path, PurePosixPath
from typing import Any

from penstock.conf.errors import ConfigError, NotPlainData
from penstock.workers.agents.adapters.repository import AGENT_S, COMMAND_S, Solver, Trials, limits_of, output_of
from penstock.workers.agents.environment import Context, Task, environment
from penstock.workers.sandbox.execution import ProgramOutcome, parse
from penstock.workers.sandbox.workspace import PROTECTED, Workspace

TESTS = ".harbor"
"""Directory of the tree where tests are in a check; they find themselves at /tests."""
SOLUTION, LOGS, SAID = "/tmp/solution", "/tmp/logs", "/tmp/said"
JUDGE = (
    f"chmod -R u+x {TESTS}; mkdir -p {LOGS}/verifier {LOGS}/agent; /tests/test.sh > {SAID} 2>&1; "
    f"cat {LOGS}/verifier/reward.json 2> /dev/null || cat {LOGS}/verifier/reward.txt || tail -c 2000 {SAID} >&2"
)
SOLVE = f"mkdir -p {LOGS}/agent; bash {SOLUTION}/solve.sh"
WORKDIR = "/app"
TESTS_S = 600.0
"""Seconds of tests, as Harbor has them."""
IGNORED = ("FROM", "CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "MAINTAINER", "SHELL", "STOPSIGNAL", "USER")
"""Instructions of a Dockerfile that change nothing of what a workspace has."""
REFUSED = (
    "steps", "environment.docker_image", "environment.gpus", "environment.tpu", "environment.mcp_servers",
    "environment.healthcheck", "environment.skills_dir", "environment.workdir", "verifier.environment",
    "verifier.collect",
)  # fmt: skip
"""Settings of `task.toml` that need a container, or a server beside it."""


@environment("harbor")
class Harbor:
    """Tasks in folders. They are the environment's own.

    environment: {name: harbor, options: {path: "tasks/*", show: [/opt/env], variables: {PATH: "/opt/env/bin:/bin"}}}
    data: {source: environment}
    """

    def __init__(
        self,
        path: str,
        show: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        provided: Sequence[str] = (),
        agent: str | None = None,
    ) -> None:
        """`path`: pattern of the folders. `show`, `variables`: of `ctx.workspace`. `provided`: instructions and
        settings that need a container otherwise, such as RUN, and are passed over because `show` has what they make.
        `agent`: as of the environment `repository`, with {instruction}. Raises `ConfigError`, which names
        the folders that need a container."""
        places = [Path(found) for found in sorted(glob(path)) if Path(found, "task.toml").is_file()]
        if not places or len({place.name for place in places}) < len(places):
            fault = "two folders there have one name" if places else "no folder there has a task.toml"
            raise ConfigError(f"environment.options.path={path}: {fault}.")
        self._folders: dict[str, TaskFolder] = {}
        wrong = []
        for place in places:
            try:
                self._folders[place.name] = TaskFolder.of(place, provided)
            except ConfigError as error:
                wrong.append(f"{place.name}: {error}")
        if wrong:
            raise ConfigError(
                f"environment.options.path={path}: {len(wrong)} of {len(places)} tasks need a container: "
                f"{'; '.join(wrong[:20])}. Leave them out, or show what they need and list it in "
                "environment.options.provided."
            )
        self._agent, self._show, self._variables = agent, show, dict(variables or {})
        self._trees = tempfile.TemporaryDirectory(prefix="penstock-harbor-")
        self._trials = Trials()

    def tasks(self, seed: int) -> list[Task]:
        names = sorted(self._folders)
        random.Random(seed).shuffle(names)
        folders = self._folders
        return [Task(name, seed, {"folder": name, "instruction": folders[name].instruction}) for name in names]

    async def run(self, task: Task, ctx: Context) -> None:
        folder = self._folders[task.data["folder"]]
        await self._trials.passed(task.id, task, lambda: self._fault(folder, ctx))
        async with self._workspace(folder, ctx) as ws:
            solver = Solver(self._agent, folder.agent_s if self._agent else COMMAND_S)
            await solver.solve(ws, folder.instruction, task, ctx)
            outcome = await ctx.scored(folder.judged(ws))
        ctx.reward(reward_of(outcome))

    async def aclose(self) -> None:
        self._trees.cleanup()

    def _workspace(self, folder: "TaskFolder", ctx: Context) -> Any:
        return ctx.workspace(
            Path(self._trees.name, folder.place.name), at=folder.workdir, show=self._show,
            links={"/tests": f"{folder.workdir}/{TESTS}", "/logs": LOGS, "/solution": SOLUTION},
            variables={**folder.variables, **self._variables}, limits=limits_of([folder.agent_s, folder.tests_s]),
        )  # fmt: skip

    async def _fault(self, folder: "TaskFolder", ctx: Context) -> str:
        """Make the task's tree, and try its solution; return what is wrong with it."""
        await to_thread(folder.copy, Path(self._trees.name, folder.place.name))
        if not (folder.place / "solution" / "solve.sh").is_file():
            return ""
        async with self._workspace(folder, ctx) as ws:
            for path, content in files_in(folder.place / "solution"):
                await ws.write(f"{SOLUTION}/{path}", content)
            solved = await ws.run(SOLVE, folder.agent_s)
            judged = await folder.judged(ws)
        if reward_of(judged) > 0:
            return ""
        return (
            "its own solution/solve.sh earns nothing here, so no policy can. What does the task need that is not "
            f"there? It said: {output_of(solved)[-500:]}; its tests: {output_of(judged)[-1000:]}"
        )


@dataclass(frozen=True)
class TaskFolder:
    """A task as a workspace can have it."""

    place: Path
    instruction: str
    workdir: str
    variables: Mapping[str, str]
    copied: Sequence[tuple[Sequence[Path], str]]
    """Files and directories of `environment/`, and where they go, by the path in the tree."""
    agent_s: float
    tests_s: float

    @classmethod
    def of(cls, place: Path, provided: Sequence[str]) -> "TaskFolder":
        """Read a folder. Raises `ConfigError`, which says what needs a container."""
        with open(place / "task.toml", "rb") as file:
            config = tomllib.load(file)
        parts = {part: found for part, found in config.items() if isinstance(found, dict)}
        settings = {f"{part}.{key}": value for part, found in parts.items() for key, value in found.items()}
        for name in REFUSED:
            if (settings | config).get(name) and name not in provided:
                raise ConfigError(name)
        if settings.get("verifier.environment_mode", "shared") != "shared":
            raise ConfigError("verifier.environment_mode")
        for path in ("environment/docker-compose.yaml", "tests/Dockerfile"):
            if (place / path).exists() and path not in provided:
                raise ConfigError(path)
        workdir, variables, copied = read_dockerfile(place / "environment", provided)
        variables |= settings.get("environment.env", {})
        if workdir in ("/", "/tmp"):
            raise ConfigError(f"WORKDIR {workdir}")
        if templates := [name for name, value in variables.items() if "$" in value]:
            raise ConfigError(f"the variable {templates[0]}")
        instruction = (place / "instruction.md").read_text()
        agent_s = float(settings.get("agent.timeout_sec") or AGENT_S)
        tests_s = float(settings.get("verifier.timeout_sec") or TESTS_S)
        return cls(place, instruction, workdir, variables, copied, agent_s, tests_s)

    def copy(self, tree: Path) -> None:
        """Make the tree of the workspace."""
        shutil.rmtree(tree, ignore_errors=True)
        tree.mkdir()
        for sources, target in self.copied:
            place = tree / target
            for source in sources:
                if source.is_dir():
                    shutil.copytree(source, place, symlinks=True, dirs_exist_ok=True)
                else:
                    into = place if place.is_dir() or target.endswith("/") or len(sources) > 1 else place.parent
                    into.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(source, place)

    async def judged(self, ws: Workspace) -> ProgramOutcome:
        """What the tests say of a workspace."""
        files = {f"{TESTS}/{path}": content for path, content in files_in(self.place / "tests")}
        return await ws.check(JUDGE, files, self.tests_s, protected=(*PROTECTED, TESTS))


def read_dockerfile(context: Path, provided: Sequence[str]) -> tuple[str, dict[str, str], list[tuple[list[Path], str]]]:
    """WORKDIR, ENV and COPY of a context's Dockerfile, where it has one. Raises `ConfigError`."""
    workdir, variables = WORKDIR, dict[str, str]()
    copied: list[tuple[list[Path], str]] = []
    for line in instructions_of(context / "Dockerfile"):
        name, _, rest = line.partition(" ")
        name, words = name.upper(), shlex.split(rest)
        if name == "WORKDIR":
            workdir = str(PurePosixPath(workdir, words[0]))
        elif name == "ENV":
            variables |= dict(word.split("=", 1) for word in words) if "=" in words[0] else {words[0]: words[1]}
        elif name == "COPY" and not any(word.startswith(("--", "[")) for word in words):
            *patterns, target = words
            sources = [found for pattern in patterns for found in sorted(context.glob(pattern.strip("/") or "."))]
            copied.append((sources, target))
        elif name not in IGNORED and name not in provided:
            raise ConfigError(line[:80])
    return workdir, variables, [(sources, below(workdir, target)) for sources, target in copied]


def instructions_of(dockerfile: Path) -> Iterator[str]:
    """Instructions of a Dockerfile, each on one line. A missing one has none."""
    text = dockerfile.read_text() if dockerfile.is_file() else ""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    yield from (line.strip() for line in "\n".join(lines).replace("\\\n", " ").splitlines() if line.strip())


def below(workdir: str, target: str) -> str:
    """The path of a target in the tree. Raises `ConfigError` for one that lies elsewhere."""
    path = PurePosixPath(workdir, target)
    if ".." in path.parts or not path.is_relative_to(workdir):
        raise ConfigError(f"COPY to {target}, which is not below WORKDIR {workdir}")
    return str(path.relative_to(workdir)) + ("/" if target.endswith("/") else "")


def files_in(directory: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            yield str(path.relative_to(directory)), path.read_bytes()


def reward_of(outcome: ProgramOutcome) -> float:
    """The number that tests have written, or `reward` of several; 0 for none."""
    try:
        value = parse(outcome.stdout.encode())
        return float(value["reward"] if isinstance(value, dict) else value)
    except (NotPlainData, ValueError, TypeError, KeyError):
        return 0.0
