"""The recipes of tinker-cookbook that are run against the server, each with the smallest arguments with which it does
all that it does.

| recipe | data | asks the server for | loss |
|---|---|---|---|
| `sl_loop` | no_robots | training, state, sampler weights | cross_entropy |
| `rl_loop` | gsm8k | sampling 4 of a prompt, unnamed sampler weights | importance_sampling |
| `sl_basic` | no_robots | also `forward`, for the loss on other rows | cross_entropy |
| `rl_basic` | gsm8k | also sampling for the test rows | importance_sampling |
| `math_rl` | gsm8k | the same; several substeps before a step | importance_sampling |
| `dpo` | hh-rlhf | log-probabilities of prompts by the base, `forward_backward_custom` | custom |
| `guess_number` | made by itself | sampling of many turns | importance_sampling |
| `text_arena` | made by itself (textarena) | sampling for both players | importance_sampling |
| `warm` | warm.jsonl | what `rl_loop` and `math_rl` start from: answers in their form | cross_entropy |
| `prompt_distillation` | conversations.jsonl | as `sl_basic`, several epochs | cross_entropy |
| `sdft` | SciKnowEval | the most likely tokens of prompts by the base; targets `[N, K]` | cross_entropy |
| `rl_numerics_check` | wikitext | sampling of many turns with calls of a tool | importance_sampling |
"""

from dataclasses import dataclass

from tests.serve.cookbook.directory import BASE, CHAT

RECIPES_PACKAGE = "tinker_cookbook.recipes"


@dataclass(frozen=True)
class Recipe:
    """A recipe and its arguments."""

    module: str
    """Module below `tinker_cookbook.recipes`."""
    arguments: tuple[str, ...]
    metric: str
    """Name of the number in metrics.jsonl that tells whether anything was learned, or that it ran."""
    model: str = BASE
    takes_start: bool = False
    """True if an argument names the weights that it starts from; others take what their log says was saved last."""

    def command(self, log: str, start: str | None = None) -> list[str]:
        """Words of the command. `log`: directory for what it logs. `start`: path of the weights that it starts from."""
        words = [f"model_name={self.model}", f"log_path={log}", *self.arguments]
        if start is not None and self.takes_start:
            words.append(f"load_checkpoint_path={start}")
        return ["-m", f"{RECIPES_PACKAGE}.{self.module}", *words]


QUIET: tuple[str, ...] = ("eval_every=0", "save_every=0")
RECIPES = {
    "sl_loop": Recipe(
        "sl_loop",
        ("batch_size=16", "learning_rate=5e-3", "max_length=256", "lora_rank=8", "save_every=3", "max_steps=8"),
        "train_mean_nll",
    ),
    "rl_loop": Recipe(
        "rl_loop",
        (
            "batch_size=4", "group_size=32", "learning_rate=1e-3", "lora_rank=8", "save_every=2", "max_tokens=6",
            "loss_fn=importance_sampling", "max_steps=8",
        ),
        "reward/total",
    ),
    "sl_basic": Recipe(
        "sl_basic",
        ("learning_rate=5e-3", "lora_rank=8", "num_epochs=6", "eval_every=3", "save_every=3"),
        "train_mean_nll",
    ),
    "rl_basic": Recipe(
        "rl_basic",
        ("learning_rate=2e-3", "lora_rank=8", "max_tokens=8", "num_epochs=2", "eval_every=1", "save_every=1"),
        "env/all/reward/total",
    ),
    "math_rl": Recipe(
        "math_rl.train",
        (
            "env=gsm8k", "groups_per_batch=4", "group_size=32", "learning_rate=1e-3", "lora_rank=8", "max_tokens=6",
            "loss_fn=importance_sampling", "num_substeps=2", "compute_post_kl=true", "eval_every=0", "save_every=2",
            "max_steps=8",
        ),
        "env/all/reward/total",
        takes_start=True,
    ),
    "dpo": Recipe(
        "preference.dpo.train",
        ("dataset=hhh", "learning_rate=5e-3", "max_length=128", "batch_size=8", "max_steps=16"),
        "dpo_loss",
    ),
    "guess_number": Recipe(
        "multiplayer_rl.guess_number.train",
        (
            "renderer_name=role_colon", "batch_size=2", "group_size=2", "learning_rate=1e-3", "max_tokens=8", *QUIET,
            "max_steps=2",
        ),
        "env/all/reward/total",
    ),
    "text_arena": Recipe(
        "multiplayer_rl.text_arena.train",
        (
            "renderer_name=role_colon", "test_opponent=random", "batch_size=4", "num_train_datapoints=8",
            "num_test_datapoints=4", "learning_rate=1e-3", "max_tokens=8", "eval_every=1", "save_every=0",
            "max_steps=2",
        ),
        "env/all/reward/total",
    ),
    "warm": Recipe(
        "prompt_distillation.train",
        (
            "file_path=warm.jsonl", "learning_rate=5e-3", "num_epochs=2", "lora_rank=8", "max_length=256",
            "batch_size=32", "eval_every=0", "save_every=0",
        ),
        "train_mean_nll",
    ),
    "prompt_distillation": Recipe(
        "prompt_distillation.train",
        (
            "file_path=conversations.jsonl", "learning_rate=5e-3", "num_epochs=2", "lora_rank=8", "max_length=256",
            "batch_size=16", "eval_every=2", "save_every=4",
        ),
        "train_mean_nll",
    ),
    "sdft": Recipe(
        "sdft.train",
        (
            "dataset=sciknoweval", "groups_per_batch=4", "group_size=1", "learning_rate=1e-3", "lora_rank=8", "topk=4",
            "max_tokens=12", "max_context_length=1024", *QUIET, "max_steps=2",
        ),
        "sdft/mean_teacher_entropy",
    ),
    "rl_numerics_check": Recipe(
        "rl_numerics_check.train",
        (
            "renderer_name=qwen3_disable_thinking", "group_size=2", "groups_per_batch=2", "learning_rate=1e-3",
            "lora_rank=8", "max_tokens=8", "max_trajectory_tokens=3500", "task.num_pages_min=1", "task.num_pages_max=2",
            "task.page_chars=200", "save_every=0", "max_steps=2",
        ),
        "env/all/reward/total",
        CHAT,
    ),
}  # fmt: skip
