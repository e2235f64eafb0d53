"""Peak of a trainer rank's device memory, part by part, from the model's sizes and the run's settings. Pure: no torch.

What a rank has all the time (weights, gradients, moments) is what ZeRO and FSDP count (1910.02054, 2304.11277). Beside
it, at some moments of an optimizer step, is what the moment needs; the largest counts:

    head              logits of the scored tokens, all layers' activations
    last layer        backward begins: all layers' activations; in the layer before, gradients are reduced, too
    first layer       one layer's activations, and gradients of all others
    end of backward   all gradients, and those of the root are reduced
    tower             a frozen vision tower encodes one picture, before anything else is there

A tower that is trained keeps activations until the layers' backward is over. Whichever moment it is, the copy of the
weights may be there that is published meanwhile (`workers/trainer/publishing.py`).

Activations that a decoder layer keeps for its backward are counted operation by operation. Attention's scores never
exist as a matrix, but with `model.attention=eager`. Norms compute in float32: with bfloat16 they keep a copy of their
input in it. Liger's and compiled layers keep less.

    norm       input (float32), normalised, product     head norms   the same of q and k
    attention  q, k, v, result, one sum a head          MLP          gate, its activation, up, product

Legend: P parameters; b bytes of an element that is computed with; H hidden, I width of the MLP, k experts of a token.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.conf.trainer import CHUNK_TOKENS, CPU_CHUNK_TOKENS, KEEP_WHOLE_BYTES, TrainerConfig
from penstock.orchestrator.configuration.model_shape import ModelShape, TowerShape

FLOAT32 = 4


PARTS = ("weights", "gathered weights", "gradients", "moments", "activations", "logits", "publication")
"""Parts of a rank's memory."""
MASTER, MOMENTS = 4, 8
"""Bytes of a float32 weight, and of AdamW's two moments of it."""
WHOLE_LOGIT, TILE_ON_CPU = 16, 8 * 2**20
"""Bytes of one logit and what is made of it, by which it is chosen whether logits are kept for backward, and of a tile
on a CPU (`workers/trainer/models/token_scores.py`)."""
ZERO_BUCKET = 500_000_000
"""Most elements that ZeRO reduces at a time."""


@dataclass(frozen=True)
class RankSetting:
    """What the memory of one rank depends on."""

    shape: ModelShape
    config: TrainerConfig
    tokens: int
    """Tokens of the largest micro-batch, padding included."""
    row_tokens: int
    """Tokens of the longest row."""
    is_only: bool = False
    """True if an optimizer step has one micro-batch: before its backward there are no gradients."""
    attention: str = "sdpa"
    on_gpu: bool = True
    is_trained: bool = True
    """False for a scorer, which has weights alone, in the dtype that it computes with."""
    is_scalar: bool = False
    """True for a model with a scalar head: it has no output layer, and makes no logits."""
    picture_share: float = 0.0
    """Largest share of a row's tokens that stand for pictures, of a vision model."""
    copied_bytes: float = 0.0
    """Bytes of the copy that is published while the next step is made."""

    @property
    def element_bytes(self) -> int:
        return 2 if self.config.dtype == "bfloat16" else 4

    @property
    def num_shards(self) -> int:
        """Ranks that split one copy of the model, tensor parallelism aside."""
        if self.config.zero_stage:
            return self.config.num_ranks
        return (self.config.shard_size or self.config.num_ranks) // self.config.tensor_parallel_size

    @property
    def layer_parameters(self) -> float:
        """Parameters of one layer on the ranks that hold one part of it."""
        shape = self.shape
        return (shape.attention_parameters + shape.mlp_parameters) / self.config.tensor_parallel_size + (
            shape.norm_parameters
        )

    @property
    def root_parameters(self) -> int:
        return self.shape.head_parameters + self.shape.hidden if self.is_scalar else self.shape.root_parameters

    @property
    def num_parameters(self) -> float:
        return self.shape.num_layers * self.layer_parameters + self.root_parameters + self.shape.tower_parameters

    @property
    def trains_tower(self) -> bool:
        return self.shape.tower is not None and self.is_trained and not self.config.freezes_tower

    @property
    def num_trained(self) -> float:
        """Parameters that get gradients and moments; of several policies, those of all."""
        if not self.is_trained:
            return 0
        if self.config.lora.rank:
            lora, count = self.config.lora, 1 if self.is_scalar else self.config.num_policies
            own = self.shape.adapter_parameters(lora.rank, lora.target_modules)
            return count * own / self.config.tensor_parallel_size
        return self.num_parameters - (0 if self.trains_tower else self.shape.tower_parameters)

    @property
    def trains_root(self) -> bool:
        return self.is_trained and not self.config.lora.rank

    @property
    def local_tokens(self) -> float:
        """Tokens that one rank computes with."""
        return self.tokens / self.split_size

    @property
    def split_size(self) -> int:
        """Ranks that split the tokens of the largest micro-batch."""
        return self.config.split_sizes((self.shape.heads, self.shape.kv_heads))[-1]


