"""Pictures within a page that is one file: small, each once as a rule of the page's style, and up to a size in all.

text with marks, or a message's parts ─▶ `of_text`, `of_parts` ─▶ pieces: texts, and pictures at their places
                                                               ─▶ `style`: a rule for each picture
"""

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.orchestrator.observability.runs.own_files import read_own
from penstock.orchestrator.run_directory.pictures import FOLDER, MOST_BYTES, NAME
from penstock.workers.prompts.pictures import MARK

SHOWN, OPENED = 120, 400
"""Longest edges of a picture at its place and once it is clicked, in pixels: of what the page holds, too."""
AS_IT_IS = 1 << 15
"""Bytes up to which a picture is embedded as it is, if it is no larger than `OPENED`."""
IN_ALL = 1 << 21
"""Most bytes of a page's pictures. Further ones are told in words."""
QUALITY = 80
"""JPEG's, of pictures that are made smaller."""


@dataclass(frozen=True)
class Shown:
    """A picture at a place."""

    text: str
    """The picture in words: `[picture 56x84, 2.1 kB]`."""
    rule: str | None = None
    """Class of the page's style that shows it; None: it is told in words."""


Piece = str | Shown


class EmbeddedPictures:
    """Lifecycle: `of_text` and `of_parts` for each text, then `style`."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._known: dict[str, Shown] = {}
        self._rules: list[str] = []
        self._left_bytes = IN_ALL

    @property
    def style(self) -> str:
        return "\n".join(self._rules)

    def of_text(self, text: str, names: Sequence[Any], told: Callable[[str], str]) -> list[Piece]:
        """Pieces of a prompt's last text: its marks are the last pictures, and what stands before it had the others.
        `names`: those in `pictures/`; None for one that was not kept. `told`: the text, or its beginning."""
        if not names:
            return [told(text)]
        num_earlier = max(0, len(names) - text.count(MARK))
        first, *rest = told(text).split(MARK)
        pieces: list[Piece] = [*map(self._shown, names[:num_earlier]), first]
        for number, after in enumerate(rest, num_earlier):
            pieces += [self._shown(names[number]) if number < len(names) else MARK, after]
        return pieces

    def of_parts(self, parts: Sequence[Any], names: Sequence[Any], told: Callable[[str], str]) -> list[Piece]:
        """Pieces of a message in parts. `told`: as `of_text` takes it."""
        return [
            self._shown(_entry(names, part.get("picture")))
            if isinstance(part, dict) and part.get("type") == "image"
            else told(str(part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part))
            for part in parts
        ]

    def _shown(self, name: Any) -> Shown:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            return Shown("[picture, which was not kept]")
        if name not in self._known:
            self._known[name] = self._embedded(name)
        return self._known[name]

    def _embedded(self, name: str) -> Shown:
        from PIL import Image

        try:
            data = read_own(self._run, f"{FOLDER}/{name}", MOST_BYTES)
            with Image.open(io.BytesIO(data), formats=("PNG", "JPEG")) as image:
                text = f"[picture {image.width}x{image.height}, {len(data) / 1000:,.1f} kB]"
                kind, small, size = _small(image, data)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            return Shown("[picture, which cannot be read]")
        if len(small) > self._left_bytes:
            return Shown(text)
        self._left_bytes -= len(small)
        rule = f"picture-{len(self._rules)}"
        self._rules.append(_rule(rule, size, f"data:image/{kind};base64,{base64.b64encode(small).decode()}"))
        return Shown(text, rule)


def _entry(names: Sequence[Any], number: Any) -> Any:
    return names[number] if isinstance(number, int) and 0 <= number < len(names) else None


def _small(image: Any, data: bytes) -> tuple[str, bytes, tuple[int, int]]:
    """Format, bytes and size of what is embedded. Raises what PIL does."""
    from PIL import ImageOps

    if len(data) <= AS_IT_IS and max(image.size) <= OPENED:
        return str(image.format).lower(), data, image.size
    turned = ImageOps.exif_transpose(image)
    turned.thumbnail((OPENED, OPENED))
    written = io.BytesIO()
    turned.convert("RGB").save(written, "JPEG", quality=QUALITY)
    return "jpeg", written.getvalue(), turned.size


def _rule(name: str, size: tuple[int, int], url: str) -> str:
    """The rule of a picture: small, and once it has the focus as large as it is, or a whole number of times as large.

    >>> _rule("one", (40, 60), "data:")
    '.one{width:40px;height:60px;background-image:url(data:)}.one:focus{width:240px;height:360px}'
    """
    longest = max(size)
    small = [round(edge * min(1.0, SHOWN / longest)) or 1 for edge in size]
    large = [edge * max(1, OPENED // longest) for edge in size]
    at_place = f".{name}{{width:{small[0]}px;height:{small[1]}px;background-image:url({url})}}"
    return at_place + f".{name}:focus{{width:{large[0]}px;height:{large[1]}px}}"
