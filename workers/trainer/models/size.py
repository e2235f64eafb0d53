"""The size of a model, as the count of its operations needs it."""

from torch import nn

from penstock.workers.trainer.flops import ModelSize


def size_of(model: nn.Module, *, has_adapters: bool) -> ModelSize:
    """The size of a whole model, with or without its weights. `has_adapters`: they alone will be trained. Where its
    configuration does not say how wide the heads are, they are as wide as the hidden states."""
    config = getattr(getattr(model, "lm", model), "config", None)
    config = getattr(config, "text_config", config)  # of one that sees, too
    hidden, heads = getattr(config, "hidden_size", 0), getattr(config, "num_attention_heads", 1)
    head = getattr(config, "head_dim", None) or hidden // max(1, heads)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return ModelSize(num_parameters, getattr(config, "num_hidden_layers", 0), heads * head, has_adapters)
