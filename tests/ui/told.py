"""What a run tells of itself while it goes on, with known content: spans.jsonl, state.json, logs/."""

import json
import time
from pathlib import Path
from typing import Any

START = 1_767_225_600.0
"""2026-01-01T00:00:00Z."""
NUM_STEPS = 12


def step_line(step: int) -> dict[str, Any]:
    """Two seconds: Rollout-1's last group takes one of them, the update half a second."""
    start = START + 2 * (step - 1)
    wait, update = ["wait for batch", 0, 1200, {"step": step}], ["update", 1200, 1700, {"forward": 0.2}]
    return {
        "step": step, "start": start, "end": start + 2, "missed": 0,
        "text": f"step {step} took 2.0 s: 1.0 s waiting for Rollout-1's last group ({step}), 0.50 s update",
        "path": [
            ["Rollout-1", f"waiting for Rollout-1's last group ({step})", 0, 1000],
            ["Reward-0", "reward by Reward-0", 1000, 1200], ["Trainer-policy-0", "update", 1200, 1700],
            ["Rollout-0", "load weights", 1700, 2000],
        ],
        "lanes": {
            "Rollout-0": [["rollout", 0, 400, {"group": 0, "rows": 4}], ["rollout", 0, 500, {"group": 1, "rows": 4}],
                          ["wait for prompts", 500, 1700, {}], ["load weights", 1700, 2000, {"version": step}]],
            "Rollout-1": [["rollout", 0, 1000, {"group": step, "rows": 4}]],
            "Reward-0": [["reward", 1000, 1200, {"rows": 4}]],
            "Trainer-policy-0": [wait, update],
        },
    }  # fmt: skip


def write_timeline(run: Path, count: int = NUM_STEPS) -> None:
    lines = [json.dumps(step_line(step)) + "\n" for step in range(1, count + 1)]
    (run / "spans.jsonl").write_text("".join(lines))


def member(name: str, role: str, phase: str | None = "serving", in_flight: int = 0) -> dict[str, Any]:
    return {
        "name": name, "role": role, "stage": role, "node": "n1", "phase": phase, "phase_s": 3.0, "num_done": 7,
        "num_in_flight": in_flight, "tokens_in_flight": 0,
    }  # fmt: skip


def write_state(run: Path) -> None:
    """Rollout-1 has the last 24 rows; the reward and the trainer wait for it. Reward-1 does not answer."""
    counts = {"waiting": 24, "free": 0, "leased": 0, "done": 40}
    lease = {"id": 9, "stage": "rollout", "owner": "Rollout-1", "open_rows": 24, "held_s": 12.5, "expires_in_s": 60.0}
    state = {
        "time": START + 30, "step": 5,
        "nodes": [{"id": "n1", "name": "alpha", "address": "10.0.0.1", "cpus": 8.0, "gpus": 0.0}],
        "members": [
            member("Prompts", "prompts"), member("Rollout-0", "rollout"), member("Rollout-1", "rollout", "serving", 24),
            member("Reward-0", "reward"), member("Reward-1", "reward", None),
            member("Trainer-policy-0", "trainer", "waiting for its batch"),
        ],
        "stages": [],
        "weights": {"told": 4, "loading": 5, "serving": {"Rollout-0": 5, "Rollout-1": 4}},
        "store": {
            "rows": {"rollout": {"waiting": 0, "free": 0, "leased": 24, "done": 40}, "reward": counts},
            "wait_s": {"rollout": 0.01, "reward": 0.02}, "counters": {"dropped/reward_error": 3},
            "oldest_group": 128, "oldest_group_waits_for": {"reward": 8},
            "leases": [lease],
            "credits": {"active": 16, "max": 32, "served": 4},
        },
        "waits": [
            {"who": "Reward-0", "on": "Rollout-1", "what": "24 row(s) of rollout"},
            {"who": "Trainer-policy-0", "on": "Rollout-1", "what": "24 row(s) of rollout"},
        ],
    }  # fmt: skip
    (run / "state.json").write_text(json.dumps(state) + "\n")


def write_logs(run: Path, text: str = "") -> None:
    """Rollout-1 dies of too little memory, after something was printed; `text`: what it printed before."""
    logs = run / "logs"
    logs.mkdir()
    (logs / "Rollout-1.log").write_text(
        f"2026-01-01T00:00:01Z out loading {text}\n2026-01-01T00:00:09Z err RuntimeError: out of memory\n"
    )
    (logs / "Trainer-policy-0.log").write_text("2026-01-01T00:00:05Z out step 4\n")


def write_serving(run: Path, **more: Any) -> None:
    """What a server says that it is doing: two tenants, one of which is paused."""
    usage = {
        "requests": {"forward_backward": 3, "optim_step": 2}, "failures": 0, "refused_requests": 7,
        "tokens_trained": 4780, "tokens_sampled": 2790, "seconds_trained": 36.0, "seconds_sampled": 9.0,
        "wait_seconds_sum": {"ranks": 10.0}, "wait_seconds_count": {"ranks": 5}, "requests_waiting": 9,
        "waiting_bytes": 4096, "adapters": 1, "adapters_on_ranks": 1, "stored_bytes": 3 * 2**30,
    }  # fmt: skip
    client = {
        "id": "one:train:0", "session": "one", "base_model": "small", "rank": 8, "next": 152, "waiting": 2,
        "on_ranks": True, "snapshot": 144, "waits_for": "request 152 is being carried out",
    }  # fmt: skip
    tenant = {
        "share": 2.0, "tokens_per_minute": 0, "paused_s": 0.0, "max_adapters": 16, "usage": usage,
        "sessions": [], "clients": [client],
    }  # fmt: skip
    paused = {"tokens_per_minute": 3000, "paused_s": 70.0, "clients": []}
    state = {
        "time": time.time(), "url": "http://127.0.0.1:8430", "is_ending": False, "losses_of_ranks": 1,
        "losses_of_engines": 0, "model": {"name": "small", "max_length": 64, "max_rank": 8},
        "tenants": {"alice": tenant, "bob": tenant | paused},
    }  # fmt: skip
    (run / "serving.json").write_text(json.dumps(state | more))
