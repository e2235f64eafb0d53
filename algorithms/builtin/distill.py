"""On-policy distillation: the student samples, a teacher judges every token.

    source ─▶ rollout ─▶ reverse_kl_advantage ─ token_advantage ─▶ train
                 └─▶ teacher ─────┘

No reward is asked for. The teacher is `model.paths.teacher`, of the same tokenizer.
"""

from functools import partial

from penstock.algorithms.distillation import reverse_kl_advantage
from penstock.algorithms.graph.columns import Column
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.algorithms.graph.functions import Renamed
from penstock.algorithms.losses import policy_loss
from penstock.algorithms.registry import algorithm
from penstock.conf.algorithms.preference import DistillConfig

TOKEN_ADVANTAGE = Column("token_advantage", "float32", "token")


@algorithm("distill")
def distill(cfg: DistillConfig) -> Dataflow:
    """Descent of the reverse KL to the teacher, on the student's own samples: 2306.13649."""
    flow = Dataflow()
    flow.rollout("policy", samples_per_prompt=cfg.group_size)
    flow.logprobs("teacher")
    judge = partial(reverse_kl_advantage, discount=cfg.discount)
    flow.compute(judge, per="sample", reads=["behavior_logprobs", "teacher_logprobs"], writes=[TOKEN_ADVANTAGE])
    loss = partial(policy_loss, surrogate="reinforce", aggregation=cfg.aggregation)
    return flow.train("policy", loss=Renamed(loss, "advantage", TOKEN_ADVANTAGE.name))
