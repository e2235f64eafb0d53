"""The receiving side of `ipc`: vLLM's own, which gets handles in a form that reaches its process.

Handles of GPU memory contain classes. vLLM passes such things to its engine process only with
`VLLM_ALLOW_INSECURE_SERIALIZATION=1`, which makes it unpickle data from any source, and which both processes must have
for as long as they live. So the trainer pickles the handles (`streaming/senders.py`) and they are unpickled here, in
the worker that opens them: one field, from the run's own trainer, and nothing else.
"""

import pickle
from typing import Any

from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine, IPCWeightTransferUpdateInfo

PICKLED = "pickled_ipc_handles"


class PickledIpcEngine(IPCWeightTransferEngine):
    """Backend `penstock_ipc`. Only the form of the handles differs from vLLM's."""

    def parse_update_info(self, update_dict: dict[str, Any]) -> IPCWeightTransferUpdateInfo:
        """Parse the info, with pickled handles too. Raises `ValueError` as vLLM's does."""
        others = {key: value for key, value in update_dict.items() if key != PICKLED}
        if PICKLED in update_dict:
            others["ipc_handles"] = pickle.loads(update_dict[PICKLED])
        return super().parse_update_info(others)
