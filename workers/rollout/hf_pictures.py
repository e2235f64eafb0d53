"""What transformers' models that see are called with: the prompt with its pictures, and each token after it.

Positions are given with every call. A model's own are found by what it has read last: after a prompt with pictures, the
tokens that follow a text without any would be placed as if it had some.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.workers.pictures.placeholders import PromptPictures
from penstock.workers.pictures.processor import PictureProcessor


@dataclass(frozen=True)
class SeenPrompt:
    """Legend: B rows of a group, L tokens of the prompt."""

    inputs: Mapping[str, torch.Tensor]
    """Arguments of the forward pass of the prompt, beside its tokens."""
    position: int
    """Position of the first token after the prompt, on all axes (M-RoPE, arXiv 2409.12191)."""

    @classmethod
    def of(
        cls, lm: Any, processor: PictureProcessor, prompt_ids: Sequence[int], pictures: PromptPictures | None
    ) -> "SeenPrompt":
        """Read a prompt. Raises `DataError` where tokens and pictures do not belong together."""
        features, family = processor.checked_features(prompt_ids, pictures), processor.family
        positions_1L = torch.arange(len(prompt_ids))[None]
        position_ids = positions_1L.expand(3, 1, -1) if family.has_grids else positions_1L
        inputs: dict[str, torch.Tensor] = {}
        if features is not None and pictures is not None:
            inputs = family.inputs(torch.from_numpy(features.pixel_values), torch.from_numpy(features.grid_thw))
            if family.has_grids:
                kinds_1L = torch.zeros(1, len(prompt_ids), dtype=torch.int32)
                for offset, length in pictures.ranges:
                    kinds_1L[0, offset : offset + length] = 1
                ids_1L, grids = torch.tensor([list(prompt_ids)]), inputs["image_grid_thw"]
                position_ids, _ = lm.model.get_rope_index(ids_1L, kinds_1L, image_grid_thw=grids)
        inputs["position_ids"] = position_ids
        return cls({name: value.to(lm.device) for name, value in inputs.items()}, int(position_ids.max()) + 1)

    def later(self, num_before: int, num_rows: int) -> dict[str, torch.Tensor]:
        """Arguments of the forward pass of the token that `num_before` sampled ones lie before."""
        first = self.inputs["position_ids"]
        shape = (*first.shape[:-2], num_rows, 1)
        return {"position_ids": torch.full(shape, self.position + num_before, device=first.device)}
