"""verl's keys (`verl/trainer/config/ppo_trainer.yaml`) in Penstock's terms."""

import re
from pathlib import PurePath
from typing import Any

from penstock.conf.capabilities import ROLLOUT_ENGINES, names_with
from penstock.orchestrator.configuration.translation.rules import (
    Framework,
    NotTranslated,
    Rule,
    Values,
    on_shared_gpus,
    rule,
    same,
)

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
ESTIMATORS = {
    "grpo": "grpo", "gae": "ppo", "rloo": "rloo", "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp", "remax": "remax",
}  # fmt: skip
MEANS = {
    "token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean", "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "constant",
}  # fmt: skip
TRACKERS = {"wandb": "wandb", "mlflow": "mlflow", "tensorboard": "tensorboard", "trackio": "trackio", "console": None}
SIZED = "micro-batches are cut by tokens (trainer.max_tokens_per_microbatch), with the same result"
ONCE = "each row is trained once: for more optimizer steps of a batch raise trainer.num_minibatches"
LOSSES = ("gspo", "cispo")
"""Policy losses that are algorithms of their own here."""
CHOSEN = "chosen automatically"


@rule("algorithm.adv_estimator algorithm.norm_adv_by_std_in_grpo actor_rollout_ref.actor.policy_loss.loss_mode",
      "`algorithm.name`, `algorithm.normalize_std`")  # fmt: skip
def estimator(name: str | None, by_std: bool | None, loss: str | None) -> Values:
    name, loss = name or "gae", loss or "vanilla"
    if name not in ESTIMATORS:
        raise NotTranslated(f"{name} is none of the estimators known here; see `algorithm.advantage` in docs/keys.md")
    if loss not in ("vanilla", *LOSSES):
        raise NotTranslated(f"{loss} is none of the losses known here; see `algorithm.surrogate` in docs/keys.md")
    if loss in LOSSES and name != "grpo":
        raise NotTranslated(f"{loss} goes with the advantages of grpo here; see `algorithm.surrogate` in docs/keys.md")
    divides = {"algorithm.normalize_std": by_std} if by_std is not None and name == "grpo" else {}
    return {"algorithm.name": loss if loss in LOSSES else ESTIMATORS[name], **divides}


COLUMNS = {"data.columns.prompt": "prompt", "data.columns.answer": "reward_model.ground_truth"}


@rule("data.train_files", "`data.path`, `data.mixture`, `data.columns`",
      "Columns are those of verl's prepared data: `prompt` as messages, `reward_model.ground_truth`. Several files are "
      "parts of a mixture, drawn alike.")  # fmt: skip
def train_files(files: Any) -> Values:
    names = _listed(files)
    if len(names) == 1:
        return {"data.path": names[0], **COLUMNS}
    return {"data.mixture": {name: {"path": file} for name, file in _named(names).items()}, **COLUMNS}


@rule("data.val_files", "`evaluation.path`, `evaluation.sets`", "Several files are sets of their own after the first.")
def val_files(files: Any) -> Values:
    first, *others = _listed(files)
    sets = {"evaluation.sets": {name: {"path": file} for name, file in _named(others).items()}} if others else {}
    return {"evaluation.path": first, **sets}


def _listed(files: Any) -> list[str]:
    return [str(file) for file in (files if isinstance(files, list) else [files])]


def _named(files: list[str]) -> dict[str, str]:
    """Files by names that a key can have: their folder's, as verl keeps train.parquet of each dataset."""
    found: dict[str, str] = {}
    for file in files:
        name = re.sub(r"\W+", "_", PurePath(file).parent.name) or "part"
        found[name if name not in found and name[0].isalpha() else f"part{len(found) + 1}"] = file
    return found


@rule("data.max_prompt_length data.max_response_length",
      "`data.max_prompt_tokens`, `rollout.sampling.max_tokens`, `rollout.max_model_len`")  # fmt: skip
def lengths(prompt: int | None, response: int | None) -> Values:
    prompt, response = int(prompt or 512), int(response or 512)
    return {
        "data.max_prompt_tokens": prompt, "rollout.sampling.max_tokens": response,
        "rollout.max_model_len": prompt + response,
    }  # fmt: skip


@rule(f"data.train_batch_size {ACTOR}.ppo_mini_batch_size", "`trainer.groups_per_step`, `trainer.num_minibatches`",
      "Both count prompts. A step here is verl's step: one batch, and its mini-batches.")  # fmt: skip
