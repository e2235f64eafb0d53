"""Exports the trainer's weights as a HF model to the driver's machine, wherever its ranks are."""

import asyncio

from penstock.conf.errors import WeightError
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.ray_calls import answers
from penstock.workers.trainer.exported_files import check_exported


async def export_model(fleet: Fleet, directory: str) -> None:
    """Export the model. Raises `DeadlineExceeded`, `WorkerDied`, `ResourceError`, `WeightError`, `CheckpointError`."""
    try:
        places = await fleet.places(directory)
        calls = [(name, handle.export.remote(places[name])) for name, handle in fleet.role("trainer")]
        written = await answers(calls, phase="export", timeout_s=fleet.config.trainer.collective_timeout_s)
        await fleet.collect(directory, places)
        await asyncio.to_thread(check_exported, directory, written)
    except OSError as error:  # of this machine: an actor's is an error of Ray's
        raise WeightError(
            f"export to {directory}: cannot be written: {error}. Make room there, or see whether its file system "
            "answers. A checkpoint has the weights too: penstock export CHECKPOINT DIRECTORY."
        ) from None