@dataclass(frozen=True)
class RankMemory:
    """Bytes at the peak, by part, and what an engine on the same device would find if the rank left it."""

    parts: Mapping[str, float]
    moment: str
    """The moment of the step at which it is."""
    on_host: float = 0.0
    """Bytes of weights, gradients and moments in host memory (`trainer.offload`)."""
    activations_on_host: float = 0.0
    """Bytes of activations that wait there for backward (`trainer.activation_offload`)."""

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def resident(self) -> float:
        """Bytes that the rank has between two steps."""
        return sum(self.parts[name] for name in ("weights", "moments"))


def rank_memory(setting: RankSetting) -> RankMemory:
    """The peak of one rank, at the first step whose moments exist."""
    resident, on_host = _resident(setting)
    if not setting.is_trained:
        moments = {"scoring": _scoring(setting)}
    else:
        moments = {
            "head": _at_head(setting),
            "last layer": _in_layer(setting, setting.shape.num_layers),
            "layer before": _in_layer(setting, max(1, setting.shape.num_layers - 1)),
            "first layer": _in_layer(setting, 1),
            "end of backward": _at_end(setting),
        }
    if setting.shape.tower is not None and not setting.trains_tower:
        moments["tower"] = _at_tower(setting, setting.shape.tower)
    moment, parts = max(moments.items(), key=lambda item: sum(item[1].values()))
    parts = dict.fromkeys(PARTS, 0.0) | resident | parts | {"publication": setting.copied_bytes}
    return RankMemory(parts, moment, on_host, _offloaded_activations(setting))


# What is there all the time.


def _resident(setting: RankSetting) -> tuple[dict[str, float], float]:
    """Weights and moments on the device, and bytes on the host."""
    shards, b = setting.num_shards, setting.element_bytes
    if not setting.is_trained:
        is_whole = setting.config.zero_stage in (1, 2)
        return {"weights": setting.num_parameters * b / (1 if is_whole else shards)}, 0.0
    weights = _kept_weights(setting) / shards
    moments = MOMENTS * setting.num_trained / shards
    if setting.config.zero_stage:
        copies = b * setting.num_parameters / (shards if setting.config.zero_stage == 3 else 1)
        if _is_offloaded(setting):
            return {"weights": copies}, weights + moments + MASTER * setting.num_trained / shards
        return {"weights": weights + copies, "moments": moments}, 0.0
    if _is_offloaded(setting):
        return {}, weights + moments + MASTER * setting.num_trained / shards
    return {"weights": weights, "moments": moments}, 0.0


def _kept_weights(setting: RankSetting) -> float:
    """Bytes of all ranks' weights of one copy of a model that is trained: float32 masters. What LoRA leaves as it is
    needs none."""
    if setting.config.lora.rank:
        return setting.element_bytes * setting.num_parameters + MASTER * setting.num_trained
    return MASTER * setting.num_parameters


