"""Kernel times from aiconfigurator-core's tables: what they say, at points and between them, and do not know."""

import csv
import math
import random
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import aiconfigurator_core
import pytest
from aiconfigurator_core.sdk.engine import EngineHandle
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.main import main
from penstock.conf.rollout import QUANTIZED_ONLINE, Precision, RolloutConfig
from penstock.orchestrator.configuration.compose import load_config
from penstock.planner.cost_model import (
    BATCHES,
    CONTEXTS,
    Efficiencies,
    EngineCosts,
    KernelTables,
    describe_kernel_sources,
    kernels_of,
    rising,
)
from penstock.planner.hardware import KINDS, GpuKind
from penstock.planner.plan_inputs import known_shape, search_of

BETWEEN, MOST_BETWEEN = 0.05, 0.06
"""Largest distance from the tables between points of the grid: of 99 in 100, and of any."""
TIMES = [
    ("meta-llama/Llama-3.1-8B", "meta-llama/Meta-Llama-3.1-8B", 1, (6.2, 7.2, 9.6, 12.5, 17.9, 30.2), 200),
    ("Qwen/Qwen3-32B", "Qwen/Qwen3-32B", 4, (8.2, 8.6, 10.9, 12.7, 15.8, 24.1), 274),
    ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B", 2, (3.7, 7.3, 12.9, 15.3, 18.2, 23.7), 101),
    ("meta-llama/Llama-3.1-70B", "meta-llama/Meta-Llama-3.1-70B", 8, (10.2, 10.3, 11.2, 13.7, 16.2, 23.1), 344),
]
"""Milliseconds on H100: decode steps at 2,000 tokens of context of 1, 8, 32, 64, 128 and 256 sequences, and a prompt of
8,192 tokens. The second name is the package's, for a config.json that it has itself."""
SERVED = Path(aiconfigurator_core.__file__).parent / "systems" / "silicon_sample.csv"
SMALL = ("recipe=gsm8k", "model.path=Qwen/Qwen2.5-1.5B-Instruct", "rollout.max_model_len=1536",
         "rollout.sampling.max_tokens=1024", "trainer.groups_per_step=8")  # fmt: skip


def measured(name: str, parts: int, kind: str = "h100") -> KernelTables:
    shape = known_shape(name)
    assert shape is not None
    found = kernels_of(shape, KINDS[kind], parts, Precision()).measured
    assert found is not None
    return found


@pytest.mark.parametrize(("name", "own", "parts", "decode_ms", "prefill_ms"), TIMES)
def test_times_are_those_of_the_tables(
    name: str, own: str, parts: int, decode_ms: tuple[float, ...], prefill_ms: float
) -> None:
    """At the points, but for what is made to rise; between them by less than 5%."""
    engine = measured(name, parts)
    found = [1e3 * engine.decode_s(batch, 2000) for batch in (1, 8, 32, 64, 128, 256)]
    assert found == pytest.approx(decode_ms, rel=0.035)
    assert 1e3 * engine.prefill_s(8192) == pytest.approx(prefill_ms, rel=0.01)
    split = {"moe_tp_size": parts} if "A3B" in own else {}
    handle, random_points = EngineHandle.compile(own, "h100_sxm", "vllm", tp_size=parts, **split), random.Random(0)
    far = []
    for _ in range(1000):
        batch, context = round(2 ** random_points.uniform(0, 10)), round(2 ** random_points.uniform(6, 16))
        far.append(abs(engine.decode_s(batch, context) / handle.predict_decode_latency(batch, context) * 1e3 - 1))
    far.sort()
    assert far[990] <= BETWEEN
    assert far[-1] <= MOST_BETWEEN


@given(st.floats(1, 5000), st.floats(0, 3000), st.floats(1, 131_072), st.floats(0, 50_000))
def test_more_sequences_and_longer_contexts_never_take_less(
    batch: float, more: float, context: float, longer: float
) -> None:
    for name, _, parts, _, _ in TIMES:
        engine = measured(name, parts)
        least = engine.decode_s(batch, context) * (1 - 1e-9)
        assert engine.decode_s(batch + more, context) >= least
        assert engine.decode_s(batch, context + longer) >= least


@given(st.lists(st.integers(1, 20_000), min_size=2, max_size=4))
def test_prompts_that_are_longer_take_longer_also_in_pieces(tokens: list[int]) -> None:
    engine, tokens = measured("Qwen/Qwen3-32B", 4), sorted(tokens)
    seconds = [engine.prefill_s(number) for number in tokens]
    assert seconds == sorted(seconds)
    assert engine.prefill_s(2 * 8192) == pytest.approx(2 * engine.prefill_s(8192))


def test_points_are_even_between_two_by_hand() -> None:
    decode = [[float(batch + context) for context in CONTEXTS] for batch in BATCHES]
    engine = KernelTables(decode, [1.0] * 9)
    assert engine.decode_s(100.5, 3000) == pytest.approx(3100.5)
    assert engine.decode_s(6000, 200_000) == pytest.approx(206_000)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=30))
