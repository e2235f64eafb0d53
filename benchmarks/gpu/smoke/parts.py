"""Steps that need no cluster: packages, an engine alone, a rank alone, weights between the two."""

import asyncio
import importlib.util
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu import imports, weights
from benchmarks.gpu.smoke.place import Failed, Place, some_rows
from benchmarks.harness import memory_folder
from penstock.algorithms.losses import ppo_clip_loss
from penstock.store.data.rows import Rows
from penstock.workers.protocols import Completion, Sampling
from penstock.workers.rollout.engine_vllm import VllmEngine
from penstock.workers.rollout.rollout_worker import response_columns
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.trainer.training_state import TrainingState

PROMPT = list(range(5, 21))
RESPONSE_TOKENS = 16
ENGINE = {
    "max_model_len": 128, "max_concurrent_samples": 16, "gpu_memory_utilization": 0.3, "kv_cache_gib": 0.1,
    "enforce_eager": True,
}  # fmt: skip
EXACT, CLOSE, COARSE = 1e-5, 2e-3, 5e-2
"""Bounds: the same kernels; other kernels in float32; bfloat16 against float32."""


def packages(place: Place) -> None:
    """What is called of the packages is there, with the arguments that it is called with."""
    problems = [f"{what}: {problem}" for what, problem in imports.checked() if problem is not None]
    if problems:
        raise Failed("\n".join(problems))
    place.say("all that is called of the installed packages is there")
    for package in imports.missing():
        place.leave_out(f"{package}, which is not installed")


def vllm_alone(place: Place) -> None:
    """vLLM's log-probabilities of its own tokens against transformers'."""
    completion = asyncio.run(_sampled(place, place.model))
    place.near(
        "log-probabilities of vLLM against transformers",
        completion.logprobs,
        _by_transformers(place, completion),
        _close(place),
    )


async def _sampled(place: Place, model: Path, router_replay: bool = False) -> Completion:
    spec = place.engine_spec(model)
    engine = VllmEngine(replace(spec, config=replace(spec.config, router_replay=router_replay)))
    await engine.start()
    try:
        sampling = Sampling(max_tokens=RESPONSE_TOKENS, ignore_eos=True, seed=7)
        (completion,) = await engine.generate(PROMPT, 1, sampling)
        return completion
    finally:
        await engine.close()


@torch.no_grad()
def _by_transformers(place: Place, completion: Completion, model: Path | None = None) -> Any:
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(model or place.model, dtype=torch.float32).to(place.device).eval()
    ids = torch.tensor([PROMPT + completion.token_ids], device=place.device)
    logprobs = lm(ids).logits[0, len(PROMPT) - 1 : -1].float().log_softmax(-1)
    return logprobs.gather(1, ids[0, len(PROMPT) :, None])[:, 0].cpu().numpy()


def rank_alone(place: Place) -> None:
    """One rank with and without offload, float32 and bfloat16, against the CPU in float32."""
    expected = _trained([place.trainer(on_gpu=False)])[0]
    if not place.needs(1, "the same on a GPU"):
        found = _trained([place.trainer(offload=True)])[0]
        place.near("trainer.offload=true on the CPU", found, expected, EXACT)
        return
    for options, within in (({}, CLOSE), ({"offload": True}, CLOSE), ({"dtype": "bfloat16"}, COARSE)):
        found = _trained([place.trainer(**options)])[0]
        place.near(f"log-probabilities after two updates, {options or 'plain'}", found, expected, within)


def _close(place: Place) -> float:
    """The bound of an engine with its preset's dtype against float32."""
    return COARSE if place.has_gpu else CLOSE


def _trained(trainers: Iterable[PolicyTrainer], num_updates: int = 2) -> list[Any]:
    """Log-probabilities of each trainer after some updates."""
    found = []
    for trainer in trainers:
        for seed in range(num_updates):
            trainer.update(some_rows(seed), ppo_clip_loss)
        found.append(np.concatenate(trainer.logprobs(some_rows())))
    return found


