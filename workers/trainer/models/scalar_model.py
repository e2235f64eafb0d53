"""A language model with one number for an output: a critic's value at each token, or a reward model's score of a whole
response.

Legend: B rows of the micro-batch, L padded tokens of prompt and response, K places asked for.
"""

from typing import Any

import torch
from torch import Tensor, nn

from penstock.conf.errors import ModelError
from penstock.workers.trainer.models.linear import use_fast_linears
from penstock.workers.trainer.models.policy_model import for_training, without_dropout
from penstock.workers.trainer.models.starting_weights import StartingWeights, without_weights

HEAD = "score.weight"


class ScalarModel(nn.Module):
    """Wraps a HF sequence classification model with one label (`.lm`); its parameters are the model's own."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        use_fast_linears(lm)
        self.lm = lm

    def forward(self, input_ids_BL: Tensor, positions_K: Tensor) -> Tensor:
        """The number at each place, `[K]` float32. `input_ids_BL`: int64, padded on the right. `positions_K`: int64,
        into the flattened `[B * L]`."""
        hidden_BLH = self.lm.base_model(input_ids=input_ids_BL, use_cache=False).last_hidden_state
        hidden_KH = hidden_BLH.flatten(0, 1).index_select(0, positions_K)
        # A clone and no view: in-place operations on a view would bypass FSDP's backward hook on what forward returns.
        return self.lm.score(hidden_KH).float().squeeze(-1).clone()


def open_scalar_lm(
    path: str, key: str, *, dtype: str = "float32", attention: str = "sdpa", checkpoint_layers: bool = False
) -> tuple[Any, StartingWeights]:
    """A sequence classification model with one label, without its weights, and the weights; from such a directory or
    from a causal model's, whose head is then new and all zero: a critic that begins by expecting nothing, a reward
    model without an opinion.

    `key`: the configuration's, for messages. Raises `ModelError` if there is no such model.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification

    options: dict[str, Any] = {"dtype": getattr(torch, dtype), "attn_implementation": attention}
    try:
        config = without_dropout(AutoConfig.from_pretrained(path, num_labels=1))
        has_head = any("SequenceClassification" in name for name in config.architectures or ())
        lm, weights = without_weights(
            lambda: AutoModelForSequenceClassification.from_config(config, **options),
            lambda: AutoModelForSequenceClassification.from_pretrained(path, config=config, **options),
            path,
            new=() if has_head else (HEAD,),
        )
    except (OSError, ValueError) as error:
        raise ModelError(f"{key}={path}: no model with a scalar head can be made from there: {error}") from error
    if not isinstance(getattr(lm, "score", None), nn.Linear):
        raise ModelError(f"{key}={path}: {type(lm).__name__} has no linear head `score`, which the trainer reads.")
    if not has_head:
        weights.add({HEAD: torch.zeros(lm.score.weight.shape)})
    lm.config.architectures = [type(lm).__name__]
    return for_training(lm, checkpoint_layers), weights
