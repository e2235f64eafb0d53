"""Keys of verl and TRL, and what each is in Penstock. Pure, but for reading the table.

    counterparts.yaml ─▶ Framework: rules, and keys without a counterpart ─▶ `translate.py`, a configuration of theirs
                                                                          ├▶ `counterpart`: the answer to one key
                                                                          └▶ `table`: docs/coming_from.md

A rule that is more than another name, or other names of values, names a function of this module. It gets the values of
its keys, None for one that is not set, if one of them is set; and returns our keys, or raises `NotTranslated`.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path, PurePath
from typing import Any

import yaml

from penstock.conf.capabilities import ROLLOUT_ENGINES, names_with

Values = Mapping[str, Any]
"""Keys with dots, and their values."""


class NotTranslated(Exception):
    """A value of a known key that has no counterpart. Its text says what to do."""


@dataclass(frozen=True)
class Rule:
    """Translation of one of their keys, or of several that mean something together."""

    theirs: tuple[str, ...]
    translate: Callable[..., Values]
    ours: str
    """Our keys, for people."""
    told: str = ""
    """What differs, for people."""


@dataclass(frozen=True)
class Framework:
    """What is known of another framework's configuration: a section of counterparts.yaml."""

    name: str
    marks: tuple[str, ...]
    rules: tuple[Rule, ...]
    without: Mapping[str, str]
    always: Values
    owned: tuple[str, ...] = ()
    asked: Mapping[str, str] = field(default_factory=dict)

    def is_of(self, values: Values) -> bool:
        return any(key.startswith(self.marks) for key in values)

    def reason(self, key: str) -> str:
        """Why a key that no rule knows has no counterpart, or what there is instead; empty where nothing is known."""
        beginnings = [beginning for beginning in self.without if key.startswith(beginning)]
        return self.without[max(beginnings, key=len)] if beginnings else ""

    def names(self) -> Iterator[tuple[str, str]]:
        """Their keys, and our names for them."""
        for rule in self.rules:
            for theirs in rule.theirs:
                yield theirs, rule.ours.replace("`", "")


@cache
def frameworks() -> tuple[Framework, ...]:
    """The frameworks that are known, read when the first one is needed."""
    sections = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return tuple(_framework(name, **section) for name, section in sections.items())


def counterpart(key: str) -> str:
    """What a key of another framework is here, in a sentence; empty for a key that none has."""
    for framework in frameworks():
        for theirs, ours in framework.names():
            if key == theirs:
                return f"{framework.name}'s {key} is {ours} here."
        if key.startswith(framework.owned):
            why = f": {reason}" if (reason := framework.reason(key)) else ""
            return f"It is a key of {framework.name}'s{why}. `penstock translate FILE` makes a recipe of its script."
    return ""


def counterparts(words: list[str]) -> Iterator[tuple[str, str, str]]:
    """Framework, key and what it is here, of all keys whose names have all these words."""
    for framework in frameworks():
        for theirs, ours in framework.names():
            if all(word in theirs.lower() for word in words):
                yield framework.name, theirs, ours


def table(framework: Framework) -> str:
    """What each key becomes, as tables in Markdown."""
    lines = [f"| {framework.name} | here | |", "|---|---|---|"]
    for rule in framework.rules:
        lines.append(f"| {', '.join(f'`{key}`' for key in rule.theirs)} | {rule.ours} | {rule.told} |")
    lines += ["", f"| {framework.name}, without a counterpart | why, or what there is instead |", "|---|---|"]
    keys_of: dict[str, list[str]] = defaultdict(list)
    for key, why in framework.without.items():
        keys_of[why].append(f"`{key}{'…' if key[-1] in '._' else ''}`")
    lines += [f"| {', '.join(keys)} | {why} |" for why, keys in keys_of.items()]
    return "\n".join(lines) + "\n"


def _framework(name: str, rules: list[dict[str, Any]], **section: Any) -> Framework:
    lists: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in section.items()}
    return Framework(name, rules=tuple(map(_rule, rules)), **lists)


