"""Says which process each member of a run is: a program of its own, on any machine of the run's cluster, that is asked
line by line. Started by `disturbance.py`.

    {"directory": "runs/x", "who": "Rollout-1"}  ─▶  {"pid": 4711, "ip": "10.0.0.2"}, or {"why_not": "…"}
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import list_named_actors

ANSWER_S = 10.0


def found(directory: Path, who: str) -> dict[str, Any]:
    """The newest incarnation of a member."""
    try:
        namespace = json.loads((directory / "cluster.json").read_text())["namespace"]
        named = [actor["name"] for actor in list_named_actors(all_namespaces=True) if actor["namespace"] == namespace]
        names = [
            name
            for name in named
            if name == who or name.startswith((f"{who}.", f"{who}-") if who == "Agent" else f"{who}.")
        ]
        if not names:
            return {"why_not": f"nobody is called {who} now"}
        actor = ray.get_actor(max(names, key=incarnation), namespace=namespace)
        pid, ip = ray.get(actor.__ray_call__.remote(own), timeout=ANSWER_S)
        return {"pid": pid, "ip": ip}
    except (OSError, ValueError, KeyError, RayError) as error:
        return {"why_not": f"{type(error).__name__}: {error}".splitlines()[0]}


def own(_: Any) -> tuple[int, str]:
    """Run by the actor."""
    return os.getpid(), ray.util.get_node_ip_address()


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