def _is_offloaded(setting: RankSetting) -> bool:
    return setting.config.offload and setting.on_gpu


def _is_kept_whole(setting: RankSetting) -> bool:
    return setting.shape.num_parameters * MASTER <= KEEP_WHOLE_BYTES and not _is_offloaded(setting)


def _gradients(setting: RankSetting, share: float) -> float:
    """Bytes of float32 gradients, of this share of the trained parameters unless they are there already."""
    if _is_offloaded(setting) and not setting.config.zero_stage:
        return 0.0
    trained = MASTER * setting.num_trained
    share = share if setting.is_only else 1.0
    if setting.config.zero_stage:
        return trained * share / (1 if setting.config.zero_stage == 1 else setting.num_shards)
    if _is_kept_whole(setting) and not setting.is_only:
        return trained
    return trained * share / setting.num_shards


# What comes beside it.


def _gathered(setting: RankSetting, num_layers: int, layers_left: int) -> float:
    """Bytes of whole weights that are there for a moment: the root's, and those of so many layers; or of all, in a
    model that is kept whole, until the last backward has come past them. `layers_left`: whose backward is to come."""
    b, layer = setting.element_bytes, setting.layer_parameters
    if setting.config.zero_stage:
        return num_layers * layer * b if setting.config.zero_stage == 3 else 0.0
    if _is_kept_whole(setting):
        num_whole = layers_left if setting.is_only else setting.shape.num_layers
        return b * (setting.root_parameters + num_whole * layer + setting.shape.tower_parameters)
    flat = layer if setting.num_shards > 1 else 0.0  # what is gathered ahead lies in one buffer first
    root = setting.root_parameters + (setting.shape.tower.root_parameters if setting.shape.tower is not None else 0)
    return b * (root + num_layers * layer + flat)


def _in_flight(setting: RankSetting, *, reduced: bool) -> float:
    """Bytes of one layer's whole gradients, and of those of the layer after it, as float32, that are reduced
    meanwhile."""
    of_layer = setting.num_trained / setting.shape.num_layers
    if setting.trains_root:
        of_layer = setting.layer_parameters
    if setting.config.zero_stage:
        return setting.element_bytes * of_layer + MASTER * min(setting.num_trained, ZERO_BUCKET)
    own = MASTER if setting.config.streams_layers else setting.element_bytes
    return (own + MASTER * reduced) * of_layer


def _at_head(setting: RankSetting) -> dict[str, float]:
    num_layers = setting.shape.num_layers
    return {
        "gradients": _gradients(setting, 0.0),
        "gathered weights": _gathered(setting, 1, num_layers),
        "activations": _device_activations(setting, num_layers) + root_saved(setting) + _tower_kept(setting),
        "logits": logits_bytes(setting),
    }


def _in_layer(setting: RankSetting, layer: int) -> dict[str, float]:
    """The backward of a layer, counted from 1; of the last one, no gradients are reduced yet."""
    is_last = layer == setting.shape.num_layers
    gradients = _gradients(setting, 1 - layer / setting.shape.num_layers) + _head_gradient(setting)
    return {
        "gradients": gradients + _in_flight(setting, reduced=not is_last),
        "gathered weights": _gathered(setting, min(2, layer), layer),
        "activations": (
            _device_activations(setting, layer)
            + _recomputed(setting)
            + (0.0 if setting.config.streams_layers else layer_temporaries(setting))
            + _tower_kept(setting)
        ),
    }


def _at_end(setting: RankSetting) -> dict[str, float]:
    """The end of backward: the embedding's and the output layer's gradients are reduced."""
    whole, shard = setting.element_bytes + MASTER, MASTER / setting.num_shards
    of_root = max(whole, MASTER + shard) - (shard if setting.is_only else 0.0)
    return {
        "gradients": _gradients(setting, 1.0) + of_root * setting.root_parameters * setting.trains_root,
        "gathered weights": _gathered(setting, 0, 0),
    }


