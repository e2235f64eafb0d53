"""The starting weights of a model: read from its checkpoint range by range, into shards, so that no rank ever holds
more of the model than its own part.

    without_weights() ─▶ adapters, heads ─▶ an engine shards it ─▶ fill(shard, name, first_row, columns) each

Ranges are read where safetensors hold the parameters as the model has them, under names that transformers maps one to
one, or hold one tensor an expert, which transformers stacks. Where they do not (files of another kind, weights that are
made in another way), transformers loads the whole model, and ranges are cut from that: correct, but each rank holds the
whole for a moment, which is logged. Weights that are missing, or have another shape, are an error.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.workers.weights.checkpoint_form import SAFETENSORS, check_weights, match_keys, stored_files

CHUNK_BYTES = 4 * 2**20
"""Most bytes that are copied at once, and that stay mapped of a checkpoint: mapped pages count as memory."""
STORED_DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Dtypes that are a weight as it stands, with their bytes. Others are parts of a quantized one."""
ALL = slice(None)
_LOG = logging.getLogger("penstock")


class UnreadableByRange(Exception):
    """The reason why a checkpoint cannot be read range by range. Never leaves this module."""


class StoredTensors:
    """The tensors of safetensors files by their keys, mapped while they are read."""

    def __init__(self, files: Mapping[str, str]) -> None:
        """`files`: the path of the file of each key."""
        self.files = files
        self._path = ""
        self._file: Any = None
        self._num_touched = 0

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __getitem__(self, key: str) -> "StoredTensor":
        return StoredTensor(self, key)

    def slices(self, key: str, num_bytes: int = 0) -> Any:
        """safetensors' view of a tensor, of which `num_bytes` will be read. Releases what was mapped before, where that
        was much."""
        from safetensors import safe_open

        self._num_touched += num_bytes
        if self._file is None or self._path != self.files[key] or self._num_touched > CHUNK_BYTES:
            self._path, self._num_touched = self.files[key], num_bytes
            self._file = safe_open(self._path, framework="pt")
        return self._file.get_slice(key)


class StoredTensor:
    """A tensor of safetensors files, with the part of a tensor's interface that `StartingWeights` uses."""

    def __init__(self, tensors: StoredTensors, key: str) -> None:
        self._tensors, self._key = tensors, key
        slices = tensors.slices(key)
        self.shape = tuple(slices.get_shape())
        self.dtype: str = slices.get_dtype()

    def __getitem__(self, index: Any) -> Tensor:
        rows = index[0] if isinstance(index, tuple) else index
        row_bytes = STORED_DTYPES[self.dtype]
        for extent in self.shape[1:]:
            row_bytes *= extent
        return self._tensors.slices(self._key, (rows.stop - rows.start) * row_bytes)[index]


class StackedTensor:
    """A parameter that transformers stacks of one tensor an expert, or of several, whose rows it joins before. It is
    indexed by experts, which are read as they are asked for."""

    def __init__(self, experts: Sequence[Sequence[StoredTensor]]) -> None:
        """`experts`: the tensors of each, in the order in which they are joined."""
        self._experts = experts
        self.shape = (len(experts), sum(tensor.shape[0] for tensor in experts[0]), *experts[0][0].shape[1:])
        self.dtype = experts[0][0].dtype

    def __getitem__(self, experts: slice) -> Tensor:
        chosen = self._experts[experts]
        return torch.stack([torch.cat([tensor[0 : tensor.shape[0]] for tensor in tensors]) for tensors in chosen])


