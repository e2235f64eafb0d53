"""The update of the policy."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.conf.capabilities import TRAINERS, TrainerCapabilities, names_with
from penstock.conf.checks import AUTO, POSITIVE, at_least, auto_or_number, check_bounds, divides, one_of, within
from penstock.conf.errors import ConfigError, suggest

DEFAULT_TOKENS = 8192
"""Tokens of a micro-batch where a GPU's memory is unknown."""
SCHEDULES = ("constant", "cosine")
ALL_LINEAR = "all-linear"
PUBLISHED = ("merged", "adapter")
PACKINGS = ("auto", "always", "never")
VISION = "vision"
"""Name of a model's vision tower in `trainer.freeze`."""
REMEMBERED_BYTES = 2**30
"""Most bytes of pixels, or of a frozen tower's features, that a rank keeps of the pictures that were read last: some
fifty to a hundred large ones, or thousands of small ones. Those of the rows at hand are kept however many."""
MOST_SEQUENCE_RANKS = 8
"""Most ranks among which sequence_parallel_size=auto chooses groups: the GPUs of a node, whose links are fast."""
KEEP_WHOLE_BYTES = 2 * 2**30
"""Largest model (float32) that is gathered once an optimizer step, and whose gradients are reduced once: less
communication, and whole gradients and parameters on each rank meanwhile. A larger one is gathered layer by layer,
forward and backward.
"""
STREAM, CHUNK_TOKENS, CPU_CHUNK_TOKENS = "stream", 2048, 512
"""Value of `trainer.activation_checkpointing`, and tokens that a layer then computes at a time. On a GPU adding up the
gradients of its weights, once a chunk, would take a fifth of the time with 1,024; on a CPU it takes none that counts.
"""


@dataclass
class OptimizerConfig:
    """AdamW (1711.05101)."""

    lr: float = 1e-6
    """Peak learning rate. 1e-6 suits models of 1B and more; tiny ones want 1e-4."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Decay of the two moments. 0.95 forgets the second one sooner than 0.999, as gradients here change with the
    policy."""
    eps: float = 1e-8
    """Term that is added to the root of the second moment."""
    weight_decay: float = 0.0
    """Share of a weight that is taken off at each step, times the learning rate. 0: fine-tuning stays near the
    start."""
    clip_norm: float = 1.0
    """Global gradient norm above which the gradient is scaled down. 0: never."""
    schedule: str = "constant"
    """Schedule of the learning rate: constant, or cosine (to min_lr_share of the peak at trainer.max_steps)."""
    warmup_steps: int = 0
    """Steps of linear warm-up from 0 to the peak."""
    min_lr_share: float = 0.1
    """Share of the peak that a cosine ends at."""

    def __post_init__(self) -> None:
        check_bounds(
            self, "trainer.optimizer",
            lr=0, weight_decay=0, clip_norm=0, warmup_steps=0, eps=POSITIVE, min_lr_share=(0, 1),
        )  # fmt: skip
        if isinstance(self.betas, list) and (len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas)):
            raise ConfigError(
                f"trainer.optimizer.betas={self.betas}: must be two numbers of at least 0 and less than 1, such as "
                "[0.9,0.95]."
            )
        one_of("trainer.optimizer.schedule", self.schedule, SCHEDULES)