def _rule(entry: dict[str, Any]) -> Rule:
    if "theirs" not in entry:
        ((theirs, ours),) = entry.items()
        return _rule({"theirs": theirs, "ours": ours})
    theirs, ours = entry["theirs"], str(entry["ours"])
    translate = globals()[entry["by"]] if "by" in entry else partial(_one_value, ours, entry)
    shown = ", ".join(key if key == "nothing" else f"`{key}`" for key in ours.split(", "))
    return Rule((theirs,) if isinstance(theirs, str) else tuple(theirs), translate, shown, entry.get("told", ""))


def _one_value(ours: str, entry: dict[str, Any], value: Any) -> Values:
    """Our key with a value of theirs, or with what counterparts.yaml has for it."""
    if "least" in entry:
        return {ours: max(entry["least"], value)}
    if "values" not in entry:
        return {ours: value}
    if value not in entry["values"]:
        raise NotTranslated(entry.get("refused", {}).get(value) or entry["unknown"].format(value))
    made = entry["values"][value]
    return made if isinstance(made, dict) else {ours: made}


# Of both frameworks.

TRACKERS = ("wandb", "mlflow", "trackio", "tensorboard")
IGNORED_TRACKERS = ("console", "none", "all")


def total_epochs(number: float) -> Values:
    raise NotTranslated(f"steps are counted here: set trainer.max_steps to {number:g} x rows / trainer.groups_per_step")


def clipping(both: float | None, low: float | None, high: float | None) -> Values:
    both = 0.2 if both is None else both
    return {"algorithm.clip_low": both if low is None else low, "algorithm.clip_high": both if high is None else high}


def trackers(names: Any) -> Values:
    known = [name for name in _listed(names) if name not in IGNORED_TRACKERS]
    if unknown := [name for name in known if name not in TRACKERS]:
        raise NotTranslated(f"{', '.join(unknown)}: the trackers here are {', '.join(TRACKERS)}")
    return {"tracking.sinks": ["ray", *known]}


def _steps(warmup: float | None, share: float | None, total: int | None) -> Values:
    """`warmup`: in steps; or else `share` of all steps."""
    found: dict[str, Any] = {"trainer.max_steps": total} if total else {}
    if warmup is not None:
        return found | {"trainer.optimizer.warmup_steps": int(warmup)}
    if share and not total:
        raise NotTranslated("a share of the steps, whose number is not said: set trainer.optimizer.warmup_steps")
    return found | ({"trainer.optimizer.warmup_steps": round(share * total)} if share and total else {})


def _on_shared_gpus(total: int, size: int) -> Values:
    """Our keys of a trainer, its engines of `size` GPUs each and its reference, if it has one, which share so many
    GPUs."""
    if total % size:
        raise NotTranslated(f"{total} GPUs do not part into engines of {size}")
    return {
        "placement": "colocated", "trainer.num_ranks": total, "trainer.num_gpus_per_rank": 0.5,
        "rollout.num_workers": total // size, "rollout.tensor_parallel_size": size, "rollout.num_gpus_per_worker": 0.5,
    }  # fmt: skip


def _listed(values: Any) -> list[Any]:
    return list(values) if isinstance(values, list | tuple) else [values]


# Of verl: verl/trainer/config/ppo_trainer.yaml.

ESTIMATORS = {
    "grpo": "grpo", "gae": "ppo", "rloo": "rloo", "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp", "remax": "remax",
}  # fmt: skip
LOSSES = ("gspo", "cispo")
"""Policy losses that are algorithms of their own here."""
COLUMNS = {"data.columns.prompt": "prompt", "data.columns.answer": "reward_model.ground_truth"}