def _at_tower(setting: RankSetting, tower: TowerShape) -> dict[str, float]:
    """A frozen tower's pass without gradient over the largest picture of a row: one block at a time, beside what enters
    it."""
    num_patches = setting.picture_share * setting.row_tokens * tower.merged
    gathered = 0.0
    if setting.is_trained or setting.num_shards > 1:
        gathered = _gathered(setting, 0, setting.shape.num_layers)
        if not setting.config.zero_stage and not _is_kept_whole(setting):
            gathered += 2 * setting.element_bytes * tower.block_parameters
    of_patch = tower.block_saved(setting.element_bytes) + setting.element_bytes * tower.width
    return {
        "gathered weights": gathered,
        "activations": num_patches * (of_patch + FLOAT32 * tower.patch_numbers),
    }


def _tower_kept(setting: RankSetting) -> float:
    """Bytes that a trained tower keeps of the pictures of a micro-batch, all of which each rank computes that splits a
    row's tokens."""
    tower = setting.shape.tower
    if tower is None or not setting.trains_tower or _offloads_activations(setting):
        return 0.0
    of_patch = tower.num_layers * tower.block_saved(setting.element_bytes)
    if setting.config.recomputes_layers:
        of_patch = tower.num_layers * setting.element_bytes * tower.width + tower.block_saved(setting.element_bytes)
    return setting.picture_share * setting.tokens * tower.merged * (of_patch + FLOAT32 * tower.patch_numbers)


def _scoring(setting: RankSetting) -> dict[str, float]:
    """A pass without gradient: one layer at a time, then the logits."""
    return {
        "gathered weights": _gathered(setting, 2, setting.shape.num_layers) if setting.num_shards > 1 else 0.0,
        "activations": layer_saved(setting),
        "logits": 0.0 if setting.is_scalar else _budget(setting),
    }


def _head_gradient(setting: RankSetting) -> float:
    """Bytes of the output layer's gradient, which is there from the beginning of backward to its end."""
    is_there = setting.trains_root and not setting.is_scalar
    return setting.element_bytes * setting.shape.head_parameters * is_there


def _device_activations(setting: RankSetting, num_layers: int) -> float:
    """Bytes of activations that layers keep on the device for backward."""
    return 0.0 if _offloads_activations(setting) else num_layers * _layer_kept(setting)


def _layer_kept(setting: RankSetting) -> float:
    """Bytes that a layer keeps: its inputs alone where it is recomputed."""
    if setting.config.recomputes_layers:
        return setting.local_tokens * setting.shape.hidden * setting.element_bytes
    return layer_saved(setting)


def _recomputed(setting: RankSetting) -> float:
    """Bytes that come back in the backward of one layer, or are there then where it is computed in chunks."""
    comes_back = _layer_kept(setting) if _offloads_activations(setting) else 0.0
    if not setting.config.recomputes_layers:
        return comes_back
    return comes_back + (_streamed(setting) if setting.config.streams_layers else layer_saved(setting))


def _streamed(setting: RankSetting) -> float:
    """Bytes of one layer's backward in chunks: all of one chunk; gradients of all hidden states; and keys and values of
    a row longer than a chunk, with their gradients, which are copied for the chunk at hand."""
    shape, b, most = setting.shape, setting.element_bytes, CHUNK_TOKENS if setting.on_gpu else CPU_CHUNK_TOKENS
    chunk = replace(setting, tokens=min(setting.tokens, most))
    is_cut = setting.row_tokens > most
    keys = is_cut * setting.row_tokens * 2 * shape.kv_width * (3 * b + FLOAT32)
    gradients = 2 * b * shape.hidden * (setting.tokens - chunk.tokens)
    return layer_saved(chunk) + layer_temporaries(chunk) + gradients + keys


def _offloads_activations(setting: RankSetting) -> bool:
    return setting.config.activation_offload and setting.is_trained and setting.on_gpu


