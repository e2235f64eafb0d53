"""Loads a publication into a running vLLM engine: the worker's side of `RolloutEngine.update`.

vLLM creates one `ShmTransferEngine` in each of its worker processes (one a tensor-parallel rank) and calls, while
generation is paused: `start_weight_update`, `update_weights`, `finish_weight_update`. Each worker maps the same file;
vLLM's own loaders take the slice that its rank holds. Nothing of the model is touched before all checksums have been
found right.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from penstock.conf.errors import WeightError
from penstock.workers.protocols import Publication
from penstock.workers.weights.reading import MappedWeights, open_publication


@dataclass(kw_only=True)
class ShmInitInfo(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass(kw_only=True)
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """The fields of a `Publication`."""

    directory: str
    version: int


class ShmTransferEngine(WeightTransferEngine[ShmInitInfo, ShmUpdateInfo]):
    """Backend `penstock_shm`. Lifecycle: start → update (once) → finish.

    Linear layers of the CPU build and quantised ones are repacked after loading; vLLM's layerwise reload runs the
    loaders on fresh tensors, repacks, and copies into the tensors that compiled code holds on to.
    """

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        """The layerwise reload begins in `receive_weights`, after the checks: a damaged publication then changes
        nothing."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class's, without its `torch.accelerator.synchronize()`: that raises on a CPU, and elsewhere the
        copies below run in the stream of the next forward pass."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        """Raises `WeightError`; its message reaches the engine's owner as the failure of this call."""
        mapped = MappedWeights(open_publication(Publication(update_info.directory, update_info.version)))
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

    def finish_weight_update(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


def repack_tied_layers(model: torch.nn.Module) -> None:
    """Repack layers that share their weight with one that came before, such as a tied `lm_head`.

    vLLM's layerwise reload repacks the layer that the weight was loaded for only (its documentation says so), and the
    CPU build keeps a packed copy in each: the head would go on with the weights of the start.
    """
    owners: dict[int, torch.nn.Module] = {}
    for module in model.modules():
        shared = False
        for parameter in module.parameters(recurse=False):
            shared = shared or owners.setdefault(id(parameter), module) is not module
        method = getattr(module, "quant_method", None)
        if shared and isinstance(method, QuantizeMethodBase):
            method.process_weights_after_loading(module)