def estimator(name: str | None, by_std: bool | None, loss: str | None) -> Values:
    name, loss = name or "gae", loss or "vanilla"
    if name not in ESTIMATORS:
        raise NotTranslated(f"{name} is none of the estimators known here; see `algorithm.advantage` in docs/keys.md")
    if loss not in ("vanilla", *LOSSES):
        raise NotTranslated(f"{loss} is none of the losses known here; see `algorithm.surrogate` in docs/keys.md")
    if loss in LOSSES and name != "grpo":
        raise NotTranslated(f"{loss} goes with the advantages of grpo here; see `algorithm.surrogate` in docs/keys.md")
    divides = {"algorithm.normalize_std": by_std} if by_std is not None and name == "grpo" else {}
    over_tokens = {"algorithm.aggregation": "token_mean"} if loss == "gspo" else {}
    return {"algorithm.name": loss if loss in LOSSES else ESTIMATORS[name], **divides, **over_tokens}


def train_files(files: Any) -> Values:
    names = list(map(str, _listed(files)))
    if len(names) == 1:
        return {"data.path": names[0], **COLUMNS}
    return {"data.mixture": {name: {"path": file} for name, file in _named(names).items()}, **COLUMNS}


def val_files(files: Any) -> Values:
    first, *more = map(str, _listed(files))
    sets = {"evaluation.sets": {name: {"path": file} for name, file in _named(more).items()}} if more else {}
    return {"evaluation.path": first, **sets}


def _named(files: list[str]) -> dict[str, str]:
    """Files by names that a key can have: their folder's, as verl keeps train.parquet of each dataset."""
    found: dict[str, str] = {}
    for file in files:
        name = re.sub(r"\W+", "_", PurePath(file).parent.name) or "part"
        found[name if name not in found and name[0].isalpha() else f"part{len(found) + 1}"] = file
    return found


def verl_lengths(prompt: int | None, response: int | None) -> Values:
    most = int(prompt or 512), int(response or 512)
    return {
        "data.max_prompt_tokens": most[0], "rollout.sampling.max_tokens": most[1], "rollout.max_model_len": sum(most)
    }  # fmt: skip