def test_what_falls_is_met_halfway_and_what_rises_stays(values: list[float]) -> None:
    found = rising(values)
    assert all(before <= after * (1 + 1e-9) for before, after in pairwise(found))
    dent = max(max(values[: at + 1]) / value for at, value in enumerate(values))
    for value, new in zip(values, found, strict=True):
        assert abs(math.log(new / value)) <= math.log(dent) / 2 + 1e-9 or dent == 1
    assert rising(sorted(values)) == sorted(values)


def test_a_dent_by_hand() -> None:
    assert rising([1.0, 4.0, 1.0, 5.0]) == pytest.approx([1.0, 2.0, 2.0, 5.0])


SHAPE = known_shape("Qwen/Qwen2.5-7B")


PLAIN = Precision()


@pytest.mark.parametrize(("kind", "parts", "precision", "why"), [
    (KINDS["h20"], 1, PLAIN, "not in the tables"), (KINDS["h800"], 1, PLAIN, "not in the tables"),
    (replace(KINDS["h100"], bandwidth=1e12), 1, PLAIN, "not in the tables"),
    (GpuKind("mine", 1e14, 1e12, 80, 1e11), 1, PLAIN, "not in the tables"),
    (KINDS["h100"], 1, RolloutConfig(dtype="float32").precision, "not in bfloat16"),
    (KINDS["h100"], 1, QUANTIZED_ONLINE["mxfp4"], "not in bfloat16"),
    (KINDS["h100"], 8, PLAIN, "no rows for this model, TP8"),
])  # fmt: skip
def test_what_the_tables_do_not_know_is_the_rooflines(
    kind: GpuKind, parts: int, precision: Precision, why: str
) -> None:
    assert SHAPE is not None
    found = kernels_of(SHAPE, kind, parts, precision)
    assert (found.measured, found.why) == (None, why)
    engine = EngineCosts(SHAPE, kind, Efficiencies(), parts, precision, found)
    assert engine.kernels_s(8, 100) == replace(engine, kernels=type(found)()).kernels_s(8, 100)
    assert describe_kernel_sources([engine]) == f"Kernel times of engines: {kind.name} from a roofline ({why})."


@pytest.mark.parametrize(("kind", "most"), [("h100", 0.10), ("h200", 0.07), ("b200", 0.10)])
def test_an_engine_in_fp8_serves_as_fast_as_was_measured(kind: str, most: float) -> None:
    """Llama-3.1-70B of 1 to 8 GPUs and 4 to 64 sequences, in the mean: the package's sample of measured serving. A
    token of each of `batch_size` sequences takes a decode step, and their prompts are read meanwhile."""
    shape = known_shape("meta-llama/Llama-3.1-70B")
    assert shape is not None
    errors = []
    with SERVED.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found = [row[name] for name in ("backend", "model_path", "system", "precision", "mode")]
            if found != ["vllm", "meta-llama/Llama-3.1-70B", f"{kind}_sxm", "fp8", "agg"]:
                continue
            read, made, batch, parts = (int(row[name]) for name in ("isl", "osl", "batch_size", "tp_size"))
            rates = Efficiencies(decode_factor=1.0)
            engine = EngineCosts(shape, KINDS[kind], rates, parts, QUANTIZED_ONLINE["fp8"])
            token_s = engine.decode_s(batch, read + made / 2) + engine.prefill_s(read) * batch / made
            errors.append(abs(1e3 * token_s / float(row["silicon_tpot_ms"]) - 1))
    assert len(errors) >= 45
    assert sum(errors) / len(errors) < most


def test_without_the_extra_plans_are_made_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SHAPE is not None
    monkeypatch.setitem(sys.modules, "aiconfigurator_core.sdk.engine", None)
    found = kernels_of.__wrapped__(SHAPE, KINDS["h100"], 1, PLAIN)
    assert (found.measured, found.why) == (None, "without penstock[planner]")


def test_a_run_in_float32_or_with_a_small_cache_is_not_taken_for_measured() -> None:
    search = search_of(load_config(list(SMALL)), "1x4:h100", "400")
    plan = search.plans[0]
    (kind, _), *_ = plan.candidate.engines
    for words in (["rollout.dtype=float32"], ["+rollout.engine_options.kv_cache_dtype=fp8"]):
        memory = search.memory(load_config([*SMALL, *words]), kind)
        assert search.durations(memory, kind, kind).engine.kernels.why == "not in bfloat16"


def test_a_plan_says_where_kernel_times_come_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL, "--cluster", "1x2:h100,1x2:h20", "--lengths", "400"]) == 0
    (line,) = (one for one in capsys.readouterr().out.splitlines() if one.startswith("Kernel times"))
    assert "h100 from the measured tables of aiconfigurator-core 0.12.0" in line
    assert "h20 from a roofline (not in the tables)" in line
