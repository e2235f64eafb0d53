"""What runs in vLLM's worker processes (one a tensor-parallel rank): weight-transfer backends, which are the receiving
side of `RolloutEngine.load`, and calls that the processes answer (`WorkerCalls`).

`ShmTransferEngine` loads a publication. While the engine generates on, `init_transfer_engine` has the file mapped and
its page tables filled; once generation is paused, `start_weight_update`, `update_weights` and `finish_weight_update`
load it. Each worker maps the same file; vLLM's own loaders take the slice that its rank holds. A GPU copies from
page-locked memory at the rate of its bus: the files that take turns are locked once each, in that thread, since it
takes longer than the copy. Either the caller has
checked the checksums and holds a lock on the file until all is loaded, or they are checked here before the model is
changed.

`PickledIpcEngine` is vLLM's own `ipc`, which gets handles in a form that reaches its process. Handles of GPU memory
contain classes. vLLM passes such things to its engine process only with `VLLM_ALLOW_INSECURE_SERIALIZATION=1`, which
makes it unpickle data from any source, and which both processes must have for as long as they live. So the trainer
pickles the handles (`weight_senders.py`) and they are unpickled here, in the worker that opens them: one field, from
the run's own trainer, and nothing else.
"""

import pickle
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import set_num_threads
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine, IPCWeightTransferUpdateInfo
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from penstock.conf.errors import WeightError
from penstock.workers.protocols import Publication
from penstock.workers.runtime.host_memory import page_locked_file
from penstock.workers.weights.checkpoint_form import nonfinite_weights
from penstock.workers.weights.publication.publication_files import MappedWeights, WritableMappings
from penstock.workers.weights.vllm.plugin import PICKLED


@dataclass(kw_only=True)
class ShmInitInfo(WeightTransferInitInfo):
    """The publication that is loaded next."""

    directory: str
    version: int
    prefix: str = ""
    """Beginning of the names of the model's tensors, where several models are published together."""


@dataclass(kw_only=True)
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """The fields of a `Publication`."""

    directory: str
    version: int
    prefix: str = ""
    """See `ShmInitInfo`."""
    verified_inode: int = 0
    """Inode of the file whose checksums the caller has compared and that it keeps locked; 0: compare them here."""


