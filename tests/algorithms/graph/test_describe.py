from penstock.algorithms.catalogue import build_dataflow
from penstock.algorithms.graph.columns import Column
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.algorithms.graph.describe import WIDTH, draw, in_order
from penstock.conf.algorithms import GrpoConfig, SftConfig

SFT = """\
                                ┌───────────────────┐
                                │ source  per group │
╭───────────────────────────────┤ the dataset       │
│                               ├───────────────────┤
╰── prompt_ids, response_ids ──▶│ train  per batch  │
                                │ policy, sft_loss  │
                                └───────────────────┘
read by no stage: task, response_text"""

GRPO = """\
                                               ┌────────────────────────────────┐
                                               │ source  per group              │
╭──────────────────────────────────────────────┤ the dataset                    │
│                                              ├────────────────────────────────┤
├────────── prompt_ids ───────────────────────▶│ rollout  per group             │
│ ╭────────────────────────────────────────────┤ policy, 8 samples a prompt     │
│ │                                            ├────────────────────────────────┤
├─┼──────── task ─────────────────────────────▶│ reward  per sample             │
│ ├──────── response_ids, response_text ──────▶│ reward.function                │
│ │ ╭──────────────────────────────────────────┤                                │
│ │ │                                          ├────────────────────────────────┤
├─┼─┼────── prompt_ids ───────────────────────▶│ reference  per sample          │
│ ├─┼────── response_ids ─────────────────────▶│ log-probabilities of reference │
│ │ │ ╭────────────────────────────────────────┤                                │
│ │ │ │                                        ├────────────────────────────────┤
│ │ ╰─┼──── reward ───────────────────────────▶│ group_advantage  per group     │
│ │   │ ╭──────────────────────────────────────┤                                │
│ │   │ │                                      ├────────────────────────────────┤
╰─┼───┼─┼── prompt_ids ───────────────────────▶│ train  per batch               │
  ╰───┼─┼── response_ids, behavior_logprobs ──▶│ policy, ppo_clip_loss          │
      ╰─┼── reference_logprobs ───────────────▶│                                │
        ╰── advantage ────────────────────────▶│                                │
                                               └────────────────────────────────┘
read by no stage: finish_reason, token_versions"""


def test_supervised_training_is_drawn():
    assert draw(build_dataflow(SftConfig())) == SFT


def test_grpo_with_a_reference_is_drawn():
    assert draw(build_dataflow(GrpoConfig(kl_coef=0.1))) == GRPO


def scored(reward):
    return reward


def test_stages_added_in_any_order_are_drawn_after_what_they_wait_for():
    flow = Dataflow()
    flow.train(loss=lambda logprobs, advantage: None)
    flow.compute(scored, name="rank", reads=["reward"], writes=["advantage"])
    flow.reward(scored)
    flow.rollout(samples_per_prompt=2)
    flow.check()
    assert [stage.name for stage in in_order(flow)] == ["source", "rollout", "reward", "rank", "train"]
    assert "│ scored" in draw(flow)


def test_many_columns_wrap_and_lines_stay_within_the_width():
    flow = Dataflow().rollout(samples_per_prompt=2).reward()
    names = [f"feature_number_{i:02}" for i in range(12)]
    flow.compute(scored, name="features", per="sample", reads=["reward"], writes=[Column(n, "float32") for n in names])
    flow.compute(scored, name="blend", reads=names, writes=["advantage"])
    flow.train(loss=lambda logprobs, advantage: None)
    picture = draw(flow.check())
    assert max(map(len, picture.splitlines())) <= WIDTH
    assert all(name in picture for name in names)


def test_every_arrow_ends_at_a_box_and_every_rail_ends():
    lines = draw(build_dataflow(GrpoConfig(kl_coef=0.1))).splitlines()
    arrows = [line for line in lines if "▶" in line]
    assert len(arrows) == 10
    assert all("▶│" in line for line in arrows)
    assert sum(line.count("╭") for line in lines) == sum(line.count("╰") for line in lines) == 5
