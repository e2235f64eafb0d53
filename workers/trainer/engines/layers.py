"""The decoder layers of a model: which they are, and how they are computed."""

from typing import Any

from torch import nn

from penstock.conf.errors import ConfigError
from penstock.workers.trainer.models.language_model import PolicyModel, ScalarModel


def decoder_layers(model: PolicyModel | ScalarModel) -> list[nn.Module]:
    """The blocks that are sharded and compiled one by one: what the model's class calls indivisible."""
    names = set(model.lm._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def compile_layers(model: PolicyModel | ScalarModel) -> None:
    """Have each layer compiled when it is first called, in place, so that no parameter changes its name. Call it before
    an engine puts its hooks on them: those stay as they are, between the compiled parts.

    All layers share what is compiled, with gradient and without, for any number of tokens and for one row or more.
    Where activations are recomputed, transformers' checkpoint calls the compiled layer once more: compiling checkpoint
    and layer together, which torch prefers, was seen to take several times as long to compile.
    """
    for layer in decoder_layers(model):
        layer.compile(dynamic=True)


def use_liger(lm: Any) -> None:
    """Put Liger's kernels in the places of a model's own norms, rotary embedding and gated activations, in place.
    Parameters stay as they are. Call it before `add_adapters`. Raises `ConfigError` where Liger is not installed or
    does not know the model."""
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise ConfigError(
            f"trainer.liger=true: the package cannot be imported ({error}). Run pip install liger-kernel, or leave it "
            "out."
        ) from error
    kind = lm.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:  # for which Liger would do nothing, and say so in a log
        raise ConfigError(
            f"trainer.liger=true: Liger has no kernels for models of type {kind!r}; it knows "
            f"{', '.join(sorted(MODEL_TYPE_TO_APPLY_LIGER_FN))}. Leave it out."
        )
    _apply_liger_kernel_to_instance(model=lm, fused_linear_cross_entropy=False, cross_entropy=False)
