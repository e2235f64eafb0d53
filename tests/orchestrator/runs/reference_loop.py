"""GRPO as one straight line: no Ray, no store, no stages, no FSDP. What the real run with `max_staleness=0` must equal,
bit for bit."""

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from penstock.algorithms.advantages import group_advantage
from penstock.algorithms.aggregation import BatchTotals
from penstock.algorithms.losses import ppo_clip_loss
from penstock.conf.run import RunConfig
from penstock.workers.prompts.opening import open_source
from penstock.workers.protocols import Sampling
from penstock.workers.reward.functions import digits
from penstock.workers.rollout.engine_hf import HfEngine
from penstock.workers.rollout.worker import sample_seed
from penstock.workers.trainer.update.batching import plan


def train(config: RunConfig, model_path: str) -> dict[str, torch.Tensor]:
    """The weights after `trainer.max_steps` steps."""
    torch.set_num_threads(1)
    source = open_source(config, model_path)
    engine = HfEngine(config.rollout, model_path, num_threads=1)
    engine.open_model()
    policy = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    options = config.trainer.optimizer
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=options.lr, betas=tuple(options.betas), eps=options.eps, weight_decay=0.0, fused=True
    )
    sampling, num_groups = Sampling.of(config.rollout.sampling), config.trainer.groups_per_step
    for step in range(config.trainer.max_steps):
        rows = []
        for index, group in enumerate(source.next_groups(num_groups)):
            seed = sample_seed(config.seed, step * num_groups + index)
            completions = engine.generate_group(group["prompt_ids"], config.algorithm.group_size, sampling.seeded(seed))
            advantage = group_advantage(torch.tensor([digits(c.text, {}) for c in completions]))
            rows += [
                (group["prompt_ids"], c.token_ids, c.logprobs, a) for c, a in zip(completions, advantage, strict=True)
            ]
        totals = BatchTotals(sum(len(row[1]) for row in rows), len(rows))
        lengths = np.array([len(row[0]) + len(row[1]) for row in rows])
        for cut in plan(lengths, config.trainer.max_tokens_per_microbatch):
            backward(policy, [rows[i] for i in cut], totals)
        torch.nn.utils.clip_grad_norm_(policy.parameters(), options.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        engine._model.load_state_dict(policy.state_dict())
    return {name: tensor for name, tensor in policy.state_dict().items() if name != "lm_head.weight"}


def backward(policy: torch.nn.Module, rows: list, totals: BatchTotals) -> None:
    """Gradient of one micro-batch, rows padded on the right."""
    width, longest = max(len(p) + len(r) for p, r, _, _ in rows), max(len(r) for _, r, _, _ in rows)
    input_ids = torch.zeros(len(rows), width, dtype=torch.int64)
    mask, behavior = torch.zeros(len(rows), longest, dtype=torch.bool), torch.zeros(len(rows), longest)
    for i, (prompt, response, logprobs, _) in enumerate(rows):
        input_ids[i, : len(prompt) + len(response)] = torch.tensor(prompt + response)
        mask[i, : len(response)], behavior[i, : len(response)] = True, torch.tensor(logprobs)
    hidden = policy.model(input_ids=input_ids, use_cache=False).last_hidden_state
    starts = torch.tensor([len(prompt) - 1 for prompt, _, _, _ in rows])
    places = (starts[:, None] + torch.arange(longest) + width * torch.arange(len(rows))[:, None])[mask]
    targets = torch.cat([torch.tensor(response) for _, response, _, _ in rows])
    logits = policy.lm_head(hidden.flatten(0, 1)[places])
    values = logits.log_softmax(-1, dtype=torch.float32).gather(1, targets[:, None])[:, 0]
    logprobs = torch.zeros(mask.shape).masked_scatter(mask, values)
    advantage = torch.stack([row[3] for row in rows])
    loss, _ = ppo_clip_loss(logprobs, mask, totals, advantage, behavior, logprobs.detach())
    loss.backward()
