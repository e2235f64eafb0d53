"""The sizes of a vision tower that its memory depends on, read from the `vision_config` of a config.json. Pure.

    patch [C] ─▶ embedding ─▶ blocks: norm, attention, norm, MLP ─▶ merger: norm, two products ─▶ a feature of [H]

Known are the towers of Qwen2-VL and Qwen2.5-VL. Activations are an estimate: one operation after the other, as
`activations.py` counts those of text.

Legend: C numbers of a patch, D width of the tower, I width of its MLP, M patches of a feature, H hidden of the text.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
