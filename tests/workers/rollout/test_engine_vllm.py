"""What the vLLM engine does when a load or its process fails: it resumes, or says that it is broken."""

import asyncio
import json
import os
import re
import signal
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from penstock.conf.errors import (
    ConfigError,
    DataError,
    DeadlineExceeded,
    ModelError,
    PenstockError,
    ResourceError,
    WeightError,
    WorkerDied,
)
from penstock.conf.model import FreshModelConfig
from penstock.conf.rollout import RolloutConfig
from penstock.metering.meters import Meters
from penstock.workers.agents.gateway.tool_calls import ANY, READERS, forced_call
from penstock.workers.fresh_model import build_fresh_model
from penstock.workers.models.routed_experts import RoutingShape
from penstock.workers.protocols import EngineSpec, Publication, SampleCall, Sampling
from penstock.workers.rollout.detokenizer import Detokenizer
from penstock.workers.rollout.engine_vllm import (
    VllmEngine,
    VllmRequest,
    VllmStats,
    engine_arguments,
    sampling_params,
    to_completion,
    vllm_environment,
)
from penstock.workers.rollout.kept_sequences import single_samples
from penstock.workers.rollout.prompt_scores import PromptScores
from penstock.workers.rollout.speculation import DraftTrial
from tests.metering.measured import measured
from tests.publications import write_publication
from tests.workers.rollout.fake_llm import Action, FakeLLM, fail, hang, is_serving

pytestmark = pytest.mark.real
pytest.importorskip("vllm", reason="vLLM is not installed: its engine is not tested")


@pytest.fixture
def publication(tmp_path: Path) -> Publication:
    return write_publication(tmp_path, 1, [("w", torch.ones(3))])


def load(
    llm: FakeLLM, publication: Publication, *, in_flight: int = 0, config: RolloutConfig | None = None
) -> tuple[VllmEngine, PenstockError | None]:
    """The engine after a load through `llm`, and what the load raised."""
    timeout_s = 0.2 if hang in llm.troubles.values() else 30.0
    engine = VllmEngine(EngineSpec(config or RolloutConfig(), "a-model", phase_timeout_s=timeout_s))
    engine.llm = llm
    engine.num_in_flight = in_flight
    try:
        asyncio.run(engine.load(publication))
    except PenstockError as error:
        return engine, error
    return engine, None


def test_a_load_in_flight_goes_through_its_phases_in_order(publication: Publication) -> None:
    llm = FakeLLM()
    engine, error = load(llm, publication, in_flight=2)
    assert error is None
    assert llm.calls == ["prepare", "pause", "start", "load", "finish", "version", "resume"]
    assert is_serving(engine)


def test_an_idle_engine_needs_no_pause_but_forgets_cached_prefixes(publication: Publication) -> None:
    llm = FakeLLM()
    _, error = load(llm, publication)
    assert error is None
    assert llm.calls == ["prepare", "reset", "start", "load", "finish", "version"]


def test_a_prefix_cache_that_is_not_forgotten_is_never_served_under_new_weights(publication: Publication) -> None:
    llm = FakeLLM()
    llm.forgets_prefixes = False
    engine, error = load(llm, publication)
    assert isinstance(error, WeightError)
    assert "phase pause: vLLM keeps prefixes that older weights have cached" in str(error)
    assert llm.calls == ["prepare", "reset"]
    assert is_serving(engine)


KEEP = RolloutConfig(on_update="keep")


def test_sequences_that_keep_their_cache_are_paused_without_a_reset(publication: Publication) -> None:
    llm = FakeLLM()
    _, error = load(llm, publication, in_flight=2, config=KEEP)
    assert error is None
    assert llm.calls == ["prepare", "pause", "abort", "start", "load", "finish", "version", "resume"]
    assert not llm.clears_cache


