"""From encoded pictures to what a model reads of them: the properties of each family of vision models, as data and pure
functions, and one processor, the same for prompts, engines, the gateway and the trainer. Its `digest` says whether two
processes have the same.

    expand    unexpanded tokens and pictures ─▶ expanded tokens, ranges
    features  pictures ─▶ patches of pixels and their grid, bit for bit the same wherever the digest is

    family     a picture becomes                     positions of its features    features go
    Qwen-VL    patches of its own grid, by fours     in time, height and width    among the embeddings; in Qwen3-VL to
                                                                                  the first layers, too
    LLaVA      a square of so many features          as those of text             among the embeddings

The vision tower returns what goes to layers (DeepStack, arXiv 2406.04334), and nothing here needs to know.

The image processor is transformers' own on PIL, and not the one on torchvision: the two resize differently in the last
bits, and PIL is wherever a picture is read. transformers is imported by `PictureProcessor.of`; torch is not needed.
"""

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from penstock.conf.errors import ConfigError, DataError
from penstock.workers.pictures.prompt_pictures import KINDS, PromptPictures, Range, check_ranges, expanded

Grid = tuple[int, int, int]
T = TypeVar("T")
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
BACKENDS = ("", "Fast", "Pil")
"""Ends of an image processor's name in models' files."""
ORIENTATION = 0x0112
"""EXIF tag of how a camera was held; from 5 on, height and width change places."""


@dataclass(frozen=True)
class Family:
    """Models of one type whose pictures keep their shapes: the tower gets the grid of each one's patches, and its
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


def auto_class(config: Any) -> Any:
    """The class of transformers that makes a model of a configuration: for text, or for text and pictures."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if config.model_type in FAMILIES else AutoModelForCausalLM


def refusal(kind: Any, sees: bool = True) -> str:
    """The sentence about a model whose pictures are not read."""
    why = f" ({LACKS[kind]})" if kind in LACKS else ""
    what = f"a model that sees, of a family that is not{why}" if sees else "a model of text, not"
    return f"{what} among those whose pictures are read: {', '.join(FAMILIES)}"


if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Features:
    """What a model reads of some pictures, those of one picture after the other."""

    pixel_values: np.ndarray
    """`[patches, channels * frames * height * width of a patch]` float32; of a family without grids `[pictures,
    channels, height, width]`."""
    grid_thw: np.ndarray
    """`[pictures, 3]` int64: patches in time, height and width."""


def configuration(model_path: str) -> Mapping[str, Any]:
    """What a model's config.json holds. Raises `OSError`."""
    from transformers import PretrainedConfig

    return PretrainedConfig.get_config_dict(model_path)[0]


