"""Engines that see, on tiny models, and transformers' own forward pass beside them: for tests of `test_pictures.py` and
`test_families.py`."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.algorithms.losses import sft_loss
from penstock.conf.rollout import RolloutConfig
from penstock.conf.trainer import OptimizerConfig, TrainerConfig
from penstock.store.data.rows import Rows
from penstock.workers.pictures.processor import Features, PictureProcessor
from penstock.workers.pictures.prompt_pictures import PromptPictures
from penstock.workers.protocols import Completion, EngineSpec, Publication, Sampling
from penstock.workers.rollout.engine_hf import sampling_logprobs
from penstock.workers.rollout.rollout_engines import make_engine
from penstock.workers.trainer.models.vision import PictureCache
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.weights.checkpoint_form import CheckpointForm
from tests.publications import write_publication
from tests.vision_models import END, IMAGE, START, picture

BAR = 1e-5
"""Largest mean difference of log-probabilities, float32."""
PICTURES = {
    "no picture": (),
    "one picture": (picture(56, 84, 1),),
    "two pictures of different sizes": (picture(56, 84, 1), picture(84, 140, 2)),
    "one picture twice": (picture(56, 84, 1), picture(56, 84, 1)),
}
TWO = PICTURES["two pictures of different sizes"]
DRAWN = Sampling(max_tokens=24, seed=5, ignore_eos=True)


class Eyes:
    """A processor and a checking model on the tiny model."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForImageTextToText, AutoTokenizer

        torch.set_num_threads(1)
        self.path = path
        self.processor = PictureProcessor.of(str(path))
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()

    def unexpanded(self, count: int) -> list[int]:
        text = "".join(f"{START}{IMAGE}{END}{index}, " for index in range(count))
        return self.tokenizer(f"{text}what is it?")["input_ids"]

    def prompt(self, pictures: Sequence[bytes]) -> tuple[list[int], PromptPictures]:
        ids, ranges = self.processor.expand(self.unexpanded(len(pictures)), pictures)
        return ids, PromptPictures(tuple(pictures), tuple(ranges))

    @torch.no_grad()
    def logprobs(
        self, prompt: Sequence[int], completion: Completion, features: Features | None, sampling: Sampling,
        positions: torch.Tensor | None = None, banned: Sequence[int] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """`[T]`: the log-probabilities of a response by transformers' forward pass over prompt and response."""
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        inputs: dict[str, torch.Tensor] = {}
        if features is not None:
            family = self.processor.family
            inputs = family.inputs(torch.from_numpy(features.pixel_values), torch.from_numpy(features.grid_thw))
            if family.has_grids:
                kinds = torch.zeros_like(ids)
                kinds[0, : len(prompt)] = ids[0, : len(prompt)] == self.processor.placeholder
                inputs["mm_token_type_ids"] = kinds
        self.model.model.rope_deltas = None
        if positions is not None:
            inputs["position_ids"] = positions
        logits = self.model(input_ids=ids, **inputs).logits[0, len(prompt) - 1 : -1]
        distribution = sampling_logprobs(logits, sampling, self.processor.token_ids if banned is None else banned)
        return distribution.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]

    def apart(self, prompt, completions: Sequence[Completion], features, sampling: Sampling, **options) -> float:
        """Mean difference between an engine's log-probabilities and the checking model's."""
        gaps = [
            (torch.tensor(one.logprobs) - self.logprobs(prompt, one, features, sampling, **options)).abs()
            for one in completions
        ]
        return float(torch.cat(gaps).mean())


