"""The longest sequence that a model takes, from the configuration that lies in its directory: as vLLM derives it, which
refuses longer ones, so that nothing is refused here that an engine serves.

Both forms are read: `rope_scaling` of transformers 4 and `rope_parameters` of transformers 5, the latter also by kinds
of layers.
"""

from collections.abc import Iterator, Mapping
from typing import Any

LENGTHS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_target_positions",
    "max_sequence_length", "max_seq_length", "seq_len",
)  # fmt: skip
"""Names of lengths in configurations; the smallest counts."""
OVERRIDE = "model_max_length"
"""Name of the one that counts alone where it is there."""
SCALED_ALREADY = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Rope types whose configurations have the length after scaling: their factor is not applied to it. Linear scaling's
is."""
DYNAMIC = "dynamic"
"""Rope type whose angles depend on the sequence's length. vLLM accepts sequences of `factor` times the length, but its
table of angles ends at the length itself."""
LONGROPE = ("su", "longrope")


def longest_context(config: Mapping[str, Any]) -> int | None:
    """Most tokens of a sequence; None where the configuration does not say.

    >>> longest_context({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 2.0}})
    8192
    """
    text = _of_text(config)
    lengths = [text[name] for name in LENGTHS if isinstance(text.get(name), int)]
    longest = text.get(OVERRIDE) or min(lengths, default=None)
    if longest is None or "gemma3" in str(text.get("model_type")):  # Gemma 3's is scaled already, by whatever type
        return longest
    factor = 1.0
    for rope in _ropes(text):
        if _type(rope) not in (*SCALED_ALREADY, DYNAMIC):
            factor = rope.get("factor") or factor
    return int(longest * factor)


def longest_short_context(config: Mapping[str, Any]) -> int | None:
    """Most tokens of a sequence for which LongRoPE (2402.13753) has its short factors; None for other models.

    Beyond it transformers takes the long ones for long batches, and an engine of vLLM that is to serve longer sequences
    takes them for all.
    """
    text = _of_text(config)
    name = "original_max_position_embeddings"
    lengths = [text.get(name) or rope.get(name) for rope in _ropes(text) if _type(rope) in LONGROPE]
    return min((length for length in lengths if length), default=None)


def _of_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part about text in the configuration of a model that sees, too."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def _ropes(text: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The rope's settings; those of each kind of layers where they differ."""
    found = text.get("rope_parameters") or text.get("rope_scaling") or {}
    nested = [value for value in found.values() if isinstance(value, Mapping)]
    yield from nested or ([found] if found else [])


def _type(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type"))