def test_a_sequence_without_a_token_begins_anew_under_new_weights(publication: Publication) -> None:
    """It would find cached blocks of older weights, and be told to be all of new ones."""
    given_up, llm = asyncio.Event(), FakeLLM()

    async def wait() -> None:
        states = llm.output_processor.request_states
        states["0-a"] = SimpleNamespace(external_req_id="0", detokenizer=SimpleNamespace(num_output_tokens=lambda: 0))
        llm.finish_reason = "abort"
        llm.troubles["generate"] = end
        await given_up.wait()

    def end() -> None:
        raise WorkerDied("far enough")

    async def scenario() -> None:
        engine = VllmEngine(EngineSpec(KEEP, "a-model"))
        engine.llm, llm.troubles = llm, {"generate": wait, "abort": given_up.set}
        group = asyncio.create_task(engine.generate([1], 1, Sampling()))
        while "generate" not in llm.calls:
            await asyncio.sleep(0.001)
        await engine.load(publication)
        with pytest.raises(WorkerDied, match="far enough"):
            await group

    asyncio.run(scenario())
    assert llm.salts == ["0", "1"]


def test_samples_alone_are_drawn_as_vllm_draws_those_of_a_group() -> None:
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.parallel_sampling import ParentRequest

    for seed in (None, 40):
        parameters = sampling_params(3, Sampling(seed=seed, stop=("x",)))
        request = EngineCoreRequest("a", [1], None, parameters, None, 0.0, None, None, None)
        request.external_req_id = "a"
        parent = ParentRequest(request)
        of_vllm = [parent.get_child_info(index)[1] for index in range(3)]
        assert single_samples(parameters) == of_vllm


@pytest.mark.parametrize("phase", ["pause", "start"])
@pytest.mark.parametrize(("trouble", "expected"), [(hang, DeadlineExceeded), (fail, WeightError)])
def test_a_failure_before_loading_resumes_under_the_old_weights(
    publication: Publication, phase: str, trouble: Action, expected: type[PenstockError]
) -> None:
    llm = FakeLLM(**{phase: trouble})
    engine, error = load(llm, publication, in_flight=1)
    assert isinstance(error, expected)
    assert f"version 1, phase {phase}" in str(error)
    assert llm.calls[-1] == "resume"
    assert is_serving(engine)


@pytest.mark.parametrize("phase", ["load", "finish", "version", "resume"])
@pytest.mark.parametrize(("trouble", "expected"), [(hang, DeadlineExceeded), (fail, WeightError)])
def test_a_failure_from_loading_on_marks_the_engine_broken(
    publication: Publication, phase: str, trouble: Action, expected: type[PenstockError]
) -> None:
    llm = FakeLLM(**{phase: trouble})
    engine, error = load(llm, publication, in_flight=1)
    assert isinstance(error, expected)
    assert f"version 1, phase {phase}" in str(error)
    assert not is_serving(engine)
    with pytest.raises(WorkerDied, match=f"phase {phase}"):
        asyncio.run(engine.generate([1], 1, Sampling()))


def test_an_engine_that_serves_another_version_than_asked_for_is_broken(publication: Publication) -> None:
    llm = FakeLLM(finish=lambda: setattr(llm, "version", "default"))
    engine, error = load(llm, publication)
    assert isinstance(error, WeightError)
    assert "it serves 'default'" in str(error)
    assert not is_serving(engine)


def test_a_damaged_publication_never_reaches_the_engine(publication: Publication) -> None:
    file = Path(publication.directory) / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    llm = FakeLLM()
    engine, error = load(llm, publication, in_flight=1)
    assert isinstance(error, WeightError)
    assert llm.calls == ["prepare"]
    assert is_serving(engine)


def test_prompts_wait_while_weights_are_exchanged(publication: Publication) -> None:
    order: list[str] = []

    async def slow() -> None:
        await asyncio.sleep(0.05)
        order.append("loaded")

    async def scenario() -> None:
        engine = VllmEngine(EngineSpec(RolloutConfig(), "a-model"))

        def request() -> None:
            order.append("requested")
            raise WorkerDied("far enough")

        engine.llm = FakeLLM(load=slow, generate=request)
        loading = asyncio.create_task(engine.load(publication))
        while "load" not in engine.llm.calls:
            await asyncio.sleep(0.001)
        with pytest.raises(WorkerDied, match="far enough"):
            await engine.generate([1], 1, Sampling())
        await loading

    asyncio.run(scenario())
    assert order == ["loaded", "requested"]


