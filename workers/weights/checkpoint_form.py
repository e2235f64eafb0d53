"""The form of a model's tensors in checkpoints, where transformers makes one tensor of many: it stacks the weights of a
mixture's experts, and calls some tensors otherwise than their checkpoints do.

    model        mlp.experts.gate_up_proj  [E, 2 I, H]
    checkpoint   mlp.experts.0.gate_proj.weight [I, H], mlp.experts.0.up_proj.weight [I, H], mlp.experts.1.…

The mapping is transformers' own, which `save_pretrained` writes by. What it stacks lies expert after expert in the
model's tensor, so that each tensor of the checkpoint is a range of its elements, and a rank's range is ranges of those.
Publications and exports have the checkpoint's form, which engines and `from_pretrained` read; the trainer's states have
the model's.

Legend: E experts, I neurons of one, H width of the hidden states.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from penstock.conf.errors import ModelError
from penstock.workers.weights.piece import Piece


@dataclass(frozen=True)
class Part:
    """A tensor of a checkpoint, as elements of one of the model's."""

    name: str
    shape: tuple[int, ...]
    first: int
    """Index of its first element in the model's flattened tensor."""

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class CheckpointForm:
    """The checkpoint's tensors that a model's tensors are made of.

    form = CheckpointForm(lm)
    pieces_of_publication = (part for piece in pieces for part in form.pieces(piece))
    """

    def __init__(self, lm: Any) -> None:
        """`lm`: a model of transformers, with or without weights or adapters."""
        self._lm = lm
        self._keeps_float32 = keeps_float32(lm)
        self._parts: dict[str, tuple[Part, ...]] = {}

    def parts(self, name: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """The checkpoint's tensors of which transformers makes a tensor of the model, in the order in which they lie in
        it; one for most. Raises `ModelError` for what is made in a way that is not known here."""
        if name not in self._parts:
            self._parts[name] = self._parts_of(name, shape)
        return self._parts[name]

    def pieces(self, piece: Piece) -> Iterator[Piece]:
        """The same elements as pieces of the checkpoint's tensors: one of each, empty where the piece has none of it.
        They share memory with `piece`. Parameters that the model's class keeps in float32 are so for engines, too.
        Raises as `parts` does."""
        keeps_dtype = piece.keeps_dtype or self._keeps_float32(piece.name)
        end = piece.first + len(piece.values)
        for part in self.parts(piece.name, tuple(piece.shape)):
            start = min(max(piece.first, part.first), part.first + part.num_elements)
            stop = max(start, min(end, part.first + part.num_elements))
            offset = start - piece.first if stop > start else 0
            values = piece.values.narrow(0, offset, stop - start)
            yield Piece(part.name, part.shape, start - part.first, values, keeps_dtype)

    @cached_property
    def _mapping(self) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
        """Transformers' renamings from the model's names to the checkpoint's; the converters that take a stack apart;
        and those that are not known here. Converters are by the end of a name that they are for."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightConverter

        renamings: list[Any] = []
        apart: dict[str, Any] = {}
        unknown: dict[str, Any] = {}
        for transform in reversed(get_model_conversion_mapping(self._lm, add_legacy=False)):
            if isinstance(transform, PrefixChange):
                # That of a whole model says nothing of the checkpoint, which may have had it or not. One that is taken
                # off a part is in all checkpoints that others have written, and in engines.
                if transform.scope_prefix and transform.prefix_to_remove:
                    renamings.append(transform.reverse_transform())
                continue
            if not isinstance(transform, WeightConverter):
                renamings.append(transform.reverse_transform())
            elif stacks(transform):
                apart[transform.target_patterns[0]] = transform.reverse_transform()
            else:
                unknown |= dict.fromkeys(transform.target_patterns, transform)
        return renamings, apart, unknown

    def _parts_of(self, name: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
        from transformers.core_model_loading import rename_source_key

        renamings, apart, unknown = self._mapping
        how = next((converter.operations for end, converter in unknown.items() if end in name), None)
        if how is not None:
            raise ModelError(
                f"the model {self._lm.config.model_type!r}: transformers makes {name} of its checkpoint's tensors by "
                f"{how}, which cannot be undone range by range, so that engines cannot be sent it. Choose another "
                "model.path."
            )
        stored, end = rename_source_key(name, renamings, list(apart.values()), reverse=True)
        if end is None:
            return (Part(stored, shape, 0),)
        ends = apart[end].target_patterns
        if len(shape) < 2 or ends[0] not in stored or shape[1] % len(ends):
            raise ModelError(
                f"the model {self._lm.config.model_type!r}: {name} of shape {list(shape)} is not what transformers "
                f"would make of {stored}. Choose another model.path."
            )
        inner = (shape[1] // len(ends), *shape[2:])
        names = [stored.replace(ends[0], other) for other in ends]
        return tuple(
            Part(key.replace("*", str(expert)), inner, (expert * len(ends) + number) * math.prod(inner))
            for expert in range(shape[0])
            for number, key in enumerate(names)
        )


def keeps_float32(lm: Any) -> Callable[[str], bool]:
    """A function that tells for a parameter's name whether the model's class keeps it in float32 where the model is
    bfloat16. transformers has patterns that it finds anywhere in a name, such as `gate.weight`."""
    patterns = [pattern.replace("*", ".*") for pattern in getattr(lm, "_keep_in_fp32_modules_strict", None) or ()]
    return lambda name: any(re.search(pattern, name) for pattern in patterns)


def stacked_experts(lm: Any) -> dict[str, Any]:
    """The parameters of a model that are a mixture's experts, stacked along dim 0, by name; of each three dims."""
    return {
        f"{name}.{key}": parameter
        for name, module in lm.named_modules()
        for key, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3 and parameter.shape[0] == getattr(module, "num_experts", None)
    }


def stacks(converter: Any) -> bool:
    """Return whether a converter of transformers stacks one tensor an expert, or several that it joins first by their
    rows: the only ways that are known here."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    if len(converter.target_patterns) != 1 or not all("*" in pattern for pattern in converter.source_patterns):
        return False
    match converter.operations:
        case [MergeModulelist(dim=0)]:
            return len(converter.source_patterns) == 1
        case [MergeModulelist(dim=0), Concatenate(dim=1, num_shards_attribute=None)]:
            return True
    return False
