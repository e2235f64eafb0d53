"""The trainer's weights as a HF model on the driver's machine, wherever its ranks are. Used by `controller.py` and
`session.py`."""

from penstock.orchestrator.fleet import Fleet
from penstock.orchestrator.ray_calls import answers


async def export_model(fleet: Fleet, directory: str) -> None:
    """Raises `DeadlineExceeded`, `WorkerDied`, `ResourceError`."""
    places = await fleet.places(directory)
    calls = [(name, handle.export.remote(places[name])) for name, handle in fleet.role("trainer")]
    await answers(calls, phase="export", timeout_s=fleet.config.trainer.collective_timeout_s)
    await fleet.collect(directory, places)
