"""GRPO as one straight line: no Ray, no store, no stages, no FSDP. What the real run with `max_staleness=0` must equal,
bit for bit."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from peft import LoraConfig as PeftConfig
from peft import inject_adapter_in_model
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from penstock.algorithms.advantages import group_advantage
from penstock.algorithms.aggregation import BatchTotals
from penstock.algorithms.losses import ppo_clip_loss
from penstock.conf.run import RunConfig
from penstock.workers.agents.gateway.turn_sampler import turn_seed
from penstock.workers.models.tokenizer import load_tokenizer
from penstock.workers.pictures.processor import PictureProcessor
from penstock.workers.pictures.prompt_pictures import PromptPictures
from penstock.workers.prompts.opening import open_source
from penstock.workers.protocols import EngineSpec, Sampling
from penstock.workers.reward.functions import digits
from penstock.workers.rollout.engine_hf import HfEngine
from penstock.workers.rollout.rollout_worker import sample_seed
from penstock.workers.trainer.models.linear import use_fast_linears
from penstock.workers.trainer.update.batching import plan
from penstock.workers.weights.publication.adapter import tensor_name
from tests.orchestrator.runs.digits_game import share_of_digits

Sampled = tuple[list[int], list[int], list[float], torch.Tensor]
"""Facts on a row: what was read, what was sampled, log-probabilities, advantage."""
Sample = Callable[[HfEngine, Sampling, Any], list[Sampled]]
"""The rows of a group."""


@dataclass(frozen=True)
class Read:
    """A prompt with pictures."""

    ids: list[int]
    pictures: PromptPictures | None


def train(config: RunConfig, model_path: str) -> dict[str, torch.Tensor]:
    """The weights after `trainer.max_steps` steps."""

    def sample(engine: HfEngine, sampling: Sampling, group: Any) -> list[Sampled]:
        completions = engine.generate_group(group["prompt_ids"], config.algorithm.group_size, sampling)
        advantage = group_advantage(torch.tensor([digits(c.text, {}) for c in completions]))
        return [(group["prompt_ids"], c.token_ids, c.logprobs, a) for c, a in zip(completions, advantage, strict=True)]

    return _train(config, model_path, open_source(config, model_path), sample, backward)


def train_in_two_turns(config: RunConfig, model_path: str) -> dict[str, torch.Tensor]:
    """The same in the environment of `digits_game.py`, of which nothing but the share of digits is used: a row is what
    both turns read and sampled, and which of its tokens were sampled."""
    tokenizer = load_tokenizer(model_path)

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def sample(engine: HfEngine, sampling: Sampling, group: Any) -> list[Sampled]:
        number = json.loads(group["task"])["environment_task"]["data"]["number"]
        rows, rewards = [], []
        for index in range(config.algorithm.group_size):
            seed = sampling.seed + index
            first = encode(f"{number} is a number\n")
            (one,) = engine.generate_group(first, 1, sampling.seeded(seed))
            share = share_of_digits(tokenizer.decode(one.token_ids).removesuffix(tokenizer.eos_token))
            ended = [] if one.token_ids[-1] == tokenizer.eos_token_id else [tokenizer.eos_token_id]
            between = [*ended, *encode(f"\n{share:.2f}\n")]
            second = [*first, *one.token_ids, *between]
            (two,) = engine.generate_group(second, 1, sampling.seeded(turn_seed(seed, 1)))
            other = share_of_digits(tokenizer.decode(two.token_ids).removesuffix(tokenizer.eos_token))
            rows.append(((first, one.token_ids, between), two.token_ids, [*one.logprobs, *two.logprobs]))
            rewards.append(share + other)
        return [(*row, a) for row, a in zip(rows, group_advantage(torch.tensor(rewards)), strict=True)]

    return _train(config, model_path, open_source(config, model_path, rows_are="tasks"), sample, backward_in_two_turns)


@dataclass
class Learner:
    """A policy of `train_two`: a model of its own, perhaps with PEFT's layers, and an engine of its own."""

    policy: Any
    engine: HfEngine
    scale: float | None
    """Factor of B A; None: the model has no adapter and is trained whole."""
    optimizer: torch.optim.AdamW
    every: int

    def update(self, rows: list[Sampled], clip_norm: float, budget: int) -> None:
        totals = BatchTotals(sum(len(row[2]) for row in rows), len(rows))
        lengths = np.array([len(row[0]) + len(row[1]) for row in rows])
        for cut in plan(lengths, budget):
            backward(self.policy, [rows[i] for i in cut], totals)
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scale is None:
            self.engine.model.load_state_dict(self.policy.state_dict())
            return
        with torch.no_grad():
            for layer, (a, b) in self.factors.items():
                base, change = (
                    self.policy.get_submodule(layer).base_layer.weight,
                    torch.from_numpy(b) @ torch.from_numpy(a),
                )
                self.engine.model.get_parameter(f"{layer}.weight").copy_(base + self.scale * change)

    @property
    def exported(self) -> dict[str, np.ndarray]:
        """What is trained, by the names that an export has."""
        if self.scale is None:
            values = self.policy.state_dict().items()
            return {name: value.numpy() for name, value in values if name != "lm_head.weight"}
        return {
            tensor_name(layer, letter): values
            for layer, factors in self.factors.items()
            for letter, values in zip("AB", factors, strict=True)
        }

    @property
    def factors(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """A and B of each layer."""
        return {
            path: tuple(getattr(module, name)["default"].weight.detach().numpy() for name in ("lora_A", "lora_B"))
            for path, module in self.policy.named_modules()
            if hasattr(module, "lora_A")
        }


def train_two(config: RunConfig, model_path: str) -> dict[str, dict[str, np.ndarray]]:
    """What is trained of the two policies of `duel.py`, by policy and name, each as if it was alone: adapters, or whole
    models from `model.paths`."""
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(model_path)
    names = tuple(config.trainer.policies)
    learners = {name: _learner(config, name, config.model.paths.get(name, model_path)) for name in names}
    sampling, num_groups = Sampling.of(config.rollout.sampling), config.trainer.groups_per_step
    source = open_source(config, model_path, rows_are="tasks")

    def say(policy: str, text: str, seed: int | None) -> tuple[list[int], Any, float]:
        read = list(tokenizer(f"{text}\n", add_special_tokens=False)["input_ids"])
        (one,) = learners[policy].engine.generate_group(read, 1, sampling.seeded(seed))
        return read, one, share_of_digits(tokenizer.decode(one.token_ids).removesuffix(tokenizer.eos_token))

    for step in range(config.trainer.max_steps):
        rows: dict[str, list[Sampled]] = {name: [] for name in names}
        for index, group in enumerate(source.next_groups(num_groups)):
            number = json.loads(group["task"])["environment_task"]["data"]["number"]
            first = sample_seed(config.seed, step * num_groups + index)
            said: dict[str, list[Any]] = {name: [] for name in names}
            for seed in range(first, first + config.algorithm.group_size):
                *proposed, share = say("proposer", f"{number} is a number", seed)
                *answered, other = say("solver", f"{share:.2f} of it", turn_seed(seed, 1))
                said["proposer"].append((*proposed, share))
                said["solver"].append((*answered, other - share))
            for name, of_group in said.items():
                advantage = group_advantage(torch.tensor([reward for _, _, reward in of_group]))
                rows[name] += [
                    (read, one.token_ids, one.logprobs, a)
                    for (read, one, _), a in zip(of_group, advantage, strict=True)
                ]
        for name, learner in learners.items():
            if (step + 1) % learner.every == 0:
                clip_norm = config.trainer.optimizer_of(name).clip_norm
                learner.update(rows[name], clip_norm, config.trainer.microbatch_tokens)
    return {name: learner.exported for name, learner in learners.items()}


def _learner(config: RunConfig, name: str, model_path: str) -> Learner:
    policy, lora = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32), config.trainer.lora
    use_fast_linears(policy.base_model)
    if lora.rank:
        targets = [path for path, one in policy.base_model.named_modules() if isinstance(one, torch.nn.Linear)]
        torch.manual_seed(0)
        own = PeftConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, lora_dropout=0.0, bias="none")
        inject_adapter_in_model(own, policy)
    options = config.trainer.optimizer_of(name)
    optimizer = torch.optim.AdamW(
        [one for one in policy.parameters() if one.requires_grad], lr=options.lr, betas=tuple(options.betas),
        eps=options.eps, weight_decay=options.weight_decay, fused=True,
    )  # fmt: skip
    engine = HfEngine(EngineSpec(config.rollout, model_path))
    engine.open_model()
    scale = lora.alpha / lora.rank if lora.rank else None
    return Learner(policy, engine, scale, optimizer, config.trainer.every(name))