def test_an_engine_that_was_never_started_says_so() -> None:
    engine = VllmEngine(EngineSpec(RolloutConfig(), "a-model"))
    with pytest.raises(WorkerDied, match="never started"):
        asyncio.run(engine.generate([1], 1, Sampling()))


def generating(llm: FakeLLM) -> tuple[VllmEngine, PenstockError]:
    """The engine after a request that fails, and how it did."""
    engine = VllmEngine(EngineSpec(RolloutConfig(), "a-model"))
    engine.llm = llm
    with pytest.raises(PenstockError) as error:
        asyncio.run(engine.generate([1], 1, Sampling()))
    return engine, error.value


def not_generated() -> None:
    from vllm.v1.engine.exceptions import EngineGenerateError

    raise EngineGenerateError from OverflowError("too large to convert")


def test_a_request_that_fails_alone_is_no_death_and_leaves_nothing_behind() -> None:
    llm = FakeLLM(generate=not_generated)
    engine, error = generating(llm)
    assert isinstance(error, DataError)
    assert "too large to convert" in str(error)
    assert llm.calls == ["generate", "abort"]
    assert is_serving(engine)


def test_a_request_that_the_engine_ends_with_an_error_is_no_death() -> None:
    """As it ends one whose grammar it cannot compile."""
    llm = FakeLLM()
    llm.finish_reason = "error"
    engine, error = generating(llm)
    assert isinstance(error, DataError)
    assert is_serving(engine)


def test_requests_that_fail_as_the_engine_is_gone_say_so() -> None:
    llm = FakeLLM(generate=not_generated)
    llm.errored = True
    engine, error = generating(llm)
    assert isinstance(error, WorkerDied)
    assert not is_serving(engine)


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    engine = VllmEngine(EngineSpec(RolloutConfig(), str(tmp_path / "nothing")))
    with pytest.raises(ModelError, match=r"model\.path=.*nothing"):
        asyncio.run(engine.start())


@pytest.mark.usefixtures("warm_spawn")
def test_an_engine_whose_process_fails_at_the_start_says_why_in_its_own_words(tiny_model: Path) -> None:
    """There is room for fewer tokens than one request may have."""
    engine = VllmEngine(EngineSpec(RolloutConfig(max_model_len=512, kv_cache_gib=1e-5), str(tiny_model)))
    with pytest.raises(ResourceError) as raised:
        asyncio.run(engine.start())
    message = str(raised.value)
    assert re.match(r"the vLLM engine for .* did not start: ValueError: .*memory", message)
    assert "The end of its output:" in message
    assert "rollout.kv_cache_gib" in message


@pytest.mark.usefixtures("cold_spawn")
def test_a_killed_engine_process_ends_requests_with_worker_died(tiny_model: Path) -> None:
    async def scenario() -> None:
        engine = VllmEngine(EngineSpec(RolloutConfig(max_model_len=512, kv_cache_gib=0.25), str(tiny_model)))
        before = {process.pid for process in psutil.Process().children()}
        await engine.start()
        started = {process.pid for process in psutil.Process().children()} - before
        group = asyncio.create_task(engine.generate([5, 6], 2, Sampling(max_tokens=500, ignore_eos=True)))
        await asyncio.sleep(0.2)
        for pid in started:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match="is gone: its process ended: killed by SIGKILL"):
            await asyncio.wait_for(group, 60)
        with pytest.raises(WorkerDied):
            await engine.generate([5], 1, Sampling())
        await engine.close()

    asyncio.run(scenario())


def test_ones_own_options_reach_vllm_and_unknown_ones_are_told_with_near_ones() -> None:
    options = {"enable_prefix_caching": False, "max_num_batched_tokens": 2048}
    arguments = engine_arguments(EngineSpec(RolloutConfig(engine_options=options), "a-model"))
    assert {name: arguments[name] for name in options} == options
    assert arguments["dtype"] == "float32"
    with pytest.raises(ConfigError, match=r"engine_options.enable_prefix_cache: .* Near it: .*enable_prefix_caching"):
        engine_arguments(EngineSpec(RolloutConfig(engine_options={"enable_prefix_cache": False}), "a-model"))