class ShmTransferEngine(WeightTransferEngine[ShmInitInfo, ShmUpdateInfo]):
    """Backend `penstock_shm`. Lifecycle: init (before each version; may be left out) → start → update (once) → finish.

    Linear layers of the CPU build and quantised ones are repacked after loading; vLLM's layerwise reload runs the
    loaders on fresh tensors, repacks, and copies into the tensors that compiled code holds on to. Embeddings of the CPU
    build are loaded into those at once, and its experts are packed by a kernel that is made anew.
    """

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo
    _prepared: tuple[MappedWeights, threading.Thread] | None = None
    _files: WritableMappings | None = None
    """Page-locked files, where the model is on a GPU."""

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        """Map the file and fill its page tables in a thread, while the engine generates. vLLM has no other call
        that announces a version before it is loaded."""
        mapped = MappedWeights(Publication(init_info.directory, init_info.version), init_info.prefix)
        prepare = mapped.populate
        if torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
            self._files = self._files or WritableMappings(partial(page_locked_file, device=device))
            prepare = partial(mapped.read_from, self._files)
        thread = threading.Thread(target=prepare, name="populate-publication", daemon=True)
        self._prepared = (mapped, thread)
        thread.start()

    def start_weight_update(self) -> None:
        """Do nothing: the layerwise reload begins in `receive_weights`, after the checks. A damaged publication then
        changes nothing."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load like the base class, without its `torch.accelerator.synchronize()`, which raises on a CPU:
        `receive_weights` waits for the device's stream."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        """Load the publication. Raises `WeightError`; its message reaches the engine's owner as the failure of this
        call."""
        mapped = self._mapped(update_info)
        if mapped.inode != update_info.verified_inode:
            mapped.verify()
        held = {name for name, _ in self.model.named_parameters()}
        in_place = packed_embeddings(self.model) if self.model_config.quantization is None else []
        for layer in cast(list[Any], in_place):
            layer.cpu_linear = torch.nn.functional.linear  # lets the packed form go before there is a new one
        drop_kernels(self.model)
        parts = list(modules_without(self.model, in_place))
        for part in parts:
            initialize_layerwise_reload(part)
        expected = held & {name for name, _ in self.model.named_parameters()}  # without what quantization adds
        loaded = cast(Any, self.model).load_weights(mapped.tensors())
        for part in parts:
            finalize_layerwise_reload(part, self.model_config)
        repack(self.model, in_place)
        wait_for_device()
        if loaded is not None and expected - loaded:
            raise WeightError(
                f"{mapped.manifest.file}: lacks the engine's parameters {', '.join(sorted(expected - loaded)[:5])}: "
                "the trainer's model and the engine's are not the same architecture."
            )

    def _mapped(self, update_info: ShmUpdateInfo) -> MappedWeights:
        """The mapping that `init_transfer_engine` has made, if it is of the publication to be loaded; else a new
        one."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            mapped, thread = prepared
            thread.join()
            manifest = mapped.manifest
            if (str(manifest.directory), manifest.version) == (update_info.directory, update_info.version):
                return mapped
        return MappedWeights(Publication(update_info.directory, update_info.version), update_info.prefix)

    def finish_weight_update(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


class PickledIpcEngine(IPCWeightTransferEngine):
    """Backend `penstock_ipc`. Only the form of the handles differs from vLLM's."""

    def parse_update_info(self, update_dict: dict[str, Any]) -> IPCWeightTransferUpdateInfo:
        """Parse the info, with pickled handles too. Raises `ValueError` as vLLM's does."""
        fields = {key: value for key, value in update_dict.items() if key != PICKLED}
        if PICKLED in update_dict:
            fields["ipc_handles"] = pickle.loads(update_dict[PICKLED])
        return super().parse_update_info(fields)


class WorkerCalls:
    """The extension of vLLM's workers (`worker_extension_cls`): calls that an engine's worker processes answer.

    vLLM's CPU worker takes `torch.set_num_threads` away from its process once it binds threads. It imports this module
    before, and Penstock's engines bind none.
    """

    get_model: Callable[[], Any]
    """vLLM's own method."""

    def nonfinite_weights(self) -> list[str]:
        """Names of weights that are not finite numbers."""
        return nonfinite_weights(self.get_model())

    def use_threads(self, num_threads: int) -> None:
        """Compute with this number of threads from the next decode step on."""
        set_num_threads(num_threads)


def wait_for_device() -> None:
    """Wait until the device has copied everything: only then may the file be unmapped and unlocked, and another version
    be written into it."""
    if torch.accelerator.is_available():
        torch.accelerator.current_stream().synchronize()


def drop_kernels(model: torch.nn.Module) -> None:
    """Drop the kernels of the CPU build's experts, so that vLLM makes new ones. It packs experts only when it makes
    their kernel: the old one would read unpacked weights as packed ones."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    for module in model.modules():
        method = getattr(module, "quant_method", None)
        kernel = getattr(method, "moe_kernel", None)
        if method is not None and isinstance(getattr(kernel, "fused_experts", None), CPUUnquantizedExperts):
            method.moe_kernel = None


def packed_embeddings(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Embeddings and heads of the CPU build that are loaded in place: it keeps them as they are in a publication, and a
    packed copy besides. Another copy for the time of loading would be as large as a quarter of a small model."""
    return [layer for layer in model.modules() if _is_packed_embedding(layer)]


def modules_without(module: torch.nn.Module, left_out: Collection[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    """The largest modules of a model that contain none of `left_out`: the whole model if it contains none."""
    if not any(layer in left_out for layer in module.modules()):
        yield module
    elif module not in left_out:
        for child in module.children():
            yield from modules_without(child, left_out)


def repack(model: torch.nn.Module, in_place: Collection[torch.nn.Module]) -> None:
    """Give what was loaded in place its packed form, and layers that share their weight with one that came before, such
    as a tied `lm_head`.

    vLLM's layerwise reload repacks the layer that the weight was loaded for only (its documentation says so), and the
    CPU build keeps a packed copy in each: the head would keep its first weights. Where both are embeddings
    without bias, the one packed copy serves both; the head is a quarter of a small model.
    """
    owners: dict[int, torch.nn.Module] = {}
    for module in model.modules():
        owner = module
        for parameter in module.parameters(recurse=False):
            owner = owners.setdefault(id(parameter), module) if owner is module else owner
        method = getattr(module, "quant_method", None)
        if not isinstance(method, QuantizeMethodBase) or (owner is module and module not in in_place):
            continue
        if owner is not module and _packs_alike(module, owner):
            module.cpu_linear = owner.cpu_linear
        else:
            method.process_weights_after_loading(module)


def _packs_alike(module: torch.nn.Module, owner: torch.nn.Module) -> bool:
    return _is_packed_embedding(module) and _is_packed_embedding(owner)


def _is_packed_embedding(layer: torch.nn.Module) -> bool:
    """Return whether a layer is an embedding of the CPU build, unquantised, that holds the one weight and nothing
    else."""
    return (
        hasattr(layer, "cpu_linear")
        and isinstance(getattr(layer, "quant_method", None), UnquantizedEmbeddingMethod)
        and [name for name, _ in layer.named_parameters(recurse=False)] == ["weight"]
    )
