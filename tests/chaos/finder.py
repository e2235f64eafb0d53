"""Says which process each member of a run is: a program of its own, on any machine of the run's cluster, that is asked
line by line.

    {"directory": "runs/x", "who": "Rollout-1"}  ─▶  {"who": "Rollout-1", "pid": 4711, "ip": "10.0.0.2"}
                                                      or {"why_not": "…"}
"""

import json
import os
import random
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import list_named_actors

ANSWER_S = 10.0
AGENT = "Agent"


def found(directory: Path, who: str) -> dict[str, Any]:
    """The newest incarnation of a member."""
    try:
        namespace = json.loads((directory / "cluster.json").read_text())["namespace"]
        named = [actor["name"] for actor in list_named_actors(all_namespaces=True) if actor["namespace"] == namespace]
        member = chosen({without_incarnation(name) for name in named}, who)
        if member is None:
            return {"why_not": f"nobody is called {who} now"}
        incarnations = [name for name in named if without_incarnation(name) == member]
        actor = ray.get_actor(max(incarnations, key=incarnation), namespace=namespace)
        pid, ip = ray.get(actor.__ray_call__.remote(own), timeout=ANSWER_S)
        return {"who": member, "pid": pid, "ip": ip}
    except (OSError, ValueError, KeyError, RayError) as error:
        return {"why_not": f"{type(error).__name__}: {error}".splitlines()[0]}


def chosen(members: Collection[str], who: str) -> str | None:
    """The member of that name; of agents any, and of others also one that has come in its place under another number.

    >>> chosen(["Rollout-0", "Rollout-2"], "Rollout-1"), chosen(["Rollout-0"], "Rollout-1")
    ('Rollout-2', None)
    """
    if who in members:
        return who
    if who == AGENT:
        agents = sorted(member for member in members if member.startswith(f"{AGENT}-"))
        return random.choice(agents) if agents else None
    role, _, number = who.rpartition("-")
    later = [member for member in members if member.rpartition("-")[0] == role and member > who]
    return min(later, default=None) if number.isdigit() else None


def own(_: Any) -> tuple[int, str]:
    """Run by the actor."""
    return os.getpid(), ray.util.get_node_ip_address()


def without_incarnation(name: str) -> str:
    """`Rollout-1` of `Rollout-1.2`. Agents, whose names are addresses, have none."""
    return name if name.startswith(AGENT) else name.partition(".")[0]


def incarnation(name: str) -> int:
    """2 of `Rollout-1.2`."""
    number = name.rpartition(".")[2]
    return int(number) if number.isdigit() and "." in name else 1


def main() -> None:
    ray.init(log_to_driver=False, logging_level="ERROR")
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(found(Path(asked["directory"]), asked["who"])), flush=True)


if __name__ == "__main__":
    main()
