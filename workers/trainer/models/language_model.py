"""A language model as a trainer calls it: one that answers with the log-probabilities of given tokens, never with whole
logits (`PolicyModel`), or with one number for an output (`ScalarModel`): a critic's value at each token, or a reward
model's score of a whole response. And its decoder layers: which they are, and how they are computed.

The hidden states of the response positions, and only those, go through the output layer, which scores them tile by tile
(`token_scores.py`): `[tokens, vocabulary]` never exists at once, unless it is small.

Legend: B rows of the micro-batch, L padded tokens of prompt and response, N response tokens of all rows, K places asked
for.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from penstock.conf.errors import ConfigError, ModelError, suggest
from penstock.workers.models.model_files import longest_context
from penstock.workers.pictures.processor import auto_class
from penstock.workers.trainer.models import packed_attention, vision
from penstock.workers.trainer.models.linear import use_fast_linears
from penstock.workers.trainer.models.starting_weights import StartingWeights, without_weights
from penstock.workers.trainer.models.streamed_layers import StreamedLayer
from penstock.workers.trainer.models.token_scores import ENTROPY, LogitChange, OutputLayer, whole_scores
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.trainer.update.picture_places import Pictures
from penstock.workers.trainer.update.token_layout import Blocks
from penstock.workers.weights.checkpoint_form import HEAD

FACTORS, DIVISORS = ("logit_scale", "lm_head_multiplier"), ("logits_scaling", "logits_mup_width_multiplier")
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Settings of models that multiply their output layer's product, divide it, or bend it below a soft cap."""
GAP_NATS = 1e-3
"""Largest mean difference, beyond rounding, from log-probabilities by the model's own logits. One that a model's logits
leave out is tenths of a nat and more; rounding in float32 is some millionths."""