class StartingWeights:
    """The values of each parameter, by the name that it has before adapters are around it.

    weights.fill(shard, "model.layers.0.mlp.up_proj.weight", first_row=128)
    """

    def __init__(self, sources: Mapping[str, Any]) -> None:
        """`sources`: whole tensors, or what can be indexed as they can."""
        self._sources = dict(sources)

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add weights that no checkpoint has: of adapters and heads."""
        self._sources |= values

    @torch.no_grad()
    def fill(self, target: Tensor, name: str, first_row: int = 0, columns: slice = ALL) -> None:
        """Copy rows from `first_row` on, as many as `target` has, into it, cast to its dtype."""
        source, step = self._sources[name], _rows_at_once(target)
        for start in range(0, len(target), step):
            part = target[start : start + step]
            rows = slice(first_row + start, first_row + start + len(part))
            part.copy_(source[rows] if columns == ALL else source[rows, columns])

    @torch.no_grad()
    def fill_elements(self, target: Tensor, name: str, first: int) -> None:
        """Copy elements of the flattened parameter from `first` on, as many as `target` has, into it."""
        if not len(target):
            return
        source = self._sources[name]
        row = max(1, _num_elements(source.shape[1:]))
        first_row, last_row = first // row, -(-(first + len(target)) // row)
        target.copy_(source[slice(first_row, last_row)].reshape(-1).narrow(0, first - first_row * row, len(target)))


def without_weights(
    make: Callable[[], Any], load: Callable[[], Any], path: str, new: Collection[str] = ()
) -> tuple[Any, StartingWeights]:
    """A language model whose parameters have shapes but no values (they are on torch's meta device), and the values.

    `make`: the model from its configuration. `load`: the model with its weights, as transformers loads it, for
    checkpoints that cannot be read by range. `new`: parameters that the checkpoint need not have; they start at zero.
    Raises `ModelError` for other weights that it lacks.
    """
    from accelerate import init_empty_weights

    try:
        with init_empty_weights(include_buffers=False):
            lm = make()
        lm.tie_weights()  # which making them empty has undone
        check_weights(lm, path, new=new)
        sources = _stored_weights(lm, path, set(new))
    except UnreadableByRange as reason:
        with torch.random.fork_rng(devices=[]):  # new parameters are drawn
            lm = load()
        num_bytes = sum(parameter.nbytes for parameter in lm.parameters())
        _LOG.warning(
            "%s cannot be read range by range: %s. Each rank loads the whole model (%.2f GiB) before it is sharded.",
            path, reason, num_bytes / 2**30,
        )  # fmt: skip
        sources = take_weights(lm, lambda name: True)
    return lm, StartingWeights(sources)


def take_weights(lm: nn.Module, chosen: Callable[[str], bool]) -> dict[str, Tensor]:
    """The values of the parameters whose names are chosen, which then have none. Tied ones stay tied."""
    values = {}

    def emptied(name: str, parameter: nn.Parameter) -> nn.Parameter:
        values[name] = parameter.detach()
        return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)

    replace_parameters(lm, lambda name, _: chosen(name), emptied)
    return values


def replace_parameters(
    module: nn.Module, chosen: Callable[[str, nn.Parameter], bool], make: Callable[[str, nn.Parameter], nn.Parameter]
) -> None:
    """Put what `make` returns in the places of chosen parameters, under all names of each."""
    places = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        places[parameter].append(name)
    for parameter, names in places.items():
        if chosen(names[0], parameter):
            new = make(names[0], parameter)
            for name in names:
                owner, _, attribute = name.rpartition(".")
                setattr(module.get_submodule(owner), attribute, new)


def _stored_weights(lm: Any, path: str, new: set[str]) -> dict[str, Any]:
    """A source for each parameter of `lm`; its persistent buffers get their values here. Raises `UnreadableByRange`."""
    _check_plain(lm)
    stored = StoredTensors(stored_files(path))
    if not all(file.endswith(SAFETENSORS) for file in stored.files.values()):
        raise UnreadableByRange("it has no safetensors")
    found = match_keys(lm, stored)
    for name, key in found.converted.items():
        raise UnreadableByRange(f"transformers makes {name} of {key} and maybe others")
    keys, stacked = found.single, found.stacked
    names_of = defaultdict(list)
    for name, parameter in lm.named_parameters(remove_duplicate=False):
        names_of[parameter].append(name)
    sources: dict[str, Any] = {}
    for parameter, names in names_of.items():
        if names[0] in new:
            sources[names[0]] = torch.zeros(parameter.shape)
            continue
        if names[0] in stacked:
            sources[names[0]] = _stack(stored, names[0], stacked[names[0]], parameter)
            continue
        tied = [_checked(stored, name, keys[name], parameter) for name in names if name in keys]
        if not tied:
            raise UnreadableByRange(f"it has no {names[0]}")
        for other in tied[1:]:
            _check_same(names, tied[0], other)
        sources[names[0]] = tied[0]
    parameters = {name for names in names_of.values() for name in names}
    for name, buffer in lm.state_dict().items():
        if name not in parameters:
            if name not in keys:
                raise UnreadableByRange(f"it has no {name}")
            buffer.copy_(stored.slices(keys[name])[...])
    return sources


def _check_plain(lm: Any) -> None:
    """Raise `UnreadableByRange` where transformers makes something else of a checkpoint than what lies in its files."""
    if getattr(lm.config, "quantization_config", None) is not None:
        raise UnreadableByRange("it is quantized")
    if getattr(lm.config, "transformers_weights", None) is not None:
        raise UnreadableByRange("its configuration names a file of weights of its own")
    if lm.dtype != torch.float32 and (lm._keep_in_fp32_modules_strict or lm._keep_in_fp32_modules):
        raise UnreadableByRange(f"{type(lm).__name__} keeps some of its weights in float32")


def _checked(stored: StoredTensors, name: str, key: str, parameter: Tensor) -> StoredTensor:
    tensor = stored[key]
    if tensor.shape != tuple(parameter.shape) or tensor.dtype not in STORED_DTYPES:
        raise UnreadableByRange(
            f"{key} is {tensor.dtype} of shape {list(tensor.shape)}, and {name} has {list(parameter.shape)}"
        )
    return tensor


def _stack(stored: StoredTensors, name: str, keys: list[list[str]], parameter: Tensor) -> StackedTensor:
    tensors = [[stored[key] for key in some] for some in keys]
    stack = StackedTensor(tensors)
    kinds = {(tensor.dtype, tensor.shape[1:]) for some in tensors for tensor in some}
    if len(kinds) > 1 or stack.shape != tuple(parameter.shape) or stack.dtype not in STORED_DTYPES:
        raise UnreadableByRange(
            f"{keys[0][0]} and others are {stack.dtype} and make {list(stack.shape)}, and {name} has "
            f"{list(parameter.shape)}"
        )
    return stack


def _check_same(names: list[str], one: StoredTensor, other: StoredTensor) -> None:
    """Raise `UnreadableByRange` where stored weights that the configuration ties differ; only equal ones are tied."""
    step = _rows_at_once(torch.empty(one.shape, device="meta"))
    for start in range(0, one.shape[0], step):
        rows = slice(start, min(start + step, one.shape[0]))
        if not torch.equal(one[rows], other[rows]):
            raise UnreadableByRange(f"its configuration ties {' and '.join(names)}, which differ")


def _rows_at_once(tensor: Tensor) -> int:
    return max(1, CHUNK_BYTES // max(1, _num_elements(tensor.shape[1:]) * tensor.itemsize))


def _num_elements(shape: Iterable[int]) -> int:
    return torch.Size(shape).numel()