class PictureProcessor:
    """Made by `of`; then it has no state.

    >>> processor = PictureProcessor.of("Qwen/Qwen2.5-VL-3B-Instruct")
    >>> ids, ranges = processor.expand(ids, [Path("cat.png").read_bytes()])
    """

    def __init__(self, family: Family, token_ids: Sequence[int], image_processor: Any, config: Any = None) -> None:
        """`token_ids`: those that the family names. `image_processor`, `config`: transformers'; the model's
        configuration is needed for a family without grids."""
        self.family, self.token_ids, self._images, self._config = family, tuple(token_ids), image_processor, config
        """`token_ids`: special tokens of vision. A policy must never sample them."""

    @classmethod
    def of(cls, model_path: str, digest: str | None = None) -> "PictureProcessor":
        """Make the processor of a model. `digest`: of the run's processor, which this one has to be; None: it is of no
        run. Raises `ConfigError` for a model whose pictures are not read here, and for another processor."""
        import transformers

        values = configuration(model_path)
        kind = values.get("model_type")
        family = FAMILIES.get(str(kind))
        if family is None:
            sees = values.get("vision_config") is not None
            raise ConfigError(
                f"model.path={model_path}: model_type={kind} is {refusal(kind, sees)}. Choose one of them, or leave "
                "the pictures out."
            )
        maker: Any = getattr(transformers, f"{family.image_processor}Pil")
        try:
            settings, _ = maker.get_image_processor_dict(model_path)
        except OSError as error:
            raise ConfigError(
                f"model.path={model_path}: how it reads pictures cannot be read ({str(error).partition('.')[0]}). Save "
                "its processor there: processor.save_pretrained(DIRECTORY), which writes preprocessor_config.json."
            ) from None
        named = settings.get("image_processor_type", family.image_processor)
        if named not in {family.image_processor + backend for backend in BACKENDS}:
            raise ConfigError(
                f"model.path={model_path}: its image processor is {named}, where {family.image_processor} is known. "
                "Choose a model with that one."
            )
        lacks = [name for name in family.tokens if not isinstance(values.get(name), int)]
        if lacks:
            raise ConfigError(f"model.path={model_path}: its config.json lacks {', '.join(lacks)}. Add them to it.")
        config = transformers.AutoConfig.from_pretrained(model_path)
        family.check(config)
        processor = cls(family, [values[name] for name in family.tokens], maker(**_kept(settings)), config)
        if digest is not None:
            processor.check_digest(digest)
        return processor

    @classmethod
    def of_or_none(cls, model_path: str, digest: str | None = None) -> "PictureProcessor | None":
        """Make the processor of a model, as `of` does; None for a model whose pictures are not read here, which may be
        used for text. Raises `ConfigError`."""
        sees = digest is not None or configuration(model_path).get("model_type") in FAMILIES
        return cls.of(model_path, digest) if sees else None

    @property
    def placeholder(self) -> int:
        """Token that stands for a picture's features."""
        return self.token_ids[0]

    @property
    def unexpanded(self) -> tuple[int, ...]:
        """Tokens that stand for a picture before it is expanded, with those around it."""
        return tuple(self.token_ids[self.family.tokens.index(name)] for name in self.family.unexpanded)

    @cached_property
    def digest(self) -> str:
        """Hash of all that features and places depend on: versions, the processor's class and settings, tokens."""
        import PIL
        import transformers

        parts = {
            "family": self.family.kind,
            "tokens": self.token_ids,
            "class": type(self._images).__name__,
            "settings": json.loads(self._images.to_json_string()),
            "versions": {"transformers": transformers.__version__, "pillow": PIL.__version__, "numpy": np.__version__},
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def check_digest(self, of_run: str) -> None:
        """Refuse to read pictures of a run whose processor is another one. Raises `ConfigError`."""
        if of_run != self.digest:
            raise ConfigError(
                f"this process reads pictures otherwise than the one that started the run (digest {self.digest:.12}, "
                f"there {of_run:.12}): the versions of transformers, pillow or numpy, or the model's "
                "preprocessor_config.json, differ. Install the same lock and the same model on all machines."
            )

    def expand(self, ids: Sequence[int], pictures: Sequence[bytes]) -> tuple[list[int], list[Range]]:
        """Expand tokens with one placeholder a picture. Returns them and the range of each picture. Raises `DataError`
        for tokens that are expanded already, and for pictures that cannot be read."""
        return expanded(ids, self.placeholder, [self.length_of(picture) for picture in pictures])

    def length_of(self, picture: bytes) -> int:
        """Number of features, and so of placeholders, of a picture. Reads its size, not its pixels."""
        width, height = size_of(picture)
        try:
            return self.family.length(self._config, self._images, height, width)
        except ValueError as error:  # such as one that is 200 times as wide as high
            raise DataError(f"a picture of {width} x {height} pixels: {error}") from None

    def features(self, pictures: Sequence[bytes]) -> Features:
        """What the model reads of at least one picture. Raises `DataError`."""
        try:
            found = self._images([rgb_image(picture) for picture in pictures], return_tensors="np")
        except ValueError as error:
            raise DataError(f"pictures that the processor cannot take: {error}") from None
        grids = self.family.grids(self._config, found)
        return Features(np.asarray(found["pixel_values"], np.float32), grids)

    def checked_features(self, ids: Sequence[int], pictures: PromptPictures | None) -> Features | None:
        """Features of a prompt's pictures, which its expanded tokens have places for; None for no pictures. Raises
        `DataError` where tokens and pictures do not belong together: a prompt that has lost its pictures is told from a
        text by its placeholders."""
        found = self.features(pictures.encoded) if pictures is not None and pictures.encoded else None
        lengths = self.family.lengths(found.grid_thw, self._images) if found is not None else []
        check_ranges(ids, pictures.ranges if pictures is not None else (), self.placeholder, lengths)
        return found


def check_pictures(
    processor: PictureProcessor | None, pictures: PromptPictures | None, most: int, model_path: str
) -> None:
    """Refuse pictures that the model of an engine cannot see, or more than `most`. Raises `DataError`, and
    `ConfigError` for the model."""
    count = 0 if pictures is None else len(pictures.encoded)
    if count and processor is None:
        PictureProcessor.of(model_path)  # raises, and says why
    if count > most:
        raise DataError(f"{count} pictures in a prompt, and rollout.max_pictures={most}. Raise it, or filter the data.")


def hash_of(picture: bytes) -> str:
    """Hash of a picture's content, by which engines and the store keep it once."""
    return hashlib.blake2b(picture, digest_size=20).hexdigest()


def rgb_image(picture: bytes) -> "Image":
    """The picture as RGB pixels, turned as its camera was held. Raises `DataError`."""
    from PIL import ImageOps

    image = _open_head(picture)
    try:
        return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"a picture of {len(picture)} bytes is damaged: {error}") from None


def size_of(picture: bytes) -> tuple[int, int]:
    """Width and height that the opened picture will have, without reading its pixels. Raises `DataError`."""
    image = _open_head(picture)
    width, height = image.size
    return (height, width) if image.getexif().get(ORIENTATION, 1) >= 5 else (width, height)


def _open_head(picture: bytes) -> "Image":
    """The picture, of which the head is read."""
    from PIL import Image

    try:
        return Image.open(io.BytesIO(picture), formats=KINDS)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(
            f"a picture of {len(picture)} bytes is no {' or '.join(KINDS)} that can be read: {error}"
        ) from None


def _kept(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the image processor, without the names of classes."""
    return {name: value for name, value in settings.items() if not name.endswith("_type") and name != "processor_class"}
