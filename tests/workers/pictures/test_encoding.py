"""Pictures from anywhere: what is read of them, and what is refused by their head."""

import io

import pytest
from PIL import Image

from penstock.workers.pictures.prompt_pictures import MOST_PIXELS, encoded
from tests.vision_models import picture

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n%%EOF\n"


def of_size(width: int, height: int, kind: str = "PNG") -> bytes:
    written = io.BytesIO()
    Image.new("1", (width, height)).save(written, format=kind)
    return written.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_the_formats_that_models_are_sent_are_read(kind: str) -> None:
    data = picture(56, 84, 1, kind)
    found = encoded(data)
    assert (found == data) == (kind in ("PNG", "JPEG"))
    with Image.open(io.BytesIO(found)) as image:
        assert (image.format, image.size) == (kind if found == data else "PNG", (84, 56))


@pytest.mark.parametrize("data", [EPS, of_size(8, 8, "TIFF"), of_size(8, 8, "BMP"), b""])
def test_other_formats_are_refused_and_no_decoder_of_theirs_starts(data: bytes) -> None:
    with pytest.raises(ValueError, match="no picture in PNG, JPEG, WEBP, GIF"):
        encoded(data)


def test_a_small_file_of_very_many_pixels_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    large = of_size(2**13 + 1, MOST_PIXELS // 2**13)
    assert len(large) < 10_000
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("its pixels are decoded"))
    for reads_pixels in (True, False):
        with pytest.raises(ValueError, match=r"8193 x 4096 pixels, and 33,554,432 at most"):
            encoded(large, reads_pixels=reads_pixels)
