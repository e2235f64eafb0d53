"""The sizes of a model that its memory depends on, read from its config.json alone. Pure: no torch, no weights.

Known are decoders of one kind: attention by heads, then a gated MLP or experts that are gated MLPs, as Llama, Mistral,
Mixtral, Qwen2 and Qwen3 are, and the text of Qwen2-VL and Qwen2.5-VL with their vision towers. Others have None for a
shape: no figure is better than a wrong one.

    patch [C] ─▶ embedding ─▶ blocks: norm, attention, norm, MLP ─▶ merger: norm, two products ─▶ a feature of [H]

A tower's activations are an estimate: one operation after the other, as `rank_memory.py` counts those of text.

Legend: C numbers of a patch, D width of the tower, I width of its MLP, M patches of a feature, H hidden of the text.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.conf.trainer import ALL_LINEAR
from penstock.workers.models.model_files import longest_context

FLOAT32 = 4


@dataclass(frozen=True)
class TowerShape:
    """Numbers of one tower."""

    num_layers: int
    width: int
    mlp_width: int
    patch_numbers: int
    """Numbers of a patch: pixels of all its channels and frames."""
    merged: int
    """Patches of one feature."""
    out_width: int
    is_gated: bool
    """True if MLPs are gated, and norms have no bias, as in Qwen2.5-VL."""

    @classmethod
    def of(cls, kind: str, values: Mapping[str, Any]) -> "TowerShape | None":
        """Read a `vision_config`. `kind`: the model's. None for one that is not known here, or lacks a size."""
        is_gated = kind == "qwen2_5_vl"
        if kind not in ("qwen2_vl", "qwen2_5_vl"):
            return None
        try:
            width = values["hidden_size" if is_gated else "embed_dim"]
            pixels = values.get("in_channels", values.get("in_chans", 3)) * values["patch_size"] ** 2
            return cls(
                num_layers=values["depth"],
                width=width,
                mlp_width=values["intermediate_size"] if is_gated else int(width * values["mlp_ratio"]),
                patch_numbers=pixels * values["temporal_patch_size"],
                merged=values["spatial_merge_size"] ** 2,
                out_width=values["out_hidden_size" if is_gated else "hidden_size"],
                is_gated=is_gated,
            )
        except (KeyError, TypeError):
            return None

    @property
    def block_parameters(self) -> int:
        """Parameters of one block, biases included."""
        attention = 4 * self.width * self.width + 4 * self.width
        mlp = (3 if self.is_gated else 2) * self.width * self.mlp_width
        biases = (2 if self.is_gated else 1) * self.mlp_width + self.width
        return attention + mlp + biases + 2 * self._norm_parameters

    @property
    def root_parameters(self) -> int:
        """Parameters of the embedding and of the merger, which are gathered with the root's."""
        wide = self.width * self.merged
        merger = wide * wide + wide + wide * self.out_width + self.out_width
        return self.patch_numbers * self.width + self._norm_parameters + merger

    @property
    def num_parameters(self) -> int:
        return self.num_layers * self.block_parameters + self.root_parameters

    def block_saved(self, element_bytes: int) -> int:
        """Bytes that a block keeps of a patch for its backward: norms' inputs and results; q, k and v, the first two
        once more as they are turned, and the result; what its MLP makes."""
        norms = 2 * (FLOAT32 + 2 * element_bytes) * self.width
        attention = 6 * element_bytes * self.width
        return norms + attention + (4 if self.is_gated else 2) * element_bytes * self.mlp_width

    @property
    def _norm_parameters(self) -> int:
        return self.width if self.is_gated else 2 * self.width


WITH_TOWER = ("qwen2_vl", "qwen2_5_vl")
"""Model types that see."""
WITH_QKV_BIAS = ("qwen2", *WITH_TOWER)
"""Model types whose q, k and v always have biases; others say so by `attention_bias`."""
WITH_HEAD_NORMS = ("qwen3", "qwen3_moe")
"""Model types that normalise each head of q and k."""
KNOWN = ("llama", "mistral", "mixtral", *WITH_QKV_BIAS, *WITH_HEAD_NORMS)


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
    """The part that sees; None: the model reads text only."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "ModelShape | None":
        """Read a config.json. None for a kind of model that is not known here, and for one that lacks a size."""
        kind, tower = values.get("model_type"), None
        if kind in WITH_TOWER:
            tower = TowerShape.of(kind, values.get("vision_config") or {})
            if tower is None:
                return None
            values = {**values, **(values.get("text_config") or {})} | {
                "tie_word_embeddings": values.get("tie_word_embeddings", False)
            }
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
        one = 3 * self.hidden * self.mlp_width
        return self.num_experts * (one + self.hidden) if self.num_experts else one

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
        return self.head_parameters * (1 if self.is_tied else 2) + self.hidden

    @property
    def num_parameters(self) -> int:
        """All parameters, experts that a token does not see and the tower that sees included; a tied tensor once."""
        return self.num_layers * self.layer_parameters + self.root_parameters + self.tower_parameters

    @property
    def tower_parameters(self) -> int:
        return self.tower.num_parameters if self.tower is not None else 0

    def adapter_parameters(self, rank: int, targets: Sequence[str] | None = None) -> int:
        """Parameters of LoRA's A and B around what is named so, by the last parts of names; None: around all linear
        layers but the head. Experts, which are no linear layers, only by name."""
        widths = {
            "q_proj": self.hidden + self.q_width,
            "k_proj": self.hidden + self.kv_width,
            "v_proj": self.hidden + self.kv_width,
            "o_proj": self.q_width + self.hidden,
        }
        if not self.num_experts:
            widths |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), self.hidden + self.mlp_width)
        names = {ALL_LINEAR} if targets is None else {target.rpartition(".")[2] for target in targets}
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
        """Elements of keys and values of one token in all layers."""
        return 2 * self.num_layers * self.kv_width
