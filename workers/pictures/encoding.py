"""Pictures as they are kept: the bytes of PNG or JPEG, whatever they come as."""

import base64
import binascii
import io
from typing import Any

KINDS = ("PNG", "JPEG")
"""Formats that are kept as they are. Others are written as PNG, which loses nothing."""
READ = (*KINDS, "WEBP", "GIF")
"""Formats that are read. Others have decoders that start programs or are rarely looked at."""
MOST_PIXELS = 2**25
"""Most pixels of a picture, by its head: more than any model reads, and a tenth of a second's work."""
PNG = b"\x89PNG"
"""First bytes of a PNG."""


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
