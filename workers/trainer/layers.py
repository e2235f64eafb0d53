"""The decoder layers of a model: which they are, and how they are computed. Used by `trainer.py` and `fsdp.py`."""

from torch import nn

from penstock.workers.trainer.policy_model import PolicyModel
from penstock.workers.trainer.scalar_model import ScalarModel


def decoder_layers(model: PolicyModel | ScalarModel) -> list[nn.Module]:
    """The blocks that are sharded and compiled one by one: what the model's class calls indivisible."""
    names = set(model.lm._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def compile_layers(model: PolicyModel | ScalarModel) -> None:
    """Have each layer compiled when it is first called, in place, so that no parameter changes its name. Before an
    engine puts its hooks on them: those stay as they are, between the compiled parts.

    All layers share what is compiled, once with gradient and once without, for any number of rows and tokens. Where
    activations are recomputed, transformers' checkpoint calls the compiled layer once more: compiling checkpoint and
    layer together, which torch prefers, was seen to take several times as long to compile.
    """
    for layer in decoder_layers(model):
        layer.compile(dynamic=True)
