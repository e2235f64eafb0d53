"""A causal language model that answers with the log-probabilities of given tokens, never with whole logits.

The hidden states of the response positions, and only those, go through the output layer in chunks. Each chunk's logits
are recomputed in backward, so `[tokens, vocabulary]` never exists at once; one chunk alone keeps its logits, which is
faster. Used by `trainer.py`, which shards it, and by straight-line loops.

Legend: B rows of the micro-batch, L padded tokens of prompt and response, N response tokens of all rows, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.conf.errors import ModelError, suggest

ENTROPY = ("none", "value", "gradient")
LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "mup_enabled")
"""Settings of models that do something between the output layer and the logits."""


class PolicyModel(nn.Module):
    """Wraps a HF causal language model (`.lm`); its parameters are the model's own.

    model = PolicyModel(load_causal_lm(path), temperature=1.0)
    logprobs_N, entropy_N = model(batch.input_ids_BL, batch.positions_N, batch.targets_N)
    """

    def __init__(self, lm: Any, *, temperature: float = 1.0, chunk_tokens: int = 2048) -> None:
        """`temperature`: of the sampling distribution; logits are divided by it. `chunk_tokens`: tokens whose logits
        exist at once.

        Raises `ModelError` for models whose logits are more than the output layer's result.
        """
        super().__init__()
        for name in LOGIT_CHANGES:
            if getattr(lm.config, name, None) not in (None, False, 1, 1.0):
                raise ModelError(
                    f"the model {lm.config.model_type!r} sets {name}={getattr(lm.config, name)}, which the trainer "
                    "would leave out: its log-probabilities would be wrong. Choose another model.path."
                )
        self.lm = lm
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens

    def forward(
        self, input_ids_BL: Tensor, positions_N: Tensor, targets_N: Tensor, entropy: str = "none"
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities `[N]` of `targets_N`, and entropies `[N]` of the distributions they are from, in nats,
        float32.

        `input_ids_BL`: int64, padded on the right. No mask and no positions are needed: attention is causal, so what
        is on the right reaches no real token, and each row starts at position 0. `positions_N`: int64, places in the
        flattened `[B * L]` that predict `targets_N` (a target's own place minus one). `entropy`: "none"; "value",
        without gradient; "gradient".
        """
        if entropy not in ENTROPY:
            raise ValueError(f"entropy={entropy!r}: unknown{suggest(entropy, ENTROPY)}")
        hidden_BLH = self.lm.base_model(input_ids=input_ids_BL, use_cache=False).last_hidden_state
        hidden_NH = hidden_BLH.flatten(0, 1).index_select(0, positions_N)
        if len(hidden_NH) <= self.chunk_tokens:
            return self._score(hidden_NH, targets_N, entropy)
        parts = []
        for hidden, targets in zip(hidden_NH.split(self.chunk_tokens), targets_N.split(self.chunk_tokens), strict=True):
            if torch.is_grad_enabled():
                part = checkpoint(self._score, hidden, targets, entropy, use_reentrant=False, preserve_rng_state=False)
            else:
                part = self._score(hidden, targets, entropy)
            parts.append(part)
        logprobs_N = torch.cat([part[0] for part in parts])
        return logprobs_N, None if entropy == "none" else torch.cat([part[1] for part in parts])

    def _score(self, hidden_NH: Tensor, targets_N: Tensor, entropy: str) -> tuple[Tensor, Tensor | None]:
        logits_NV = self.lm.get_output_embeddings()(hidden_NH)
        if self.temperature != 1.0:
            logits_NV = logits_NV.float() / self.temperature
        all_logprobs_NV = torch.log_softmax(logits_NV, dim=-1, dtype=torch.float32)
        # A clone and no view: in-place operations on a view would bypass FSDP's backward hook on what forward returns.
        logprobs_N = all_logprobs_NV.gather(1, targets_N.unsqueeze(1)).squeeze(1).clone()
        if entropy == "none":
            return logprobs_N, None
        # After the log-probabilities, so that recomputation in backward stops before it where it has no gradient.
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy == "gradient"):
            return logprobs_N, -(all_logprobs_NV.exp() * all_logprobs_NV).sum(dim=-1)


def load_causal_lm(
    path: str, *, dtype: str = "float32", attention: str = "sdpa", checkpoint_layers: bool = False
) -> Any:
    """A HF model from a directory or hub id, on the CPU, dropout switched off, ready to be trained.

    `dtype`: of the parameters. `attention`: transformers' name. `checkpoint_layers`: recompute every layer in
    backward. Dropout is off because the policy that is trained must be the one that sampled. Raises `ModelError` if
    there is no such model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = without_dropout(AutoConfig.from_pretrained(path))
        lm = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=getattr(torch, dtype), attn_implementation=attention
        )
    except (OSError, ValueError) as error:
        raise ModelError(f"model.path={path}: no causal language model can be loaded from there: {error}") from error
    if checkpoint_layers:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    return lm.train()


def without_dropout(config: Any) -> Any:
    """The model's configuration, changed in place: what is trained must be what sampled."""
    for name, value in config.to_dict().items():
        if name.endswith(("dropout", "pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def max_length(lm: Any) -> int | None:
    """Longest sequence that the model has positions for, in tokens; None: unbounded."""
    return getattr(lm.config, "max_position_embeddings", None)
