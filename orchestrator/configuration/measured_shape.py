"""The sizes of a model of a kind that `model_shape.py` has no formulas for: transformers makes it of torch's fake
tensors, which take no memory, and it is counted and called.

    config.json ─▶ model ─┬▶ parameters of layers and of the rest, linear layers: exact
                          └▶ one forward: bytes that layers keep for backward, by token

Where the forward cannot be followed (a number that is read from a tensor decides what comes next), layers are taken to
keep what ordinary ones of the same widths do.
"""

import json
import logging
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode  # under this name alone; torch's MemTracker is used with it
from torch.autograd.graph import saved_tensors_hooks

from penstock.orchestrator.configuration.model_shape import LONG_WINDOW, MeasuredParts, ModelShape
from penstock.workers.models.model_files import longest_context
from penstock.workers.trainer.models import packed_attention

TOKENS = 512
"""Tokens of the forward. What a layer keeps grows with them."""
DTYPES = (torch.bfloat16, torch.float32)
_LOG = logging.getLogger("penstock")
FAKE_LOG = logging.getLogger("torch._subclasses.fake_tensor")
"""It prints a traceback for each operation that cannot be followed."""
EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk")
"""Names in a config.json of a layer's experts, and of those that a token goes through."""
ROUTED = re.compile(r"(^|\.)experts\.")
"""Part of the name of an expert's weight that shared experts' have not."""


def measured_shape(values: Mapping[str, Any]) -> ModelShape | None:
    """The sizes of the model of a config.json; None where transformers knows no such model of text. Takes some seconds
    the first time."""
    return _measured(json.dumps(values, sort_keys=True))


@lru_cache(maxsize=8)
def _measured(written: str) -> ModelShape | None:
    kept: dict[torch.dtype, float] = {}
    try:
        for dtype in DTYPES:
            with FakeTensorMode(allow_non_fake_inputs=True):
                lm = _made(json.loads(written), dtype)
                _shape(lm, kept)  # what lacks attention by heads need not run
                with suppress(Exception), _quiet():  # code of any model
                    kept[dtype] = _kept(lm)
        return _shape(lm, kept)
    except Exception as error:  # noqa: BLE001 - code of any model
        _LOG.warning("a model's memory is not known: %s: %s", type(error).__name__, str(error)[:300])
        return None


@contextmanager
def _quiet() -> Iterator[None]:
    before, FAKE_LOG.disabled = FAKE_LOG.disabled, True
    try:
        yield
    finally:
        FAKE_LOG.disabled = before


def _made(values: dict[str, Any], dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{name: value for name, value in values.items() if name != "torch_dtype"})
    make: Any = AutoModelForCausalLM.from_config
    lm = make(config, dtype=dtype)
    lm.tie_weights()
    return lm.train()


def _layers(lm: Any) -> list[nn.Module]:
    names = set(lm._no_split_modules or ())
    return [module for module in lm.modules() if type(module).__name__ in names]


def _kept(lm: Any) -> float:
    """Mean bytes that a layer keeps of a token for backward, weights aside; as on GPUs, without masks if it can be."""
    is_packed = packed_attention.reason_against(lm) is None and packed_attention.choose(lm, "always")
    ways = packed_attention.keywords(lm, None) if is_packed else {}
    layers, kept = _layers(lm), 0
    known = {parameter.untyped_storage()._cdata for parameter in lm.parameters()}
    within = [False]

    def keep(saved: Tensor) -> Tensor:
        nonlocal kept
        storage = saved.untyped_storage()
        if within[0] and storage._cdata not in known:
            known.add(storage._cdata)
            held.append(saved)  # another's storage gets no number of one that is gone
            kept += storage.nbytes()
        return saved

    held: list[Tensor] = []
    hooks = [
        *(layer.register_forward_pre_hook(lambda *_: within.__setitem__(0, True)) for layer in layers),
        *(layer.register_forward_hook(lambda *_: within.__setitem__(0, False)) for layer in layers),
    ]
    try:
        with saved_tensors_hooks(keep, lambda saved: saved):
            lm.base_model(input_ids=torch.zeros(1, TOKENS, dtype=torch.int64), use_cache=False, **ways)
    finally:
        for hook in hooks:
            hook.remove()
    return kept / TOKENS / len(layers)


def _experts(config: Any, layers: Sequence[nn.Module]) -> tuple[int, int, int]:
    """Experts of a layer, those of a token, and the parameters of all that are chosen from; as of dense layers where
    the config.json does not say how many."""
    num_experts, per_token = (
        next((value for name in names if (value := getattr(config, name, None))), 0) for names in (EXPERTS, CHOSEN)
    )
    routed = sum(
        parameter.numel() for layer in layers for name, parameter in layer.named_parameters() if ROUTED.search(name)
    )
    return (num_experts, per_token, routed) if num_experts and per_token and routed else (0, 1, 0)


def _growing_layers(config: Any, num_layers: int) -> int:
    kinds = list(getattr(config, "layer_types", None) or ())
    if len(kinds) != num_layers:
        return num_layers
    is_long = (getattr(config, "sliding_window", None) or math.inf) > LONG_WINDOW
    return sum(kind == "full_attention" or (kind == "sliding_attention" and is_long) for kind in kinds)


def _shape(lm: Any, kept: Mapping[torch.dtype, float]) -> ModelShape:
    config, layers = lm.config.get_text_config(), _layers(lm)
    hidden, heads = config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    kv_width = (getattr(config, "num_key_value_heads", None) or heads) * head_dim
    if latent := getattr(config, "kv_lora_rank", None):  # one latent vector, and one key that is turned (2405.04434)
        kv_width = math.ceil((latent + getattr(config, "qk_rope_head_dim", 0)) / 2)
    num_experts, per_token, routed = _experts(config, layers)
    in_layers = sum(parameter.numel() for layer in layers for parameter in layer.parameters())
    linear: Counter[str] = Counter()
    for layer in layers:
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear):
                linear[name.rpartition(".")[2]] += module.in_features + module.out_features
    of_bfloat16 = kept.get(torch.bfloat16) or kept.get(torch.float32, 0.0) / 2
    return ModelShape(
        num_layers=len(layers),
        hidden=hidden,
        heads=heads,
        q_width=heads * head_dim,
        kv_width=kv_width,
        head_dim=head_dim,
        mlp_width=(routed and getattr(config, "moe_intermediate_size", None))
        or getattr(config, "intermediate_size", None)
        or 4 * hidden,
        vocabulary=config.vocab_size,
        is_tied=lm.get_output_embeddings().weight is lm.get_input_embeddings().weight,
        num_experts=num_experts,
        experts_per_token=per_token,
        longest=longest_context(config.to_dict()),
        measured=MeasuredParts(
            layer_parameters=round(in_layers / len(layers)),
            root_parameters=sum(parameter.numel() for parameter in lm.parameters()) - in_layers,
            linear=tuple(sorted(linear.items())),
            kept_bfloat16=of_bfloat16,
            kept_float32=kept.get(torch.float32) or 2 * of_bfloat16,
            routed_parameters=routed / len(layers),
            growing_layers=_growing_layers(config, len(layers)),
        ),
    )
