"""Engines of several policies. Adapters of one model are in one engine, and every request names its own. Whole models
are in engines of their own, which take their part of what is published."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from safetensors.torch import load_file

from penstock.conf.errors import DataError, WeightError
from penstock.workers.protocols import Completion, Publication, SampleCall, Sampling
from tests.publications import write_publication
from tests.workers.rollout.conftest import VLLM, AdapterEngineUnderTest, EngineUnderTest
from tests.workers.rollout.test_engine_contract import (
    PROMPT,
    TOLERANCE,
    assert_logprobs_match,
    continued_logprobs,
    generate,
)

POLICIES = ("solver", "proposer")
Subject = TypeVar("Subject", bound=EngineUnderTest)


class PoliciesUnderTest(AdapterEngineUnderTest):
    """An engine of two policies. The checking model has the weights of one at a time."""

    policies = POLICIES

    def publish(self, seed: int, policies: tuple[str, ...] = POLICIES) -> Publication:
        """A version, not loaded yet, whose policies differ."""
        tensors, self.states = {}, {}
        for number, policy in enumerate(policies):
            self.change_weights(100 * seed + number)
            self.version -= 1
            self.states[policy] = {name: one.clone() for name, one in self.model.state_dict().items()}
            own = load_file(self.root / f"v{self.version + 1:08d}" / "model.safetensors")
            tensors |= {f"{policy}/{name}": one.clone() for name, one in own.items()}  # its file is written again
        self.version += 1
        return write_publication(self.root / "both", self.version, tensors.items())

    def check(self, policy: str) -> None:
        self.model.load_state_dict(self.states[policy])


def opened(
    request: pytest.FixtureRequest, kind: Callable[[str, Path, Path], Subject], model: Path, root: Path
) -> Iterator[Subject]:
    """The engine of a fixture, closed after it."""
    if request.param == "vllm":
        pytest.importorskip("vllm", reason="vLLM is not installed: its engine is not tested")
        request.getfixturevalue("warm_spawn")
    subject = kind(request.param, model, root)
    yield subject
    subject.close()


@pytest.fixture(scope="module", params=["hf", pytest.param("vllm", marks=VLLM)])
def served(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PoliciesUnderTest]:
    yield from opened(request, PoliciesUnderTest, tiny_model, tmp_path_factory.mktemp("policies"))


def test_each_policy_begins_as_the_model_and_answers_by_its_own_adapter(served: PoliciesUnderTest) -> None:
    if served.version == 0:
        first = [generate(served, 2, policy=policy) for policy in POLICIES]
        assert [one.token_ids for one in first[0]] == [one.token_ids for one in first[1]]
        assert_logprobs_match(served, first[0][0], Sampling())
    served.call(served.engine.load(served.publish(seed=1)))
    found = {policy: generate(served, 2, policy=policy, ignore_eos=True) for policy in (*POLICIES, POLICIES[0])}
    for policy, completions in found.items():
        served.check(policy)
        for completion in completions:
            assert set(completion.versions) == {served.version}
            assert_logprobs_match(served, completion, Sampling())


def test_samples_for_a_server_are_of_the_policy_that_they_name(served: PoliciesUnderTest) -> None:
    served.call(served.engine.load(served.publish(seed=2)))
    for policy in POLICIES:
        served.check(policy)
        sampling = Sampling(max_tokens=8, seed=5, ignore_eos=True, policy=policy)
        output = served.call(served.engine.sample(None, SampleCall(PROMPT, 1, sampling, prompt_logprobs=True)))
        rows = served.model(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
        said = rows.gather(-1, torch.tensor(PROMPT[1:])[:, None])[:, 0].detach()
        torch.testing.assert_close(torch.tensor(output.prompt_logprobs[1:]), said, rtol=0, atol=TOLERANCE)
        assert_logprobs_match(served, output.samples[0], sampling)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_in_flight_goes_on_under_its_new_weights(served: PoliciesUnderTest, policy: str) -> None:
    served.call(served.engine.load(served.publish(seed=3)))
    old, publication = served.states[policy], served.publish(seed=4)

    async def load_in_flight() -> list[Completion]:
        before = served.engine.sampled().num_tokens
        sampling = Sampling(max_tokens=400, seed=3, ignore_eos=True, policy=policy)
        group = asyncio.create_task(served.engine.generate(PROMPT, 2, sampling))
        while served.engine.sampled().num_tokens - before < 40:
            await asyncio.sleep(0.001)
        await served.engine.load(publication)
        return await group

    for completion in served.call(load_in_flight()):
        assert set(completion.versions) == {served.version - 1, served.version}
        switch = completion.versions.index(served.version)
        served.model.load_state_dict(old)
        early = Completion(completion.token_ids[:switch], completion.logprobs[:switch], [], "", "length")
        assert_logprobs_match(served, early, Sampling())
        expected = continued_logprobs(served, completion, switch, served.states[policy])
        torch.testing.assert_close(torch.tensor(completion.logprobs[switch:]), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("policies", [("solver",), ("solver", "critic"), ("solver", "proposer", "judge")])
def test_a_publication_of_other_policies_is_refused(served: PoliciesUnderTest, policies: tuple[str, ...]) -> None:
    served.call(served.engine.load(served.publish(seed=5)))
    states, version = served.states, served.version
    with pytest.raises(WeightError, match=r"of none of the policies solver and proposer|of different layers"):
        served.call(served.engine.load(served.publish(6, policies)))
    served.states, served.version = states, version
    for policy in POLICIES:
        served.check(policy)
        assert_logprobs_match(served, generate(served, 1, policy=policy)[0], Sampling())


@pytest.mark.parametrize("policy", ["", "prposer"])
def test_a_request_of_no_policy_is_refused(served: PoliciesUnderTest, policy: str) -> None:
    with pytest.raises(DataError, match=rf"policy '{policy}': the engine has solver and proposer"):
        generate(served, policy=policy)
    with pytest.raises(DataError, match=rf"policy '{policy}': the engine has solver and proposer"):
        served.call(served.engine.sample(None, SampleCall(PROMPT, 1, Sampling(seed=1, policy=policy))))
    assert generate(served, 1, policy="proposer")


class OwnModelUnderTest(EngineUnderTest):
    """An engine of a policy that is a whole model. Another one is published with it, of other names and shapes."""

    policies = ("proposer",)

    def publish(self, seed: int) -> Publication:
        """A version, not loaded yet."""
        own = load_file(f"{self.change_weights(seed).directory}/model.safetensors")
        tensors = {f"proposer/{name}": one.clone() for name, one in own.items()}  # its file is written again
        others = {"solver/model.norm.weight": torch.ones(3), "solver/model.strange": torch.ones(2, 2)}
        return write_publication(self.root / "both", self.version, (others | tensors).items())


@pytest.fixture(scope="module", params=["hf", pytest.param("vllm", marks=VLLM)])
def own(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OwnModelUnderTest]:
    yield from opened(request, OwnModelUnderTest, tiny_model, tmp_path_factory.mktemp("own"))


def test_an_engine_loads_the_model_of_its_policy_alone(own: OwnModelUnderTest) -> None:
    for seed in (1, 2):
        own.call(own.engine.load(own.publish(seed)))
        for completion in generate(own, 2, policy="proposer", ignore_eos=True):
            assert set(completion.versions) == {own.version}
            assert_logprobs_match(own, completion, Sampling())


def test_an_engine_of_one_policy_answers_no_request_of_another(own: OwnModelUnderTest) -> None:
    for policy in ("solver", ""):
        with pytest.raises(DataError, match=f"policy '{policy}': the engine has proposer"):
            generate(own, 1, policy=policy)


def test_a_publication_without_the_model_of_the_policy_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    subject = OwnModelUnderTest("hf", tiny_model, tmp_path)
    try:
        with pytest.raises(WeightError, match="not the model that the engine serves"):
            subject.call(subject.engine.load(subject.change_weights(seed=3)))
        assert subject.call(subject.engine.version()) == 0
    finally:
        subject.close()
