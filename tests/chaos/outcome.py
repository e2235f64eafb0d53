"""What came of all faults of `make chaos`: a table for docs/faults.md, made of a file of lines. Written by the tests of
this folder where `PENSTOCK_CHAOS_FILE` names one; printed by `python -m tests.chaos.outcome FILE`."""

import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from tests.chaos.checker import Answer
from tests.chaos.plan import CUT, FENCE

FILE = "PENSTOCK_CHAOS_FILE"


def note(answers: Iterable[Answer]) -> None:
    """Append them, one line each."""
    if file := os.environ.get(FILE):
        with open(file, "a") as lines:
            lines.writelines(json.dumps(asdict(answer)) + "\n" for answer in answers)


def table(answers: Sequence[dict[str, Any]]) -> str:
    """A Markdown table: how often each fault was done, how it was answered, and after how many seconds."""
    of: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for answer in answers:
        of[role_of(answer["done"]["who"]), answer["done"]["how"]].append(answer)
    lines = [
        "| who | how | times | noticed after, median and longest (s) | answered by | seconds, median |",
        "|---|---|---|---|---|---|",
    ]
    for (who, how), those in sorted(of.items()):
        if how in (CUT, FENCE):  # which are no faults of a member: what comes next may be of another
            lines.append(f"| {who} | {how} | {len(those)} | | | |")
            continue
        noticed = [one["noticed_after_s"] for one in those if one["noticed_after_s"] is not None]
        outcomes = sorted({one["outcome"] for one in those})
        counts = ", ".join(f"{outcome} {sum(one['outcome'] == outcome for one in those)}" for outcome in outcomes)
        shown = f"{median(noticed):.1f}, {max(noticed):.1f}" if noticed else ""
        lines.append(
            f"| {who} | {how} | {len(those)} | {shown} | {counts} | {median(one['seconds'] for one in those):.1f} |"
        )
    return "\n".join([*lines, f"\n{len(answers)} faults"])


def role_of(who: str) -> str:
    """`rollout` of `Rollout-1`."""
    return "machine" if who.isdigit() else who.partition("-")[0].lower()


if __name__ == "__main__":
    print(table([json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]))