class PolicyModel(nn.Module):
    """Wraps a HF causal language model (`.lm`); its parameters are the model's own.

    model = PolicyModel(load_causal_lm(path), temperature=1.0)
    logprobs_N, entropy_N = model(batch.input_ids_SL, batch.positions_N, batch.targets_N)
    """

    def __init__(self, lm: Any, *, temperature: float = 1.0, chunk_mib: float = 128.0) -> None:
        """`temperature`: of the sampling distribution; logits are divided by it. `chunk_mib`: memory for logits and
        what is made of them.

        `lm`'s output layer is replaced by one that scores tokens too, and on some CPUs its linear layers by faster ones
        (`linear.py`), with the same parameters. Raises `ModelError` for models whose output layer is not linear.
        """
        super().__init__()
        if lm.base_model is lm:
            raise ModelError(
                f"the model {lm.config.model_type!r} ({type(lm).__name__}) does not tell its layers from its output "
                "layer, between which the trainer picks the tokens that it scores. Choose another model.path."
            )
        layer = lm.get_output_embeddings()
        if type(layer) not in (nn.Linear, OutputLayer):
            raise ModelError(
                f"the model {lm.config.model_type!r} has a {type(layer).__name__} for an output layer; the trainer "
                "scores tokens with plain linear ones only. Choose another model.path, or leave its output layer as "
                "it is."
            )
        output_layer = OutputLayer.of(layer)
        output_layer.change = logit_change(lm.config)
        lm.set_output_embeddings(output_layer)
        use_fast_linears(lm)
        self.lm = lm
        self.temperature = temperature
        self.budget_bytes = int(chunk_mib * 2**20)

    def forward(
        self,
        input_ids_BL: Tensor | None,
        positions_N: Tensor,
        targets_N: Tensor,
        entropy: str = "none",
        temperature: float | Tensor | None = None,
        blocks: Blocks | None = None,
        own: bool = False,
        pictures: Pictures | None = None,
        likeliest: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of `targets_N`, `[N]` or `[N, J]`, in their shape, and entropies `[N]` of the distributions
        they are from, in nats, float32.

        `input_ids_BL`: int64, padded on the right; None: features of `pictures` are returned instead. No mask and no
        positions are needed: attention is causal, so what is on the right reaches no real token, and each row starts at
        position 0. With `blocks`, `[1, L]` without padding (`packed_attention.choose` has prepared the model).
        `positions_N`: int64, places in the flattened `[B * L]` that predict `targets_N` (a target's own place minus
        one). `entropy`: "none"; "value", without gradient; "gradient". `temperature`: in the place of the model's; of
        each target, the bits of float32 as int32 `[N]`, since an engine in bfloat16 rounds all floating-point
        arguments. `own`: by the logits of the model's own forward, all of them at once; for `check_scores`. `pictures`:
        those of a model with a vision tower, which has some in every call, if only a blank one. `likeliest`: a
        number of tokens; what `likeliest_tokens` says of them is returned instead.
        """
        if entropy not in ENTROPY:
            raise ValueError(f"entropy={entropy!r}: unknown{suggest(entropy, ENTROPY)}")
        if input_ids_BL is None:
            assert pictures is not None
            return vision.features(self.lm, pictures), None
        if own:
            read = inputs_of(self.lm, input_ids_BL, blocks, pictures)
            logits_BLV = self.lm(use_cache=False, **read).logits
            logits_NV = logits_BLV.flatten(0, 1).index_select(0, positions_N)
            return whole_scores(logits_NV, targets_N, self._at(temperature), entropy)
        hidden_NH = hidden_states(self.lm, input_ids_BL, positions_N, blocks, pictures)
        output_layer = self.lm.get_output_embeddings()
        if hidden_NH.shape[-1] != output_layer.in_features:
            raise ModelError(
                f"the model {self.lm.config.model_type!r} ({type(self.lm).__name__}) has hidden states of "
                f"{hidden_NH.shape[-1]} numbers, and an output layer for {output_layer.in_features}: something lies "
                "between them, which the trainer does not know. Choose another model.path."
            )
        logprobs_N, entropy_N = output_layer(
            hidden_NH, targets_N, temperature=self._at(temperature), entropy=entropy, budget_bytes=self.budget_bytes,
            likeliest=likeliest,
        )  # fmt: skip
        return logprobs_N, entropy_N

    def _at(self, temperature: float | Tensor | None) -> float | Tensor:
        if temperature is None:
            return self.temperature
        return temperature.view(torch.float32) if isinstance(temperature, Tensor) else temperature


@torch.no_grad()
def check_scores(
    model: PolicyModel, forward: Callable[..., Any], dtype: torch.dtype, ranks: Ranks, packs: bool = False
) -> None:
    """Compare a few tokens' log-probabilities with those by the logits of the model's own forward, in rows as the model
    itself takes them. Collective.

    `forward`: the engine's, around the model. `dtype`: that it computes in. `packs`: its rows are packed. Layers that
    were to be compiled are not. Raises `ModelError` where they differ, or where random numbers were drawn for them, on
    all ranks.
    """
    words = min(model.lm.get_input_embeddings().num_embeddings, model.lm.get_output_embeddings().out_features)
    ids_BL = (torch.arange(2 * 8, device=ranks.device) * 7919 % words).view(2, 8)
    positions_N = torch.arange(2 * 8, device=ranks.device).view(2, 8)[:, :-1].flatten()
    targets_N = ids_BL[:, 1:].flatten()
    blocks = Blocks.of([8, 8]).to(ranks.device) if packs else None
    before = _random_state(ranks.device)

    def scores(rows: Tensor, blocks: Blocks | None, own: bool) -> Tensor:
        pictures = vision.no_pictures(model.lm, [8, 8], rows.shape, ranks.device)
        logprobs_N: Tensor = forward(rows, positions_N, targets_N, "none", None, blocks, own, pictures)[0]
        return logprobs_N

    with torch.compiler.set_stance("force_eager"):
        ours_N = scores(ids_BL.view(1, -1) if packs else ids_BL, blocks, own=False)
        own_N = scores(ids_BL, None, own=True)
    # Models that can leave out layers draw a number for each, also where they leave out none.
    may_draw = any("layerdrop" in name for name in model.lm.config.to_dict())
    if any(ranks.gather_ranks(not may_draw and not torch.equal(before, _random_state(ranks.device)))):
        raise ModelError(
            f"model.path: {type(model.lm).__name__} draws at random while it trains, such as experts for a token: the "
            "model that is trained would not be the one that sampled. Choose another model.path."
        )
    rounding = torch.finfo(dtype).eps * float(own_N.abs().mean())
    gap = float((ours_N - own_N).abs().mean())
    if not all(gap <= GAP_NATS + rounding for gap in ranks.gather_ranks(gap)):
        known = ", ".join((*FACTORS, *DIVISORS, *CAPS))
        way_out = f", or set {packed_attention.KEY}=never, if it is packed rows that differ." if packs else "."
        raise ModelError(
            f"model.path: the trainer's log-probabilities of {type(model.lm).__name__} are {gap:.3g} nats a token away "
            "from those by the logits of its own forward: it does something to its hidden states or logits that the "
            f"trainer does not do. The trainer knows {known}. Choose another model.path{way_out}"
        )


def _random_state(device: torch.device) -> Tensor:
    """State of the generators that a model on this device draws from."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat(states)


def logit_change(config: Any) -> LogitChange:
    """What a model of this configuration makes of its output layer's product, as far as the names of settings tell.
    `check_scores` compares it with what it does."""
    text = config.get_text_config(decoder=True)

    def numbers(names: Sequence[str]) -> list[float]:
        values = [getattr(text, name, None) for name in names]
        return [float(value) for value in values if isinstance(value, int | float) and value]

    scale = math.prod(numbers(FACTORS)) / math.prod(numbers(DIVISORS))
    return LogitChange(scale, next(iter(numbers(CAPS)), None))


class ScalarModel(nn.Module):
    """Wraps a HF sequence classification model with one label (`.lm`); its parameters are the model's own."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        use_fast_linears(lm)
        self.lm = lm

    def forward(self, input_ids_BL: Tensor, positions_K: Tensor, blocks: Blocks | None = None) -> Tensor:
        """The number at each place, `[K]` float32. `input_ids_BL`: int64, padded on the right, or with `blocks` `[1,
        L]` without padding. `positions_K`: int64, into the flattened `[B * L]`."""
        hidden_KH = hidden_states(self.lm, input_ids_BL, positions_K, blocks)
        # A clone and no view: in-place operations on a view would bypass FSDP's backward hook on what forward returns.
        return self.lm.score(hidden_KH).float().squeeze(-1).clone()


def hidden_states(
    lm: Any, input_ids_BL: Tensor, positions_K: Tensor, blocks: Blocks | None, pictures: Pictures | None = None
) -> Tensor:
    """Hidden states of the last layer, after its norm, at places of the flattened `[B * L]`: `[K, H]`."""
    read = inputs_of(lm, input_ids_BL, blocks, pictures)
    reader = lm.base_model if pictures is None else packed_attention.text_model(lm)
    hidden_BLH: Tensor = reader(use_cache=False, **read).last_hidden_state
    return hidden_BLH.flatten(0, 1).index_select(0, positions_K)


def inputs_of(lm: Any, input_ids_BL: Tensor, blocks: Blocks | None, pictures: Pictures | None) -> dict[str, Any]:
    """Keyword arguments that call a model, or its base model, with tokens, packed or not, and with pictures."""
    return packed_attention.keywords(lm, blocks) | vision.keywords(lm, input_ids_BL, pictures)


def load_causal_lm(path: str, *, dtype: str = "float32", attention: str = "sdpa") -> Any:
    """A HF model from a directory or hub id, on the CPU, dropout switched off, ready to be trained.

    `dtype`: of the parameters. `attention`: transformers' name. Dropout is off because the policy that is trained must
    be the one that sampled. Raises `ModelError` if there is no such model.
    """
    from transformers import AutoConfig

    with load_errors(path):
        config = without_dropout(AutoConfig.from_pretrained(path))
        options = {"config": config, "dtype": getattr(torch, dtype), "attn_implementation": attention}
        return auto_class(config).from_pretrained(path, **options).train()


def open_causal_lm(
    path: str, *, dtype: str = "float32", attention: str = "sdpa", checkpoint_layers: bool = False
) -> tuple[Any, StartingWeights]:
    """The model of `load_causal_lm` without its weights, and the weights: for callers that want a part of each.
    `checkpoint_layers`: recompute every layer in backward. Raises `ModelError`."""
    from transformers import AutoConfig

    with load_errors(path):
        config = without_dropout(AutoConfig.from_pretrained(path))
        lm, weights = without_weights(
            lambda: auto_class(config).from_config(config, dtype=getattr(torch, dtype), attn_implementation=attention),
            lambda: load_causal_lm(path, dtype=dtype, attention=attention),
            path,
        )
        load_generation_config(lm, path)
    return prepared_for_training(lm, checkpoint_layers), weights


def open_scalar_lm(
    path: str, *, new: Collection[str] = (), dtype: str = "float32", attention: str = "sdpa",
    checkpoint_layers: bool = False,
) -> tuple[Any, StartingWeights]:  # fmt: skip
    """A sequence classification model with one label, without its weights, and the weights; from such a directory or,
    with `new=[HEAD]`, from a causal model's, whose head is then new and all zero: a critic that begins by expecting
    nothing, a reward model without an opinion. Raises `ModelError` if there is no such model, or no head that is not
    asked for.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification

    options: dict[str, Any] = {"dtype": getattr(torch, dtype), "attn_implementation": attention}
    with load_errors(path, "model with a scalar head can be made"):
        config = without_dropout(AutoConfig.from_pretrained(path, num_labels=1))
        has_head = any("SequenceClassification" in name for name in config.architectures or ())
        lm, weights = without_weights(
            lambda: AutoModelForSequenceClassification.from_config(config, **options),
            lambda: AutoModelForSequenceClassification.from_pretrained(path, config=config, **options),
            path,
            () if has_head else new,
        )
    if not isinstance(getattr(lm, "score", None), nn.Linear):
        raise ModelError(f"model.path={path}: {type(lm).__name__} has no linear head `score`, which the trainer reads.")
    if not has_head and HEAD in new:
        weights.add({HEAD: torch.zeros(lm.score.weight.shape)})
    lm.config.architectures = [type(lm).__name__]
    return prepared_for_training(lm, checkpoint_layers), weights


def decoder_layers(model: PolicyModel | ScalarModel) -> list[nn.Module]:
    """The blocks that are sharded and compiled one by one: what the model's class calls indivisible."""
    names = {StreamedLayer.__name__, *(model.lm._no_split_modules or ())}
    return [module for module in model.modules() if type(module).__name__ in names]


def stream_layers(model: PolicyModel | ScalarModel) -> None:
    """Have each layer computed in chunks of tokens, forward and backward, in place. Call it after `add_adapters`, and
    before an engine shards the layers. Raises `ConfigError` for a model whose layers cannot be computed so."""
    packed_attention.prepare_parts(model.lm)
    layers = decoder_layers(model)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if child in layers:
                setattr(module, name, StreamedLayer(child))


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


def max_length(lm: Any) -> int | None:
    """Longest sequence that the model has positions for, in tokens; None: unbounded."""
    return longest_context(lm.config.to_dict())


@contextmanager
def load_errors(path: str, what: str = "causal language model can be loaded") -> Iterator[None]:
    """Raise `ModelError` for what transformers raises where there is no such model."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ModelError(f"model.path={path}: no {what} from there: {error}") from error


def prepared_for_training(lm: Any, checkpoint_layers: bool) -> Any:
    if checkpoint_layers:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    return lm.train()


def load_generation_config(lm: Any, path: str) -> None:
    """Take the generation config of the checkpoint, where it has any, so that exports have it."""
    from transformers import GenerationConfig

    if lm.can_generate():
        with suppress(OSError):
            lm.generation_config = GenerationConfig.from_pretrained(path)


def without_dropout(config: Any) -> Any:
    """The model's configuration without dropout and noise of routers, changed in place: the trained model must be the
    one that sampled."""
    for name, value in config.to_dict().items():
        if re.search("dropout|pdrop$|layerdrop|jitter", name) and isinstance(value, float):
            setattr(config, name, 0.0)
    return config
