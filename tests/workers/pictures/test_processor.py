"""The one processor of pictures: what it makes is what transformers makes, and another one is told apart."""

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from penstock.conf.errors import ConfigError, DataError
from penstock.workers.pictures.processor import FAMILIES, PictureProcessor, hash_of, rgb_image, size_of
from penstock.workers.pictures.prompt_pictures import PromptPictures
from tests.vision_models import END, IMAGE, START, VIDEO, build_vision_model, picture

SMALL, WIDE = picture(56, 84), picture(60, 150, seed=1)
"""2 x 3 features; and 2 x 5, as 60 x 150 pixels are resized to 56 x 140."""


@pytest.fixture(scope="module")
def processor(vision_model: Path) -> PictureProcessor:
    return PictureProcessor.of(str(vision_model))


@pytest.fixture(scope="module")
def vocabulary(vision_model: Path) -> dict[str, int]:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(vision_model).get_vocab()


def changed(source: Path, target: Path, name: str, **values: object) -> str:
    """Copy a model's small files, one of them with other values."""
    target.mkdir()
    for file in source.glob("*.json"):
        shutil.copy(file, target)
    file = target / name
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return str(target)


def test_prompts_of_two_pictures_of_different_sizes_are_expanded_as_by_hand(processor, vocabulary) -> None:
    pad = vocabulary[IMAGE]
    ids, ranges = processor.expand([40, pad, 41, pad, 42], [SMALL, WIDE])
    assert ids == [40, *[pad] * 6, 41, *[pad] * 10, 42]
    assert ranges == [(1, 6), (8, 10)]


def test_expanded_tokens_are_not_expanded_again(processor, vocabulary) -> None:
    ids, _ = processor.expand([40, vocabulary[IMAGE], 41], [SMALL])
    with pytest.raises(DataError, match="expanded already"):
        processor.expand(ids, [SMALL])


@pytest.mark.parametrize("kind", FAMILIES)
def test_tokens_and_features_are_those_of_transformers_own_processor(kind: str, tmp_path: Path) -> None:
    """Its backend on PIL: the other one resizes differently."""
    from transformers import AutoImageProcessor, AutoProcessor

    path = build_vision_model(tmp_path, kind=kind)
    processor, whole = PictureProcessor.of(str(path)), AutoProcessor.from_pretrained(path)
    whole.image_processor = AutoImageProcessor.from_pretrained(path, backend="pil")
    ours, text = processor.features([SMALL, WIDE]), f"{START}{IMAGE}{END}and{START}{IMAGE}{END}?"
    ids, ranges = processor.expand(whole.tokenizer(text)["input_ids"], [SMALL, WIDE])
    theirs = whole(text=[text], images=[rgb_image(SMALL), rgb_image(WIDE)], return_tensors="np")
    assert ids == theirs["input_ids"][0].tolist()
    assert processor.checked_features(ids, PromptPictures((SMALL, WIDE), tuple(ranges))) is not None
    assert ours.pixel_values.dtype == np.float32
    np.testing.assert_array_equal(ours.pixel_values, theirs["pixel_values"])
    if processor.family.has_grids:
        assert ours.grid_thw.tolist() == theirs["image_grid_thw"].tolist() == [[1, 4, 6], [1, 4, 10]]
        assert processor.family.num_rows(ours.grid_thw) == [24, 40]


def test_a_picture_stands_in_the_text_as_templates_write_it(processor, vocabulary, tmp_path: Path) -> None:
    assert processor.unexpanded == (vocabulary[START], vocabulary[IMAGE], vocabulary[END])
    assert PictureProcessor.of(str(build_vision_model(tmp_path, kind="llava"))).unexpanded == (vocabulary[IMAGE],)


def test_features_of_a_picture_do_not_depend_on_the_others_in_the_prompt(processor) -> None:
    both = processor.features([SMALL, WIDE]).pixel_values
    np.testing.assert_array_equal(both[:24], processor.features([SMALL]).pixel_values)
    np.testing.assert_array_equal(both[24:], processor.features([WIDE]).pixel_values)


def test_features_for_places_of_another_picture_are_refused(processor, vocabulary) -> None:
    ids, ranges = processor.expand([40, vocabulary[IMAGE]], [SMALL])
    assert len(processor.checked_features(ids, PromptPictures((SMALL,), tuple(ranges))).pixel_values) == 24
    with pytest.raises(DataError, match="picture 1 has 10 features, and 6 placeholders"):
        processor.checked_features(ids, PromptPictures((WIDE,), tuple(ranges)))


def test_special_tokens_of_vision_are_known(processor, vocabulary) -> None:
    assert set(processor.token_ids) == {vocabulary[token] for token in (START, END, IMAGE, VIDEO)}
    assert processor.placeholder == vocabulary[IMAGE]