def turns(place: Place) -> None:
    """A rank that leaves its device and takes it again three times, with a save under way, ends as one that stays."""
    for options in ({}, {"offload": True}):
        stays, leaves = place.trainer(**options), place.trainer(**options)
        state = TrainingState({"policy": leaves})
        for turn in range(3):
            stays.update(some_rows(turn), ppo_clip_loss)
            leaves.update(some_rows(turn), ppo_clip_loss)
            if not state.begin(str(place.folder / f"save-{len(options)}-{turn}")):
                raise Failed("the save before has not ended")
            held = torch.cuda.memory_allocated() if place.has_gpu else 0
            leaves.leave_device()
            if place.has_gpu:
                place.say(
                    f"{(held - torch.cuda.memory_allocated()) / 2**20:.1f} MiB left the device in turn {turn + 1}"
                )
            leaves.take_device()
            if not state.finish():
                raise Failed("a save wrote no file")
        found = [np.concatenate(trainer.logprobs(some_rows())) for trainer in (leaves, stays)]
        place.near(f"left and taken three times, {options or 'plain'}", *found, 0.0)
    place.needs(1, "memory that leaves the device")


def transports(place: Place) -> None:
    """A version of the weights to a vLLM engine by each transport that the GPUs allow."""
    gpus: dict[str, int | None] = {"shm": 0 if place.has_gpu else None}
    gpus |= {"ipc": 0} if place.needs(1, "ipc") else {}
    gpus |= {"nccl": 1} if place.needs(2, "nccl") else {}
    with memory_folder() as root:
        for name, gpu in gpus.items():
            trainer = weights.Trainer(place.model, place.device)
            rounds = asyncio.run(
                weights.measure(name, trainer, place.model, root / name, gpu=gpu, num_rounds=1, engine_options=ENGINE)
            )
            place.near(f"{name}: log-probabilities of the engine", rounds[-1]["logprob_difference"], 0.0, COARSE)
    place.leave_out("nccl_m2n, which needs NCCL 2.30.5")


def mixture_of_experts(place: Place) -> None:
    """A tiny Qwen3-MoE: an update, and vLLM's log-probabilities of what was exported."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    path = place.folder / "moe"
    config = Qwen3MoeConfig(
        vocab_size=128, hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=256, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    for file in place.model.glob("*token*"):
        (path / file.name).write_bytes(file.read_bytes())
    trainer = place.trainer(path)
    trainer.update(some_rows(), ppo_clip_loss)
    trainer.export(str(place.folder / "moe-trained"))
    place.say("an update and an export")
    records = place.needs(1, "experts that vLLM tells")
    completion = asyncio.run(_sampled(place, place.folder / "moe-trained", router_replay=records))
    expected = _by_transformers(place, completion, place.folder / "moe-trained")
    place.near("log-probabilities of vLLM against transformers", completion.logprobs, expected, _close(place))
    if records:
        trainer.replay_experts()
        columns: dict[str, list[Any]] = {"prompt_ids": [PROMPT], **response_columns([completion])}
        (found,) = trainer.logprobs(Rows.from_lists(columns))
        place.near("the trainer's log-probabilities by vLLM's experts", found, completion.logprobs, _close(place))


def faster_kernels(place: Place) -> None:
    """`trainer.compile`, `trainer.liger` and `flash_attention_2` against plain layers."""
    (expected,) = _trained([place.trainer()])
    (found,) = _trained([place.trainer(compile=True)])
    place.near("trainer.compile", found, expected, CLOSE)
    if place.needs(1, "trainer.liger") and _has(place, "liger_kernel"):
        (found,) = _trained([place.trainer(liger=True)])
        place.near("trainer.liger", found, expected, CLOSE)
    if place.needs(1, "flash_attention_2") and _has(place, "flash_attn"):
        (plain, found) = _trained([
            place.trainer(dtype="bfloat16"), place.trainer(dtype="bfloat16", attention="flash_attention_2")
        ])  # fmt: skip
        place.near("flash_attention_2", found, plain, COARSE)


def _has(place: Place, package: str) -> bool:
    found = importlib.util.find_spec(package) is not None
    if not found:
        place.leave_out(f"{package}, which is not installed")
    return found
