"""What every real rollout engine promises, checked against a plain forward pass of transformers."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from penstock.conf.errors import PromptRefused, UnknownAdapter, WeightError
from penstock.workers.fresh_model import BOS, EOS_ID, character_vocabulary
from penstock.workers.protocols import Completion, Publication, SampleCall, Sampling, SamplingProgress
from penstock.workers.rollout import engine_vllm
from penstock.workers.rollout.engine_hf import sampling_logprobs

pytestmark = pytest.mark.real

PROMPT = [20, 14, 21, 32, 50]
BOS_ID = character_vocabulary()[BOS]
TOLERANCE = 1e-4


def generate(served, num_samples: int = 4, prompt: Sequence[int] = PROMPT, **sampling) -> list[Completion]:
    options = {"max_tokens": 24, "seed": 5, **sampling}
    return served.call(served.engine.generate(list(prompt), num_samples, Sampling(**options)))


@torch.no_grad()
def expected_logprobs(
    served, completion: Completion, sampling: Sampling, prompt: Sequence[int] = PROMPT
) -> torch.Tensor:
    """`[T, V]`: the sampling distribution at each response token, from one forward pass over prompt and response."""
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    logits = served.model(ids).logits[0, len(prompt) - 1 : -1]
    return sampling_logprobs(logits, sampling)


def assert_logprobs_match(served, completion: Completion, sampling: Sampling) -> None:
    logprobs = expected_logprobs(served, completion, sampling)
    chosen = logprobs.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(completion.logprobs), chosen, rtol=0, atol=TOLERANCE)


def test_a_group_has_as_many_samples_as_asked_for(served) -> None:
    for num_samples in (1, 3, 8):
        assert len(generate(served, num_samples)) == num_samples


def test_every_token_has_a_logprob_and_a_version(served) -> None:
    for completion in generate(served):
        assert len(completion.token_ids) == len(completion.logprobs) == len(completion.versions) > 0
        assert set(completion.versions) == {served.version}
        assert all(isinstance(token, int) for token in completion.token_ids)
        assert all(isinstance(logprob, float) for logprob in completion.logprobs)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_k": 5},
        {"top_p": 0.4},
        {"min_p": 0.5},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.7},
    ],
    ids=str,
)
def test_logprobs_are_those_of_the_sampling_distribution(served, options: dict[str, float]) -> None:
    for completion in generate(served, ignore_eos=True, **options):
        assert_logprobs_match(served, completion, Sampling(**options))


def test_samples_for_a_server_are_of_the_published_weights_too(served) -> None:
    sampling = Sampling(max_tokens=8, seed=5, ignore_eos=True, temperature=0.7)
    output = served.call(served.engine.sample(None, SampleCall(PROMPT, 2, sampling, prompt_logprobs=True)))
    rows = served.model(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
    said = rows.gather(-1, torch.tensor(PROMPT[1:])[:, None])[:, 0].detach()
    torch.testing.assert_close(torch.tensor(output.prompt_logprobs[1:]), said, rtol=0, atol=TOLERANCE)
    for sample in output.samples:
        assert_logprobs_match(served, sample, sampling)
    with pytest.raises(UnknownAdapter):
        served.call(served.engine.sample("none", SampleCall(PROMPT, 2, sampling)))


def test_greedy_takes_the_likeliest_token_and_reports_the_models_probability(served) -> None:
    completion = generate(served, 1, temperature=0.0, seed=None)[0]
    logprobs = expected_logprobs(served, completion, Sampling(temperature=0.0))
    assert completion.token_ids == logprobs.argmax(-1).tolist()
    assert_logprobs_match(served, completion, Sampling(temperature=0.0))


def test_several_greedy_samples_are_equal_for_a_run_and_for_a_server(served) -> None:
    first, *others = generate(served, 3, temperature=0.0, seed=None)
    assert len(others) == 2
    sampling = Sampling(max_tokens=24, seed=5, temperature=0.0)
    asked = SampleCall(PROMPT, 3, sampling, prompt_logprobs=True)
    samples = served.call(served.engine.sample(None, asked)).samples
    assert len(samples) == 3
    for one in (*others, *samples):
        assert one.token_ids == first.token_ids
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(first.logprobs), rtol=0, atol=TOLERANCE)


def test_seeds_make_samples_reproducible_and_distinct(served) -> None:
    first, again = generate(served, 6), generate(served, 6)
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    assert len({tuple(c.token_ids) for c in first}) == 6


def test_sample_i_uses_the_groups_seed_plus_i(served) -> None:
    group = generate(served, 3, seed=40)
    assert group[2].token_ids == generate(served, 1, seed=42)[0].token_ids


def test_other_groups_in_flight_change_nothing(served) -> None:
    alone = generate(served, 4, seed=11)

    async def together() -> list[list[Completion]]:
        prompts = [[10 + i, 30, 40] for i in range(6)]
        requests = [
            served.engine.generate(prompt, 4, Sampling(max_tokens=24, seed=i)) for i, prompt in enumerate(prompts)
        ]
        return await asyncio.gather(*requests, served.engine.generate(PROMPT, 4, Sampling(max_tokens=24, seed=11)))

    assert [c.token_ids for c in served.call(together())[-1]] == [c.token_ids for c in alone]


def test_a_group_that_nobody_waits_for_any_more_is_sampled_no_further(served) -> None:
    alone = generate(served, 4, seed=11)

    async def cancelled() -> None:
        long = Sampling(max_tokens=200, ignore_eos=True, seed=1)
        task = asyncio.ensure_future(served.engine.generate(PROMPT, 4, long))
        start = served.engine.sampled().num_tokens
        while served.engine.sampled().num_tokens - start < 8:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        while served.engine.sampled().num_in_flight:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.1)
        assert served.engine.sampled().num_tokens - start < 4 * 200

    served.call(cancelled())
    assert [c.token_ids for c in generate(served, 4, seed=11)] == [c.token_ids for c in alone]


def test_without_a_seed_samples_differ_from_call_to_call(served) -> None:
    assert generate(served, seed=None)[0].token_ids != generate(served, seed=None)[0].token_ids


def test_the_end_of_sequence_token_stays_as_the_last_one(served) -> None:
    completions = generate(served, 16, max_tokens=200)
    stopped = [c for c in completions if c.finish_reason == "stop"]
    assert stopped
    for completion in stopped:
        assert completion.token_ids.index(EOS_ID) == len(completion.token_ids) - 1
        assert "<eos>" not in completion.text
        assert_logprobs_match(served, completion, Sampling())


def test_ignoring_the_end_of_sequence_samples_on_to_max_tokens(served) -> None:
    for completion in generate(served, 8, max_tokens=150, ignore_eos=True):
        assert len(completion.token_ids) == 150
        assert completion.finish_reason == "length"


def test_text_is_the_tokens_decoded_without_special_ones(served, tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    for completion in generate(served, 8, max_tokens=100):
        assert completion.text == tokenizer.decode(completion.token_ids, skip_special_tokens=True)


def test_a_response_ends_at_a_stop_string_which_is_not_in_its_text(served) -> None:
    free = generate(served, 1, ignore_eos=True, max_tokens=40)[0]
    stop = free.text[10:12]
    stopped = generate(served, 1, ignore_eos=True, max_tokens=40, stop=(stop, "never there"))[0]
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert len(stopped.token_ids) == len(stopped.logprobs) == len(stopped.versions)


def test_a_response_ends_at_a_stop_string_that_is_a_special_token(served) -> None:
    free = [one for one in generate(served, 8, ignore_eos=True, max_tokens=40) if BOS_ID in one.token_ids]
    assert free, "another seed is needed: no response has the token"
    stopped = generate(served, 8, ignore_eos=True, max_tokens=40, stop=(BOS,))
    ended = [one for one in stopped if one.finish_reason == "stop"]
    assert [one.token_ids for one in ended] == [one.token_ids[: one.token_ids.index(BOS_ID) + 1] for one in free]
    assert not any(BOS in one.text for one in ended)


def test_a_response_ends_where_the_models_context_does(served) -> None:
    prompt = [10 + i % 80 for i in range(500)]
    completion = generate(served, 1, prompt=prompt, max_tokens=100, ignore_eos=True)[0]
    assert len(completion.token_ids) == 12
    assert completion.finish_reason == "length"


@pytest.mark.parametrize("num_prompt_tokens", [0, 512, 600])
def test_a_prompt_without_room_for_a_response_names_the_key(served, num_prompt_tokens: int) -> None:
    with pytest.raises(PromptRefused, match=r"rollout\.max_model_len"):
        generate(served, prompt=[20] * num_prompt_tokens)


def test_tokens_count_while_their_sample_is_in_flight(served) -> None:
    async def watched() -> list[SamplingProgress]:
        before = served.engine.sampled()
        sampling = Sampling(max_tokens=300, seed=6, ignore_eos=True)
        group = asyncio.create_task(served.engine.generate(PROMPT, 4, sampling))
        seen = [before]
        while not group.done():
            await asyncio.sleep(0.005)
            seen.append(served.engine.sampled())
        await group
        return [*seen, served.engine.sampled()]

    before, *during, after = served.call(watched())
    assert (before.num_in_flight, after.num_in_flight) == (0, 0)
    assert after.num_tokens - before.num_tokens == 4 * 300
    midway = {seen.num_tokens for seen in during if before.num_tokens < seen.num_tokens < after.num_tokens}
    assert len(midway) > 3
    assert max(seen.num_in_flight for seen in during) == 4
    assert (before.tokens_in_flight, after.tokens_in_flight) == (0, 0)
    assert all(
        seen.tokens_in_flight == seen.num_tokens - before.num_tokens for seen in during if seen.num_tokens in midway
    )


def test_tokens_of_samples_that_wait_for_others_of_their_group_count(served) -> None:
    before = served.engine.sampled().num_tokens
    completions = generate(served, 8, max_tokens=200)
    assert len({len(completion.token_ids) for completion in completions}) > 1
    assert served.engine.sampled().num_tokens - before == sum(len(c.token_ids) for c in completions)


def test_after_a_load_samples_come_from_the_new_weights(served) -> None:
    before = generate(served)
    served.call(served.engine.load(served.change_weights(seed=1)))
    assert served.call(served.engine.version()) == served.version
    after = generate(served, ignore_eos=True)
    assert [c.token_ids for c in after] != [c.token_ids for c in before]
    for completion in after:
        assert set(completion.versions) == {served.version}
        assert_logprobs_match(served, completion, Sampling())


def test_weights_that_are_not_finite_are_named_and_their_samples_are_not_finite(served) -> None:
    assert served.call(served.engine.nonfinite_weights()) == []
    if served.adapter is not None:
        return
    norm = served.model.model.norm.weight
    kept = norm.detach().clone()
    with torch.no_grad():
        norm[3] = torch.nan
    served.call(served.engine.load(served.change_weights(seed=8)))
    for sampling in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 1}):
        assert not generate(served, 1, max_tokens=4, ignore_eos=True, **sampling)[0].is_finite
    assert served.call(served.engine.nonfinite_weights()) == ["model.norm.weight"]
    with torch.no_grad():
        norm.copy_(kept)
    served.call(served.engine.load(served.change_weights(seed=9)))
    assert served.call(served.engine.nonfinite_weights()) == []
    assert generate(served, 1, max_tokens=4)[0].is_finite


def test_sequences_in_flight_go_on_under_the_new_weights_and_say_so(served) -> None:
    old_version = served.version
    old_state = {name: tensor.clone() for name, tensor in served.model.state_dict().items()}
    sampling = Sampling(max_tokens=400, seed=3, ignore_eos=True)

    async def load_in_flight() -> list[list[Completion]]:
        groups = [asyncio.create_task(served.engine.generate(PROMPT, 4, sampling.seeded(100 * i))) for i in range(2)]
        await asyncio.sleep(0.3)
        await served.engine.load(publication)
        return await asyncio.gather(*groups)

    publication = served.change_weights(seed=2)
    completions = [completion for group in served.call(load_in_flight()) for completion in group]
    crossing = [c for c in completions if len(set(c.versions)) == 2]
    assert crossing, "no sequence was in flight when the weights changed"
    for completion in crossing:
        assert completion.versions == sorted(completion.versions)
        assert set(completion.versions) == {old_version, served.version}
    completion = crossing[0]
    switch = completion.versions.index(served.version)
    new_state = {name: tensor.clone() for name, tensor in served.model.state_dict().items()}
    served.model.load_state_dict(old_state)
    early = Completion(completion.token_ids[:switch], completion.logprobs[:switch], [], "", "length")
    assert_logprobs_match(served, early, Sampling())
    expected = continued_logprobs(served, completion, switch, new_state)
    torch.testing.assert_close(torch.tensor(completion.logprobs[switch:]), expected, rtol=0, atol=TOLERANCE)


@torch.no_grad()
def continued_logprobs(served, completion: Completion, switch: int, new_state: dict[str, torch.Tensor]) -> torch.Tensor:
    """`[T - switch]`: log-probabilities of the tokens after the switch. vLLM recomputes the prefix under the new
    weights; the hf engine keeps the keys and values that the old ones made. The checking model ends with the new
    weights."""
    from transformers import DynamicCache

    ids = torch.tensor([[*PROMPT, *completion.token_ids]])
    num_old = len(PROMPT) + switch - 1
    cache = DynamicCache(config=served.model.config)
    if served.name == "hf":
        served.model(ids[:, :num_old], past_key_values=cache)
    served.model.load_state_dict(new_state)
    if served.name == "hf":
        logits = served.model(ids[:, num_old:-1], past_key_values=cache).logits[0]
    else:
        logits = served.model(ids).logits[0, num_old:-1]
    return logits.log_softmax(-1).gather(-1, ids[0, num_old + 1 :, None])[:, 0]


def test_loads_one_after_another_while_sequences_run(served) -> None:
    sampling = Sampling(max_tokens=300, seed=8, ignore_eos=True)

    async def loads() -> list[Completion]:
        group = asyncio.create_task(served.engine.generate(PROMPT, 4, sampling))
        for seed in (21, 22, 23):
            await asyncio.sleep(0.05)
            await served.engine.load(served.change_weights(seed))
        return await group

    for completion in served.call(loads()):
        assert completion.versions == sorted(completion.versions)
        assert len(completion.token_ids) == 300
    for completion in generate(served):
        assert_logprobs_match(served, completion, Sampling())


@pytest.mark.parametrize("loads", ["asleep", "awake"])
def test_sequences_in_flight_outlast_a_sleep(served, loads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU that is shared, whose memory is given back; a CPU keeps its own. After it comes a load, before or
    after the waking, also of the version that was there."""
    served.call(served.engine.load(served.change_weights(seed=30)))
    monkeypatch.setattr(engine_vllm, "shares_gpu", lambda config: True)
    sampling = Sampling(max_tokens=400, seed=3, ignore_eos=True)

    async def asleep() -> list[Completion]:
        start = served.engine.sampled().num_tokens
        group = asyncio.create_task(served.engine.generate(PROMPT, 4, sampling))
        while served.engine.sampled().num_tokens - start < 40:
            await asyncio.sleep(0.001)
        await served.engine.sleep()
        publication = served.change_weights(seed=31)
        if loads == "asleep":
            await served.engine.load(publication)
        if served.name == "vllm":
            before = served.engine.sampled().num_tokens
            await asyncio.sleep(0.2)
            assert served.engine.sampled().num_tokens == before < start + 4 * 400
        await served.engine.wake()
        if loads == "awake":
            await served.engine.load(publication)
        return await group

    old_version = served.version
    for completion in served.call(asleep()):
        assert len(completion.token_ids) == 400
        assert set(completion.versions) <= {old_version, served.version}
        if served.name == "vllm":
            assert set(completion.versions) == {old_version, served.version}
    for completion in generate(served):
        assert_logprobs_match(served, completion, Sampling())


def test_a_damaged_publication_is_refused_and_the_old_weights_serve_on(served) -> None:
    before = generate(served)
    state = {name: tensor.clone() for name, tensor in served.model.state_dict().items()}
    version = served.version
    publication = served.change_weights(seed=3)
    file = Path(publication.directory) / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 0x10
    file.write_bytes(data)
    with pytest.raises(WeightError, match=r"checksum .* manifest says"):
        served.call(served.engine.load(publication))
    served.model.load_state_dict(state)
    served.version = version
    assert served.call(served.engine.version()) == version
    assert generate(served) == before


def test_a_publication_that_was_never_completed_is_refused(served, tmp_path: Path) -> None:
    before = generate(served)
    with pytest.raises(WeightError, match="never completed"):
        served.call(served.engine.load(Publication(str(tmp_path), served.version + 1)))
    assert generate(served) == before
