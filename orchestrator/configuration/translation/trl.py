"""TRL's keys (`GRPOConfig`, `ScriptArguments`, `ModelConfig`) in Penstock's terms."""

import re
from typing import Any

from penstock.orchestrator.configuration.translation.rules import (
    Framework,
    NotTranslated,
    Rule,
    Values,
    on_shared_gpus,
    rule,
    same,
)

LOSSES = {
    "grpo": {"algorithm.name": "grpo", "algorithm.aggregation": "sequence_mean"},
    "bnpo": {"algorithm.name": "grpo", "algorithm.aggregation": "token_mean"},
    "dapo": {"algorithm.name": "grpo", "algorithm.aggregation": "token_mean"},
    "dr_grpo": {"algorithm.name": "dr_grpo"},
    "cispo": {"algorithm.name": "cispo"},
}
BF16 = "bfloat16"
PROMPT_TOKENS = 512
"""Default of data.max_prompt_tokens."""
SCALES = {True: True, "group": True, False: False, "none": False}
TRACKERS = ("wandb", "mlflow", "trackio", "tensorboard")
ONCE = "each row is trained once: for more optimizer steps of a batch raise trainer.num_minibatches"
CHOSEN = "chosen automatically"
SERVER = "the run starts and ends its engines"


@rule("loss_type", "`algorithm.name`, `algorithm.aggregation`")
def loss(kind: str) -> Values:
    if kind not in LOSSES:
        raise NotTranslated(f"{kind}: see algorithm.surrogate in docs/keys.md")
    return LOSSES[kind]


@rule("per_device_train_batch_size gradient_accumulation_steps num_processes num_generations steps_per_generation",
      "`trainer.groups_per_step`, `trainer.num_minibatches`, `algorithm.group_size`",
      "TRL counts completions of a device, and the number of devices is the launcher's. A step here is one "
      "generation, and what is trained of it.")  # fmt: skip
