"""An update of the policy: memory and time with logits whole and in tiles, and with layers recomputed whole and in
chunks; tokens a second with buckets and packed, and samples a second where rows begin alike.

    python -m benchmarks.training --json training.json

*Logits*: a two-layer model with 150,000 words, all response tokens in one micro-batch; each side in a process of its
own, whose peak of resident memory above what it had before the update is counted. *Layers*: one row of 8,192 tokens;
counted is what the peak has beyond the inputs of layers, which both sides keep. *Lengths*: rows of long-tailed lengths,
cut by Penstock into micro-batches of similar length, or packed without padding, and by a plain loop into 8 rows each as
they come, padded to the longest. *Short*: the same with few tokens a row. *Pairs*: of rows that stay together two by
two, whatever their lengths, as a preference loss wants them. *Prompts*: groups of 8 samples of 128 tokens to a prompt
of 1,024, as trees that have it once, or each row alone. *Turns*: groups of 4 attempts of 8 turns whose histories are
rewritten. *Sums*: groups of 8 samples of 4 tokens to a prompt of 12. *Unlike*: as *prompts*, but no two rows begin
alike. *Ranks*: lognormal lengths up to 8,192 tokens on four ranks, of which as many split each micro-batch as
`trainer.sequence_parallel_size` says, or as fits the lengths of its rows (`auto`); each rank has as many tokens. Sides
alternate; medians of rounds. Processor seconds are counted beside the clock's, since they do not depend on other work.
Linux only: it reads /proc.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import Child, Target, new_table, parse_arguments, print_targets, show, write_json
from tests.rank_processes import run_ranks

NUM_ROUNDS = 5
LOGITS_MODEL = {"hidden": 256, "layers": 2, "vocabulary": 150_000}
LOGITS = {"count": 8, "response_tokens": 512, "longest": 512, "spread": 0.0, "loss": "ppo_clip"}
LAYERS_MODEL = {"hidden": 512, "layers": 2, "vocabulary": 4096}
LAYERS = {"count": 1, "response_tokens": 8176, "longest": 8176, "spread": 0.0, "loss": "ppo_clip"}
"""With its prompt the row has 8,192 tokens."""
LAYER_SIDES = ("streamed", "recomputed")
LENGTHS_MODEL = {"hidden": 256, "layers": 4, "vocabulary": 4096}
LENGTHS = {"count": 64, "response_tokens": 150, "longest": 2048, "spread": 1.0, "loss": "ppo_clip"}
"""`spread`: the standard deviation of the logarithm of lengths."""
SHORT = LENGTHS | {"response_tokens": 20, "longest": 512}
PAIRS = LENGTHS | {"loss": "simpo"}
TREES_MODEL = {"hidden": 512, "layers": 4, "vocabulary": 4096}
PROMPTS = {
    "kind": "groups", "num_groups": 2, "size": 8, "prompt_tokens": 1024, "response_tokens": 128, "is_shared": True,
    "loss": "ppo_clip",
}  # fmt: skip
TURNS = {
    "kind": "attempts", "num_groups": 1, "size": 4, "num_turns": 8, "prompt_tokens": 512, "message_tokens": 64,
    "thought_tokens": 96, "answer_tokens": 32, "loss": "ppo_clip",
}  # fmt: skip
UNLIKE = PROMPTS | {"is_shared": False}
SUMS = PROMPTS | {"num_groups": 32, "prompt_tokens": 12, "response_tokens": 4}
TREES: dict[str, dict[str, Any]] = {"prompts": PROMPTS, "turns": TURNS, "sums": SUMS, "unlike": UNLIKE}
"""Cases in which rows are trees where that pays."""
TREE_SIDES = ("alone", "shared")
PACKED = ("lengths", "short", "pairs")
"""Cases in which rows are packed."""
QUICK_MODEL = {"vocabulary": 60_000}
QUICK_LOGITS = {"count": 4, "response_tokens": 64}
QUICK_LAYERS = {"response_tokens": 2032}
QUICK_LENGTHS = {"count": 8, "response_tokens": 40, "longest": 256}
QUICK_PROMPT_TOKENS = 128
RANKS_MODEL = {"hidden": 128, "layers": 4, "vocabulary": 4096, "kv_heads": 4}
NUM_RANKS, RANKS_ROWS, QUICK_RANKS_ROWS = 4, 128, 8
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
        num_key_value_heads=case.get("kv_heads", 2),
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        dtype="float32",
    )
    logging.disable_progress_bar()
    Qwen2ForCausalLM(config).save_pretrained(directory)
    return directory


def measure(
    model: dict[str, int], cases: dict[str, tuple[tuple[str, ...], dict[str, Any]]], work: Path, num_rounds: int
) -> list[Round]:
    """Measure rounds of each case: its sides, and what its rows and loss are. Sides alternate; the first round of each
    is not counted."""
    path = build_model(work / next(iter(cases)), model)
    children = {
        side: Child(
            side, "trainer_update", work / f"{side}.log", [side, str(path), f"--vocabulary={model['vocabulary']}"]
        )
        for side in dict.fromkeys(side for sides, _ in cases.values() for side in sides)
    }
    rounds = []
    try:
        for child in children.values():
            child.ready()
        for name, (sides, request) in cases.items():
            for number in range(-1, num_rounds):
                for side in sides:
                    answer = children[side].ask(request | {"seed": number + 1})
                    if number >= 0:
                        rounds.append({"case": name, "side": side, "round": number, **answer})
    finally:
        for child in children.values():
            child.close()
    return rounds


def measure_ranks(work: Path, num_rounds: int, num_rows: int) -> list[Round]:
    """Measure rounds of several ranks; sides alternate."""
    path, file = build_model(work / "ranks", RANKS_MODEL), work / "ranks.json"
    run_ranks(
        [sys.executable, "-m", "benchmarks.peers.training_ranks"], NUM_RANKS, path, file, num_rounds, num_rows,
        timeout_s=7200,
    )  # fmt: skip
    rounds: list[Round] = json.loads(file.read_text())
    return rounds


def require_memory(case: dict[str, Any], vocabulary: int) -> None:
    needed = COPIES * 4 * case["count"] * case["response_tokens"] * vocabulary
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


def print_rounds(rounds: list[Round]) -> None:
    table = new_table(
        "One update: medians over rounds",
        ["what", "side"],
        ["s", "CPU s", "tokens/s", "peak MiB", "padding"],
    )
    for name, side in dict.fromkeys((entry["case"], entry["side"]) for entry in rounds):
        some = [entry for entry in rounds if entry["case"] == name]
        table.add_row(
            name,
            side,
            f"{median(some, side, 'seconds'):.2f}",
            f"{median(some, side, 'cpu_seconds'):.2f}",
            f"{tokens_per_s(some, side):,.0f}",
            f"{median(some, side, 'peak_bytes') / 2**20:,.0f}",
            f"{median(some, side, 'padding'):.1%}",
        )
    show(table, 110)


def print_ratios(title: str, rounds: list[Round], names: tuple[str, ...], sides: tuple[str, str]) -> None:
    """Print what one side is to the other: ratios of rounds that followed one another."""
    columns = {"seconds": "seconds", "cpu_seconds": "CPU seconds", "peak_bytes": "peak memory"}
    table = new_table(f"{title}: median, least and most", ["case"], list(columns.values()))
    for name in names:
        ratios = [ratios_of(rounds, name, key, sides) for key in columns]
        table.add_row(name, *(f"{statistics.median(some):.2f} ({min(some):.2f}-{max(some):.2f})" for some in ratios))
    show(table, 110)


def print_ranks(rounds: list[Round]) -> None:
    """Print what groups chosen by length are worth."""
    rounds = [entry for entry in rounds if entry["case"] == "ranks"]
    table = new_table(
        "Four ranks, groups by length: medians over rounds", ["ranks a row"],
        ["CPU s of the longest rank", "CPU s of all", "exchanged MB", "passes", "s"],
    )  # fmt: skip
    for side in dict.fromkeys(entry["side"] for entry in rounds):
        values = (median(rounds, side, key) for key in ("longest_cpu_seconds", "cpu_seconds"))
        num_bytes = median(rounds, side, "exchanged_bytes") / 1e6
        passes, seconds = median(rounds, side, "passes"), median(rounds, side, "seconds")
        table.add_row(side, *(f"{value:.2f}" for value in values), f"{num_bytes:,.0f}", f"{passes:g}", f"{seconds:.1f}")
    show(table, 110)


def ratios_of(rounds: list[Round], name: str, key: str, sides: tuple[str, str]) -> list[float]:
    """Ratios of rounds that followed one another: the first side's value over the second's."""
    before, after = (
        [entry[key] for entry in rounds if (entry["case"], entry["side"]) == (name, side)] for side in sides
    )
    return [one / other for one, other in zip(before, after, strict=True)]


def beyond_inputs(rounds: list[Round]) -> list[Round]:
    """The rounds of *layers*, whose peak is without the inputs of layers: float32, of all tokens and layers."""
    of_token = 4 * LAYERS_MODEL["hidden"] * LAYERS_MODEL["layers"]
    return [
        entry | {"peak_bytes": entry["peak_bytes"] - of_token * entry["tokens"]}
        for entry in rounds
        if entry["case"] == "layers"
    ]


def targets_of(rounds: list[Round]) -> list[Target]:
    speeds = {name: statistics.median(ratios_of(rounds, name, "seconds", TREE_SIDES)) for name in TREES}
    of_layers = [
        statistics.median(ratios_of(beyond_inputs(rounds), "layers", key, LAYER_SIDES))
        for key in ("peak_bytes", "seconds")
    ]
    memory_of_trees = 1 / statistics.median(ratios_of(rounds, "prompts", "peak_bytes", TREE_SIDES))
    of_trees = [
        Target("samples a second, prompts once over rows alone", speeds["prompts"], "x", ">=", 3.0),
        Target("samples a second, turns and rewritten histories once over rows alone", speeds["turns"], "x", ">=", 3.0),
        Target("samples a second, short prompts once over rows alone", speeds["sums"], "x", ">=", 2.0),
        Target("samples a second where nothing is shared, over rows alone", speeds["unlike"], "x", ">=", 0.97),
        Target("peak memory, prompts once over rows alone", memory_of_trees, "x", "<=", 1.0),
    ]
    fixed = min(("1", "2", "4"), key=lambda side: median(rounds, side, "longest_cpu_seconds"))
    longest = statistics.median(ratios_of(rounds, "ranks", "longest_cpu_seconds", (fixed, "auto")))
    num_bytes = statistics.median(ratios_of(rounds, "ranks", "exchanged_bytes", ("auto", "4")))
    of_ranks = [
        Target("processor time of the longest rank, best of 1, 2, 4 over by length", longest, "x", ">=", 1.3),
        Target("exchanged bytes, by length over 4 ranks a row", num_bytes, "x", "<=", 1.0),
    ]
    rounds = [entry for entry in rounds if entry["case"] in ("logits", "lengths")]
    memory = median(rounds, "whole", "peak_bytes") / median(rounds, "tiled", "peak_bytes")
    time = median(rounds, "tiled", "seconds") / median(rounds, "whole", "seconds")
    speed = tokens_per_s(rounds, "bucketed") / tokens_per_s(rounds, "fixed")
    return [
        Target("whole logits' peak memory over tiles'", memory, "x", ">=", 3.0),
        Target("tiles' time over whole logits'", time, "x", "<=", 1.0),
        Target("tokens a second in buckets over fixed rows'", speed, "x", ">=", 2.0),
        Target("padding in buckets", 100 * median(rounds, "bucketed", "padding"), "%", "<=", 5.0),
        Target("memory beyond the layers' inputs, chunks over layers recomputed whole", of_layers[0], "x", "<=", 0.4),
        Target("time of chunks over layers recomputed whole", of_layers[1], "x", "<=", 1.15),
        *of_trees,
        *of_ranks,
    ]


def main() -> None:
    arguments = parse_arguments(__doc__)
    logits_model = LOGITS_MODEL | (QUICK_MODEL if arguments.quick else {})
    logits = LOGITS | (QUICK_LOGITS if arguments.quick else {})
    lengths, short, pairs = (case | (QUICK_LENGTHS if arguments.quick else {}) for case in (LENGTHS, SHORT, PAIRS))
    num_rounds = 1 if arguments.quick else arguments.rounds or NUM_ROUNDS
    require_memory(logits, logits_model["vocabulary"])
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        rounds = measure(logits_model, {"logits": (("whole", "tiled"), logits)}, Path(folder), num_rounds)
        some = QUICK_LAYERS if arguments.quick else {}
        rounds += measure(LAYERS_MODEL, {"layers": (LAYER_SIDES, LAYERS | some)}, Path(folder), num_rounds)
        cases = {
            "lengths": (("fixed", "bucketed", "packed"), lengths),
            "short": (("bucketed", "packed"), short),
            "pairs": (("bucketed", "packed"), pairs),
        }
        rounds += measure(LENGTHS_MODEL, cases, Path(folder), num_rounds)
        most = QUICK_PROMPT_TOKENS if arguments.quick else sys.maxsize
        trees = {
            name: (TREE_SIDES, case | {"prompt_tokens": min(case["prompt_tokens"], most)})
            for name, case in TREES.items()
        }
        rounds += measure(TREES_MODEL, trees, Path(folder), num_rounds)
        rounds += measure_ranks(Path(folder), num_rounds, QUICK_RANKS_ROWS if arguments.quick else RANKS_ROWS)
    print_rounds([entry for entry in rounds if entry["case"] != "ranks"])
    print_ratios("Chunks of layers over layers recomputed whole", beyond_inputs(rounds), ("layers",), LAYER_SIDES)
    print_ratios("Buckets over packed rows", rounds, PACKED, ("bucketed", "packed"))
    print_ratios("Rows alone over trees", rounds, tuple(TREES), TREE_SIDES)
    print_ranks(rounds)
    targets = targets_of(rounds)
    print_targets(targets)
    write_json(
        arguments.json, "training", rounds, targets, logits=logits_model | logits, lengths=LENGTHS_MODEL | lengths
    )


if __name__ == "__main__":
    main()
