"""The numbers of a run that rules read, with four digits, as one small file:

    penstock run recipe=guess name=guess
    python -m tests.orchestrator.observability.diagnosis.recorded.record runs/guess FILE.json

The files beside this one are of runs of the recipes as they are shipped, on two cores of an AMD EPYC. They have one
value a step and metric, or one for all steps. `test_recorded_runs.py` replays them.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

READ = (
    "reward/mean", "reward/std", "reward/max", "response_length/clip_ratio", "mismatch/logprob_abs_mean",
    "probe/engine_max",
    "actor/skipped_nonfinite", "actor/grad_norm", "actor/entropy", "actor/kl", "actor/padding_share",
    "store/rows_trained", "timing_s/step", "timing_s/rollout", "timing_s/train", "timing_s/reward",
    "timing_s/reference", "timing_s/compute", "timing_s/evaluation", "idle/train", "idle/rollout",
    "rollout/num_engines", "environment/turns",
)  # fmt: skip
READ_BELOW = ("dropped/", "rollout/groups/", "ranks/", "environment/turns_")


def is_read(key: str) -> bool:
    return key in READ or key.startswith(READ_BELOW)


def steps_of(file: Path) -> Iterator[dict[str, Any]]:
    """A recorded run's metrics, step by step."""
    recorded = json.loads(file.read_text())
    for step in range(recorded["steps"]):
        yield {key: value[step] if isinstance(value, list) else value for key, value in recorded["metrics"].items()}


def record(run: Path, file: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["step"]]
    keys = sorted({key for line in lines for key in line if is_read(key)})
    columns = {key: _short([_rounded(line.get(key)) for line in lines]) for key in keys}
    config: Mapping[str, Any] = yaml.safe_load((run / "config.yaml").read_text())
    head = json.dumps({"max_staleness": config["max_staleness"], "steps": len(lines)})[1:-1]
    body = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in columns.items())
    file.write_text(f'{{{head}, "metrics": {{\n{body}\n}}}}\n')


def _rounded(value: Any) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _short(values: list[float | None]) -> Any:
    return values[0] if len(set(values)) == 1 else values


if __name__ == "__main__":
    record(Path(sys.argv[1]), Path(sys.argv[2]))
