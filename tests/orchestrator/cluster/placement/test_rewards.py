"""What scores in each reward stage."""

from penstock.algorithms.catalogue import dataflow_of
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.orchestrator.cluster.placement.actors import answers_are_needed, plan_actors, reward_of
from penstock.orchestrator.configuration.compose import load_config


def test_a_function_of_the_dataflow_has_the_options_of_the_run() -> None:
    flow = Dataflow()
    flow.rollout(samples_per_prompt=4)
    flow.reward(lambda response: 1.0)
    config = load_config(["recipe=arithmetic", "+reward.options.scale=2"])
    assert reward_of(flow, "reward", config) == ("", {"strict": True, "scale": 2})


def test_each_of_several_rewards_has_its_own_and_a_judge_of_the_run_has_devices() -> None:
    own, far = "{function: judge, options: {rubric: short}}", "{function: judge, name: far, options: {url: x}}"
    rewards = f"rewards=[{{function: digits}}, {own}, {far}]"
    config = load_config(["recipe=arithmetic", rewards, "reward.judge.num_gpus=2"])
    flow = dataflow_of(config)
    found = {actor.stage: actor.num_gpus for actor in plan_actors(flow, config) if actor.role == "reward"}
    assert found == {"reward_digits": 0, "reward_judge": 2, "reward_far": 0}
    assert reward_of(flow, "reward_judge", config) == ("judge", {"rubric": "short"})
    assert reward_of(flow, "reward", config) == (config.reward.function, config.reward.options)  # evaluation's alone


def test_answers_are_needed_where_a_reward_of_the_run_asks_for_them() -> None:
    def needs(*words: str, held_out: bool = False) -> bool:
        config = load_config(["data.path=rows.csv", *words])
        return answers_are_needed(dataflow_of(config), config, held_out=held_out)

    assert needs()  # math_verify
    assert not needs("reward.function=digits")
    assert needs("rewards=[{function: digits}, {function: math_verify}]")
    assert not needs("algorithm=sft")
    assert needs("algorithm=sft", held_out=True)
    assert not needs("recipe=agent", held_out=True)
    flow = Dataflow()
    flow.rollout(samples_per_prompt=4)
    flow.reward(lambda response, answer: 1.0)
    config = load_config(["recipe=arithmetic"])
    assert answers_are_needed(flow, config)
