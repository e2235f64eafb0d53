"""Checks before anything starts that the experiment trackers of a run can be used: their packages are there, and what
they need of the user. Nothing is sent.
"""

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec

from penstock.conf.errors import ConfigError
from penstock.conf.tracking import TrackingConfig


def check_trackers(tracking: TrackingConfig) -> str:
    """Describe the trackers in a few words. Raises `ConfigError`."""
    return ", ".join(CHECKS[name](tracking) for name in tracking.sinks if name in CHECKS)


def need(sink: str, modules: str, packages: str) -> None:
    """Raise `ConfigError` if a module of a sink cannot be found."""
    if any(find_spec(module) is None for module in modules.split()):
        raise ConfigError(
            f"tracking.sinks: {sink} needs what is not installed. `pip install {packages}`, or leave {sink} out."
        )


def _wandb(tracking: TrackingConfig) -> str:
    """Check that W&B has a key, or it would ask for one while the run goes on."""
    need("wandb", "wandb", "wandb")
    import wandb  # late: half a second

    mode = tracking.wandb.mode or os.environ.get("WANDB_MODE") or wandb.setup().settings.mode
    if mode == "online" and not wandb.login(prompt=False, verify=False):
        raise ConfigError(
            "tracking.sinks: wandb has no key. Run `wandb login`, set WANDB_API_KEY, or tracking.wandb.mode=offline."
        )
    return f"wandb {mode}"


def _mlflow(tracking: TrackingConfig) -> str:
    need("mlflow", "mlflow", "mlflow-skinny")
    uri = tracking.mlflow.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    if uri is None or uri.startswith("sqlite:"):
        need("mlflow", "sqlalchemy alembic", "sqlalchemy alembic")
    return f"mlflow at {uri or 'mlflow.db in output_dir'}"


def _trackio(tracking: TrackingConfig) -> str:
    need("trackio", "trackio", "trackio")
    server = os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL")
    if server:
        return f"trackio at {server.partition('?')[0]}"  # what follows has a token
    return f"trackio in {tracking.trackio.directory or os.environ.get('TRACKIO_DIR') or 'its own folder'}"


CHECKS: Mapping[str, Callable[[TrackingConfig], str]] = {"wandb": _wandb, "mlflow": _mlflow, "trackio": _trackio}