@dataclass
class PolicyConfig:
    """What one of several policies has of its own."""

    every: int = 1
    """Learn in steps whose number this divides. Its rows of the steps between are left out, and its weights stay as
    they are. 1: in every step."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """Keys of trainer.optimizer with other values for this policy, such as {lr: 3e-4}."""
    num_ranks: int = 0
    """Number of ranks that train only this policy, a whole model. Set it for every policy or for none; the sum must be
    trainer.num_ranks. 0: all ranks train all policies, one after another, which keeps every rank busy."""

    def __post_init__(self) -> None:
        at_least("trainer.policies.<name>.every", self.every, 1)
        at_least("trainer.policies.<name>.num_ranks", self.num_ranks, 0)


@dataclass
class DeepSpeedConfig:
    """Settings of trainer.engine=deepspeed."""

    zero_stage: int = 2
    """Stage of ZeRO, which says what is spread over the ranks (1910.02054). 1: float32 masters and optimizer states. 2:
    gradients, too; costs no more communication than 1. 3: weights, too, gathered layer by layer: the least memory, the
    most communication."""

    def __post_init__(self) -> None:
        within("trainer.deepspeed.zero_stage", self.zero_stage, 1, 3)


@dataclass
class ReplayConfig:
    """Replay of rare successes: each step also trains rows of earlier steps that were right where few other rows of
    their group were, as long as none of their tokens is staler than max_staleness. The loss corrects for the change of
    the policy since then."""

    share: float = 0.0
    """Most rows that a step trains again, as a share of its own. 0: none, each row is trained once. Where successes are
    rare a step itself has few of them, so 0.25 is much."""
    rare: float = 0.25
    """Largest share of a group whose rows above the mean reward count as rare. With 8 samples: one or two."""
    steps: int = 1
    """Versions of max_staleness reserved for replay. New prompts are admitted only up to `max_staleness - steps`; a row
    can then be trained again until its age reaches max_staleness."""

    def __post_init__(self) -> None:
        check_bounds(self, "trainer.replay", steps=1, share=(0, 1), rare=(0, 1))


@dataclass
class LoraConfig:
    """LoRA (2106.09685): small matrices A and B are trained beside frozen weights, and engines sample from W + alpha /
    rank * B A. Needs about ten times the learning rate of full training."""

    rank: int = 0
    """Columns of B and rows of A. 0: off, all weights are trained. 16 to 64 are usual for RL."""
    alpha: int = 32
    """Factor that B A is multiplied by, times rank."""
    target_modules: list[str] = field(default_factory=lambda: [ALL_LINEAR])
    """Ends of the names of the modules that get an adapter, e.g. [q_proj, v_proj]: linear layers, of which [all-linear]
    takes all but the head, and experts of a mixture, each with its own A and B. Experts are stacked tensors, not linear
    layers, so name them too, as transformers calls them: [all-linear, gate_up_proj, down_proj]."""
    publish: str = "merged"
    """Weights that engines receive after each step. merged: the whole model with B A added to W, so that engines run at
    full speed. adapter: A and B alone (0.5% of a 7B model's bytes at rank 16); engines keep W and compute W x + B A x
    at each token, which costs speed (on vLLM's CPU build most of it). Exports are merged either way."""

    def __post_init__(self) -> None:
        check_bounds(self, "trainer.lora", rank=0, alpha=1)
        one_of("trainer.lora.publish", self.publish, PUBLISHED)
        if self.publish == "adapter" and self.rank == 0:
            raise ConfigError(
                "trainer.lora.publish=adapter: there is none with trainer.lora.rank=0. Set trainer.lora.rank, e.g. to "
                "16, or leave it out."
            )
        if not self.target_modules:
            raise ConfigError(f"trainer.lora.target_modules=[]: nothing would be trained. Set it to [{ALL_LINEAR}].")

    @property
    def publishes_adapter(self) -> bool:
        """True if engines receive A and B, and not the model."""
        return self.publish == "adapter"


@dataclass
class TrainerConfig:
    engine: str = "fsdp"
    """Name of the engine: fsdp (FSDP2, `fully_shard`), or deepspeed (ZeRO)."""
    num_ranks: int = 1
    """Trainer actors, one a rank."""
    tensor_parallel_size: int = 1
    """Ranks that split the linear layers of one copy of the model, so that larger ones fit; must divide num_ranks and
    the model's heads. They train on the same rows. Engine fsdp only."""
    sequence_parallel_size: int | str = 1
    """Ranks that split the tokens of the same rows (Ulysses, 2309.14509), so that longer ones fit; must divide
    num_ranks and the model's heads. auto: chosen for each micro-batch, by the lengths of its rows, among 1, 2, 4, ...
    and the largest power of two that divides num_ranks, 8 at most: long rows over many ranks, short ones alone. Packs
    rows. With max_staleness above 0 it goes by times that are measured at the start, else by the model's size alone,
    so that a rerun has the same bits. Changes results by rounding. Engine fsdp only."""
    shard_size: int = 0
    """Ranks, one after the other, that hold one copy of weights, gradients and optimizer states; each further block of
    so many holds another (HSDP, 2304.11277). 0: all ranks hold one, which takes the least memory. With the ranks of a
    node, weights are gathered within nodes, and between them go gradients alone, once an optimizer step: for models
    that fit a node, and links between nodes that are slow. Must divide num_ranks, and be divided by
    tensor_parallel_size. Engine fsdp only."""
    num_gpus_per_rank: float = 0
    """GPUs of each rank: 1 on a GPU cluster (nccl); 0 on CPUs (gloo)."""
    num_scorer_ranks: int = 0
    """Ranks of each scorer (reference, teacher, reward model), with num_gpus_per_rank GPUs each. 0: num_ranks. Fewer
    hold its weights, where it has GPUs of its own; on those of engines and ranks (placement=colocated) it stays 0."""
    scorer_ranks: dict[str, int] = field(default_factory=dict)
    """Ranks of single scorers by name, such as {reference: 2, reward_model: 8}, where models differ in size. Those that
    are not named have num_scorer_ranks."""
    max_steps: int = 100
    """Steps of this run, each with one update of the policy."""
    groups_per_step: int = 8
    """Groups (prompts) that one step trains on; samples = groups_per_step x algorithm.group_size."""
    num_minibatches: int = 1
    """Optimizer steps of one update, each on its share of the batch. Above 1 the ratio is taken against the batch's
    start."""
    max_tokens_per_microbatch: int | str = AUTO
    """Token budget of one forward-backward, padding included, of which packed rows have none; with
    sequence_parallel_size=auto, of each rank. Bounds activation memory; changes no result but for rounding. auto: on a
    GPU whose memory is known (cluster.gpu_memory_gib), as many as fit, up to 32,768, beyond which nothing is gained;
    else 8,192."""
    packing: str = "auto"
    """Rows of a micro-batch without padding, one after the other; none attends to another (what verl calls
    use_remove_padding). auto: where a kernel takes them so: with model.attention=flash_attention_2, and with sdpa and
    trainer.dtype=bfloat16 on GPUs on which torch's own passes a trial. always: also without, where it pays as lengths
    differ widely. never: rows of similar length are padded to the longest of them. Changes results by rounding."""
    share_prefixes: str = "auto"
    """Train the rows of a group as a tree, in which their common beginnings are computed once: the prompt, and the
    turns of attempts. auto: where that saves at least 32 tokens of a group and 15% of them, for text models with full
    attention by sdpa, without trainer.compile and rollout.router_replay. always: every row, or an error that says why
    not. never: each row alone. A group then stays on one rank where that is faster. Changes results by rounding."""
    dtype: str = "float32"
    """Compute dtype: float32 or bfloat16. Weights that are trained and their optimizer are float32 either way; those
    that LoRA leaves as they are have this dtype."""
    freeze: list[str] = field(default_factory=lambda: [VISION])
    """Parts of the model that are not trained. vision: the vision tower, if the model has one. It is good before any
    post-training, and its features need not be recomputed for each version. Empty: the whole model is trained."""
    offload: bool = False
    """True: keep master weights, gradients and optimizer states in host memory and step there: slower, for models that
    do not fit. Compute copies go to the GPU layer by layer with engine fsdp; with deepspeed one stays there. On CPUs it
    saves nothing."""
    stay_on_device: bool | str = AUTO
    """With placement=colocated on GPUs. True: weights and optimizer states stay on the GPU while engines generate, and
    are not copied to the host and back. false: they leave it to the engine's keys and values. auto: true where the
    GPU's memory is known (cluster.gpu_memory_gib) and has room for both, with keys and values for as many of the
    longest sequences as an engine gets at once; else false."""
    activation_checkpointing: bool | str = AUTO
    """True: recompute each layer in backward: less memory, about a third more time. stream: recompute it in chunks of
    2,048 tokens, 512 on a CPU (2506.03077), forward and backward: the same gradients in about the same time, and a
    third of the memory beyond the inputs of layers with 8,192 tokens, less with more; for text models with full
    attention by sdpa, whose layers are neither compiled nor split over ranks. auto: true on a GPU, unless micro-batches
    of 8,192 tokens fit without, and with activation_offload; on CPUs false."""
    activation_offload: bool = False
    """True: keep what backward needs of each micro-batch in page-locked host memory: all that layers save, or their
    inputs alone where activation_checkpointing recomputes the rest, which is little to copy. Changes no bit; costs the
    time of the copies. Off, since it pays where one row alone does not fit. On CPUs it saves nothing. Not for
    tensor_parallel_size above 1."""
    compile: bool = False
    """True: compile each decoder layer (torch.compile): fewer, larger kernels, for a minute or more at the first steps:
    once for several rows, and once where a micro-batch has only one. What was compiled is kept for the next run, in
    TORCHINDUCTOR_CACHE_DIR (unset: below ~/.cache). Changes results by rounding. Not for ZeRO's stage 3, nor for layers
    split over ranks."""
    liger: bool = False
    """True: compute norms, rotary embeddings and gated activations by Liger's kernels (2410.10989): less memory, and
    faster. GPUs only; wants the package liger-kernel. Log-probabilities stay Penstock's own."""
    router_aux_loss_coef: float = 0.0
    """Factor of an auxiliary loss that keeps the experts of a mixture in even use. It is computed for each response and
    layer (2412.19437, equations 17 to 20) and averaged over both; `actor/router_balance` reports it: 1 is even use,
    experts / experts per token is the worst. 0: off, since RL changes a pre-trained router little, and the loss would
    pull it away from what it has learned. 1e-3 is usual where a mixture is trained from the start. For models that
    route by a softmax (Qwen's mixtures, Mixtral). The policy's only, not a critic's."""
    logprob_chunk_mib: float = 128.0
    """Memory for logits and what is made of them, MiB. Those of a micro-batch that fit whole are kept for backward;
    others are made tile by tile, and again in backward. Bounds memory at large vocabularies; changes no result but for
    rounding.
    """
    num_threads: int = 0
    """CPU threads of each rank. 0: an even share of all cores among the ranks when max_staleness=0, otherwise what a
    trial finds (rollout.num_threads)."""
    collective_timeout_s: float = 600.0
    """Deadline, in seconds, of each collective of the ranks, of their meeting, and of an export. Long enough for what
    all ranks wait for in between, such as a first compilation."""
    step_timeout_s: float = 3600.0
    """Deadline of one step, waiting for its samples included."""
    deepspeed: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    """LoRA of everything that is trained, the critic included. Engine fsdp only."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    policies: dict[str, PolicyConfig] = field(default_factory=dict)
    """What the policies of a dataflow that trains several have of their own, by their names in flow.train. With
    trainer.lora.rank each is an adapter of one model; with rank 0 each is a whole model, which starts from
    model.paths.NAME, or from model.path, and engines are dealt to them in turn."""
    critic_optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    """Optimizer of the critic, where the algorithm has one. Its head is new, so that it wants a higher rate than the
    policy."""

    def __post_init__(self) -> None:
        one_of("trainer.engine", self.engine, TRAINERS)
        one_of("trainer.packing", self.packing, PACKINGS)
        one_of("trainer.share_prefixes", self.share_prefixes, PACKINGS)
        for part in self.freeze:
            one_of("trainer.freeze", part, (VISION,))
        one_of("trainer.dtype", self.dtype, ("float32", "bfloat16"))
        check_bounds(
            self, "trainer",
            num_ranks=1, max_steps=1, groups_per_step=1, num_minibatches=1, shard_size=0, router_aux_loss_coef=0,
            num_threads=0, logprob_chunk_mib=POSITIVE, collective_timeout_s=POSITIVE, step_timeout_s=POSITIVE,
            num_gpus_per_rank=(0, 1), num_scorer_ranks=0,
        )  # fmt: skip
        if not auto_or_number("trainer.max_tokens_per_microbatch", self.max_tokens_per_microbatch):
            at_least("trainer.max_tokens_per_microbatch", self.max_tokens_per_microbatch, 1)
        for key, words in {"activation_checkpointing": (AUTO, STREAM), "stay_on_device": (AUTO,)}.items():
            if isinstance(getattr(self, key), str):
                one_of(f"trainer.{key}", getattr(self, key), words)
        for key in ("tensor_parallel_size", "sequence_parallel_size"):
            if not auto_or_number(f"trainer.{key}", getattr(self, key)):
                at_least(f"trainer.{key}", getattr(self, key), 1)
                divides(f"trainer.{key}", getattr(self, key), "trainer.num_ranks", self.num_ranks)
        both = "trainer.tensor_parallel_size x trainer.sequence_parallel_size"
        divides(both, self.ranks_per_row, "trainer.num_ranks", self.num_ranks)
        of_scorers = {f"trainer.scorer_ranks.{name}": ranks for name, ranks in self.scorer_ranks.items()}
        for key, ranks in of_scorers.items():
            at_least(key, ranks, 1)
        for key, ranks in (of_scorers | {"trainer.num_scorer_ranks": self.num_scorer_ranks}).items():
            if ranks and not self.splits_by_length:
                divides(both, self.ranks_per_row, key, ranks)
        if self.shard_size:
            divides("trainer.shard_size", self.shard_size, "trainer.num_ranks", self.num_ranks)
            size = self.tensor_parallel_size
            divides("trainer.tensor_parallel_size", size, "trainer.shard_size", self.shard_size)
        self._check_capability("splits_layers", "shard_size", self.shard_size, 0)
        for key in ("tensor_parallel_size", "sequence_parallel_size"):
            self._check_capability("splits_layers", key, getattr(self, key), 1)
        self._check_capability("has_adapters", "lora.rank", self.lora.rank, 0)
        self._check_compile()
        self._check_stream()
        if self.activation_offload and self.tensor_parallel_size > 1:
            raise ConfigError(
                f"trainer.activation_offload=true: layers of trainer.tensor_parallel_size={self.tensor_parallel_size} "
                "save parts of tensors, which are not brought to the host. Set it to 1, or leave it out."
            )
        if self.liger and not self.num_gpus_per_rank:
            raise ConfigError(
                "trainer.liger=true: Liger's kernels are for GPUs, and trainer.num_gpus_per_rank=0. Set that to 1, or "
                "leave trainer.liger out."
            )
        if self.splits_by_length and self.packing == "never":
            raise ConfigError(
                "trainer.sequence_parallel_size=auto packs the rows of a micro-batch, and trainer.packing=never. Set "
                "trainer.packing=auto, or a number of ranks."
            )
        if self.router_aux_loss_coef and (self.compile or self.sequence_ranks > 1):
            raise ConfigError(
                f"trainer.router_aux_loss_coef={self.router_aux_loss_coef}: routers are watched where they run, on "
                "whole rows. Set it to 0, or trainer.compile=false and trainer.sequence_parallel_size=1."
            )

    def _check_capability(self, capability: str, key: str, value: int, off: int) -> None:
        """Raise `ConfigError` where a key is set, other than to `off`, that the engine has no capability for."""
        if value != off and not getattr(self.capabilities, capability):
            names = names_with(capability, TRAINERS)
            raise ConfigError(f"trainer.{key} is for trainer.engine={names} only. Choose that, or set it to {off}.")

    def _check_compile(self) -> None:
        """Refuse to compile layers that gather or communicate inside: a compiled layer cannot hold that."""
        if self.compile and self.zero_stage == 3:
            raise ConfigError(
                "trainer.compile=true: ZeRO's stage 3 gathers weights inside of the layers, which then cannot be "
                "compiled whole. Set trainer.deepspeed.zero_stage to 2 or 1, or trainer.engine=fsdp, or leave it out."
            )
        if self.compile and self.ranks_per_row > 1:
            raise ConfigError(
                f"trainer.compile=true: layers of trainer.tensor_parallel_size={self.tensor_parallel_size} and "
                f"trainer.sequence_parallel_size={self.sequence_parallel_size} communicate inside, and are not "
                "compiled. Set both to 1, or leave it out."
            )

    def _check_stream(self) -> None:
        """Refuse to compute layers in chunks where something else is made of whole layers or whole rows."""
        in_the_way = {
            "trainer.deepspeed.zero_stage=3": self.zero_stage == 3,
            "trainer.compile=true": self.compile,
            f"trainer.tensor_parallel_size={self.tensor_parallel_size}": self.tensor_parallel_size > 1,
            f"trainer.sequence_parallel_size={self.sequence_parallel_size}": self.sequence_ranks > 1,
            "trainer.share_prefixes=always": self.share_prefixes == "always",
            f"trainer.router_aux_loss_coef={self.router_aux_loss_coef}": self.router_aux_loss_coef > 0,
        }
        if self.streams_layers and any(in_the_way.values()):
            keys = ", ".join(key for key, is_set in in_the_way.items() if is_set)
            raise ConfigError(
                f"trainer.activation_checkpointing=stream: layers are computed in chunks of tokens, and {keys} wants "
                "whole ones. Leave that out, or set trainer.activation_checkpointing=true."
            )

    @property
    def capabilities(self) -> TrainerCapabilities:
        """Capabilities of the engine; of the default one as long as `engine` is an interpolation."""
        return TRAINERS.get(self.engine, TRAINERS[TrainerConfig.engine])

    @property
    def zero_stage(self) -> int:
        """Stage of ZeRO; 0 for an engine without stages, which spreads everything over the ranks."""
        return self.deepspeed.zero_stage if self.capabilities.has_zero_stages else 0

    @property
    def microbatch_tokens(self) -> int:
        """Tokens of a micro-batch; as long as nobody has chosen (`auto`), the default."""
        chosen = self.max_tokens_per_microbatch
        return DEFAULT_TOKENS if isinstance(chosen, str) else chosen

    @property
    def recomputes_layers(self) -> bool:
        """True if layers are recomputed in backward; as long as nobody has chosen, on GPUs."""
        chosen = self.activation_checkpointing
        return self.num_gpus_per_rank > 0 if chosen == AUTO else bool(chosen)

    @property
    def streams_layers(self) -> bool:
        """True if layers are computed in chunks of tokens."""
        return self.activation_checkpointing == STREAM

    @property
    def stays_on_device(self) -> bool:
        """True if states stay on the GPU while engines generate; as long as nobody has chosen, they do not."""
        return self.stay_on_device is True

    def optimizer_of(self, policy: str) -> OptimizerConfig:
        """Settings of the optimizer of a policy. Raises `ConfigError` for an unknown key."""
        own = self.policies[policy].optimizer if policy in self.policies else {}
        if unknown := next((key for key in own if key not in OptimizerConfig.__dataclass_fields__), None):
            raise ConfigError(
                f"trainer.policies.{policy}.optimizer.{unknown}: unknown"
                f"{suggest(unknown, OptimizerConfig.__dataclass_fields__)}"
            )
        return replace(self.optimizer, **own)

    @property
    def num_policies(self) -> int:
        """Number of policies that are trained."""
        return max(1, len(self.policies))

    @property
    def own_models(self) -> tuple[str, ...]:
        """Names of the policies that are whole models, of several; empty where they are adapters of one."""
        return tuple(self.policies) if len(self.policies) > 1 and not self.lora.rank else ()

    @property
    def policy_ranks(self) -> dict[str, range]:
        """The ranks of each policy that has ranks of its own; empty where all ranks train all."""
        found, first = dict[str, range](), 0
        for name, policy in self.policies.items():
            if policy.num_ranks:
                found[name] = range(first, first := first + policy.num_ranks)
        return found

    def of_policy(self, policy: str) -> "TrainerConfig":
        """Settings of the trainer of one of `own_models` alone."""
        own = self.policies[policy]
        return replace(self, policies={policy: replace(own, num_ranks=0)}, num_ranks=own.num_ranks or self.num_ranks)

    def every(self, policy: str) -> int:
        """See `PolicyConfig.every`; 1 for the only policy."""
        return self.policies[policy].every if policy in self.policies else 1

    @property
    def freezes_tower(self) -> bool:
        """True if a vision tower is not trained. Adapters are never put around it."""
        return VISION in self.freeze or self.lora.rank > 0

    @property
    def splits_by_length(self) -> bool:
        """True if ranks choose for each micro-batch which of them split its rows."""
        return self.sequence_parallel_size == AUTO

    @property
    def sequence_ranks(self) -> int:
        """Ranks that split the tokens of the same rows, or may, where they choose for each micro-batch."""
        if not isinstance(self.sequence_parallel_size, str):
            return self.sequence_parallel_size
        num_ranks = self.num_ranks // self.tensor_parallel_size
        return max(1, min(MOST_SEQUENCE_RANKS, num_ranks & -num_ranks))

    def split_sizes(self, heads: Iterable[int]) -> list[int]:
        """Numbers of ranks that may split the tokens of a micro-batch, ascending: one, or 1, 2, 4, … as far as they
        divide a model's heads. `heads`: numbers of those of queries, and of keys and values."""
        if not self.splits_by_length:
            return [self.sequence_ranks]
        common = math.gcd(*heads) // self.tensor_parallel_size
        sizes = (1 << power for power in range(self.sequence_ranks.bit_length()))
        return [size for size in sizes if size == 1 or common % size == 0]

    @property
    def ranks_per_row(self) -> int:
        """Ranks that have the same rows and split the work on them."""
        return self.tensor_parallel_size * self.sequence_ranks

    @property
    def num_shares(self) -> int:
        """Ranks, or blocks of those that split rows, that get rows of their own."""
        return self.num_ranks // self.ranks_per_row

    def of_scorer(self, name: str) -> "TrainerConfig":
        """Settings of a scorer, with its own number of ranks: one copy of its model where blocks do not divide it."""
        if not (ranks := self.scorer_ranks.get(name, self.num_scorer_ranks)):
            return self
        shard_size = 0 if self.shard_size and ranks % self.shard_size else self.shard_size
        return replace(self, num_ranks=ranks, num_scorer_ranks=0, scorer_ranks={}, shard_size=shard_size)

    def alone(self) -> "TrainerConfig":
        """Settings that say what is trained, for one rank on a CPU: it can read the model, whichever engine split
        it."""
        return replace(
            self,
            engine=TrainerConfig.engine,
            policies={name: replace(policy, num_ranks=0) for name, policy in self.policies.items()},
            num_ranks=1,
            num_scorer_ranks=0,
            scorer_ranks={},
            num_gpus_per_rank=0,
            shard_size=0,
            tensor_parallel_size=1,
            sequence_parallel_size=1,
            compile=False,
            liger=False,
        )