class Served:
    """An engine on an event loop in a thread."""

    def __init__(self, name: str, model_path: Path) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        config = RolloutConfig(engine=name, max_model_len=256, kv_cache_gib=0.25, max_pictures=3)
        self._spec = EngineSpec(config, str(model_path), phase_timeout_s=30)
        self.name, self.engine = name, make_engine(self._spec)
        self.call(self.engine.start())

    def call(self, coroutine):
        return self.begin(coroutine).result(600)

    def begin(self, coroutine) -> Future:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def load(self, publication: Publication, *, tower_is_frozen: bool = False) -> None:
        object.__setattr__(self._spec, "tower_is_frozen", tower_is_frozen)  # not worth another engine
        self.call(self.engine.load(publication))

    def load_beside(self, publication: Publication, prompt, pictures, *, tower_is_frozen: bool) -> list[Completion]:
        """Load while requests of two lengths are under way, one after the other until it is loaded. Returns what they
        have sampled."""
        object.__setattr__(self._spec, "tower_is_frozen", tower_is_frozen)

        async def load() -> list[Completion]:
            found: list[Completion] = []
            under_way, loaded = asyncio.Event(), asyncio.Event()

            async def ask(max_tokens: int) -> None:
                while not loaded.is_set():
                    sampling = Sampling(max_tokens=max_tokens, seed=5, ignore_eos=True)
                    found.extend(await self.engine.generate(prompt, 2, sampling, pictures))
                    under_way.set()

            asking = asyncio.gather(ask(150), ask(97))
            await under_way.wait()
            await self.engine.load(publication)
            loaded.set()
            await asking
            return found

        return self.call(load())

    def generate(self, prompt, pictures, sampling: Sampling, num_samples: int = 2) -> list[Completion]:
        return self.call(self.engine.generate(prompt, num_samples, sampling, pictures))

    def close(self) -> None:
        self.call(self.engine.close())
        self._loop.call_soon_threadsafe(self._loop.stop)


def mutants(eyes: Eyes, prompt: Sequence[int], completion: Completion) -> dict[str, tuple]:
    """What a trainer might read instead of the two pictures: features, and positions."""
    features, family = eyes.processor.features(TWO), eyes.processor.family
    pixels, grids = features.pixel_values, features.grid_thw
    again = pixels * np.float32(3.7) - np.float32(1.7)  # about what normalizing does
    num_rows = family.num_rows(grids)[0]
    first, second = pixels[:num_rows], pixels[num_rows:]
    of_all: dict[str, tuple] = {
        "a dropped picture": (Features(np.concatenate([first, 0 * second]), grids), None),
        "no pictures": (None, None),
        "swapped pictures": (Features(np.concatenate([second, first]), grids), None),
        "pixels normalized twice": (Features(again, grids), None),
    }
    ids_1L = torch.tensor([[*prompt, *completion.token_ids]])
    if not family.has_grids:
        still = (ids_1L != eyes.processor.placeholder).cumsum(-1)
        return of_all | {
            "shifted patches": (Features(np.roll(pixels, 14, -1), grids), None),
            "a picture in one position": (features, still),
        }
    return of_all | {
        "shifted patches": (Features(np.roll(pixels, 1, 0), grids), None),
        "a turned grid": (Features(pixels, grids[:, [0, 2, 1]]), None),
        "flat positions": (features, torch.arange(ids_1L.shape[1]).expand(3, 1, -1)),
    }


def astray(served: Served, eyes: Eyes) -> tuple[float, dict[str, float]]:
    """Mean difference between an engine's log-probabilities and the checking model's: normal, and of each mutant."""
    prompt, pictures = eyes.prompt(TWO)
    completions = served.generate(prompt, pictures, DRAWN, 1)
    normal = eyes.apart(prompt, completions, eyes.processor.features(TWO), DRAWN)
    found = {
        name: eyes.apart(prompt, completions, features, DRAWN, positions=positions)
        for name, (features, positions) in mutants(eyes, prompt, completions[0]).items()
    }
    who = f"{served.name}, {eyes.processor.family.kind}"
    print(f"{who}: normal {normal:.1e}", {name: f"{gap:.1e}" for name, gap in found.items()})
    return normal, found


