"""Writes docs/api.md, the reference of what `import penstock` gives, from signatures and docstrings.

python -m tests.api_page > docs/api.md
"""

import dataclasses
import inspect
import itertools
import re
import textwrap
from typing import Any

import penstock
from penstock.orchestrator.configuration.keys import texts_of
from penstock.orchestrator.loops.session_policy import Model, Policy
from penstock.orchestrator.loops.verbs import LoopPolicy
from penstock.orchestrator.session import Attempts, PromptStream, Reward, Session, Workers

HEAD = """# The Python API

What `import penstock` gives; everything else may change without notice. Guides:
[algorithms of one's own](algorithms.md), [environments](agents.md), [loops](serve.md#the-same-loop-here-and-there).

A configuration is made by [`train`](#runs), of words, `load_config(["recipe=arithmetic", "trainer.max_steps=50"])`, or
of typed sections. `penstock.conf` has them all, and [keys.md](keys.md) says what each field means:

```python
from penstock import conf, run

config = conf.RunConfig(
    model=conf.ModelConfig(path="MY_MODEL"),
    data=conf.DataConfig(path="questions.jsonl"),
    reward=conf.RewardConfig(function="my_reward.py:score"),
    algorithm=conf.GrpoConfig(group_size=16),
    rollout=conf.RolloutConfig(max_model_len=2048, sampling=conf.SamplingConfig(max_tokens=512)),
    trainer=conf.TrainerConfig(max_steps=200, optimizer=conf.OptimizerConfig(lr=1e-6)),
)
run(config)
```
"""
TYPES = {
    "Message": "A message as clients of chat endpoints send it: a mapping with `role` and `content`.",
    "Positive": "The annotation of a formula's setting that has to be above 0.",
    "NonNegative": "The annotation of a formula's setting that has to be 0 or more.",
}
DECORATORS = {
    "advantage": """Register an advantage for `algorithm.advantage=NAME`.

    @advantage("my_advantage")
    def my_advantage(reward: Tensor, *, scale: Positive = 1.0) -> Tensor:  # [G] of a group -> [G]
        return (reward - reward.median()) / scale

Gets: columns, by parameters without a default, `[G]` of a group, or `[B]` with `algorithm.advantage_per=batch`; token
columns as lists of `[T_i]`. Returns an advantage a row, or a token, `[G, T]`. A parameter `state: MyState` is carried
from step to step; the function then returns `(advantage, next state)`.""",
    "surrogate": """Register a policy loss for `algorithm.surrogate=NAME`.

    @surrogate("my_surrogate")
    def my_surrogate(new, old, advantage, mask, *, clip: NonNegative = 0.2):  # [B, T] each -> [B, T], metrics
        ratio = (new - old).clamp(-20, 20).exp()
        return -advantage * ratio.clamp(1 - clip, 1 + clip), {"ratio": ratio.detach()}

Gets: float32, zero in padding; `new` with gradient. Returns the loss of each token and values of each token by metric.
Masks, correction, KL term and aggregation are the caller's.""",
    "correction": """Register a correction for `algorithm.correction=NAME`.

    @correction("my_correction")
    def my_correction(old, behavior, mask, *, cap: Positive = 2.0):  # [B, T] each -> weights [B, T], metrics
        weight = (old - behavior).clamp(-20, 20).exp().clamp(max=cap)
        return weight, {"correction_weight_mean": weight}

Gets: log-probabilities of trainer and engine. Returns weights without gradient, 0 for tokens that do not count, and
values of each token by metric.""",
}
"""What the functions that a decorator registers get and return; its own docstring is that of all registries."""
SHOWN = ("__getitem__", "__call__")
"""Methods with a name of Python's own that are told."""
OF_THE_RUNTIME = {
    "arrays", "as_bytes", "batch_reads", "blobs", "candidates", "columns", "failed_writes", "from_bytes",
    "has_environment", "in_environment", "in_trainer", "is_in_trainer", "is_scored", "lengths", "lists",
    "optional_reads", "parent", "ragged", "reads_of", "rewarded", "routed_experts", "rows_are", "rows_of",
    "stopped_by", "stored_columns", "strings", "table_with_ids", "takes_groups", "without",
}  # fmt: skip
"""Members that the runtime calls, and authors do not."""
MOST_SHOWN = 12
"""Most parameters of a signature that are told."""
GROUPS = {
    "Runs": ("train", "run", "RunResult", "load_config", "RunConfig", "session"),
    "Loops of one's own": ("Client", "Datum", "LossCall", "AdamParams"),
    "Dataflows and algorithms": ("algorithm", "AlgorithmConfig", "Dataflow", "Stage", "Column"),
    "Formulas": (
        "LossInputs", "LossOutput", "advantage", "surrogate", "correction", "truncated_importance_weight", "aggregate",
        "BatchTotals", "Positive", "NonNegative",
    ),
    "Rows and rewards": ("Rows", "reward", "Sandbox"),
    "Environments": ("environment", "Task", "Context", "Message", "Turn", "Trajectory", "Sampling"),
    "Errors": ("PenstockError", "ConfigError", "DataError", "LimitReached", "AttemptOver", "InfrastructureError"),
}  # fmt: skip