def test_experts_are_asked_of_vllm_and_read_from_the_layers_that_have_routers() -> None:
    from vllm.logprobs import FlatLogprobs, Logprob
    from vllm.outputs import CompletionOutput, WeightVersionSpan

    spec = EngineSpec(RolloutConfig(router_replay=True, num_gpus_per_worker=1), "a-model")
    assert engine_arguments(spec)["enable_return_routed_experts"] is True
    with vllm_environment(spec):
        assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    # A prompt of two tokens, a response of two, three layers of which the second is dense, two experts of eight.
    experts = np.arange(3 * 3 * 2, dtype=np.uint8).reshape(3, 3, 2)
    logprobs = FlatLogprobs()
    for token in (7, 8):
        logprobs.append({token: Logprob(-1.0)})
    sample = CompletionOutput(
        0, "", [7, 8], None, logprobs, routed_experts=experts, finish_reason="length",
        weight_versions=[WeightVersionSpan("3", 0, 2)],
    )  # fmt: skip
    completion = to_completion(sample, Detokenizer(None), detokenized=True, routing=RoutingShape((0, 2), 8, 2))
    assert (completion.token_ids, completion.versions) == ([7, 8], [3, 3])
    assert list(completion.routed_experts) == [0, 1, 4, 5, 6, 7, 10, 11, 12, 13, 16, 17]


def test_tokens_of_which_vllm_does_not_say_the_version_end_the_run() -> None:
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput, WeightVersionSpan

    for spans, found in ((None, 0), ([WeightVersionSpan("3", 0, 1)], 1)):
        sample = CompletionOutput(0, "", [7, 8], None, FlatLogprobs(), finish_reason="length", weight_versions=spans)
        with pytest.raises(ResourceError, match=f"{found} of 2 sampled tokens .* Install the version of vLLM"):
            to_completion(sample, Detokenizer(None), detokenized=True)


def test_no_option_of_vllm_decides_whether_tokens_have_a_version() -> None:
    """One that comes with a newer vLLM is to be set: `sampling_params` or `engine_arguments` ask for versions then."""
    from vllm import AsyncEngineArgs, SamplingParams

    names = [*SamplingParams.__struct_fields__, *(field.name for field in fields(AsyncEngineArgs))]
    assert [name for name in names if "version" in name and "weight" in name] == []


@pytest.mark.parametrize("chooses", [False, True])
def test_the_whole_vocabulary_is_scored_at_the_last_tokens_of_a_prompt_alone(chooses: bool) -> None:
    from vllm.logprobs import FlatLogprobs

    vocabulary, num = 6, 2
    call = SampleCall([1, 2, 3, 4, 5], 1, Sampling(seed=0), prompt_logprobs=True, vocabulary_positions=num)
    request = VllmRequest(call, vocabulary, chooses, (), Detokenizer(None))
    asked = request.scored()
    model: Any = SimpleNamespace(max_logprobs=-1, max_model_len=16, get_vocab_size=lambda: vocabulary)
    asked._validate_logprobs(model)
    flat: Any = FlatLogprobs()
    flat.append(None)
    if chooses:
        assert (asked.prompt_logprobs, asked.prompt_logprob_start) == (0, 2)
        np.testing.assert_array_equal(asked.prompt_logprob_token_ids, [range(vocabulary)] * num)
    else:
        assert asked.prompt_logprobs == -1
    expected = np.random.default_rng(0).normal(size=(5, vocabulary)).astype(np.float32)
    for position in range(1, 5):
        own = call.prompt_ids[position]
        every = [] if chooses else [token for token in range(vocabulary) if token != own]
        flat.append_fast(
            [own, own, *every],
            [expected[position, token] for token in (own, own, *every)],
            iter(range(9)),
            iter("." * 9),
        )
    output = SimpleNamespace(prompt_logprobs=flat, prompt_token_id_logprobs=expected[-num:])
    scores = PromptScores(call, vocabulary)
    request.fill(scores, output)
    np.testing.assert_array_equal(scores.output([]).vocabulary_logprobs, expected[-num:])


