"""The working directory in which recipes of tinker-cookbook find their data and tokenizers without a network: datasets
and transformers take a folder that is called like a name of the hub before they ask the hub.

    <directory>/openai/gsm8k                question and answer, "#### 7" last
               /HuggingFaceH4/no_robots     messages
               /Anthropic/hh-rlhf           chosen and rejected, "Human:" and "Assistant:"
               /hicai-zju/SciKnowEval       questions with four choices
               /Salesforce/wikitext         lines of text
               /conversations.jsonl         messages, for prompt distillation
               /warm.jsonl                  the same after an example, for a start of recipes with rewards
               /Qwen/Qwen3-8B-Base …        a tiny model, called like one whose form of conversations is known

All rows are drawn from a seed. What there is to learn is one thing everywhere: sums of two small numbers. `sl_basic`
takes 128 conversations a step and drops what is left, `rl_basic` up to 128 questions, 16 times each, and no argument
changes that: so there are 128 conversations, and few questions.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from random import Random
from typing import Any

from penstock.conf.model import FreshModelConfig
from penstock.workers.fresh_model import build_fresh_model

BASE, CHAT = "Qwen/Qwen3-8B-Base", "Qwen/Qwen3-8B"
"""Names of the tiny model: by the first the cookbook renders conversations as "User: … Assistant: …", by the second
with the marks of Qwen3, which calls of tools need."""
MARKS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
"""Marks of Qwen3 that must be one token each."""
ASKED = " Provide a numerical answer without units, written inside \\boxed{}."
SPELLED = (
    "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. We have "
    "r's at positions 3, 8, and 9. "
)
PHRASES = (
    "User:", "Assistant:", "System:", "\n\n", "What is ", " + ", "\\boxed{", ASKED, "How many r's are in strawberry?",
    SPELLED,
)  # fmt: skip
"""Fixed parts of prompts, one token each, so that what is asked lies close to what is answered."""
MODEL = FreshModelConfig(
    num_layers=2, hidden_size=128, intermediate_size=256, num_heads=4, num_kv_heads=2, initializer_range=0.06,
    max_position_embeddings=4096, words=[*MARKS, *PHRASES],
)  # fmt: skip
MOST = 3
"""Addends are below this: few enough that a tiny model learns their sums."""
SHOT = [
    {"role": "user", "content": f"How many r's are in strawberry?{ASKED}"},
    {"role": "assistant", "content": f"{SPELLED}\\boxed{{3}}"},
]
"""The example that the recipes with rewards put before each question."""
Rows = list[dict[str, Any]]


def make_directory(directory: Path, seed: int = 0, model: Callable[[Path], None] | None = None) -> Path:
    """Make the directory. `model`: writes the model that all names of models mean; None: one with random weights."""
    random = Random(seed)
    write = model or (lambda folder: build_fresh_model(folder, MODEL, seed))
    write(directory / BASE)
    (directory / CHAT).symlink_to(directory / BASE, target_is_directory=True)
    sums = {split: [gsm8k_row(random) for _ in range(count)] for split, count in (("train", 32), ("test", 8))}
    _write(directory / "openai/gsm8k", {"main": sums})
    talks = {split: [conversation(random) for _ in range(count)] for split, count in (("train", 128), ("test", 16))}
    _write(directory / "HuggingFaceH4/no_robots", {"default": talks})
    pairs = {split: [preference(random) for _ in range(count)] for split, count in (("train", 128), ("test", 16))}
    _write(directory / "Anthropic/hh-rlhf", {"default": pairs})
    _write(directory / "hicai-zju/SciKnowEval", {"default": {"test": [choice(random) for _ in range(40)]}})
    _write(directory / "Salesforce/wikitext", {"wikitext-103-raw-v1": {"train": list(lines(random, 400))}})
    _write_lines(directory / "conversations.jsonl", [conversation(random) for _ in range(64)])
    _write_lines(directory / "warm.jsonl", [conversation(random, *SHOT) for _ in range(256)])
    return directory


def gsm8k_row(random: Random) -> dict[str, str]:
    one, other = random.randrange(MOST), random.randrange(MOST)
    return {"question": f"What is {one} + {other}?", "answer": f"{one} and {other} together.\n#### {one + other}"}


def conversation(random: Random, *before: dict[str, Any]) -> dict[str, Any]:
    """One question and its answer, as the recipes that reward answers ask it. `before`: messages that come first."""
    one, other = random.randrange(MOST), random.randrange(MOST)
    asked = {"role": "user", "content": f"What is {one} + {other}?{ASKED}"}
    return {"messages": [*before, asked, {"role": "assistant", "content": f"\\boxed{{{one + other}}}"}]}


def preference(random: Random) -> dict[str, str]:
    """Two answers to one question, of which the right one is chosen."""
    one, other = random.randrange(MOST), random.randrange(MOST)
    asked = f"\n\nHuman: What is {one} + {other}?\n\nAssistant: "
    wrong = one + other + random.choice([-1, 1, 2])
    return {"chosen": f"{asked}{one + other}", "rejected": f"{asked}{wrong}"}


def choice(random: Random) -> dict[str, Any]:
    """A question with four choices, of the kind that the recipe takes."""
    one, other = random.randrange(MOST), random.randrange(MOST)
    texts = [str(one + other + off) for off in range(4)]
    random.shuffle(texts)
    label = "ABCD"[texts.index(str(one + other))]
    return {
        "question": f"What is {one} + {other}?", "choices": {"label": list("ABCD"), "text": texts}, "answerKey": label,
        "domain": "Chemistry", "type": "mcq-4-choices", "details": {"level": "L3"},
    }  # fmt: skip


def lines(random: Random, count: int) -> Iterable[dict[str, str]]:
    """Lines of text in which the words that the recipe has counted come again and again."""
    words = ["after", "time", "many", "over", "their", "when", "while", "stone", "river", "green", "seven", "door"]
    for _ in range(count):
        yield {"text": " ".join(random.choice(words) for _ in range(12)) + " ."}


def _write(folder: Path, configs: Mapping[str, Mapping[str, Rows]]) -> None:
    """Write a data set: the rows of each split of each configuration, and the card that names their files."""
    card = ["---", "configs:"]
    for config, splits in configs.items():
        card += [f"- config_name: {config}", "  data_files:"]
        for split, rows in splits.items():
            file = f"{config}/{split}.jsonl"
            _write_lines(folder / file, rows)
            card += [f"  - split: {split}", f"    path: {file}"]
    (folder / "README.md").write_text("\n".join([*card, "---", ""]))


def _write_lines(file: Path, rows: Rows) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
