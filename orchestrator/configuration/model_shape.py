"""The sizes of a model that its memory depends on, read from its config.json alone. Pure: no torch, no weights.

Known are decoders of one kind: attention by heads, then a gated MLP or experts that are gated MLPs, as Llama, Mistral,
Mixtral, Qwen2 and Qwen3 are, and the text of the families of vision models (`workers/pictures/processor.py`) with their
towers. Other models are made and counted (`measured_shape.py`).

    patch [C] ─▶ embedding ─▶ blocks: norm, attention, norm, MLP ─▶ merger: norm, two products ─▶ a feature of [H]

A tower's activations are an estimate: one operation after the other, as `rank_memory.py` counts those of text.

Legend: C numbers of a patch, D width of the tower, I width of its MLP, M patches of a feature, H hidden of the text.
"""

import contextlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.conf.model import FreshModelConfig
from penstock.conf.trainer import ALL_LINEAR
from penstock.workers.fresh_model import FAMILY, vision_config, vocabulary_size
from penstock.workers.models.model_files import CONFIG, longest_context

FLOAT32 = 4
LONG_WINDOW = 256
"""Tokens of a sliding window beyond which its keys and values are counted like those of the whole sequence: shorter
ones are next to nothing beside it."""


def read_config(path: str, *, may_fetch: bool = False) -> Mapping[str, Any] | None:
    """The config.json of a model; None where there is none, or it says something else. `path`: a directory, or the name
    of a model of the hub, in the cache or, with `may_fetch`, fetched."""
    values: Any = None
    with contextlib.suppress(OSError, ValueError):
        directory = Path(path).expanduser()
        file = directory / CONFIG if directory.is_dir() else _of_hub(path, may_fetch)
        values = json.loads(Path(file).read_text(encoding="utf-8")) if file else None
    return values if isinstance(values, Mapping) else None


def _of_hub(name: str, may_fetch: bool) -> str | None:
    """The config.json of a hub's model in the cache."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    if may_fetch:
        return str(hf_hub_download(name, CONFIG))
    found = try_to_load_from_cache(name, CONFIG)
    return found if isinstance(found, str) else None


@dataclass(frozen=True)
class TowerShape:
    """Numbers of one vision tower."""

    num_layers: int
    width: int
    mlp_width: int
    patch_numbers: int
    """Numbers of a patch: pixels of all its channels and frames."""
    merged: int
    """Patches of one feature."""
    root_parameters: int
    """Parameters outside of the blocks, which are gathered with the root's: embeddings, and what makes features."""
    is_gated: bool = False
    """True if MLPs are gated, and norms have no bias, as in Qwen2.5-VL."""

    @classmethod
    def of(cls, kind: str, values: Mapping[str, Any], hidden: int = 0) -> "TowerShape | None":
        """Read a `vision_config`. `kind`: the model's; `hidden`: width of its text. None for one that is not known
        here, or lacks a size."""
        try:
            return TOWERS[kind](kind, values, hidden)
        except (KeyError, TypeError):
            return None

    @property
    def block_parameters(self) -> int:
        """Parameters of one block, biases included."""
        attention = 4 * self.width * self.width + 4 * self.width
        mlp = (3 if self.is_gated else 2) * self.width * self.mlp_width
        biases = (2 if self.is_gated else 1) * self.mlp_width + self.width
        return attention + mlp + biases + (2 if self.is_gated else 4) * self.width

    @property
    def num_parameters(self) -> int:
        return self.num_layers * self.block_parameters + self.root_parameters

    def block_saved(self, element_bytes: int) -> int:
        """Bytes that a block keeps of a patch for its backward: norms' inputs and results; q, k and v, the first two
        once more as they are turned, and the result; what its MLP makes."""
        norms = 2 * (FLOAT32 + 2 * element_bytes) * self.width
        attention = 6 * element_bytes * self.width
        return norms + attention + (4 if self.is_gated else 2) * element_bytes * self.mlp_width