def train_seeing(config: RunConfig, model_path: str) -> dict[str, torch.Tensor]:
    """The same with pictures in the prompts: pixels and positions by transformers' own, each row's pictures by
    themselves."""

    def sample(engine: HfEngine, sampling: Sampling, group: Any) -> list[Sampled]:
        read = Read(list(group["prompt_ids"]), PromptPictures.of(group))
        completions = engine.generate_group(read.ids, config.algorithm.group_size, sampling, pictures=read.pictures)
        advantage = group_advantage(torch.tensor([digits(c.text, {}) for c in completions]))
        return [(read, c.token_ids, c.logprobs, a) for c, a in zip(completions, advantage, strict=True)]

    backward = partial(backward_seeing, processor=PictureProcessor.of(model_path))
    return _train(config, model_path, open_source(config, model_path), sample, backward)


def _train(config: RunConfig, model_path: str, source: Any, sample: Sample, backward: Any) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    engine = HfEngine(EngineSpec(config.rollout, model_path))
    engine.open_model()
    kind = AutoModelForImageTextToText if config.rollout.max_pictures else AutoModelForCausalLM
    policy = kind.from_pretrained(model_path, dtype=torch.float32)
    if config.rollout.max_pictures:
        policy.model.visual.requires_grad_(False)
    use_fast_linears(policy.base_model)  # products by the same library: others are rounded in another way
    options = config.trainer.optimizer
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=options.lr, betas=tuple(options.betas), eps=options.eps, weight_decay=0.0, fused=True
    )
    sampling, num_groups = Sampling.of(config.rollout.sampling), config.trainer.groups_per_step
    for step in range(config.trainer.max_steps):
        rows: list[Any] = []
        for index, group in enumerate(source.next_groups(num_groups)):
            seed = sample_seed(config.seed, step * num_groups + index)
            rows += sample(engine, sampling.seeded(seed), group)
        totals = BatchTotals(sum(len(row[2]) for row in rows), len(rows))
        lengths = np.array([_num_tokens(row[0]) + len(row[1]) for row in rows])
        for cut in plan(lengths, config.trainer.microbatch_tokens):
            backward(policy, [rows[i] for i in cut], totals)
        torch.nn.utils.clip_grad_norm_(policy.parameters(), options.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        engine.model.load_state_dict(policy.state_dict())
    return {name: tensor for name, tensor in policy.state_dict().items() if name != "lm_head.weight"}


def _num_tokens(read: Any) -> int:
    if isinstance(read, Read):
        return len(read.ids)
    return sum(map(len, read)) if isinstance(read, tuple) else len(read)


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


def backward_in_two_turns(policy: torch.nn.Module, rows: list, totals: BatchTotals) -> None:
    """The same where a row is (first prompt, first answer, what is between), second answer, log-probabilities,
    advantage."""
    width = max(_num_tokens(read) + len(last) for read, last, _, _ in rows)
    longest = max(len(logprobs) for _, _, logprobs, _ in rows)
    input_ids = torch.zeros(len(rows), width, dtype=torch.int64)
    mask, behavior = torch.zeros(len(rows), longest, dtype=torch.bool), torch.zeros(len(rows), longest)
    places, targets = [], []
    for i, ((prompt, first, between), last, logprobs, _) in enumerate(rows):
        ids = [*prompt, *first, *between, *last]
        input_ids[i, : len(ids)] = torch.tensor(ids)
        mask[i, : len(logprobs)], behavior[i, : len(logprobs)] = True, torch.tensor(logprobs)
        sampled = [*range(len(prompt), len(prompt) + len(first)), *range(len(ids) - len(last), len(ids))]
        places += [i * width + place - 1 for place in sampled]
        targets += [ids[place] for place in sampled]
    hidden = policy.model(input_ids=input_ids, use_cache=False).last_hidden_state
    logits = policy.lm_head(hidden.flatten(0, 1)[torch.tensor(places)])
    values = logits.log_softmax(-1, dtype=torch.float32).gather(1, torch.tensor(targets)[:, None])[:, 0]
    logprobs = torch.zeros(mask.shape).masked_scatter(mask, values)
    advantage = torch.stack([row[3] for row in rows])
    loss, _ = ppo_clip_loss(logprobs, mask, totals, advantage, behavior, logprobs.detach())
    loss.backward()


def backward_seeing(policy: Any, rows: list, totals: BatchTotals, processor: PictureProcessor) -> None:
    """The same where a row's prompt is a `Read`: each picture is seen once, positions are each row's own, and special
    tokens of vision have no probability."""
    width, longest = (
        max(len(read.ids) + len(last) for read, last, _, _ in rows),
        max(len(last) for _, last, _, _ in rows),
    )
    input_ids, positions = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(3, len(rows), width).long()
    mask, behavior = torch.zeros(len(rows), longest, dtype=torch.bool), torch.zeros(len(rows), longest)
    distinct = list(dict.fromkeys(one for read, _, _, _ in rows if read.pictures for one in read.pictures.encoded))
    features, grids = {}, {}
    for one in distinct:  # alone: on some CPUs sums depend on what else is multiplied
        found = processor.features([one])
        grids[one] = torch.from_numpy(found.grid_thw)[0]
        seen_in = policy.model.visual(torch.from_numpy(found.pixel_values), grid_thw=torch.from_numpy(found.grid_thw))
        features[one] = seen_in.pooler_output
    placed = []
    for i, (read, last, logprobs, _) in enumerate(rows):
        ids, seen = torch.tensor([read.ids + last]), read.pictures.encoded if read.pictures else ()
        input_ids[i, : ids.shape[1]] = ids[0]
        kinds = (ids == processor.placeholder).int()
        own = {"image_grid_thw": torch.stack([grids[one] for one in seen])} if seen else {}
        positions[:, i, : ids.shape[1]] = policy.model.get_rope_index(ids, kinds, **own)[0][:, 0]
        mask[i, : len(last)], behavior[i, : len(last)] = True, torch.tensor(logprobs)
        placed += [features[one] for one in seen]
    embedded = policy.get_input_embeddings()(input_ids)
    embedded = embedded.masked_scatter((input_ids == processor.placeholder)[..., None], torch.cat(placed))
    hidden = policy.model(inputs_embeds=embedded, position_ids=positions, use_cache=False).last_hidden_state
    starts = torch.tensor([len(read.ids) - 1 for read, _, _, _ in rows])
    places = (starts[:, None] + torch.arange(longest) + width * torch.arange(len(rows))[:, None])[mask]
    targets = torch.cat([torch.tensor(last) for _, last, _, _ in rows])
    logits = policy.lm_head(hidden.flatten(0, 1)[places]).index_fill(1, torch.tensor(processor.token_ids), -torch.inf)
    values = logits.log_softmax(-1, dtype=torch.float32).gather(1, targets[:, None])[:, 0]
    logprobs = torch.zeros(mask.shape).masked_scatter(mask, values)
    advantage = torch.stack([row[3] for row in rows])
    loss, _ = ppo_clip_loss(logprobs, mask, totals, advantage, behavior, logprobs.detach())
    loss.backward()
