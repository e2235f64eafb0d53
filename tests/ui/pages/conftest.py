"""One browser and one server for the tests of a file, over runs with known content.

A browser is not kept for longer: Playwright has an event loop in the tests' thread, beside which nobody else's may run.
"""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageDraw
from playwright.sync_api import Browser, Page, expect
from tokenizers import Tokenizer, models

from tests.ui.browser import PATIENCE_MS, chromium, visit
from tests.ui.made_runs import HERE, make_run, write_pictures, write_samples
from tests.ui.served import served
from tests.ui.told import write_logs, write_state, write_timeline

HACK = "<script>window.hacked=1</script><img src=x onerror='window.hacked=2'>\x1b[31mred\x1b[0m"
"""What a model might write."""
WORDS = ["two", " and", " two", " make", " four", "</s>", " five", " six", " seven", " eight"]
NUM_STEPS = 40

expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """done, failed, live and seen, and a sweep: seeds of one setting, and another setting."""
    place = tmp_path_factory.mktemp("runs")
    make_done(place / "done")
    make_run(place / "failed", "start", "failed", metrics=metrics(3), config="seed: 7\n")
    write_logs(place / "failed", HACK)
    make_live(place / "live")
    make_seen(place / "seen")
    for name, seed, rate, shift in (("a", 1, 1, 0.0), ("b", 2, 1, 0.2), ("c", 3, 2, 0.5)):
        config = f"seed: {seed}\nlearning: {{rate: {rate}}}\n"
        make_run(place / "sweep" / name, "start", "end", metrics=metrics(10, shift), config=config)
    return place


@pytest.fixture(scope="module")
def address(place: Path) -> Iterator[str]:
    with served(place) as found:
        yield found


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    with visit(browser) as found:
        yield found


def metrics(count: int, shift: float = 0.0) -> list[dict[str, Any]]:
    """Rewards that rise by a hundredth from `shift`, each with a range of a tenth around it."""
    lines = []
    for step in range(1, count + 1):
        reward = shift + step / 100
        lines.append({
            "step": step, "reward/mean": reward, "reward/min": reward - 0.1, "reward/max": reward + 0.1,
            "actor/entropy": 1 / step, "response_length/mean": 20.0 + step, "timing_s/step": 2.0,
            "timing_s/rollout": 1.0, "timing_s/train": 0.5, "store/rows": 64.0,
        })  # fmt: skip
    lines[-1]["accuracy/heldout"] = 0.75
    return lines


def make_live(path: Path) -> Path:
    """A run at step 5 of 9, held by this process."""
    return make_run(path, "start", metrics=metrics(5), holder=HERE)


def make_done(path: Path) -> Path:
    """A finished run with samples of steps 10 and 20, a loss and a warning. The third group of step 20 has the lowest
    reward; the first of step 10 is a conversation with a tool."""
    make_run(path, "start", "end", metrics=metrics(NUM_STEPS), config="description: sums of two numbers\n")
    (path / "run_id").write_text("0123abcd\n")
    events = [
        {"time": "2026-01-01T00:00:00.000Z", "kind": "start"},
        {"time": "2026-01-01T00:00:12.000Z", "kind": "fault", "member": "Rollout-1", "role": "rollout", "step": 12},
        {"time": "2026-01-01T00:00:20.000Z", "kind": "warning", "rule": "entropy", "step": 20,
         "text": "entropy fell", "advice": "Lower the learning rate"},
        {"time": "2026-01-01T00:01:10.000Z", "kind": "end"},
    ]  # fmt: skip
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    write_samples(path / "samples", 10, [talk(), talk()])
    rows = []
    for group, rewards in enumerate(([1.0, 0.5], [0.75, 1.0], [0.0, 0.25]), start=1):
        rows += [sampled(group, reward) for reward in rewards]
    rows[0] |= {"text": HACK, "task": json.dumps({"prompt": HACK, "answer": HACK})}
    write_samples(path / "samples", 20, rows)
    write_tokenizer(path / "initial_model")
    write_timeline(path)
    write_state(path)
    return path


def sampled(group: int, reward: float) -> dict[str, Any]:
    """Four tokens, of two versions of the weights, the third of them unlikely."""
    return {
        "group": group, "reward": reward, "advantage": reward - 0.5, "finish": "stop" if reward else "length",
        "text": f"two and two make {reward:g}", "task": json.dumps({"prompt": f"question {group}", "answer": 4}),
        "response_ids": [0, 1, 2, 3], "behavior_logprobs": [-0.1, -0.2, -3.0, -0.3], "token_versions": [8, 8, 9, 9],
    }  # fmt: skip


def talk() -> dict[str, Any]:
    said = [
        {"role": "user", "content": "How much is two and two?"},
        {"role": "assistant", "content": "", "reasoning_content": "I had better ask.", "turn": 0,
         "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2, "b": 2}}}]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": HACK, "turn": 1},
    ]  # fmt: skip
    turns = {"turn_tokens": [2, 2], "turn_ids": [1, 0], "turn_rewards": [0.5, 0.0]}
    return sampled(5, 1.0) | {"transcript": json.dumps(said), "advantage": [-0.25, -0.25, 0.75, 0.75]} | turns


def make_seen(path: Path) -> Path:
    """A finished run with pictures: at step 1 two of a prompt, of which one was not kept; at step 2 an attempt that
    sees another one in its second turn."""
    make_run(path, "start", "end", metrics=metrics(2))
    board, moved = write_pictures(path, drawn(56, 84, 3), drawn(900, 600, 5))
    task = json.dumps({"prompt": "Here <image> and there <image>: how many?", "answer": 3})
    write_samples(path / "samples", 1, [sampled(1, 1.0) | {"task": task, "pictures": [board, None]}])
    said = [
        {"role": "user", "content": [{"type": "text", "text": "Move. "}, {"type": "image", "picture": 0}]},
        {"role": "assistant", "content": "right"},
        {"role": "user", "content": [{"type": "image", "picture": 1}, {"type": "text", "text": " And now?"}]},
        {"role": "assistant", "content": "stop"},
    ]
    row = sampled(2, 1.0) | {"transcript": json.dumps(said), "turn_tokens": [2, 2], "pictures": [board, moved]}
    write_samples(path / "samples", 2, [row])
    write_tokenizer(path / "initial_model")
    return path


def drawn(width: int, height: int, count: int) -> bytes:
    """A PNG of so many squares."""
    image = Image.new("RGB", (width, height), "#f4efe4")
    edge = min(width, height) // 6
    for number in range(count):
        x, y = (number * 37 % 70) * width // 100, (number * 53 % 75) * height // 100
        ImageDraw.Draw(image).rectangle((x, y, x + edge, y + edge), "#2a6f97" if number % 2 else "#c44536")
    target = io.BytesIO()
    image.save(target, "PNG")
    return target.getvalue()


def write_tokenizer(path: Path) -> None:
    path.mkdir()
    vocabulary = {word: index for index, word in enumerate([*WORDS, "?"])}
    Tokenizer(models.WordLevel(vocabulary, "?")).save(str(path / "tokenizer.json"))
