"""Seconds of an engine's kernels from measured tables: those of aiconfigurator-core, the extra `penstock[planner]`.

    sizes of a model ─▶ config.json ─▶ EngineHandle ─▶ points of a grid, once an engine ─▶ Measured

The tables know some kinds of GPUs in bfloat16. What they do not know, or cannot be asked where the package is not
installed, is computed by the roofline of `decoding.py`; `Kernels.why` says so.

Times of the tables fall here and there where a batch grows, as kernels change with its size: by 5% at most for half of
the engines, by 13% at most on H100, and by up to 39% for a small model over eight A100. Plans would hang on such dents,
so that times only rise here: halfway between what is higher before and what is lower after.
"""

import json
import logging
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from penstock.orchestrator.configuration.model_shape import ModelShape
from penstock.planner.hardware import KINDS, GpuKind

PACKAGE = "aiconfigurator-core"
SYSTEMS = {
    "a100": "a100_sxm", "b200": "b200_sxm", "gb200": "gb200", "h100": "h100_sxm", "h200": "h200_sxm", "l40s": "l40s",
}  # fmt: skip
"""Names of kinds in the tables, those that were measured with vLLM."""
CLIFFS = (64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896)
"""Batches beyond which another row of tiles begins: one sequence more takes visibly longer."""
BATCHES: list[int] = sorted({round(2**octave * (1 + part / 8)) for octave in range(10) for part in range(8)}.union(
    (batch + 1 for batch in CLIFFS), [1024, 1536, 2048, 4096]
))  # fmt: skip
"""Sequences of a decode step at the grid's points."""
CONTEXTS: tuple[int, ...] = (1, *(2**power for power in range(7, 18)))
"""Tokens before the new one at the grid's points."""
PROMPTS: tuple[int, ...] = (1, *(2**power for power in range(6, 14)))
"""Tokens of a prompt at the grid's points. Longer ones are read in pieces, as vLLM does."""


@dataclass(frozen=True)
class Measured:
    """Kernel times of one engine in seconds, at the grid's points; even between them."""

    decode: Sequence[Sequence[float]]
    """Seconds of a decode step, by `BATCHES` and `CONTEXTS`."""
    prefill: Sequence[float]
    """Seconds in which a prompt is read, by `PROMPTS`."""

    def decode_s(self, num_sequences: float, context: float) -> float:
        """Seconds of a decode step's kernels. `context`: mean tokens before the new one."""
        row = min(max(bisect_right(BATCHES, num_sequences) - 1, 0), len(BATCHES) - 2)
        column = min(max(bisect_right(CONTEXTS, context) - 1, 0), len(CONTEXTS) - 2)
        lower, upper = self.decode[row], self.decode[row + 1]
        across = (context - CONTEXTS[column]) / (CONTEXTS[column + 1] - CONTEXTS[column])
        first = lower[column] + across * (lower[column + 1] - lower[column])
        second = upper[column] + across * (upper[column + 1] - upper[column])
        return first + (num_sequences - BATCHES[row]) / (BATCHES[row + 1] - BATCHES[row]) * (second - first)

    def prefill_s(self, tokens: int) -> float:
        """Seconds in which prompts of so many tokens in all are read."""
        pieces, rest = divmod(tokens, PROMPTS[-1])
        if not rest:
            return pieces * self.prefill[-1]
        at = min(bisect_right(PROMPTS, rest) - 1, len(PROMPTS) - 2)
        part = (rest - PROMPTS[at]) / (PROMPTS[at + 1] - PROMPTS[at])
        return pieces * self.prefill[-1] + self.prefill[at] + part * (self.prefill[at + 1] - self.prefill[at])


@dataclass(frozen=True)
class Kernels:
    """Where an engine's kernel times come from."""

    measured: Measured | None = None
    """None: a roofline has to do."""
    why: str = ""
    """Reason for that."""


@lru_cache(maxsize=64)
def kernels_of(shape: ModelShape, kind: GpuKind, parts: int, element_bytes: int, cache_bytes: int) -> Kernels:
    """The measured times of an engine that is split over `parts` GPUs, if there are any."""
    if KINDS.get(kind.name) != kind or kind.name not in SYSTEMS:
        return Kernels(why="not in the tables")
    if (element_bytes, cache_bytes) != (2, 2):
        return Kernels(why="not in bfloat16")
    try:
        from aiconfigurator_core.sdk.engine import EngineHandle  # late: an extra, and it takes time
    except ImportError:
        return Kernels(why="without penstock[planner]")
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)  # it tells of tables that are not asked for
    split = {"moe_tp_size": parts} if shape.num_experts else {}
    with TemporaryDirectory() as place:
        Path(place, "config.json").write_text(json.dumps(_config_of(shape)), encoding="utf-8")
        try:
            handle = EngineHandle.compile(place, SYSTEMS[kind.name], "vllm", tp_size=parts, **split)
            return Kernels(_tabulated(handle))
        except (AssertionError, KeyError, RuntimeError, ValueError):  # all that it raises for what it has no rows of
            return Kernels(why=f"no rows for this model, TP{parts}")


def rising(values: Sequence[float]) -> list[float]:
    """The values where they rise; where they fall, the geometric mean of the highest before and the lowest after. The
    result never falls."""
    highest = accumulate(values, max)
    lowest = [*accumulate(reversed(values), min)][::-1]
    return [math.sqrt(high * low) if high > low else high for high, low in zip(highest, lowest, strict=True)]


def _tabulated(handle: Any) -> Measured:
    """Times at the grid's points, which the package says in milliseconds."""
    by_context = [
        rising([handle.predict_decode_latency(batch, context) / 1e3 for batch in BATCHES]) for context in CONTEXTS
    ]
    prompts = rising([handle.predict_prefill_latency(1, tokens, 0) / 1e3 for tokens in PROMPTS])
    return Measured([rising(row) for row in zip(*by_context, strict=True)], prompts)


def _config_of(shape: ModelShape) -> dict[str, Any]:
    """A config.json with these sizes, of an architecture that has them."""
    kind = ("llama", "LlamaForCausalLM")
    if shape.num_experts:
        kind = ("qwen3_moe", "Qwen3MoeForCausalLM")
    elif shape.has_head_norms:
        kind = ("qwen3", "Qwen3ForCausalLM")
    return {
        "model_type": kind[0], "architectures": [kind[1]], "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_width // shape.head_dim, "head_dim": shape.head_dim,
        "intermediate_size": shape.mlp_width, "moe_intermediate_size": shape.mlp_width,
        "num_experts": shape.num_experts, "num_experts_per_tok": shape.experts_per_token,
        "vocab_size": shape.vocabulary, "tie_word_embeddings": shape.is_tied, "torch_dtype": "bfloat16",
        "max_position_embeddings": CONTEXTS[-1],
    }  # fmt: skip