def test_vllms_own_deadline_comes_after_that_of_loading_and_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_ENGINE_READY_TIMEOUT_S", raising=False)
    compiles = RolloutConfig(start_timeout_s=300.0, compile_timeout_s=600.0, enforce_eager=False)
    for config, ready in ((RolloutConfig(start_timeout_s=300.0), None), (compiles, "900")):
        with vllm_environment(EngineSpec(config, "a-model")):
            assert os.environ.get("VLLM_ENGINE_READY_TIMEOUT_S") == ready
    monkeypatch.setenv("VLLM_ENGINE_READY_TIMEOUT_S", "1200")
    with vllm_environment(EngineSpec(compiles, "a-model")):
        assert os.environ["VLLM_ENGINE_READY_TIMEOUT_S"] == "1200"


def test_a_response_has_the_structure_that_was_asked_for(tmp_path: Path) -> None:
    fresh = FreshModelConfig(num_layers=1, hidden_size=64, intermediate_size=64, num_heads=2, num_kv_heads=1)
    build_fresh_model(tmp_path, fresh, seed=0)
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    asked: list[dict[str, Any]] = [{"regex": "[a-c]{3}"}, {"choice": ["yes", "no"]}, {"json": schema}]
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("add", "end")]
    asked += [forced_call("hermes", tools, ANY), forced_call("llama3_json", tools, "end")]

    async def scenario() -> tuple[list[Any], list[str]]:
        config = RolloutConfig(kv_cache_gib=0.1, max_model_len=512)
        engine = VllmEngine(EngineSpec(config, str(tmp_path), by_priority=True))
        await engine.start()
        try:
            sampling = Sampling(max_tokens=500, seed=1, priority=3)
            found = [await engine.generate([5, 6], 1, replace(sampling, structure=one)) for one in asked]
            refused = []
            for wrong in ({"nonsense": 1}, {"regex": "(("}):
                with pytest.raises(DataError) as error:
                    await engine.generate([5, 6], 1, replace(sampling, structure=wrong))
                refused.append(str(error.value))
            for name, value in (("top_k", 10**30), ("stop", ("\ud800",)), ("temperature", -1.0)):
                unchecked = replace(sampling)
                object.__setattr__(unchecked, name, value)  # as no request can be: the engine holds by itself, too
                with pytest.raises(DataError):
                    await engine.generate([5, 6], 1, unchecked)
            assert engine.sampled().num_in_flight == 0
            return [completion for (completion,) in found], refused
        finally:
            await engine.close()

    (letters, choice, value, tagged, bare), refused = asyncio.run(scenario())
    assert re.fullmatch("[a-c]{3}", letters.text)
    assert choice.text in ("yes", "no")
    assert isinstance(json.loads(value.text)["a"], bool)
    for tool_format, completion, names in (("hermes", tagged, ("add", "end")), ("llama3_json", bare, ("end",))):
        said, (call,), problem = READERS[tool_format](completion.text, tools)
        assert (said, problem) == ("", "")
        assert call.name in names
        assert isinstance(call.arguments["a"], bool)
    assert letters.logprobs[-1] == pytest.approx(0.0, abs=1e-6)  # nothing but the end was possible
    assert "nonsense" in refused[0]
    assert "vLLM refuses the request" in refused[1]


def test_what_vllm_says_of_a_step_is_noted() -> None:
    from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats

    meters = Meters()
    stats = VllmStats(meters, DraftTrial())
    logger = stats.logger(None, 0)
    said = SchedulerStats(
        num_running_reqs=3, num_waiting_reqs=2, num_skipped_waiting_reqs=1, kv_cache_usage=0.25,
        prefix_cache_stats=PrefixCacheStats(requests=1, queries=64, hits=32, preempted_queries=100, preempted_hits=10),
    )  # fmt: skip
    logger.record(said, None)
    logger.record(said, None)
    logger.record(None, None)
    assert (stats.num_waiting, stats.num_read_again) == (3, 2 * 90)
    assert measured(meters) == {
        "rollout_kv_cache_usage_ratio": 0.25, "rollout_prefix_lookup_tokens_total": 128,
        "rollout_prefix_hit_tokens_total": 64,
    }  # fmt: skip
