"""An update of the policy: memory and time with logits whole and in tiles, tokens a second with and without buckets.

    python -m benchmarks.training --json training.json

*Logits*: a two-layer model with 150,000 words, all response tokens in one micro-batch; each side in a process of its
own, whose peak of resident memory above what it had before the update is counted. *Lengths*: rows of long-tailed
lengths, cut by Penstock into micro-batches of similar length, and by a plain loop into 8 rows each as they come, padded
to the longest. Sides alternate; medians over rounds. Processor seconds are counted beside the clock's, since they do
not depend on other work. Linux only: it reads /proc.
"""

import statistics
import tempfile
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import Child, Target, new_table, parse_arguments, print_targets, show, write_json

NUM_ROUNDS = 5
LOGITS = {"hidden": 256, "layers": 2, "vocabulary": 150_000, "rows": 8, "response_tokens": 512, "longest": 512}
LENGTHS = {"hidden": 256, "layers": 4, "vocabulary": 4096, "rows": 64, "response_tokens": 150, "longest": 2048}
SPREAD = 1.0
"""Standard deviation of the logarithm of lengths."""
QUICK_LOGITS = {"rows": 4, "response_tokens": 64, "vocabulary": 60_000}
QUICK_LENGTHS = {"rows": 8, "response_tokens": 40, "longest": 256}
COPIES = 5
"""Number of copies of [tokens, vocabulary] in float32 that fit in memory before whole logits are tried: four, and
room."""
Round = dict[str, Any]


def build_model(directory: Path, case: dict[str, int]) -> Path:
    """Make a Qwen2 of random weights, output layer tied to the embedding."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    config = Qwen2Config(
        vocab_size=case["vocabulary"],
        hidden_size=case["hidden"],
        intermediate_size=3 * case["hidden"],
        num_hidden_layers=case["layers"],
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        dtype="float32",
    )
    logging.disable_progress_bar()
    Qwen2ForCausalLM(config).save_pretrained(directory)
    return directory


def measure(
    name: str, sides: tuple[str, str], case: dict[str, int], spread: float, work: Path, num_rounds: int
) -> list[Round]:
    """Measure rounds of both sides, alternating; the first of each is not counted."""
    model = build_model(work / name, case)
    options = [f"--{key}={case[key]}" for key in ("response_tokens", "longest", "vocabulary")]
    children = {}
    for side in sides:
        arguments = [side, str(model), *options, f"--spread={spread}"]
        children[side] = Child(side, "trainer_update", work / f"{side}.log", arguments)
    rounds = []
    try:
        for child in children.values():
            child.ready()
        for number in range(-1, num_rounds):
            for side, child in children.items():
                answer = child.ask({"rows": case["rows"], "seed": number + 1})
                if number >= 0:
                    rounds.append({"case": name, "side": side, "round": number, **answer})
    finally:
        for child in children.values():
            child.close()
    return rounds


def require_memory(case: dict[str, int]) -> None:
    needed = COPIES * 4 * case["rows"] * case["response_tokens"] * case["vocabulary"]
    available = psutil.virtual_memory().available
    if available < needed:
        raise SystemExit(
            f"Whole logits want {needed / 2**30:.0f} GiB and {available / 2**30:.0f} are available. Free memory, or "
            "run with --quick."
        )


def median(rounds: list[Round], side: str, key: str) -> float:
    return statistics.median(entry[key] for entry in rounds if entry["side"] == side)


def tokens_per_s(rounds: list[Round], side: str) -> float:
    return statistics.median(entry["tokens"] / entry["seconds"] for entry in rounds if entry["side"] == side)


def print_rounds(rounds: list[Round], logits: dict[str, int], lengths: dict[str, int]) -> None:
    table = new_table(
        "One update: medians over rounds",
        ["what", "side"],
        ["s", "CPU s", "tokens/s", "peak MiB", "padding"],
    )
    titles = {
        "whole": f"{logits['rows'] * logits['response_tokens']:,} tokens x {logits['vocabulary']:,} words",
        "fixed": f"{lengths['rows']} rows of median {lengths['response_tokens']}, at most {lengths['longest']} tokens",
    }
    for side in ("whole", "tiled", "fixed", "bucketed"):
        table.add_row(
            titles.get(side, ""),
            side,
            f"{median(rounds, side, 'seconds'):.2f}",
            f"{median(rounds, side, 'cpu_seconds'):.2f}",
            f"{tokens_per_s(rounds, side):,.0f}",
            f"{median(rounds, side, 'peak_bytes') / 2**20:,.0f}",
            f"{median(rounds, side, 'padding'):.1%}",
        )
    show(table, 110)


def targets_of(rounds: list[Round]) -> list[Target]:
    memory = median(rounds, "whole", "peak_bytes") / median(rounds, "tiled", "peak_bytes")
    time = median(rounds, "tiled", "seconds") / median(rounds, "whole", "seconds")
    speed = tokens_per_s(rounds, "bucketed") / tokens_per_s(rounds, "fixed")
    return [
        Target("whole logits' peak memory over tiles'", memory, "x", ">=", 3.0),
        Target("tiles' time over whole logits'", time, "x", "<=", 1.0),
        Target("tokens a second in buckets over fixed rows'", speed, "x", ">=", 2.0),
        Target("padding in buckets", 100 * median(rounds, "bucketed", "padding"), "%", "<=", 5.0),
    ]


def main() -> None:
    arguments = parse_arguments(__doc__)
    logits, lengths = (LOGITS | QUICK_LOGITS, LENGTHS | QUICK_LENGTHS) if arguments.quick else (LOGITS, LENGTHS)
    num_rounds = 1 if arguments.quick else arguments.rounds or NUM_ROUNDS
    require_memory(logits)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        rounds = measure("logits", ("whole", "tiled"), logits, 0.0, Path(folder), num_rounds)
        rounds += measure("lengths", ("fixed", "bucketed"), lengths, SPREAD, Path(folder), num_rounds)
    print_rounds(rounds, logits, lengths)
    targets = targets_of(rounds)
    print_targets(targets)
    write_json(arguments.json, "training", rounds, targets, logits=logits, lengths=lengths)


if __name__ == "__main__":
    main()
