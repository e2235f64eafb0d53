"""Episodes of a `verifiers` environment: this program is run by the interpreter that has the package, which is not
Penstock's.

    python verifiers_episodes.py                                            JSON lines on stdin and stdout:

    {"taskset": {"id": "my_tasks"}, …}                                      received first, as it may have keys
    {"tasks": 200}                                                          sent then; null: endless
    {"number": 3, "index": 17, "seat": "", "base_url": …, "api_key": …}     received: an episode of the 17th task
    {"number": 3, "reward": 1.0}                                            or "error": "…"
    {"number": 3, "cancel": true}                                           received: it is no longer wanted

The program ends when stdin does. It imports nothing of Penstock.
"""

import asyncio
import json
import os
import sys
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_environment, resolve_env_config


async def main() -> None:
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # tasksets may print
    environment = load_environment(resolve_env_config(json.loads(sys.stdin.readline())))
    is_endless = not environment.taskset.bounded
    tasks = Tasks(environment.taskset, is_endless)
    print(json.dumps({"tasks": None if is_endless else len(tasks.made)}), file=said, flush=True)

    async def episode(order: dict[str, Any]) -> None:
        try:
            result: dict[str, Any] = {"reward": await reward(environment, tasks.at(order["index"]), order)}
        except Exception as error:  # noqa: BLE001 - whatever a taskset or harness raises is reported
            result = {"error": f"{type(error).__name__}: {error}"}
        finally:
            running.pop(order["number"], None)
        print(json.dumps({"number": order["number"], **result}), file=said, flush=True)

    running: dict[int, asyncio.Task[None]] = {}
    async with environment.serving():
        while line := await asyncio.to_thread(sys.stdin.readline):
            order = json.loads(line)
            if order.get("cancel"):
                if task := running.get(order["number"]):
                    task.cancel()
            else:
                running[order["number"]] = asyncio.create_task(episode(order))
        for task in running.values():
            task.cancel()


class Tasks:
    """The tasks of a taskset by number; of an endless one, as many as were asked for."""

    def __init__(self, taskset: Any, is_endless: bool) -> None:
        self._more = iter(taskset)
        self.made: list[Any] = [] if is_endless else list(self._more)

    def at(self, index: int) -> Any:
        while len(self.made) <= index:
            self.made.append(next(self._more))
        return self.made[index]


async def reward(environment: Any, task: Any, order: dict[str, Any]) -> float:
    """Play an episode; return the reward of the traces of one seat, or of all: their mean. Raises what the episode has
    failed with."""
    variable = f"PENSTOCK_KEY_{order['number']}"  # verifiers takes keys from the environment alone
    os.environ[variable] = order["api_key"]
    try:
        client = vf.EvalClientConfig(base_url=order["base_url"], api_key_var=variable)
        episode = await environment.run_episode(task, vf.ModelContext(model="policy", client=client))
    finally:
        del os.environ[variable]
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors:
        raise RuntimeError(f"{errors[-1].type}: {errors[-1].message}")
    seat = order["seat"]
    found = [trace.reward for trace in episode.traces if not seat or trace.agent.name == seat]
    if not found:
        raise RuntimeError(f"no seat {seat!r}; there are {[trace.agent.name for trace in episode.traces]}")
    return float(sum(found) / len(found))


if __name__ == "__main__":
    asyncio.run(main())