def _offloaded_activations(setting: RankSetting) -> float:
    """Bytes of activations in host memory, when backward begins."""
    if not _offloads_activations(setting):
        return 0.0
    return setting.shape.num_layers * _layer_kept(setting) + root_saved(setting)


# Activations of one layer.


def layer_saved(setting: RankSetting) -> float:
    """Bytes that one layer keeps."""
    shape, b, parts = setting.shape, setting.element_bytes, setting.config.tensor_parallel_size
    if shape.measured is not None and (kept := shape.measured.kept(b)):
        return setting.local_tokens * kept
    norms = 2 * (_norm(setting) + b) * shape.hidden
    attention = b * 2 * (shape.q_width + shape.kv_width) + FLOAT32 * shape.heads
    if shape.has_head_norms:
        attention += _norm(setting) * (shape.q_width + shape.kv_width)
    if setting.attention == "eager":  # scores in float32, and as what they are multiplied with
        attention += (FLOAT32 + b) * shape.heads * setting.row_tokens
    return setting.local_tokens * (norms + (attention + _mlp(setting)) / parts) + _adapted_experts(setting)


def layer_temporaries(setting: RankSetting) -> float:
    """Bytes beside them in the MLP's backward: gradients of what it keeps, and of hidden states."""
    shape, b, parts = setting.shape, setting.element_bytes, setting.config.tensor_parallel_size
    of_experts = shape.hidden if shape.num_experts else 0
    of_mlp = shape.experts_per_token * (3 * shape.mlp_width + of_experts) / parts
    return setting.local_tokens * b * (of_mlp + 2 * shape.hidden) + _adapted_experts(setting)


def _adapted_experts(setting: RankSetting) -> float:
    """Bytes of one layer's experts with their adapters added, which are made at each call and kept for backward; and of
    the gradient of these."""
    lora = setting.config.lora
    if not (setting.is_trained and lora.rank):
        return 0.0
    return setting.element_bytes * setting.shape.adapted_experts(lora.target_modules)


def root_saved(setting: RankSetting) -> float:
    """Bytes that the last norm keeps, and the hidden states that the output layer reads."""
    return setting.local_tokens * setting.shape.hidden * (_norm(setting) + 2 * setting.element_bytes)


def _norm(setting: RankSetting) -> int:
    """Bytes a norm keeps of an element, its result aside. A norm that is not trained needs no normalised input."""
    if setting.config.liger or setting.config.compile:
        return setting.element_bytes
    is_trained = setting.is_trained and not setting.config.lora.rank
    return FLOAT32 + setting.element_bytes * is_trained


def _mlp(setting: RankSetting) -> float:
    """Bytes of a token in the MLP, or in all of its experts, whose inputs and results are copies."""
    shape, b = setting.shape, setting.element_bytes
    kept = 3 if setting.config.liger or setting.config.compile else 4
    of_expert = 2 * shape.hidden if shape.num_experts else 0
    return b * shape.experts_per_token * (kept * shape.mlp_width + of_expert) + 2 * FLOAT32 * shape.num_experts


# Logits.


def _budget(setting: RankSetting) -> float:
    """Bytes of logits and what is made of them, at a time."""
    budget = setting.config.logprob_chunk_mib * 2**20
    num_logits = setting.local_tokens * setting.shape.vocabulary
    if WHOLE_LOGIT * num_logits <= budget:  # logits themselves, log-probabilities, and both of their gradients
        return num_logits * (WHOLE_LOGIT - MASTER + setting.element_bytes)
    return budget if setting.on_gpu else min(budget, TILE_ON_CPU)


def logits_bytes(setting: RankSetting) -> float:
    """Bytes of logits in backward, with the gradients of hidden states (float32) and of the output layer."""
    if setting.is_scalar:
        return 0.0
    of_hidden = MASTER * setting.local_tokens * setting.shape.hidden
    return _budget(setting) + of_hidden + _head_gradient(setting)