def _of_qwen(kind: str, values: Mapping[str, Any], hidden: int) -> TowerShape:
    is_first, is_gated = kind == "qwen2_vl", kind == "qwen2_5_vl"
    width, out = (
        values["embed_dim" if is_first else "hidden_size"],
        values["hidden_size" if is_first else "out_hidden_size"],
    )
    pixels = values.get("in_channels", values.get("in_chans", 3)) * values["patch_size"] ** 2
    patch_numbers, merged = pixels * values["temporal_patch_size"], values["spatial_merge_size"] ** 2
    wide = width * merged
    products = wide * wide + wide + wide * out + out
    root = patch_numbers * width + (1 if is_gated else 2) * width + products
    if kind == "qwen3_vl":  # the embedding has biases and positions, and features go to layers, too
        root += width + values["num_position_embeddings"] * width
        root += len(values["deepstack_visual_indexes"]) * (2 * wide + products)
    mlp_width = int(width * values["mlp_ratio"]) if is_first else values["intermediate_size"]
    return TowerShape(values["depth"], width, mlp_width, patch_numbers, merged, root, is_gated)


def _of_clip(kind: str, values: Mapping[str, Any], hidden: int) -> TowerShape:
    width, side = values["hidden_size"], values["image_size"] // values["patch_size"]
    patch_numbers = values.get("num_channels", 3) * values["patch_size"] ** 2
    embeddings = width + patch_numbers * width + (side * side + 1) * width
    projector = width * hidden + hidden + hidden * hidden + hidden
    root = embeddings + 4 * width + projector
    return TowerShape(values["num_hidden_layers"], width, values["intermediate_size"], patch_numbers, 1, root)


TOWERS = {"qwen2_vl": _of_qwen, "qwen2_5_vl": _of_qwen, "qwen3_vl": _of_qwen, "llava": _of_clip}
"""Readers of towers by the model type, for each family of `workers/pictures/processor.py`."""
WITH_QKV_BIAS = ("qwen2", "qwen2_vl", "qwen2_5_vl")
"""Model types whose q, k and v always have biases; others say so by `attention_bias`."""
WITH_HEAD_NORMS = ("qwen3", "qwen3_moe", "qwen3_vl")
"""Model types that normalise each head of q and k."""
KNOWN = ("llama", "mistral", "mixtral", *WITH_QKV_BIAS, *WITH_HEAD_NORMS)


@dataclass(frozen=True)
class MeasuredParts:
    """What was counted of a model whose layers are of no kind that is known here."""

    layer_parameters: int
    """Mean of all layers."""
    root_parameters: int
    linear: tuple[tuple[str, int], ...]
    """Inputs and outputs of linear layers, of all layers together, by the last parts of their names."""
    kept_bfloat16: float
    """Mean bytes that a layer keeps of a token for backward; 0: not measured."""
    kept_float32: float
    routed_parameters: float
    """Mean of all layers, of the experts that a router chooses from."""
    growing_layers: int
    """Layers whose keys and values are those of all tokens before, or of more than `LONG_WINDOW` of them."""

    def kept(self, element_bytes: int) -> float:
        return self.kept_bfloat16 if element_bytes == 2 else self.kept_float32


