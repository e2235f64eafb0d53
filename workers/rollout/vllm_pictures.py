"""Pictures in vLLM's terms: the arguments of an engine that sees, and prompts as it reads them.

vLLM gets expanded tokens, features and places, and processes nothing: what the trainer reads is what it has read.
Importing this module does not import vLLM.
"""

from typing import Any

from penstock.conf.rollout import RolloutConfig
from penstock.workers.pictures.families import Family
from penstock.workers.pictures.placeholders import PromptPictures
from penstock.workers.pictures.processor import Features, PictureProcessor, hash_of

IMAGE = "image"
"""vLLM's name of the modality."""


def picture_arguments(config: RolloutConfig, family: Family) -> dict[str, Any]:
    """Arguments of `AsyncEngineArgs` for a model that sees. Features come with their pixels normalized: by default vLLM
    does that in the model, and would do it a second time. The cache of processed pictures is off: it would keep, in two
    processes, what is processed elsewhere. A run of text allows for one: with none vLLM leaves the tower out, whose
    weights are published. Prefixes are cached for M-RoPE alone: see `picture_prompt`."""
    return {
        "enable_prefix_caching": family.has_grids,
        "limit_mm_per_prompt": {IMAGE: max(config.max_pictures, 1), "video": 0},
        "mm_device_do_normalize": False,
        "mm_processor_cache_gb": 0,
    }


def prompt_of(processor: PictureProcessor, prompt_ids: list[int], pictures: PromptPictures | None) -> Any:
    """A prompt, with the features of its pictures if it has any. Raises `DataError` where they do not belong
    together."""
    features = processor.checked_features(prompt_ids, pictures)
    if features is None or pictures is None:
        return {"prompt_token_ids": prompt_ids}
    return picture_prompt(processor.family, prompt_ids, pictures, features)


def picture_prompt(family: Family, prompt_ids: list[int], pictures: PromptPictures, features: Features) -> Any:
    """The prompt as vLLM's engine takes it. A picture's hash stands for it in its caches."""
    import torch
    from vllm.inputs import mm_input
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

    rows = torch.tensor(family.num_rows(features.grid_thw))
    tensors: Any = family.inputs(torch.from_numpy(features.pixel_values), torch.from_numpy(features.grid_thw))
    # Of a prompt whose prefix is cached vLLM lets go of all fields but those that stay on the host, and without M-RoPE
    # of all. Weights that come while it is under way drop the prefix, and what has been seen of pictures: then pixels
    # are needed after all.
    fields = family.inputs(
        MultiModalFieldConfig.flat_from_sizes(IMAGE, rows, keep_on_cpu=True),
        MultiModalFieldConfig.batched(IMAGE, keep_on_cpu=True),
    )
    return mm_input(
        prompt_ids,
        MultiModalKwargsItems.from_hf_inputs(tensors, fields),
        {IMAGE: [hash_of(picture) for picture in pictures.encoded]},
        {IMAGE: [PlaceholderRange(offset, length) for offset, length in pictures.ranges]},
    )
