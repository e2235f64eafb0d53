"""Engines and trainer that see, for each family of models: they say what transformers' own forward pass says, and a
picture that is lost, changed or placed wrongly shows. What is common to families: `test_pictures.py`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.workers.pictures.processor import FAMILIES
from tests.vision_models import ROPE, SECTIONS, build_vision_model
from tests.workers.rollout.seeing import (
    BAR,
    DRAWN,
    PICTURES,
    TWO,
    Eyes,
    Served,
    astray,
    loaded,
    published_apart,
    trained_apart,
)

KINDS = [kind for kind in FAMILIES if kind != "qwen2_5_vl"]
VLLM = pytest.mark.real


@pytest.fixture(scope="module", params=KINDS)
def eyes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Eyes:
    return Eyes(build_vision_model(tmp_path_factory.mktemp(request.param), kind=request.param))


@pytest.fixture(scope="module", params=["hf", pytest.param("vllm", marks=VLLM)])
def served(request: pytest.FixtureRequest, eyes: Eyes) -> Iterator[Served]:
    if request.param == "vllm":
        request.getfixturevalue("warm_spawn")
    subject = Served(request.param, eyes.path)
    yield subject
    subject.close()


@pytest.mark.parametrize("eyes", [kind for kind in KINDS if kind in SECTIONS], indirect=True)
def test_positions_are_those_of_the_model_in_an_older_configuration_too(eyes: Eyes) -> None:
    """Sections of heads lie under another name there, and are not among the model's defaults."""
    text = eyes.model.config.text_config
    expected = ROPE | SECTIONS[eyes.model.config.model_type]
    assert {name: text.rope_parameters[name] for name in expected} == expected


@pytest.mark.real
@pytest.mark.parametrize("shown", PICTURES)
def test_engine_trainer_and_transformers_see_the_same(served: Served, eyes: Eyes, shown: str) -> None:
    prompt, pictures = eyes.prompt(PICTURES[shown])
    completions = served.generate(prompt, pictures if shown != "no picture" else None, DRAWN)
    features = eyes.processor.checked_features(prompt, pictures)
    assert eyes.apart(prompt, completions, features, DRAWN) <= BAR
    assert trained_apart(served, eyes, shown) <= BAR


@pytest.mark.real
def test_every_picture_that_goes_astray_shows(served: Served, eyes: Eyes) -> None:
    normal, found = astray(served, eyes)
    assert min(found.values()) > 100 * max(normal, 1e-7)


@pytest.mark.real
def test_after_a_load_the_same_picture_is_seen_by_the_new_weights(served: Served, eyes: Eyes, tmp_path: Path) -> None:
    prompt, pictures = eyes.prompt(TWO)
    for _ in loaded(served, eyes, tmp_path):
        completions = served.generate(prompt, pictures, DRAWN)
        assert eyes.apart(prompt, completions, eyes.processor.features(TWO), DRAWN) <= BAR


@pytest.mark.real
def test_a_publication_reaches_an_engine_with_requests_under_way(served: Served, eyes: Eyes, tmp_path: Path) -> None:
    found = published_apart(served, eyes, tmp_path, [])
    assert max(found["before"], found["after"]) <= BAR


@pytest.mark.real
@pytest.mark.parametrize("eyes", ["qwen3_vl"], indirect=True)
def test_what_is_peculiar_to_qwen3_vl_shows(served: Served, eyes: Eyes) -> None:
    """Features of fewer layers, in another order, and other shares of a head that turn by height and width."""
    prompt, pictures = eyes.prompt(TWO)
    completions = served.generate(prompt, pictures, DRAWN, 1)
    tower, turns = eyes.model.model.visual, eyes.model.model.language_model.rotary_emb
    changes = [(tower, "deepstack_visual_indexes", order) for order in ([], [0], [1, 0])]
    for owner, name, value in [*changes, (turns, "mrope_section", [12, 2, 2])]:
        right = getattr(owner, name)
        setattr(owner, name, value)
        gap = eyes.apart(prompt, completions, eyes.processor.features(TWO), DRAWN)
        setattr(owner, name, right)
        assert gap > 100 * BAR, (name, value)
