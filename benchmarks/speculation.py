"""Tokens a second of vLLM with drafted tokens (`rollout.speculation`) by those without, on the prompts of recipe=code.

    penstock run recipe=code_sft name=taught
    penstock run recipe=code_sft name=drafts model.fresh.num_layers=1 model.fresh.hidden_size=64
    python -m benchmarks.speculation runs/taught/model --draft runs/drafts/model --json speculation.json

One engine a way, with one thread; they take turns on the same prompts, and the others wait. Rounds are of one step's 16
groups of 8 samples, and of one group alone, as at the end of a step. `one token`: with only one allowed, so that every
n-gram draft is accepted: what this machine gains at most.
"""

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness import Target, new_table, print_targets, show, spread, write_json
from penstock.conf.rollout import SpeculationConfig
from penstock.orchestrator.configuration.compose import load_config
from penstock.workers.models.tokenizer import load_tokenizer
from penstock.workers.prompts.opening import encoder_of, open_rows
from penstock.workers.protocols import EngineSpec, Sampling
from penstock.workers.rollout.rollout_engines import make_engine

WANTED = 1.2
"""Ratio of tokens a second that drafts are to reach."""
GROUP_SIZE = 8
WORKLOADS = {"a step": 16, "one group": 1, "one token": 1}
"""Groups at a time."""
ONE_TOKEN = {"regex": "1{90}"}


class Side:
    """An engine with drafts of one kind, or without."""

    def __init__(self, method: str, config: Any, model: str, draft: str) -> None:
        self.method = method
        room = max(WORKLOADS.values()) * GROUP_SIZE
        rollout = replace(config.rollout, speculation=SpeculationConfig(method, max_sequences=room))
        self.engine: Any = make_engine(EngineSpec(rollout, model, draft_path=draft))

    async def round(self, prompts: Sequence[list[int]], sampling: Sampling) -> dict[str, Any]:
        before, started = self.engine.sampled(), time.perf_counter()
        await asyncio.gather(*(self.engine.generate(prompt, GROUP_SIZE, sampling) for prompt in prompts))
        seconds, now = time.perf_counter() - started, self.engine.sampled()
        drafted = now.num_drafted - before.num_drafted
        accepted = (now.num_accepted - before.num_accepted) / drafted if drafted else None
        tokens = now.num_tokens - before.num_tokens
        return {
            "method": self.method,
            "tokens_per_s": tokens / seconds,
            "drafted": drafted / tokens,
            "accepted": accepted,
        }


async def measure(model: str, draft: str | None, num_rounds: int, repeats: int) -> list[dict[str, Any]]:
    config = load_config(["recipe=code"])
    encoder, rows = encoder_of(config, load_tokenizer(model), None), open_rows(config)
    assert rows is not None
    count = max(WORKLOADS.values()) * repeats
    prompts = [encoder.prompt(row).ids for row in itertools.islice((rows.row(at) for at in itertools.count()), count)]
    sides = [Side(method, config, model, draft or "") for method in ("none", "ngram", *(["draft"] if draft else []))]
    rounds: list[dict[str, Any]] = []
    try:
        for side in sides:
            await side.engine.start()
        for number in range(-1, num_rounds):
            for (workload, groups), side in itertools.product(WORKLOADS.items(), sides[:: 1 if number % 2 else -1]):
                sampling = Sampling.of(config.rollout.sampling).seeded(1000 * number + 1000)
                if workload == "one token":
                    sampling = replace(sampling, structure=ONE_TOKEN, max_tokens=72, ignore_eos=True)
                for at in range(repeats):
                    found = await side.round(prompts[at * groups : (at + 1) * groups], sampling)
                    if number >= 0:
                        rounds.append({"round": number, "workload": workload, **found})
    finally:
        for side in sides:
            await side.engine.close()
    return rounds


def speeds(rounds: Sequence[dict[str, Any]], workload: str, method: str) -> list[float]:
    """Median tokens a second of each round."""
    chosen = [one for one in rounds if (one["workload"], one["method"]) == (workload, method)]
    numbers = sorted({one["round"] for one in chosen})
    return [statistics.median(one["tokens_per_s"] for one in chosen if one["round"] == number) for number in numbers]


def ratios(rounds: Sequence[dict[str, Any]], workload: str, method: str) -> list[float]:
    """Tokens a second of each round, by those without drafts."""
    own, plain = speeds(rounds, workload, method), speeds(rounds, workload, "none")
    return [fast / slow for fast, slow in zip(own, plain, strict=True)]


def ways(rounds: Sequence[dict[str, Any]]) -> Iterable[tuple[str, str]]:
    """Workloads and methods that were measured."""
    return itertools.product(WORKLOADS, dict.fromkeys(one["method"] for one in rounds))


def print_rounds(rounds: Sequence[dict[str, Any]]) -> None:
    table = new_table(
        "vLLM on this CPU", ["recipe=code", "drafts"], ["tokens/s", "by none", "drafted a token", "accepted"]
    )
    for workload, method in ways(rounds):
        chosen = [one for one in rounds if (one["workload"], one["method"]) == (workload, method)]
        shares = [one["accepted"] for one in chosen if one["accepted"] is not None]
        drafted = statistics.mean(one["drafted"] for one in chosen)
        accepted = f"{statistics.mean(shares):.2f}" if shares else "-"
        speed, by_none = spread(speeds(rounds, workload, method)), spread(ratios(rounds, workload, method), 2)
        table.add_row(workload, method, speed, by_none, f"{drafted:.2f}", accepted)
    show(table, width=120)


def targets_of(rounds: Sequence[dict[str, Any]]) -> list[Target]:
    """Gains of drafts, but for those that this machine makes at most."""
    return [
        Target(f"{workload}, {method}", statistics.median(ratios(rounds, workload, method)), "x", ">=", WANTED)
        for workload, method in ways(rounds)
        if method != "none" and workload != "one token"
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--draft")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    rounds = asyncio.run(measure(arguments.model, arguments.draft, arguments.rounds, 4))
    print_rounds(rounds)
    targets = targets_of(rounds)
    print_targets(targets)
    write_json(arguments.json, "speculation", rounds, targets)


if __name__ == "__main__":
    main()
