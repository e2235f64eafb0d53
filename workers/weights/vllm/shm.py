"""Loads a publication into a running vLLM engine: the worker's side of `RolloutEngine.load`.

vLLM creates one `ShmTransferEngine` in each of its worker processes (one a tensor-parallel rank). While it generates
on, `init_transfer_engine` has the file mapped and its page tables filled; once generation is paused,
`start_weight_update`, `update_weights` and `finish_weight_update` load it. Each worker maps the same file; vLLM's own
loaders take the slice that its rank holds. Checksums were found right by whoever calls, who holds a lock on the file
until all is loaded, or are checked here before anything of the model is touched.
"""

import threading
from dataclasses import dataclass
from typing import Any, cast

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from penstock.conf.errors import WeightError
from penstock.workers.protocols import Publication
from penstock.workers.weights.publication.reading import MappedWeights, open_publication


@dataclass(kw_only=True)
class ShmInitInfo(WeightTransferInitInfo):
    """The publication that is to be loaded next."""

    directory: str
    version: int


@dataclass(kw_only=True)
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """The fields of a `Publication`."""

    directory: str
    version: int
    verified_inode: int = 0
    """Of the file whose checksums the caller has compared and that it keeps locked; 0: compare them here."""


class ShmTransferEngine(WeightTransferEngine[ShmInitInfo, ShmUpdateInfo]):
    """Backend `penstock_shm`. Lifecycle: init (before each version; may be left out) → start → update (once) → finish.

    Linear layers of the CPU build and quantised ones are repacked after loading; vLLM's layerwise reload runs the
    loaders on fresh tensors, repacks, and copies into the tensors that compiled code holds on to.
    """

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo
    _prepared: tuple[MappedWeights, threading.Thread] | None = None

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        """Map the file and fill its page tables in a thread, so that the engine generates on. vLLM has no other call
        that brings word of a version before it is loaded."""
        mapped = MappedWeights(open_publication(Publication(init_info.directory, init_info.version)))
        thread = threading.Thread(target=mapped.populate, name="populate-publication", daemon=True)
        self._prepared = (mapped, thread)
        thread.start()

    def start_weight_update(self) -> None:
        """The layerwise reload begins in `receive_weights`, after the checks: a damaged publication then changes
        nothing."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class's, without its `torch.accelerator.synchronize()`: that raises on a CPU, and elsewhere the
        copies below run in the stream of the next forward pass."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        """Raises `WeightError`; its message reaches the engine's owner as the failure of this call."""
        mapped = self._mapped(update_info)
        if mapped.inode != update_info.verified_inode:
            mapped.verify()
        expected = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)
        loaded = cast(Any, self.model).load_weights(mapped.tensors())
        finalize_layerwise_reload(self.model, self.model_config)
        repack_tied_layers(self.model)
        if loaded is not None and expected - loaded:
            raise WeightError(
                f"{mapped.manifest.file}: lacks the engine's parameters {', '.join(sorted(expected - loaded)[:5])}: "
                "the trainer's model and the engine's are not the same architecture."
            )

    def _mapped(self, update_info: ShmUpdateInfo) -> MappedWeights:
        """What `init_transfer_engine` has mapped, if it is what is to be loaded."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            mapped, thread = prepared
            thread.join()
            manifest = mapped.manifest
            if (str(manifest.directory), manifest.version) == (update_info.directory, update_info.version):
                return mapped
        return MappedWeights(open_publication(Publication(update_info.directory, update_info.version)))

    def finish_weight_update(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


def repack_tied_layers(model: torch.nn.Module) -> None:
    """Give layers that share their weight with one that came before, such as a tied `lm_head`, its packed form.

    vLLM's layerwise reload repacks the layer that the weight was loaded for only (its documentation says so), and the
    CPU build keeps a packed copy in each: the head would go on with the weights of the start. Where both are embeddings
    without bias, the one packed copy serves both; the head is a quarter of a small model.
    """
    owners: dict[int, torch.nn.Module] = {}
    for module in model.modules():
        owner = module
        for parameter in module.parameters(recurse=False):
            owner = owners.setdefault(id(parameter), module) if owner is module else owner
        method = getattr(module, "quant_method", None)
        if owner is module or not isinstance(method, QuantizeMethodBase):
            continue
        if _packs_alike(module, owner):
            module.cpu_linear = owner.cpu_linear
        else:
            method.process_weights_after_loading(module)


def _packs_alike(module: torch.nn.Module, owner: torch.nn.Module) -> bool:
    """Whether both are embeddings of the CPU build, unquantised, that hold the one weight and nothing else."""
    return all(
        hasattr(layer, "cpu_linear")
        and isinstance(getattr(layer, "quant_method", None), UnquantizedEmbeddingMethod)
        and [name for name, _ in layer.named_parameters(recurse=False)] == ["weight"]
        for layer in (module, owner)
    )
