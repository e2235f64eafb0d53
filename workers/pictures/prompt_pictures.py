"""The pictures of a prompt: the bytes of PNG or JPEG, whatever they come as, and their places in the prompt's tokens.
Pure.

A tokenizer writes one placeholder for a picture. The model reads as many as the picture has features: they are expanded
here, once, and everything after that reads expanded tokens and the ranges of each picture in them.

    unexpanded   What is <start><pad><end>?            one <pad> a picture
    expanded     What is <start><pad>…<pad><end>?      one <pad> a feature
    ranges       [(3, 6)]                              offset and length, in the order of the pictures
"""

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from penstock.conf.errors import DataError

Range = tuple[int, int]
"""Offset of a picture's first placeholder in the expanded tokens, and the number of its placeholders."""
KINDS = ("PNG", "JPEG")
"""Formats that are kept as they are. Others are written as PNG, which loses nothing."""
READ = (*KINDS, "WEBP", "GIF")
"""Formats that are read. Others have decoders that start programs or are rarely looked at."""
MOST_PIXELS = 2**25
"""Most pixels of a picture, by its head: more than any model reads, and a tenth of a second's work."""
PNG = b"\x89PNG"
"""First bytes of a PNG."""


@dataclass(frozen=True)
class PromptPictures:
    """The pictures of one prompt, in the order of their places in it."""

    encoded: tuple[bytes, ...]
    """PNG or JPEG, as the dataset has them."""
    ranges: tuple[Range, ...]

    @classmethod
    def of(cls, columns: Mapping[str, Any]) -> "PromptPictures | None":
        """The pictures of a prompt by its columns, or of a task, which has no ranges; None where there are none."""
        if not len(columns.get("pictures", ())):
            return None
        flat = [int(number) for number in columns.get("picture_ranges", ())]
        return cls(tuple(map(bytes, columns["pictures"])), tuple(zip(flat[::2], flat[1::2], strict=True)))

    def columns(self) -> dict[str, list[Any]]:
        """The columns of a group whose prompt has these pictures."""
        return {"pictures": list(self.encoded), "picture_ranges": [number for one in self.ranges for number in one]}


NO_PICTURES = PromptPictures((), ())
"""Those of a prompt without any, in a run with pictures."""


def expanded(ids: Sequence[int], placeholder: int, lengths: Sequence[int]) -> tuple[list[int], list[Range]]:
    """Expand the placeholder of each picture to as many as it has features.

    `lengths`: features of each picture. Raises `DataError` for tokens that have another number of placeholders than
    there are pictures, also because they are expanded already: expanded again, they would be another prompt.

    >>> expanded([7, 1, 8, 1, 9], 1, [3, 2])
    ([7, 1, 1, 1, 8, 1, 1, 9], [(1, 3), (5, 2)])
    """
    found = [place for place, token in enumerate(ids) if token == placeholder]
    if len(found) != len(lengths):
        doubled = any(second == first + 1 for first, second in pairwise(found))
        why = (
            "These tokens are expanded already, and would be expanded twice: give the ones that the tokenizer wrote."
            if doubled
            else "A prompt has one placeholder for each of its pictures."
        )
        raise DataError(f"{len(found)} placeholders (token {placeholder}) for {len(lengths)} pictures. {why}")
    tokens: list[int] = []
    ranges = []
    begin = 0
    for place, length in zip(found, lengths, strict=True):
        tokens += ids[begin:place]
        ranges.append((len(tokens), length))
        tokens += [placeholder] * length
        begin = place + 1
    return [*tokens, *ids[begin:]], ranges


def check_ranges(ids: Sequence[int], ranges: Sequence[Range], placeholder: int, lengths: Sequence[int]) -> None:
    """Check that expanded tokens and pictures belong together: every range has the length of its picture and holds
    placeholders, one after the other, and there are none outside. Raises `DataError` that says which does not."""
    if len(ranges) != len(lengths):
        raise DataError(f"{len(ranges)} ranges of placeholders for {len(lengths)} pictures.")
    end = 0
    for number, ((offset, length), features) in enumerate(zip(ranges, lengths, strict=True), 1):
        if length != features:
            raise DataError(f"picture {number} has {features} features, and {length} placeholders in the prompt.")
        if offset < end or any(token != placeholder for token in ids[offset : offset + length]):
            raise DataError(
                f"picture {number}: its range ({offset}, {length}) holds other tokens than its placeholders."
            )
        end = offset + length
    num_placed = sum(length for _, length in ranges)
    if (total := sum(token == placeholder for token in ids)) != num_placed or end > len(ids):
        raise DataError(
            f"{total} placeholders (token {placeholder}) in a prompt whose pictures have {num_placed} features. Its "
            "tokens were cut, expanded twice, or lost a picture."
        )


def encoded(data: bytes, *, reads_pixels: bool = True) -> bytes:
    """The same picture as PNG or JPEG. `reads_pixels`: also of one that is kept as it is. Raises `OSError`,
    `ValueError`, `SyntaxError` for what is no picture, or is cut short."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data), formats=READ) as image:
            if image.width * image.height > MOST_PIXELS:
                raise ValueError(f"it has {image.width} x {image.height} pixels, and {MOST_PIXELS:,} at most are read")
            is_kept = image.format in KINDS
            if reads_pixels or not is_kept:
                image.load()
            return data if is_kept else as_png(image)
    except UnidentifiedImageError:
        raise ValueError(f"its {len(data)} bytes are no picture in {', '.join(READ)}") from None
    except Image.DecompressionBombError as error:
        raise ValueError(str(error)) from None


def is_image(value: Any) -> bool:
    """Return whether a value is an image of PIL's."""
    return hasattr(value, "save") and hasattr(value, "getbands")


def as_png(image: Any) -> bytes:
    """An image of PIL's as PNG. Raises `OSError`."""
    written = io.BytesIO()
    image.save(written, format="PNG")
    return written.getvalue()


def bytes_of_url(url: str) -> bytes:
    """The bytes in a `data:` URL. Raises `ValueError`."""
    head, _, data = url.partition(",")
    if not head.endswith(";base64"):
        raise ValueError(f"{head[:40]} is not in base64")
    return bytes_of_base64(data)


def url_of(picture: bytes) -> str:
    """The `data:` URL of a picture that is kept."""
    kind = "png" if picture.startswith(PNG) else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(picture).decode()}"


def bytes_of_base64(text: str) -> bytes:
    """The bytes that a text in base64 stands for. Raises `ValueError`."""
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"it is no base64: {error}") from None