def verl_batch(prompts: int | None, mini: int | None) -> Values:
    groups = int(prompts or 1024)
    return {"trainer.groups_per_step": groups, "trainer.num_minibatches": max(1, groups // int(mini or 256))}


def too_long(filters: bool | None, cuts: str | None) -> Values:
    if cuts in ("left", "right", "middle") and not filters:
        raise NotTranslated("prompts are not cut here: data.too_long=skip leaves long ones out")
    return {"data.too_long": "skip" if filters else "error"}


def images(key: str) -> Values:
    return {"data.columns.pictures": key, "rollout.max_pictures": 4}


def divergence(in_loss: bool | None, coef: float | None, in_reward: bool | None, reward_coef: float | None) -> Values:
    if in_reward:
        return {"algorithm.kl_coef": 0.001 if reward_coef is None else reward_coef, "algorithm.kl_in": "reward"}
    return {"algorithm.kl_coef": (0.001 if coef is None else coef) if in_loss else 0.0}


def verl_gpus(each: int | None, nodes: int | None, size: int | None) -> Values:
    return _on_shared_gpus(int(each or 8) * int(nodes or 1), int(size or 2))


def offload(parameters: bool | None, optimizer: bool | None) -> Values:
    return {"trainer.offload": bool(parameters or optimizer)}


def verl_steps(warmup: int | None, share: float | None, total: int | None) -> Values:
    return _steps(warmup if warmup is not None and warmup >= 0 else None, share, total)


def engine(name: str) -> Values:
    if name not in ROLLOUT_ENGINES or not ROLLOUT_ENGINES[name].has_model:
        raise NotTranslated(f"{name}: the engines here are {names_with('has_model', ROLLOUT_ENGINES)}")
    return {"rollout.engine": name}


def samples(number: int) -> Values:
    return {"evaluation.num_samples": number if number > 1 else 0}


def listed(names: Any) -> Values:
    return {"trainer.lora.target_modules": _listed(names)}


def resume(mode: str | None, path: str | None) -> Values:
    return {"resume": path if mode == "resume_path" and path else "auto" if mode in (None, "auto") else "never"}


def reward(path: str | None, name: str | None, new_path: str | None, new_name: str | None) -> Values:
    if not (file := path or new_path):
        raise NotTranslated("no file is named: set reward.function, such as math_verify for mathematics")
    return {"reward.function": f"{file}:{name or new_name or 'compute_score'}"}


# Of TRL: GRPOConfig, ScriptArguments, ModelConfig.

PROMPT_TOKENS = 512
"""Default of data.max_prompt_tokens."""


def trl_batch(
    each: int | None, parts: int | None, devices: int | None, samples: int | None, steps: int | None
) -> Values:
    group, accumulated = int(samples or 8), int(parts or 1)
    forwards = int(steps or accumulated)
    completions = int(each or 8) * int(devices or 1) * forwards
    if completions % group:
        raise NotTranslated(f"{completions} completions are no whole groups of {group}: set trainer.groups_per_step")
    return {
        "algorithm.group_size": group, "trainer.groups_per_step": completions // group,
        "trainer.num_minibatches": max(1, forwards // accumulated),
    }  # fmt: skip


def trl_lengths(prompt: int | None, response: int | None, longest: int | None) -> Values:
    most = int(response or 512)
    return {
        **({} if prompt is None else {"data.max_prompt_tokens": int(prompt)}), "rollout.sampling.max_tokens": most,
        "rollout.max_model_len": int(longest or most + int(prompt or PROMPT_TOKENS)),
    }  # fmt: skip


def epsilon(low: float | None, high: float | None) -> Values:
    return clipping(low, None, high)


def trl_steps(warmup: float | None, share: float | None, total: int | None) -> Values:
    steps = max(0, total or 0)
    if warmup and 0 < warmup < 1:
        return _steps(None, warmup, steps)
    return _steps(warmup if warmup and warmup >= 1 else None, share, steps)


def betas(first: float | None, second: float | None) -> Values:
    return {"trainer.optimizer.betas": [0.9 if first is None else first, 0.999 if second is None else second]}


def dtype(bf16: bool | None, fp16: bool | None, *names: str | None) -> Values:
    if fp16 or "float16" in names:
        raise NotTranslated("fp16: the types here are float32 and bfloat16")
    kind = "float32" if bf16 is False or "float32" in names else "bfloat16"
    return {"trainer.dtype": kind, "rollout.dtype": kind}


def trl_gpus(devices: int | None, mode: str | None, size: int | None) -> Values:
    if devices is None:
        return {"placement": "colocated"} if mode == "colocate" else {}
    if mode != "server":
        return _on_shared_gpus(int(devices), int(size or 1))
    return {
        "trainer.num_ranks": int(devices), "trainer.num_gpus_per_rank": 1, "rollout.num_gpus_per_worker": 1,
        "rollout.tensor_parallel_size": int(size or 1),
    }  # fmt: skip


def lora(uses: bool | None, rank: int | None, alpha: int | None, modules: Any) -> Values:
    if not uses:
        return {}
    names = modules if isinstance(modules, list) else re.findall(r"[^\s,]+", str(modules or "all-linear"))
    return {
        "trainer.lora.rank": int(rank or 16), "trainer.lora.alpha": int(alpha or 32),
        "trainer.lora.target_modules": names,
    }  # fmt: skip


def rewards(names: Any) -> Values:
    found = [_function(str(name)) for name in _listed(names)]
    return {"reward.function": found[0]} if len(found) == 1 else {"rewards": [{"function": name} for name in found]}


def _function(name: str) -> str:
    module, _, function = name.rpartition(".")
    return f"{module or 'trl.rewards'}:{function}"


def save_every(every: float | None, strategy: str | None) -> Values:
    return _every("checkpoint.every_steps", every, strategy, 500)


def evaluate_every(every: float | None, strategy: str | None) -> Values:
    return _every("evaluation.every_steps", every, strategy, 0)


def _every(key: str, every: float | None, strategy: str | None, default: int) -> Values:
    if every is not None and 0 < every < 1:
        raise NotTranslated(f"a share of the steps: set {key} to their number")
    return {key: 0 if strategy == "no" else int(every or default)}