HANDLES = {
    "run": Session, "run.policy": Policy, "run.prompts": PromptStream, "run.reward": Reward,
    "run.environment": Attempts, "run.rollouts, run.rewards": Workers, "run.reference": Model,
}  # fmt: skip
"""What a session gives, `with penstock.session(config) as run`; a `Client`'s `run.policy` has `LoopPolicy`'s verbs."""


def page() -> str:
    lines = [HEAD]
    for title, names in GROUPS.items():
        lines.append(f"## {title}\n")
        for name in names:
            lines += _told(name, getattr(penstock, name))
        if "Client" in names:
            lines += [line for name, kind in HANDLES.items() for line in _handle(name, kind)]
    return "\n".join(lines).rstrip() + "\n"


def _told(name: str, value: Any) -> list[str]:
    if name in TYPES:
        return [f"### `{name}`\n", f"{TYPES[name]}\n"]
    text = DECORATORS.get(name, inspect.getdoc(value) or "")
    lines = [f"### `{name}{_signature(value)}`\n", *_paragraphs(text)]
    if inspect.isclass(value) and not issubclass(value, Exception) and value is not penstock.RunConfig:
        lines += [*_members(value), ""]
    return lines


def _handle(name: str, kind: type) -> list[str]:
    text = [line for line in _paragraphs(inspect.getdoc(kind) or "") if not line.startswith("Lifecycle")]
    verbs = [*_members(LoopPolicy), *_members(Model)] if kind is Policy else []
    own = _members(kind)
    told = {one.partition("(")[0] for one in own}
    return [f"### `{name}`\n", *text, *own, *(one for one in verbs if one.partition("(")[0] not in told), ""]


def _members(kind: type) -> list[str]:
    found = []
    if dataclasses.is_dataclass(kind):
        texts = texts_of(kind)
        found = [
            f"- `{one.name}`: {texts[one.name]}"
            for one in dataclasses.fields(kind)
            if texts.get(one.name) and one.name not in OF_THE_RUNTIME
        ]
    for name, member in vars(kind).items():
        if name in OF_THE_RUNTIME:
            continue
        text = inspect.getdoc(member) if not name.startswith("_") or name in SHOWN else None
        inner = getattr(member, "__func__", member)
        if text and (inspect.isfunction(inner) or isinstance(member, property)):
            signature = _signature(inner) if inspect.isfunction(inner) else ""
            found.append(f"- `{name}{signature}`: {_first(text)}")
    return found


def _signature(value: Any) -> str:
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return "()"
    kept = [one for one in found.parameters.values() if one.name not in ("self", "cls")]
    return _readable(str(found.replace(parameters=kept))) if len(kept) <= MOST_SHOWN else "(…)"


def _readable(signature: str) -> str:
    """A signature with types by their bare names, and without `-> None`."""
    bare = re.sub(r"\b(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_])", "", signature)
    bare = re.sub(r"(?<!= )'(\w[^']*)'", r"\1", bare)  # types in quotes; texts of defaults stand behind `= `
    bare = re.sub(r"\*<class (\w+)>", r"\1", bare).replace("~", "")
    return bare.replace("<factory>", "…").removesuffix(" -> None")


def _paragraphs(text: str) -> list[str]:
    """A docstring as Markdown: paragraphs, and indented blocks as code."""
    found = []
    for is_code, group in itertools.groupby(re.split(r"\n\s*\n", text), lambda one: one.startswith(("    ", ">>>"))):
        blocks = list(group)
        if is_code:
            code = "\n\n".join(map(textwrap.dedent, blocks)).strip()
            found.append(f"```{'pycon' if code.startswith('>>>') else 'python'}\n{code}\n```\n")
        else:
            found += [f"{one if one.startswith('- ') else ' '.join(one.split())}\n" for one in blocks]
    return found


def _first(text: str) -> str:
    return " ".join(re.split(r"\n\s*\n", text)[0].split())


if __name__ == "__main__":
    print(page(), end="")