def batch(each: int | None, parts: int | None, devices: int | None, samples: int | None, steps: int | None) -> Values:
    each, parts, samples = int(each or 8), int(parts or 1), int(samples or 8)
    steps = int(steps or parts)
    completions = each * int(devices or 1) * steps
    if completions % samples:
        raise NotTranslated(f"{completions} completions are no whole groups of {samples}: set trainer.groups_per_step")
    return {
        "algorithm.group_size": samples, "trainer.groups_per_step": completions // samples,
        "trainer.num_minibatches": max(1, steps // parts),
    }  # fmt: skip


@rule("max_prompt_length max_completion_length vllm_max_model_length",
      "`data.max_prompt_tokens`, `rollout.sampling.max_tokens`, `rollout.max_model_len`",
      "TRL 1 has no limit for prompts, so that they have the room of `data.max_prompt_tokens` here.")  # fmt: skip
def lengths(prompt: int | None, response: int | None, longest: int | None) -> Values:
    response = int(response or 512)
    given = {} if prompt is None else {"data.max_prompt_tokens": int(prompt)}
    return {
        **given, "rollout.sampling.max_tokens": response,
        "rollout.max_model_len": int(longest or response + int(prompt or PROMPT_TOKENS)),
    }  # fmt: skip


@rule("epsilon epsilon_high", "`algorithm.clip_low`, `algorithm.clip_high`")
def clipping(low: float | None, high: float | None) -> Values:
    low = 0.2 if low is None else low
    return {"algorithm.clip_low": low, "algorithm.clip_high": low if high is None else high}


@rule("mask_truncated_completions", "`rollout.truncated`", "{length: mask}.")
def truncation(masks: bool) -> Values:
    return {"rollout.truncated": {"length": "mask"}} if masks else {}


@rule("scale_rewards", "`algorithm.normalize_std`", "Of `algorithm=grpo`.")
def scale(by: Any) -> Values:
    if by not in SCALES:
        raise NotTranslated(f"{by}: rewards are divided by their group's deviation or not at all")
    return {"algorithm.normalize_std": SCALES[by]}


@rule("num_iterations", "nothing", "A batch is trained once.")
def iterations(number: int) -> Values:
    if number > 1:
        raise NotTranslated(
            "each row is trained once: for more optimizer steps of a batch raise trainer.num_minibatches"
        )
    return {}


@rule("warmup_steps warmup_ratio max_steps", "`trainer.optimizer.warmup_steps`, `trainer.max_steps`")
def steps(warmup: float | None, share: float | None, total: int | None) -> Values:
    found: dict[str, Any] = {"trainer.max_steps": total} if total and total > 0 else {}
    share = warmup if warmup and 0 < warmup < 1 else share
    if warmup and warmup >= 1:
        found["trainer.optimizer.warmup_steps"] = int(warmup)
    elif share and found:
        found["trainer.optimizer.warmup_steps"] = round(share * found["trainer.max_steps"])
    elif share:
        raise NotTranslated("a share of the steps, whose number is not said: set trainer.optimizer.warmup_steps")
    return found


@rule("num_train_epochs", "`trainer.max_steps`", "Steps are counted here, not epochs.")
def epochs(number: float) -> Values:
    raise NotTranslated(f"steps are counted here: set trainer.max_steps to {number:g} x rows / trainer.groups_per_step")


@rule("lr_scheduler_type", "`trainer.optimizer.schedule`")
def schedule(name: str) -> Values:
    if name not in ("constant", "constant_with_warmup", "cosine"):
        raise NotTranslated(f"{name}: the schedules here are constant and cosine")
    return {"trainer.optimizer.schedule": name.removesuffix("_with_warmup")}


@rule("adam_beta1 adam_beta2", "`trainer.optimizer.betas`")
def betas(first: float | None, second: float | None) -> Values:
    return {"trainer.optimizer.betas": [0.9 if first is None else first, 0.999 if second is None else second]}


@rule("bf16 fp16 dtype torch_dtype", "`trainer.dtype`, `rollout.dtype`")
def dtype(bf16: bool | None, fp16: bool | None, *names: str | None) -> Values:
    if fp16 or "float16" in names:
        raise NotTranslated("fp16: the types here are float32 and bfloat16")
    kind = "float32" if bf16 is False or "float32" in names else "bfloat16"
    return {"trainer.dtype": kind, "rollout.dtype": kind}


@rule("use_vllm", "`rollout.engine`")
def engine(uses: bool) -> Values:
    return {"rollout.engine": "vllm" if uses else "hf"}


@rule("num_processes vllm_mode vllm_tensor_parallel_size beta",
      "`trainer.num_ranks`, `rollout.num_workers`, `rollout.tensor_parallel_size`, `placement`",
      "A process has a GPU. Engines and reference share these; with `vllm_mode=server` an engine has GPUs of its own.",
      )  # fmt: skip
def gpus(devices: int | None, mode: str | None, size: int | None, beta: float | None) -> Values:
    if devices is None:
        return {"placement": "colocated"} if mode == "colocate" else {}
    if mode != "server":
        return on_shared_gpus(int(devices), int(size or 1), has_reference=bool(beta))
    return {
        "trainer.num_ranks": int(devices), "trainer.num_gpus_per_rank": 1, "rollout.num_gpus_per_worker": 1,
        "rollout.tensor_parallel_size": int(size or 1),
    }  # fmt: skip


@rule("use_peft lora_r lora_alpha lora_target_modules", "`trainer.lora.*`")
def lora(uses: bool | None, rank: int | None, alpha: int | None, modules: Any) -> Values:
    if not uses:
        return {}
    found = {"trainer.lora.rank": int(rank or 16), "trainer.lora.alpha": int(alpha or 32)}
    names = modules if isinstance(modules, list) else re.findall(r"[^\s,]+", str(modules or "all-linear"))
    return {**found, "trainer.lora.target_modules": names}


@rule("reward_funcs", "`reward.function`, `rewards`", "Each is called as TRL calls it.")
def rewards(names: Any) -> Values:
    found = [_function(str(name)) for name in (names if isinstance(names, list) else [names])]
    return {"reward.function": found[0]} if len(found) == 1 else {"rewards": [{"function": name} for name in found]}


def _function(name: str) -> str:
    module, _, function = name.rpartition(".")
    return f"{module or 'trl.rewards'}:{function}"


@rule("save_steps save_strategy", "`checkpoint.every_steps`")
def save(every: float | None, strategy: str | None) -> Values:
    if every is not None and 0 < every < 1:
        raise NotTranslated("a share of the steps: set checkpoint.every_steps to their number")
    return {"checkpoint.every_steps": 0 if strategy == "no" else int(every or 500)}


@rule("eval_steps eval_strategy", "`evaluation.every_steps`")
def evaluation(every: float | None, strategy: str | None) -> Values:
    if every is not None and 0 < every < 1:
        raise NotTranslated("a share of the steps: set evaluation.every_steps to their number")
    return {"evaluation.every_steps": 0 if strategy == "no" else int(every or 0)}


@rule("report_to", "`tracking.sinks`")
def trackers(names: Any) -> Values:
    names = [name for name in (names if isinstance(names, list) else [names]) if name not in ("none", "all")]
    if unknown := [name for name in names if name not in TRACKERS]:
        raise NotTranslated(f"{', '.join(unknown)}: the trackers here are {', '.join(TRACKERS)}")
    return {"tracking.sinks": ["ray", *names]}


RULES: tuple[Rule, ...] = (
    loss, same("model_name_or_path", "model.path"), same("attn_implementation", "model.attention"),
    same("dataset_name", "data.path", "Its columns are named by `data.columns`."),
    same("dataset_config", "data.subset"), same("dataset_train_split", "data.split"),
    same("dataset_test_split", "evaluation.path"), same("shuffle_dataset", "data.shuffle"), batch, lengths,
    same("chat_template_kwargs", "model.chat_template_kwargs"), same("beta", "algorithm.kl_coef"), clipping, scale,
    iterations, truncation, same("temperature", "rollout.sampling.temperature"),
    same("top_p", "rollout.sampling.top_p"), same("top_k", "rollout.sampling.top_k"),
    same("min_p", "rollout.sampling.min_p"),
    same("learning_rate", "trainer.optimizer.lr"), same("weight_decay", "trainer.optimizer.weight_decay"),
    same("max_grad_norm", "trainer.optimizer.clip_norm"), betas, same("adam_epsilon", "trainer.optimizer.eps"),
    schedule, steps, epochs, dtype, same("gradient_checkpointing", "trainer.activation_checkpointing"),
    same("use_liger_kernel", "trainer.liger"), engine, gpus, lora, rewards,
    same("vllm_gpu_memory_utilization", "rollout.gpu_memory_utilization"), save, evaluation,
    same("save_total_limit", "checkpoint.keep_last"), same("seed", "seed"), same("output_dir", "output_dir"),
    same("run_name", "name"), trackers,
)  # fmt: skip
WITHOUT = {
    "reward_": "rewards are reward.function, or several under rewards, each with its weight",
    "vllm_server": SERVER, "vllm_group_port": SERVER, "vllm_": CHOSEN, "logging_": "every step is logged",
    "log_completions": "samples are kept by tracking.samples_every_steps, and `penstock ui` shows them",
    "remove_unused_columns": "rewards get the columns that their parameters name", "dataloader_": CHOSEN,
    "ddp_": CHOSEN, "fsdp": CHOSEN, "deepspeed": "trainer.engine=deepspeed with trainer.deepspeed.zero_stage",
    "ds3_": CHOSEN, "sync_ref_model": "the reference stays as it was at the start", "disable_dropout": "it is off",
    "replay_buffer_size": "trainer.replay trains rare successes again (docs/data.md)",
    "importance_sampling_level": "sequence: algorithm=gspo",
    "repetition_penalty": "the trainer cannot reproduce its log-probabilities",
    "generation_": CHOSEN, "push_to_hub": "a run ends with a model directory; `penstock export` writes others",
    "hub_": "a run ends with a model directory; `penstock export` writes others",
}  # fmt: skip
TRL = Framework(
    "TRL", ("num_generations", "model_name_or_path", "max_completion_length", "per_device_train_batch_size"), RULES,
    WITHOUT,
    {"algorithm.name": "grpo", "reward.function": "math_verify", "rollout.dtype": BF16, "trainer.dtype": BF16},
    asked={"num_processes": "the launcher's number of GPUs is not said there: put num_processes=N behind the file"},
)  # fmt: skip
