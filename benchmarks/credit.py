"""Credit for turns against credit for outcomes: the same model, the same tasks, three seeds.

    python -m benchmarks.credit --json credit.json                            # all of it
    python -m benchmarks.credit --sides guess minigrid --json credit.json     # some tasks

Each seed of a task has one warm start, from which every advantage starts. Accuracy is greedy, on held-out tasks, before
and after. `mt_grpo` is not among them: it needs turns with rewards of their own, which none of these tasks has.
"""

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import new_table, parse_arguments, show, write_json
from benchmarks.learning import NUM_SEEDS, penstock
from penstock.orchestrator.run_directory.run_directory import RunDirectory

GRID, MAX_MOVES = "MiniGrid-Empty-Random-5x5-v0", 8
WORDS = [
    "mission: get to the green goal square", "looking ", "green goal ", "wall ", "ahead ", "; ", ", ",
    "forward", "left", "right",
]  # fmt: skip
DEADLINE_S = 1800.0
NUM_STEPS = 20
TASKS = {
    "guess": ("guess", "accuracy/heldout", []),
    "tictactoe": ("tictactoe", "accuracy/random", []),
    "minigrid": (
        "guess",
        "accuracy/heldout",
        [
            "environment.name=gymnasium", f"environment.options={{id: {GRID}, prompt: '{{observation}}'}}",
            f"environment.max_turns={MAX_MOVES}", "rollout.max_model_len=320", "evaluation.right_at=0.5",
        ],
    ),
}  # fmt: skip
"""Recipe, measure and changes of each task."""
WARM = {
    "minigrid": [
        f"model.fresh.words={WORDS}", "data.path=benchmarks/credit.py:walks", "data.size=20000",
        "trainer.max_steps=200",
    ]
}  # fmt: skip
CREDITS = {
    "grpo": [],
    "gigpo": ["algorithm=policy_gradient", "algorithm.advantage=gigpo"],
    "ppo": ["algorithm=ppo", "algorithm.group_size=16"],
    "turn_gae": ["algorithm=ppo", "algorithm.group_size=16", "algorithm.advantage=turn_gae"],
}


def walks(seed: int) -> Iterator[dict[str, Any]]:
    """Demonstrations of a walker that turns and moves at random: the conversation so far, and its next action."""
    import gymnasium  # late: it is not needed on the driver's side
    import minigrid  # noqa: F401 - it registers its environments

    from penstock.workers.agents.adapters.gymnasium import view_text

    draws, grid = random.Random(seed), gymnasium.make(GRID)
    while True:
        observation, _ = grid.reset(seed=draws.randrange(2**31))
        messages: list[dict[str, str]] = []
        for _ in range(MAX_MOVES):
            messages.append({"role": "user", "content": view_text(observation)})
            action = draws.randrange(3)
            said = ("left", "right", "forward")[action]
            yield {"messages": list(messages), "guess": said}
            messages.append({"role": "assistant", "content": said})
            observation, _, is_over, *_ = grid.step(action)
            if is_over:
                break


def measure(task: str, credit: str, seed: int, work: Path, num_steps: int) -> dict[str, Any]:
    recipe, key, changes = TASKS[task]
    name, warm = f"{task}-{credit}-{seed}", f"{task if task in WARM else recipe}-sft-{seed}"
    common = [f"seed={seed}", f"output_dir={work}"]
    if not (work / warm).exists():
        penstock(
            [f"recipe={recipe}_sft", f"name={warm}", *common, *WARM.get(task, [])], work / f"{warm}.log", DEADLINE_S
        )
    words = [
        f"recipe={recipe}", f"name={name}", f"seed={seed}", f"output_dir={work}",
        f"model.path={work / warm / 'model'}", "warm_start.recipe=null",
        f"trainer.max_steps={num_steps}", f"evaluation.every_steps={num_steps}", *changes, *CREDITS[credit],
    ]  # fmt: skip
    seconds = penstock(words, work / f"{name}.log", DEADLINE_S)
    lines = RunDirectory(work / name).read_metrics()
    first, *_, last = [line[key] for line in lines if line.get(key) is not None]
    return {"task": task, "credit": credit, "seed": seed, "start": first, "end": last, "seconds": seconds}


def main() -> None:
    arguments = parse_arguments(__doc__, list(TASKS))
    num_seeds, num_steps = (1, 2) if arguments.quick else (arguments.rounds or NUM_SEEDS, NUM_STEPS)
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        for seed in range(1, num_seeds + 1):
            for task in arguments.sides or TASKS:
                for credit in CREDITS:
                    rounds.append(measure(task, credit, seed, Path(folder), num_steps))
                    print(rounds[-1], flush=True)
                    write_json(arguments.json, "credit", rounds, [])  # should outlive the last run
    table = new_table("Held-out accuracy, greedy", ["task", "credit"], ["each seed"])
    for task, credit in dict.fromkeys((entry["task"], entry["credit"]) for entry in rounds):
        some = [entry for entry in rounds if (entry["task"], entry["credit"]) == (task, credit)]
        table.add_row(task, credit, ", ".join(f"{entry['start']:.1%} → {entry['end']:.1%}" for entry in some))
    show(table)


if __name__ == "__main__":
    main()
