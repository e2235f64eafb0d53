"""The ten steps that fail first on GPUs, in order, each in a process of its own.

    make gpu-smoke                       # python -m benchmarks.gpu.first_minutes, then python -m benchmarks.gpu.smoke
    make gpu-smoke ARGS="--from runs"    # begin at a step, by its name
    make gpu-smoke ARGS=--keep-going     # take the other steps after one that fails

It stops at the first step that fails, and says what to send in. On GPUs engines and ranks have what presets of models
give them: bfloat16, captured graphs, engines that sleep with theirs. What was seen it writes into docs/gpu.md. Without
a GPU it does what a CPU can do, and says what it left out. Nothing is downloaded.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.gpu.smoke import parts, record, runs
from benchmarks.gpu.smoke.place import Failed, Place
from benchmarks.gpu.smoke.record import Row
from benchmarks.harness import ROOT

STEPS: dict[str, Callable[[Place], None]] = {
    "imports": parts.packages,
    "vllm": parts.vllm_alone,
    "rank": parts.rank_alone,
    "turns": parts.turns,
    "transports": parts.transports,
    "colocated": runs.colocated,
    "several": runs.several,
    "lost ranks": runs.lost_ranks,
    "experts": parts.mixture_of_experts,
    "kernels": parts.faster_kernels,
}
PAGE = ROOT / "docs" / "gpu.md"
DEADLINE_S = 7200.0
"""Deadline of a step."""


def take(step: str, folder: Path) -> None:
    """Take a step in this process. What it has to say goes to a file; ends with status 1 if it fails."""
    place = Place(folder, torch.cuda.device_count() if torch.cuda.is_available() else 0)
    failure = None
    try:
        STEPS[step](place)
    except Failed as error:
        failure = str(error)
    except Exception:  # noqa: BLE001 - whatever it is, it is to be sent in
        failure = traceback.format_exc()
    if failure is not None:
        print(failure, flush=True)
    result = {"said": place.said, "left_out": place.left_out, "failed": failure is not None}
    _result(folder, step).write_text(json.dumps(result))
    sys.exit(failure is not None)


def _result(folder: Path, step: str) -> Path:
    return folder / f"{step}.json"


def _took(step: str, folder: Path) -> tuple[bool, str]:
    """Take a step in a process of its own. Returns whether it went well, and what it has to say."""
    log = folder / f"step {step}.log"
    with log.open("w") as output:
        command = [sys.executable, "-m", "benchmarks.gpu.smoke", "--step", step, "--folder", str(folder)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            status = process.wait(DEADLINE_S)
        finally:
            if process.poll() is None:
                process.kill()
    result = json.loads(_result(folder, step).read_text()) if _result(folder, step).exists() else None
    if result is None or status:
        return False, log.read_text(errors="replace")[-6000:]
    left_out = [f"left out: {', '.join(result['left_out'])}"] if result["left_out"] else []
    return True, "; ".join([*result["said"], *left_out])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="first", choices=STEPS, default="imports", help="the first step to take")
    parser.add_argument("--keep-going", action="store_true", help="take the other steps after one that fails")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help="where models, runs and logs go; default: a new one")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page that rows are written into")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="penstock-gpu-smoke-"))
    if arguments.step is not None:
        take(arguments.step, folder)
    machine, versions = record.machine(), record.versions()
    print(f"{machine}\n{versions}\nmodels, runs and logs: {folder}", flush=True)
    names, failed = list(STEPS), []
    for number, name in enumerate(names[names.index(arguments.first) :], names.index(arguments.first) + 1):
        print(f"{number}/{len(names)} {name}", flush=True)
        went_well, found = _took(name, folder)
        print(f"  {found}", flush=True)
        if went_well:
            row = Row(f"{number}. {name}", found, record.today(), machine, versions, "make gpu-smoke")
            record.write(arguments.page, [row])
            continue
        failed.append(name)
        if not arguments.keep_going:
            break
    if failed:
        print(
            f"\ngpu-smoke: {', '.join(failed)} failed. Send in what is printed above, from the machine's name on, and "
            f"the folder {folder}. After mending: make gpu-smoke ARGS=\"--from '{failed[0]}'\""
        )
        sys.exit(1)
    print(f"All {len(names)} steps went well, but for what was left out. {arguments.page.name} has their rows.")


if __name__ == "__main__":
    main()
