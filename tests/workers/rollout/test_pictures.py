"""Engines that see. What they report is what transformers' own forward pass says of the same tokens and features, and a
picture that is lost or changed shows. Each family: `test_families.py`."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.algorithms.graph.columns import SEEN_PICTURES
from penstock.conf.errors import ConfigError, DataError
from penstock.conf.trainer import TrainerConfig
from penstock.store.data.rows import Rows
from penstock.workers.agents.gateway.chat_formats import TemplateFormat
from penstock.workers.agents.gateway.turn_sampler import TurnLimits, TurnSampler
from penstock.workers.agents.trajectory import Trajectory, row_columns
from penstock.workers.pictures.processor import rgb_image
from penstock.workers.pictures.prompt_pictures import PromptPictures
from penstock.workers.protocols import Completion, Sampling
from penstock.workers.trainer.models.vision import PictureCache
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from tests.vision_models import picture
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


@pytest.fixture(scope="module")
def eyes(vision_model: Path) -> Eyes:
    return Eyes(vision_model)


VLLM = pytest.param("vllm", marks=pytest.mark.real)


@pytest.fixture(scope="module", params=["hf", VLLM])
def served(request: pytest.FixtureRequest, vision_model: Path) -> Iterator[Served]:
    if request.param == "vllm":
        request.getfixturevalue("warm_spawn")
    subject = Served(request.param, vision_model)
    yield subject
    subject.close()


SAMPLINGS = {
    "drawn": DRAWN,
    "greedy": Sampling(temperature=0, max_tokens=24, ignore_eos=True),
    "truncated": Sampling(temperature=0.7, top_k=20, top_p=0.9, max_tokens=24, seed=5, ignore_eos=True),
}


@pytest.mark.real
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("shown", PICTURES)
def test_an_engine_sees_what_transformers_does(served: Served, eyes: Eyes, shown: str, sampling: str) -> None:
    prompt, pictures = eyes.prompt(PICTURES[shown])
    num_samples = 1 if sampling == "greedy" else 2
    completions = served.generate(prompt, pictures if shown != "no picture" else None, SAMPLINGS[sampling], num_samples)
    features = eyes.processor.checked_features(prompt, pictures)
    assert all(len(completion.token_ids) == 24 for completion in completions)
    assert eyes.apart(prompt, completions, features, SAMPLINGS[sampling]) <= BAR


@pytest.mark.real
def test_a_text_after_pictures_is_placed_as_a_text(served: Served, eyes: Eyes) -> None:
    served.generate(*eyes.prompt(TWO), DRAWN)
    prompt, _ = eyes.prompt(())
    assert eyes.apart(prompt, served.generate(prompt, None, DRAWN), None, DRAWN) <= BAR


@pytest.mark.real
def test_special_tokens_of_vision_are_never_drawn(served: Served, eyes: Eyes) -> None:
    prompt, pictures = eyes.prompt(TWO[:1])
    sampling = Sampling(temperature=2.0, max_tokens=64, seed=3, ignore_eos=True)
    completions = served.generate(prompt, pictures, sampling, 8)
    assert not {token for one in completions for token in one.token_ids} & {*eyes.processor.token_ids}
    features = eyes.processor.features(pictures.encoded)
    assert eyes.apart(prompt, completions, features, sampling) <= BAR
    left = [
        eyes.logprobs(prompt, one, features, sampling, banned=()) - torch.tensor(one.logprobs) for one in completions
    ]
    assert -float(torch.cat(left).sum()) > 5  # else none of them would have been drawn anyway


@pytest.mark.real
def test_special_tokens_of_vision_are_not_the_likeliest_either(served: Served, eyes: Eyes) -> None:
    banned = torch.tensor(eyes.processor.token_ids)
    with torch.no_grad():
        prompts = torch.randint(3, 99, (200, 6), generator=torch.Generator().manual_seed(0))
        likeliest = eyes.model(input_ids=prompts).logits[:, -1].argmax(-1)
    (found,) = torch.isin(likeliest, banned).nonzero(as_tuple=True)
    assert len(found), "no prompt shows anything"
    greedy = Sampling(temperature=0, max_tokens=4, ignore_eos=True)
    for prompt in prompts[found[:4]].tolist():
        completions = served.generate(prompt, None, greedy, 1)
        assert not {*completions[0].token_ids} & {*eyes.processor.token_ids}
        assert eyes.apart(prompt, completions, None, greedy) <= BAR


@pytest.mark.real
def test_every_picture_that_goes_astray_shows(served: Served, eyes: Eyes) -> None:
    normal, found = astray(served, eyes)
    assert min(found.values()) > 100 * max(normal, 1e-7)


@pytest.mark.real
def test_another_picture_is_another_prompt_for_the_prefix_cache(served: Served, eyes: Eyes) -> None:
    """Same tokens, other pixels: what is kept of the first must not serve the second."""
    for seed in (1, 9, 1):
        prompt, pictures = eyes.prompt([picture(56, 84, seed)])
        completions = served.generate(prompt, pictures, DRAWN)
        assert eyes.apart(prompt, completions, eyes.processor.features(pictures.encoded), DRAWN) <= BAR


@pytest.mark.real
@pytest.mark.parametrize("served", [VLLM], indirect=True)
def test_both_engines_say_the_same(served: Served, eyes: Eyes) -> None:
    prompt, pictures = eyes.prompt(TWO)
    other = Served("hf", eyes.path)
    (ours,), (theirs,) = (one.generate(prompt, pictures, SAMPLINGS["greedy"], 1) for one in (served, other))
    other.close()
    assert ours.token_ids == theirs.token_ids
    assert np.abs(np.subtract(ours.logprobs, theirs.logprobs)).mean() <= BAR


@pytest.mark.real
def test_after_a_load_the_same_picture_is_seen_by_the_new_weights(served: Served, eyes: Eyes, tmp_path: Path) -> None:
    """Whoever kept what the old vision tower saw would be far off: its weights change too."""
    prompt, pictures = eyes.prompt(TWO)
    for version in loaded(served, eyes, tmp_path):
        completions = served.generate(prompt, pictures, DRAWN)
        assert {token for one in completions for token in one.versions} == {version}
        assert eyes.apart(prompt, completions, eyes.processor.features(TWO), DRAWN) <= BAR


@pytest.mark.real
@pytest.mark.parametrize("is_whole", [True, False], ids=["lost whole", "lost one"])
def test_a_prompt_that_has_lost_pictures_is_refused(served: Served, eyes: Eyes, is_whole: bool) -> None:
    prompt, pictures = eyes.prompt(TWO)
    left = None if is_whole else PromptPictures(pictures.encoded[:1], pictures.ranges[:1])
    with pytest.raises(DataError, match="lost a picture"):
        served.generate(prompt, left, DRAWN)


@pytest.mark.real
def test_more_pictures_than_the_configuration_allows_are_refused(served: Served, eyes: Eyes) -> None:
    prompt, pictures = eyes.prompt([picture(28, 28)] * 4)
    with pytest.raises(DataError, match=r"4 pictures in a prompt, and rollout\.max_pictures=3"):
        served.generate(prompt, pictures, DRAWN)


def test_a_model_of_text_refuses_pictures_by_name(tiny_model: Path, eyes: Eyes) -> None:
    served = Served("hf", tiny_model)
    with pytest.raises(ConfigError, match="model_type=qwen2 is a model of text"):
        served.generate(*eyes.prompt(TWO), DRAWN)
    served.close()


@pytest.mark.real
@pytest.mark.parametrize("served", [VLLM], indirect=True)
def test_vllm_expands_tokens_again_where_it_is_left_to_process(served: Served, eyes: Eyes) -> None:
    """Why prompts come to it as features with their places: nothing says that another prompt was read."""
    prompt, pictures = eyes.prompt(TWO[:1])
    images = {"image": [rgb_image(picture) for picture in pictures.encoded]}

    async def asked() -> int:
        from penstock.workers.rollout.engine_vllm import sampling_params

        request = {"prompt_token_ids": prompt, "multi_modal_data": images}
        async for output in served.engine.llm.generate(request, sampling_params(1, DRAWN), request_id="twice"):
            length = len(output.prompt_token_ids)
        return length

    assert served.call(asked()) == len(prompt) + 5


class Asked:
    """The engine as the gateway asks it."""

    def __init__(self, served: Served) -> None:
        self._engine = served.engine

    async def sample(
        self, prompt_ids: Sequence[int], sampling: Sampling, conversation: object, pictures: Any = None
    ) -> Completion:
        (completion,) = await self._engine.generate(prompt_ids, 1, sampling, pictures)
        return completion


async def conversation(sampler: TurnSampler) -> None:
    """Three turns of which two have a picture each, and one that begins anew with the second."""
    messages: list[Any] = []
    for content in ([TWO[0], "what?"], "sure?", ["and", TWO[1]]):
        messages.append({"role": "user", "content": content})
        messages.append((await sampler.sample(messages)).message)
    await sampler.sample(messages[-2:-1])


@pytest.mark.real
def test_turns_with_new_pictures_are_trained_as_they_were_sampled(served: Served, eyes: Eyes) -> None:
    """Beside an attempt of text; and a picture that is lost where a turn goes on shows."""
    attempts = []
    for talk in (conversation, lambda sampler: sampler.sample([{"role": "user", "content": "what?"}])):
        form, limits = TemplateFormat(eyes.tokenizer, in_parts=True), TurnLimits(max_model_len=256, max_pictures=3)
        sampler = TurnSampler(Asked(served), form, replace(DRAWN, max_tokens=12), limits, processor=eyes.processor)
        served.call(talk(sampler))
        attempts.append(Trajectory(sampler.turns))
    columns = row_columns(attempts)
    assert columns["seen_pictures"] == [[*TWO, TWO[1]], []]
    assert columns["seen_ranges"][0].reshape(-1, 3)[:, [0, 2]].tolist() == [[0, 6], [0, 15], [1, 15]]
    rows = Rows.from_lists({name: columns[name] for name in ("response_ids", "context_ids", "spans", *SEEN_PICTURES)})
    kept, none = columns["seen_ranges"]
    lost = rows.with_column("seen_ranges", [np.where(np.arange(len(kept)) == 2, 0, kept), none])
    trainer = PolicyTrainer(TrainerConfig(), str(eyes.path))
    try:
        trainer.attach_vision(PictureCache(eyes.processor, trainer.model.lm.config))
        reported = np.concatenate(columns["behavior_logprobs"])
        right, wrong = (np.abs(np.concatenate(trainer.logprobs(one)) - reported).mean() for one in (rows, lost))
    finally:
        trainer.close()
    print(f"{served.name}: {right:.1e}, without the first picture {wrong:.1e}")
    assert right <= BAR
    assert wrong > 100 * BAR


@pytest.mark.real
@pytest.mark.parametrize("shown", PICTURES)
def test_the_trainer_computes_of_responses_what_the_engine_reported(served: Served, eyes: Eyes, shown: str) -> None:
    assert trained_apart(served, eyes, shown) <= BAR


@pytest.mark.real
@pytest.mark.parametrize("freeze", [[], ["vision"]], ids=["tower trained", "tower frozen"])
def test_engines_see_with_what_the_trainer_publishes(
    served: Served, eyes: Eyes, tmp_path: Path, freeze: list[str]
) -> None:
    """Also for requests that are under way meanwhile. A frozen tower need not see again, and a trained one has to."""
    found = published_apart(served, eyes, tmp_path, freeze)
    assert max(found["before"], found["after"]) <= BAR
    if freeze or served.name == "hf":  # which keeps nothing of what it has seen
        assert found["taken for frozen"] <= BAR
    else:
        assert found["taken for frozen"] > 100 * BAR
