"""Supervised fine-tuning: rows come with their response, and the loss is its negative log-likelihood.

source ─ prompt_ids, response_ids ─▶ train
"""

from functools import partial

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.algorithms.losses import sft_loss
from penstock.algorithms.registry import algorithm
from penstock.conf.algorithms.base import SftConfig


@algorithm("sft")
def sft(cfg: SftConfig) -> Dataflow:
    """Maximum likelihood on demonstrations."""
    flow = Dataflow().demonstrations()
    flow.train("policy", loss=partial(sft_loss, aggregation=cfg.aggregation))
    return flow