def loaded(served: Served, eyes: Eyes, directory: Path) -> Iterator[int]:
    """Load other weights into engine and checking model, those of the tower too, and then the first ones again. Yields
    each version."""
    form = CheckpointForm(eyes.model)
    before = {name: tensor.clone() for name, tensor in eyes.model.state_dict().items()}
    generator = torch.Generator().manual_seed(4)
    after = {
        name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator) if tensor.is_floating_point() else tensor
        for name, tensor in before.items()
    }
    for version, state in ((1, after), (2, before)):
        weights = {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}
        eyes.model.load_state_dict(weights, strict=False)
        published = [
            (part.name, tensor.view(-1)[part.first : part.first + part.num_elements].view(part.shape))
            for name, tensor in weights.items()
            for part in form.parts(name, tuple(tensor.shape))
        ]
        served.call(served.engine.load(write_publication(directory, version, published)))
        yield version


def sampled_rows(served: Served, eyes: Eyes, shown: Sequence[Sequence[bytes]]) -> tuple[Rows, np.ndarray]:
    """Rows of two samples for each prompt, and what the engine reported of them."""
    columns: dict[str, list] = {name: [] for name in ("prompt_ids", "pictures", "picture_ranges", "response_ids")}
    reported = []
    for encoded in shown:
        prompt, pictures = eyes.prompt(encoded)
        for one in served.generate(prompt, pictures if encoded else None, DRAWN):
            row = (prompt, list(encoded), [number for one in pictures.ranges for number in one], one.token_ids)
            for values, value in zip(columns.values(), row, strict=True):
                values.append(value)
            reported.append(one.logprobs)
    return Rows.from_lists(columns), np.concatenate(reported)


@contextmanager
def trainer_of(eyes: Eyes, **options: Any) -> Iterator[PolicyTrainer]:
    """A trainer of the tiny model, which sees."""
    trainer = PolicyTrainer(TrainerConfig(**options, optimizer=OptimizerConfig(lr=1e-2)), str(eyes.path))
    try:
        trainer.attach_vision(PictureCache(eyes.processor, trainer.model.lm.config))
        trainer.check_scores()
        yield trainer
    finally:
        trainer.close()


def gap(trainer: PolicyTrainer, rows: Rows, reported: np.ndarray) -> float:
    return float(np.abs(np.concatenate(trainer.logprobs(rows)) - reported).mean())


def trained_apart(served: Served, eyes: Eyes, shown: str) -> float:
    """Mean difference between what an engine reports of responses and what the trainer computes of them, padded with
    those of another prompt, whose pictures differ."""
    shown_too = TWO[1:] if shown == "no picture" else ()
    with trainer_of(eyes) as trainer:
        return gap(trainer, *sampled_rows(served, eyes, (PICTURES[shown], shown_too)))


def published_apart(served: Served, eyes: Eyes, directory: Path, freeze: list[str]) -> dict[str, float]:
    """Mean differences between engine and trainer, before and after a publication of other weights, which comes while
    requests with pictures are under way; and of an engine that takes a trained tower for frozen."""
    prompt, pictures = eyes.prompt(TWO)
    with trainer_of(eyes, freeze=freeze) as trainer:
        first = trainer.publish(str(directory), 10)
        rows, reported = sampled_rows(served, eyes, (TWO, ()))
        found = {"before": gap(trainer, rows, reported)}
        trainer.update(rows, sft_loss)
        second = trainer.publish(str(directory), 11)
        try:
            for _ in range(20):  # a load that comes between two requests shows nothing
                asked = served.load_beside(second, prompt, pictures, tower_is_frozen=bool(freeze))
                if is_reached := any(one.versions[0] != 11 == one.versions[-1] for one in asked):
                    break
                served.load(first)
            assert is_reached
            found["after"] = gap(trainer, *sampled_rows(served, eyes, (TWO, ())))
            served.load(first)
            sampled_rows(served, eyes, (TWO,))
            served.load(second, tower_is_frozen=True)
            found["taken for frozen"] = gap(trainer, *sampled_rows(served, eyes, (TWO,)))
        finally:
            served.load(first)
    return found