def test_the_digest_is_the_same_for_the_same_model_in_another_place(processor, vision_model, tmp_path) -> None:
    same = PictureProcessor.of(changed(vision_model, tmp_path / "same", "config.json"))
    assert same.digest == processor.digest
    assert PictureProcessor.of(vision_model, same.digest).digest == same.digest


def test_the_digest_is_another_one_where_the_image_processor_is(processor, vision_model, tmp_path) -> None:
    settings = json.loads((vision_model / "processor_config.json").read_text())["image_processor"]
    settings["size"] = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 8}
    other = PictureProcessor.of(
        changed(vision_model, tmp_path / "less", "processor_config.json", image_processor=settings)
    )
    assert other.digest != processor.digest
    with pytest.raises(ConfigError, match=r"reads pictures otherwise than the one that started .* preprocessor_config"):
        PictureProcessor.of(vision_model, other.digest)


@pytest.mark.parametrize("version", ["transformers", "PIL", "numpy"])
def test_the_digest_is_another_one_in_another_version(processor, vision_model, monkeypatch, version: str) -> None:
    monkeypatch.setattr(f"{version}.__version__", "0.0.1")
    assert PictureProcessor.of(str(vision_model)).digest != processor.digest


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (
            {"model_type": "idefics3"},
            "model_type=idefics3 is a model that sees, of a family that is not .a large picture",
        ),
        ({"model_type": "eyed"}, "model_type=eyed is a model that sees, of a family that is not among"),
        ({"model_type": "qwen2", "vision_config": None}, "model_type=qwen2 is a model of text"),
        ({"image_token_id": None}, "lacks image_token_id"),
    ],
    ids=["known family", "family", "text", "token"],
)
def test_models_whose_pictures_are_not_read_are_refused_by_name(vision_model, tmp_path, values, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        PictureProcessor.of(changed(vision_model, tmp_path / "other", "config.json", **values))


def test_a_llava_with_another_tower_is_refused_by_name(tmp_path: Path) -> None:
    path = build_vision_model(tmp_path / "llava", kind="llava")
    other = {"model_type": "siglip_vision_model"}
    with pytest.raises(ConfigError, match="a llava with the tower 'siglip_vision_model'"):
        PictureProcessor.of(changed(path, tmp_path / "other", "config.json", vision_config=other))


def test_another_image_processor_is_refused_by_name(vision_model, tmp_path) -> None:
    other = changed(
        vision_model, tmp_path / "m", "processor_config.json", image_processor={"image_processor_type": "X"}
    )
    with pytest.raises(ConfigError, match="its image processor is X"):
        PictureProcessor.of(other)


def test_a_model_without_a_processor_is_refused_by_name(vision_model, tmp_path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((vision_model / "config.json").read_bytes())
    with pytest.raises(ConfigError, match=r"bare: how it reads pictures cannot be read .*Save its processor there"):
        PictureProcessor.of(str(bare))


@pytest.mark.parametrize("data", [b"", b"no picture", picture(8, 8)[:20], b"GIF89a" + bytes(30)], ids=repr)
def test_bytes_that_are_no_picture_are_refused(processor, data: bytes) -> None:
    with pytest.raises(DataError, match="no PNG or JPEG"):
        processor.length_of(data)


def test_a_picture_that_ends_early_is_refused(processor) -> None:
    with pytest.raises(DataError, match="damaged"):
        processor.features([SMALL[:-2000]])


def test_a_picture_far_wider_than_high_is_refused(processor) -> None:
    with pytest.raises(DataError, match="600 x 2 pixels"):
        processor.length_of(picture(2, 600))
    with pytest.raises(DataError, match="cannot take"):
        processor.features([picture(2, 600)])


def test_a_picture_is_as_large_as_it_is_once_turned_as_the_camera_was_held(processor) -> None:
    target = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.open(io.BytesIO(SMALL)).save(target, "JPEG", exif=exif)
    turned = target.getvalue()
    assert size_of(turned) == rgb_image(turned).size == (56, 84)
    assert processor.features([turned]).grid_thw.tolist() == [[1, 6, 4]]


def test_pictures_without_three_colours_are_read_as_such(processor) -> None:
    for mode in ("L", "RGBA", "P", "1"):
        target = io.BytesIO()
        Image.open(io.BytesIO(SMALL)).convert(mode).save(target, "PNG")
        assert processor.features([target.getvalue()]).pixel_values.shape == (24, 1176)


def test_the_hash_is_of_the_content_alone() -> None:
    assert hash_of(SMALL) == hash_of(bytes(bytearray(SMALL)))
    assert hash_of(SMALL) != hash_of(WIDE)