def batch(prompts: int | None, mini: int | None) -> Values:
    prompts = int(prompts or 1024)
    return {"trainer.groups_per_step": prompts, "trainer.num_minibatches": max(1, prompts // int(mini or 256))}


@rule("data.filter_overlong_prompts data.truncation", "`data.too_long`", "A prompt is never cut.")
def too_long(filters: bool | None, cuts: str | None) -> Values:
    if cuts in ("left", "right", "middle") and not filters:
        raise NotTranslated("prompts are not cut here: data.too_long=skip leaves long ones out")
    return {"data.too_long": "skip" if filters else "error"}


@rule("data.image_key", "`data.columns.pictures`, `rollout.max_pictures`")
def images(key: str) -> Values:
    return {"data.columns.pictures": key, "rollout.max_pictures": 4}


@rule(f"{ACTOR}.use_kl_loss {ACTOR}.kl_loss_coef algorithm.use_kl_in_reward algorithm.kl_ctrl.kl_coef",
      "`algorithm.kl_coef`, `algorithm.kl_in`", "0: no reference model is started.")  # fmt: skip
def divergence(in_loss: bool | None, coef: float | None, in_reward: bool | None, reward_coef: float | None) -> Values:
    if in_reward:
        return {"algorithm.kl_coef": 0.001 if reward_coef is None else reward_coef, "algorithm.kl_in": "reward"}
    return {"algorithm.kl_coef": (0.001 if coef is None else coef) if in_loss else 0.0}


@rule(f"{ACTOR}.kl_loss_type", "nothing", "k3, as verl's low_var_kl.")
def kl_estimator(kind: str) -> Values:
    if kind not in ("low_var_kl", "k3"):
        raise NotTranslated(f"{kind}: the estimate is k3; algorithm=policy_gradient has algorithm.kl_estimator")
    return {}


@rule(f"{ACTOR}.clip_ratio {ACTOR}.clip_ratio_low {ACTOR}.clip_ratio_high",
      "`algorithm.clip_low`, `algorithm.clip_high`")  # fmt: skip
def clipping(both: float | None, low: float | None, high: float | None) -> Values:
    both = 0.2 if both is None else both
    return {"algorithm.clip_low": both if low is None else low, "algorithm.clip_high": both if high is None else high}


@rule(f"{ACTOR}.loss_agg_mode", "`algorithm.aggregation`")
def mean(mode: str) -> Values:
    if mode not in MEANS:
        raise NotTranslated(f"{mode} is none of {', '.join(MEANS)}")
    if mode == "seq-mean-token-sum-norm":
        raise NotTranslated("a constant divisor: take algorithm=dr_grpo, whose algorithm.constant_tokens it is")
    return {"algorithm.aggregation": MEANS[mode]}


@rule(f"{ACTOR}.ppo_epochs", "nothing", "A batch is trained once; `trainer.num_minibatches` cuts it.")
def epochs(number: int) -> Values:
    if number > 1:
        raise NotTranslated(
            "each row is trained once; raise trainer.num_minibatches for more optimizer steps of a batch"
        )
    return {}


@rule(f"trainer.n_gpus_per_node trainer.nnodes {ROLLOUT}.tensor_model_parallel_size {ACTOR}.use_kl_loss "
      "algorithm.use_kl_in_reward",
      "`trainer.num_ranks`, `rollout.num_workers`, `rollout.tensor_parallel_size`, `placement`",
      "verl's engines, trainers and reference share GPUs: `placement=colocated`. `penstock plan` may know better.",
      )  # fmt: skip
def gpus(each: int | None, nodes: int | None, size: int | None, in_loss: bool | None, in_reward: bool | None) -> Values:
    return on_shared_gpus(
        int(each or 8) * int(nodes or 1), int(size or 2), has_reference=bool(in_loss) or bool(in_reward)
    )


@rule(f"{ACTOR}.fsdp_config.param_offload {ACTOR}.fsdp_config.optimizer_offload", "`trainer.offload`")
def offload(parameters: bool | None, optimizer: bool | None) -> Values:
    return {"trainer.offload": bool(parameters or optimizer)}


@rule(f"{ACTOR}.optim.lr_warmup_steps {ACTOR}.optim.lr_warmup_steps_ratio trainer.total_training_steps",
      "`trainer.optimizer.warmup_steps`, `trainer.max_steps`")  # fmt: skip
def steps(warmup: int | None, share: float | None, total: int | None) -> Values:
    found: dict[str, Any] = {} if not total else {"trainer.max_steps": total}
    if warmup is not None and warmup >= 0:
        found["trainer.optimizer.warmup_steps"] = warmup
    elif share and total:
        found["trainer.optimizer.warmup_steps"] = round(share * total)
    elif share:
        raise NotTranslated("a share of the steps, whose number is not said: set trainer.optimizer.warmup_steps")
    return found


@rule(f"{ACTOR}.strategy", "`trainer.engine`")
def strategy(name: str) -> Values:
    if name not in ("fsdp", "fsdp2"):
        raise NotTranslated(
            f"{name}: the trainers here are fsdp (FSDP2) and deepspeed, with trainer.tensor_parallel_size"
        )
    return {"trainer.engine": "fsdp"}


@rule(f"{ROLLOUT}.name", "`rollout.engine`")
def engine(name: str) -> Values:
    if name not in ROLLOUT_ENGINES:
        raise NotTranslated(f"{name}: the engines here are {names_with('has_model', ROLLOUT_ENGINES)}")
    return {"rollout.engine": name}


@rule(f"{ROLLOUT}.top_k", "`rollout.sampling.top_k`", "-1, all tokens, is 0 here.")
def top_k(number: int) -> Values:
    return {"rollout.sampling.top_k": max(0, number)}


@rule(f"{ROLLOUT}.val_kwargs.n", "`evaluation.num_samples`")
def samples(number: int) -> Values:
    return {"evaluation.num_samples": number if number > 1 else 0}


@rule(f"{MODEL}.target_modules", "`trainer.lora.target_modules`")
def modules(names: Any) -> Values:
    return {"trainer.lora.target_modules": list(names) if isinstance(names, list | tuple) else [names]}


@rule("trainer.logger", "`tracking.sinks`")
def trackers(names: Any) -> Values:
    names = names if isinstance(names, list) else [names]
    if unknown := [name for name in names if name not in TRACKERS]:
        raise NotTranslated(f"{', '.join(unknown)}: the trackers here are wandb, mlflow, trackio and tensorboard")
    return {"tracking.sinks": ["ray", *filter(None, map(TRACKERS.get, names))]}


@rule("trainer.save_freq", "`checkpoint.every_steps`")
def save(every: int) -> Values:
    return {"checkpoint.every_steps": max(0, every)}


@rule("trainer.test_freq", "`evaluation.every_steps`")
def test(every: int) -> Values:
    return {"evaluation.every_steps": max(0, every)}


@rule("trainer.resume_mode trainer.resume_from_path", "`resume`")
def resume(mode: str | None, path: str | None) -> Values:
    return {"resume": path if mode == "resume_path" and path else "auto" if mode in (None, "auto") else "never"}


@rule("trainer.total_epochs", "`trainer.max_steps`", "Steps are counted here, not epochs.")
def total_epochs(number: int) -> Values:
    raise NotTranslated(f"steps are counted here: set trainer.max_steps to {number} x rows / trainer.groups_per_step")


@rule("custom_reward_function.path custom_reward_function.name reward.custom_reward_function.path "
      "reward.custom_reward_function.name", "`reward.function`", "It is called as verl calls it.")  # fmt: skip
def reward(path: str | None, name: str | None, new_path: str | None, new_name: str | None) -> Values:
    path, name = path or new_path, name or new_name
    if not path:
        raise NotTranslated("no file is named: set reward.function, such as math_verify for mathematics")
    return {"reward.function": f"{path}:{name or 'compute_score'}"}


RULES: tuple[Rule, ...] = (
    estimator, same(f"{MODEL}.path", "model.path"), train_files, val_files, lengths, batch, too_long, images,
    same("data.prompt_key", "data.columns.prompt"), same("data.shuffle", "data.shuffle"),
    same("data.seed", "data.seed"),
    same("data.apply_chat_template_kwargs", "model.chat_template_kwargs"),
    same(f"{ROLLOUT}.n", "algorithm.group_size"), divergence, kl_estimator, clipping, mean, epochs,
    same(f"{ACTOR}.entropy_coeff", "algorithm.entropy_coef", "Of `algorithm=policy_gradient` and its presets."),
    same(f"{ACTOR}.optim.lr", "trainer.optimizer.lr"),
    same(f"{ACTOR}.optim.weight_decay", "trainer.optimizer.weight_decay"),
    same(f"{ACTOR}.grad_clip", "trainer.optimizer.clip_norm"), steps,
    same(f"{ACTOR}.ppo_max_token_len_per_gpu", "trainer.max_tokens_per_microbatch"),
    same(f"{ACTOR}.ulysses_sequence_parallel_size", "trainer.sequence_parallel_size"), strategy, offload,
    same(f"{MODEL}.enable_gradient_checkpointing", "trainer.activation_checkpointing"),
    same(f"{MODEL}.lora_rank", "trainer.lora.rank"), same(f"{MODEL}.lora_alpha", "trainer.lora.alpha"), modules,
    same(f"{MODEL}.use_liger", "trainer.liger"),
    engine, same(f"{ROLLOUT}.temperature", "rollout.sampling.temperature"),
    same(f"{ROLLOUT}.top_p", "rollout.sampling.top_p"), top_k, gpus,
    same(f"{ROLLOUT}.gpu_memory_utilization", "rollout.gpu_memory_utilization"),
    same(f"{ROLLOUT}.enforce_eager", "rollout.enforce_eager"), same(f"{ROLLOUT}.dtype", "rollout.dtype"),
    same(f"{ROLLOUT}.max_num_seqs", "rollout.max_concurrent_samples"),
    same(f"{ROLLOUT}.max_num_batched_tokens", "rollout.engine_options.max_num_batched_tokens"), samples, reward,
    same("algorithm.gamma", "algorithm.gamma", "Of `algorithm=ppo`."),
    same("algorithm.lam", "algorithm.lam", "Of `algorithm=ppo`."),
    total_epochs, same("trainer.project_name", "tracking.project"), same("trainer.experiment_name", "name"), trackers,
    save, test, resume, same("trainer.default_local_dir", "checkpoint.directory"),
    same("trainer.max_actor_ckpt_to_keep", "checkpoint.keep_last"),
)  # fmt: skip
WITHOUT = {
    f"{ACTOR}.ppo_micro_batch_size": SIZED, f"{ACTOR}.use_dynamic_bsz": SIZED,
    f"{ROLLOUT}.log_prob_": SIZED, "actor_rollout_ref.ref.log_prob_": SIZED, "critic.ppo_micro_batch_size": SIZED,
    f"{MODEL}.use_remove_padding": "rows without padding are trainer.packing, which is on where it pays",
    "actor_rollout_ref.ref.": "the reference has the trainer's own settings",
    "actor_rollout_ref.hybrid_engine": CHOSEN, f"{ROLLOUT}.free_cache_engine": CHOSEN, f"{ROLLOUT}.load_format": CHOSEN,
    f"{ROLLOUT}.mode": CHOSEN, f"{MODEL}.use_shm": CHOSEN, f"{MODEL}.use_fused_kernels": CHOSEN,
    f"{ACTOR}.use_torch_compile": CHOSEN, f"{ACTOR}.fsdp_config.": CHOSEN, "data.val_batch_size": CHOSEN,
    "data.return_raw_chat": CHOSEN, "trainer.balance_batch": "rows are always spread over ranks by their cost",
    "trainer.critic_warmup": "policy and critic are trained from the first step on",
    "trainer.val_before_train": "evaluation always begins with the start's weights",
    "reward_model.": "a reward model is algorithm.reward_model with model.paths.reward_model (docs/algorithms.md)",
    "critic.": "the critic of algorithm=ppo has the policy's settings",
    f"{ROLLOUT}.multi_turn": "several turns are environments: docs/agents.md",
    f"{ROLLOUT}.val_kwargs": "evaluation decodes greedily; its samples are drawn as in training",
    "ray_kwargs": "a cluster is named by RAY_ADDRESS, and its resources by cluster.*",
}  # fmt: skip
VERL = Framework(
    "verl", ("actor_rollout_ref.", "algorithm.adv_estimator", "data.train_files"), RULES, WITHOUT,
    {"rollout.dtype": "bfloat16", "trainer.dtype": "bfloat16", "reward.function": "math_verify"},
    ("actor_rollout_ref.", "critic.", "custom_reward_function.", "reward_model.", "ray_kwargs."),
)  # fmt: skip