@dataclass(frozen=True)
class ModelShape:
    """Numbers of one decoder. Widths are of all heads together."""

    num_layers: int
    hidden: int
    heads: int
    q_width: int
    kv_width: int
    head_dim: int
    mlp_width: int
    """Intermediate width of a dense layer's MLP, or of one expert."""
    vocabulary: int
    is_tied: bool = False
    """True if embedding and output layer are one tensor."""
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_head_norms: bool = False
    num_experts: int = 0
    """Experts of a layer; 0: the layers are dense."""
    experts_per_token: int = 1
    longest: int | None = None
    """Longest sequence, in tokens; None: not said."""
    tower: TowerShape | None = None
    """The vision tower; None: the model reads text only."""
    measured: MeasuredParts | None = None
    """What was counted, which stands before the formulas; None: formulas are exact."""

    @classmethod
    def of(cls, written: Mapping[str, Any]) -> "ModelShape | None":
        """Read a config.json. None for a kind of model that is not known here, and for one that lacks a size."""
        if written.get("model_type") not in TOWERS:
            return cls._of_text(written.get("model_type"), written, None)
        kind, text = str(written["model_type"]), written.get("text_config") or {}
        values = {**written, **text, "tie_word_embeddings": written.get("tie_word_embeddings", False)}
        tower = TowerShape.of(kind, written.get("vision_config") or {}, values.get("hidden_size") or 0)
        if tower is None:
            return None
        return cls._of_text(kind if kind in KNOWN else text.get("model_type"), values, tower)

    @classmethod
    def _of_text(cls, kind: Any, values: Mapping[str, Any], tower: TowerShape | None) -> "ModelShape | None":
        """`kind`: the model type that says how the text's layers are built."""
        heads, hidden = values.get("num_attention_heads"), values.get("hidden_size")
        if kind not in KNOWN or not heads or not hidden or values.get("mlp_only_layers"):
            return None
        if values.get("decoder_sparse_step", 1) != 1:
            return None
        head_dim = values.get("head_dim") or hidden // heads
        num_experts = values.get("num_experts") or values.get("num_local_experts") or 0
        has_bias = kind in WITH_QKV_BIAS or bool(values.get("attention_bias"))
        try:
            return cls(
                num_layers=values["num_hidden_layers"],
                hidden=hidden,
                heads=heads,
                q_width=heads * head_dim,
                kv_width=(values.get("num_key_value_heads") or heads) * head_dim,
                head_dim=head_dim,
                mlp_width=(num_experts and values.get("moe_intermediate_size")) or values["intermediate_size"],
                vocabulary=values["vocab_size"],
                is_tied=bool(values.get("tie_word_embeddings", False)),
                has_qkv_bias=has_bias,
                has_output_bias=has_bias and kind not in WITH_QKV_BIAS,
                has_head_norms=kind in WITH_HEAD_NORMS,
                num_experts=num_experts,
                experts_per_token=values.get("num_experts_per_tok", 1) if num_experts else 1,
                longest=longest_context(values),
                tower=tower,
            )
        except KeyError:
            return None

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's four projections, with biases."""
        weights = 2 * self.hidden * (self.q_width + self.kv_width)
        biases = self.has_qkv_bias * (self.q_width + 2 * self.kv_width) + self.has_output_bias * self.hidden
        return weights + biases

    @property
    def mlp_parameters(self) -> int:
        """Parameters of one layer's MLP, or of all of its experts and their router."""
        if self.measured is not None:
            return self.measured.layer_parameters - self.attention_parameters - self.norm_parameters
        one = 3 * self.hidden * self.mlp_width
        return self.num_experts * (one + self.hidden) if self.num_experts else one

    @property
    def routed_parameters(self) -> float:
        """Parameters of one layer's experts that a router chooses from, those that every token takes aside; 0: the
        layers are dense."""
        if self.measured is not None:
            return self.measured.routed_parameters
        return self.mlp_parameters if self.num_experts else 0

    @property
    def has_own_layers(self) -> bool:
        """True if no decoder of the kinds that are known here has these widths: with experts beside a dense MLP, latent
        or linear attention, or short windows."""
        measured = self.measured
        if measured is None:
            return False
        return bool(self.num_experts) or measured.growing_layers < self.num_layers or self.kv_width % self.head_dim > 0

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values, by which a cache can be split; 1 for a latent vector."""
        return max(1, self.kv_width // self.head_dim)

    @property
    def norm_parameters(self) -> int:
        return 2 * self.hidden + 2 * self.head_dim * self.has_head_norms

    @property
    def layer_parameters(self) -> int:
        return self.attention_parameters + self.mlp_parameters + self.norm_parameters

    @property
    def head_parameters(self) -> int:
        """Parameters of the output layer, which is the embedding where both are one."""
        return self.vocabulary * self.hidden

    @property
    def root_parameters(self) -> int:
        """Parameters outside of the layers: embedding, last norm, output layer."""
        if self.measured is not None:
            return self.measured.root_parameters
        return self.head_parameters * (1 if self.is_tied else 2) + self.hidden

    @property
    def num_parameters(self) -> int:
        """All parameters, with all experts and the vision tower; a tied tensor once."""
        return self.num_layers * self.layer_parameters + self.root_parameters + self.tower_parameters

    @property
    def tower_parameters(self) -> int:
        return self.tower.num_parameters if self.tower is not None else 0

    def adapter_parameters(self, rank: int, targets: Sequence[str] | None = None) -> int:
        """Parameters of LoRA's A and B around what is named so, by the last parts of names; None: around all linear
        layers but the head. Experts, which are no linear layers, only by name."""
        names = {ALL_LINEAR} if targets is None else {target.rpartition(".")[2] for target in targets}
        if self.measured is not None:
            return rank * sum(width for name, width in self.measured.linear if name in names or ALL_LINEAR in names)
        widths = {
            "q_proj": self.hidden + self.q_width,
            "k_proj": self.hidden + self.kv_width,
            "v_proj": self.hidden + self.kv_width,
            "o_proj": self.q_width + self.hidden,
        }
        if not self.num_experts:
            widths |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), self.hidden + self.mlp_width)
        chosen = [width for name, width in widths.items() if name in names or ALL_LINEAR in names]
        of_experts = self.num_experts * sum(num_in + num_out for num_in, num_out in self._stacks(names))
        return self.num_layers * rank * (sum(chosen) + of_experts)

    def adapted_experts(self, targets: Sequence[str]) -> int:
        """Parameters of one layer's experts that LoRA is added to: those that are named so."""
        names = {target.rpartition(".")[2] for target in targets}
        return self.num_experts * sum(num_in * num_out for num_in, num_out in self._stacks(names))

    def _stacks(self, names: Collection[str]) -> list[tuple[int, int]]:
        """Inputs and outputs of an expert's weights that are among these, by transformers' names of the stacks."""
        widths = {"gate_up_proj": (self.hidden, 2 * self.mlp_width), "down_proj": (self.mlp_width, self.hidden)}
        return [width for name, width in widths.items() if name in names and self.num_experts]

    @property
    def record_bytes(self) -> int:
        """Bytes that name the experts of a token (`workers/models/routed_experts.py`); 0: the layers are dense."""
        width = 1 if self.num_experts <= 256 else 2
        return bool(self.num_experts) * width * self.num_layers * self.experts_per_token

    @property
    def cache_elements(self) -> int:
        """Elements of keys and values of one token in all layers that keep them."""
        layers = self.num_layers if self.measured is None else self.measured.growing_layers
        return 2 * layers * self.kv_width


def fresh_shape(model: FreshModelConfig) -> ModelShape:
    """The sizes of the model that `build_fresh_model` makes."""
    kind = "qwen3_moe" if model.num_experts else "qwen2"
    shape = ModelShape.of(
        {
            "model_type": FAMILY if model.num_vision_layers else kind,
            "num_experts": model.num_experts,
            "num_experts_per_tok": model.experts_per_token,
            "hidden_size": model.hidden_size,
            "intermediate_size": model.intermediate_size,
            "num_hidden_layers": model.num_layers,
            "num_attention_heads": model.num_heads,
            "num_key_value_heads": model.num_kv_heads,
            "vocab_size": vocabulary_size(model),
            "tie_word_embeddings": True,
            "max_position_embeddings": model.max_position_embeddings,
            **(vision_config(model, first_id=0) if model.num_vision_layers else {}),
        }
    )
    assert shape is not None
    return shape
