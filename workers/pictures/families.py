"""Families of models that see: what is peculiar to each, as data and pure functions.

    family     a picture becomes                     positions of its features    features go
    Qwen-VL    patches of its own grid, by fours     in time, height and width    among the embeddings; in Qwen3-VL to
                                                                                  the first layers, too
    LLaVA      a square of so many features          as those of text             among the embeddings

What goes to layers (DeepStack, arXiv 2406.04334) is told by what a tower returns, and needs no word here.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from penstock.conf.errors import ConfigError

Grid = tuple[int, int, int]
T = TypeVar("T")


@dataclass(frozen=True)
class Family:
    """Models of one type whose pictures keep their shapes: the tower is told the grid of each one's patches, and its
    features have positions on three axes (M-RoPE, arXiv 2409.12191)."""

    kind: str
    """`model_type` of their configurations."""
    image_processor: str = "Qwen2VLImageProcessor"
    """Name of the image processor in models' files. They may add the backend to it: `Fast`, or `Pil`."""
    tokens: tuple[str, ...] = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    """Special tokens of vision, as models' configurations name them; the first is the placeholder."""
    unexpanded: tuple[str, ...] = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
    """Those that stand for a picture before it is expanded."""
    tower: tuple[str, ...] = ("visual",)
    """Modules of the base model that make the features."""

    @property
    def has_grids(self) -> bool:
        """True if pictures keep their shapes."""
        return True

    def check(self, config: Any) -> None:
        """Refuse a configuration (transformers') with a tower that is not known. Raises `ConfigError`."""

    def merge(self, config: Any) -> int:
        """Patches of a feature in height and in width."""
        return int(config.vision_config.spatial_merge_size)

    def length(self, config: Any, images: Any, height: int, width: int) -> int:
        """Features of a picture of so many pixels. `images`: its image processor. Raises `ValueError` for a picture
        that it cannot take."""
        return int(images.get_number_of_image_patches(height, width)) // int(images.merge_size) ** 2

    def lengths(self, grids: np.ndarray, images: Any) -> list[int]:
        """Features of pictures by their grids."""
        return [int(number) // int(images.merge_size) ** 2 for number in grids.prod(-1)]

    def grids(self, config: Any, found: Any) -> np.ndarray:
        """Patches of each picture in time, height and width, `[pictures, 3]` int64. `found`: what the image processor
        has made of them."""
        return np.asarray(found["image_grid_thw"], np.int64)

    def num_rows(self, grids: np.ndarray) -> list[int]:
        """Rows of `pixel_values` that each picture has."""
        return [int(number) for number in grids.prod(-1)]

    def inputs(self, pixel_values: T, grids: T) -> dict[str, T]:
        """Keyword arguments of a tower, by the names that transformers and vLLM have for them."""
        return {"pixel_values": pixel_values, "image_grid_thw": grids}

    def blank(self, config: Any) -> tuple[np.ndarray, Grid]:
        """Pixels, all zero, and grid of the smallest picture."""
        vision, merge = config.vision_config, self.merge(config)
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return np.zeros((merge * merge, width), np.float32), (1, merge, merge)


@dataclass(frozen=True)
class LineFamily(Family):
    """Models that see each picture as a square of one size. Its grid is a line of features: the last axis of its
    positions then counts as text does, and it is the only one that the model reads."""

    image_processor: str = "CLIPImageProcessor"
    tokens: tuple[str, ...] = ("image_token_index",)
    unexpanded: tuple[str, ...] = ("image_token_index",)
    tower: tuple[str, ...] = ("vision_tower", "multi_modal_projector")

    @property
    def has_grids(self) -> bool:
        return False

    def check(self, config: Any) -> None:
        if (kind := config.vision_config.model_type) != "clip_vision_model":
            raise ConfigError(
                f"model.path: a {self.kind} with the tower {kind!r}: known is clip_vision_model, whose features are as "
                "many for every picture. Choose such a model."
            )

    def merge(self, config: Any) -> int:
        return 1

    def length(self, config: Any, images: Any = None, height: int = 0, width: int = 0) -> int:
        """Features of any picture: one a patch, and the one of the whole picture where the model keeps it."""
        vision = config.vision_config
        return int((vision.image_size // vision.patch_size) ** 2 + (config.vision_feature_select_strategy == "full"))

    def lengths(self, grids: np.ndarray, images: Any) -> list[int]:
        return [int(number) for number in grids.prod(-1)]

    def grids(self, config: Any, found: Any) -> np.ndarray:
        return np.array([(1, 1, self.length(config))] * len(found["pixel_values"]), np.int64)

    def num_rows(self, grids: np.ndarray) -> list[int]:
        return [1] * len(grids)

    def inputs(self, pixel_values: T, grids: T) -> dict[str, T]:
        return {"pixel_values": pixel_values}

    def blank(self, config: Any) -> tuple[np.ndarray, Grid]:
        vision = config.vision_config
        shape = (1, vision.num_channels, vision.image_size, vision.image_size)
        return np.zeros(shape, np.float32), (1, 1, self.length(config))


FAMILIES = {
    family.kind: family
    for family in (Family("qwen2_vl"), Family("qwen2_5_vl"), Family("qwen3_vl"), LineFamily("llava"))
}
"""Families whose pictures are read, by the model type."""
_TILES = "a large picture is cut into tiles, whose placeholders have other tokens among them"
_BOTH_WAYS = "tokens of one picture attend to each other in both directions, and the trainer's attention is causal"
_UNTRIED = "its pictures have qwen3_vl's positions, and trainer and engines have not been compared"
LACKS = {
    "idefics3": _TILES,
    "smolvlm": _TILES,
    "llava_next": "features of a picture's tiles are put together, with learned ones at the ends of lines",
    "mistral3": "the placeholders of a picture have tokens for the ends of its lines among them",
    "gemma3": _BOTH_WAYS,
    "paligemma": _BOTH_WAYS,
    "qwen3_vl_moe": _UNTRIED,
    "qwen3_5": _UNTRIED,
    "mllama": "its layers look at pictures by cross-attention, and its tokens have no placeholders",
}
"""Why pictures of other models are not read here, by their type."""


def auto_class(config: Any) -> Any:
    """The class of transformers that makes a model of a configuration: for text, or for text and pictures."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if config.model_type in FAMILIES else AutoModelForCausalLM


def refusal(kind: Any, sees: bool = True) -> str:
    """What to tell of a model whose pictures are not read."""
    why = f" ({LACKS[kind]})" if kind in LACKS else ""
    what = f"a model that sees, of a family that is not{why}" if sees else "a model of text, not"
    return f"{what} among those whose pictures are read: {', '.join(FAMILIES)}"
